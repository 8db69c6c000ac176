"""The twin's engine by example; that it equals the scheduler is a property test's matter."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.engines.simulated.perf import Profile, load_profile, profile_names, run_iterations, run_ms
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.twin.blocks import CountedBlocks
from hybridsched.twin.engine import TwinEngine
from hybridsched.twin.request import EventKind, TwinRequest

PROFILE = load_profile("a100-llama3-8b")


def decode_ms(profile: Profile, batch: int, context: int) -> float:
    return profile.iteration_ms(prefill_tokens=0, batch_decode=batch, total_context=context)


@given(
    name=st.sampled_from(profile_names()),
    batch=st.integers(1, 300),
    context=st.integers(1, 400_000),
    count=st.integers(1, 400),
)
def test_a_run_lasts_as_long_as_its_iterations(name: str, batch: int, context: int, count: int) -> None:
    profile = load_profile(name)
    fixed_ms, token_ms = profile.decode_ms(batch)
    first_ms, growth_ms = fixed_ms + token_ms * context, token_ms * batch
    assert first_ms == pytest.approx(decode_ms(profile, batch, context))
    one_by_one = sum(decode_ms(profile, batch, context + batch * step) for step in range(count))
    assert run_ms(first_ms, growth_ms, count) == pytest.approx(one_by_one, rel=1e-12)


@given(
    first_ms=st.floats(0.1, 1000),
    growth_ms=st.one_of(st.just(0.0), st.floats(1e-12, 1.0)),
    within_ms=st.floats(0.0, 1e6),
)
def test_the_fewest_iterations_that_last_so_long(first_ms: float, growth_ms: float, within_ms: float) -> None:
    count = run_iterations(first_ms, growth_ms, within_ms)
    assert run_ms(first_ms, growth_ms, count) >= within_ms
    assert count == 1 or run_ms(first_ms, growth_ms, count - 1) < within_ms


@given(st.integers(1, 5000), st.integers(1, 300))
def test_the_end_of_an_iteration_belongs_to_it(count: int, batch: int) -> None:
    fixed_ms, token_ms = PROFILE.decode_ms(batch)
    assert run_iterations(fixed_ms, token_ms * batch, run_ms(fixed_ms, token_ms * batch, count)) == count


def test_a_long_answer_takes_two_advances() -> None:
    engine = TwinEngine(Limits(), PROFILE)
    request = TwinRequest(1000, 5000)
    engine.add(request, 1.0)
    assert [(kind, r) for kind, r in engine.advance(engine.next_s())] == [(EventKind.FIRST_TOKEN, request)]
    assert request.first_token_s == pytest.approx(
        1.0 + PROFILE.iteration_ms(prefill_tokens=1000, batch_decode=0, total_context=0) / 1e3
    )
    assert [(kind, r) for kind, r in engine.advance(engine.next_s())] == [(EventKind.FINISHED, request)]
    assert engine.next_s() == math.inf
    engine.settle(request.finished_s or 0.0)
    assert engine.totals.iterations == 5000
    assert engine.totals.idle_s == 1.0
    assert (engine.totals.prefill_online, engine.totals.output_online) == (1000, 5000)


def test_requests_of_one_call_begin_together_and_of_two_calls_one_after_the_other() -> None:
    together, apart = TwinEngine(Limits(), PROFILE), TwinEngine(Limits(), PROFILE)
    pairs = [(TwinRequest(50, 2), TwinRequest(50, 2)) for _ in range(2)]
    together.add_all([a for a, _ in pairs], 0.0)
    for _, b in pairs:
        apart.add(b, 0.0)
    together.advance(10.0)
    apart.advance(10.0)
    assert pairs[0][0].first_token_s == pairs[1][0].first_token_s
    first_s, second_s = pairs[0][1].first_token_s, pairs[1][1].first_token_s
    assert first_s is not None
    assert second_s is not None
    assert first_s < second_s


def test_a_request_that_comes_with_the_end_of_an_iteration_joins_the_next() -> None:
    engine = TwinEngine(Limits(), PROFILE)
    engine.add(TwinRequest(50, 3), 0.0)
    end_s = engine.next_s()
    late = TwinRequest(50, 3)
    engine.add(late, end_s)
    engine.advance(end_s)
    assert late.first_scheduled_s == end_s


def test_time_goes_forward_and_a_prompt_must_fit() -> None:
    engine = TwinEngine(Limits(max_model_len=100), PROFILE)
    request = TwinRequest(50, 3)
    engine.add(request, 0.0)
    after_s = engine.next_s() + 1.0
    calls = (
        lambda: engine.add(TwinRequest(1, 1), after_s),
        lambda: engine.abort(request, after_s),
        lambda: engine.pause(after_s),
        lambda: engine.resume(after_s),
        lambda: engine.settle(after_s),
    )
    for call in calls:
        with pytest.raises(ValueError, match="advance it before"):
            call()
    with pytest.raises(ValueError, match="leaves no room within 100"):
        engine.add(TwinRequest(100, 1), 0.0)
    for prompt, output in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least"):
            TwinRequest(prompt, output)
    engine.advance(100.0)
    assert request.finished_s is not None


def test_the_quantum_of_a_pause_and_what_waits_behind_it() -> None:
    engine = TwinEngine(Limits(), PROFILE)
    offline = TwinRequest(100, 400, offline=True)
    engine.add(offline, 0.0)
    engine.advance(engine.next_s())
    span = engine.iteration_at(1.0)
    assert span is not None
    assert span[0] <= 1.0 <= span[1]
    quiet_s = engine.pause(1.0, clear_cache=False)
    assert quiet_s == pytest.approx(span[1])
    engine.advance(quiet_s)
    assert engine.paused
    online = TwinRequest(10, 1)
    engine.add(online, 2.0)
    assert (engine.waiting, engine.online, engine.next_s()) == (0, 1, math.inf)
    engine.resume(3.0)
    engine.advance(100.0)
    assert online.first_scheduled_s == 3.0
    assert offline.preemptions == 0
    engine.settle(100.0)
    totals = engine.totals
    assert totals.online_s + totals.offline_s + totals.idle_s == pytest.approx(100.0)
    assert totals.online_s == pytest.approx((online.finished_s or 0.0) - 2.0)


def test_an_aborted_request_goes_on_from_its_blocks() -> None:
    engine = TwinEngine(Limits(), PROFILE)
    first = TwinRequest(1000, 300, offline=True, cache_key="line")
    engine.add(first, 0.0)
    engine.advance(engine.next_s())
    ends_s = engine.abort(first, 1.0)
    assert engine.advance(ends_s) == [(EventKind.ABORTED, first)]
    assert 0 < first.made < 300
    assert first.finished_s == ends_s
    rest = TwinRequest(
        1000 + first.made, 300 - first.made, offline=True, cache_key="line", known_tokens=first.computed
    )
    engine.add(rest, 2.0)
    engine.advance(100.0)
    assert rest.cached_tokens == first.computed // 16 * 16
    engine.settle(100.0)
    assert engine.totals.recomputed == first.computed % 16
    assert engine.totals.output_offline == 300


def test_a_waiting_request_ends_at_once_and_without_an_event() -> None:
    engine = TwinEngine(Limits(max_num_seqs=1), PROFILE)
    engine.add(TwinRequest(100, 400), 0.0)
    engine.advance(0.1)
    waits = TwinRequest(100, 400)
    engine.add(waits, 0.1)
    assert engine.abort(waits, 0.2) == 0.2
    assert (waits.finish_reason, waits.made, engine.waiting) == ("abort", 0, 0)
    assert engine.abort(waits, 0.3) == 0.2
    assert [request for _, request in engine.advance(math.inf)].count(waits) == 0
    assert (engine.online, engine.next_s()) == (0, math.inf)


def test_blocks_are_evicted_from_the_end_of_the_oldest() -> None:
    blocks = CountedBlocks(10)
    blocks.allocate(6)
    blocks.release(3, 48, "a")
    blocks.release(3, 40, "b")
    assert (blocks.lookup("a", 9), blocks.lookup("b", 9), blocks.free) == (3, 2, 10)
    blocks.allocate(6)  # 5 have no content, one is taken from the oldest
    assert (blocks.lookup("a", 9), blocks.lookup("b", 9)) == (2, 2)
    blocks.allocate(3)
    assert (blocks.lookup("a", 9), blocks.lookup("b", 9), blocks.free) == (0, 1, 1)
    blocks.take("b", 1)
    assert (blocks.free, blocks.use) == (0, 1.0)
    blocks.release(10, 0, None)
    blocks.reset_cache()
    assert (blocks.free, blocks.use, blocks.lookup("b", 9)) == (10, 0.0, 0)


def test_entries_that_are_taken_up_again_do_not_pile_up() -> None:
    blocks = CountedBlocks(8)
    for _ in range(100):
        blocks.allocate(1)
        blocks.release(1, 16, "line")
        blocks.take("line", 1)
        blocks.release(1, 0, "line")
    assert len(blocks._entries) <= 17  # the bound is the point, and nothing else shows it
    assert blocks.free == 8
