"""online-only: offline never runs. The other baseline: what online is like by itself."""

from __future__ import annotations

from hybridsched.core.policies._proposal import LaneFacts, Proposal
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.reasons import Reason


def propose(facts: LaneFacts, policy: PoolPolicy) -> Proposal:
    """Closed, always."""
    return Proposal(open=False, reason=Reason.POLICY_CLOSED)
