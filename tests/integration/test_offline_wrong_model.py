"""An engine that comes back with another model, or answers nonsense: the batch waits and loses nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from hybridsched.cli.main import cli
from hybridsched.core.values import GateState
from hybridsched.ports import KeptPorts
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.keys import Keys
from hybridsched.store.telemetry import LaneRecord, decode_lane
from hybridsched.workers.offline import OfflineWorker
from tests.helpers import await_until
from tests.integration.offline_rig import (
    LANE,
    MODEL,
    POOL,
    answers,
    door,
    publish_policy,
    simulated_engine,
    submit,
)

LINES = 60


@pytest.fixture
def port() -> Iterator[int]:
    """One that nobody else takes while no engine is there."""
    with KeptPorts([0]) as kept:
        yield kept.numbers[0]


def lane_record(client: redis.Redis) -> LaneRecord:
    raw = client.get(Keys(POOL).lane_telemetry(LANE))
    assert raw is None or isinstance(raw, bytes)
    return decode_lane(raw) or LaneRecord(lane=LANE)


async def test_an_engine_that_comes_back_with_another_model_consumes_nothing(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str, port: int
) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for i in range(LINES):
            body = {"model": MODEL, "prompt": [i + 1, 2], "max_tokens": 60, "ignore_eos": True}
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    await publish_policy(valkey_url)
    store, batch_id = submit(valkey, source)
    stop = asyncio.Event()
    worker = OfflineWorker(
        redis_url=valkey_url,
        pool=POOL,
        lane=LANE,
        replica=LANE,
        model=MODEL,
        engine_url=f"http://127.0.0.1:{port}",
        speed=20,
    )

    def answered() -> int:
        found = store.progress(batch_id)
        return found.done + found.failed

    async with door(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        running = asyncio.create_task(worker.run(stop))
        with simulated_engine(tmp_path, port=port):
            await await_until(lambda: asyncio.to_thread(lambda: answered() > 5), timeout_s=40)
        with simulated_engine(tmp_path, port=port, model="another"):
            await await_until(
                lambda: asyncio.to_thread(
                    lambda: lane_record(valkey).problem.startswith("engine_wrong_model: ")
                ),
                timeout_s=40,
                what="the lane's word on its engine",
            )
            record = await asyncio.to_thread(lane_record, valkey)
            assert f"serves another, not {MODEL}" in record.problem
            assert record.work == 0, "no gate is to be opened for it"
            said = await asyncio.to_thread(
                CliRunner().invoke, cli, ["why", LANE, "--redis", valkey_url, "--pool", POOL]
            )
            assert "Its offline worker waits: engine_wrong_model: " in said.output
            assert not store.get(batch_id).status.ended
        with simulated_engine(tmp_path, port=port):
            await await_until(
                lambda: asyncio.to_thread(lambda: store.get(batch_id).status.ended),
                timeout_s=60,
                what="the batch's end",
            )
        stop.set()
        await running
    batch = store.get(batch_id)
    assert (batch.status, batch.done, batch.failed) == (BatchStatus.COMPLETED, LINES, 0)
    found = answers(tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl")
    assert len(found) == LINES
