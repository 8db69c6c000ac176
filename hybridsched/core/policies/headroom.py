"""headroom: offline beside online on one engine, within what its iterations leave below the objectives.

Where online is idle it does as `consolidate` (or, without packing, `idle-window`): the next claim closes the
gate, and it opens again beside online, with a budget that further claims leave open while the load is small.
In a pack order offline slows nobody beyond what requests on the first replica take anyway; the first itself
has no offline work beside online. Without one, or with `peer_share` 0, the objectives alone are the limit.
Where the engine's iteration times are not known, or fit badly, nothing runs beside online.
"""

from __future__ import annotations

from hybridsched.core.headroom import longest_ms, room
from hybridsched.core.idle import Numbers, queued
from hybridsched.core.policies import consolidate, idle_window
from hybridsched.core.policies._budget import lane_budget
from hybridsched.core.policies._proposal import LaneFacts, Proposal, without_work
from hybridsched.core.policy import HeadroomPolicy, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, LatencyFit, ReplicaView

_ONLINE = (Reason.ONLINE_ACTIVE, Reason.IDLE_WINDOW)
"""All is known, and online is there or was a moment ago."""


def propose(facts: LaneFacts, policy: PoolPolicy) -> Proposal:
    """Open where online is idle, and beside it with a budget that the iterations have room for."""
    alone = (consolidate.propose if policy.pack.enabled else idle_window.propose)(facts, policy)
    replica = facts.replica
    if replica is None or facts.lane.own or alone.open or alone.reason not in _ONLINE:
        return alone  # what runs in another engine does not show in the iterations of this one
    fit = _believed(replica, policy)
    if fit is None:
        numbers = alone.numbers | _fit_numbers(replica)
        return Proposal(open=False, reason=Reason.LATENCY_UNKNOWN, numbers=numbers)
    waits = queued(facts.queue, replica.model, policy.idle)
    if waits is not None:
        return Proposal(open=False, reason=waits.reason, numbers=waits.numbers)
    nothing = without_work(facts.lane, policy)
    if nothing is not None:
        return nothing
    return _beside(facts, replica, fit, policy, alone)


def _beside(
    facts: LaneFacts, replica: ReplicaView, fit: LatencyFit, policy: PoolPolicy, alone: Proposal
) -> Proposal:
    headroom, age = policy.headroom, policy.idle.max_telemetry_age_ms
    backlog = replica.online_load.within(age)
    online = replica.online_inflight.within(age) or 0.0
    offline = facts.lane.offline_inflight.within(age) or 0.0
    levels = {
        "ttft_level": _level(replica.online_ttft_ms.within(age), policy.slo.ttft_ms),
        "tpot_level": _level(replica.online_tpot_ms.within(age), policy.slo.tpot_ms),
    }
    limit_ms = longest_ms(headroom, policy.slo, [level for level in levels.values() if level is not None])
    if policy.pack.enabled and headroom.peer_share > 0.0:
        limit_ms = min(limit_ms, _peer_ms(facts, headroom))
    found = room(
        fit,
        headroom,
        limit_ms=limit_ms,
        online=online,
        offline=offline,
        kv_use=replica.kv_use.within(policy.idle.max_metric_age_ms) or 0.0,
        most_slice_tokens=policy.offline.slice_tokens,
    )
    numbers: Numbers = {
        **alone.numbers,
        **levels,
        "online_inflight": online,
        "online_load": backlog,
        "max_backlog_tokens": headroom.max_backlog_tokens,
        "limit_ms": limit_ms,
        "iteration_ms": found.iteration_ms,
        **_fit_numbers(replica),
    }
    if backlog is None:
        numbers |= {"signal": "online_load", "age_ms": replica.online_load.age_ms, "max_age_ms": age}
        return Proposal(open=False, reason=Reason.TELEMETRY_MISSING, numbers=numbers)
    whole = lane_budget(facts, policy)
    sequences = min(whole.max_inflight, found.sequences)
    if whole.max_inflight <= 0:
        return Proposal(open=False, reason=Reason.NO_ROOM, numbers=numbers)
    if sequences <= 0 or backlog > headroom.max_backlog_tokens or found.iteration_ms > policy.slo.tpot_ms:
        return Proposal(open=False, reason=Reason.NO_HEADROOM, check_in_ms=alone.check_in_ms, numbers=numbers)
    return Proposal(
        open=True,
        reason=Reason.HEADROOM,
        budget=Budget(
            max_inflight=sequences,
            chunk_tokens=whole.chunk_tokens,
            slice_tokens=found.slice_tokens,
            beside_tokens=headroom.max_backlog_tokens,
        ),
        check_in_ms=alone.check_in_ms,
        numbers=numbers,
    )


def _peer_ms(facts: LaneFacts, headroom: HeadroomPolicy) -> float:
    """How long an iteration may be so that nobody here is served worse than on the first of the order. 0: the
    replica is the first, or has no place, or how it goes there is not known."""
    if facts.rank is None or facts.rank.rank == 0 or facts.first_tpot_ms is None:
        return 0.0
    return facts.first_tpot_ms * headroom.peer_share


def _believed(replica: ReplicaView, policy: PoolPolicy) -> LatencyFit | None:
    """The fit, if it is fresh and good enough, and is one at all."""
    fit, age = replica.latency, replica.latency_age_ms
    if fit is None or age is None or not 0.0 <= age <= policy.headroom.max_fit_age_ms:
        return None
    numbers = (fit.fixed_ms, fit.free_tokens, fit.token_ms, fit.cache_ms, fit.error)
    if any(value - value != 0.0 or value < 0.0 for value in numbers) or fit.token_ms <= 0.0:
        return None
    return fit if fit.error <= policy.headroom.max_error else None


def _fit_numbers(replica: ReplicaView) -> Numbers:
    fit = replica.latency
    return {
        "fit_error": None if fit is None else fit.error,
        "fit_age_ms": replica.latency_age_ms,
        "fit_samples": None if fit is None else float(fit.samples),
    }


def _level(measured: float | None, objective: float) -> float | None:
    return None if measured is None else measured / objective
