"""What the online queue costs a request: round trips a second, and latency at 1,000 requests a second.

    python benchmarks/request_roundtrips.py [--seconds 4] [--json]

One client process, one worker process whose engine does nothing, one Valkey on a unix socket (no AOF, as for
the peers), all on this machine. A round trip is accept -> claim -> one reply -> client. Peers:

- streams: the least that can be done with Redis streams: XADD, XREADGROUP by a consumer group, one pipeline
  of XADD (reply) + XACK + XDEL for all that was read, one XREAD for all replies. No deadline, no accept-once,
  no fence, no priorities, no gate. Batched and pipelined as ours is.
- rq: RQ jobs (JSON serializer) run by a SimpleWorker (no fork) in burst mode; the result is kept, and awaited
  by its `Job.latest_result(timeout)`; enqueued in one pipeline by `enqueue_many`.

Throughput is closed loop with CONCURRENCY requests under way; latency is open loop: requests start on a fixed
schedule whatever the answers do, and the latency counts from the scheduled start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import psutil
import redis

from hybridsched.client import AsyncClient
from hybridsched.store.connection import EmbeddedValkey, async_client, sync_client
from hybridsched.store.online import OnlineQueue, new_consumer
from hybridsched.store.online_values import End, EndStatus

CONCURRENCY = 1024
RATE = 1000.0
BODY = {"prompt": list(range(32)), "max_tokens": 16}
ANSWER = msgspec.Raw(b'{"id":"cmpl-0","choices":[{"index":0,"text":"ok","finish_reason":"stop"}]}')
MODEL = "bench"
NOTHING = "operator.index"
"""What the RQ worker calls: as little as ours does."""


# the worker processes


def serve_ours(url: str) -> None:
    asyncio.run(_serve_ours(url))


async def _serve_ours(url: str) -> None:
    client = async_client(url)
    queue = OnlineQueue(client, "bench")
    consumer = new_consumer("r0")
    end = End(status=EndStatus.OK, finish_reason="stop", body=ANSWER, usage={"completion_tokens": 1})
    await queue.register_replica(MODEL, "r0", load=0, inflight=0, cap=4096)
    wake = asyncio.Event()

    async def listen() -> None:
        async for _ in queue.signals("r0"):
            wake.set()

    listener = asyncio.create_task(listen())
    while not listener.done():
        wake.clear()
        claimed = await queue.claim(MODEL, "r0", consumer, load=0, inflight=0, cap=4096, limit=512, lane="r0")
        if claimed:
            await queue.finish_many([(request, end) for request in claimed])
        if len(claimed) < 512:  # all there was: what comes now wakes us
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await wake.wait()


def serve_streams(url: str) -> None:
    asyncio.run(_serve_streams(url))


async def _serve_streams(url: str) -> None:
    client: Any = async_client(url)
    client.response_callbacks.pop("XREADGROUP", None)
    await client.xgroup_create("requests", "g", id="0", mkstream=True)
    while True:
        answer = await client.execute_command(
            *("XREADGROUP", "GROUP", "g", "w", "COUNT", 512, "BLOCK", 1000, "STREAMS", "requests", ">")
        )
        if not answer:
            continue
        pipe = client.pipeline(transaction=False)
        entries = answer[0][1]
        for _, flat in entries:
            pipe.execute_command("XADD", flat[3], "*", "id", flat[1], "end", bytes(ANSWER))
        ids = [entry for entry, _ in entries]
        pipe.execute_command("XACK", "requests", "g", *ids)
        pipe.execute_command("XDEL", "requests", *ids)
        await pipe.execute()


def serve_rq(url: str) -> None:
    import logging

    from rq import Queue, SimpleWorker
    from rq.serializers import JSONSerializer

    logging.disable(logging.CRITICAL)
    connection = redis.Redis.from_url(url)
    queue = Queue("bench", connection=connection, serializer=JSONSerializer)
    SimpleWorker([queue], connection=connection, serializer=JSONSerializer).work(burst=False)


# the client process


class StreamsClient:
    """The plain peer's client: as our client coalesces and reads, and no more."""

    def __init__(self, url: str) -> None:
        from hybridsched.store.coalesce import Coalescer

        self._client: Any = async_client(url)
        self._reads: Any = async_client(url)
        self._reads.response_callbacks.pop("XREAD", None)
        self._sends: Coalescer[bytes, Any] = Coalescer(self._send)
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._count = 0
        self._body = msgspec.json.encode(BODY)
        self._reader = asyncio.create_task(self._read())

    async def _send(self, ids: Any) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for request_id in ids:
            pipe.execute_command(
                "XADD", "requests", "*", "id", request_id, "reply", "replies", "b", self._body
            )
        return list(await pipe.execute())

    async def _read(self) -> None:
        last = b"0-0"
        while True:
            answer = await self._reads.execute_command(
                *("XREAD", "COUNT", 1000, "BLOCK", 1000, "STREAMS", "replies", last)
            )
            for entry, flat in answer[0][1] if answer else ():
                last = entry
                self._waiting.pop(flat[1]).set_result(flat[3])

    async def one(self) -> None:
        self._count += 1
        request_id = b"%d" % self._count
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        await self._sends.submit(request_id)
        json.loads(await future)

    async def aclose(self) -> None:
        self._reader.cancel()
        await self._client.aclose()
        await self._reads.aclose()


async def closed_loop(one: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Round trips a second with CONCURRENCY callers, each sending its next when its last is answered."""
    done = 0
    stop = time.perf_counter() + seconds

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < stop:
            await one()
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(CONCURRENCY)])
    return done / (time.perf_counter() - start)


async def open_loop(one: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    """Latencies in ms at RATE requests a second, sorted."""
    latencies: list[float] = []

    tasks = []
    loop = asyncio.get_running_loop()
    sent = loop.create_future()
    first = time.perf_counter() + 0.05
    number = int(RATE * seconds)

    async def timed(due: float) -> None:
        await one()
        latencies.append((time.perf_counter() - due) * 1000)

    def begin(due: float) -> None:
        tasks.append(asyncio.create_task(timed(due)))

    def clock() -> None:
        """In a thread, because asyncio's timers are only good to a millisecond."""
        for due in (first + i / RATE for i in range(number)):
            wait = due - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            loop.call_soon_threadsafe(begin, due)
        loop.call_soon_threadsafe(sent.set_result, None)

    threading.Thread(target=clock, daemon=True).start()
    await sent
    await asyncio.gather(*tasks)
    return sorted(latencies)


def cpu_s() -> list[float]:
    """CPU seconds so far of this process, the worker, the server."""
    me = psutil.Process()
    children = me.children()
    server = [child for child in children if child.name() == "valkey-server"]
    worker = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    return [sum(sum(p.cpu_times()[:2]) for p in group) for group in ([me], worker, server)]


async def measure(one: Callable[[], Awaitable[object]], seconds: float) -> dict[str, float]:
    async with asyncio.timeout(30 + 4 * seconds):
        await closed_loop(one, 0.5)  # both processes warm
        before = cpu_s()
        rate = await closed_loop(one, seconds)
        cpu = [(b - a) / (rate * seconds) * 1e6 for a, b in zip(before, cpu_s(), strict=True)]
        latencies = await open_loop(one, seconds)

    def at(share: float) -> float:
        return latencies[min(len(latencies) - 1, int(share * len(latencies)))]

    return {
        "round_trips_per_s": rate,
        "client_cpu_us": cpu[0],
        "worker_cpu_us": cpu[1],
        "server_cpu_us": cpu[2],
        "p50_ms": at(0.50),
        "p95_ms": at(0.95),
        "p99_ms": at(0.99),
        "max_ms": latencies[-1],
    }


async def drive_ours(url: str, seconds: float) -> dict[str, float]:
    async with AsyncClient(url, "bench") as client:
        return await measure(lambda: client.complete(BODY, model=MODEL, path="/v1/completions"), seconds)


async def drive_streams(url: str, seconds: float) -> dict[str, float]:
    client = StreamsClient(url)
    try:
        return await measure(client.one, seconds)
    finally:
        await client.aclose()


def drive_rq(url: str, seconds: float) -> dict[str, float]:
    from rq import Queue
    from rq.serializers import JSONSerializer

    connection = sync_client(url)
    queue = Queue("bench", connection=connection, serializer=JSONSerializer)

    def round_of(number: int) -> None:
        jobs = [Queue.prepare_data(NOTHING, (i,)) for i in range(number)]
        for job in queue.enqueue_many(jobs):
            if job.latest_result(timeout=30) is None:
                raise RuntimeError("RQ gave no result within 30 s")

    round_of(20)
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        round_of(100)
        done += 100
    rate = done / (time.perf_counter() - start)
    single = []
    for _ in range(100):
        begun = time.perf_counter()
        queue.enqueue(NOTHING, 1).latest_result(timeout=30)
        single.append((time.perf_counter() - begun) * 1000)
    single.sort()
    return {
        "round_trips_per_s": rate,
        "unloaded_p50_ms": single[50],
        "unloaded_p99_ms": single[98],
    }


def run(serve: Callable[[str], None], drive: Callable[[str, float], Any], seconds: float) -> dict[str, float]:
    """Start a fresh server and worker, drive them from this process."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedValkey(folder, appendonly=False) as server:
        worker = multiprocessing.get_context("spawn").Process(target=serve, args=(server.url,), daemon=True)
        worker.start()
        try:
            result = drive(server.url, seconds)
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
            numbers: dict[str, float] = result
            return numbers
        finally:
            worker.kill()
            worker.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each measurement (default 3)")
    parser.add_argument("--only", choices=("ours", "streams", "rq"), help="measure one of them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    peers: dict[str, tuple[Callable[[str], None], Callable[[str, float], Any]]] = {
        "ours": (serve_ours, drive_ours),
        "streams": (serve_streams, drive_streams),
        "rq": (serve_rq, drive_rq),
    }
    results = {
        name: run(*peer, options.seconds) for name, peer in peers.items() if options.only in (None, name)
    }
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "concurrency": CONCURRENCY, "results": results}, indent=2))
        return 0
    print(f"{os.cpu_count()} cores; closed loop with {CONCURRENCY} under way; open loop at {RATE:.0f}/s")
    print(
        f"{'':10}{'round trips/s':>15}{'ours is':>10}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}"
        "   CPU us: client worker server"
    )
    for name, numbers in results.items():
        rate = numbers["round_trips_per_s"]
        ratio = f"{results['ours']['round_trips_per_s'] / rate:.2f}x" if "ours" in results else ""
        cells = "".join(
            f"{numbers[key]:9.2f}" if key in numbers else f"{'-':>9}"
            for key in ("p50_ms", "p95_ms", "p99_ms")
        )
        cpu = "".join(
            f"{numbers[key]:7.0f}"
            for key in ("client_cpu_us", "worker_cpu_us", "server_cpu_us")
            if key in numbers
        )
        print(f"{name:10}{rate:15,.0f}{ratio:>10}{cells}          {cpu}")
    if "rq" in results:
        rq = results["rq"]
        print(
            f"rq cannot take 1,000/s; one job at a time: p50 {rq['unloaded_p50_ms']:.1f} ms, "
            f"p99 {rq['unloaded_p99_ms']:.1f} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
