"""The online worker: one process beside one engine, which pulls requests, runs them and answers them.

It observes (engine, telemetry), asks core (room), acts (claim, run, answer) and records (events). The parts:

    online_intake     claims, leases, cancellations, the replica's record
    online_jobs       the requests it holds
    online_serve      one request against the engine
    online_outbox     tokens and ends, back to the client
    online_engine     the engine's health and metrics
    online_telemetry  what the policy worker is told
    online_policy     the policy in force
    online_orphans    offline requests whose worker has frozen
    online_name       the replica's name, which one worker has at a time
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import RedisError

from hybridsched.engines.protocol import Engine
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.log import get_logger
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.online import OnlineQueue, new_consumer
from hybridsched.store.policy import PolicyStore
from hybridsched.store.replica_names import NameHolder, ReplicaName
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.telemetry.process_memory import ProcessMemory
from hybridsched.telemetry.protocol import GpuSampler
from hybridsched.workers.online_engine import HUNG_S, EngineWatch
from hybridsched.workers.online_intake import Intake, IntakeOptions
from hybridsched.workers.online_jobs import JobOptions, Jobs
from hybridsched.workers.online_name import LIFE_S, NameHold
from hybridsched.workers.online_orphans import OrphanWatch
from hybridsched.workers.online_policy import PolicyFollower
from hybridsched.workers.online_serve import Stop
from hybridsched.workers.online_tasks import run_together
from hybridsched.workers.online_telemetry import OnlineCounts, TelemetryPublisher

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


class OnlineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a site may want otherwise. Seconds where not said."""

    intake: IntakeOptions = IntakeOptions()
    jobs: JobOptions = JobOptions()
    hung_s: float = HUNG_S
    drain_s: float = 30.0
    """After SIGTERM: how long what is in flight may still take before it is given back or failed."""
    goodbye_s: float = 5.0
    """After that: how long the last answers may take."""
    name_life_s: float = LIFE_S
    """Life of the hold on the replica's name. All workers of a pool must use the same."""


class OnlineWorker:
    """One replica's loop. `lane` is the shared lane on its engine; None when no offline work may share it.

    `node` and `job` say where it runs in Slurm. `restart` is called when the engine has to be started again,
    for whoever starts it here; who does so from outside finds it in the replica's record.
    """

    def __init__(
        self,
        *,
        replica: str,
        model: str,
        engine: Engine,
        queue: OnlineQueue,
        telemetry: TelemetryStore,
        policies: PolicyStore,
        events: EventLog,
        lane: str | None = "",
        speed: float = 1.0,
        sampler: GpuSampler | None = None,
        node: str = "",
        job: str = "",
        options: OnlineOptions | None = None,
        restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options = options or OnlineOptions()
        self._log = get_logger("online").bind(replica=replica)
        self._replica = replica
        self._telemetry = telemetry
        self._queue = queue
        lane = replica if lane == "" else lane
        consumer = new_consumer(replica)
        self._name = NameHold(
            ReplicaName(
                queue.client,
                queue.keys.pool,
                replica,
                NameHolder(owner=consumer, host=socket.gethostname(), pid=os.getpid()),
                life_ms=int(options.name_life_s * 1000),
            ),
            replica=replica,
            life_s=options.name_life_s,
        )
        self._orphans = OrphanWatch(engine, queue.client, queue.keys.pool, lane) if lane else None
        self.counts = OnlineCounts()
        self.watch = EngineWatch(
            engine,
            model=model,
            held=lambda: self.counts.inflight,
            offline=lambda: self._publisher.offline,
            changed=self._health_changed,
            hung=self._engine_hung,
            ended=lambda: self.jobs.stop_all(Stop.ENGINE_OUT),
            hung_s=options.hung_s,
            limits=lambda: self.policy.policy.health,
            memory=ProcessMemory(engine.url).mib,
            restart=restart,
        )
        self.policy = PolicyFollower(policies, speed=speed, changed=lambda: self.intake.changed())
        self.intake = Intake(
            queue,
            model=model,
            replica=replica,
            consumer=consumer,
            lane=lane,
            counts=self.counts,
            watch=self.watch,
            policy=self.policy,
            events=events,
            options=options.intake,
        )
        self.jobs = Jobs(
            engine,
            queue,
            replica=replica,
            counts=self.counts,
            watch=self.watch,
            lighter=self.intake.lighter,
            others=self.intake.others,
            options=options.jobs,
        )
        self._publisher = TelemetryPublisher(
            telemetry,
            replica=replica,
            model=model,
            lane=lane or "",
            url=engine.url,
            counts=self.counts,
            watch=self.watch,
            sampler=sampler,
            node=node,
            job=job,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set; then finish or give back what is held, and leave the pool.

        Raises:
            NameTakenError: another worker has the replica's name.
        """
        if not await self._begin(stop):
            return
        loops = asyncio.create_task(self._loops(), name="online-loops")
        stopped = asyncio.create_task(stop.wait(), name="online-stop")
        lost = asyncio.create_task(self._name.lost.wait(), name="online-name-lost")
        try:
            await asyncio.wait([loops, stopped, lost], return_when=asyncio.FIRST_COMPLETED)
            if not loops.done():
                await self._drain()
        finally:
            await end_tasks(stopped, lost, loops)
            await self.jobs.abandon()
        if not loops.cancelled():
            loops.result()  # a loop that failed says so here
        if self._name.lost.is_set():
            await self._queue.drain()
            raise self._name.error()  # the records are the other's by now
        await self._goodbye()

    async def _begin(self, stop: asyncio.Event) -> bool:
        """Take the replica's name. False: told to stop meanwhile."""
        taking = asyncio.create_task(self._name.take(), name="online-name")
        stopped = asyncio.create_task(stop.wait(), name="online-stop")
        try:
            await asyncio.wait([taking, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                return False
            taking.result()
            return True
        finally:
            await end_tasks(taking, stopped)

    async def _loops(self) -> None:
        orphans = {} if self._orphans is None else {"orphans": self._orphans.run()}
        await run_together(
            **orphans,
            name=self._name.keep(),
            policy=self.policy.run(),
            engine=self.watch.run(),
            telemetry=self._publisher.run(),
            intake=self.intake.run(self.jobs),
        )

    async def _drain(self) -> None:
        self._log.info(
            "Stopping: no request is taken any more, those in flight may end.",
            key="online_stopping",
            inflight=self.counts.inflight,
        )
        await self.intake.stop()
        if await self.jobs.drain(self._options.drain_s):
            return
        self._log.warning(
            "Requests in flight did not end in time; they are given back, or failed where tokens were sent.",
            key="online_cut",
            inflight=self.counts.inflight,
        )
        self.jobs.stop_all(Stop.STOPPING)
        await self.jobs.drain(self._options.goodbye_s)

    async def _goodbye(self) -> None:
        """Leave the records. Without a store they run out by themselves."""
        leave: tuple[Callable[[], Awaitable[Any]], ...] = (
            self._queue.drain,
            self.intake.leave,
            lambda: self._telemetry.withdraw(self._replica),
            self._name.release,
        )
        for step in leave:
            try:
                async with asyncio.timeout(self._options.goodbye_s):
                    await step()
            except (RedisError, OSError) as error:
                self._log.warning(
                    "The replica could not be signed off; its records run out within seconds.",
                    key="online_not_signed_off",
                    error=str(error),
                )
                return

    def _health_changed(self, healthy: bool) -> None:
        self.intake.changed()
        self.counts.edge.set()

    def _engine_hung(self) -> None:
        if self.counts.inflight:
            self._log.error(
                "The engine has stopped answering; its requests are given to another replica or failed.",
                key="engine_hung",
                inflight=self.counts.inflight,
            )
        self.jobs.stop_all(Stop.ENGINE_HUNG)


async def run_online(
    *,
    redis_url: str,
    pool: str,
    replica: str,
    model: str,
    engine_url: str,
    speed: float = 1.0,
    log: FilteringBoundLogger | None = None,
    sampler: GpuSampler | None = None,
    options: OnlineOptions | None = None,
) -> None:
    """Run one replica's online worker until SIGTERM or SIGINT.

    Waits for the engine and for Redis as long as it takes.

    Raises:
        StoreUrlError: `redis_url` cannot be understood.
        ValueError: `pool`, `replica` or `model` cannot stand in a key.
        NameTakenError: another worker has the replica's name.
    """
    log = log or get_logger("online")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = async_client(redis_url, name=f"hybridsched-online-{replica}")
    engine = VllmHttpEngine(engine_url)
    log.info("The online worker has started.", key="online_started", replica=replica, engine=engine_url)
    try:
        async with EventLog(client, pool) as events:
            worker = OnlineWorker(
                replica=replica,
                model=model,
                engine=engine,
                queue=OnlineQueue(client, pool),
                telemetry=TelemetryStore(client, pool),
                policies=PolicyStore(client, pool),
                events=events,
                speed=speed,
                sampler=sampler,
                options=options,
            )
            await worker.run(stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await engine.close()
        await client.aclose()
    log.info("The online worker has stopped.", key="online_stopped", replica=replica)
