"""When the next offline request may be sent."""

from __future__ import annotations

from math import inf

import pytest

from hybridsched.core.pacing import FIRST_ITERATION_S, SEND_BURST, SEND_WINDOW_S, PromptPace, slice_step


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
