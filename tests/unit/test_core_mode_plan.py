"""What is wanted of each host: the calendar, orders and approvals put together."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from hybridsched.core.autonomy import Autonomy
from hybridsched.core.calendar import Change, Durations
from hybridsched.core.mode_plan import (
    Decision,
    Order,
    change_id,
    decide,
    moment_s,
    plan,
    took_ms,
    wanted_replicas,
)
from hybridsched.core.modes import HostGroup, Mode, ModeEngine, ModesPolicy, Window
from hybridsched.core.policy import ReplicasPolicy, SlurmPolicy
from hybridsched.core.replica_values import Fleet, Phase, Seen, SeenJob, digest
from hybridsched.core.replicas import step as replicas_step
from hybridsched.core.switch_values import HostSeen, HostState, Step, SwitchState, Target
from hybridsched.core.switch_values import Seen as HostsSeen

ENGINE = ModeEngine(model="m", per_host=2, warm_ms=60_000.0)
MODES = ModesPolicy(
    enabled=True,
    autonomy=Autonomy.AUTO,
    default="day",
    margin=1.5,
    hosts=(HostGroup(names="h[1-2]"),),
    mode=(
        Mode(name="night", windows=(Window(start="22:00", end="07:00"),), node="{host}n"),
        Mode(name="day", early=True, engines=(ENGINE,)),
    ),
)
KNOWN = Durations(spans={"drain night": (20_000.0,), "slurm day": (10_000.0,), "load day": (30_000.0,)})
HOST_MS = 60_000.0
"""The change of one host into the day by these."""


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000.0


def standing(mode: str, **hosts: HostState) -> SwitchState:
    rest = {name: HostState(host=name, mode=mode, goal=mode) for name in ("h1", "h2")}
    return SwitchState(hosts=rest | hosts)


def wanted(when: str, state: SwitchState, modes: ModesPolicy = MODES, **given: object) -> Decision:
    return decide(modes, UTC, at(when), state, KNOWN, **given)  # type: ignore[arg-type]


def modes_of(decision: Decision) -> dict[str, str]:
    return {host: target.mode for host, target in decision.targets.items()}


def test_a_mode_that_is_early_begins_so_that_its_engines_serve_in_time() -> None:
    """Two hosts one after the other, a minute each, and half as much again: three minutes before."""
    night = standing("night")
    assert modes_of(wanted("2026-12-01T06:56:59", night)) == {}
    begun = wanted("2026-12-01T06:57:00", night)
    assert modes_of(begun) == {"h1": "day", "h2": "day"}
    assert begun.proposal is not None
    assert begun.proposal.begin_ms == at("2026-12-01T06:57:00")
    assert begun.proposal.late_ms == 0.0


def test_a_mode_that_is_not_begins_with_its_window_and_is_never_late() -> None:
    day = standing("day")
    before = wanted("2026-11-30T21:59:59", day)
    assert modes_of(before) == {}
    assert before.proposal is not None
    assert (before.proposal.mode, before.proposal.late_ms) == ("night", 0.0)
    assert modes_of(wanted("2026-11-30T22:00:00", day)) == {"h1": "night", "h2": "night"}


def test_what_has_begun_goes_on_when_a_measurement_says_that_it_could_have_begun_later() -> None:
    name = change_id(Change(at_ms=at("2026-12-01T07:00:00"), mode="day"))
    begun = HostState(host="h1", mode="night", goal="day", step=Step.DRAINING, target=name)
    quick = Durations(spans={"drain night": (1.0,), "slurm day": (1.0,), "load day": (1.0,)})
    decision = decide(MODES, UTC, at("2026-12-01T06:57:05"), standing("night", h1=begun), quick)
    assert modes_of(decision) == {"h1": "day", "h2": "day"}


def test_that_it_will_be_late_is_known_before_it_is() -> None:
    stuck = HostState(host="h1", mode="night", goal="night", failures=1)
    decision = wanted("2026-12-01T06:58:30", standing("night", h1=stuck))
    assert decision.proposal is not None
    assert decision.proposal.late_ms == pytest.approx(30_000.0)
    # After the window's start it stays so for as long as hosts are missing.
    after = wanted("2026-12-01T07:10:00", standing("day", h1=stuck))
    assert after.proposal is not None
    assert after.proposal.hosts == ("h1",)
    assert after.proposal.late_ms == pytest.approx(600_000.0 + HOST_MS)
    assert wanted("2026-12-01T12:00:00", standing("day")).proposal is not None  # the night, ahead


def test_an_approval_is_for_one_change() -> None:
    modes = msgspec.structs.replace(MODES, autonomy=Autonomy.APPROVE)
    night = standing("night")
    decision = wanted("2026-12-01T06:58:00", night, modes)
    assert decision.proposal is not None
    assert (decision.proposal.approved, decision.targets) == (False, {})
    name = decision.proposal.id
    assert modes_of(wanted("2026-12-01T06:58:00", night, modes, approvals=frozenset([name]))) == {
        "h1": "day",
        "h2": "day",
    }
    # It is the same change after its moment, and not the next day's.
    assert wanted("2026-12-01T07:30:00", night, modes, approvals=frozenset([name])).targets
    assert not wanted("2026-12-02T06:58:00", night, modes, approvals=frozenset([name])).targets
    suggest = msgspec.structs.replace(MODES, autonomy=Autonomy.SUGGEST)
    assert not wanted("2026-12-01T06:58:00", night, suggest, approvals=frozenset([name])).targets
    assert moment_s(name) == at("2026-12-01T07:00:00") / 1000.0
    assert moment_s("anything") == float("inf")


def test_an_order_stands_above_the_calendar_until_its_time_is_over() -> None:
    one = Order(id="a", mode="day", hosts=("h2",), by="me", at_ms=1.0, until_ms=at("2026-12-01T03:00:00"))
    state = standing("day")
    assert modes_of(wanted("2026-12-01T01:00:00", state, orders=(one,))) == {"h1": "night", "h2": "day"}
    assert modes_of(wanted("2026-12-01T03:00:00", state, orders=(one,))) == {"h1": "night", "h2": "night"}
    newer = Order(id="b", mode="night", by="me", at_ms=2.0)
    decision = wanted("2026-12-01T12:00:00", state, orders=(newer, one))
    assert modes_of(decision) == {"h1": "night", "h2": "night"}
    assert all(target.ordered for target in decision.targets.values())


def test_a_host_that_was_never_seen_makes_nothing_late() -> None:
    decision = wanted("2026-12-01T12:00:00", SwitchState())
    assert decision.proposal is None or decision.proposal.late_ms == 0.0


def test_a_plan_names_records_layouts_waves_and_what_waits() -> None:
    targets = wanted("2026-12-01T06:58:00", standing("night")).targets
    held = HostState(host="h2", mode="night", goal="night", step=Step.HELD, why="no room")
    rows = plan(MODES, standing("night", h2=held), HostsSeen(at_ms=0.0), targets, KNOWN)
    assert [(row.host, row.wave, row.node_old, row.node_new) for row in rows] == [
        ("h1", 1, "h1n", "h1"),
        ("h2", 0, "h2n", "h2n"),
    ]
    assert rows[1].wait == "held until an order: no room"
    assert took_ms(rows) == HOST_MS
    idle = plan(MODES, standing("night"), HostsSeen(at_ms=0.0, hosts=(HostSeen(host="h1"),)), {}, KNOWN)
    assert [row.wave for row in idle] == [0, 0]
    assert took_ms(idle) == 0.0


def test_engines_are_wanted_by_the_hosts_that_stand_in_their_mode() -> None:
    (group,) = wanted_replicas(MODES, {"day": 2})
    assert (group.group, group.count) == ("day.m", 4)
    assert [r.count for r in wanted_replicas(MODES, {})] == [0]


def test_a_replica_whose_host_changes_counts_for_nothing_and_its_end_is_no_death() -> None:
    one = ReplicasPolicy(model="m", count=1)
    policy = SlurmPolicy(enabled=True, replicas=(one,))
    job = SeenJob(
        job=1, group="m", token="t", spec=digest(one), phase=Phase.RUNNING, serving=True, ends_ms=1e12
    )
    fleet, acts = replicas_step(Fleet(born="w"), Seen(at_ms=0.0, jobs=(job,)), policy)
    assert acts == ()
    # Its host changes its mode: another is submitted at once, for none counts.
    going = msgspec.structs.replace(job, going=True)
    fleet, acts = replicas_step(fleet, Seen(at_ms=1000.0, jobs=(going,)), policy)
    assert [type(act).__name__ for act in acts] == ["Submit"]
    fleet, acts = replicas_step(fleet, Seen(at_ms=2000.0, jobs=()), policy)
    assert fleet.troubles == ()


def planned(
    state: SwitchState, mode: str, *, ordered: bool = False, **seen: HostSeen
) -> list[tuple[object, ...]]:
    targets = {h: Target(mode=mode, id="this", ordered=ordered) for h in ("h1", "h2")}
    looked = HostsSeen(at_ms=0.0, hosts=tuple(seen.values()))
    rows = plan(MODES, state, looked, targets, KNOWN)
    return [(row.old, row.new, row.wave, row.wait) for row in rows]


def test_a_plan_says_of_each_host_what_the_switch_does_with_it() -> None:
    up = {name: HostSeen(host=name, mode="night", accepts=True) for name in ("h1", "h2")}
    assert planned(standing("night"), "day", **up) == [("night", "day", 1, ""), ("night", "day", 2, "")]
    # One that has been given up for this wish.
    given_up = HostState(host="h1", mode="night", goal="night", target="this", failures=3, why="no room")
    first, second = planned(standing("night", h1=given_up), "day", **up)
    assert first == ("night", "night", 0, "given up after 3 tries, until it is ordered anew: no room")
    assert second == ("night", "day", 1, "")
    # One that Slurm does not use, and that waits until it does.
    drained = HostSeen(host="h1", mode="night", reason="fan")
    first, _ = planned(standing("night"), "day", **(up | {"h1": drained}))
    assert first == ("night", "day", 1, "Slurm does not use the host now (fan)")
    # One that is on its way to the other mode: it gets there first.
    moving = HostState(host="h1", mode="day", goal="night", step=Step.WARMING, target="other")
    assert planned(standing("night", h1=moving), "day", **up)[0][:3] == ("night", "day", 1)
    assert planned(standing("night", h1=moving), "night", **up)[0][:3] == ("day", "night", 1)
    # One of which no record is in service.
    unseen = SwitchState(hosts={"h2": standing("night").hosts["h2"]})
    first, _ = planned(unseen, "day", **(up | {"h1": HostSeen(host="h1")}))
    assert first == ("", "", 0, "no node record of it is in service; only an order changes that")
    assert planned(unseen, "day", ordered=True, h1=HostSeen(host="h1"))[0] == ("", "day", 1, "")
    # Only an order takes one out of the hold, and its GPUs are cut whatever mode that is.
    held = HostState(host="h1", mode="night", goal="night", step=Step.HELD, why="no room")
    assert planned(standing("night", h1=held), "night")[0][2:] == (0, "held until an order: no room")
    assert planned(standing("night", h1=held), "night", ordered=True)[0][:3] == ("night", "night", 1)


def test_the_next_change_can_be_approved_while_a_host_is_missing_for_the_current_one() -> None:
    """Else the morning would wait for a person because of one host that is held."""
    modes = msgspec.structs.replace(MODES, autonomy=Autonomy.APPROVE)
    held = HostState(host="h2", mode="day", goal="day", step=Step.HELD, why="no room")
    decision = wanted("2026-12-01T03:00:00", standing("night", h2=held), modes)
    assert decision.proposal is not None
    assert decision.ahead is not None
    assert (decision.proposal.mode, decision.ahead.mode) == ("night", "day")
    assert wanted("2026-12-01T03:00:00", standing("night"), modes).ahead is None  # it is the proposal
    approvals = frozenset([decision.ahead.id])
    assert modes_of(wanted("2026-12-01T06:59:00", standing("night", h2=held), modes, approvals=approvals))
