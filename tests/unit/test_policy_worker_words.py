"""What `why` and `decisions` say."""

from __future__ import annotations

from typing import Any

import pytest

from hybridsched.cli.advice import Around, advice
from hybridsched.cli.decision_view import Changes
from hybridsched.cli.words import because, local, natural, numbers, sentence, span
from hybridsched.core.codec import DecisionRecord
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, GateDecision, GateState, Snapshot
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord


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
    assert numbers(decision) == f"a=1 b=unknown c='x y' until_ms='{local(1795993226880.5)}'"


NOW = 1_000_000.0


def around(**changes: Any) -> Around:
    replica = ReplicaRecord(replica="r0", model="m", lane="r0", url="http://h:1", at_ms=NOW - 8000.0)
    lane = LaneRecord(lane="r0", worker="offline-7", at_ms=NOW - 4000.0)
    return Around(NOW, replica, lane)._replace(**changes)


def advised(reason: Reason, numbers: dict[str, float | str | None], near: Around | None = None) -> str:
    decision = GateDecision(lane="r0", state=GateState.CLOSED, reason=reason, numbers=numbers)
    return advice(decision, near or around())


@pytest.mark.parametrize(
    ("reason", "numbers", "says"),
    [
        (
            Reason.TELEMETRY_STALE,
            {"signal": "online_idle_ms"},
            "worker of replica r0 is silent, for 8.0 s",
        ),
        (Reason.TELEMETRY_STALE, {"signal": "offline_inflight"}, "lane r0 (offline-7) is silent, for 4.0 s"),
        (Reason.ENGINE_UNHEALTHY, {}, "engine at http://h:1"),
        (Reason.POLICY_CLOSED, {}, "Set another one"),
        (
            Reason.HELD,
            {"held_lane": "*", "until_ms": NOW + 90_000.0, "hold": "ab12cd", "holds": 2.0},
            "the whole pool is held for 1 min 30 s more; `hybridsched pool release --id ab12cd` ends it. "
            "It is the longest of 2",
        ),
        (
            Reason.HELD,
            {"held_lane": "r0", "until_ms": None, "hold": "ab12cd", "holds": 1.0},
            "lane r0 is held until it is released; `hybridsched pool release --id ab12cd",
        ),
    ],
)
def test_why_ends_with_what_to_do(reason: Reason, numbers: dict[str, float | str | None], says: str) -> None:
    assert says in advised(reason, numbers)


def test_a_missing_policy_is_told_from_one_that_never_opens() -> None:
    assert "Set one" in advised(Reason.POLICY_MISSING, {})
    assert "cannot be used: x is broken" in advised(
        Reason.POLICY_MISSING, {}, around(policy_problem="x is broken")
    )


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


def test_on_slurm_a_lane_without_work_wants_a_batch_and_no_worker_by_hand() -> None:
    near = around(lane=None)
    assert "Start `hybridsched worker offline`" in advised(Reason.NO_WORK, {}, near)
    said = advised(Reason.NO_WORK, {}, near._replace(slurm=True))
    assert "sbatch" in said
    assert "worker offline" not in said


@pytest.mark.parametrize("reason", [Reason.TELEMETRY_MISSING, Reason.LEASE_EXPIRED])
def test_on_slurm_a_replica_that_has_ended_is_said_to_have_and_who_is_there(reason: Reason) -> None:
    """It told to start the online worker of a job that had been replaced."""
    decision = GateDecision(lane="hs-tiny-1", state=GateState.CLOSED, reason=reason)
    there = ("hs-big-3", "hs-tiny-9", "hs-tiny-10")
    near = Around(NOW, slurm=True, replicas=there)
    said = advice(decision, near)
    assert "Slurm job 1, has signed off or ended" in said
    assert "in its place there are hs-tiny-9, hs-tiny-10." in said
    assert "no replica of its kind" in advice(decision, near._replace(replicas=("hs-big-3",)))
    assert "Slurm job" not in advice(decision, near._replace(slurm=False))


def test_names_with_numbers_are_sorted_by_their_value() -> None:
    names = ["hs-tiny-10", "r0", "hs-tiny-9", "hs-tiny-9_2", "9", "hs", "hs-tiny-9_10"]
    expected = ["9", "hs", "hs-tiny-9", "hs-tiny-9_2", "hs-tiny-9_10", "hs-tiny-10", "r0"]
    assert sorted(names, key=natural) == expected
