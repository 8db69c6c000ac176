"""When the next cycle is due, how cycle times are summed up, which policy is in force."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from hybridsched.core.cycles import COALESCE_MS, MARGIN_MS
from hybridsched.core.policy import CyclePolicy, IdlePolicy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateDecision, GateState, Snapshot
from hybridsched.workers.policy_observe import Observation
from hybridsched.workers.policy_pace import Pace
from hybridsched.workers.policy_source import PolicySource
from hybridsched.workers.policy_stats import RECENT, CycleStats, summary


def seen(*, look_again: bool = False) -> Observation:
    return Observation(
        snapshot=Snapshot(pool="p", now_ms=0.0), mono_s=1000.0, policy=None, look_again=look_again
    )


def decisions(*check_in: float | None) -> tuple[GateDecision, ...]:
    return tuple(
        GateDecision(lane=f"r{i}", state=GateState.CLOSED, reason=Reason.IDLE_WINDOW, check_in_ms=ms)
        for i, ms in enumerate(check_in)
    )


POLICY = PoolPolicy(
    name="p",
    kind=PolicyKind.IDLE_WINDOW,
    cycle=CyclePolicy(interval_ms=250.0),
    idle=IdlePolicy(window_ms=40.0),
)


@pytest.mark.parametrize(
    ("checks", "due_in_ms"),
    [
        ((), 250.0),
        ((None, None), 250.0),
        ((100.0, None, 30.0), 30.0 + MARGIN_MS),
        ((9999.0,), 250.0),
        ((0.0,), MARGIN_MS),
        ((-5.0,), MARGIN_MS),
    ],
)
def test_the_next_cycle_comes_at_the_earliest_window_end(
    checks: tuple[float | None, ...], due_in_ms: float
) -> None:
    pace = Pace()
    pace.plan(seen(), decisions(*checks), POLICY)
    assert (pace._due - 1000.0) * 1000.0 == pytest.approx(due_in_ms)


@pytest.mark.parametrize(
    ("window_ms", "coalesce_ms"), [(0.0, COALESCE_MS[0]), (40.0, 10.0), (60_000.0, COALESCE_MS[1])]
)
def test_nudges_are_gathered_for_a_quarter_of_the_window(window_ms: float, coalesce_ms: float) -> None:
    pace = Pace()
    pace.plan(seen(), (), msgspec.structs.replace(POLICY, idle=IdlePolicy(window_ms=window_ms)))
    assert pace._coalesce_s * 1000.0 == pytest.approx(coalesce_ms)
    pace.plan(
        seen(look_again=True), (), msgspec.structs.replace(POLICY, idle=IdlePolicy(window_ms=window_ms))
    )
    assert (pace._due - 1000.0) * 1000.0 == pytest.approx(coalesce_ms)


async def test_a_nudge_ends_the_wait_and_the_end_ends_everything() -> None:
    pace = Pace()
    pace._due = time.monotonic() + 60.0
    waiting = asyncio.create_task(pace.wait(0.0))
    await asyncio.sleep(0)
    pace.nudge()
    await asyncio.wait_for(waiting, 5)
    waiting = asyncio.create_task(pace.wait(60.0))
    await asyncio.sleep(0)
    pace.end()
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(pace.sleep(60.0), 5)


async def test_an_overdue_cycle_does_not_wait() -> None:
    pace = Pace()
    pace._due = time.monotonic() - 1.0
    await asyncio.wait_for(pace.wait(60.0), 5)


async def test_a_nudge_during_the_cycle_is_not_lost() -> None:
    pace = Pace()
    pace.nudge()
    pace._due = time.monotonic() + 60.0
    await asyncio.wait_for(pace.wait(0.0), 5)
    assert not pace._wake.is_set()


def test_quantiles_are_ranks_of_the_recent_cycles() -> None:
    assert summary([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}
    assert summary([float(n) for n in range(1, 101)]) == {"p50": 50.0, "p99": 99.0, "max": 100.0}
    stats = CycleStats()
    for n in range(RECENT + 10):
        stats.add(1.0 if n >= 10 else 1e6, 0.5)
    assert stats.cycles == RECENT + 10
    assert stats.wall() == {"p50": 1.0, "p99": 1.0, "max": 1.0}
    assert stats.cpu()["p50"] == 0.5
    assert stats.last_ms == 1.0


def encoded(**changes: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(POLICY, version=3, **changes))


def test_a_policy_is_converted_to_the_speed_once_per_change() -> None:
    source = PolicySource(10.0)
    first = source.take(encoded())
    assert first is not None
    assert first.idle.window_ms == 4.0
    assert source.take(encoded()) is first
    changed = source.take(encoded(name="q"))
    assert changed is not None
    assert (changed.name, changed.idle.window_ms) == ("q", 4.0)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (None, "no policy is set"),
        (b"broken", "cannot be read"),
        (b'{"name":"x","kind":"nonsense"}', "nonsense"),
        (encoded(cycle=CyclePolicy(interval_ms=0.0)), "interval_ms"),
        (encoded(cycle=CyclePolicy(interval_ms=500.0, lease_ms=100.0)), "lease"),
    ],
)
def test_a_bad_policy_is_refused_and_the_old_one_stays(raw: bytes | None, problem: str) -> None:
    source = PolicySource(1.0)
    assert source.take(raw) is None
    assert problem in source.problem
    good = source.take(encoded())
    assert good is not None
    assert source.problem == ""
    # Gone is not bad: nobody wants a gate open then, and the holds may be gone with it.
    assert source.take(raw) is (None if raw is None else good)
    assert source.last is good
    assert problem in source.problem
