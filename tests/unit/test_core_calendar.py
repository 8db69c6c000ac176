"""Windows on the wall clock: over midnight, over changes of the clocks, overlapping; and when to begin."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.core.calendar import (
    KEPT,
    Change,
    Durations,
    at_once,
    current,
    estimate,
    floor_between,
    minutes,
    mode_at,
    moment_ms,
    next_change,
    span_ms,
    spans,
)
from hybridsched.core.modes import HostGroup, Mode, ModeEngine, ModesPolicy, Window, expand

BERLIN = ZoneInfo("Europe/Berlin")


def ms(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp() * 1000.0


def wall(at_ms: float, zone: ZoneInfo = BERLIN) -> str:
    return datetime.fromtimestamp(at_ms / 1000.0, zone).strftime("%m-%d %H:%M %Z")


def policy(*modes: tuple[str, Window], default: str = "day") -> ModesPolicy:
    named = [Mode(name=name, windows=(window,)) for name, window in modes]
    names = {name for name, _ in modes}
    rest = () if default in names or not default else (Mode(name=default),)
    return ModesPolicy(default=default, mode=(*named, *rest))


NIGHT = policy(("night", Window(start="22:00", end="06:30")))


@pytest.mark.parametrize(
    ("at", "mode"),
    [
        ("2026-11-30T21:59", "day"),
        ("2026-11-30T22:00", "night"),
        ("2026-12-01T00:00", "night"),
        ("2026-12-01T06:29", "night"),
        ("2026-12-01T06:30", "day"),
    ],
)
def test_a_window_across_midnight(at: str, mode: str) -> None:
    assert mode_at(NIGHT, BERLIN, ms(at)) == mode


def test_a_window_belongs_to_the_day_on_which_it_starts() -> None:
    weekend = policy(("night", Window(days=("weekend",), start="22:00", end="06:00")))
    assert mode_at(weekend, BERLIN, ms("2026-11-28T23:00")) == "night"  # a Saturday
    assert mode_at(weekend, BERLIN, ms("2026-11-30T05:00")) == "night"  # Monday morning, from Sunday
    assert mode_at(weekend, BERLIN, ms("2026-11-28T05:00")) == "day"  # Saturday morning, from Friday
    friday = policy(("night", Window(days=("fri", "mon"), start="00:00", end="00:00")))
    assert mode_at(friday, BERLIN, ms("2026-11-27T23:59")) == "night"
    assert mode_at(friday, BERLIN, ms("2026-11-28T00:00")) == "day"


def test_the_night_on_which_the_clocks_go_back_is_an_hour_longer_and_the_other_an_hour_shorter() -> None:
    window = Window(start="22:00", end="06:30")

    def hours(first: str) -> float:
        begins, ends = next(
            s for s in spans(window, BERLIN, ms(first), ms(first) + 86_400_000) if s[0] >= ms(first)
        )
        assert (wall(begins)[6:11], wall(ends)[6:11]) == ("22:00", "06:30")
        return (ends - begins) / 3_600_000

    assert hours("2026-10-24T12:00") == 9.5
    assert hours("2026-10-23T12:00") == 8.5
    assert hours("2026-03-28T12:00") == 7.5


def test_a_time_that_the_clocks_skip_is_the_moment_after_the_gap() -> None:
    day = datetime(2026, 3, 29).date()
    assert wall(moment_ms(day, minutes("02:30"), BERLIN)) == "03-29 03:00 CEST"
    assert moment_ms(day, minutes("02:00"), BERLIN) == moment_ms(day, minutes("03:00"), BERLIN)
    assert wall(moment_ms(day, minutes("01:59"), BERLIN)) == "03-29 01:59 CET"
    # A window inside the gap does not come on that day.
    inside = Window(start="02:10", end="02:50")
    begins = [wall(b) for b, _ in spans(inside, BERLIN, ms("2026-03-28T12:00"), ms("2026-03-30T12:00"))]
    assert begins == ["03-30 02:10 CEST"]


def test_a_time_that_comes_twice_is_its_first_occurrence() -> None:
    day = datetime(2026, 10, 25).date()
    assert wall(moment_ms(day, minutes("02:30"), BERLIN)) == "10-25 02:30 CEST"
    # Windows that touch there touch in time: no moment is in both or in none.
    both = ModesPolicy(
        mode=(
            Mode(name="a", windows=(Window(start="20:00", end="02:30"),)),
            Mode(name="b", windows=(Window(start="02:30", end="20:00"),)),
        )
    )
    at = moment_ms(day, minutes("02:30"), BERLIN)
    assert [mode_at(both, BERLIN, at + d) for d in (-1, 0, 3_600_000)] == ["a", "b", "b"]


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 1439),
    end=st.integers(0, 1439),
    at=st.integers(1_700_000_000, 1_900_000_000),
    zone=st.sampled_from(["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata", "UTC"]),
)
def test_two_windows_that_touch_cover_every_moment_exactly_once(
    start: int, end: int, at: int, zone: str
) -> None:
    """Whatever the clocks do. Judged by the reading of the wall clock itself where that is plain."""
    place = ZoneInfo(zone)
    a = f"{start // 60:02d}:{start % 60:02d}"
    b = f"{end // 60:02d}:{end % 60:02d}"
    if a == b:
        return
    one, two = Window(start=a, end=b), Window(start=b, end=a)
    moment = at * 1000.0
    inside = [
        any(begins <= moment < ends for begins, ends in spans(window, place, moment, moment + 1))
        for window in (one, two)
    ]
    assert inside.count(True) == 1
    local = datetime.fromtimestamp(at, place)
    offsets = {datetime.fromtimestamp(at + d * 3600, place).utcoffset() for d in range(-30, 31)}
    if len(offsets) == 1:
        minute = local.hour * 60 + local.minute
        expected = start <= minute < end if start < end else (minute >= start or minute < end)
        assert inside[0] is expected


def test_where_windows_overlap_the_first_mode_holds() -> None:
    weekend = Mode(name="weekend", windows=(Window(days=("weekend",)),))
    night = Mode(name="night", windows=(Window(start="22:00", end="06:00"),))
    both = ModesPolicy(default="day", mode=(weekend, night, Mode(name="day")))
    assert mode_at(both, BERLIN, ms("2026-11-28T01:00")) == "weekend"
    assert next_change(both, BERLIN, ms("2026-11-27T23:00")) == Change(
        at_ms=ms("2026-11-28T00:00"), mode="weekend"
    )
    # Sunday's end falls into the night: the weekend is followed by it, not by the day.
    assert next_change(both, BERLIN, ms("2026-11-29T12:00")) == Change(
        at_ms=ms("2026-11-30T00:00"), mode="night"
    )


HALF_HOURS = st.integers(0, 47).map(lambda n: f"{n // 2:02d}:{n % 2 * 30:02d}")
WINDOWS = st.builds(
    Window,
    days=st.lists(st.sampled_from(["daily", "weekday", "weekend", "mon", "sun"]), min_size=1, max_size=2).map(
        tuple
    ),
    start=HALF_HOURS,
    end=HALF_HOURS,
)


@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(st.tuples(st.sampled_from("abc"), WINDOWS), min_size=1, max_size=6),
    default=st.sampled_from(["", "a", "d"]),
    at=st.sampled_from(["2026-10-24T11:10", "2026-03-28T23:40", "2026-11-30T22:00"]),
)
def test_changes_are_where_a_look_at_every_half_hour_sees_them(
    windows: list[tuple[str, Window]], default: str, at: str
) -> None:
    grouped = [(name, tuple(w for other, w in windows if other == name)) for name in "abcd"]
    given_policy = ModesPolicy(
        default=default, mode=tuple(Mode(name=name, windows=its) for name, its in grouped)
    )
    at_ms, half_hour_ms = ms(at), 1_800_000.0
    now = mode_at(given_policy, BERLIN, at_ms)
    ahead = [at_ms - at_ms % half_hour_ms + half_hour_ms * n for n in range(1, 8 * 48)]
    seen = [(moment, mode_at(given_policy, BERLIN, moment)) for moment in ahead]
    found = next_change(given_policy, BERLIN, at_ms)
    first = next(((moment, name) for moment, name in seen if name and name != now), None)
    assert (None if found is None else (found.at_ms, found.mode)) == first
    back = [at_ms - at_ms % half_hour_ms - half_hour_ms * n for n in range(8 * 48 - 2)]
    since = next((m for m in back if mode_at(given_policy, BERLIN, m - half_hour_ms) != now), None)
    assert current(given_policy, BERLIN, at_ms).mode == now
    if since is not None:
        assert current(given_policy, BERLIN, at_ms).at_ms == since


def test_many_windows_are_swept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 windows took 9 s at each look: every boundary was looked at for itself, in all windows."""
    asked = []

    def counted(window: Window, *rest: Any) -> Any:
        asked.append(window)
        return spans(window, *rest)

    monkeypatch.setattr("hybridsched.core.calendar.spans", counted)
    hours = [
        Window(days=(day,), start=f"{h:02d}:00", end=f"{h:02d}:30")
        for day in ("mon", "tue")
        for h in range(24)
    ]
    many = ModesPolicy(default="day", mode=(Mode(name="night", windows=tuple(hours)), Mode(name="day")))
    assert next_change(many, BERLIN, ms("2026-12-01T12:10")) is not None
    assert current(many, BERLIN, ms("2026-12-01T12:10")).mode == "night"
    assert len(asked) <= 4 * len(hours)


def test_the_current_mode_and_since_when() -> None:
    assert current(NIGHT, BERLIN, ms("2026-12-01T03:00")) == Change(
        at_ms=ms("2026-11-30T22:00"), mode="night"
    )
    day = Change(at_ms=ms("2026-12-01T06:30"), mode="day")
    assert current(NIGHT, BERLIN, ms("2026-12-01T12:00")) == day
    always = policy(("day", Window()))
    assert current(always, BERLIN, ms("2026-12-01T12:00")).mode == "day"
    assert next_change(always, BERLIN, ms("2026-12-01T12:00")) is None
    # Without a default nothing follows a window: what stands stays, and that is no change.
    alone = policy(("night", Window(start="22:00", end="06:00")), default="")
    assert mode_at(alone, BERLIN, ms("2026-12-01T12:00")) == ""
    assert next_change(alone, BERLIN, ms("2026-12-01T01:00")) is None


@pytest.mark.parametrize("text", ["24:00", "7", "07:60", "-1:00", "7:5", "aa:bb", ""])
def test_what_is_no_time_of_day_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no time of day"):
        minutes(text)


def test_the_longest_of_the_last_measurements_is_expected() -> None:
    known = Durations().with_span("cut day", 9_000.0)
    for i in range(KEPT):
        known = known.with_span("cut day", 1_000.0 + i)
    assert known.expect("cut day", 30_000.0) == 1_000.0 + KEPT - 1
    assert known.expect("cut night", 30_000.0) == 30_000.0
    for wrong in (float("nan"), float("inf"), -1.0):
        assert known.with_span("cut day", wrong) == known


def test_an_estimate_leaves_out_what_does_not_pass() -> None:
    engine = ModeEngine(model="m", warm_ms=90_000.0)
    cut = Mode(name="day", layout="cut", engines=(engine,))
    plain = Mode(name="night", layout="cut")
    modes = ModesPolicy(mode=(cut, plain))
    known = Durations().with_span("drain night", 5_000.0).with_span("load day", 40_000.0)
    to_day = estimate(known, modes, "night", cut)
    assert (to_day.drain_ms, to_day.cut_ms, to_day.load_ms) == (5_000.0, 0.0, 40_000.0)
    assert estimate(Durations(), modes, "day", plain).load_ms == 0.0
    assert estimate(Durations(), modes, "night", cut).load_ms == 90_000.0


def test_the_floors_of_both_modes_bound_how_many_hosts_change_at_once() -> None:
    def mode(name: str, per_host: int, floor: int) -> Mode:
        return Mode(name=name, engines=(ModeEngine(model="m", per_host=per_host, floor=floor),))

    day, night = mode("day", 7, 20), mode("night", 1, 2)
    modes = ModesPolicy(max_unavailable=4, hosts=(HostGroup(names="h[1-5]"),), mode=(day, night))
    assert floor_between(day, night) == {"m": 2}
    assert at_once(modes, day, night, 5) == 3
    assert at_once(modes, day, mode("none", 1, 0), 5) == 4
    assert at_once(modes, None, Mode(name="other"), 5) == 4


def test_changes_follow_each_other_as_places_become_free() -> None:
    assert span_ms([10.0, 10.0, 10.0], 1) == 30.0
    assert span_ms([10.0, 10.0, 10.0], 2) == 20.0
    assert span_ms([], 2) == 0.0


def test_node_lists() -> None:
    assert expand("gpu[08-11],big1") == ("gpu08", "gpu09", "gpu10", "gpu11", "big1")
    assert expand("r[1,3]n") == ("r1n", "r3n")
    for wrong in ("", "a[", "a[2-1]", "a[x]", "a,,b", "a[1-99999]"):
        with pytest.raises(ValueError):
            expand(wrong)


def test_days_are_those_of_the_zone() -> None:
    """At 23:30 UTC on a Sunday it is Monday in Berlin."""
    monday = policy(("work", Window(days=("mon",), start="00:00", end="12:00")))
    at = datetime(2026, 11, 29, 23, 30, tzinfo=UTC)
    assert mode_at(monday, BERLIN, at.timestamp() * 1000) == "work"
    assert mode_at(monday, ZoneInfo("UTC"), at.timestamp() * 1000) == "day"
    assert mode_at(monday, ZoneInfo("UTC"), (at + timedelta(hours=1)).timestamp() * 1000) == "work"
