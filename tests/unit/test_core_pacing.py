"""When the next offline request may be sent."""

from __future__ import annotations

from math import inf

import pytest

from hybridsched.core.pacing import (
    FIRST_ITERATION_S,
    SEND_BURST,
    SEND_WINDOW_S,
    UNREAD_BOUND_S,
    UNREAD_MOST,
    PromptPace,
    slice_step,
)


def pace(slice_tokens: int = 512) -> PromptPace:
    found = PromptPace()
    found.slice_tokens = slice_tokens
    return found


@pytest.mark.parametrize(("tokens", "step"), [(512, 512), (100, 96), (16, 16), (7, 16)])
def test_a_slice_is_of_whole_blocks(tokens: int, step: int) -> None:
    assert slice_step(tokens, 16) == step


def test_two_slices_are_under_way_an_iteration_apart() -> None:
    one = pace()
    assert one.wait_s(512, 0.0) == 0.0
    first = one.grant(512, 0.0)
    spacing = one.wait_s(512, 0.0)
    assert 0 < spacing < FIRST_ITERATION_S
    one.grant(512, spacing)
    assert one.wait_s(512, 10.0) == inf, "a third one waits for an answer"
    assert one.close(first)
    assert one.wait_s(512, 10.0) == 0.0
    assert not one.close(first), "a grant is closed once"


def test_without_slices_only_bursts_are_held_back() -> None:
    one = pace(0)
    for _ in range(SEND_BURST):
        assert one.wait_s(5000, 1.0) <= 0
        one.grant(5000, 1.0)
    one.read(one.sent)
    assert one.wait_s(5000, 1.0) == pytest.approx(SEND_WINDOW_S)
    assert one.wait_s(5000, 1.0 + SEND_WINDOW_S) <= 0


def test_an_iteration_is_measured_and_one_that_waited_counts_half() -> None:
    one = pace()
    alone, behind = one.grant(512, 0.0), one.grant(512, 0.02)
    before = one.iteration_s
    one.measured(alone, 0.06)
    assert one.iteration_s == pytest.approx(before + 0.3 * (0.06 - before))
    before = one.iteration_s
    one.measured(behind, 0.12)
    assert one.iteration_s == pytest.approx(before + 0.3 * (0.05 - before))


def test_few_requests_are_under_way_that_the_engine_has_not_read() -> None:
    one = pace(0)
    at_s = [n * SEND_WINDOW_S for n in range(UNREAD_MOST)]
    for now_s in at_s:
        assert one.wait_s(10, now_s) <= 0
        one.grant(10, now_s)
    now_s = at_s[-1] + SEND_WINDOW_S
    assert one.wait_s(10, now_s) == pytest.approx(UNREAD_BOUND_S + at_s[0] - now_s)
    one.read(2)
    assert one.wait_s(10, now_s) <= 0
    assert one.unread(now_s) == UNREAD_MOST - 2
    one.read(1)
    assert one.unread(now_s) == UNREAD_MOST - 2, "known already"
    one.read(one.sent)
    assert one.unread(now_s) == 0


def test_what_nobody_asked_for_counts_as_read_after_a_while() -> None:
    one = pace(0)
    for _ in range(UNREAD_MOST):
        one.grant(10, 0.0)
    assert one.wait_s(10, UNREAD_BOUND_S - 0.01) == pytest.approx(0.01)
    assert one.wait_s(10, UNREAD_BOUND_S) <= 0
    assert one.unread(UNREAD_BOUND_S) == 0
