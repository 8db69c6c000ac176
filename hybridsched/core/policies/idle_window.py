"""idle-window: offline runs only where online has been idle for a whole window."""

from __future__ import annotations

import msgspec

from hybridsched.core.idle import assess
from hybridsched.core.policies._budget import lane_budget
from hybridsched.core.policies._proposal import LaneFacts, Proposal, without_work
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Signal

NONE_THERE = Signal(value=0.0, age_ms=0.0)


def propose(facts: LaneFacts, policy: PoolPolicy) -> Proposal:
    """Open while the lane's engine is idle, there is room for at least one request, and there is work.

    Work is asked for last: a lane with nothing to run says so only when nothing else closes it, so that a
    sick engine or silent telemetry is seen before there is a batch to suffer from it.
    """
    nothing = without_work(facts.lane, policy)
    said = facts.lane.offline_inflight.value
    if nothing is not None and (said is None or said - said != 0.0):
        # No worker stands there, so none of our work is in the engine: that is no want of telemetry. What is
        # no finite number is null in a record, and must decide the same.
        facts = msgspec.structs.replace(
            facts, lane=msgspec.structs.replace(facts.lane, offline_inflight=NONE_THERE)
        )
    verdict = assess(facts.replica, facts.lane, facts.queue, policy.idle, now_ms=facts.now_ms)
    if not verdict.idle:
        # Without work nothing waits for the end of the window: no cycle is brought forward for it.
        check_in = verdict.check_in_ms if nothing is None else None
        return Proposal(open=False, reason=verdict.reason, check_in_ms=check_in, numbers=verdict.numbers)
    budget = lane_budget(facts, policy)
    if budget.max_inflight <= 0:
        return Proposal(open=False, reason=Reason.NO_ROOM, numbers=verdict.numbers)
    if nothing is not None:
        return nothing
    return Proposal(open=True, reason=verdict.reason, budget=budget, numbers=verdict.numbers)
