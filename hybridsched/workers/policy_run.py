"""A policy worker as a process: started, seen to reach Redis, stopped by a signal."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from hybridsched.cluster.hands import CommandHands
from hybridsched.log import get_logger
from hybridsched.store.connection import async_client, redact, store_errors
from hybridsched.workers.policy import PolicyWorker
from hybridsched.workers.policy_slurm import SlurmSide

if TYPE_CHECKING:
    from redis.asyncio import Redis

START_S = 3.0
"""How long Redis may be away when the worker starts."""

_log = get_logger("policy-worker")


async def run_policy(
    *,
    redis_url: str,
    pool: str,
    speed: float,
    standby: bool = True,
    scripts: Path | None = None,
    hand: Path | None = None,
) -> None:
    """Run a policy worker until SIGTERM or SIGINT; then its gates are closed.

    `scripts`: the folder below which the batch scripts of online replicas lie; None: the working directory.
    `hand`: the program that acts on hosts when they change their mode; None: no host can.

    Raises:
        StoreError: the URL cannot be understood, or nothing answers there for a while at the start. Later
            outages are waited out.
        PolicyWorkerError: another worker leads and `standby` is off.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    calm_collector()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    client = async_client(redis_url, name="hybridsched-policy")
    hands = None if hand is None else CommandHands(hand.resolve())
    slurm = SlurmSide(redis_url, pool, speed=speed, scripts=scripts or Path.cwd(), hands=hands)
    try:
        _log.info("Starting.", key="policy_start", pool=pool, redis=redact(redis_url), speed=speed)
        with store_errors(redis_url, "starting the policy worker"):
            await _reach(client)
        await PolicyWorker(client, pool, speed=speed, standby=standby, slurm=slurm).run(stop)
    finally:
        await asyncio.to_thread(slurm.end)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await client.aclose()
    _log.info("Stopped; the gates are closed.", key="policy_stop", pool=pool)


def calm_collector() -> None:
    """Keep the garbage collector from walking a large pool's snapshots several times in each cycle.

    The values of a snapshot form no cycles and are freed by their counts; the rest is collected less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def _reach(client: Redis) -> None:
    """Tell a wrong address from a server that is just starting: try for `START_S`, then raise."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            await client.ping()
        except (RedisError, OSError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)
        else:
            return
