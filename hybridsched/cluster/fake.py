"""A Slurm in memory, for tests: it starts jobs by itself when their GRES are there, as the real one does.

`FakeSlurm` is the cluster as plain data (it goes through JSON), `FakeCluster` the protocol over it. Behaviour
follows what was seen on Slurm 22.05: an entry with count 0 leaves a node's list, a lowered count leaves
running jobs alone, `reconfigure` puts configured counts back, an unknown GRES is ignored without a word, a
requeued job waits before it may start again. It has no arrays, no backfill, no preemption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec

from hybridsched.cluster import checks
from hybridsched.cluster.run import refusal
from hybridsched.cluster.values import (
    ClusterError,
    Gres,
    Job,
    JobChange,
    JobSpec,
    Node,
    Partition,
    Reservation,
    total,
)


class FakeNode(msgspec.Struct, kw_only=True):
    name: str
    configured: tuple[Gres, ...]
    """What slurm.conf says; `reconfigure` comes back to it."""
    live: tuple[Gres, ...]
    states: tuple[str, ...] = ("IDLE",)
    reason: str = ""


class FakeJob(msgspec.Struct, kw_only=True):
    value: Job
    spec: JobSpec
    eligible_ms: float = 0.0
    """Not started before this, as after a requeue."""


def _default_nodes() -> dict[str, FakeNode]:
    gres = (Gres(name="gpu", type="a100", count=4), Gres(name="hsfill", count=4))
    nodes = {f"n{i}": FakeNode(name=f"n{i}", configured=gres, live=gres) for i in range(1, 5)}
    nodes["hspark"] = FakeNode(
        name="hspark", configured=gres, live=gres, states=("DOWN",), reason="hybridsched parked node"
    )
    return nodes


def _default_partitions() -> tuple[Partition, ...]:
    real = ("n1", "n2", "n3", "n4")
    return (
        Partition(name="online", nodes=real, priority_tier=100, preempt_mode="OFF", grace_s=0),
        Partition(
            name="offline",
            nodes=(*real, "hspark"),
            priority_tier=1,
            preempt_mode="REQUEUE",
            grace_s=120,
            default=True,
        ),
    )


class FakeSlurm(msgspec.Struct, kw_only=True):
    """Four nodes with four GPUs and a parked one, partitions online and offline, unless told otherwise."""

    nodes: dict[str, FakeNode] = msgspec.field(default_factory=_default_nodes)
    partitions: tuple[Partition, ...] = msgspec.field(default_factory=_default_partitions)
    reservations: tuple[Reservation, ...] = ()
    jobs: dict[int, FakeJob] = msgspec.field(default_factory=dict)
    config: dict[str, str] = msgspec.field(
        default_factory=lambda: {"SLURM_VERSION": "22.05.8", "PreemptType": "preempt/partition_prio"}
    )
    now_ms: float = 1_000_000.0
    requeue_wait_ms: float = 121_000.0
    """What Slurm makes a requeued job wait (cred_expire and a second)."""
    user: str = "root"
    down: bool = False
    next_id: int = 1
    signals: list[tuple[int, str, bool]] = msgspec.field(default_factory=list)

    # -- the world --------------------------------------------------------------------------------------

    def advance(self, ms: float) -> None:
        """Let time pass: waits end, time limits fall due."""
        self.now_ms += ms
        for job in list(self.jobs.values()):
            value = job.value
            if value.running and value.start_ms is not None and value.time_limit_ms is not None:
                due = value.start_ms + value.time_limit_ms
                if due <= self.now_ms:
                    self.finish(value.id, "TIMEOUT", at_ms=due)
        self.schedule()

    def finish(self, job: int, state: str = "COMPLETED", *, at_ms: float | None = None) -> None:
        """A job ends."""
        self._set(job, state=state, end_ms=self.now_ms if at_ms is None else at_ms, reason="")
        self.schedule()

    def reconfigure(self) -> None:
        """`scontrol reconfigure`: every live GRES count is the configured one again."""
        for node in self.nodes.values():
            node.live = node.configured
        self.schedule()

    def schedule(self) -> None:
        """Start what can start: partitions by tier, then priority, then age."""
        tiers = {p.name: p.priority_tier or 0 for p in self.partitions if p.up}
        waiting = [j for j in self.jobs.values() if j.value.pending and not j.value.held]
        waiting.sort(key=lambda j: (-tiers.get(j.value.partition, -1), -(j.value.priority or 0), j.value.id))
        for job in waiting:
            if job.eligible_ms > self.now_ms or job.value.partition not in tiers:
                continue
            places = job.spec.nodes or self._first_free(job)
            if places and all(self._fits(job, name) for name in places):
                self._set(job.value.id, state="RUNNING", nodes=places, start_ms=self.now_ms, reason="")
            else:
                self._set(job.value.id, reason="Resources")

    def used(self, node: str) -> tuple[Gres, ...]:
        """What running jobs hold on a node."""
        asked = [
            g for j in self.jobs.values() if j.value.running and node in j.value.nodes for g in j.value.gres
        ]
        live = self.nodes[node].configured
        return tuple(
            msgspec.structs.replace(
                g, count=sum(a.count for a in asked if a.name == g.name and a.type in (None, g.type))
            )
            for g in live
        )

    # -- what the protocol asks -------------------------------------------------------------------------

    def list_nodes(self) -> tuple[Node, ...]:
        return tuple(
            Node(
                name=n.name,
                host=n.name,
                states=n.states,
                gres=n.live,
                gres_used=self.used(n.name),
                reason=n.reason,
                partitions=tuple(p.name for p in self.partitions if n.name in p.nodes),
            )
            for n in self.nodes.values()
        )

    def submit(self, spec: JobSpec) -> int:
        spec = checks.spec(spec)
        if spec.array is not None:
            raise ClusterError("the fake has no job arrays", code="unsupported", retryable=False)
        default = next((p.name for p in self.partitions if p.default), "")
        name = spec.partition or default
        partition = next((p for p in self.partitions if p.name == name), None)
        if partition is None:
            raise refusal(f"take job {spec.name!r}", f"invalid partition specified: {name}")
        possible = [n for n in (spec.nodes or partition.nodes) if n in self.nodes]
        if not any(self._holds(self.nodes[n].live, spec.gres) for n in possible):
            raise refusal(f"take job {spec.name!r}", "Requested node configuration is not available")
        number = self.next_id
        self.next_id += 1
        value = Job(
            id=number,
            name=spec.name,
            user=spec.user or self.user,
            partition=name,
            state="PENDING",
            reason="JobHeldUser" if spec.hold else "None",
            gres=spec.gres,
            comment=spec.comment or "",
            restarts=0,
            priority=0 if spec.hold else 1000,
            submit_ms=self.now_ms,
            time_limit_ms=None if spec.time_limit_min is None else spec.time_limit_min * 60_000.0,
        )
        self.jobs[number] = FakeJob(value=value, spec=spec)
        self.schedule()
        return number

    def signal(self, job: int, name: str, steps: bool) -> None:
        name = checks.signal_name(name)
        value = self._known(job).value
        if value.ended:
            raise refusal(f"send {name} to job {job}", "Invalid job id specified")
        if value.running:
            self.signals.append((job, name, steps))

    def requeue(self, job: int) -> None:
        found = self._known(job)
        if found.value.pending:
            raise refusal(f"requeue job {job}", f"Job is pending execution for job {job}")
        if found.spec.requeue is False:
            raise refusal(f"requeue job {job}", "Requested operation is presently disabled")
        found.eligible_ms = self.now_ms + self.requeue_wait_ms
        restarts = (found.value.restarts or 0) + 1
        self._set(
            job, state="PENDING", reason="BeginTime", nodes=(), start_ms=None, end_ms=None, restarts=restarts
        )
        self.schedule()

    def cancel(self, job: int) -> None:
        checks.job_id(job)
        if job in self.jobs and not self.jobs[job].value.ended:
            self.finish(job, "CANCELLED")

    def update(self, job: int, change: JobChange) -> None:
        found = self._known(job)
        if found.value.ended:
            raise refusal(f"change job {job}", "Job/step already completing or completed")
        if change.comment is not None:
            self._set(job, comment=checks.one_line("the comment", change.comment))
        if change.time_limit_min is not None:
            self._set(job, time_limit_ms=change.time_limit_min * 60_000.0)
        if change.requeue is not None:
            found.spec = msgspec.structs.replace(found.spec, requeue=change.requeue)
        if change.start_now:
            found.eligible_ms = self.now_ms
        if change.held is not None:
            reason = "JobHeldAdmin" if change.held else ""
            self._set(job, priority=0 if change.held else 1000, reason=reason)
        self.schedule()

    def drain(self, node: str, reason: str) -> None:
        words = checks.reason(reason)
        found = self._node(node)
        found.states = (*(s for s in found.states if s != "DRAIN"), "DRAIN")
        found.reason = words

    def resume(self, node: str) -> None:
        found = self._node(node)
        found.states = tuple(s for s in found.states if s not in ("DRAIN", "DOWN")) or ("IDLE",)
        found.reason = ""
        self.schedule()

    def set_gres_count(self, node: str, name: str, count: int) -> None:
        checks.gres_word(name)
        checks.gres_count(count)
        found = self._node(node)
        known = total(found.configured, name) > 0
        if known:
            kept = tuple(g for g in found.live if g.name != name)
            found.live = (*kept, Gres(name=name, count=count)) if count else kept
        self.schedule()
        if total(found.live, name) != count:
            raise ClusterError(
                f"Slurm took {name}:{count} for node {node} and shows {total(found.live, name)}",
                code="no_effect",
                retryable=True,
            )

    # -- parts ------------------------------------------------------------------------------------------

    def _set(self, job: int, **changes: object) -> None:
        found = self.jobs[job]
        found.value = msgspec.structs.replace(found.value, **changes)

    def _known(self, job: int) -> FakeJob:
        checks.job_id(job)
        if job not in self.jobs:
            raise refusal(f"find job {job}", f"Invalid job id specified for job {job}")
        return self.jobs[job]

    def _node(self, node: str) -> FakeNode:
        if checks.one_node(node) not in self.nodes:
            raise refusal(f"find node {node}", "Invalid node name specified")
        return self.nodes[node]

    def _first_free(self, job: FakeJob) -> tuple[str, ...]:
        partition = next(p for p in self.partitions if p.name == job.value.partition)
        return next(((n,) for n in partition.nodes if self._fits(job, n)), ())

    def _fits(self, job: FakeJob, node: str) -> bool:
        found = self.nodes[node]
        if not Node(name=node, states=found.states).usable:
            return False
        used = self.used(node)
        free = tuple(
            msgspec.structs.replace(g, count=max(0, g.count - total(used, g.name, g.type)))
            for g in found.live
        )
        return self._holds(free, job.value.gres)

    @staticmethod
    def _holds(there: tuple[Gres, ...], asked: tuple[Gres, ...]) -> bool:
        return all(total(there, g.name, g.type) >= g.count for g in asked)


class FakeCluster:
    """`Cluster` over a `FakeSlurm`. `calls` says what was asked; `next_errors` are raised, one a call."""

    def __init__(self, slurm: FakeSlurm | None = None) -> None:
        self.slurm = FakeSlurm() if slurm is None else slurm
        self.calls: list[tuple[object, ...]] = []
        self.next_errors: list[ClusterError] = []
        self.hanging = False
        """Every call takes its whole time limit and then fails with `timeout`, at once here."""

    async def ping(self) -> None:
        await self._reach("ping")

    async def config(self, keys: Collection[str]) -> dict[str, str]:
        await self._reach("config", *keys)
        return {k: self.slurm.config[k] for k in keys if k in self.slurm.config}

    async def jobs(self, *, partitions: Collection[str] = (), ids: Collection[int] = ()) -> tuple[Job, ...]:
        await self._reach("jobs")
        return tuple(
            j.value
            for j in self.slurm.jobs.values()
            if (not partitions or j.value.partition in partitions) and (not ids or j.value.id in ids)
        )

    async def submit(self, spec: JobSpec) -> int:
        await self._reach("submit", spec.name)
        return self.slurm.submit(spec)

    async def signal(self, job: int, name: str, *, steps: bool = False) -> None:
        await self._reach("signal", job, name, steps)
        self.slurm.signal(job, name, steps)

    async def requeue(self, job: int) -> None:
        await self._reach("requeue", job)
        self.slurm.requeue(job)

    async def cancel(self, job: int) -> None:
        await self._reach("cancel", job)
        self.slurm.cancel(job)

    async def update_job(self, job: int, change: JobChange) -> None:
        await self._reach("update_job", job, change)
        self.slurm.update(job, change)

    async def nodes(self, names: Collection[str] = ()) -> tuple[Node, ...]:
        picked = [checks.one_node(n) for n in names]
        await self._reach("nodes", *picked)
        return tuple(n for n in self.slurm.list_nodes() if not picked or n.name in picked)

    async def drain(self, node: str, reason: str) -> None:
        await self._reach("drain", node, reason)
        self.slurm.drain(node, reason)

    async def resume(self, node: str) -> None:
        await self._reach("resume", node)
        self.slurm.resume(node)

    async def set_gres_count(self, node: str, name: str, count: int) -> None:
        await self._reach("set_gres_count", node, name, count)
        self.slurm.set_gres_count(node, name, count)

    async def partitions(self) -> tuple[Partition, ...]:
        await self._reach("partitions")
        return self.slurm.partitions

    async def reservations(self) -> tuple[Reservation, ...]:
        await self._reach("reservations")
        return self.slurm.reservations

    async def close(self) -> None:
        """Nothing is held."""

    async def _reach(self, *call: object) -> None:
        self.calls.append(call)
        await asyncio.sleep(0)
        if self.next_errors:
            raise self.next_errors.pop(0)
        if self.hanging:
            raise ClusterError("Slurm gave no answer in time", code="timeout", retryable=True)
        if self.slurm.down:
            raise ClusterError("no slurmctld answers (it is down)", code="unreachable", retryable=True)
