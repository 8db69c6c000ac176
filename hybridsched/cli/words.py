"""Decisions in plain words: for `why`, `decisions` and the tables of `pool status` and `top`."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateDecision, GateState

Numbers = dict[str, float | str | None]


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers within names by their value: hs-9 before hs-10."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


def span(ms: float | None) -> str:
    """A duration as one reads it: 40 ms, 1.5 s, 3 min 20 s, 5 h 10 min, 2 d 4 h."""
    if ms is None:
        return "unknown"
    if ms < 0:
        return f"-{span(-ms)}"
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000.0
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, inner, per, inner_per in (("min", "s", 60, 1), ("h", "min", 3600, 60), ("d", "h", 86400, 3600)):
        if seconds < per * (60 if unit == "min" else 24) or unit == "d":
            whole, rest = divmod(int(seconds), per)
            return f"{whole} {unit} {rest // inner_per} {inner}" if rest >= inner_per else f"{whole} {unit}"
    return f"{seconds:.0f} s"


def count(value: float | str | None, thing: str) -> str:
    """`3 online requests`, `1 online request`, `an unknown number of online requests`."""
    if not isinstance(value, int | float):
        return f"an unknown number of {thing}s"
    return f"{value:.0f} {thing}" if value == 1 else f"{value:.0f} {thing}s"


def own_engine_stands(how: str, inflight: float | None) -> str:
    """What a lane's own engine does while it stands still: `how` is `paused` or `asleep`."""
    if how == "paused" and inflight:
        return f"its own engine is paused, with {count(inflight, 'offline request')} standing still in it"
    return f"its own engine is {how}"


def because(decision: GateDecision) -> str:
    """Why, as a clause with the numbers that decided."""
    n = decision.numbers
    match decision.reason:
        case Reason.IDLE:
            idle = f"no online request for {_ms(n, 'online_idle_ms')} (window {_ms(n, 'window_ms')})"
            return idle + _place(n)
        case Reason.HEADROOM:
            return (
                f"beside {count(n.get('online_inflight'), 'online request')}, whose iterations take "
                f"{_ms(n, 'iteration_ms')} of the {_ms(n, 'limit_ms')} that they may{_place(n)}"
            )
        case Reason.NO_HEADROOM:
            return (
                f"{count(n.get('online_inflight'), 'online request')} leave no room: "
                f"{_number(n, 'online_load')} tokens of load (limit {_number(n, 'max_backlog_tokens')}), "
                f"an iteration of {_ms(n, 'iteration_ms')} (limit {_ms(n, 'limit_ms')})"
            )
        case Reason.LATENCY_UNKNOWN:
            return (
                "online runs there, and how long the engine's iterations take is not known well enough "
                f"(error {_number(n, 'fit_error')}, {_number(n, 'fit_samples')} samples)"
            )
        case Reason.UNPROTECTED:
            return "the policy keeps every gate open, whatever online does (a baseline, not for production)"
        case Reason.ONLINE_ACTIVE:
            return f"{count(n.get('online_inflight'), 'online request')} on its engine"
        case Reason.ONLINE_ARRIVED:
            return "its replica's worker has just taken an online request"
        case Reason.ONLINE_QUEUED:
            return (
                f"{count(n.get('queue_depth'), 'online request')} of the model unclaimed in the queue, "
                f"the oldest for {_ms(n, 'oldest_wait_ms')}"
            )
        case Reason.IDLE_WINDOW:
            return f"idle for only {_ms(n, 'online_idle_ms')} of the {_ms(n, 'window_ms')} window"
        case Reason.FOREIGN_LOAD:
            return (
                f"{count(n.get('foreign'), 'request')} in its engine that neither online nor our own offline "
                f"work accounts for ({_number(n, 'engine_requests')} in all)"
            )
        case Reason.GPU_ACTIVE:
            return (
                f"GPU activity {_number(n, 'gpu_activity')} with none of our work on it "
                f"(allowed {_number(n, 'max_gpu_activity')})"
            )
        case Reason.NO_ROOM:
            return "its engine has no sequence slot or KV cache left for offline"
        case Reason.FLOOR:
            return (
                f"opening it would leave online fewer than {_number(n, 'floor_gpus')} of "
                f"{_number(n, 'healthy_replicas')} healthy replicas"
            )
        case Reason.TELEMETRY_MISSING:
            return f"{_signal(n)} has not been published"
        case Reason.TELEMETRY_STALE:
            return f"{_signal(n)} is {_ms(n, 'age_ms')} old (limit {_ms(n, 'max_age_ms')})"
        case Reason.METRIC_MISSING:
            return f"its engine does not report {_signal(n)}"
        case Reason.METRIC_STALE:
            return f"{_signal(n)} of its engine is {_ms(n, 'age_ms')} old (limit {_ms(n, 'max_age_ms')})"
        case Reason.METRIC_FROZEN if "frozen_ms" not in n:
            return "its engine answers requests and its counters stand still: it is to be started again"
        case Reason.METRIC_FROZEN:
            return (
                f"its engine shows {count(n.get('engine_requests'), 'request')}, was given work and no token "
                f"counter moved for {_ms(n, 'frozen_ms')} (limit {_ms(n, 'frozen_after_ms')})"
            )
        case Reason.ENGINE_UNHEALTHY:
            return "its engine does not answer its health check, or has not yet passed its test"
        case Reason.ENGINE_WRONG_MODEL:
            return "its engine serves another model"
        case Reason.ENGINE_HUNG:
            return "its engine answers its health check and no request"
        case Reason.ENGINE_WRONG_ANSWER:
            return "its engine answers a small request otherwise than it did before"
        case Reason.ENGINE_MEMORY:
            return "its engine's processes have grown beyond health.memory_growth_mib of the policy"
        case Reason.ENGINE_ASLEEP:
            return "its engine was put to sleep"
        case Reason.QUEUE_UNKNOWN:
            return "the depth of the online queue could not be read"
        case Reason.EPOCH_UNKNOWN:
            return "its epoch in Redis is no number; the policy worker writes it anew"
        case Reason.HELD:
            return f"held by {n.get('held_by') or 'an operator'}: {n.get('why') or 'no reason given'}"
        case Reason.AUTONOMY:
            return f"the policy may only {n.get('autonomy', 'suggest')}, and would open it"
        case Reason.POLICY_CLOSED:
            return "the policy never opens a gate"
        case Reason.POLICY_MISSING:
            return "no policy is in force"
        case Reason.NO_WORK:
            return "no offline worker stands at it with work to run"
        case Reason.LEASE_EXPIRED:
            return "nobody renewed its gate: the policy worker is dead, stopped or cut off"
        case Reason.STOPPING:
            return "its own worker is being stopped"


def _place(n: Numbers) -> str:
    """Where the lane's replica stands in the pack order; empty under policies that do not pack."""
    if "rank" not in n:
        return ""
    rank, reach = n["rank"], n.get("reach")
    if not isinstance(rank, int | float) or not isinstance(reach, int | float):
        return ", its replica in no pack order: short iterations"
    if rank < reach:
        return f", rank {rank:g} of the {reach:g} that a burst reaches: short iterations"
    return f", rank {rank:g}, which no burst reaches ({reach:g}): full throughput"


def sentence(decision: GateDecision, *, since_ms: float | None) -> str:
    """One sentence on a lane: state, reason with numbers, since when."""
    since = "" if since_ms is None else f", for {span(since_ms)} now"
    if decision.state is GateState.OPEN:
        permits = f"; up to {count(decision.budget.max_inflight, 'offline request')} in flight"
        return f"Lane {decision.lane} is open{since}: {because(decision)}{permits}."
    return f"Lane {decision.lane} is closed{since}: {because(decision)}."


def numbers(decision: GateDecision) -> str:
    """The inputs that decided, on one line."""
    return " ".join(f"{name}={_named(name, value)}" for name, value in decision.numbers.items())


def local(at_ms: float) -> str:
    """A moment of the server's clock, as this machine's."""
    return datetime.fromtimestamp(at_ms / 1000.0, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _named(name: str, value: float | str | None) -> str:
    """`until_ms` is a moment, and none means that it does not end by itself."""
    if name != "until_ms":
        return _short(value)
    return repr(local(value)) if isinstance(value, int | float) else "released"


def _ms(given: Numbers, name: str) -> str:
    value = given.get(name)
    return span(value) if isinstance(value, int | float) else "an unknown time"


def _number(given: Numbers, name: str) -> str:
    return _short(given.get(name))


def _signal(given: Numbers) -> str:
    return str(given.get("signal") or "the replica's record")


def _short(value: float | str | None) -> str:
    if value is None:
        return "unknown"
    if not isinstance(value, int | float):
        return repr(value)
    return f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}"
