"""What is seen of Slurm, put into the words of the decisions (`core.fill`, `core.replicas`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from hybridsched.cluster.values import Job, Node, total
from hybridsched.core.fill import FillJob, FillLane, FillNode
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.replica_values import LostGpu, Phase, Seen, SeenJob, read_tag
from hybridsched.store.gpu_reports import GpuReport
from hybridsched.store.lane_holders import Holder
from hybridsched.store.telemetry import Telemetry, replica_view
from hybridsched.workers.policy_observe import WaitingJobs

HEALTH_AGE_MS = 5000.0
"""A replica serves when its engine was healthy this short a while ago."""

DRAINED = "hybridsched: job "
"""How the reasons of our drains begin."""

_NO_WORK_YET = frozenset(
    {
        *(
            "BeginTime",
            "Dependency",
            "DependencyNeverSatisfied",
            "JobHeldAdmin",
            "JobHeldUser",
            "Reservation",
        ),
        *(
            "JobArrayTaskLimit",
            "Licenses",
            "PartitionDown",
            "PartitionInactive",
            "InvalidAccount",
            "InvalidQOS",
        ),
    }
)
"""Reasons for which a waiting job would not start on a lane, however open."""

_LASTING_DOWN = frozenset({"DOWN", "FUTURE", "UNKNOWN"})


class LaneSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of a lane's gate, as this policy worker decided it."""

    open: bool
    since_ms: float


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at Slurm and at what the replicas say of themselves."""

    at_ms: float
    """When it began, on the clock of the decisions (monotonic)."""
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]
    telemetry: Telemetry | None
    """None: Redis could not be read."""
    holders: dict[str, Holder | None] = msgspec.field(default_factory=dict)
    reports: list[GpuReport] = msgspec.field(default_factory=list)


class SlurmStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy worker knows of Slurm, for people who look (key `slurm-status`)."""

    at_ms: float
    """Wall clock, ms."""
    reachable: bool
    problem: str = ""
    """Why Slurm, or a part of what was asked of it, failed last; empty when all is well."""
    fill: dict[str, int | None] = msgspec.field(default_factory=dict)
    """Live count of each node."""
    pending: int = 0
    running: int = 0
    replicas: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """By group: wanted, jobs, serving."""
    troubles: dict[str, str] = msgspec.field(default_factory=dict)
    """By group: why it waits before its next submission."""


def fill_jobs(jobs: Sequence[Job], policy: SlurmPolicy) -> list[Job]:
    """The jobs that want or hold a place on a lane."""
    return [
        job
        for job in jobs
        if policy.partition_offline in job.partition.split(",") and total(job.gres, policy.fill_gres) > 0
    ]


def waits(job: Job) -> bool:
    """Whether it would start if a lane opened now."""
    return job.pending and not job.held and job.reason not in _NO_WORK_YET


def hastened(job: Job) -> bool:
    """Whether only the wait after a requeue keeps it: a user's own `--begin` is over by the second run."""
    return job.pending and not job.held and job.reason == "BeginTime" and bool(job.restarts)


def waiting_jobs(jobs: Sequence[Job], policy: SlurmPolicy, seen_s: float) -> WaitingJobs:
    """The work that waits for lanes."""
    ours = fill_jobs(jobs, policy)
    return WaitingJobs(
        seen_s=seen_s,
        pending=sum(waits(job) or hastened(job) for job in ours),
        running=dict(Counter(job.nodes[0] for job in ours if job.running and job.nodes)),
    )


def fill_nodes(look: Look, policy: SlurmPolicy) -> tuple[FillNode, ...]:
    """The nodes whose counts are ours.

    Not those that are down: nothing starts there, and the parked node, which keeps waiting jobs valid, must
    keep its count.
    """
    return tuple(
        FillNode(
            node=node.name,
            live=total(node.gres, policy.fill_gres),
            seen_ms=look.at_ms,
            usable=node.usable,
        )
        for node in look.nodes
        if policy.partition_offline in node.partitions and _LASTING_DOWN.isdisjoint(node.states)
    )


def fill_lanes(telemetry: Telemetry, gates: Mapping[str, LaneSeen]) -> tuple[FillLane, ...]:
    """The lanes on Slurm nodes. One whose gate was not decided yet is closed, since nobody knows when."""
    found = []
    for lane, replica in telemetry.places().items():
        record = telemetry.replicas.get(replica)
        if record is None or not record.node:
            continue
        seen = gates.get(lane)
        opened = seen is not None and seen.open
        since = seen.since_ms if seen is not None and not opened else None
        found.append(FillLane(lane=lane, node=record.node, open=opened, closed_since_ms=since))
    return tuple(found)


def fill_view_jobs(look: Look, policy: SlurmPolicy, epoch_to_ms: float) -> tuple[FillJob, ...]:
    """The jobs that hold places, with the lanes that they have taken."""
    lanes = {holder.job: lane for lane, holder in look.holders.items() if holder is not None and holder.job}
    return tuple(
        FillJob(
            job=job.id,
            node=job.nodes[0],
            lane=lanes.get(_place_name(job)),
            started_ms=job.start_ms + epoch_to_ms,
            leaving=job.leaving,
        )
        for job in fill_jobs(look.jobs, policy)
        if (job.running or job.leaving) and job.nodes and job.start_ms is not None
    )


def _place_name(job: Job) -> str:
    """As a job names itself when it takes a lane (`workers.slurm_env.JobPlace.job`)."""
    return str(job.id) if job.array_task is None else f"{job.array_job}_{job.array_task}"


def replicas_seen(look: Look, *, pool: str, user: str, epoch_to_ms: float) -> Seen:
    """The replica jobs of this pool. A comment can be written by anybody: only our own user's jobs count."""
    serving = _serving(look.telemetry)
    jobs = []
    for job in look.jobs:
        tag = read_tag(job.comment)
        if tag is None or tag.pool != pool or job.user not in ("", user):
            continue
        ends = None
        if job.start_ms is not None and job.time_limit_ms is not None:
            ends = job.start_ms + job.time_limit_ms + epoch_to_ms
        jobs.append(
            SeenJob(
                job=job.id,
                group=tag.group,
                token=tag.token,
                spec=tag.spec,
                phase=_phase(job),
                stuck=job.held and "launch" in job.reason.lower(),
                ends_ms=ends,
                serving=None if serving is None else str(job.id) in serving,
            )
        )
    return Seen(
        at_ms=look.at_ms,
        jobs=tuple(jobs),
        lost=tuple(LostGpu(job=r.job, node=r.node, why=r.why) for r in look.reports),
        drained=tuple(n.name for n in look.nodes if n.draining and n.reason.startswith(DRAINED)),
    )


def _phase(job: Job) -> Phase:
    if job.leaving:
        return Phase.LEAVING
    if job.ended:
        return Phase.ENDED
    return Phase.PENDING if job.pending else Phase.RUNNING


def _serving(telemetry: Telemetry | None) -> frozenset[str] | None:
    """Jobs whose replica has a healthy engine."""
    if telemetry is None:
        return None
    return frozenset(
        record.job
        for record in telemetry.replicas.values()
        if record is not None
        and record.job
        and replica_view(record, telemetry.now_ms).engine_healthy.within(HEALTH_AGE_MS) == 1.0
    )
