"""A lane that has the real vLLM to itself: its gate stops the whole engine, and nothing is computed twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import redis

from hybridsched.cli.decision_view import explain
from hybridsched.core.policy import EnginePolicy, OfflinePolicy, OnlinePolicy, PoolPolicy
from hybridsched.core.values import GateState
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.engines.waking import PROOF_TOKENS
from hybridsched.store.connection import async_client
from tests.helpers import await_until
from tests.integration.offline_rig import LANE, POOL
from tests.integration.own_lane_rig import KEEP, OUTPUT, SLEEP, events, outputs, pool, worker
from tests.vllm.engine_rigs import COMPLETIONS, MODEL, REAL_FLAGS, SEQS
from tests.vllm.engines import RealServers

pytestmark = pytest.mark.timeout(600)

LINES = 12


def sized(policy: PoolPolicy) -> PoolPolicy:
    """The policy for the engine of the contract suite."""
    return msgspec.structs.replace(
        policy,
        offline=OfflinePolicy(slots_for_online=1, chunk_first_lines=LINES),
        online=OnlinePolicy(max_inflight=SEQS),
        engine=EnginePolicy(max_num_seqs=SEQS),
    )


async def check_answers(folder: Path, url: str, prompts: list[list[int]]) -> None:
    """Every line has the answer of a run that nothing interrupts."""
    found, direct = outputs(folder), VllmHttpEngine(url)
    try:
        for number, prompt in enumerate(prompts):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
            whole = await direct.complete(
                COMPLETIONS, body | {"ignore_eos": True}, request_id=f"whole-{number}", timeout_s=120
            )
            got = found[f"id-{number}"]["choices"][0]
            assert got["text"] == whole.body["choices"][0]["text"], number
            assert got["finish_reason"] == "length"
    finally:
        await direct.close()


async def test_its_gate_stops_the_whole_engine_in_the_middle_of_a_batch(
    real_servers: RealServers, tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    url = real_servers.get(*REAL_FLAGS).url  # in this thread: it dies with the one that starts it
    async with (
        pool(tmp_path, valkey, valkey_url, sized(KEEP), url, model=MODEL, lines=LINES) as (made, prompts),
        worker(made),
    ):
        before = await made.stats()
        while not await made.ended():
            await made.open_for(700)
            await await_until(made.rests, timeout_s=60, what="an engine that stands still")
            still = await made.made()
            await asyncio.sleep(0.2)
            assert await made.made() == still
        after = await made.stats()
    quiet = events(valkey, "quiet")
    assert [event["rung"] for event in quiet].count("keep") >= 2
    assert max(event["held"] for event in quiet) == SEQS
    assert (after.generation_tokens_total or 0) - (before.generation_tokens_total or 0) == LINES * OUTPUT
    assert (after.prompt_tokens_total or 0) - (before.prompt_tokens_total or 0) == prompts
    assert after.preemptions_total == before.preemptions_total, "a request began again"
    assert sum(event["recomputed"] for event in events(valkey, "chunk")) == 0
    await check_answers(tmp_path, url, made.prompts)


async def test_a_long_pause_takes_the_tokens_out_and_a_platform_without_sleep_stays_there(
    real_servers: RealServers, tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    url = real_servers.get(*REAL_FLAGS).url  # in this thread: it dies with the one that starts it
    client = async_client(valkey_url)
    try:
        async with pool(tmp_path, valkey, valkey_url, sized(SLEEP), url, model=MODEL, lines=LINES) as (
            made,
            _,
        ):
            before = await made.stats()
            async with worker(made):
                await made.open_for(700)
                await await_until(lambda: kept_lines(tmp_path) > 0, timeout_s=60, what="tokens on the disk")

                async def refusal() -> str:
                    return str((await explain(client, POOL, LANE)).data["rung_refused"])

                # vLLM runs other programs before it says for the first time how it is set up.
                await await_until(refusal, timeout_s=60, what="the engine's word on sleep")
                assert await made.stands_still()
                assert not events(valkey, "asleep")
                assert (await refusal()).startswith("engine_cannot_sleep")
                await made.gate.set(GateState.OPEN)
                await await_until(made.ended, timeout_s=120, what="the batch's end")
            after = await made.stats()
    finally:
        await client.aclose()
    made_tokens = (after.generation_tokens_total or 0) - (before.generation_tokens_total or 0)
    # Beyond: the question that a wake is checked by, and tokens behind a line's last whole character.
    again = made_tokens - LINES * OUTPUT
    assert 0 <= again <= PROOF_TOKENS + SEQS * 16, "what was ended while it stood still was made again"
    await check_answers(tmp_path, url, made.prompts)


def kept_lines(folder: Path) -> int:
    """Lines whose tokens stand in the journal."""
    return sum(path.read_text().count('"kept":') for path in folder.glob(".*/chunk-*.jsonl"))
