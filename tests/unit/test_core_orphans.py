"""When the requests of a silent lane are ended by whoever stands beside the engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridsched.core.orphans import AGAIN_MS, AHEAD, SILENT_MS, TRIES, OrphanState, orphan_ids, step

GRACE_MS = 300.0


class Lane:
    """A lane over time, in steps of 100 ms."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000.0
        self.heard_ms: float | None = self.now_ms
        self.state = OrphanState()
        self.acts: list[float] = []

    def go(self, seconds: float, *, speaks: bool, is_open: bool) -> None:
        for _ in range(round(seconds * 10)):
            self.now_ms += 100.0
            if speaks:
                self.heard_ms = self.now_ms
            self.state, due = step(
                self.state,
                now_ms=self.now_ms,
                gate_open=is_open,
                grace_ms=GRACE_MS,
                heard_ms=self.heard_ms,
            )
            if due:
                self.acts.append(self.now_ms)


def test_a_worker_that_freezes_at_the_close_loses_its_requests_after_grace_and_silence() -> None:
    lane = Lane()
    lane.go(5, speaks=True, is_open=True)
    closed_ms = lane.now_ms
    lane.go(20, speaks=False, is_open=False)
    assert len(lane.acts) == TRIES
    assert closed_ms + GRACE_MS + SILENT_MS < lane.acts[0] <= closed_ms + GRACE_MS + SILENT_MS + 300
    assert all(later - earlier >= AGAIN_MS for earlier, later in zip(lane.acts, lane.acts[1:], strict=False))


def test_a_worker_that_froze_long_ago_still_gets_its_grace() -> None:
    lane = Lane()
    lane.go(60, speaks=False, is_open=True)
    assert lane.acts == [], "through an open gate it may run"
    lane.go(1, speaks=False, is_open=False)
    assert lane.acts == []
    lane.go(1, speaks=False, is_open=False)
    assert len(lane.acts) == 1


def test_a_worker_that_speaks_pauses_by_itself_and_a_second_freeze_counts_anew() -> None:
    lane = Lane()
    lane.go(60, speaks=True, is_open=False)
    assert lane.acts == []
    lane.go(10, speaks=False, is_open=False)
    lane.go(1, speaks=True, is_open=False)
    lane.go(10, speaks=False, is_open=False)
    assert len(lane.acts) == 2 * TRIES


def test_a_lane_without_a_worker_has_no_orphans() -> None:
    lane = Lane()
    lane.heard_ms = None
    lane.go(60, speaks=False, is_open=False)
    assert lane.acts == []


@given(
    st.lists(
        st.tuples(st.floats(0, 4000), st.booleans(), st.none() | st.floats(0, 4000)), min_size=1, max_size=60
    )
)
def test_nobody_is_ended_who_speaks_or_may_run(events: list[tuple[float, bool, float | None]]) -> None:
    state, now_ms, closed_ms, tries = OrphanState(), 10_000.0, 10_000.0, 0
    for wait_ms, is_open, age_ms in events:
        now_ms += wait_ms
        if is_open:
            closed_ms = now_ms
        heard_ms = None if age_ms is None else now_ms - age_ms
        state, due = step(state, now_ms=now_ms, gate_open=is_open, grace_ms=GRACE_MS, heard_ms=heard_ms)
        tries = 0 if is_open or age_ms is None or age_ms <= SILENT_MS else tries + due
        assert tries <= TRIES
        if due:
            assert not is_open
            assert age_ms is not None
            assert age_ms > SILENT_MS
            assert now_ms - closed_ms > GRACE_MS + SILENT_MS


def test_ids_cover_what_was_there_and_what_may_have_come_since() -> None:
    ids = orphan_ids("ab", (3, 17), 40)
    assert ids[:3] == ["hsoff-ab-3", "hsoff-ab-17", "hsoff-ab-40"]
    assert ids[-1] == f"hsoff-ab-{40 + AHEAD - 1}"
    assert len(set(ids)) == 2 + AHEAD
