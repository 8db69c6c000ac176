"""What is seen of Slurm, put into the words of the decisions (`core.fill`, `core.replicas`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from hybridsched.cluster.values import Job, Node, total
from hybridsched.core.fill_values import FillJob, FillLane, FillNode
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.replica_values import LostGpu, Move, Phase, Seen, SeenJob, read_tag
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
        "AccountNotAllowed",
        "AccountingPolicy",
        "BadConstraints",
        "BeginTime",
        "Cleaning",
        "DeadLine",
        "Dependency",
        "DependencyNeverSatisfied",
        "FedJobLock",
        "InvalidAccount",
        "InvalidQOS",
        "JobArrayTaskLimit",
        "JobHeldAdmin",
        "JobHeldUser",
        "JobHoldMaxRequeue",
        "Licenses",
        "MaxRequeueExceeded",
        "PartitionDown",
        "PartitionInactive",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "Reservation",
        "ReservationDeleted",
        "SchedDefer",
    }
)
"""Reasons for which a waiting job would not start on a lane, however open."""

_LIMITS = ("Assoc", "QOS", "QoS", "Max")
"""How the reasons of a job that waits for a limit of its account, user or QOS begin: no lane ends that."""

BAD_CONSTRAINTS = "BadConstraints"
"""Slurm holds a job so when no node could ever run it: also while the parked node's counts are wrong."""

LAUNCH_FAILED_MS = 2000.0
"""A later run of a job that fails this soon after its start may have been refused its start."""

MODELS_SHOWN = 500

_LASTING_DOWN = frozenset({"DOWN", "FUTURE", "UNKNOWN"})


class LaneSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The last change of a lane's gate, as this policy worker decided it."""

    open: bool
    since_ms: float


CRED_EXPIRE_S = 120
"""Slurm's own, where AuthInfo says nothing."""

WAIT_MS = (CRED_EXPIRE_S + 1) * 1000.0
"""What a requeued job waits then."""

_SLACK_MS = 1000.0
"""Both times are whole seconds."""


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One look at Slurm and at what the replicas say of themselves."""

    at_ms: float
    """When it began, on the clock of the decisions (monotonic)."""
    jobs: tuple[Job, ...]
    nodes: tuple[Node, ...]
    telemetry: Telemetry | None
    """None: Redis could not be read."""
    wait_ms: float = WAIT_MS
    """What Slurm makes a requeued job wait."""
    holders: dict[str, Holder | None] = msgspec.field(default_factory=dict)
    reports: list[GpuReport] = msgspec.field(default_factory=list)
    models: dict[int, str] = msgspec.field(default_factory=dict)
    """The model that a job of offline work needs, where it is known."""


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
    without_lane: tuple[int, ...] = ()
    """Jobs that Slurm has started and that have no lane: more started than lanes were free, or one has just
    started. They load nothing."""
    tasks: dict[str, str] = msgspec.field(default_factory=dict)
    """The address (`6_1`) of those that are tasks of an array, by their id."""
    waiting: dict[str, int] = msgspec.field(default_factory=dict)
    """By model: jobs that would start if a lane opened now, or that have started and have no lane. "": of
    jobs whose model is not known."""
    serving: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """By model: the nodes that serve it."""
    models: dict[str, str] = msgspec.field(default_factory=dict)
    """The model of each job that waits or has no lane, of the first `MODELS_SHOWN`; "": not known."""
    replicas: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """By group: wanted, jobs, serving."""
    troubles: dict[str, str] = msgspec.field(default_factory=dict)
    """By group of replicas: why it waits before its next submission. By `node NAME` and `job ID`: what is
    wrong there and what to do."""


def pool_partitions(policy: SlurmPolicy) -> tuple[str, str]:
    """The partitions whose jobs are the pool's."""
    return policy.partition_online, policy.partition_offline


def in_partitions(jobs: tuple[Job, ...], policy: SlurmPolicy) -> tuple[Job, ...]:
    """Those of the jobs that are in them."""
    ours = set(pool_partitions(policy))
    return tuple(job for job in jobs if not ours.isdisjoint(job.partition.split(",")))


def fill_jobs(jobs: Sequence[Job], policy: SlurmPolicy) -> list[Job]:
    """The jobs that want or hold a place on a lane."""
    return [
        job
        for job in jobs
        if policy.partition_offline in job.partition.split(",") and total(job.gres, policy.fill_gres) > 0
    ]


def waits(job: Job, parked: str) -> bool:
    """Whether it would start if a lane opened now. `parked` is the node that is never there."""
    if not job.pending or job.held:
        return False
    word, *rest = re.split(r"[^A-Za-z0-9._-]+", job.reason)
    if word in _NO_WORK_YET or word.startswith(_LIMITS):
        return False
    # Slurm names the nodes that it could use and that are away: while the parked one is among them a lane
    # ends the wait; where it is not, the job wants others (`ReqNodeNotAvail, UnavailableNodes:n3`).
    return word != "ReqNodeNotAvail" or not rest or parked in rest


def requeue_wait_ms(config: Mapping[str, str]) -> float:
    """How long Slurm lets a requeued job wait, by its `AuthInfo`: the life of a credential and a second."""
    life = re.search(r"\bcred_expire=([0-9]{1,9})", config.get("AuthInfo", ""))
    return ((int(life[1]) if life else CRED_EXPIRE_S) + 1) * 1000.0


def hastened(job: Job, wait_ms: float) -> bool:
    """Whether only Slurm's own wait after a requeue, of `wait_ms`, keeps it.

    A begin time that is another one was given by a person, before the first run or after a requeue.
    """
    if not job.pending or job.held or job.reason != "BeginTime" or not job.restarts:
        return False
    if job.begin_ms is None or job.submit_ms is None:
        return False
    return abs(job.begin_ms - job.submit_ms - wait_ms) <= _SLACK_MS


def jobs_that_wait(jobs: Sequence[Job], policy: SlurmPolicy, wait_ms: float = WAIT_MS) -> list[Job]:
    """The jobs that an open lane would start. `wait_ms`: see `requeue_wait_ms`."""
    ours = fill_jobs(jobs, policy)
    return [job for job in ours if waits(job, policy.parked_node) or hastened(job, wait_ms)]


def waiting_jobs(
    jobs: Sequence[Job],
    policy: SlurmPolicy,
    seen_s: float,
    models: Mapping[int, str] | None = None,
    wait_ms: float = WAIT_MS,
) -> WaitingJobs:
    """The work that waits for lanes. `models`: of the jobs whose model is known."""
    known = models or {}
    running: dict[str, Counter[str | None]] = {}
    for job in fill_jobs(jobs, policy):
        if job.running and job.nodes:
            running.setdefault(job.nodes[0], Counter())[known.get(job.id)] += 1
    return WaitingJobs(
        seen_s=seen_s,
        pending=Counter(known.get(job.id) for job in jobs_that_wait(jobs, policy, wait_ms)),
        running=running,
    )


def fill_nodes(look: Look, policy: SlurmPolicy) -> tuple[FillNode, ...]:
    """The nodes whose counts are ours.

    Not those that are down: nothing starts there. Never the parked node, whatever its state: it keeps waiting
    jobs valid by its count.
    """
    return tuple(
        FillNode(
            node=node.name,
            live=total(node.gres, policy.fill_gres),
            seen_ms=look.at_ms,
            usable=node.usable,
            places=total(node.gres, policy.place_gres),
        )
        for node in look.nodes
        if policy.partition_offline in node.partitions
        and node.name != policy.parked_node
        and _LASTING_DOWN.isdisjoint(node.states)
    )


def consumed_nodes(look: Look, policy: SlurmPolicy) -> tuple[str, ...]:
    """Nodes where Slurm counts jobs as users of the fill GRES: it is not `no_consume` there."""
    return tuple(n.name for n in look.nodes if total(n.gres_used, policy.fill_gres) > 0)


def stray_jobs(look: Look, policy: SlurmPolicy) -> list[tuple[Job, int]]:
    """Jobs that hold more places than they use lanes, with how many: offline work cannot start on those."""
    lanes = {job.id: total(job.gres, policy.fill_gres) for job in fill_jobs(look.jobs, policy)}
    over = [(job, total(job.gres, policy.place_gres) - lanes.get(job.id, 0)) for job in look.jobs]
    return [(job, count) for job, count in over if count > 0 and _holds(job)]


def unseen_places(look: Look, policy: SlurmPolicy) -> dict[str, int]:
    """Node -> places that Slurm counts as taken there by none of the jobs that were seen: jobs of partitions
    that are not the pool's. For a moment also what started or ended within the look."""
    seen = Counter[str]()
    for job in look.jobs:
        if _holds(job):
            seen.update(dict.fromkeys(job.nodes, total(job.gres, policy.place_gres)))
    over = {node.name: total(node.gres_used, policy.place_gres) - seen[node.name] for node in look.nodes}
    return {node: count for node, count in over.items() if count > 0}


def _holds(job: Job) -> bool:
    return bool(job.nodes) and (job.running or job.leaving or job.suspended)


def parked(look: Look, policy: SlurmPolicy) -> Node | None:
    """The parked node, where there is one."""
    return next((n for n in look.nodes if n.name == policy.parked_node), None)


def launch_failed(job: Job) -> bool:
    """A later run that Slurm itself could not start: the job is at its end and its owner has to be told.

    slurmd refuses a run whose credential is not newer than the end of the run before it, and slurmctld then
    ends the job for good ("Killing non-startable batch").
    """
    if job.state != "FAILED" or not job.restarts or job.start_ms is None or job.end_ms is None:
        return False
    return job.end_ms - job.start_ms <= LAUNCH_FAILED_MS


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
        found.append(
            FillLane(
                lane=lane, node=record.node, open=opened, closed_since_ms=since, model=record.model or None
            )
        )
    return tuple(found)


def fill_view_jobs(look: Look, policy: SlurmPolicy, epoch_to_ms: float) -> tuple[FillJob, ...]:
    """The jobs that hold places, with the lanes that they have taken."""
    lanes = {holder.job: lane for lane, holder in look.holders.items() if holder is not None and holder.job}
    return tuple(
        FillJob(
            job=job.id,
            node=job.nodes[0],
            lane=lanes.get(place_name(job)),
            started_ms=job.start_ms + epoch_to_ms,
            leaving=job.leaving,
            model=look.models.get(job.id),
        )
        for job in fill_jobs(look.jobs, policy)
        if _holds(job) and job.start_ms is not None
    )


def place_name(job: Job) -> str:
    """As a job names itself when it takes a lane (`workers.slurm_env.JobPlace.job`)."""
    return str(job.id) if job.array_task is None else f"{job.array_job}_{job.array_task}"


def replicas_seen(
    look: Look,
    *,
    pool: str,
    user: str,
    epoch_to_ms: float,
    leaving: frozenset[str] = frozenset(),
    moves: tuple[Move, ...] = (),
) -> Seen:
    """The replica jobs of this pool. A comment can be written by anybody: only our own user's jobs count.

    `leaving`: nodes whose hosts change their mode; `moves`: what has to come to serve elsewhere before that.
    """
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
                going=not leaving.isdisjoint(job.nodes),
                nodes=job.nodes,
                excluded=job.excluded,
            )
        )
    return Seen(
        at_ms=look.at_ms,
        jobs=tuple(jobs),
        moves=moves,
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
