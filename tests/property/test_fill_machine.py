"""Counts and requeues over random histories of gates, jobs, and a Slurm that is slow, forgets, and resets."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from hybridsched.core.fill import answered, plan
from hybridsched.core.fill_values import (
    LOST_MS,
    FillJob,
    FillLane,
    FillNode,
    FillState,
    FillView,
    Instruction,
    RequeueJob,
    SetFill,
)
from hybridsched.core.policy import SlurmPolicy

POLICY = SlurmPolicy(requeue_after_ms=10_000, fill_hysteresis_ms=1_000, reassert_ms=2_000, max_age_ms=20_000)
NODES = ("n1", "n2")
LANES = {"n1a": "n1", "n1b": "n1", "n2a": "n2"}
CONFIGURED = 4
PLACES = 4
"""Of the second GRES, on each node: more than it has lanes, so that there are jobs without one."""

LANE = st.sampled_from(sorted(LANES))
NODE = st.sampled_from(NODES)


class Pool(RuleBasedStateMachine):
    """The world: gates, a Slurm with a queue of orders it has not followed yet, and jobs that claim lanes."""

    @initialize()
    def start(self) -> None:
        self.now = 100_000.0
        self.state = FillState()
        self.closed_since: dict[str, float | None] = dict.fromkeys(LANES, self.now)
        self.live = dict.fromkeys(NODES, CONFIGURED)
        self.read = {n: FillNode(node=n, live=None, seen_ms=None) for n in NODES}
        self.jobs: dict[int, FillJob] = {}
        self.jobs_read: tuple[tuple[FillJob, ...], float | None] = ((), None)
        self.orders: list[Instruction] = []
        self.asked: dict[tuple[str, object], tuple[Instruction, float]] = {}
        self.ids = 0

    # -- the world

    @rule(ms=st.sampled_from([1, 100, 500, 1_500, 4_000, 12_000, 70_000]))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(lane=LANE)
    def gate_flips(self, lane: str) -> None:
        self.closed_since[lane] = self.now if self.closed_since[lane] is None else None

    @rule(node=NODE)
    def slurm_starts_a_job(self, node: str) -> None:
        # It does not consume the count: as long as there is one, jobs start up to the node's places.
        if self.live[node] > 0 and sum(j.node == node for j in self.jobs.values()) < PLACES:
            self.ids += 1
            self.jobs[self.ids] = FillJob(job=self.ids, node=node, lane=None, started_ms=self.now)

    @rule(lane=LANE)
    def a_job_claims_a_lane(self, lane: str) -> None:
        if lane not in {j.lane for j in self.jobs.values()}:
            for number, job in self.jobs.items():
                if job.node == LANES[lane] and job.lane is None:
                    self.jobs[number] = msgspec.structs.replace(job, lane=lane)
                    return

    @rule()
    def a_job_is_being_ended(self) -> None:
        if self.jobs:
            number = max(self.jobs)
            self.jobs[number] = msgspec.structs.replace(self.jobs[number], leaving=True)

    @rule()
    def a_job_ends(self) -> None:
        if self.jobs:
            del self.jobs[min(self.jobs)]

    @rule()
    def somebody_reconfigures(self) -> None:
        self.live = dict.fromkeys(NODES, CONFIGURED)

    @rule(node=NODE)
    def a_reading_fails(self, node: str) -> None:
        self.read[node] = FillNode(node=node, live=None, seen_ms=self.now)

    @rule()
    def slurm_is_read(self) -> None:
        self.read = {n: FillNode(node=n, live=self.live[n], seen_ms=self.now) for n in NODES}
        self.jobs_read = (tuple(self.jobs.values()), self.now)

    @rule(follows=st.booleans())
    def slurm_answers(self, follows: bool) -> None:
        if not self.orders:
            return
        order = self.orders.pop(0)
        if follows and isinstance(order, SetFill):
            self.live[order.node] = order.count
        elif follows and isinstance(order, RequeueJob):
            self.jobs.pop(order.job, None)
        self.state = answered(self.state, order, self.now)
        self.asked = {k: v for k, v in self.asked.items() if v[0].number != order.number}

    # -- the plan

    def view(self) -> FillView:
        lanes = tuple(
            FillLane(
                lane=lane,
                node=node,
                open=self.closed_since[lane] is None,
                closed_since_ms=self.closed_since[lane],
            )
            for lane, node in LANES.items()
        )
        jobs, seen = self.jobs_read
        return FillView(
            now_ms=self.now, nodes=tuple(self.read.values()), lanes=lanes, jobs=jobs, jobs_seen_ms=seen
        )

    @rule()
    def plans(self) -> None:
        view = self.view()
        before = msgspec.json.decode(msgspec.json.encode(self.state), type=FillState)
        self.state, out = plan(self.state, view, POLICY)
        assert plan(before, view, POLICY) == (self.state, out), "the state does not go through JSON"
        order = [isinstance(i, RequeueJob) for i in out]
        assert order == sorted(order), "a requeue before a count"
        for instruction in out:
            key: tuple[str, object]
            if isinstance(instruction, SetFill):
                self.check_count(instruction, view)
                key = ("fill", instruction.node)
            else:
                self.check_requeue(instruction, view)
                key = ("requeue", instruction.job)
            earlier = self.asked.get(key)
            if earlier is not None and same_wish(earlier[0], instruction):
                assert self.now - earlier[1] >= LOST_MS, "asked twice while Slurm was still at it"
            self.asked[key] = (instruction, self.now)
            self.orders.append(instruction)

    def check_count(self, order: SetFill, view: FillView) -> None:
        lanes = {lane for lane, node in LANES.items() if node == order.node}
        recent = {
            lane
            for lane in lanes
            if (since := self.closed_since[lane]) is None or self.now - since < POLICY.fill_hysteresis_ms
        }
        jobs = [j for j in view.jobs if j.node == order.node]
        free = recent - {j.lane for j in jobs}
        coming = [j for j in jobs if j.lane is None and not j.leaving and j.job not in self.state.leaving]
        assert 0 <= order.count <= max(0, len(free) - len(coming)), "offers more than the free lanes"
        reading = self.read[order.node]
        if reading.live is None or reading.seen_ms is None or self.now - reading.seen_ms > POLICY.max_age_ms:
            assert order.count == 0, "admits on a count that is not known"

    def check_requeue(self, order: RequeueJob, view: FillView) -> None:
        job = next(j for j in view.jobs if j.job == order.job)
        own = (
            [job.lane]
            if job.lane
            else [
                lane
                for lane, node in LANES.items()
                if node == job.node and lane not in {j.lane for j in view.jobs}
            ]
        )
        for lane in own:
            since = self.closed_since[lane]
            assert since is not None, "requeued although its gate is open"
            assert self.now - since >= POLICY.requeue_after_ms, "requeued in a short burst"
        assert self.now - job.started_ms >= POLICY.requeue_after_ms

    def teardown(self) -> None:
        """Left in peace, with a Slurm that follows, the counts come right and the orders stop."""
        if not hasattr(self, "state"):
            return
        for _ in range(6):
            self.now += 70_000
            while self.orders:
                self.slurm_answers(True)
            self.slurm_is_read()
            self.plans()
        assert self.orders == [], "it never comes to rest"
        for node in NODES:
            lanes = {lane for lane, at in LANES.items() if at == node}
            opened = {lane for lane in lanes if self.closed_since[lane] is None}
            jobs = [j for j in self.jobs.values() if j.node == node]
            staying = [j for j in jobs if not j.leaving]
            homeless = sum(j.lane is None for j in staying)
            assert self.live[node] == max(0, len(opened - {j.lane for j in jobs}) - homeless)
            if not opened:
                assert staying == [], "jobs stay at gates that will not open"
            for job in staying:
                assert job.lane is None or job.lane in opened, "a job stays at a gate that will not open"


def same_wish(a: Instruction, b: Instruction) -> bool:
    if isinstance(a, SetFill) and isinstance(b, SetFill):
        return (a.node, a.count) == (b.node, b.count)
    return isinstance(a, RequeueJob) and isinstance(b, RequeueJob) and a.job == b.job


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
