"""Which batch is next, and whether its deadline can be met."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.core.deadlines import CALM, LEAST_SPAN_MS, SPAN_MS, Pace, Work, outlooks, turns

NOW = 1_000_000.0
PACE = 100.0


def work(
    name: str, tokens: float, due_s: float | None = None, *, outstanding: int = 0, at: float = 0.0
) -> Work:
    deadline_ms = None if due_s is None else NOW + due_s * 1000.0
    return Work(batch=name, tokens=tokens, submitted_ms=at, outstanding=outstanding, deadline_ms=deadline_ms)


def order(*works: Work, pace: float | None = PACE, shut: str = "") -> list[str]:
    return list(turns(works, {one.batch for one in works if one.batch not in shut}, NOW, pace))


def test_with_time_to_spare_all_take_turns() -> None:
    assert order(work("a", 100, at=2.0), work("b", 100, 60.0, at=1.0), work("c", 9, 60.0, outstanding=1)) == [
        *("b", "a", "c"),
    ]


def test_a_deadline_at_risk_goes_first_and_alone() -> None:
    assert order(work("a", 5000), work("b", 5100, 100.0)) == ["b"], "51 s of 100"
    assert order(work("a", 5000, at=1.0), work("b", 4900, 100.0, at=2.0)) == ["a", "b"]


def test_the_earliest_deadline_comes_first() -> None:
    assert order(work("late", 5000, 120.0), work("soon", 4000, 60.0)) == ["soon", "late"]


def test_work_that_is_due_before_counts_also_when_it_is_all_planned() -> None:
    assert order(work("late", 3000, 100.0, at=2.0), work("calm", 9, at=1.0)) == ["calm", "late"]
    assert order(work("late", 3000, 100.0), work("calm", 9), work("soon", 2500, 60.0), shut="soon") == [
        "late"
    ]


def test_what_cannot_be_met_takes_its_turn_and_takes_nobody_down() -> None:
    found = outlooks([work("hopeless", 9000, 50.0), work("fine", 5500, 100.0)], NOW, PACE)
    assert (found["hopeless"].feasible, found["hopeless"].urgent) == (False, False)
    assert found["hopeless"].ends_ms == NOW + 90_000.0
    assert found["hopeless"].needs_tokens_per_s == 180.0
    assert (found["fine"].feasible, found["fine"].urgent) == (True, True)
    assert order(work("hopeless", 9000, 50.0), work("fine", 5500, 100.0)) == ["fine"]
    assert order(work("hopeless", 9000, 50.0, at=2.0), work("calm", 10, at=1.0)) == ["calm", "hopeless"]


@pytest.mark.parametrize("pace", [None, 0.0, float("nan"), float("inf")])
def test_without_a_pace_nothing_is_said_and_nobody_hurries(pace: float | None) -> None:
    found = outlooks([work("b", 5000, 50.0)], NOW, pace)["b"]
    assert (found.risk, found.feasible, found.ends_ms, found.urgent) == (None, None, None, False)
    assert found.needs_tokens_per_s == 100.0
    assert order(work("a", 1, at=1.0), work("b", 5000, 1.0, at=2.0), pace=pace) == ["a", "b"]


def test_a_deadline_that_is_over() -> None:
    over, done = outlooks([work("over", 5, -1.0), work("done", 0, -1.0)], NOW, PACE).values()
    assert (over.batch, over.feasible, over.needs_tokens_per_s) == ("done", True, None)
    assert (done.batch, done.feasible) == ("over", False)


works = st.lists(
    st.tuples(st.floats(0, 1e6), st.one_of(st.none(), st.floats(-100, 1e4))), min_size=1, max_size=12
).map(lambda given: [work(f"b{i}", tokens, due) for i, (tokens, due) in enumerate(given)])


@given(given=works, pace=st.floats(1.0, 1e5), faster=st.floats(1.0, 10.0))
def test_who_is_said_to_be_in_time_is_so_when_served_in_that_order(
    given: list[Work], pace: float, faster: float
) -> None:
    found = outlooks(given, NOW, pace)
    at_ms = NOW
    for one in sorted(given, key=lambda one: (one.deadline_ms or float("inf"), one.submitted_ms, one.batch)):
        if one.deadline_ms is not None and found[one.batch].feasible:
            at_ms += one.tokens / pace * 1000.0
            nothing_left = at_ms == NOW  # and so it was in time, also when the deadline is over by now
            assert nothing_left or at_ms <= one.deadline_ms + 1e-3 + 1e-9 * at_ms
    hurried = turns(given, {one.batch for one in given}, NOW, pace)
    if any(outlook.urgent for outlook in found.values()):
        assert all(CALM < (found[name].risk or 0.0) <= 1.0 for name in hurried)
    else:
        assert sorted(hurried) == sorted(one.batch for one in given), "nobody is left out"
    alone = [outlooks([one], NOW, pace)[one.batch] for one in given]
    better = [outlooks([one], NOW, pace * faster)[one.batch] for one in given]
    for slow, fast in zip(alone, better, strict=True):
        assert slow.risk is None or (fast.risk is not None and fast.risk <= slow.risk), "monotone in the pace"


def test_the_pace_is_that_of_the_last_minutes_gaps_included() -> None:
    pace = Pace()
    left = 100_000.0
    for second in range(40):
        left -= 50.0
        pace.observe(second * 1000.0, {"a": left, "b": 10.0})
        assert (pace.tokens_per_s() is None) == (second * 1000.0 < LEAST_SPAN_MS)
    assert pace.tokens_per_s() == pytest.approx(50.0)
    pace.observe(79_000.0, {"a": left})
    assert pace.tokens_per_s() == pytest.approx(39 * 50.0 / 79.0), "forty seconds without any"
    pace.observe(79_000.0 + SPAN_MS, {"a": left, "new": 5e9})
    pace.observe(79_500.0 + SPAN_MS, {"a": left, "new": 5e9})
    assert pace.tokens_per_s() == 0.0, "a new batch is no work done, and the old is forgotten"


def test_lines_that_are_taken_back_are_no_work_undone() -> None:
    pace = Pace()
    for at_s, left in ((0, 100.0), (20, 50.0), (40, 80.0)):
        pace.observe(at_s * 1000.0, {"a": left})
    assert pace.tokens_per_s() == pytest.approx(50.0 / 40.0)
    pace.observe(10_000.0, {"a": 0.0})
    assert pace.tokens_per_s() == pytest.approx(50.0 / 40.0), "a clock that was set back"
