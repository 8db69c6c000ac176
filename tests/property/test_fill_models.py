"""No gridlock: models on nodes, jobs that Slurm starts wherever it likes, and gates that open for work."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.cluster.values import Gres, Job
from hybridsched.core.fill import answered, plan
from hybridsched.core.fill_values import FillJob, FillLane, FillNode, FillState, FillView, RequeueJob, SetFill
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState, LaneView
from hybridsched.store.job_models import job_comment
from hybridsched.store.telemetry import EngineRecord, LaneRecord, ReplicaRecord, Telemetry
from hybridsched.workers.policy_observe import with_jobs
from hybridsched.workers.policy_slurm_models import job_models, keep_away
from hybridsched.workers.policy_slurm_view import waiting_jobs

POLICY = SlurmPolicy(enabled=True)
NODES = ("n1", "n2", "n3")
MODELS = ("tiny", "big", "huge")
STEP_MS = 1000.0
PLACES = 2
LANE = (Gres(name=POLICY.fill_gres), Gres(name=POLICY.place_gres))

LAYOUT = st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(MODELS)), min_size=1, max_size=5)
JOBS = st.lists(st.tuples(st.sampled_from(MODELS), st.booleans()), min_size=1, max_size=6)
"""Model of each job, and whether its comment names it."""


class World:
    """Slurm, the jobs and the policy worker, in steps of a second."""

    def __init__(self, layout: list[tuple[str, str]], wanted: list[tuple[str, bool]], *, order: int) -> None:
        self.now, self.state = 100_000.0, FillState()
        self.lanes = {f"r{i}": place for i, place in enumerate(layout)}
        self.is_open = dict.fromkeys(self.lanes, False)
        self.closed_ms = dict.fromkeys(self.lanes, self.now)
        self.live = dict.fromkeys(NODES, 0)
        self.model = {i: model for i, (model, _) in enumerate(wanted, 1)}
        self.jobs = {
            i: Job(
                id=i,
                partition=POLICY.partition_offline,
                state="PENDING",
                restarts=0,
                gres=LANE,
                priority=1000,
                comment=job_comment("b", model if told else None) or "",
            )
            for i, (model, told) in enumerate(wanted, 1)
        }
        self.held: dict[int, str] = {}
        self.said: dict[str, str] = {}
        self.eligible_ms: dict[int, float] = {}
        """A requeued job waits: Slurm would refuse it otherwise."""
        self.nodes = NODES[order:] + NODES[:order]
        """The order in which Slurm tries them."""

    def step(self) -> None:
        self.now += STEP_MS
        for number, lane in list(self.held.items()):
            if self.is_open[lane]:  # it has worked for a step
                del self.held[number], self.jobs[number]
        self._jobs_look_around()
        self._policy()
        self._slurm_starts()

    def _jobs_look_around(self) -> None:
        for number, job in self.jobs.items():
            if not job.running or number in self.held:
                continue
            self.said[str(number)] = self.model[number]
            mine = [n for n, at in self.lanes.items() if at == (job.nodes[0], self.model[number])]
            free = [n for n in mine if n not in self.held.values()]
            if free:
                self.held[number] = free[0]

    def _policy(self) -> None:
        jobs = tuple(self.jobs.values())
        models = job_models(jobs, self.said)
        self._gates(jobs, models)
        serving = {m: {node for node, served in self.lanes.values() if served == m} for m in MODELS}
        for number, job in self.jobs.items():
            if job.pending and number in models:
                change = keep_away(job, set(NODES) - serving[models[number]], {*NODES, "hspark"})
                if change is not None:
                    self.jobs[number] = msgspec.structs.replace(
                        job, excluded=change.excluded, comment=change.comment
                    )
        view = FillView(
            now_ms=self.now,
            nodes=tuple(FillNode(node=n, live=c, seen_ms=self.now) for n, c in self.live.items()),
            lanes=tuple(
                FillLane(
                    lane=name,
                    node=node,
                    model=model,
                    open=self.is_open[name],
                    closed_since_ms=None if self.is_open[name] else self.closed_ms[name],
                )
                for name, (node, model) in self.lanes.items()
            ),
            jobs=tuple(
                FillJob(
                    job=job.id,
                    node=job.nodes[0],
                    lane=self.held.get(job.id),
                    started_ms=job.start_ms or 0.0,
                    model=models.get(job.id),
                )
                for job in jobs
                if job.running
            ),
            jobs_seen_ms=self.now,
            waiting=frozenset(models.get(job.id) for job in jobs if job.pending),
        )
        self.state, out = plan(self.state, view, POLICY)
        for act in out:
            self.state = answered(self.state, act, self.now)
            if isinstance(act, SetFill):
                self.live[act.node] = act.count
            elif isinstance(act, RequeueJob):
                self.held.pop(act.job, None)
                self.eligible_ms[act.job] = self.now + 3 * STEP_MS
                self.jobs[act.job] = msgspec.structs.replace(
                    self.jobs[act.job], state="PENDING", nodes=(), restarts=1
                )

    def _gates(self, jobs: tuple[Job, ...], models: dict[int, str]) -> None:
        """A gate is open while its lane has work: a job on it, or one that could take it."""
        replicas: dict[str, ReplicaRecord | None] = {
            name: ReplicaRecord(
                replica=name, model=model, lane=name, node=node, engine=EngineRecord(), online_inflight=0
            )
            for name, (node, model) in self.lanes.items()
        }
        taken: dict[str, LaneRecord | None] = {
            lane: LaneRecord(lane=lane, replica=lane, offline_inflight=0, work=1, worker="w")
            for lane in self.held.values()
        }
        gates = {
            name: Gate(
                lane=name,
                state=GateState.OPEN if self.is_open[name] else GateState.CLOSED,
                reason=Reason.IDLE if self.is_open[name] else Reason.NO_WORK,
                since_ms=self.closed_ms[name],
            )
            for name in self.lanes
        }
        views = [LaneView(lane=name, replica=name, gate=gates[name]) for name in self.lanes]
        telemetry = Telemetry(now_ms=self.now, replicas=replicas, lanes=taken)
        for view in with_jobs(views, telemetry, waiting_jobs(jobs, POLICY, 0.0, models), 0.0):
            opens = view.lane in taken or bool(view.waiting_jobs.value)
            if self.is_open[view.lane] and not opens:
                self.closed_ms[view.lane] = self.now
            self.is_open[view.lane] = opens

    def _slurm_starts(self) -> None:
        """As many as there are places: it does not consume the count."""
        for number, job in self.jobs.items():
            if not job.pending or self.eligible_ms.get(number, 0.0) > self.now:
                continue
            for node in self.nodes:
                there = sum(other.running and node in other.nodes for other in self.jobs.values())
                if self.live[node] > 0 and there < PLACES and node not in job.excluded:
                    self.jobs[number] = msgspec.structs.replace(
                        job, state="RUNNING", nodes=(node,), start_ms=self.now
                    )
                    break


@given(LAYOUT, JOBS, st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_every_job_whose_model_is_served_runs_in_bounded_time(
    layout: list[tuple[str, str]], wanted: list[tuple[str, bool]], order: int
) -> None:
    world = World(layout, wanted, order=order)
    served = {model for _, model in layout}
    most = 30 + 30 * len(wanted)
    for _ in range(most):
        world.step()
    left = [number for number in world.jobs if world.model[number] in served]
    assert left == [], f"jobs {left} have not run: {world.jobs}, {world.live}, open {world.is_open}"
    for number, job in world.jobs.items():
        known = number in job_models([job], world.said)
        assert not known or not job.running, "a job whose model nobody serves holds a place"
