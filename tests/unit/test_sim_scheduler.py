"""The simulated scheduler: budgets, blocks and order, by example and by random runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.engines.simulated.iteration import Iteration, Outcome
from hybridsched.engines.simulated.kv import BLOCK_SIZE
from hybridsched.engines.simulated.scheduler import PAUSE_MODES, Limits, Scheduler
from hybridsched.engines.simulated.sequence import Seq, Status
from hybridsched.engines.simulated.tokens import EOS


def limits(**changes: object) -> Limits:
    base = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "kv_tokens": 1024}
    return Limits(**(base | changes))  # type: ignore[arg-type]


def prompt(start: int, length: int) -> list[int]:
    return list(range(start, start + length))


def seq(name: str, ids: list[int], tokens: int, **more: object) -> Seq:
    return Seq(name, ids, max_tokens=tokens, **({"ignore_eos": True} | more))  # type: ignore[arg-type]


def run(
    scheduler: Scheduler, *, upto: int = 10_000, each: Callable[[Iteration, Outcome], None] | None = None
) -> list[Seq]:
    """Iterate until nothing is left to run; the finished sequences in order."""
    finished: list[Seq] = []
    for step in range(upto):
        it = scheduler.plan(float(step))
        if it is None:
            return finished
        out = scheduler.commit(it, float(step + 1))
        finished += out.finished
        if each is not None:
            each(it, out)
    raise AssertionError(f"still running after {upto} iterations")


def first_step(scheduler: Scheduler) -> None:
    it = scheduler.plan(0.0)
    assert it is not None
    scheduler.commit(it, 1.0)


def test_a_prompt_goes_in_by_slices_and_then_decodes_one_token_each_step() -> None:
    s = Scheduler(limits())
    s.add(seq("a", prompt(0, 150), 3))
    steps: list[tuple[int, int]] = []
    run(s, each=lambda it, out: steps.append((it.prefill_tokens, it.decodes)))
    assert steps == [(64, 0), (64, 0), (22, 0), (0, 1), (0, 1)]


def test_running_decodes_come_before_new_prefill() -> None:
    s = Scheduler(limits())
    s.add(seq("a", prompt(0, 10), 20))
    first_step(s)
    s.add(seq("b", prompt(100, 200), 2))
    it = s.plan(1.0)
    assert it is not None
    assert [(q.request_id, n) for q, n in it.work] == [("a", 1), ("b", 63)]
    assert (it.decodes, it.context, it.prefill_tokens) == (1, 11, 63)
    assert it.prefill_pairs == 63 * 63


def test_the_last_prompt_token_is_always_computed() -> None:
    s = Scheduler(limits())
    s.add(seq("a", prompt(0, 64), 1))
    run(s)
    s.add(seq("b", prompt(0, 64), 1))
    it = s.plan(9.0)
    assert it is not None
    assert it.work[0][1] == BLOCK_SIZE
    assert it.work[0][0].cached_tokens == 64 - BLOCK_SIZE
    assert (s.prefix_queries_total, s.prefix_hits_total) == (128, 48)


def test_max_num_seqs_never_preempts() -> None:
    s = Scheduler(limits(max_num_seqs=1, scheduling_policy="priority"))
    s.add(seq("low", prompt(0, 5), 6, priority=10))
    first_step(s)
    s.add(seq("middle", prompt(20, 5), 2, priority=3))
    s.add(seq("high", prompt(40, 5), 2, priority=-5))
    assert [q.request_id for q in run(s)] == ["low", "high", "middle"]
    assert s.preemptions_total == 0


def test_kv_pressure_preempts_the_least_urgent_and_it_recomputes() -> None:
    s = Scheduler(limits(kv_tokens=256, scheduling_policy="priority"))
    s.add(seq("low", prompt(0, 100), 60, priority=10))
    first_step(s)
    s.add(seq("high", prompt(500, 100), 60, priority=-5))
    finished = run(s)
    assert [q.request_id for q in finished] == ["high", "low"]
    assert s.preemptions_total > 0
    low = finished[1]
    alone = seq("alone", prompt(0, 100), 60)
    other = Scheduler(limits())
    other.add(alone)
    run(other)
    assert low.output == alone.output
    assert low.preemptions == s.preemptions_total


def test_an_abort_waits_for_the_end_of_the_iteration_and_keeps_its_token() -> None:
    s = Scheduler(limits())
    a = seq("a", prompt(0, 10), 20)
    s.add(a)
    it = s.plan(0.0)
    assert it is not None
    assert s.abort(a) is False
    out = s.commit(it, 1.0)
    assert out.finished == [a]
    assert (a.finish_reason, len(a.output)) == ("abort", 1)
    assert s.kv.free == s.kv.num_blocks
    assert s.plan(1.0) is None


def test_kept_tokens_continue_exactly() -> None:
    whole = seq("whole", prompt(7, 45), 120)
    s = Scheduler(limits())
    s.add(whole)
    run(s)
    for cut in (1, 2, 3, 15, 16, 17, 64, 119):
        rest = seq("rest", whole.prompt + whole.output[:cut], 120 - cut)  # type: ignore[operator]
        s.add(rest)
        run(s)
        assert whole.output[:cut] + rest.output == whole.output


def test_an_answer_ends_at_the_same_token_however_often_it_is_cut() -> None:
    free = limits(max_model_len=8192, kv_tokens=16384)
    s = Scheduler(free)
    whole = seq("w", prompt(3, 20), 8000, ignore_eos=False)
    s.add(whole)
    run(s)
    assert whole.finish_reason == "stop"
    assert whole.output[-1] == EOS
    half = len(whole.output) // 2
    rest = seq("r", whole.prompt + whole.output[:half], 8000, ignore_eos=False)  # type: ignore[operator]
    s.add(rest)
    run(s)
    assert whole.output[:half] + rest.output == whole.output


def test_the_context_length_ends_an_answer() -> None:
    s = Scheduler(limits())
    a = seq("a", prompt(0, 250), 100)
    s.add(a)
    run(s)
    assert (a.finish_reason, a.total) == ("length", 256)
    with pytest.raises(ValueError, match="no room"):
        s.add(seq("b", prompt(0, 256), 1))


def test_pause_keep_recomputes_and_pause_without_clearing_does_not() -> None:
    for clear, preemptions in ((True, 1), (False, 0)):
        s = Scheduler(limits())
        a = seq("a", prompt(0, 40), 10)
        s.add(a)
        it = s.plan(0.0)
        assert it is not None
        assert s.pause("keep", clear_cache=clear) == []
        assert not s.paused
        out = s.commit(it, 1.0)
        assert s.paused
        assert (out.running, out.waiting) == (1, 0)
        assert s.plan(1.0) is None
        s.add(seq("late", prompt(90, 4), 1))
        assert (s.waiting, s.held) == (preemptions, 1)
        s.resume()
        assert {q.request_id for q in run(s)} == {"a", "late"}
        assert a.preemptions == preemptions


def test_pause_wait_runs_what_was_accepted_and_holds_the_rest() -> None:
    s = Scheduler(limits())
    s.add(seq("a", prompt(0, 4), 3))
    s.pause("wait")
    assert s.draining
    s.add(seq("b", prompt(9, 4), 1))
    assert [q.request_id for q in run(s)] == ["a"]
    assert s.paused
    s.resume()
    assert [q.request_id for q in run(s)] == ["b"]


def test_pause_abort_ends_everything() -> None:
    s = Scheduler(limits(max_num_seqs=1))
    for name in "abc":
        s.add(seq(name, prompt(ord(name), 4), 50))
    it = s.plan(0.0)
    assert it is not None
    s.pause("abort")
    out = s.commit(it, 1.0)
    assert {q.finish_reason for q in out.finished} == {"abort"}
    assert len(out.finished) == 3
    assert (s.unfinished, s.kv.free) == (0, s.kv.num_blocks)


def test_misuse_is_refused() -> None:
    s = Scheduler(limits())
    s.add(seq("a", prompt(0, 4), 5))
    it = s.plan(0.0)
    assert it is not None
    with pytest.raises(RuntimeError, match="before commit"):
        s.plan(0.0)
    s.commit(it, 1.0)
    with pytest.raises(RuntimeError, match="gave last"):
        s.commit(it, 2.0)
    with pytest.raises(ValueError, match="keep"):
        s.pause("stop")
    with pytest.raises(ValueError, match="max_num_seqs"):
        limits(max_num_seqs=0)
    with pytest.raises(ValueError, match="fcfs or priority"):
        limits(scheduling_policy="sjf")
    with pytest.raises(ValueError, match="raise kv_tokens"):
        limits(kv_tokens=100)
    with pytest.raises(ValueError, match="at least one token"):
        seq("x", [], 1)
    with pytest.raises(ValueError, match="max_tokens"):
        seq("x", [1], 0)


def test_a_pooling_sequence_finishes_without_a_token() -> None:
    s = Scheduler(limits())
    e = seq("e", prompt(0, 100), 1, pooling=True)
    s.add(e)
    assert run(s) == [e]
    assert (e.output, e.finish_reason) == ([], "stop")


CROWD = st.lists(
    st.tuples(
        st.just("add"), st.integers(0, 12), st.integers(60, 120), st.integers(30, 60), st.integers(-2, 2)
    ),
    min_size=2,
    max_size=6,
)
"""Requests that do not fit into the cache together."""
ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(0, 12),  # which of a few prompts: some prefixes are shared, most are not
        st.integers(1, 120),
        st.integers(1, 60),
        st.integers(-2, 2),
    ),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("abort_midway"), st.integers(0, 30)),
    st.tuples(st.just("pause"), st.sampled_from(PAUSE_MODES), st.booleans()),
    st.tuples(st.just("resume")),
)


@settings(max_examples=150, deadline=None)
@given(
    crowd=CROWD,
    actions=st.lists(ACTIONS, max_size=30),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 80),
    blocks=st.integers(13, 24),
)
def test_no_block_leaks_no_budget_breaks_and_everything_ends(
    crowd: list[tuple[object, ...]],
    actions: list[tuple[object, ...]],
    policy: str,
    max_num_seqs: int,
    budget: int,
    blocks: int,
) -> None:
    s = Scheduler(
        Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=200,
            kv_tokens=blocks * BLOCK_SIZE,
            scheduling_policy=policy,
        )
    )
    added: list[Seq] = []
    ended: list[Seq] = []
    clock = [0.0]

    def step(*, abort: int | None = None) -> bool:
        it = s.plan(clock[0])
        if it is None:
            return False
        assert sum(n for _, n in it.work) <= budget
        assert len(s.running) <= max_num_seqs
        assert len({id(q) for q, _ in it.work}) == len(it.work)
        assert it.prefill_tokens + it.decodes == sum(n for _, n in it.work)
        for q, n in it.work:
            assert len(q.blocks) * BLOCK_SIZE >= q.computed + n
        if abort is not None and added and s.abort(added[abort % len(added)]):
            ended.extend(q for q in (added[abort % len(added)],) if q not in ended)
        clock[0] += 1.0
        out = s.commit(it, clock[0])
        ended.extend(out.finished)
        for q in out.emitted:
            assert len(q.output) <= q.max_tokens
        s.kv.check()
        assert s.kv.num_blocks - s.kv.free <= sum(len(q.blocks) for q in s.running)
        return True

    arriving = [step_or_add for one in crowd for step_or_add in (one, ("step", 3))]
    for action in arriving + actions:
        match action:
            case ("add", which, length, tokens, priority):
                new = Seq(
                    f"r{len(added)}",
                    [int(which) * 1000 + i // 40 for i in range(int(length))],  # type: ignore[call-overload]
                    max_tokens=int(tokens),  # type: ignore[call-overload]
                    priority=int(priority),  # type: ignore[call-overload]
                    arrival=clock[0],
                    ignore_eos=len(added) % 2 == 0,
                    offline=len(added) % 3 == 0,
                )
                added.append(new)
                s.add(new)
            case ("step", count):
                for _ in range(int(count)):  # type: ignore[call-overload]
                    step()
            case ("abort", which) if added:
                victim = added[int(which) % len(added)]  # type: ignore[call-overload]
                known = victim.status is Status.FINISHED
                assert s.abort(victim)
                if not known:
                    ended.append(victim)
            case ("abort_midway", which):
                step(abort=int(which))  # type: ignore[call-overload]
            case ("pause", mode, clear):
                ended.extend(s.pause(str(mode), clear_cache=bool(clear)))
            case ("resume",):
                s.resume()
            case _:
                pass
    s.resume()
    for _ in range(50_000):
        if not step():
            break
    assert s.unfinished == 0
    assert (s.queue.online, s.queue.offline) == (0, 0)
    assert s.kv.free == s.kv.num_blocks
    s.kv.check()
    assert sorted(q.request_id for q in ended) == sorted(q.request_id for q in added)
    assert all(q.finish_reason in ("stop", "length", "abort") for q in added)
