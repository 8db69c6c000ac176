"""A Slurm in memory, for tests: it starts jobs by itself when their GRES are there, as the real one does.

`FakeSlurm` is the cluster as plain data (it goes through JSON), `FakeCluster` the protocol over it. Behaviour
follows what was seen on Slurm 22.05: an entry with count 0 leaves a node's list, a lowered count leaves
running jobs alone, a registration (`reconfigure` brings one) puts configured counts back and takes a node out
of service that has jobs on a consumed GRES whose count is another one, an unknown GRES is ignored without a
word, a requeued job waits before it may start again. No array can be submitted (its tasks may be put in as
jobs: the array's bare id then means all of them, as it does for Slurm), no backfill, no preemption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import msgspec

from hybridsched.cluster import checks
from hybridsched.cluster.fake_values import FakeJob as FakeJob
from hybridsched.cluster.fake_values import FakeNode as FakeNode
from hybridsched.cluster.fake_values import default_nodes, default_partitions
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


class FakeSlurm(msgspec.Struct, kw_only=True):
    """Four nodes with four GPUs and a parked one, partitions online and offline, unless told otherwise."""

    nodes: dict[str, FakeNode] = msgspec.field(default_factory=default_nodes)
    partitions: tuple[Partition, ...] = msgspec.field(default_factory=default_partitions)
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
        """`scontrol reconfigure`: every node registers."""
        for name in self.nodes:
            self.register(name)
        self.schedule()

    def register(self, name: str) -> None:
        """A node reports what it is configured with, as it does now and then by itself."""
        node = self.nodes[name]
        used = self.used(name)
        changed = [
            g.name
            for g in node.configured
            if total(node.live, g.name, g.type) != g.count and total(used, g.name, g.type)
        ]
        node.live = node.configured
        if changed:
            node.states = (*(s for s in node.states if s not in ("DRAIN", "INVAL")), "DRAIN", "INVAL")
            node.reason = f"gres/{changed[0]} count changed and jobs are using them"

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
                self._set(
                    job.value.id,
                    state="RUNNING",
                    nodes=places,
                    start_ms=self.now_ms,
                    begin_ms=None,
                    reason="",
                )
            else:
                self._set(job.value.id, begin_ms=None, reason="Resources")

    def used(self, node: str) -> tuple[Gres, ...]:
        """What running jobs hold on a node. Nobody holds what is not consumed."""
        free = self.nodes[node].not_consumed
        asked = [
            g for j in self.jobs.values() if j.value.running and node in j.value.nodes for g in j.value.gres
        ]
        live = self.nodes[node].configured
        return tuple(
            msgspec.structs.replace(
                g,
                count=sum(
                    a.count
                    for a in asked
                    if a.name == g.name and a.name not in free and a.type in (None, g.type)
                ),
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
                booted_ms=n.booted_ms,
                started_ms=n.started_ms,
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
        named = (*spec.nodes, *spec.excluded)
        if any(n not in self.nodes for n in named):
            raise refusal(f"take job {spec.name!r}", "Invalid node name specified")
        possible = [n for n in (spec.nodes or partition.nodes) if n in self.nodes and n not in spec.excluded]
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
            required=spec.nodes,
            excluded=spec.excluded,
            comment=spec.comment or "",
            restarts=0,
            priority=0 if spec.hold else 1000,
            submit_ms=self.now_ms,
            time_limit_ms=None if spec.time_limit_min is None else spec.time_limit_min * 60_000.0,
        )
        self.jobs[number] = FakeJob(value=value, spec=spec)
        self.schedule()
        return number

    def signal(self, job: int, name: str, steps: bool, task: int | None = None) -> None:
        name = checks.signal_name(name)
        for found in self._meant(job, task):
            if found.value.ended:
                raise refusal(f"send {name} to job {job}", "Invalid job id specified")
            if found.value.running:
                self.signals.append((found.value.id, name, steps))

    def requeue(self, job: int, task: int | None = None) -> None:
        for found in self._meant(job, task):
            if found.value.pending:
                raise refusal(f"requeue job {job}", f"Job is pending execution for job {job}")
            if found.spec.requeue is False:
                raise refusal(f"requeue job {job}", "Requested operation is presently disabled")
            found.eligible_ms = self.now_ms + self.requeue_wait_ms
            self._set(
                found.value.id,
                state="PENDING",
                reason="BeginTime",
                nodes=(),
                submit_ms=self.now_ms,
                begin_ms=found.eligible_ms,
                start_ms=None,
                end_ms=None,
                restarts=(found.value.restarts or 0) + 1,
            )
        self.schedule()

    def cancel(self, job: int) -> None:
        checks.job_id(job)
        if job in self.jobs and not self.jobs[job].value.ended:
            self.finish(job, "CANCELLED")

    def update(self, job: int, change: JobChange, task: int | None = None) -> None:
        excluded = None if change.excluded is None else tuple(map(checks.one_node, change.excluded))
        for found in self._meant(job, task):
            number = found.value.id
            if found.value.ended:
                raise refusal(f"change job {job}", "Job/step already completing or completed")
            if excluded is not None:
                if not found.value.pending:
                    raise refusal(f"change job {job}", "Job is no longer pending execution")
                self._set(number, excluded=excluded)
            if change.comment is not None:
                self._set(number, comment=checks.one_line("the comment", change.comment))
            if change.time_limit_min is not None:
                self._set(number, time_limit_ms=change.time_limit_min * 60_000.0)
            if change.requeue is not None:
                found.spec = msgspec.structs.replace(found.spec, requeue=change.requeue)
            if change.start_now:
                found.eligible_ms = self.now_ms
                self._set(number, begin_ms=None)
            if change.held is not None:
                reason = "JobHeldAdmin" if change.held else ""
                self._set(number, priority=0 if change.held else 1000, reason=reason)
        self.schedule()

    def drain(self, node: str, reason: str) -> None:
        words = checks.reason(reason)
        found = self._node(node)
        found.states = (*(s for s in found.states if s != "DRAIN"), "DRAIN")
        found.reason = words

    def take_down(self, node: str, reason: str) -> None:
        words = checks.reason(reason)
        found = self._node(node)
        found.states = ("DOWN", *(s for s in found.states[1:] if s != "DOWN"))
        found.reason = words
        for job in [j.value.id for j in self.jobs.values() if j.value.running and node in j.value.nodes]:
            self.finish(job, "NODE_FAIL")

    def reserve(self, name: str, nodes: Collection[str], start_ms: float, minutes: int) -> None:
        checks.reservation(name, nodes, start_ms, minutes)
        made = Reservation(
            name=name, nodes=tuple(nodes), start_ms=start_ms, end_ms=start_ms + minutes * 60_000.0
        )
        self.reservations = (*(r for r in self.reservations if r.name != name), made)

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

    def _meant(self, job: int, task: int | None) -> list[FakeJob]:
        """The job, the task of an array, or every task of one that its bare id means."""
        checks.job_address(job, task)
        if task is None and not any(j.value.array_job == job for j in self.jobs.values()):
            return [self._known(job)]
        found = [
            j for j in self.jobs.values() if j.value.array_job == job and task in (None, j.value.array_task)
        ]
        if not found:
            raise refusal(f"find job {job}_{task}", "Invalid job id specified")
        return found

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
        if node in job.value.excluded:
            return False
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

    async def signal(self, job: int, name: str, *, steps: bool = False, task: int | None = None) -> None:
        await self._reach("signal", job, name, steps)
        self.slurm.signal(job, name, steps, task)

    async def requeue(self, job: int, *, task: int | None = None) -> None:
        await self._reach("requeue", job)
        self.slurm.requeue(job, task)

    async def cancel(self, job: int) -> None:
        await self._reach("cancel", job)
        self.slurm.cancel(job)

    async def update_job(self, job: int, change: JobChange, *, task: int | None = None) -> None:
        await self._reach("update_job", job, change)
        self.slurm.update(job, change, task)

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

    async def down(self, node: str, reason: str) -> None:
        await self._reach("down", node, reason)
        self.slurm.take_down(node, reason)

    async def reserve(self, name: str, nodes: Collection[str], start_ms: float, minutes: int) -> None:
        await self._reach("reserve", name)
        self.slurm.reserve(name, nodes, start_ms, minutes)

    async def unreserve(self, name: str) -> None:
        await self._reach("unreserve", name)
        self.slurm.reservations = tuple(r for r in self.slurm.reservations if r.name != name)

    async def reconfigure(self) -> None:
        await self._reach("reconfigure")
        self.slurm.reconfigure()

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
