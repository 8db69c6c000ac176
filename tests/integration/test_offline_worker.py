"""The offline worker on a simulated engine and a real Valkey: gates, kills, stops; each line once."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from hybridsched.core.values import GateState
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.keys import Keys
from hybridsched.workers.offline import OfflineWorker
from tests.helpers import await_until, wait_until
from tests.integration.offline_rig import (
    LANE,
    MODEL,
    POOL,
    door,
    publish_policy,
    results,
    simulated_engine,
    submit,
    undisturbed,
    worker_process,
    write_batch,
)

LINES = 100


@pytest.fixture
def slow_engine(tmp_path: Path) -> Iterator[str]:
    """One on which the batch takes long enough to be interrupted several times."""
    (tmp_path / "slow").mkdir()
    with simulated_engine(tmp_path / "slow", speed=5.0) as url:
        yield url


def events(client: redis.Redis) -> list[dict[str, Any]]:
    entries: Any = client.xrange(Keys(POOL).events)
    return [json.loads(fields[b"e"]) for _, fields in entries]


async def test_a_batch_completes_with_the_gate_closing_at_random(
    tmp_path: Path, engine: str, slow_engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_batch(source, LINES)
    expected = await undisturbed(tmp_path, source, engine)
    await publish_policy(valkey_url)
    store, batch_id = submit(valkey, source)
    rng, stop = random.Random(5), asyncio.Event()
    worker = OfflineWorker(
        redis_url=valkey_url, pool=POOL, lane=LANE, replica=LANE, model=MODEL, engine_url=slow_engine, speed=5
    )
    async with door(valkey_url) as gate:
        running = asyncio.create_task(worker.run(stop))
        ended = False
        deadline = time.monotonic() + 60
        while not ended:
            assert time.monotonic() < deadline, await asyncio.to_thread(store.progress, batch_id)
            gate.grace_ms = rng.choice([0.0, 0.0, 30.0])
            await gate.set(GateState.OPEN)
            await asyncio.sleep(rng.uniform(0.02, 0.4))
            await gate.set(GateState.CLOSED)
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            info = await asyncio.to_thread(store.get, batch_id)
            ended = info.status.ended
            assert not running.done()
        stop.set()
        async with asyncio.timeout(30):
            await running
    assert info.status is BatchStatus.COMPLETED
    assert (info.done, info.failed) == (LINES - 1, 1)
    assert results(source) == expected
    seen = events(valkey)
    quiet = [event for event in seen if event["t"] == "quiet"]
    assert {event["rung"] for event in quiet} >= {"iteration"}
    assert sum(event["kept_tokens"] for event in quiet) > 0
    chunks = [event for event in seen if event["t"] == "chunk"]
    assert sum(event["lines"] for event in chunks) == LINES
    recomputed = sum(event["recomputed"] for event in chunks)
    ended_requests = sum(event["ended"] for event in quiet)
    # A block of 16 tokens is the grain of the prefix cache; the seeded line runs again whole.
    assert recomputed <= ended_requests * 16 + 2 * 240
    assert not list(tmp_path.glob(".*hybridsched*"))


async def test_a_policy_that_was_written_past_its_check_is_refused_and_the_last_stays(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    await publish_policy(valkey_url)
    stop = asyncio.Event()
    worker = OfflineWorker(
        redis_url=valkey_url, pool=POOL, lane=LANE, replica=LANE, model=MODEL, engine_url=engine
    )
    running = asyncio.create_task(worker.run(stop))
    key = Keys(POOL).policy_current
    try:
        await await_until(lambda: worker._policy.name == "test", timeout_s=20, what="the policy")
        raw: Any = valkey.get(key)
        bad = json.loads(raw) | {"name": "slip", "version": 9}
        bad["offline"] = bad.get("offline", {}) | {"chunk_first_lines": -3}
        good = json.loads(raw) | {"name": "mended", "version": 10}
        valkey.set(key, json.dumps(bad))
        valkey.publish(Keys(POOL).policy_channel, "9")
        await asyncio.sleep(0.5)
        assert worker._policy.name == "test"
        valkey.set(key, json.dumps(good))
        valkey.publish(Keys(POOL).policy_channel, "10")
        await await_until(lambda: worker._policy.name == "mended", timeout_s=20, what="the next policy")
    finally:
        stop.set()
        await running


async def test_kill_9_at_any_time_gives_every_line_exactly_once(
    tmp_path: Path, engine: str, slow_engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_batch(source, LINES, seed=2)
    expected = await undisturbed(tmp_path, source, engine)
    await publish_policy(valkey_url)
    store, batch_id = submit(valkey, source)
    rng = random.Random(3)
    kills = 0
    async with door(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        process = worker_process(valkey_url, slow_engine, tmp_path / "worker.log")
        try:
            while kills < 3:
                before = (await asyncio.to_thread(store.progress, batch_id)).done

                async def moved(floor: int = before) -> bool:
                    found = await asyncio.to_thread(store.progress, batch_id)
                    return found.done > floor or found.batch.status.ended

                await await_until(moved, timeout_s=30, what="progress")
                await asyncio.sleep(rng.uniform(0, 0.15))
                if (await asyncio.to_thread(store.get, batch_id)).status.ended:
                    break
                process.kill()
                process.wait(10)
                kills += 1
                process = worker_process(valkey_url, slow_engine, tmp_path / "worker.log")

            async def ended() -> bool:
                return (await asyncio.to_thread(store.get, batch_id)).status.ended

            await await_until(ended, timeout_s=60, what="the batch's end")
        finally:
            process.terminate()
            assert process.wait(30) == 0, (tmp_path / "worker.log").read_text()[-3000:]
    assert kills >= 2
    assert results(source) == expected
    info = store.get(batch_id)
    assert (info.status, info.done, info.failed) == (BatchStatus.COMPLETED, LINES - 1, 1)


async def test_a_stop_keeps_tokens_and_place_and_ends_within_seconds(
    tmp_path: Path, engine: str, slow_engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_batch(source, LINES, seed=4)
    expected = await undisturbed(tmp_path, source, engine)
    await publish_policy(valkey_url)
    store, batch_id = submit(valkey, source)
    kept = 0

    def busy() -> bool:
        record: Any = valkey.get(Keys(POOL).lane_telemetry(LANE))
        return record is not None and (json.loads(record)["offline_inflight"] or 0) > 2

    async with door(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        for number in (signal.SIGTERM, signal.SIGUSR2):
            process = worker_process(valkey_url, slow_engine, tmp_path / "worker.log")
            try:
                await asyncio.to_thread(wait_until, busy, timeout_s=30, what="work in the engine")
                process.send_signal(number)
                assert await asyncio.to_thread(process.wait, 30) == 0
            finally:
                process.kill()
                process.wait(5)
            folder = next(tmp_path.glob(".*/manifest.json")).parent
            kept += sum(path.read_text().count('"kept":') for path in folder.glob("chunk-*.jsonl"))
            assert store.progress(batch_id).running_chunks == 0
        assert kept > 0
        process = worker_process(valkey_url, slow_engine, tmp_path / "worker.log")
        try:
            await asyncio.to_thread(
                wait_until, lambda: store.get(batch_id).status.ended, timeout_s=60, what="the batch's end"
            )
        finally:
            process.terminate()
            process.wait(15)
    assert results(source) == expected


async def test_a_cancelled_batch_keeps_what_is_finished(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_batch(source, 60)
    await publish_policy(valkey_url)
    store, batch_id = submit(valkey, source)
    stop = asyncio.Event()
    worker = OfflineWorker(
        redis_url=valkey_url, pool=POOL, lane=LANE, replica=LANE, model=MODEL, engine_url=engine, speed=20
    )
    async with door(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        running = asyncio.create_task(worker.run(stop))
        await await_until(lambda: asyncio.to_thread(lambda: store.progress(batch_id).done > 5), timeout_s=30)
        await gate.set(GateState.CLOSED)  # so that something is left
        await asyncio.to_thread(store.cancel, batch_id)
        await await_until(
            lambda: asyncio.to_thread(lambda: store.get(batch_id).status.ended), timeout_s=30, what="the end"
        )
        stop.set()
        await running
    assert store.get(batch_id).status is BatchStatus.CANCELLED
    found = results(source)
    assert len(found) == 60
    assert sum(value == "batch_cancelled" for value in found.values()) > 0
    assert sum(isinstance(value, tuple) for value in found.values()) > 5


async def test_burst_ends_when_no_batch_is_left(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_batch(source, 20)
    await publish_policy(valkey_url)
    store, batch_id = submit(valkey, source)
    worker = OfflineWorker(
        redis_url=valkey_url,
        pool=POOL,
        lane=LANE,
        replica=LANE,
        model=MODEL,
        engine_url=engine,
        speed=20,
        burst=True,
    )
    async with door(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        started = time.monotonic()
        async with asyncio.timeout(60):
            await worker.run(asyncio.Event())
        assert time.monotonic() > started
    assert store.get(batch_id).status is BatchStatus.COMPLETED
