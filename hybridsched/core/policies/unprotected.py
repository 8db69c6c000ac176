"""unprotected: offline runs whatever online does. A baseline that shows the harm, not a policy to use."""

from __future__ import annotations

from hybridsched.core.policies._budget import lane_budget
from hybridsched.core.policies._proposal import LaneFacts, Proposal, without_work
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.reasons import Reason


def propose(facts: LaneFacts, policy: PoolPolicy) -> Proposal:
    """Open while the lane has work; no signal of online is looked at, only the slots it leaves."""
    nothing = without_work(facts.lane, policy)
    if nothing is not None:
        return nothing
    budget = lane_budget(facts, policy)
    if budget.max_inflight <= 0:
        return Proposal(open=False, reason=Reason.NO_ROOM)
    return Proposal(open=True, reason=Reason.UNPROTECTED, budget=budget)
