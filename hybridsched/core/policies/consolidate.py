"""consolidate: as idle-window, with online packed onto the fewest replicas that keep the objectives.

Where a replica stands in the pack order decides what its lane may do. Within reach of the largest burst to
expect a lane keeps its iterations short, because a request that spills over waits for the one that is
running; shortest when online has only just left, as it is likely to be back soon. Beyond reach lanes run at
full throughput. A lane whose place is not known counts as within reach.
"""

from __future__ import annotations

import msgspec

from hybridsched.core.idle import Numbers
from hybridsched.core.policies import idle_window
from hybridsched.core.policies._proposal import LaneFacts, Proposal
from hybridsched.core.policy import PackPolicy, PoolPolicy


def propose(facts: LaneFacts, policy: PoolPolicy) -> Proposal:
    """Open while the lane's engine is idle, with a budget by its place in the pack order."""
    pack = policy.pack
    if facts.far:
        here = msgspec.structs.replace(
            policy,
            offline=msgspec.structs.replace(policy.offline, slice_tokens=pack.far_slice_tokens),
        )
    else:
        here = msgspec.structs.replace(
            policy, idle=msgspec.structs.replace(policy.idle, window_ms=pack.gap_window_ms)
        )
    proposal = idle_window.propose(facts, here)
    if proposal.open and not facts.far:
        proposal = _in_a_gap(proposal, pack)
    where: Numbers = {
        "rank": None if facts.rank is None else float(facts.rank.rank),
        "reach": float(facts.reach),
    }
    return msgspec.structs.replace(proposal, numbers=proposal.numbers | where)


def _in_a_gap(proposal: Proposal, pack: PackPolicy) -> Proposal:
    """With shorter iterations while online has only just left, and a look at when that is over."""
    idle_ms = proposal.numbers.get("online_idle_ms")
    budget = proposal.budget
    if pack.gap_slice_tokens <= 0 or not isinstance(idle_ms, float) or idle_ms >= pack.gap_ms:
        return proposal
    if 0 < budget.slice_tokens <= pack.gap_slice_tokens:
        return proposal
    return msgspec.structs.replace(
        proposal,
        budget=msgspec.structs.replace(budget, slice_tokens=pack.gap_slice_tokens),
        check_in_ms=pack.gap_ms - idle_ms,
    )
