"""`hybridsched worker offline` as a process: its lane to itself, until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from redis import RedisError

from hybridsched import notice
from hybridsched.engines.request_log import RequestLog
from hybridsched.store.connection import async_client
from hybridsched.store.lane_holders import LaneHolders, Place
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.lane_alone import check_alone, watch_alone
from hybridsched.workers.lane_claim import Tenure
from hybridsched.workers.lane_own import OwnLane, owner_here
from hybridsched.workers.lane_replica import watch_replica
from hybridsched.workers.offline import SWITCH_S, OfflineWorker


async def run_offline(
    *,
    redis_url: str,
    pool: str,
    lane: str,
    replica: str,
    model: str,
    engine_url: str,
    speed: float,
    burst: bool = False,
    request_log: RequestLog | None = None,
    own_engine: bool = False,
) -> None:
    """Run the lane until SIGTERM, SIGINT or SIGUSR2, or with `burst` until no batch is left.

    A stop ends what is in flight and keeps its tokens; chunks go back to the queue with their place. It waits
    for Redis and for the engine for ever. When the lane could not be kept (Redis was away too long) it is
    taken again. `own_engine`: see `OfflineWorker`.

    Raises:
        EngineSharedError: with `own_engine`, somebody else uses the engine too.
        LaneTakenError: another living worker, or a Slurm job, has the lane.
        StoreUrlError: the URL cannot be understood.
    """
    sys.setswitchinterval(SWITCH_S)
    logging.getLogger("rq").setLevel(logging.WARNING)  # it writes six lines for each chunk
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        loop.add_signal_handler(number, stop.set)
    if notice.came():
        stop.set()
    client = async_client(redis_url, name=f"offline-{lane}-hold")
    place = Place(lane=lane, replica=replica, model=model, url=engine_url)
    own = OwnLane(LaneHolders(client, pool), place, owner=owner_here())
    looking: list[asyncio.Task[None]] = []
    if not own_engine:
        look = watch_replica(client, pool, replica=replica, url=engine_url)
        looking.append(asyncio.create_task(look, name="replica"))
    try:
        while not stop.is_set() and (tenure := await own.take(stop)) is not None:
            if own_engine:
                with suppress(RedisError, OSError):  # the watch below looks again
                    await check_alone(client, pool, lane=lane, url=engine_url)
            worker = OfflineWorker(
                redis_url=redis_url,
                pool=pool,
                lane=lane,
                replica=replica,
                model=model,
                engine_url=engine_url,
                speed=speed,
                burst=burst,
                request_log=request_log,
                own_engine=own_engine,
            )
            alone = watch_alone(client, pool, lane=lane, url=engine_url) if own_engine else None
            if await _hold_and_run(worker, tenure, stop, alone):
                return
    finally:
        await end_tasks(*looking)
        await client.aclose()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            loop.remove_signal_handler(number)


async def _hold_and_run(
    worker: OfflineWorker,
    tenure: Tenure,
    stop: asyncio.Event,
    alone: Coroutine[Any, Any, None] | None,
) -> bool:
    """Run the worker while its lane is held, and `alone` beside it, whose end is an error. Returns whether it
    ended by itself, or by `stop`."""
    leave = asyncio.Event()
    keeping = asyncio.create_task(tenure.run(), name="tenure")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    running = asyncio.create_task(worker.run(leave), name="lane")
    others = [keeping, stopping]
    if alone is not None:
        others.append(looking := asyncio.create_task(alone, name="alone"))
    try:
        await asyncio.wait([running, *others], return_when=asyncio.FIRST_COMPLETED)
        over = running.done() or stop.is_set()
    finally:
        leave.set()
        await asyncio.wait([running])
        shared = alone is not None and looking.done()
        await end_tasks(*others)
        await tenure.end()
    running.result()  # a worker that failed says so here
    if shared:
        looking.result()  # so does the look at who else uses the engine
    return over
