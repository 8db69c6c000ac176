"""The policy worker's Slurm part, beside the cycles and in a thread of its own: a slow or dead slurmctld, or
a long list of jobs to parse, delays only this part and never a gate.

Observe: jobs and nodes through the `Cluster` protocol every `slurm.observe_ms`, replicas and holders of lanes
in Redis. Decide: `core.fill` (counts, the requeue rung) at every tick, `core.replicas` after every look. Act
and record: `policy_slurm_acts`. It acts only while its policy worker leads and cycles; nothing is asked of
Slurm after a look that failed.
"""

from __future__ import annotations

import asyncio
import getpass
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from redis.exceptions import RedisError

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.values import ClusterError
from hybridsched.core import fill, replicas
from hybridsched.core.fill import FillState, FillView, RequeueJob, SetFill
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.replica_values import Fleet, Phase, Seen
from hybridsched.log import get_logger
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.gpu_reports import GpuReports
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.workers.policy_observe import WaitingJobs
from hybridsched.workers.policy_slurm_acts import Acts, now_ms
from hybridsched.workers.policy_slurm_view import (
    LaneSeen,
    Look,
    SlurmStatus,
    fill_jobs,
    fill_lanes,
    fill_nodes,
    fill_view_jobs,
    hastened,
    replicas_seen,
    waiting_jobs,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

TICK_S = 0.1
"""Between two looks at the gates. An opening that comes meanwhile waits for this."""

LEADING_S = 3.0
"""A policy worker without a cycle for this long does not lead: it hangs, or Redis is away."""

RETRY_S = (1.0, 15.0)
"""After a look that failed; doubled up to the second."""

STATUS_LIFE_MS = 60_000
JOIN_S = 5.0
_CLOCK_DRIFT_MS = 5000.0

_log = get_logger("policy-slurm")


class SlurmSide:
    """What the policy worker and the Slurm part know of each other.

    `offer`, `gate` and `waiting` are the policy worker's and never wait. The thread starts when a policy
    wants it.
    """

    def __init__(
        self,
        redis_url: str,
        pool: str,
        *,
        speed: float = 1.0,
        scripts: Path | None = None,
        cluster: Callable[[], Cluster] = CommandCluster,
    ) -> None:
        self.redis_url, self.pool, self.speed = redis_url, pool, speed
        self.scripts = scripts or Path.cwd()
        self.cluster = cluster
        self.gates: dict[str, LaneSeen] = {}
        """Replaced, never changed: the thread reads it."""
        self.policy: PoolPolicy | None = None
        self.token = ""
        self.offered_s = 0.0
        self.found: WaitingJobs | None = None
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def offer(self, policy: PoolPolicy | None, token: str) -> None:
        """After each cycle: the policy in force and the leader's token."""
        if token != self.token:
            self.gates = {}
        self.policy, self.token, self.offered_s = policy, token, time.monotonic()
        if policy is not None and policy.slurm.enabled and self._thread is None:
            self._thread = threading.Thread(target=self._main, name="policy-slurm", daemon=True)
            self._thread.start()

    def gate(self, lane: str, *, is_open: bool) -> None:
        """A gate's decision has changed."""
        before = self.gates.get(lane)
        if before is None or before.open is not is_open:
            self.gates = {**self.gates, lane: LaneSeen(open=is_open, since_ms=now_ms())}

    def waiting(self) -> WaitingJobs | None:
        """The Slurm jobs that want lanes, as last seen; None: nobody looks."""
        policy = self.policy
        return self.found if policy is not None and policy.slurm.enabled else None

    def end(self) -> None:
        """Stop the thread; waits for a few seconds at most."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def in_charge(self) -> PoolPolicy | None:
        """The policy, while it wants Slurm steered and its worker leads and cycles."""
        policy = self.policy
        fresh = time.monotonic() - self.offered_s < LEADING_S
        wanted = policy is not None and policy.slurm.enabled
        return policy if wanted and fresh and self.token and not self.ended else None

    def _main(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception as error:
            _log.exception(
                "Slurm's part of the policy worker failed; gates go on, Slurm is left alone. Restart it.",
                key="slurm_part_failed",
                error=str(error),
            )
            raise

    async def _work(self) -> None:
        client = async_client(self.redis_url, name="hybridsched-policy-slurm")
        cluster = self.cluster()
        try:
            async with EventLog(client, self.pool) as events:
                await SlurmTask(self, cluster, client, events).run()
        finally:
            await cluster.close()
            await client.aclose()


class SlurmTask:
    """The loop. Runs in the thread of `SlurmSide`, or in any event loop."""

    def __init__(self, side: SlurmSide, cluster: Cluster, client: Redis, events: EventLog) -> None:
        self._side, self._cluster, self._client = side, cluster, client
        self._telemetry = TelemetryStore(client, side.pool)
        self._holders = LaneHolders(client, side.pool)
        self._reports = GpuReports(client, side.pool)
        self._status_key = Keys(side.pool).slurm_status
        self.acts = Acts(
            cluster,
            events,
            redis_url=side.redis_url,
            pool=side.pool,
            speed=side.speed,
            scripts=side.scripts,
            forget=self._forget,
        )
        self._user = getpass.getuser()
        self._token = ""
        self._fill = FillState()
        self.fleet = Fleet(born="none")
        self._look: Look | None = None
        self._epoch_to_ms = now_ms() - time.time() * 1000.0
        self._hastened: dict[int, int] = {}
        self._due_s = 0.0
        self._retry_s = RETRY_S[0]
        self.problem = ""

    async def run(self) -> None:
        """Until the policy worker ends."""
        while not self._side.ended:
            await self.turn()
            await asyncio.sleep(TICK_S)

    async def turn(self) -> None:
        """One tick: look when it is time, and tell Slurm what follows."""
        policy = self._side.in_charge()
        if policy is None:
            self._look, self._due_s = None, 0.0
            return
        if self._side.token != self._token:
            # A new term: what the last leader asked for is not known, what it wanted shows in Slurm.
            self._token = self._side.token
            self._fill, self.fleet = FillState(), Fleet(born=self._token.replace(":", "."))
        seen = None
        if time.monotonic() >= self._due_s:
            seen = await self._observe(policy)
        if self._look is not None and self._look.telemetry is not None:
            await self._steer_fill(self._look, policy)
        if seen is not None:
            await self._steer_replicas(seen, policy)
            await self._publish(seen, policy)

    async def _observe(self, policy: PoolPolicy) -> Seen | None:
        """Look at Slurm and at Redis. None: Slurm could not be read; nothing is asked of it then."""
        slurm = policy.slurm
        began = time.monotonic()
        try:
            jobs, nodes = await asyncio.gather(
                self._cluster.jobs(partitions=[slurm.partition_online, slurm.partition_offline]),
                self._cluster.nodes(),
            )
        except ClusterError as error:
            self._look = None
            self._due_s = time.monotonic() + self._retry_s
            self._retry_s = min(self._retry_s * 2, RETRY_S[1])
            if not self.problem:
                _log.warning(
                    "Slurm cannot be read: counts, requeues and replicas wait, gates go on. Tried again.",
                    key="slurm_unreadable",
                    code=error.code,
                    error=str(error),
                )
            self.problem = str(error)
            await self._publish(None, policy)
            return None
        if self.problem:
            _log.info("Slurm can be read again.", key="slurm_readable")
        self.problem, self._retry_s = "", RETRY_S[0]
        drift = now_ms() - time.time() * 1000.0 - self._epoch_to_ms
        if abs(drift) > _CLOCK_DRIFT_MS:
            self._epoch_to_ms += drift  # the wall clock was set
        look = Look(at_ms=began * 1000.0, jobs=jobs, nodes=nodes, telemetry=None)
        try:
            telemetry = await self._telemetry.read_all()
            holders = await self._holders.read_many(list(telemetry.places()))
            reports = await self._reports.read()
            look = msgspec.structs.replace(look, telemetry=telemetry, holders=holders, reports=reports)
        except (RedisError, OSError) as error:
            _log.warning(
                "Redis cannot be read, so nothing is known of replicas and lanes for now.",
                key="slurm_part_redis_outage",
                error=str(error),
            )
        self._look = look
        self._due_s = began + min(slurm.observe_ms, slurm.reassert_ms) / 1000.0
        self._side.found = waiting_jobs(jobs, slurm, began)
        return replicas_seen(look, pool=self._side.pool, user=self._user, epoch_to_ms=self._epoch_to_ms)

    async def _steer_fill(self, look: Look, policy: PoolPolicy) -> None:
        slurm = policy.slurm
        telemetry = look.telemetry
        if telemetry is None:
            return
        lanes = fill_lanes(telemetry, self._side.gates)
        jobs = fill_view_jobs(look, slurm, self._epoch_to_ms)
        self.acts.gone({job.job for job in jobs})
        view = FillView(
            now_ms=now_ms(),
            nodes=fill_nodes(look, slurm),
            lanes=lanes,
            jobs=jobs,
            jobs_seen_ms=look.at_ms,
            floor=policy.floor_gpus,
        )
        self._fill, plan = fill.plan(self._fill, view, slurm)
        live = {node.node: node.live or 0 for node in view.nodes}
        sets = [act for act in plan if isinstance(act, SetFill)]
        falling = [act for act in sets if act.count < live.get(act.node, 0)]
        rising = [act for act in sets if act not in falling]
        requeues = [act for act in plan if isinstance(act, RequeueJob)]
        for group in (falling, rising, requeues):
            await self._all(group, policy)
        if sets or requeues:
            self._due_s = 0.0  # see what came of it
        opened = sum(lane.open for lane in lanes)
        if opened > len(jobs):
            await self._hasten(look, policy, opened - len(jobs))

    async def _all(self, acts: Sequence[fill.Instruction], policy: PoolPolicy) -> None:
        """Side by side: one slow answer must not make every node wait."""
        if not acts or self._side.in_charge() is None:
            return
        answers = await asyncio.gather(*(self.acts.fill(act, policy.slurm) for act in acts))
        for act, at_ms in zip(acts, answers, strict=True):
            self._fill = fill.answered(self._fill, act, at_ms)

    async def _hasten(self, look: Look, policy: PoolPolicy, places: int) -> None:
        """Lanes are open, and jobs that could take them only sit out the wait after a requeue."""
        waiting = [job for job in fill_jobs(look.jobs, policy.slurm) if hastened(job)]
        self._hastened = {job.id: self._hastened.get(job.id, -1) for job in waiting}
        for job in waiting[:places]:
            if job.restarts is not None and self._hastened[job.id] != job.restarts:
                self._hastened[job.id] = job.restarts
                await self.acts.hasten(job.id)
                self._due_s = 0.0

    async def _steer_replicas(self, seen: Seen, policy: PoolPolicy) -> None:
        self.fleet, acts = replicas.step(self.fleet, seen, policy.slurm)
        for act in acts:
            if self._side.in_charge() is None:
                return
            self.fleet = replicas.note(self.fleet, act, await self.acts.replica(act, policy.slurm))

    async def _forget(self, job: int) -> None:
        try:
            await self._reports.remove(job)
        except (RedisError, OSError) as error:
            _log.warning("A report could not be removed.", key="gpu_report_kept", job=job, error=str(error))

    async def _publish(self, seen: Seen | None, policy: PoolPolicy) -> None:
        """The state for people who look. Without Redis nobody sees it."""
        slurm = policy.slurm
        look = self._look
        status = SlurmStatus(
            at_ms=time.time() * 1000.0, reachable=seen is not None, problem=self.problem or self.acts.problem
        )
        if seen is not None and look is not None:
            ours = fill_jobs(look.jobs, slurm)
            live = [job for job in seen.jobs if job.phase in (Phase.PENDING, Phase.RUNNING)]
            status = msgspec.structs.replace(
                status,
                fill={node.node: node.live for node in fill_nodes(look, slurm)},
                pending=sum(job.pending for job in ours),
                running=sum(job.running for job in ours),
                replicas={
                    r.group: {
                        "wanted": r.count,
                        "jobs": sum(job.group == r.group for job in live),
                        "serving": sum(job.group == r.group and bool(job.serving) for job in live),
                    }
                    for r in slurm.replicas
                },
                troubles={t.group: t.last for t in self.fleet.troubles},
            )
        try:
            await self._client.set(self._status_key, msgspec.json.encode(status), px=STATUS_LIFE_MS)
        except (RedisError, OSError) as error:
            _log.debug("The status was not published.", key="slurm_status_lost", error=str(error))
