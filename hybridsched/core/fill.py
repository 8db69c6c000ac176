"""How many offline jobs Slurm may start on each node, and which must give their place back.

A node's count is the live number of a GRES that Slurm does not consume (`slurm.fill_gres`, `no_consume` in
slurm.conf). It is the gate, and says how many free lanes are open there: at 0 Slurm starts no offline job on
the node, else it starts them up to the node's places, a second GRES (`slurm.place_gres`) that is consumed and
never changed live. A count that is consumed must not be steered: slurmctld takes a node whose jobs hold some
of it out of service at the next registration that finds another count than the last one.
`plan(state, view, policy)` says what to tell Slurm; `answered(state, instruction, at_ms)` is fed back when
the call has ended, however it ended. Both are pure.

Rules, in the order of their weight:

- A count that is not known, or was read too long ago, is set to 0: a reset of Slurm's fails open.
- A node with no lane open, or closed so short a while ago that it may be a burst, gets 0. Running jobs are
  left alone by that; none is started in their place.
- Otherwise the count is the open lanes that no job has, less the jobs that are about to take one. A job keeps
  its lane and its place while its gate closes and opens. The count is raised at once, lowered at once when
  jobs have come, and lowered only after `fill_hysteresis_ms` when gates have closed.
- What was asked and is not yet seen is an expectation: it is not asked again before Slurm has answered and
  `reassert_ms` have passed. A count that was seen right and is not any more is set again at once.
- A lane serves one model. It counts only while a job that waits could take it, and jobs on their way to a
  lane of another model do not lower the count. A job of which no model is known could take any lane; while
  nobody waits every lane counts, for whoever comes.
- A job that has no lane, on a node where no lane serves its model, leaves after `wrong_node_ms`.
- A job is requeued when its own gate (or, while it has none, every gate it could have) has been closed for
  `requeue_after_ms` of the job's own run; also when its node has been without any lane, or the job's own lane
  has been gone, for that long. Counts are lowered before that, so that no other job takes its place.

Slurm may start more jobs at once than lanes are free, for it does not consume the count. The surplus is
bounded by the places; such a job loads nothing, takes the next lane of its node, or is requeued as above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from hybridsched.core.fill_values import (
    LOST_MS,
    AskedToLeave,
    FillJob,
    FillLane,
    FillNode,
    FillState,
    FillView,
    FillWhy,
    Instruction,
    RequeueJob,
    RequeueWhy,
    SetFill,
    Told,
)
from hybridsched.core.policy import SlurmPolicy


def plan(state: FillState, view: FillView, policy: SlurmPolicy) -> tuple[FillState, tuple[Instruction, ...]]:
    """The next state and what to tell Slurm, in this order: counts that fall, counts that rise, requeues."""
    told, settled = _seen(state, view)
    leaving = _left(state.leaving, view)
    lanes = _by_node(view.lanes)
    admitting = _above_floor(view)
    bare = {j.node: state.bare.get(j.node, view.now_ms) for j in view.jobs if j.node not in lanes}
    names = {r.lane for r in view.lanes}
    gone = [j.job for j in view.jobs if j.lane is not None and j.lane not in names]
    orphans = {job: state.orphans.get(job, view.now_ms) for job in gone}
    wrong = [j.job for j in view.jobs if j.lane is None and _stray(j, lanes.get(j.node, []))]
    strays = {job: state.strays.get(job, view.now_ms) for job in wrong}
    requeues: list[RequeueJob] = []
    issued = state.issued
    for job in sorted(view.jobs, key=lambda j: j.job):
        since = min((at for at in (bare.get(job.node), orphans.get(job.job)) if at is not None), default=None)
        why = _must_leave(job, lanes.get(job.node, []), since, view, policy)
        if why is None and _strayed(job, strays.get(job.job), view, policy):
            why = RequeueWhy.WRONG_NODE
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
        here = [j for j in view.jobs if j.node == node.node]
        coming = [j for j in here if not j.leaving and j.job not in leaving]
        current = told[node.node].count if node.node in told else settled.get(node.node, 0)
        there = (lanes.get(node.node, []), here, coming)
        count, why_count = _wanted(node, there, current, admitting, view, policy)
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
    after = FillState(told=told, settled=settled, leaving=leaving, bare=bare, orphans=orphans, issued=issued)
    after = msgspec.structs.replace(after, strays=strays)
    return after, (*falling, *rising, *requeues)


def offered(state: FillState) -> int:
    """Free open lanes of all nodes, as the last plan would have Slurm's counts."""
    return sum({**state.settled, **{node: told.count for node, told in state.told.items()}}.values())


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
    there: tuple[list[FillLane], list[FillJob], list[FillJob]],
    current: int,
    admitting: frozenset[str],
    view: FillView,
    policy: SlurmPolicy,
) -> tuple[int, FillWhy]:
    """The count of a node; `there` are its lanes, its jobs, and those of its jobs that stay."""
    lanes = there[0]
    if node.live is None or node.seen_ms is None or view.now_ms - node.seen_ms > policy.max_age_ms:
        return 0, FillWhy.LIVE_UNKNOWN
    if not node.usable:
        return 0, FillWhy.NODE_UNUSABLE
    if node.places == 0:
        return 0, FillWhy.NO_PLACES
    now = {r.lane for r in lanes if r.lane in admitting}
    burst = {
        r.lane
        for r in lanes
        if not r.open
        and r.closed_since_ms is not None
        and view.now_ms - r.closed_since_ms < policy.fill_hysteresis_ms
    }
    low = _free(now, there, view.waiting)
    high = _free(now | burst, there, view.waiting)
    count = max(low, min(current, high))
    if count:
        return count, FillWhy.LANES_OPEN
    if _free(now, there, frozenset()):
        return 0, FillWhy.OTHER_MODEL
    if now:
        return 0, FillWhy.LANES_TAKEN
    return 0, FillWhy.FLOOR if any(r.open for r in lanes) else FillWhy.LANES_CLOSED


def serves(lane: str | None, job: str | None) -> bool:
    """Whether a lane of model `lane` is one for a job of model `job`; None: not known, so it may be."""
    return lane is None or job is None or lane == job


def _free(
    admitting: set[str],
    there: tuple[list[FillLane], list[FillJob], list[FillJob]],
    waiting: frozenset[str | None],
) -> int:
    """Lanes that admit, that no job has or is about to take, and that one of those that wait could take.

    A job keeps its lane while the gate is closed. One that leaves has it until it is gone, and takes none.
    """
    lanes, jobs, staying = there
    names = {r.lane for r in lanes}
    held = {j.lane for j in jobs}
    free = Counter(r.model for r in lanes if r.lane in admitting and r.lane not in held)
    about_to = Counter(j.model for j in staying if j.lane not in names)
    unsure = about_to.pop(None, 0)
    for model, many in about_to.items():
        own = min(many, free[model])
        free[model] -= own
        free[None] -= min(many - own, free[None])
    wanted = sum(
        many for model, many in free.items() if not waiting or any(serves(model, who) for who in waiting)
    )
    return max(0, wanted - unsure)


def _stray(job: FillJob, lanes: list[FillLane]) -> bool:
    return job.model is not None and not any(serves(r.model, job.model) for r in lanes)


def _strayed(job: FillJob, since_ms: float | None, view: FillView, policy: SlurmPolicy) -> bool:
    """Whether a job has stood on the wrong node for the policy's time. `since_ms`: since when seen so."""
    if since_ms is None or job.leaving or view.jobs_seen_ms is None:
        return False
    if view.now_ms - view.jobs_seen_ms > policy.max_age_ms:
        return False
    return view.now_ms - max(since_ms, job.started_ms) >= policy.wrong_node_ms


def _must_leave(
    job: FillJob, lanes: list[FillLane], none_ms: float | None, view: FillView, policy: SlurmPolicy
) -> RequeueWhy | None:
    """Whether a job has waited at closed gates for the policy's time. Anything not known: it stays.

    `none_ms`: since when its node has had no lane, or its own lane has been gone.
    """
    if job.leaving or view.jobs_seen_ms is None or view.now_ms - view.jobs_seen_ms > policy.max_age_ms:
        return None
    if view.now_ms - job.started_ms < policy.requeue_after_ms:
        return None
    if none_ms is not None:
        # Started where no lane is, as a reset of the counts allows; or the replica went away.
        return RequeueWhy.NO_LANE if view.now_ms - none_ms >= policy.requeue_after_ms else None
    if job.lane is not None:
        own = next(r for r in view.lanes if r.lane == job.lane)
        return RequeueWhy.GATE_CLOSED if _long_closed(own, view, policy) else None
    held = {j.lane for j in view.jobs if j.job != job.job}
    could = [r for r in lanes if r.lane not in held]
    return RequeueWhy.NO_LANE if all(_long_closed(r, view, policy) for r in could) else None


def _long_closed(lane: FillLane, view: FillView, policy: SlurmPolicy) -> bool:
    since = lane.closed_since_ms
    return not lane.open and since is not None and view.now_ms - since >= policy.requeue_after_ms
