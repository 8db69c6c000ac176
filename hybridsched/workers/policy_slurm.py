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
from hybridsched.cluster.hands import Hands, NoHands
from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.values import ClusterError
from hybridsched.core import fill, replicas
from hybridsched.core.fill_values import FillState, FillView, Instruction, RequeueJob, SetFill
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.replica_values import Fleet, Seen
from hybridsched.log import get_logger
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.gpu_reports import GpuReports
from hybridsched.store.job_models import JobModels
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.workers.policy_modes import ModeTask
from hybridsched.workers.policy_observe import WaitingJobs
from hybridsched.workers.policy_slurm_acts import Acts, now_ms
from hybridsched.workers.policy_slurm_models import Steer, job_models, serving_nodes
from hybridsched.workers.policy_slurm_status import seen_status
from hybridsched.workers.policy_slurm_upkeep import Upkeep
from hybridsched.workers.policy_slurm_view import (
    LaneSeen,
    Look,
    SlurmStatus,
    fill_jobs,
    fill_lanes,
    fill_nodes,
    fill_view_jobs,
    in_partitions,
    jobs_that_wait,
    place_name,
    pool_partitions,
    replicas_seen,
    requeue_wait_ms,
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

MOVING_S = 0.5
"""Between two looks while a host changes its mode."""

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
        hands: Hands | None = None,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        self.redis_url, self.pool, self.speed = redis_url, pool, speed
        self.scripts = scripts or Path.cwd()
        self.cluster = cluster
        self.hands: Hands = NoHands() if hands is None else hands
        self.clock_ms = clock_ms
        """The calendar's clock, ms of the epoch; None: the Redis server's."""
        self.shut: dict[str, str] = {}
        """Nodes on which the modes let no lane open, with why. Replaced, never changed."""
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
        wait_s = RETRY_S[0]
        while not self.ended:
            try:
                asyncio.run(self._work())
            except Exception as error:  # noqa: BLE001 - the thread's outer edge
                # No thread may end while counts stand open. What could be wrong here (no file descriptor for
                # an event loop, say) may end by itself.
                _log.exception(
                    "Slurm's part of the policy worker failed; gates go on, and it is started again.",
                    key="slurm_part_failed",
                    error=str(error),
                    again_s=wait_s,
                )
                self.found = None
                self._ended.wait(wait_s)
                wait_s = min(wait_s * 2, RETRY_S[1])

    async def _work(self) -> None:
        client = async_client(self.redis_url, name="hybridsched-policy-slurm")
        cluster = self.cluster()
        try:
            async with EventLog(client, self.pool) as events:
                task = SlurmTask(self, cluster, client, events)
                try:
                    await task.run()
                finally:
                    await task.close()
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
        self._modes = ModeTask(
            cluster,
            side.hands,
            client,
            events,
            pool=side.pool,
            user=getpass.getuser(),
            clock_ms=side.clock_ms,
        )
        self._user = getpass.getuser()
        self._token = ""
        self._fill = FillState()
        self.fleet = Fleet(born="none")
        self._look: Look | None = None
        self._wait_ms: float | None = None
        """What this slurmctld makes a requeued job wait; None: to be asked."""
        self._epoch_to_ms = now_ms() - time.time() * 1000.0
        self._upkeep = Upkeep(self.acts)
        self._steer = Steer(self.acts)
        self._models = JobModels(client, side.pool)
        self._said: dict[str, str] = {}
        """The models that jobs have said, as last read."""
        self._due_s = 0.0
        self._retry_s = RETRY_S[0]
        self.problem = ""

    async def run(self) -> None:
        """Until the policy worker ends."""
        while not self._side.ended:
            try:
                await self.turn()
            except Exception as error:  # noqa: BLE001 - the loop's outer edge
                _log.exception(
                    "A turn of Slurm's part failed; nothing is done about Slurm until the next look at it.",
                    key="slurm_turn_failed",
                    error=str(error),
                )
                self._unread(f"{type(error).__name__}: {error}")
            await self._modes.rest(TICK_S)

    async def close(self) -> None:
        """End what still runs."""
        await self._modes.close()

    async def turn(self) -> None:
        """One tick: look when it is time, and tell Slurm what follows."""
        policy = self._side.in_charge()
        if policy is None:
            self._look, self._due_s = None, 0.0
            self._side.shut = {}
            await self._modes.stand_down(self._side.token)
            return
        given = policy
        policy = msgspec.structs.replace(policy, slurm=self._modes.replicas(given))
        if self._side.token != self._token:
            # A new term: what the last leader asked for is not known, what it wanted shows in Slurm.
            self._token = self._side.token
            self._fill, self.fleet = FillState(), Fleet(born=self._token.replace(":", "."))
            self._upkeep, self._steer = Upkeep(self.acts), Steer(self.acts)
        seen = None
        if time.monotonic() >= self._due_s:
            seen = await self._observe(policy)
            policy = msgspec.structs.replace(policy, slurm=self._modes.replicas(given))
            await self._keep_away(policy)  # before counts rise, so that no job starts where its model is not
        elif await self._modes.chain(policy):
            self._due_s = 0.0
        if self._look is not None and self._look.telemetry is not None:
            await self._steer_fill(self._look, policy)
        if seen is not None and self._look is not None:
            await self._upkeep.look(self._look, policy.slurm)
        if seen is not None:
            await self._steer_replicas(seen, policy)
            await self._publish(seen, policy)

    async def _observe(self, policy: PoolPolicy) -> Seen | None:
        """Look at Slurm and at Redis. None: Slurm could not be read; nothing is asked of it then."""
        slurm = policy.slurm
        began, began_ms = time.monotonic(), self._modes.now_ms()
        try:
            everyone, nodes = await asyncio.gather(
                self._cluster.jobs(partitions=() if policy.modes is not None else pool_partitions(slurm)),
                self._cluster.nodes(),
            )
            jobs = in_partitions(everyone, slurm)
            if self._wait_ms is None:
                self._wait_ms = requeue_wait_ms(await self._cluster.config(["AuthInfo"]))
        except ClusterError as error:
            if not self.problem:
                _log.warning(
                    "Slurm cannot be read: counts, requeues and replicas wait, gates go on. Tried again.",
                    key="slurm_unreadable",
                    code=error.code,
                    error=str(error),
                )
            self._unread(str(error))
            await self._modes.look(policy, self._side.token, None, (), None)
            await self._publish(None, policy)
            return None
        if self.problem:
            _log.info("Slurm can be read again.", key="slurm_readable")
        self.problem, self._retry_s = "", RETRY_S[0]
        drift = now_ms() - time.time() * 1000.0 - self._epoch_to_ms
        if abs(drift) > _CLOCK_DRIFT_MS:
            self._epoch_to_ms += drift  # the wall clock was set
        look = Look(at_ms=began * 1000.0, jobs=jobs, nodes=nodes, telemetry=None, wait_ms=self._wait_ms)
        try:
            telemetry = await self._telemetry.read_all()
            holders = await self._holders.read_many(list(telemetry.places()))
            reports = await self._reports.read()
            look = msgspec.structs.replace(look, telemetry=telemetry, holders=holders, reports=reports)
            ours = [job for job in fill_jobs(jobs, slurm) if not job.ended]
            self._said = dict(await self._models.read([place_name(job) for job in ours]))
        except (RedisError, OSError) as error:
            _log.warning(
                "Redis cannot be read, so nothing is known of replicas and lanes for now.",
                key="slurm_part_redis_outage",
                error=str(error),
            )
        look = msgspec.structs.replace(look, models=job_models(fill_jobs(jobs, slurm), self._said))
        self._look = look
        self._due_s = began + min(slurm.observe_ms, slurm.reassert_ms) / 1000.0
        self._side.found = waiting_jobs(jobs, slurm, began, look.models, look.wait_ms)
        await self._modes.look(policy, self._side.token, everyone, nodes, look.telemetry, began_ms)
        self._side.shut = self._modes.shut_nodes(policy)
        if self._modes.moving:
            self._due_s = min(self._due_s, began + MOVING_S)
        return replicas_seen(
            look,
            pool=self._side.pool,
            user=self._user,
            epoch_to_ms=self._epoch_to_ms,
            leaving=self._modes.leaving_nodes(policy),
            moves=self._modes.moves(policy, look.nodes),
        )

    async def _keep_away(self, policy: PoolPolicy) -> None:
        look = self._look
        if look is None or look.telemetry is None:
            return
        if await self._steer.look(look, policy.slurm, self._serving(look, policy)):
            self._due_s = 0.0  # see what came of it

    def _serving(self, look: Look, policy: PoolPolicy) -> dict[str, frozenset[str]]:
        return serving_nodes(look, policy.slurm, pool=self._side.pool, user=self._user)

    def _unread(self, why: str) -> None:
        """Nothing is known of Slurm until the next look."""
        self._look = None
        self._wait_ms = None  # slurmctld may come back with another
        self._due_s = time.monotonic() + self._retry_s
        self._retry_s = min(self._retry_s * 2, RETRY_S[1])
        self.problem = why

    async def _steer_fill(self, look: Look, policy: PoolPolicy) -> None:
        slurm = policy.slurm
        telemetry = look.telemetry
        if telemetry is None:
            return
        lanes = fill_lanes(telemetry, self._side.gates)
        jobs = fill_view_jobs(look, slurm, self._epoch_to_ms)
        addresses = {job.id: job.address for job in look.jobs}
        self.acts.there({job.job: addresses[job.job] for job in jobs})
        view = FillView(
            now_ms=now_ms(),
            nodes=fill_nodes(look, slurm),
            lanes=lanes,
            jobs=jobs,
            jobs_seen_ms=look.at_ms,
            waiting=frozenset(
                look.models.get(job.id) for job in jobs_that_wait(look.jobs, slurm, look.wait_ms)
            ),
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
        free = fill.offered(self._fill)
        if free and await self._upkeep.hasten(look, slurm, free):
            self._due_s = 0.0

    async def _all(self, acts: Sequence[Instruction], policy: PoolPolicy) -> None:
        """Side by side: one slow answer must not make every node wait."""
        if not acts or self._side.in_charge() is None:
            return
        answers = await asyncio.gather(*(self.acts.fill(act, policy.slurm) for act in acts))
        for act, at_ms in zip(acts, answers, strict=True):
            self._fill = fill.answered(self._fill, act, at_ms)

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
            status = seen_status(
                status,
                look,
                seen,
                slurm,
                epoch_to_ms=self._epoch_to_ms,
                serving=self._serving(look, policy),
                troubles={t.group: t.last for t in self.fleet.troubles} | self._upkeep.troubles,
            )
        try:
            await self._client.set(self._status_key, msgspec.json.encode(status), px=STATUS_LIFE_MS)
        except (RedisError, OSError) as error:
            _log.debug("The status was not published.", key="slurm_status_lost", error=str(error))
