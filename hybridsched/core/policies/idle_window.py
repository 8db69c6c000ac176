"""idle-window: offline runs only where online has been idle for a whole window."""

from __future__ import annotations

from hybridsched.core.idle import assess
from hybridsched.core.policies._budget import lane_budget
from hybridsched.core.policies._proposal import LaneFacts, Proposal, without_work
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.reasons import Reason


def propose(facts: LaneFacts, policy: PoolPolicy) -> Proposal:
    """Open while the lane's engine is idle, there is work, and there is room for at least one request."""
    nothing = without_work(facts.lane, policy)
    if nothing is not None:
        return nothing
    verdict = assess(facts.replica, facts.lane, facts.queue, policy.idle, now_ms=facts.now_ms)
    if not verdict.idle:
        return Proposal(
            open=False, reason=verdict.reason, check_in_ms=verdict.check_in_ms, numbers=verdict.numbers
        )
    budget = lane_budget(facts, policy)
    if budget.max_inflight <= 0:
        return Proposal(open=False, reason=Reason.NO_ROOM, numbers=verdict.numbers)
    return Proposal(open=True, reason=verdict.reason, budget=budget, numbers=verdict.numbers)
