"""The table of lanes fits the screen, and the newest changes are counted as they are shown."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from hybridsched.cli.decision_view import Changes
from hybridsched.cli.pool_table import render, shortened
from hybridsched.cli.pool_view import headline
from hybridsched.core.codec import DecisionRecord
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateDecision, GateState, Snapshot

LONGEST = max(Reason, key=lambda reason: len(reason.value)).value


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "lane": name,
        "replica": name,
        "model": "meta-llama/Meta-Llama-3-8B-Instruct",
        "state": "closed",
        "reason": LONGEST,
        "since_ms": 13.5 * 3_600_000.0,
        "changed_ms": 1000.0,
        "gone_ms": None,
        "budget": {"max_inflight": 64},
        "online_inflight": 256.0,
        "online_idle_ms": 12.2 * 3_600_000.0,
        "offline_inflight": 256.0,
        "work": 1_000_000.0,
        "online_stale": False,
        "offline_stale": False,
        "engine_stale": False,
        "engine_running": 256.0,
        "engine_waiting": 1024.0,
        "kv_use": 1.0,
    } | changes


def document(*lanes: dict[str, Any]) -> dict[str, Any]:
    return {
        "pool": "prod",
        "at_ms": 1e12,
        "policy": {"name": "p" * 64, "kind": "idle-window", "version": 1000},
        "policy_problem": "",
        "policy_worker": None,
        "holds": [
            {
                "id": "3f2a1c",
                "lane": "",
                "by": "somebody@a-host-with-a-name",
                "why": "maintenance " * 10,
                "until_ms": None,
            }
        ],
        "queues": [{"model": "m" * 120, "depth": 1.0, "oldest_wait_ms": 1.0}],
        "lanes": list(lanes),
    }


def shown(status: dict[str, Any], width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(render(status, width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 130, 200])
def test_no_line_is_longer_than_the_screen_and_no_value_is_cut(width: int) -> None:
    lanes = [
        row("llama-3-8b-instruct-node017-gpu3-1234567"),
        row("r0", state="open", reason="idle", online_inflight=None, kv_use=None),
    ]
    lines = shown(document(*lanes), width)
    assert max(map(len, lines)) <= width
    first, second = lines[-2:]
    assert "1234567" in first, "names of one kind differ at their end"
    for value in (LONGEST, "13 h 30 min", "256", "closed"):
        assert value in first
    assert second.startswith("r0 ")
    assert " open " in second
    assert ("12 h 12 min" in first) is (width >= 100)
    assert ("Meta-Llama" in first) is (width >= 200)


def test_a_replica_that_is_gone_says_so_with_its_age() -> None:
    (line,) = shown(document(row("r0", gone_ms=200_000.0, state="open")), 80)[-1:]
    assert " gone " in line
    assert "3 min 20 s" in line


@pytest.mark.parametrize(("width", "text"), [(8, "abc…6789"), (30, "abcdef0123456789"), (10, "abc…456789")])
def test_a_name_is_shortened_before_its_end(width: int, text: str) -> None:
    cut = shortened("abcdef0123456789", width)
    assert len(cut) <= width
    assert cut == text


def record(at_s: float, *states: tuple[str, Reason]) -> DecisionRecord:
    return DecisionRecord(
        cycle=int(at_s * 10),
        snapshot=Snapshot(pool="p", now_ms=at_s * 1000.0),
        policy=PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW),
        decisions=tuple(
            GateDecision(lane=lane, state=GateState.CLOSED, reason=reason) for lane, reason in states
        ),
    )


class Backwards:
    """Records newest first; says how many were read."""

    def __init__(self, records: Sequence[DecisionRecord]) -> None:
        self.records, self.read = records, 0

    async def __aiter__(self) -> AsyncIterator[DecisionRecord]:
        for one in reversed(self.records):
            self.read += 1
            yield one


ACTIVE, WINDOW = Reason.ONLINE_ACTIVE, Reason.IDLE_WINDOW


async def test_a_limit_counts_changes_and_heartbeats_cost_none() -> None:
    log = [record(0, ("a", ACTIVE), ("b", ACTIVE)), record(1, ("a", WINDOW), ("b", ACTIVE))]
    log += [record(2 + i, ("a", WINDOW), ("b", ACTIVE)) for i in range(500)]
    log += [record(600, ("a", ACTIVE), ("b", ACTIVE))]
    changes = Changes()
    found = await changes.newest(aiter(Backwards(log)), 2)
    assert [(change.lane, change.at_ms) for change in found] == [("a", 1000.0), ("a", 600_000.0)]
    assert "lane a closed idle_window" in found[0].line
    every = await Changes().newest(aiter(Backwards(log)), 50)
    assert [(c.lane, c.at_ms) for c in every] == [("a", 0.0), ("b", 0.0), ("a", 1000.0), ("a", 600_000.0)]
    assert [c.lane for c in await Changes("b").newest(aiter(Backwards(log)), 50)] == ["b"]
    assert changes.lines(record(601, ("a", ACTIVE), ("b", WINDOW))) != [], (
        "and what follows goes on from there"
    )
    assert changes.lines(record(602, ("a", ACTIVE), ("b", WINDOW))) == []


async def test_the_log_is_read_no_farther_than_needed() -> None:
    log = Backwards([record(i, ("a", ACTIVE if i % 2 else WINDOW)) for i in range(1000)])
    found = await Changes().newest(aiter(log), 3)
    assert [change.at_ms for change in found] == [997_000.0, 998_000.0, 999_000.0]
    assert log.read == 4


async def test_a_line_says_the_day() -> None:
    (change,) = await Changes().newest(aiter(Backwards([record(86_400 * 200, ("a", ACTIVE))])), 1)
    assert change.line.startswith("1970-07-")


POLICY = {"name": "idle-window", "kind": "idle-window", "version": 2}
NONE_SET = "no policy is set"


def worker(**changes: Any) -> dict[str, Any]:
    alive = {"alive": True, "age_ms": 1.0, "cycles": 9, "cycle_ms": {"p50": 1.0, "p99": 2.0}}
    return alive | {"policy": "idle-window", "version": 2, "problem": ""} | changes


@pytest.mark.parametrize(
    ("stored", "said", "line"),
    [
        (POLICY, worker(), "Policy: idle-window (idle-window), version 2"),
        (
            None,
            worker(policy="", version=0, problem=NONE_SET),
            "Policy: none in force, so every gate is closed: ",
        ),
        # A worker that has not looked yet still goes by the old one: what its gates do counts.
        (None, worker(), "Policy: idle-window, version 2, is in force"),
        (POLICY, worker(policy="old", version=1), "Policy: old, version 1, is in force; idle-window (idle-"),
        (None, worker(alive=False), "Policy: none; set one"),
        (None, None, "Policy: none; set one"),
    ],
)
def test_the_policy_in_force_is_said_by_the_worker(
    stored: dict[str, Any] | None, said: dict[str, Any] | None, line: str
) -> None:
    assert headline(document() | {"policy": stored, "policy_worker": said})[1].startswith(line)


def test_a_worker_in_its_first_cycle_has_no_times_yet() -> None:
    lines = headline(document() | {"policy": POLICY, "policy_worker": worker(cycles=0)})
    assert "Policy worker: leading, in its first cycle" in lines


def test_a_dead_engines_numbers_are_stale_and_shared_work_is_said_once() -> None:
    lanes = [
        row("r0", engine_stale=True, offline_stale=True, engine_running=77.0),
        row("r1", engine_running=33.0),
    ]
    lines = shown(document(*lanes), 200)
    (dead,) = (line for line in lines if line.startswith("r0"))
    assert dead.count("stale") == 4
    assert "77" not in dead
    assert any(" 33 " in line for line in lines)
    (work,) = (line for line in lines if line.startswith("Offline work"))
    assert work.endswith("about 1,000,000 lines, shared by 2 lanes")
