"""A lane with an engine of its own: stopped whole, put to sleep, and taken up by a worker's successor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from hybridsched.cli.decision_view import explain
from hybridsched.cli.pool_view import headline, look
from hybridsched.core.values import GateState
from hybridsched.engines.waking import PROOF_TOKENS
from hybridsched.ports import KeptPorts
from hybridsched.store.batches import BatchStore
from hybridsched.store.connection import async_client
from hybridsched.store.keys import Keys
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from hybridsched.workers.offline_own import PROMPT
from tests.helpers import await_until, wait_until
from tests.integration.offline_rig import (
    LANE,
    MODEL,
    POOL,
    door,
    publish_policy,
    simulated_engine,
    worker_process,
)
from tests.integration.own_lane_rig import KEEP, LINES, OUTPUT, SLEEP, Pool, events, pool, worker


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    """One that frees its memory when it sleeps."""
    with simulated_engine(tmp_path, "--enable-sleep-mode", speed=1.0) as url:
        yield url


@pytest.fixture
def sleepless(tmp_path: Path) -> Iterator[str]:
    with simulated_engine(tmp_path, speed=1.0) as url:
        yield url


async def test_a_pause_stops_the_whole_engine_and_no_token_is_computed_twice(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    async with pool(tmp_path, valkey, valkey_url, KEEP, engine) as (made, prompts), worker(made):
        while not await made.ended():
            await made.open_for(700)
            await await_until(made.rests, timeout_s=30, what="an engine that stands still")
            still = await made.made()
            await asyncio.sleep(0.1)
            assert await made.made() == still
        after = await made.stats()
        assert (after.prompt_tokens_total, after.generation_tokens_total) == (prompts, LINES * OUTPUT)
        assert not after.preemptions_total
    quiet = events(valkey, "quiet")
    assert [event["rung"] for event in quiet].count("keep") >= 2
    assert all(event["ended"] == 0 for event in quiet if event["rung"] == "keep")
    assert max(event["held"] for event in quiet) > 1
    assert sum(event["recomputed"] for event in events(valkey, "chunk")) == 0


async def test_a_lane_that_stays_closed_sleeps_and_its_engine_is_asked_before_it_works_again(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    async with pool(tmp_path, valkey, valkey_url, SLEEP, engine) as (made, prompts):
        async with worker(made):
            for times in (1, 2):
                await made.open_for(700)

                def slept(times: int = times) -> bool:
                    return len(events(valkey, "asleep")) == times

                await await_until(slept, timeout_s=30, what="sleep")
                assert (await made.stats()).awake == 0.0
                assert not await made.ended()
            await made.gate.set(GateState.OPEN)
            await await_until(made.ended, timeout_s=60, what="the batch's end")
        after = await made.stats()
        # The question before the first sleep, and after each: prompts of the lines came a second time.
        proofs = 3
        assert after.generation_tokens_total == LINES * OUTPUT + proofs * PROOF_TOKENS
        assert (after.prompt_tokens_total or 0) >= prompts + proofs * len(PROMPT)
    assert len(events(valkey, "asleep")) == 2
    assert valkey.get(Keys(POOL).lane_proof(LANE)) is not None


async def test_an_engine_without_sleep_stays_at_the_rung_below_and_why_says_so(
    tmp_path: Path, sleepless: str, valkey: redis.Redis, valkey_url: str
) -> None:
    async with (
        pool(tmp_path, valkey, valkey_url, SLEEP, sleepless) as (made, _),
        worker(made),
    ):
        client = async_client(valkey_url)
        try:
            await made.open_for(700)
            await await_until(made.stands_still, timeout_s=30, what="an engine that stands still")
            await asyncio.sleep(0.6)  # past the time for sleep
            assert not events(valkey, "asleep")

            async def refused() -> bool:
                return bool((await explain(client, POOL, LANE)).data["rung_refused"])

            await await_until(refused, timeout_s=30, what="the word on sleep")
            told = (await explain(client, POOL, LANE)).data
            assert "engine_cannot_sleep" in told["rung_refused"]
            assert "--enable-sleep-mode" in told["sentence"]
            assert not told["worker_problem"]

            async def paused() -> bool:
                return (await explain(client, POOL, LANE)).data["engine_stands"] == "paused"

            await await_until(paused, timeout_s=30, what="the word on the engine that stands still")
            assert "Its own engine is paused" in (await explain(client, POOL, LANE)).sentence
            shown = headline(await look(client, POOL))
            assert any(line.startswith(f"Lane {LANE}: its own engine is paused") for line in shown)
        finally:
            await client.aclose()
        await made.gate.set(GateState.OPEN)
        await await_until(made.ended, timeout_s=60, what="the batch's end")


async def test_an_own_engine_that_is_gone_is_told(valkey: redis.Redis, valkey_url: str) -> None:
    """The lane's gate is that of the replica, which is well: nothing else shows it."""
    await publish_policy(valkey_url, KEEP)
    client = async_client(valkey_url)
    try:
        with KeptPorts([0]) as kept:  # nobody listens there
            nobody = f"http://127.0.0.1:{kept.numbers[0]}"
            async with door(valkey_url) as gate:
                made = Pool(valkey_url, nobody, MODEL, gate, BatchStore(valkey, POOL), "")
                async with worker(made):

                    async def told() -> bool:
                        said = (await explain(client, POOL, LANE)).data["worker_problem"]
                        return bool(said.startswith("engine_unhealthy: ") and nobody in said)

                    await gate.set(GateState.OPEN)
                    await await_until(told, timeout_s=30, what="the word on the engine that is gone")
                await made.close()
    finally:
        await client.aclose()


@pytest.mark.parametrize("asleep", [False, True])
async def test_the_successor_of_a_killed_worker_has_the_engine_go_on(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str, asleep: bool
) -> None:
    rules = SLEEP if asleep else KEEP
    log = tmp_path / "worker.log"
    async with pool(tmp_path, valkey, valkey_url, rules, engine) as (made, _):
        first = worker_process(valkey_url, made.engine, log, "--own-engine")
        second = None
        try:
            await made.open_for(500)
            await await_until(made.stands_still, timeout_s=30, what="an engine that stands still")
            if asleep:
                await await_until(lambda: bool(events(valkey, "asleep")), timeout_s=30, what="sleep")
            first.kill()
            first.wait(10)
            assert await made.stands_still()
            second = worker_process(valkey_url, made.engine, log, "--own-engine")
            await asyncio.to_thread(
                wait_until, lambda: "engine_found_still" in log.read_text(), timeout_s=30, what="the question"
            )
            assert await made.stands_still(), "it must not go on with its gate closed"
            await made.gate.set(GateState.OPEN)
            await await_until(made.ended, timeout_s=60, what="the batch's end")
        finally:
            for process in (first, second):
                if process is not None:
                    process.terminate()
                    process.wait(30)
        assert not await made.stands_still()


async def test_a_worker_that_stops_takes_its_tokens_along_and_leaves_the_engine_going(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    async with pool(tmp_path, valkey, valkey_url, KEEP, engine) as (made, prompts):
        async with worker(made):
            await made.open_for(500)
            await await_until(made.stands_still, timeout_s=30, what="an engine that stands still")
        assert not await made.stands_still()
        assert (await made.stats()).running == 0
        async with worker(made):
            await made.gate.set(GateState.OPEN)
            await await_until(made.ended, timeout_s=60, what="the batch's end")
        assert (await made.stats()).generation_tokens_total == LINES * OUTPUT, "tokens were made twice"
    assert prompts > 0


async def test_an_engine_of_onlines_is_refused_as_a_lanes_own(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    client = async_client(valkey_url)
    replica = ReplicaRecord(replica="front", model=MODEL, lane="front", url="http://127.0.0.1:8123")
    try:
        await TelemetryStore(client, POOL).publish(replica)
    finally:
        await client.aclose()
    log = tmp_path / "worker.log"
    process = worker_process(valkey_url, "http://localhost:8123", log, "--own-engine")
    assert await asyncio.to_thread(process.wait, 60) == 1
    assert "is the one of replica front" in log.read_text()
