"""kill -9 of each process in turn in the middle of a run: nothing lost or twice, nobody left waiting."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from hybridsched.client import AsyncClient, RequestError, StoreError
from hybridsched.store.batch_values import BatchInfo
from hybridsched.store.batches import BatchStore
from hybridsched.workers.offline_submit import submit_file
from tests.helpers import await_until, wait_until
from tests.integration.pool import MODEL, POOL, Pool, running_pool

LINES = 300
LEASE_S = 1.0
"""Lease of a gate in the preset `idle-window` (cycle.lease_ms)."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with running_pool(tmp_path_factory.mktemp("kill")) as started:
        yield started


def write_batch(path: Path, *, seed: int, lines: int = LINES) -> list[str]:
    """A batch of token-id completions; returns its custom_ids in order."""
    source = random.Random(seed)
    ids = []
    with path.open("w") as out:
        for number in range(lines):
            ids.append(f"{path.stem}-{number}")
            body = {
                "model": MODEL,
                "prompt": [source.randrange(1000, 30000) for _ in range(source.randrange(50, 900))],
                "max_tokens": source.randrange(40, 250),
                "ignore_eos": True,
            }
            line = {"custom_id": ids[-1], "method": "POST", "url": "/v1/completions", "body": body}
            out.write(json.dumps(line) + "\n")
    return ids


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def online_load(url: str, *, seconds: float, every_s: float) -> Counter[str]:
    """Send requests at an even pace; what became of each. A request that nobody answers fails the test."""
    outcomes: Counter[str] = Counter()

    async def one(client: AsyncClient, number: int) -> None:
        body = {"prompt": [7 + number % 9] * 300, "max_tokens": 12, "ignore_eos": True}
        try:
            await client.complete(body, model=MODEL, path="/v1/completions", timeout_s=12.0)
            outcomes["ok"] += 1
        except (RequestError, StoreError) as error:
            outcomes[type(error).__name__] += 1

    async with AsyncClient(url, pool=POOL) as client:
        tasks = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(one(client, len(tasks))))
            await asyncio.sleep(every_s)
        done, pending = await asyncio.wait(tasks, timeout=30)
        assert not pending, f"{len(pending)} online requests were neither answered nor expired"
        for task in done:
            task.result()
        assert sum(outcomes.values()) == len(tasks)
    return outcomes


def open_gates(url: str) -> list[str]:
    """Lanes whose gate is open now, as any Redis client sees it."""
    client = redis.Redis.from_url(url)
    try:
        keys = list(client.scan_iter(f"hs:{{{POOL}}}:gate:*"))
        gates = [json.loads(raw) for raw in client.mget(keys) if raw] if keys else []
    finally:
        client.close()
    return [gate["lane"] for gate in gates if gate["state"] == "open"]


async def submit_and_reach_the_middle(pool: Pool, path: Path) -> BatchInfo:
    """A batch of which some lines are done and others are not.

    Submitted from here: on a busy machine it was over before a command had come back, and the gate that
    the test waited for had closed.
    """
    client = redis.Redis.from_url(pool.url)
    store = BatchStore(client, POOL)
    try:
        batch = submit_file(store, path, model=MODEL).batch
        await await_until(
            lambda: asyncio.to_thread(lambda: 0 < store.progress(batch.id).done < LINES),
            timeout_s=60,
            what="the middle of the batch",
        )
    except AssertionError as error:
        raise AssertionError(f"{error}\n{pool.logs()}") from None
    finally:
        client.close()
    return batch


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["policy", "online-r0", "offline-r0", "engine-r0", "valkey"])
async def test_kill_in_the_middle(pool: Pool, victim: str, tmp_path: Path) -> None:
    path = tmp_path / f"{victim}.jsonl"
    ids = write_batch(path, seed=len(victim))
    batch = await submit_and_reach_the_middle(pool, path)
    output, errors = Path(batch.output), Path(batch.errors)

    load = asyncio.create_task(online_load(pool.url, seconds=6.0, every_s=0.25))
    await asyncio.sleep(1.5)
    await asyncio.to_thread(pool.kill, victim)
    if victim == "policy":
        wait_until(lambda: not open_gates(pool.url), timeout_s=LEASE_S + 0.5, what="closed gates")
        await asyncio.sleep(0.5)
        assert not open_gates(pool.url), "nobody may open a gate while the policy worker is dead"
    else:
        await asyncio.sleep(1.0)
    await asyncio.to_thread(pool.start, victim)
    outcomes = await load
    assert outcomes["ok"] >= 0.5 * sum(outcomes.values()), (outcomes, pool.logs())

    waited = await asyncio.to_thread(pool.cli, "batch", "wait", batch.id, "--timeout", "120s", timeout_s=150)
    assert waited.returncode == 0, (waited.stdout, waited.stderr, pool.logs())
    rows = results(output)
    assert [row["custom_id"] for row in rows] == ids, "each line once, in the order of the input"
    assert results(errors) == []
    for row, line in zip(rows, path.read_text().splitlines(), strict=True):
        assert row["response"]["status_code"] == 200
        assert row["response"]["body"]["usage"]["completion_tokens"] == json.loads(line)["body"]["max_tokens"]


@pytest.mark.timeout(240)
async def test_an_emptied_redis_takes_the_batch_up_after_online_traffic(pool: Pool, tmp_path: Path) -> None:
    """FLUSHALL also sets back the gates' epochs, raised by online requests; lanes open all the same."""
    outcomes = await online_load(pool.url, seconds=2.0, every_s=0.05)
    assert outcomes["ok"] == sum(outcomes.values())
    path = tmp_path / "emptied.jsonl"
    ids = write_batch(path, seed=3)
    await submit_and_reach_the_middle(pool, path)
    client = redis.Redis.from_url(pool.url)
    client.flushall()
    client.close()
    published = await asyncio.to_thread(pool.cli, "pool", "policy", "set", "idle-window")
    assert published.returncode == 0, published.stderr
    batch = await asyncio.to_thread(pool.json, "batch", "submit", str(path), "--json")
    waited = await asyncio.to_thread(
        pool.cli, "batch", "wait", batch["id"], "--timeout", "90s", timeout_s=120
    )
    assert waited.returncode == 0, (waited.stdout, waited.stderr, pool.logs())
    assert [row["custom_id"] for row in results(Path(batch["output"]))] == ids
