"""Which jobs count as work that waits for lanes, and for whom a gate opens."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.cluster.values import Gres, Job
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState, LaneView
from hybridsched.store.telemetry import EngineRecord, LaneRecord, ReplicaRecord, Telemetry
from hybridsched.workers.policy_observe import WaitingJobs, with_jobs
from hybridsched.workers.policy_slurm_view import Look, fill_view_jobs, launch_failed, waiting_jobs

POLICY = SlurmPolicy(enabled=True)
NOW = 1e9
LANE = (Gres(name="hsfill"), Gres(name="hslane"))


def pending(reason: str, *, priority: int = 1000) -> Job:
    return Job(id=1, partition="offline", state="PENDING", reason=reason, gres=LANE, priority=priority)


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "Resources",
        "Priority",
        "ReqNodeNotAvail",
        "ReqNodeNotAvail, UnavailableNodes:hspark",
        "ReqNodeNotAvail, UnavailableNodes:n[1-2],hspark",
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    ],
)
def test_a_lane_would_end_its_wait(reason: str) -> None:
    assert waiting_jobs((pending(reason),), POLICY, 0.0).total == 1


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionTimeLimit",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "Dependency",
        "BeginTime",
        "JobArrayTaskLimit",
        "QOSMaxJobsPerUserLimit",
        "AssocGrpGRES",
        "MaxCpuPerAccount",
        "ReqNodeNotAvail, UnavailableNodes:n3",
        "ReqNodeNotAvail, Reserved for maintenance",
    ],
)
def test_no_lane_would_end_its_wait(reason: str) -> None:
    """Lanes that opened for it would stand open for nobody."""
    assert waiting_jobs((pending(reason),), POLICY, 0.0).total == 0


def test_a_held_job_waits_for_its_release() -> None:
    assert waiting_jobs((pending("JobHeldUser", priority=0),), POLICY, 0.0).total == 0
    assert waiting_jobs((pending("", priority=0),), POLICY, 0.0).total == 0


def test_the_parked_node_has_the_sites_name() -> None:
    site = msgspec.structs.replace(POLICY, parked_node="nowhere")
    job = pending("ReqNodeNotAvail, UnavailableNodes:nowhere")
    assert waiting_jobs((job,), site, 0.0).total == 1
    assert waiting_jobs((job,), POLICY, 0.0).total == 0


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, True),
        ({"restarts": 0}, False),
        ({"restarts": None}, False),
        ({"state": "COMPLETED"}, False),
        ({"end_ms": 9_000.0}, False),
    ],
)
def test_a_run_that_slurm_refused_to_start(changes: dict[str, object], failed: bool) -> None:
    # As 22.05 showed it: FAILED, NonZeroExitCode, started and ended in one second.
    job = Job(id=30, state="FAILED", reason="NonZeroExitCode", restarts=1, start_ms=5_000.0, end_ms=5_000.0)
    assert launch_failed(msgspec.structs.replace(job, **changes)) is failed


# -- gates for jobs -------------------------------------------------------------------------------------


def seen(*lanes: tuple[str, float | None, bool]) -> tuple[list[LaneView], Telemetry]:
    """Lanes of n1: name, how long its gate has been closed (None: open), whether a worker stands there."""
    views: list[LaneView] = []
    replicas: dict[str, ReplicaRecord | None] = {}
    workers: dict[str, LaneRecord | None] = {}
    for name, closed_ms, worker in lanes:
        state, reason = (
            (GateState.OPEN, Reason.IDLE) if closed_ms is None else (GateState.CLOSED, Reason.ONLINE_ACTIVE)
        )
        gate = Gate(lane=name, state=state, reason=reason, since_ms=NOW - (closed_ms or 0.0))
        views.append(LaneView(lane=name, replica=name, gate=gate))
        replicas[name] = ReplicaRecord(
            replica=name, model="m", lane=name, node="n1", engine=EngineRecord(), online_inflight=0
        )
        if worker:
            workers[name] = LaneRecord(lane=name, replica=name, offline_inflight=0, work=1, worker="w")
    return views, Telemetry(now_ms=NOW, replicas=replicas, lanes=workers)


def work(views: list[LaneView], telemetry: Telemetry, *, running: int, waiting: int = 0) -> dict[str, float]:
    jobs = WaitingJobs(seen_s=0.0, pending={None: waiting}, running={"n1": {None: running}})
    told = with_jobs(views, telemetry, jobs, 0.0)
    return {v.lane: v.waiting_jobs.value for v in told if v.waiting_jobs.value is not None}


def test_a_job_beside_whose_closed_lane_another_is_free_is_coming() -> None:
    """It changes its lane within seconds; with no gate opened for it it would wait for `requeue_after_ms`."""
    views, telemetry = seen(("a", 6_000.0, True), ("b", 9e6, False))
    assert work(views, telemetry, running=1) == {"b": 1.0}
    views, telemetry = seen(("a", 100.0, True), ("b", 9e6, False))
    assert work(views, telemetry, running=1) == {"b": 0.0}, "a burst moves nobody"


def test_a_job_on_an_open_lane_is_not_coming() -> None:
    views, telemetry = seen(("a", None, True), ("b", 9e6, False))
    assert work(views, telemetry, running=1) == {"b": 0.0}
    assert work(views, telemetry, running=2) == {"b": 1.0}, "one has no lane yet"
    assert work(views, telemetry, running=1, waiting=3) == {"b": 3.0}


def test_a_gate_opens_for_jobs_of_its_model_only() -> None:
    """A job on a node of another model kept the lanes of its own closed, and those there open for nobody."""
    views, telemetry = seen(("a", 9e6, False), ("b", None, True))

    def told(
        pending: dict[str | None, int] | None = None, running: dict[str | None, int] | None = None
    ) -> float | None:
        jobs = WaitingJobs(seen_s=0.0, pending=pending or {}, running={"n1": running or {}})
        return with_jobs(views, telemetry, jobs, 0.0)[0].waiting_jobs.value

    assert told({"other": 3}) == 0.0
    assert told({"m": 2, None: 1, "other": 3}) == 3.0
    assert told(running={"other": 2, "m": 1}) == 0.0, "b has the one of its model"
    assert told(running={"m": 2}) == 1.0
    assert told(running={None: 1}) == 0.0, "b may have it"
    assert told(running={None: 2, "other": 1}) == 1.0


@pytest.mark.parametrize(
    ("state", "flags", "seen"),
    [
        ("RUNNING", (), True),
        ("SUSPENDED", (), True),
        ("RUNNING", ("COMPLETING",), True),
        ("PENDING", (), False),
        ("COMPLETED", (), False),
    ],
)
def test_a_job_that_is_suspended_holds_its_place(state: str, flags: tuple[str, ...], seen: bool) -> None:
    """No rung reached it otherwise: it kept its place and its lane for as long as it stood."""
    policy = SlurmPolicy()
    job = Job(
        id=7,
        state=state,
        flags=flags,
        partition=policy.partition_offline,
        gres=(Gres(name=policy.fill_gres),),
        nodes=("n1",),
        start_ms=5.0,
    )
    found = fill_view_jobs(Look(at_ms=10.0, jobs=(job,), nodes=(), telemetry=None), policy, 0.0)
    assert [one.job for one in found] == ([7] if seen else [])
