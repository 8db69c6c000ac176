"""How many offline jobs Slurm may start on each node, and which must give their place back.

A node's count is the live number of a GRES without device files (`slurm.fill_gres`): Slurm starts an offline
job there while the count is above what running jobs hold. `plan(state, view, policy)` says what to tell
Slurm; `answered(state, instruction, at_ms)` is fed back when the call has ended, however it ended. Both are
pure.

Rules, in the order of their weight:

- A count that is not known, or was read too long ago, is set to 0: a reset of Slurm's fails open.
- A node with no lane open, or closed so short a while ago that it may be a burst, gets 0. Running jobs are
  left alone by that; none is started in their place.
- Otherwise the count is the open lanes plus the closed ones whose job is kept: a job keeps its place while
  its gate closes and opens. It is raised at once and lowered only after `fill_hysteresis_ms`.
- What was asked and is not yet seen is an expectation: it is not asked again before Slurm has answered and
  `reassert_ms` have passed. A count that was seen right and is not any more is set again at once.
- A job is requeued when its own gate (or, while it has none, every gate it could have) has been closed for
  `requeue_after_ms` of the job's own run; also when its node has been without any lane for that long. Counts
  are lowered before that in the list, so that no other job takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.values import Value

LOST_MS = 60_000.0
"""An instruction whose end nobody has told for this long is taken for lost (its executor died or dropped it):
four times the longest call to Slurm that an adapter allows."""


class FillWhy(StrEnum):
    """Why a count is set."""

    LANES_OPEN = "lanes_open"
    LANES_CLOSED = "lanes_closed"
    FLOOR = "floor"
    """Open lanes are left out, so that online keeps its floor of GPUs."""
    RESET = "reset"
    """Slurm had the right count and shows another: a reconfigure, a restart, somebody's hand."""
    LIVE_UNKNOWN = "live_unknown"
    NODE_UNUSABLE = "node_unusable"


class RequeueWhy(StrEnum):
    """Why a job gives its place back."""

    GATE_CLOSED = "gate_closed"
    NO_LANE = "no_lane"
    """It has no lane: its node has none, or all of them are closed, or held by others."""


class FillNode(Value, frozen=True, kw_only=True):
    """A node of the pool, as last read from Slurm."""

    node: str
    live: int | None
    """The live count; None when it could not be read. A GRES that Slurm does not list counts 0."""
    seen_ms: float | None
    """When that reading began."""
    usable: bool = True


class FillLane(Value, frozen=True, kw_only=True):
    """A lane and its gate, as the policy worker has decided it."""

    lane: str
    node: str
    open: bool
    closed_since_ms: float | None = None
    """Since when it has been closed without a break; None: not known, or open."""


class FillJob(Value, frozen=True, kw_only=True):
    """An offline job that holds a place. Jobs that wait are Slurm's business."""

    job: int
    node: str
    lane: str | None
    """The lane it has claimed; None: none yet, or not known."""
    started_ms: float
    """Start of this run; another one after each requeue."""
    leaving: bool = False


class FillView(Value, frozen=True, kw_only=True):
    """Everything a plan is made of. All times are on one clock."""

    now_ms: float
    nodes: tuple[FillNode, ...] = ()
    lanes: tuple[FillLane, ...] = ()
    jobs: tuple[FillJob, ...] = ()
    jobs_seen_ms: float | None = None
    """When the reading of the jobs began; None: they are not known, and nobody is requeued."""
    floor: int = 0
    """Lanes of the pool that never admit offline work (the policy's `floor_gpus`)."""


class SetFill(Value, frozen=True, kw_only=True, tag="set_fill"):
    node: str
    count: int
    why: FillWhy
    number: int = 0
    """Tells this order from every other one, so that an answer is taken for the right one."""


class RequeueJob(Value, frozen=True, kw_only=True, tag="requeue_job"):
    job: int
    why: RequeueWhy
    number: int = 0


Instruction = SetFill | RequeueJob


class Told(Value, frozen=True, kw_only=True):
    """An expectation: what was asked of Slurm and has not been seen yet."""

    count: int
    number: int
    asked_ms: float
    answered_ms: float | None = None


class AskedToLeave(Value, frozen=True, kw_only=True):
    """The same for a requeue, of one run of a job."""

    started_ms: float
    number: int
    asked_ms: float
    answered_ms: float | None = None


class FillState(Value, frozen=True, kw_only=True):
    """What is remembered between plans. Start with `FillState()`: nothing told, nothing trusted."""

    told: dict[str, Told] = msgspec.field(default_factory=dict)
    """By node."""
    settled: dict[str, int] = msgspec.field(default_factory=dict)
    """By node: the last count that was asked for and then seen."""
    leaving: dict[int, AskedToLeave] = msgspec.field(default_factory=dict)
    """By job."""
    bare: dict[str, float] = msgspec.field(default_factory=dict)
    """Nodes that have a job and no lane at all: since when they have been seen so without a break."""
    issued: int = 0
    """Number of the last instruction."""


def plan(state: FillState, view: FillView, policy: SlurmPolicy) -> tuple[FillState, tuple[Instruction, ...]]:
    """The next state and what to tell Slurm, in this order: counts that fall, counts that rise, requeues."""
    told, settled = _seen(state, view)
    leaving = _left(state.leaving, view)
    lanes = _by_node(view.lanes)
    admitting = _above_floor(view)
    bare = {j.node: state.bare.get(j.node, view.now_ms) for j in view.jobs if j.node not in lanes}
    requeues: list[RequeueJob] = []
    issued = state.issued
    for job in sorted(view.jobs, key=lambda j: j.job):
        why = _must_leave(job, lanes.get(job.node, []), bare.get(job.node), view, policy)
        if why is None:
            leaving.pop(job.job, None)
            continue
        before = leaving.get(job.job)
        if before is None or _ask_again(before.asked_ms, before.answered_ms, view.now_ms, policy):
            issued += 1
            leaving[job.job] = AskedToLeave(started_ms=job.started_ms, number=issued, asked_ms=view.now_ms)
            requeues.append(RequeueJob(job=job.job, why=why, number=issued))
    counts: list[tuple[int, SetFill]] = []
    for node in sorted(view.nodes, key=lambda n: n.node):
        kept = [j for j in view.jobs if j.node == node.node and not j.leaving and j.job not in leaving]
        current = told[node.node].count if node.node in told else settled.get(node.node, 0)
        count, why_count = _wanted(node, lanes.get(node.node, []), kept, current, admitting, view, policy)
        known = why_count is not FillWhy.LIVE_UNKNOWN
        expected = told.get(node.node)
        if expected is None and known and node.live == count:
            settled[node.node] = count
            continue
        if (
            expected is not None
            and expected.count == count
            and not _ask_again(expected.asked_ms, expected.answered_ms, view.now_ms, policy)
        ):
            continue
        if expected is None and known and settled.get(node.node) == count:
            why_count = FillWhy.RESET
        issued += 1
        told[node.node] = Told(count=count, number=issued, asked_ms=view.now_ms)
        rise = count - node.live if node.live is not None else -1
        counts.append((rise, SetFill(node=node.node, count=count, why=why_count, number=issued)))
    falling = [c for rise, c in counts if rise < 0]
    rising = [c for rise, c in counts if rise >= 0]
    after = FillState(told=told, settled=settled, leaving=leaving, bare=bare, issued=issued)
    return after, (*falling, *rising, *requeues)


def answered(state: FillState, instruction: Instruction, at_ms: float) -> FillState:
    """Slurm has answered, with a yes, a no or not in time: only what is seen next tells what it did.

    An answer to an instruction that another has replaced changes nothing.
    """
    match instruction:
        case SetFill(node=node, number=number):
            told = state.told.get(node)
            if told is None or told.number != number:
                return state
            ended = msgspec.structs.replace(told, answered_ms=at_ms)
            return msgspec.structs.replace(state, told={**state.told, node: ended})
        case RequeueJob(job=job, number=number):
            asked = state.leaving.get(job)
            if asked is None or asked.number != number:
                return state
            gone = msgspec.structs.replace(asked, answered_ms=at_ms)
            return msgspec.structs.replace(state, leaving={**state.leaving, job: gone})


# -- what has come true --------------------------------------------------------------------------------


def _seen(state: FillState, view: FillView) -> tuple[dict[str, Told], dict[str, int]]:
    """Expectations that a reading begun after the asking has not fulfilled yet; and what is settled.

    An expectation that its successor replaced may come true late; then the count is wrong and is set again.
    """
    told, settled = {}, {}
    for node in view.nodes:
        expected = state.told.get(node.node)
        if node.node in state.settled:
            settled[node.node] = state.settled[node.node]
        if expected is None:
            continue
        fresh = node.seen_ms is not None and node.seen_ms >= expected.asked_ms
        done = expected.answered_ms is not None or view.now_ms - expected.asked_ms >= LOST_MS
        if fresh and node.live == expected.count:
            settled[node.node] = expected.count
        # One that is seen before its answer may have been so all along: the order is still under way.
        if not (done and fresh and node.live == expected.count):
            told[node.node] = expected
    return told, settled


def _left(leaving: dict[int, AskedToLeave], view: FillView) -> dict[int, AskedToLeave]:
    """Requeues not seen to have happened: the same run still holds its place, or nobody looked since."""
    runs = {j.job: j.started_ms for j in view.jobs}
    seen = view.jobs_seen_ms
    return {
        job: asked
        for job, asked in leaving.items()
        if seen is None or seen < asked.asked_ms or runs.get(job) == asked.started_ms
    }


def _ask_again(asked_ms: float, answered_ms: float | None, now_ms: float, policy: SlurmPolicy) -> bool:
    if answered_ms is None:
        return now_ms - asked_ms >= LOST_MS
    return now_ms - answered_ms >= policy.reassert_ms


# -- what is wanted ------------------------------------------------------------------------------------


def _by_node(lanes: Iterable[FillLane]) -> dict[str, list[FillLane]]:
    found: dict[str, list[FillLane]] = {}
    for lane in lanes:
        found.setdefault(lane.node, []).append(lane)
    return found


def _above_floor(view: FillView) -> frozenset[str]:
    """The open lanes that may admit: all but the floor's, those with a job on them first."""
    room = max(0, len(view.lanes) - view.floor)
    held = {j.lane for j in view.jobs}
    opened = sorted((r for r in view.lanes if r.open), key=lambda r: (r.lane not in held, r.node, r.lane))
    return frozenset(r.lane for r in opened[:room])


def _wanted(
    node: FillNode,
    lanes: list[FillLane],
    kept: list[FillJob],
    current: int,
    admitting: frozenset[str],
    view: FillView,
    policy: SlurmPolicy,
) -> tuple[int, FillWhy]:
    if node.live is None or node.seen_ms is None or view.now_ms - node.seen_ms > policy.max_age_ms:
        return 0, FillWhy.LIVE_UNKNOWN
    if not node.usable:
        return 0, FillWhy.NODE_UNUSABLE
    now = {r.lane for r in lanes if r.lane in admitting}
    burst = {
        r.lane
        for r in lanes
        if not r.open
        and r.closed_since_ms is not None
        and view.now_ms - r.closed_since_ms < policy.fill_hysteresis_ms
    }
    low = _places(now, lanes, kept)
    high = _places(now | burst, lanes, kept)
    count = max(low, min(current, high))
    if count:
        return count, FillWhy.LANES_OPEN
    return 0, FillWhy.FLOOR if any(r.open for r in lanes) else FillWhy.LANES_CLOSED


def _places(admitting: set[str], lanes: list[FillLane], kept: list[FillJob]) -> int:
    """Lanes that admit plus closed ones whose job is kept; 0 where none admits. Never more than lanes.

    A job without a lane will take one that admits, so it needs a place of its own only beyond those.
    """
    if not admitting:
        return 0
    names = {r.lane for r in lanes}
    held = {j.lane for j in kept if j.lane in names}
    homeless = sum(1 for j in kept if j.lane not in names)
    return min(len(names), max(len(admitting | held), len(held) + homeless))


def _must_leave(
    job: FillJob, lanes: list[FillLane], bare_ms: float | None, view: FillView, policy: SlurmPolicy
) -> RequeueWhy | None:
    """Whether a job has waited at closed gates for the policy's time. Anything not known: it stays."""
    if job.leaving or view.jobs_seen_ms is None or view.now_ms - view.jobs_seen_ms > policy.max_age_ms:
        return None
    if view.now_ms - job.started_ms < policy.requeue_after_ms:
        return None
    if job.lane is not None:
        own = next((r for r in view.lanes if r.lane == job.lane), None)
        return RequeueWhy.GATE_CLOSED if own is not None and _long_closed(own, view, policy) else None
    if bare_ms is not None:
        # Started where no lane is, as a reset of the counts allows; or the node's replica went away.
        return RequeueWhy.NO_LANE if view.now_ms - bare_ms >= policy.requeue_after_ms else None
    held = {j.lane for j in view.jobs if j.job != job.job}
    could = [r for r in lanes if r.lane not in held]
    return RequeueWhy.NO_LANE if all(_long_closed(r, view, policy) for r in could) else None


def _long_closed(lane: FillLane, view: FillView, policy: SlurmPolicy) -> bool:
    since = lane.closed_since_ms
    return not lane.open and since is not None and view.now_ms - since >= policy.requeue_after_ms
