"""What `why` and `decisions` say."""

from __future__ import annotations

import pytest

from hybridsched.cli.decision_view import Changes
from hybridsched.cli.words import because, numbers, sentence, span
from hybridsched.core.codec import DecisionRecord
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, GateDecision, GateState, Snapshot


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "unknown"),
        (0.4, "0 ms"),
        (999.0, "999 ms"),
        (1500.0, "1.5 s"),
        (60_000.0, "1 min"),
        (200_000.0, "3 min 20 s"),
        (18_600_000.0, "5 h 10 min"),
        (187_200_000.0, "2 d 4 h"),
        (-1500.0, "-1.5 s"),
    ],
)
def test_span(ms: float | None, text: str) -> None:
    assert span(ms) == text


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words_also_without_numbers(reason: Reason) -> None:
    decision = GateDecision(lane="r0", state=GateState.CLOSED, reason=reason)
    text = sentence(decision, since_ms=None)
    assert text.startswith("Lane r0 is closed: ")
    assert text.endswith(".")
    assert "None" not in text
    assert because(decision)


def test_the_sentence_has_state_time_numbers_and_budget() -> None:
    decision = GateDecision(
        lane="r0",
        state=GateState.OPEN,
        reason=Reason.IDLE,
        budget=Budget(max_inflight=1, chunk_tokens=1, slice_tokens=0),
        numbers={"online_idle_ms": 1200.0, "window_ms": 150.0},
    )
    assert sentence(decision, since_ms=61_000.0) == (
        "Lane r0 is open, for 1 min 1 s now: no online request for 1.2 s (window 150 ms); "
        "up to 1 offline request in flight."
    )


def test_numbers_on_one_line() -> None:
    decision = GateDecision(
        lane="r0",
        state=GateState.CLOSED,
        reason=Reason.HELD,
        numbers={"a": 1.0, "b": None, "c": "x y", "until_ms": 1795993226880.5},
    )
    assert numbers(decision) == "a=1 b=unknown c='x y' until_ms=1795993226880"


def record(cycle: int, *decided: tuple[str, GateState, Reason], outcome: str = "changed") -> DecisionRecord:
    return DecisionRecord(
        cycle=cycle,
        snapshot=Snapshot(pool="p", now_ms=cycle * 1000.0),
        policy=PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW, version=4),
        decisions=tuple(GateDecision(lane=n, state=s, reason=r) for n, s, r in decided),
        outcomes=(outcome,) * len(decided),
    )


def test_only_changes_give_lines() -> None:
    changes = Changes()
    opened = ("r0", GateState.OPEN, Reason.IDLE)
    busy = ("r1", GateState.CLOSED, Reason.ONLINE_ACTIVE)
    assert len(changes.lines(record(1, opened, busy))) == 2
    assert changes.lines(record(2, opened, busy)) == []
    (line,) = changes.lines(record(3, opened, ("r1", GateState.OPEN, Reason.IDLE), outcome="epoch_moved"))
    assert line.endswith("cycle 3 policy 4 lane r1 open idle [epoch_moved]")
    only = Changes("r1")
    (line,) = only.lines(record(1, opened, busy))
    assert "lane r1 closed online_active" in line
