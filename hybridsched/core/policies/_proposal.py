"""What a policy is given and what it returns: one signature for all of them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from hybridsched.core.idle import Numbers
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import NO_BUDGET, Budget, LaneView, QueueView, Rank, ReplicaView, Value


class LaneFacts(Value, frozen=True, kw_only=True):
    """Everything of the snapshot that concerns one lane."""

    now_ms: float
    lane: LaneView
    replica: ReplicaView | None
    """None: nothing was published by the lane's replica."""
    queue: QueueView | None
    rank: Rank | None = None
    """The replica's place in the pack order; None: it has none, or its lease is over."""
    reach: int = 0
    """Of the same order: ranks that online needs, bursts included."""
    first_tpot_ms: float | None = None
    """Of the same order: time per token on its first replica."""

    @property
    def far(self) -> bool:
        """Whether no burst to expect reaches the replica."""
        return self.rank is not None and self.rank.rank >= self.reach > 0


class Proposal(Value, frozen=True, kw_only=True):
    """What a policy wants of a lane, before holds, the floor and autonomy have their say."""

    open: bool
    reason: Reason
    budget: Budget = NO_BUDGET
    check_in_ms: float | None = None
    numbers: Numbers = msgspec.field(default_factory=dict)


PolicyFunction = Callable[[LaneFacts, PoolPolicy], Proposal]


def without_work(lane: LaneView, policy: PoolPolicy) -> Proposal | None:
    """A proposal when nobody stands at the lane or it has nothing to run.

    On Slurm the worker comes with its job, which starts when the lane is open: a job that waits is work.

    A lane with work in flight is not without work, even when nothing more is queued: closing it would end
    its last lines.
    """
    max_age_ms = policy.idle.max_telemetry_age_ms
    queued = lane.work.within(max_age_ms)
    if queued is not None:
        if queued > 0:
            return None
        running = lane.offline_inflight.within(max_age_ms)
        if running is None or running > 0:
            return None
    elif (lane.waiting_jobs.within(policy.slurm.max_age_ms) or 0.0) > 0:
        return None
    return Proposal(
        open=False,
        reason=Reason.NO_WORK,
        numbers={
            "work": lane.work.value,
            "age_ms": lane.work.age_ms,
            "offline_inflight": lane.offline_inflight.value,
            "waiting_jobs": lane.waiting_jobs.value,
        },
    )
