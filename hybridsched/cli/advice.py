"""What to do about a lane that stands as it does: the last sentence of `why`, and the `waits` of a batch."""

from __future__ import annotations

import re
from typing import NamedTuple

from hybridsched.cli.words import span
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateDecision
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord

_OFFLINE_SIGNALS = ("offline_inflight", "offline_peak", "work")
"""What the lane's own worker says; everything else comes from the replica's worker."""


class Around(NamedTuple):
    """What is known beside the decision. Times are server ms."""

    now_ms: float
    replica: ReplicaRecord | None = None
    lane: LaneRecord | None = None
    policy_problem: str = ""
    """Why the policy worker has no policy in force, or not the newest."""
    slurm: bool = False
    """The pool's replicas and its offline work are Slurm jobs."""
    replicas: tuple[str, ...] = ()
    """The replicas that are there; looked up where the pool is on Slurm."""


def advice(decision: GateDecision, around: Around) -> str:
    """One or two sentences, beginning with a blank; empty where nothing needs to be done."""
    text = _advice(decision, around)
    return f" {text}" if text else ""


def _advice(decision: GateDecision, around: Around) -> str:
    n, lane = decision.numbers, decision.lane
    if decision.reason in _NOT_THERE and (ended := _ended_job(lane, around)):
        return ended
    match decision.reason:
        case Reason.HELD:
            return _of_hold(decision, around.now_ms)
        case Reason.TELEMETRY_MISSING:
            if n.get("signal") in _OFFLINE_SIGNALS:
                return f"Start the offline worker of lane {lane}, or look at its log."
            return f"Start the online worker of {_name(decision, around)}, or look at its log."
        case Reason.TELEMETRY_STALE:
            return f"{_silent(decision, around)} It is dead, hangs or is cut off from Redis: look at its log."
        case Reason.ENGINE_UNHEALTHY:
            return f"Restart the engine{_at(around)}, or see why it does not answer /health."
        case Reason.ENGINE_WRONG_MODEL:
            served = "" if around.replica is None else f" {around.replica.model}"
            return f"Start the engine{_at(around)} with model{served}, or its workers with another --model."
        case Reason.ENGINE_HUNG | Reason.ENGINE_WRONG_ANSWER | Reason.ENGINE_MEMORY:
            return _start_again(around)
        case Reason.METRIC_FROZEN if "frozen_ms" not in n:
            return _start_again(around)
        case Reason.ENGINE_ASLEEP:
            return f"Wake the engine{_at(around)} with POST /wake_up; it is tested before it serves."
        case Reason.METRIC_MISSING | Reason.METRIC_STALE:
            return f"See what the engine{_at(around)} answers at /metrics."
        case Reason.METRIC_FROZEN:
            return (
                f"The engine{_at(around)} is paused or hangs, or its page is an old copy; the lane opens "
                "when a counter moves, or half a minute after its last request has left."
            )
        case Reason.FOREIGN_LOAD:
            return f"Find the client that calls the engine{_at(around)} directly."
        case Reason.ONLINE_QUEUED:
            return "If it lasts, online lacks replicas."
        case Reason.NO_ROOM:
            return "See offline.slots_for_online, engine.max_num_seqs and offline.kv_share of the policy."
        case Reason.FLOOR:
            return "Lower floor_gpus of the policy, or bring replicas back."
        case Reason.GPU_ACTIVE:
            return "Find the other process on the GPU."
        case Reason.AUTONOMY:
            return 'Set autonomy = "auto" in the policy once its suggestions are right.'
        case Reason.POLICY_CLOSED:
            return "Set another one with `hybridsched pool policy set FILE` if offline work is to run."
        case Reason.POLICY_MISSING:
            bad = "" if around.policy_problem.startswith("no policy") else around.policy_problem
            problem = f"What stands in Redis cannot be used: {bad}. " if bad else ""
            return f"{problem}Set one with `hybridsched pool policy set FILE`; it is taken up at once."
        case Reason.LEASE_EXPIRED:
            return "Start `hybridsched worker policy`, or look at its log."
        case Reason.QUEUE_UNKNOWN:
            return "See whether Redis is overloaded."
        case Reason.NO_WORK if around.lane is None and around.slurm:
            return (
                "Submit a batch: `hybridsched batch submit --sbatch FILE` (or sbatch workers/offline.sbatch)."
            )
        case Reason.NO_WORK if around.lane is None:
            return f"Start `hybridsched worker offline` for lane {lane}."
        case _:
            return ""


def _start_again(around: Around) -> str:
    if around.replica is not None and around.replica.job:
        return "Its job starts it again, or ends and is replaced; the job's log says why."
    return (
        f"Start the engine{_at(around)} again, unless its `hybridsched worker replica` does; it serves when "
        "it has answered a small request."
    )


_NOT_THERE = (Reason.TELEMETRY_MISSING, Reason.TELEMETRY_STALE, Reason.LEASE_EXPIRED)
_JOBS_NAME = re.compile(r"(.+)-(\d+(?:_\d+)?)")
"""The name that a replica has by its Slurm job."""


def _ended_job(lane: str, around: Around) -> str:
    """That the replica of a lane was a Slurm job which is gone, and what is there now; empty: it was none."""
    name = _JOBS_NAME.fullmatch(lane)
    if not around.slurm or around.replica is not None or name is None:
        return ""
    kind, job = name.groups()
    alike = [one for one in around.replicas if (found := _JOBS_NAME.fullmatch(one)) and found[1] == kind]
    now = (
        f"in its place there {'are' if len(alike) > 1 else 'is'} {', '.join(alike)}"
        if alike
        else ("no replica of its kind is there now: see `squeue` and the log of `hybridsched worker policy`")
    )
    return f"Its replica, Slurm job {job}, has signed off or ended (slurm-{job}.out says why); {now}."


def _of_hold(decision: GateDecision, now_ms: float) -> str:
    n = decision.numbers
    hold, until, count = n.get("hold"), n.get("until_ms"), n.get("holds")
    if "held_lane" not in n:  # only the gate is known, not the decision
        return "`hybridsched pool status` names the holds."
    scope = "the whole pool is held" if n["held_lane"] == "*" else f"lane {n['held_lane']} is held"
    left = f"for {span(until - now_ms)} more" if isinstance(until, int | float) else "until it is released"
    others = ""
    if isinstance(count, int | float) and count > 1:
        others = f" It is the longest of {count:.0f}: `hybridsched pool status` names all."
    command = f"--id {hold}" if hold else "" if n["held_lane"] == "*" else f"--lane {n['held_lane']}"
    how = f"`hybridsched pool release {command}".rstrip()
    return f"By this hold {scope} {left}; {how}` ends it.{others}"


def _silent(decision: GateDecision, around: Around) -> str:
    if decision.numbers.get("signal") in _OFFLINE_SIGNALS:
        worker = "" if around.lane is None or not around.lane.worker else f" ({around.lane.worker})"
        return f"The offline worker of lane {decision.lane}{worker} is silent{_since(around.lane, around)}."
    return f"The online worker of {_name(decision, around)} is silent{_since(around.replica, around)}."


def _since(record: ReplicaRecord | LaneRecord | None, around: Around) -> str:
    if record is None or record.at_ms is None or record.at_ms > around.now_ms:
        return ""
    return f", for {span(around.now_ms - record.at_ms)}"


def _name(decision: GateDecision, around: Around) -> str:
    if around.replica is not None:
        return f"replica {around.replica.replica}"
    named = decision.numbers.get("replica")
    return f"replica {named}" if isinstance(named, str) else f"lane {decision.lane}'s replica"


def _at(around: Around) -> str:
    return "" if around.replica is None or not around.replica.url else f" at {around.replica.url}"
