"""The simulated engine's parts: profiles, cache, tokens, metrics text, timer."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.engines.metrics_text import engine_info, engine_stats
from hybridsched.engines.simulated import tokens
from hybridsched.engines.simulated.kv import BlockPool
from hybridsched.engines.simulated.metrics import one_two_five
from hybridsched.engines.simulated.perf import DEFAULT_PROFILE, load_profile, profile_names
from hybridsched.engines.simulated.timer import PreciseTimer


def test_the_default_profile_gives_the_published_formula() -> None:
    p = load_profile(DEFAULT_PROFILE)
    assert p.iteration_ms(prefill_tokens=0, batch_decode=1, total_context=0) == pytest.approx(10.2267)
    assert p.iteration_ms(prefill_tokens=0, batch_decode=64, total_context=64_000) == pytest.approx(
        10.2267 + 0.067097 * 32 + 7.285e-05 * 64_000
    )
    assert p.iteration_ms(prefill_tokens=2048, batch_decode=10, total_context=5000) == pytest.approx(
        10.2267 + 0.067097 * (2058 - 32) + 7.285e-05 * 5000 + 4.501e-06 * 2048**2
    )


def test_slices_of_a_prompt_cost_the_attention_of_the_whole() -> None:
    p = load_profile(DEFAULT_PROFILE)
    whole = p.iteration_ms(prefill_tokens=2048, batch_decode=0, total_context=0)
    halves = [
        p.iteration_ms(prefill_tokens=1024, batch_decode=0, total_context=0, prefill_pairs=pairs)
        for pairs in (1024 * 1024, 1024 * (1024 + 2 * 1024))
    ]
    # Two passes pay the constant twice and skip n0 twice; the rest is the same.
    assert sum(halves) == pytest.approx(whole + p.a - p.b * p.n0)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_names_its_source_and_licence(name: str) -> None:
    p = load_profile(name)
    assert p.name == name
    assert p.source
    assert "MIT" in p.licence
    assert p.iteration_ms(prefill_tokens=512, batch_decode=8, total_context=4000) > p.a > 0


def test_an_unknown_or_torn_profile_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=DEFAULT_PROFILE):
        load_profile("h200")
    torn = tmp_path / "p.json"
    torn.write_text(json.dumps({"name": "x"}))
    with pytest.raises(ValueError, match="cannot be read"):
        load_profile(str(torn))
    with pytest.raises(ValueError, match="cannot be read"):
        load_profile(str(tmp_path / "none.json"))


def test_the_pool_evicts_the_least_recently_freed() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    for block, content in ((a, 1), (b, 2), (c, 3)):
        pool.register(block, content)
    pool.release([b])
    pool.release([a])
    pool.release([c])
    assert pool.allocate(1) == [b]
    assert pool.lookup([1], 9) == [a]
    assert pool.lookup([2], 9) == []
    pool.take([a])
    assert pool.free == 1
    pool.reset_cache()
    assert pool.lookup([1], 9) == []
    assert pool.lookup([3], 9) == []
    pool.check()
    with pytest.raises(ValueError, match="1 are free"):
        pool.allocate(2)
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


def test_the_last_blocks_of_a_sequence_are_evicted_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for i, block in enumerate(blocks):
        pool.register(block, i + 10)
    pool.release(blocks)
    assert pool.allocate(2) == [blocks[3], blocks[2]]
    assert pool.lookup([10, 11, 12, 13], 4) == blocks[:2]


@given(st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert all(0 <= t < tokens.VOCAB_SIZE for t in ids)


@given(st.lists(st.integers(tokens.WORD0, tokens.VOCAB_SIZE - 1), max_size=50))
def test_invented_tokens_survive_as_text(ids: list[int]) -> None:
    assert tokens.encode(tokens.decode(ids)) == ids


def test_a_longer_conversation_begins_with_the_shorter() -> None:
    turns = [("user", "hi"), ("assistant", "yes?"), ("user", "why")]
    long = tokens.chat_prompt(turns)
    short = tokens.chat_prompt(turns[:1], add_generation_prompt=False)
    assert long[: len(short)] == short


@settings(max_examples=50)
@given(st.integers(1, 10**6))
def test_bounds_grow_by_one_two_five(largest: int) -> None:
    bounds = one_two_five(largest)
    assert bounds[0] == 1
    assert bounds[-1] <= largest
    assert list(bounds) == sorted(set(bounds))


METRICS = b"""# HELP vllm:num_requests_running x
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m, \\"}x"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0"} 1.5e+06 1700000000
vllm:generation_tokens_total NaN
vllm:num_preemptions_total garbage
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="m"} 1.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="0.5",model_name="m"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="1",le="+Inf",model_name="m"} 5.0
vllm:cache_config_info{_block_size_resolved="True",block_size="32",num_gpu_blocks="50",engine="0"} 1.0
vllm:iteration_tokens_total_count 7"""


def test_absent_and_unreadable_metrics_are_none_not_zero() -> None:
    stats = engine_stats(METRICS)
    assert stats.running == 7.0
    assert stats.waiting is None
    assert stats.kv_use == 0.375
    assert stats.prompt_tokens_total == 1.5e6
    assert stats.generation_tokens_total is None
    assert stats.preemptions_total is None
    assert stats.prefix_hits_total is None
    assert stats.iterations_total == 7.0
    assert stats.ttft_buckets == ((0.5, 4.0), (float("inf"), 7.0))
    assert stats.tpot_buckets == ()
    assert engine_stats(b"").running is None


def test_engine_info_reads_capacity_and_bears_gaps() -> None:
    info = engine_info({"data": [{"id": "m", "max_model_len": 100}, {"id": "n"}, "odd"]}, METRICS)
    assert (info.models, info.max_model_len, info.kv_tokens, info.block_size) == (("m", "n"), 100, 1600, 32)
    windowed = b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="5000",num_gpu_blocks="900"} 1.0'
    assert engine_info({}, windowed).kv_tokens == 5000
    empty = engine_info({}, b'vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1.0')
    assert (empty.models, empty.max_model_len, empty.kv_tokens) == ((), None, None)


async def test_the_timer_is_never_early_and_takes_back_a_request() -> None:
    fired: list[float] = []
    timer = PreciseTimer(lambda: fired.append(time.monotonic()))
    timer.start()
    cancelled = time.monotonic() + 0.002
    timer.at(cancelled)
    timer.cancel()
    wanted = time.monotonic() + 0.005
    timer.at(wanted)
    while not fired:
        await asyncio.sleep(0.001)
    assert fired[0] >= wanted
    timer.at(time.monotonic() - 1)
    while len(fired) < 2:
        await asyncio.sleep(0)
    timer.close()
    timer.close()


def test_what_cannot_be_read_in_metrics_or_models_is_missing() -> None:
    text = (
        b'vllm:num_requests_running{engine="0"} many\n'
        b'vllm:num_requests_waiting{engine="0"} 2\n'
        b'vllm:time_to_first_token_seconds_bucket{le="abc"} 5\n'
        b'vllm:time_to_first_token_seconds_bucket{le="nan"} 5\n'
        b'vllm:time_to_first_token_seconds_bucket{le="0.5"} 4\n'
        b'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 6\n'
    )
    stats = engine_stats(text)
    assert (stats.running, stats.waiting) == (None, 2.0)
    assert stats.ttft_buckets == ((0.5, 4.0), (math.inf, 6.0))
    for models in ({"data": 7}, {"data": "x"}, {"data": {"id": "m"}}, {"data": [{"id": 7}]}, {}):
        odd = 'vllm:cache_config_info{num_gpu_blocks="\u00b2",block_size="16"} 1'.encode()
        assert engine_info(models, odd).models == ()
