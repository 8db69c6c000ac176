"""The twin's engine against the simulated scheduler, iteration by iteration: the same to the last figure."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hybridsched.engines.simulated.kv import BLOCK_SIZE
from hybridsched.engines.simulated.perf import load_profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.engines.simulated.sequence import Seq, Status
from hybridsched.twin.engine import TwinEngine
from hybridsched.twin.request import TwinRequest
from hybridsched.twin.totals import Totals
from tests.twin_stepwise import Stepwise

PROFILES = ("a100-llama3-8b", "a100-llama2-7b-linear")
TOTALS = [field.name for field in fields(Totals)]
GRID_S = 0.0013718281828
"""No sum of iterations falls on its multiples, so no action meets the very end of an iteration."""


class Both:
    """Two engines that get the same actions."""

    def __init__(self, limits: Limits, profile: str) -> None:
        self.real = Stepwise(limits, load_profile(profile))
        self.twin = TwinEngine(limits, load_profile(profile))
        self.now_s = 0.0
        self.pairs: list[tuple[Seq, TwinRequest]] = []
        self.events: list[tuple[str, str, float]] = []
        self.names: dict[TwinRequest, str] = {}
        self.continued: set[int] = set()

    def wait(self, ticks: int) -> None:
        self.to(self.now_s + ticks * GRID_S)

    def to(self, time_s: float) -> None:
        self.now_s = time_s
        self.real.advance(time_s)
        self._note(time_s)

    def _note(self, time_s: float) -> None:
        self.events += [
            (kind.name, self.names[request], request.finished_s if kind.name != "FIRST_TOKEN" else at)
            for kind, request in self.twin.advance(time_s)
            for at in (request.first_token_s,)
        ]

    def add(
        self, prompt: list[int], output: int, *, offline: bool, priority: int, key: int | None, known: int = 0
    ) -> None:
        name = f"r{len(self.pairs)}"
        seq = Seq(name, prompt, max_tokens=output, ignore_eos=True, priority=priority, offline=offline)
        request = TwinRequest(
            len(prompt), output, offline=offline, priority=priority, cache_key=key, known_tokens=known
        )
        self.names[request] = name
        self.pairs.append((seq, request))
        self.real.add(seq, self.now_s, known=known)
        self.twin.add(request, self.now_s)

    def go_on(self, which: int, output: int, longest: int) -> None:
        """Send an ended request again as its prompt and what it has made."""
        seq, request = self.pairs[which]
        whole = [*seq.prompt, *seq.output]
        if request.cache_key is None:
            return  # only its own blocks are found again, while it is preempted
        if seq.status is Status.FINISHED and which not in self.continued and len(whole) < longest:
            self.continued.add(which)
            self.add(
                whole,
                output,
                offline=seq.offline,
                priority=seq.priority,
                key=request.cache_key,  # type: ignore[arg-type]
                known=seq.computed,
            )

    def compare(self) -> None:
        """All that can be seen of the two, now."""
        self.real.settle(self.now_s)
        self.twin.settle(self.now_s)
        real, twin, scheduler = self.real, self.twin, self.real.scheduler
        assert twin.running == len(scheduler.running)
        assert (twin.queue.online, twin.queue.offline) == (scheduler.queue.online, scheduler.queue.offline)
        assert twin.online + twin.offline == scheduler.unfinished
        assert twin.online == real.online
        assert twin.paused == scheduler.paused
        assert twin.kv_use == pytest.approx(scheduler.kv.use, abs=1e-12)
        for seq, request in self.pairs:
            assert twin.made(request) == len(seq.output)
            assert request.status is seq.status
        now = self.twin.iteration_at(self.now_s)
        if real.current is None:
            assert now is None
        else:
            assert now == pytest.approx((real.current.start, real.end_s), rel=1e-9)
        for name in TOTALS:
            assert getattr(twin.totals, name) == pytest.approx(
                getattr(real.totals, name), rel=1e-9, abs=1e-9
            ), name
        assert twin.totals.online_s + twin.totals.offline_s + twin.totals.idle_s == pytest.approx(self.now_s)

    def finish(self) -> None:
        """Run both to their end and compare every request."""
        self.real.resume(self.now_s)
        self.twin.resume(self.now_s)
        self.to(self.now_s + 1e6)
        assert math.isinf(self.twin.next_s())
        self.compare()
        assert self.twin.blocks.free == self.twin.blocks.num_blocks
        for seq, request in self.pairs:
            assert seq.status is request.status is Status.FINISHED
            assert request.finish_reason == seq.finish_reason
            assert request.cached_tokens == seq.cached_tokens
            assert request.preemptions == seq.preemptions
            for ours, theirs in (
                (request.first_token_s, seq.first_token_at),
                (request.finished_s, seq.finished_at),
                (request.first_scheduled_s, seq.first_scheduled_at),
            ):
                assert (ours is None) is (theirs is None)
                assert (ours or 0.0) == pytest.approx(theirs or 0.0, rel=1e-9), self.names[request]

        def by_time(events: list[tuple[str, str, float]]) -> list[tuple[str, str]]:
            return sorted((name, kind) for kind, name, _ in events)

        assert by_time(self.events) == by_time(self.real.events)
        assert [at for _, _, at in self.events] == sorted(at for _, _, at in self.events)


def requests(prompt: int, output: int) -> st.SearchStrategy[tuple[object, ...]]:
    return st.tuples(
        st.just("add"),
        st.integers(0, 60),
        st.integers(1, prompt),
        st.integers(1, output),
        st.booleans(),
        st.integers(-2, 2),
    )


def others() -> st.SearchStrategy[tuple[object, ...]]:
    return st.one_of(
        st.tuples(st.just("wait"), st.integers(1, 400)),
        st.tuples(st.just("compare"), st.integers(0, 30)),
        st.tuples(st.just("abort"), st.integers(0, 40), st.integers(0, 40)),
        st.tuples(st.just("go_on"), st.integers(0, 40), st.integers(0, 40), st.integers(1, 60)),
        st.tuples(st.just("pause"), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("resume"), st.integers(0, 200)),
    )


CROWD = st.lists(
    st.tuples(
        st.just("add"),
        st.integers(0, 6),
        st.integers(60, 120),
        st.integers(30, 60),
        st.booleans(),
        st.integers(-2, 2),
    ),
    min_size=2,
    max_size=6,
)
"""Requests that do not fit into the small cache together."""


def play(both: Both, actions: list[tuple[object, ...]], longest: int) -> None:
    for action in actions:
        name, ticks, *more = action
        both.wait(int(ticks))  # type: ignore[call-overload]
        rest = [int(value) for value in more]  # type: ignore[call-overload]
        pick = rest[0] % len(both.pairs) if both.pairs and rest else 0
        match name:
            case "add":
                key = len(both.pairs)
                length, output, offline, priority = rest
                prompt = [key * 100_000 + at for at in range(length)]
                both.add(
                    prompt,
                    output,
                    offline=bool(offline),
                    priority=priority,
                    key=None if key % 3 == 2 else key,
                )
            case "compare":
                both.compare()
            case "abort" if both.pairs:
                seq, request = both.pairs[pick]
                both.real.abort(seq, both.now_s)
                ends_s = both.twin.abort(request, both.now_s)
                assert ends_s >= both.now_s or seq.finished_at is not None
            case "go_on" if both.pairs:
                both.go_on(pick, rest[1], longest)
            case "pause":
                both.real.pause(both.now_s, clear_cache=bool(rest[0]))
                both.twin.pause(both.now_s, clear_cache=bool(rest[0]))
            case "resume":
                both.real.resume(both.now_s)
                both.twin.resume(both.now_s)
            case _:
                pass
    both.finish()


@settings(max_examples=300, deadline=None)
@given(
    crowd=CROWD,
    actions=st.lists(st.one_of(requests(120, 60), requests(120, 60), others()), max_size=25),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 80),
    blocks=st.integers(13, 24),
    profile=st.sampled_from(PROFILES),
)
def test_a_crowded_engine_is_the_same(
    crowd: list[tuple[object, ...]],
    actions: list[tuple[object, ...]],
    policy: str,
    max_num_seqs: int,
    budget: int,
    blocks: int,
    profile: str,
) -> None:
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=200,
        kv_tokens=blocks * BLOCK_SIZE,
        scheduling_policy=policy,
    )
    both = Both(limits, profile)
    play(both, crowd + actions, limits.max_model_len)
    event(f"preempting iterations: {min(both.real.preempting_iterations, 3)}")


@pytest.mark.parametrize(
    ("budget", "max_num_seqs", "blocks", "crowd"),
    [
        # One that has its blocks for the iteration is preempted for another: it gives those back, too...
        (40, 5, 16, [(55, 84, 31, False, 0), (47, 68, 38, False, -2), (54, 103, 39, True, -1)]),
        # ... and its token of the budget, which a prompt that is computed in part can use.
        (
            36,
            3,
            14,
            [(13, 95, 49, True, 2), (34, 80, 36, True, -2), (14, 78, 37, True, -2), (43, 75, 43, True, -1)],
        ),
        # The second does not fit beside the first; the third, more urgent and small, goes in before it.
        (
            160,
            5,
            13,
            [
                (0, 100, 90, False, 0),
                (20, 120, 5, False, 2),
                (40, 10, 5, False, -1),
                (900, 90, 60, True, 1),
                (3, 90, 60, True, 1),
                (3, 90, 60, True, 1),
            ],
        ),
    ],
)
def test_preempting_what_was_already_planned_is_the_same(
    budget: int, max_num_seqs: int, blocks: int, crowd: list[tuple[int, int, int, bool, int]]
) -> None:
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=200,
        kv_tokens=blocks * BLOCK_SIZE,
        scheduling_policy="priority",
    )
    both = Both(limits, PROFILES[0])
    play(both, [("add", *request) for request in crowd], limits.max_model_len)
    assert both.real.scheduler.preemptions_total > 0


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.one_of(requests(900, 500), requests(900, 500), others()), min_size=3, max_size=25),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_num_seqs=st.integers(1, 40),
    blocks=st.integers(125, 400),
    profile=st.sampled_from(PROFILES),
)
def test_long_runs_are_the_same(
    actions: list[tuple[object, ...]], policy: str, max_num_seqs: int, blocks: int, profile: str
) -> None:
    limits = Limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=2000,
        kv_tokens=blocks * BLOCK_SIZE,
        scheduling_policy=policy,
    )
    play(Both(limits, profile), actions, limits.max_model_len)


def test_totals_are_all_compared() -> None:
    """`compare` goes through the fields by name: an empty one would pass it."""
    assert len(TOTALS) == 13
