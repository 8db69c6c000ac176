"""The twin's loop: order, ties, feeds, and an engine that is advanced when it is due."""

from __future__ import annotations

import pytest

from hybridsched.engines.simulated.perf import load_profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.twin.clock import LAST, EngineClock, Loop
from hybridsched.twin.engine import TwinEngine
from hybridsched.twin.request import Event, EventKind, TwinRequest

PROFILE = load_profile("a100-llama3-8b")


def test_calls_come_by_time_then_rank_then_in_the_order_they_were_asked_for() -> None:
    loop, seen = Loop(), []
    loop.at(2.0, lambda: seen.append("late"))
    loop.at(1.0, lambda: seen.append("engine"), LAST)
    loop.at(1.0, lambda: seen.append("first"))
    loop.at(1.0, lambda: seen.append("second"))
    loop.run()
    assert seen == ["first", "second", "engine", "late"]
    assert loop.now_s == 2.0


def test_a_run_stops_at_its_end_and_goes_on() -> None:
    loop, seen = Loop(), []
    for at in (1.0, 2.0, 3.0):
        loop.at(at, lambda: seen.append(loop.now_s))
    loop.run(2.0)
    assert (seen, loop.now_s) == ([1.0, 2.0], 2.0)
    loop.run(2.5)
    assert loop.now_s == 2.5
    loop.after(0.25, lambda: seen.append(loop.now_s))
    loop.run()
    assert seen == [1.0, 2.0, 2.75, 3.0]


def test_stop_and_cancel() -> None:
    loop, seen = Loop(), []
    loop.at(1.0, loop.stop)
    never = loop.at(2.0, lambda: seen.append("never"))
    loop.at(3.0, lambda: seen.append("then"))
    loop.run(10.0)
    assert loop.now_s == 1.0
    loop.cancel(never)
    loop.run()
    assert seen == ["then"]


def test_the_past_is_refused() -> None:
    loop = Loop()
    loop.at(5.0, lambda: None)
    loop.run()
    for time_s in (4.0, float("nan")):
        with pytest.raises(ValueError, match=r"it is 5\.0 s"):
            loop.at(time_s, lambda: None)
    loop.feed([(6.0, 1), (5.5, 2)], lambda item: None)
    with pytest.raises(ValueError, match=r"it is 6\.0 s"):
        loop.run()


def test_a_feed_is_drawn_as_it_goes_and_keeps_its_order() -> None:
    loop, seen, drawn = Loop(), [], []

    def items() -> object:
        for number in range(5):
            drawn.append(number)
            yield number // 2, number

    loop.feed(items(), lambda item: seen.append((loop.now_s, item, len(drawn))))  # type: ignore[arg-type]
    assert len(drawn) == 1
    loop.run()
    assert [(at, item) for at, item, _ in seen] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4)]
    assert [ahead for _, _, ahead in seen] == [2, 3, 4, 5, 5]


def test_random_sources_are_apart_and_repeatable() -> None:
    loop = Loop(seed=7)
    first = [loop.random("cold").random() for _ in range(2)]
    assert first[0] == first[1] == Loop(seed=7).random("cold").random()
    assert first[0] != loop.random("slurm").random()
    assert first[0] != Loop(seed=8).random("cold").random()


def test_an_engine_is_advanced_when_it_is_due_and_only_then() -> None:
    loop = Loop()
    engine = TwinEngine(Limits(), PROFILE)
    seen: list[tuple[float, EventKind, int]] = []
    advances: list[float] = []
    real = engine.advance

    def advance(to_s: float) -> list[Event]:
        advances.append(to_s)
        return real(to_s)

    engine.advance = advance  # type: ignore[method-assign]
    clock = EngineClock(
        loop,
        engine,
        lambda events: seen.extend((loop.now_s, kind, int(str(r.owner))) for kind, r in events),
    )

    def arrive(number: int) -> None:
        engine.add(TwinRequest(100, 200, owner=number), loop.now_s)
        clock.changed()

    loop.feed([(0.0, 0), (0.5, 1), (0.5, 2), (60.0, 3)], arrive)
    loop.run()
    assert [(kind.name, number) for _, kind, number in seen] == [
        ("FIRST_TOKEN", 0),
        ("FIRST_TOKEN", 1),
        ("FIRST_TOKEN", 2),
        ("FINISHED", 0),
        ("FINISHED", 1),
        ("FINISHED", 2),
        ("FIRST_TOKEN", 3),
        ("FINISHED", 3),
    ]
    assert all(at in advances for at, _, _ in seen)
    assert len(advances) <= 8
    assert engine.online == engine.running == 0
