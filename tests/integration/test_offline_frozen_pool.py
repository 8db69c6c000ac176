"""A whole pool whose offline worker is stopped, as by `scontrol suspend`: online has its engine back soon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridsched.client import AsyncClient
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.store.telemetry import RECORD_LIFE_MS
from tests.helpers import await_until
from tests.integration.pool import MODEL, POOL, Pool, running_pool
from tests.integration.test_kill import open_gates, results

LINES = 12


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with running_pool(tmp_path / "pool", replicas=1, speed=1.0) as started:
        yield started


def write_long(path: Path) -> list[str]:
    """Lines that would keep the engine busy for far longer than a frozen worker is waited for."""
    ids = [f"long-{number}" for number in range(LINES)]
    with path.open("w") as file:
        for number, one in enumerate(ids):
            body = {"model": MODEL, "prompt": [number + 1, 2, 3], "max_tokens": 1500, "ignore_eos": True}
            line = {"custom_id": one, "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return ids


def ended(pool: Pool) -> int:
    """Requests that the engine held when the online worker says that it ended the frozen one's."""
    lines = (pool.folder / "online-r0.log").read_text().splitlines()
    return sum(json.loads(line)["held"] for line in lines if "orphans_ended" in line and line.endswith("}"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("asleep_s", [0.0, RECORD_LIFE_MS / 1000.0 + 2.0], ids=["short", "past every lease"])
async def test_online_is_alone_soon_and_each_line_comes_once(
    pool: Pool, tmp_path: Path, asleep_s: float
) -> None:
    source = tmp_path / "long.jsonl"
    ids = write_long(source)
    batch = pool.json("batch", "submit", str(source), "--json")
    engine = VllmHttpEngine(f"http://127.0.0.1:{pool.ports['r0']}")
    worker = pool.processes["offline-r0"]

    async def running() -> float:
        stats = await engine.stats()
        assert stats.running is not None
        assert stats.waiting is not None
        return stats.running + stats.waiting

    async def busy() -> bool:
        return await running() >= 4

    async def quiet() -> bool:
        return await running() == 0

    try:
        await await_until(busy, timeout_s=40, what="offline requests in the engine\n" + pool.logs())
        os.kill(worker.pid, signal.SIGSTOP)
        assert await running() >= 4, "they were not at their end"
        async with AsyncClient(pool.url, pool=POOL) as client:
            body = {"prompt": [7] * 300, "max_tokens": 12, "ignore_eos": True}
            await client.complete(body, model=MODEL, path="/v1/completions", timeout_s=30.0)
        await await_until(quiet, timeout_s=15, what="an engine without offline requests")
        await await_until(
            lambda: ended(pool) >= 4, timeout_s=15, what="their end by the online worker\n" + pool.logs()
        )
        await asyncio.sleep(asleep_s)
        assert await running() == 0
    finally:
        os.kill(worker.pid, signal.SIGCONT)
        await engine.close()
    await await_until(lambda: open_gates(pool.url), timeout_s=30, what="an open gate\n" + pool.logs())
    waited = await asyncio.to_thread(pool.cli, "batch", "wait", batch["id"], timeout_s=120)
    assert waited.returncode == 0, waited.stderr + pool.logs()
    assert [line["custom_id"] for line in results(Path(batch["output"]))] == ids
    tokens = {
        line["response"]["body"]["usage"]["completion_tokens"] for line in results(Path(batch["output"]))
    }
    assert tokens == {1500}
