"""How long iterations take, learned from counters; and what offline may have beside online."""

from __future__ import annotations

import random

import msgspec
import pytest

from hybridsched.core.headroom import longest_ms, room
from hybridsched.core.latency import LEAST_SAMPLES, IterationTimes, Reading, Sample, fit, predict, sample_of
from hybridsched.core.policy import HeadroomPolicy, SloPolicy
from hybridsched.core.values import LatencyFit
from hybridsched.engines.simulated.perf import load_profile

TRUE = LatencyFit(fixed_ms=10.0, free_tokens=32.0, token_ms=0.07, cache_ms=25.0)


def sample(tokens: float, kv_use: float, noise: float = 0.0) -> Sample:
    return Sample(tokens=tokens, kv_use=kv_use, ms=predict(TRUE, tokens, kv_use) * (1.0 + noise))


def samples(count: int, noise: float, seed: int = 0) -> list[Sample]:
    source = random.Random(seed)
    return [
        sample(
            source.choice([1.0, 8.0, 30.0, 60.0, 300.0, 1500.0, 2048.0]),
            source.random(),
            source.uniform(-noise, noise),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("noise", "within"), [(0.0, 1e-6), (0.1, 0.1)])
def test_the_hinge_is_found_again(noise: float, within: float) -> None:
    found = fit(samples(100, noise))
    assert found is not None
    for tokens, kv_use in ((1.0, 0.1), (300.0, 0.5), (2048.0, 0.9)):
        assert predict(found, tokens, kv_use) == pytest.approx(predict(TRUE, tokens, kv_use), rel=within)
    assert found.error <= noise + 1e-9
    assert (found.samples, found.free_tokens == 32.0 or noise > 0) == (100, True)


def test_outliers_are_left_out() -> None:
    broken = [msgspec.structs.replace(one, ms=one.ms * 8.0) for one in samples(6, 0.0, seed=1)]
    found = fit([*samples(100, 0.0), *broken])
    assert found is not None
    assert found.error < 0.05
    assert predict(found, 300.0, 0.5) == pytest.approx(predict(TRUE, 300.0, 0.5), rel=0.05)


def test_without_long_iterations_nothing_is_known_of_their_slope() -> None:
    assert fit([sample(0.0, 0.1)] * 50) is None
    assert fit([Sample(tokens=40.0, kv_use=0.2, ms=12.0)] * 50) is None, "one place says nothing of a slope"


def test_a_slope_is_never_negative() -> None:
    falling = [Sample(tokens=float(n), kv_use=0.5, ms=100.0 - n / 50) for n in range(0, 2000, 40)]
    assert fit(falling) is None


@pytest.mark.parametrize("noise", [0.0, 1e-9, 1e-4])
def test_iterations_of_one_length_say_nothing_of_a_slope(noise: float) -> None:
    """A slope of rounding would let any batch seem free."""
    source = random.Random(4)
    flat = [
        Sample(tokens=10.0 * n, kv_use=source.random(), ms=10.0 * (1.0 + source.uniform(-noise, noise)))
        for n in range(50)
    ]
    assert fit(flat) is None


def test_a_slip_of_the_counters_ends_no_learning() -> None:
    times = IterationTimes()
    iterations = tokens = at_ms = 0.0
    for number, one in enumerate([None, *samples(80, 0.0)]):
        if one is not None:
            iterations, tokens, at_ms = iterations + 10, tokens + 10 * one.tokens, at_ms + 10 * one.ms
        slips = 1e290 if number % 7 == 5 else 0.0
        kv_use = 0.5 if one is None else one.kv_use
        times.observe(reading(at_ms, iterations, tokens + slips, kv_use=kv_use))
        times.fit()
    found = times.fit()
    assert found is not None
    assert predict(found, 300.0, 0.5) == pytest.approx(predict(TRUE, 300.0, 0.5), rel=0.3)


def reading(at_ms: float, iterations: float | None, tokens: float | None, **more: float | None) -> Reading:
    values = {"kv_use": 0.5, "running": 3.0} | more
    return Reading(at_ms=at_ms, iterations=iterations, tokens=tokens, **values)


def test_two_readings_of_a_busy_engine_make_a_sample() -> None:
    before = reading(0.0, 10.0, 100.0)
    assert sample_of(before, reading(200.0, 20.0, 600.0)) == Sample(tokens=50.0, kv_use=0.5, ms=20.0)


@pytest.mark.parametrize(
    "after",
    [
        reading(200.0, 12.0, 600.0),
        reading(200.0, None, 600.0),
        reading(200.0, 20.0, None),
        reading(200.0, 20.0, 600.0, kv_use=None),
        reading(200.0, 20.0, 600.0, running=0.0),
        reading(200.0, 20.0, 600.0, running=None),
        reading(0.0, 20.0, 600.0),
        reading(9000.0, 20.0, 600.0),
        reading(200.0, 20.0, 50.0),
        reading(200.0, 20.0, float("nan")),
        reading(200.0, 20.0, 1e200),
        reading(200.0, float("inf"), 600.0),
        reading(200.0, 1e300, 600.0),
        reading(200.0, 20.0, 600.0, kv_use=1e200),
        reading(200.0, 20.0, 600.0, kv_use=-2.0),
    ],
)
def test_what_makes_none(after: Reading) -> None:
    assert sample_of(reading(0.0, 10.0, 100.0), after) is None


def test_a_restarted_engine_is_learned_anew() -> None:
    times = IterationTimes()
    iterations = tokens = at_ms = 0.0
    for one in [None, *samples(40, 0.0)]:
        if one is not None:
            iterations, tokens, at_ms = iterations + 10, tokens + 10 * one.tokens, at_ms + 10 * one.ms
        kv_use = 0.5 if one is None else one.kv_use
        times.observe(reading(at_ms, iterations, tokens, kv_use=kv_use))
    assert times.fit() is not None
    assert times.at_ms == at_ms
    times.observe(reading(at_ms + 100.0, 1.0, 5.0))
    assert times.fit() is None, "another engine process"


def test_too_few_samples_fit_nothing() -> None:
    times = IterationTimes()
    for number in range(LEAST_SAMPLES):
        times.observe(reading(100.0 * number, 10.0 * number, 500.0 * number * number))
    assert times.fit() is None


def test_the_simulated_engines_profile_is_such_a_hinge() -> None:
    profile = load_profile("a100-llama3-8b")
    source = random.Random(3)
    made = []
    for _ in range(120):
        prefill, decode = source.choice([0, 0, 0, 512, 2048]), source.randint(1, 100)
        context = decode * source.randint(500, 3000)
        ms = profile.iteration_ms(prefill_tokens=prefill, batch_decode=decode, total_context=context)
        made.append(Sample(tokens=prefill + decode, kv_use=context / 400_000, ms=ms))
    found = fit(made)
    assert found is not None
    assert found.error < 0.06, "what is left is the attention of prompts, which has no term here"


POLICY = HeadroomPolicy(tpot_share=0.6, decode_share=0.8, calm_share=0.8, least_slice_tokens=64)
SLO = SloPolicy(ttft_ms=1000.0, tpot_ms=50.0)


def test_the_limit_falls_as_latency_comes_near_its_objective() -> None:
    assert longest_ms(POLICY, SLO, []) == 30.0
    assert longest_ms(POLICY, SLO, [0.5, 0.8]) == 30.0
    assert longest_ms(POLICY, SLO, [0.1, 0.9]) == pytest.approx(15.0)
    assert longest_ms(POLICY, SLO, [1.0]) == longest_ms(POLICY, SLO, [7.0]) == 0.0


def place(limit_ms: float, online: float, offline: float, kv_use: float, most: int = 512) -> tuple[int, int]:
    found = room(
        TRUE, POLICY, limit_ms=limit_ms, online=online, offline=offline, kv_use=kv_use, most_slice_tokens=most
    )
    return found.sequences, found.slice_tokens


def test_room_below_the_hinge_is_free() -> None:
    sequences, slice_tokens = place(30.0, online=4.0, offline=0.0, kv_use=0.0)
    assert sequences > 1000, "another sequence costs nothing yet"
    assert slice_tokens == (28 + int(20.0 / 0.07)) // 16 * 16
    assert place(30.0, online=4.0, offline=0.0, kv_use=0.0, most=128)[1] == 128


def test_context_takes_room_sequence_by_sequence() -> None:
    # 10 requests hold 0.2 of the cache: 0.5 ms each; 24 ms less 15 leave 18 more.
    assert place(30.0, online=4.0, offline=6.0, kv_use=0.2)[0] == 6 + 18
    # 40 of them hold 0.6 of it: 10 + 0.07 x 8 + 15 is 1.56 ms too much; 0.445 ms each.
    assert place(30.0, online=4.0, offline=36.0, kv_use=0.6)[0] == 36 - 4


def test_without_room_for_a_slice_nothing_new_begins() -> None:
    assert place(16.0, online=4.0, offline=6.0, kv_use=0.2) == (1, 64)
    assert place(18.9, online=4.0, offline=6.0, kv_use=0.2)[0] == 6, "the limit allows 7; no slice fits"
    assert place(0.0, online=4.0, offline=0.0, kv_use=0.2)[0] == 0
