"""A frozen offline worker: its requests are ended beside the engine, and it goes on when it wakes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis
from structlog.testing import capture_logs

from hybridsched.core.values import GateState
from hybridsched.engines.protocol import EngineError, EngineStats
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.telemetry import LaneRecord, TelemetryStore
from hybridsched.workers.online_orphans import OrphanWatch
from tests.helpers import await_until
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
)


class Counted(VllmHttpEngine):
    """Counts the aborts that found requests in the engine."""

    ended = 0

    async def abort(self, path: str, request_ids: Sequence[str]) -> None:
        stats = await self.stats()
        self.ended += bool(stats.running or stats.waiting)
        await super().abort(path, request_ids)


def write_long(path: Path) -> None:
    """Lines that take far longer than a frozen worker is waited for."""
    with path.open("w") as file:
        for i in range(30):
            body = {
                "model": MODEL,
                "prompt": [i + 1, 2, 3],
                "max_tokens": 1500,
                "temperature": 0,
                "ignore_eos": True,
            }
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    with simulated_engine(tmp_path, speed=2.0) as url:
        yield url


async def test_a_frozen_workers_requests_end_and_each_line_still_comes_once(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str, client: Redis
) -> None:
    source = tmp_path / "batch.jsonl"
    write_long(source)
    expected = await undisturbed(tmp_path, source, engine)
    await publish_policy(valkey_url)
    store, batch_id = submit(valkey, source)
    control = Counted(engine)

    async def running() -> float:
        stats = await control.stats()
        assert stats.running is not None
        assert stats.waiting is not None
        return stats.running + stats.waiting

    process = worker_process(valkey_url, engine, tmp_path / "worker.log")
    watching = asyncio.create_task(OrphanWatch(control, client, POOL, LANE).run())
    try:
        async with door(valkey_url) as gate:
            for _ in range(2):
                await gate.set(GateState.OPEN)

                async def busy() -> bool:
                    return await running() >= 3

                await await_until(busy, timeout_s=60, what="offline requests in the engine")
                os.kill(process.pid, signal.SIGSTOP)
                before = await running()
                if not before:
                    os.kill(process.pid, signal.SIGCONT)
                    continue
                ended = control.ended
                await gate.set(GateState.CLOSED)

                async def quiet() -> bool:
                    return await running() == 0

                await await_until(quiet, timeout_s=20, what="an engine without offline requests")
                assert control.ended > ended, "they did not just come to their own end"
                os.kill(process.pid, signal.SIGCONT)
            await gate.set(GateState.OPEN)
            await await_until(
                lambda: asyncio.to_thread(lambda: store.get(batch_id).status.ended),
                timeout_s=120,
                what="the batch's end",
            )
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        process.wait(20)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await control.close()
    assert store.get(batch_id).status is BatchStatus.COMPLETED
    assert results(source) == expected


class CountingEngine:
    """Remembers what it was told to end."""

    url = "fake://"

    def __init__(self) -> None:
        self.aborts: list[tuple[str, list[str]]] = []

    async def stats(self) -> EngineStats:
        return EngineStats(running=0.0, waiting=0.0)

    async def abort(self, path: str, request_ids: list[str]) -> None:
        self.aborts.append((path, request_ids))


async def test_only_a_lane_that_is_closed_and_silent_is_ended(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridsched.core.orphans.SILENT_MS", 200.0)
    engine = CountingEngine()
    watch = OrphanWatch(engine, client, POOL, LANE)  # type: ignore[arg-type]
    telemetry = TelemetryStore(client, POOL)
    assert not await watch.look()
    record = LaneRecord(lane=LANE, worker="w", tag="ab", numbers=(1, 5), next_number=9)
    await telemetry.publish_lane(record)
    assert not await watch.look()
    await await_until(watch.look, what="the silence to be noticed")
    assert [path for path, _ in engine.aborts] == ["/v1/completions", "/v1/chat/completions"]
    assert engine.aborts[0][1][:3] == ["hsoff-ab-1", "hsoff-ab-5", "hsoff-ab-9"]

    engine.aborts.clear()
    await telemetry.publish_lane(record)
    await telemetry.withdraw_lane(LANE)  # it has left: nothing of it can be in the engine
    for _ in range(4):
        await asyncio.sleep(0.1)
        assert not await watch.look()
    assert engine.aborts == []


async def test_a_dead_worker_whose_requests_are_gone_is_not_said_to_sleep(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridsched.core.orphans.SILENT_MS", 200.0)
    engine = CountingEngine()
    watch = OrphanWatch(engine, client, POOL, LANE)  # type: ignore[arg-type]
    telemetry = TelemetryStore(client, POOL)
    record = LaneRecord(lane=LANE, worker="w", tag="ab", numbers=(1, 5), next_number=9)
    await telemetry.publish_lane(record)
    with capture_logs() as said:
        await await_until(watch.look, what="the silence to be noticed")
        assert len(engine.aborts) == 2, "it was tried: the worker may only sleep"
        assert [entry["key"] for entry in said if entry.get("key") == "orphans_ended"] == []


async def test_a_replaced_workers_requests_are_ended_though_the_gate_is_open(
    client: Redis, valkey_url: str
) -> None:
    """It froze, its hold ran out, and another took the lane: whose record hides the first one's requests."""

    class Away(CountingEngine):
        away = True

        async def abort(self, path: str, request_ids: list[str]) -> None:
            if self.away:
                raise EngineError("not now", code="engine_unreachable", retryable=True)
            await super().abort(path, request_ids)

    engine = Away()
    watch = OrphanWatch(engine, client, POOL, LANE)  # type: ignore[arg-type]
    telemetry = TelemetryStore(client, POOL)
    async with door(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        await telemetry.publish_lane(LaneRecord(lane=LANE, worker="a", tag="aa", numbers=(1,), next_number=2))
        assert not await watch.look()
        await telemetry.publish_lane(LaneRecord(lane=LANE, worker="b", tag="bb", numbers=(5,), next_number=6))
        await watch.look()
        engine.away = False
        await watch.look()
        assert [ids[:2] for _, ids in engine.aborts] == [["hsoff-aa-1", "hsoff-aa-2"]] * 2
        engine.aborts.clear()
        await watch.look()
        assert engine.aborts == [], "once is enough, and the new worker is left alone"
