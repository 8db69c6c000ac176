"""A lane with an engine of its own: its batch, its gate, its worker, and what the engine has computed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import redis

from hybridsched.core.policy import PausePolicy, PoolPolicy, Rung
from hybridsched.core.values import GateState
from hybridsched.engines.protocol import EngineStats
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.batches import BatchStore
from hybridsched.store.keys import Keys
from hybridsched.workers.offline import OfflineWorker
from hybridsched.workers.offline_submit import submit_file
from tests.helpers import await_until
from tests.integration.offline_rig import LANE, MODEL, POLICY, POOL, Door, door, publish_policy

LINES, OUTPUT = 24, 240


def policy(*ladder: Rung, keep_ms: float = 20_000.0, sleep_after_ms: float = 60_000.0) -> PoolPolicy:
    pause = PausePolicy(ladder=ladder, keep_ms=keep_ms, sleep_after_ms=sleep_after_ms)
    return msgspec.structs.replace(POLICY, pause=pause)


KEEP = policy(Rung.BOUNDARY, Rung.ITERATION)
SLEEP = policy(Rung.BOUNDARY, Rung.ITERATION, Rung.SLEEP, keep_ms=100.0, sleep_after_ms=250.0)


def write_lines(path: Path, model: str, lines: int) -> list[list[int]]:
    """Lines whose prompts go in whole; returns the prompts."""
    rng = random.Random(9)
    prompts = []
    with path.open("w") as file:
        for i in range(lines):
            prompt = [rng.randrange(20, 500) for _ in range(rng.randint(20, 60))]
            prompts.append(prompt)
            body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
            body |= {"ignore_eos": True}
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return prompts


def events(client: redis.Redis, kind: str) -> list[dict[str, Any]]:
    entries: Any = client.xrange(Keys(POOL).events)
    found = [json.loads(fields[b"e"]) for _, fields in entries]
    return [event for event in found if event["t"] == kind]


class Pool:
    """A batch, its lane's gate and its engine."""

    def __init__(self, url: str, engine: str, model: str, gate: Door, store: BatchStore, batch: str) -> None:
        self.url, self.engine, self.model, self.gate = url, engine, model, gate
        self._store, self._batch = store, batch
        self.prompts: list[list[int]] = []
        self._client = VllmHttpEngine(engine)

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def made(self) -> float:
        return (await self.stats()).generation_tokens_total or 0.0

    async def open_for(self, tokens: int) -> None:
        """Open the gate until the engine has made so many tokens more, or the batch is done; then close."""
        before = await self.made()
        await self.gate.set(GateState.OPEN)

        async def enough() -> bool:
            return await self.made() >= before + tokens or await self.ended()

        await await_until(enough, timeout_s=60, what="tokens")
        await self.gate.set(GateState.CLOSED)

    async def stands_still(self) -> bool:
        return await self._client.stands_still()

    async def rests(self) -> bool:
        """Whether the engine stands still, or has nothing left to do."""
        return await self.stands_still() or await self.ended()

    async def ended(self) -> bool:
        return (await asyncio.to_thread(self._store.get, self._batch)).status.ended

    async def close(self) -> None:
        await self._client.close()


@asynccontextmanager
async def pool(
    tmp_path: Path,
    valkey: redis.Redis,
    url: str,
    rules: PoolPolicy,
    engine: str,
    *,
    model: str = MODEL,
    lines: int = LINES,
) -> AsyncIterator[tuple[Pool, int]]:
    """A batch in a pool, with the tokens of its prompts. At the end every line must be there once, whole."""
    source = tmp_path / "batch.jsonl"
    prompts = write_lines(source, model, lines)
    await publish_policy(url, rules)
    store = BatchStore(valkey, POOL)
    batch = submit_file(store, source, model=model).batch.id
    async with door(url) as gate:
        made = Pool(url, engine, model, gate, store, batch)
        made.prompts = prompts
        try:
            yield made, sum(len(prompt) for prompt in prompts)
        finally:
            await made.close()
    info = store.get(batch)
    assert (info.status, info.done, info.failed) == (BatchStatus.COMPLETED, lines, 0)
    found = outputs(tmp_path)
    assert list(found) == [f"id-{i}" for i in range(lines)]
    assert all(body["usage"]["completion_tokens"] == OUTPUT for body in found.values())


def outputs(folder: Path) -> dict[str, dict[str, Any]]:
    """The answers of the batch by custom_id, in their order."""
    # Bytes: what a model writes may hold characters that Python takes for the end of a line.
    rows = [json.loads(row) for row in (folder / "batch.output.jsonl").read_bytes().splitlines()]
    return {row["custom_id"]: row["response"]["body"] for row in rows}


@asynccontextmanager
async def worker(made: Pool) -> AsyncIterator[OfflineWorker]:
    """The lane's worker in this process."""
    stop = asyncio.Event()
    lane = OfflineWorker(
        redis_url=made.url,
        pool=POOL,
        lane=LANE,
        replica=LANE,
        model=made.model,
        engine_url=made.engine,
        own_engine=True,
    )
    running = asyncio.create_task(lane.run(stop))
    try:
        yield lane
    finally:
        stop.set()
        async with asyncio.timeout(30):
            await running
