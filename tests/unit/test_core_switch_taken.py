"""A host that somebody takes out of service while it changes its mode; and looks older than a change."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.switch import step
from hybridsched.core.switch_rest import TAKEN
from hybridsched.core.switch_values import Finished, HostJob, HostSeen, HostState, Seen, Step, SwitchState
from tests.unit.test_core_switch_edges import modes, to

REPLACE = msgspec.structs.replace
POLICY = modes("n1")


def after(
    host: HostState, view: HostSeen, at_ms: float = 5_000.0, mode: str = "night"
) -> tuple[HostState, tuple[object, ...]]:
    state, acts = step(
        SwitchState(hosts={"n1": host}), Seen(at_ms=at_ms, hosts=(view,)), to(mode, "n1"), POLICY
    )
    return state.hosts["n1"], acts


@pytest.mark.parametrize("down", [False, True])
def test_one_that_drains_stays_as_it_was_until_it_is_given_back(down: bool) -> None:
    draining = HostState(host="n1", mode="day", goal="night", step=Step.DRAINING, drained_ms=1.0)
    view = HostSeen(host="n1", mode="day", reason="a fan is broken", jobs=(HostJob(job=7),))
    if down:
        view = HostSeen(host="n1", down="a fan is broken", reason="hybridsched: mode night to day")
    host, acts = after(draining, view)
    assert (host.step, host.mode, host.why) == (Step.SERVING, "day", f"{TAKEN}a fan is broken")
    assert [act.why for act in acts if isinstance(act, Finished)] == [host.why]
    host, acts = after(host, view, at_ms=6_000.0)
    assert (host.step, acts) == (Step.SERVING, ())
    assert "Slurm does not use the host now" in host.wait
    host, _ = after(host, HostSeen(host="n1", mode="day", accepts=True), at_ms=7_000.0, mode="day")
    assert (host.step, host.wait, host.why, host.failures) == (Step.SERVING, "", "", 0)


@pytest.mark.parametrize(
    "reason", ["hybridsched: mode day to night", "Not responding", "Kill task failed", "Prolog error", ""]
)
def test_what_we_or_slurm_itself_drained_is_nobodys(reason: str) -> None:
    draining = HostState(host="n1", mode="day", goal="night", step=Step.DRAINING, drained_ms=1.0)
    host, _ = after(draining, HostSeen(host="n1", mode="day", reason=reason))
    assert host.step is Step.EMPTY


def test_one_that_warms_up_stays_in_its_new_mode_and_out_of_service() -> None:
    warming = HostState(host="n1", mode="day", goal="night", step=Step.WARMING, since_ms=1_000.0)
    view = HostSeen(host="n1", mode="night", reason="a fan is broken")
    assert after(warming, view, at_ms=1_000.0)[0].step is Step.WARMING  # the look is from before it came in
    host, acts = after(warming, view)
    assert (host.step, host.mode) == (Step.SERVING, "night")
    assert "load" not in next(act for act in acts if isinstance(act, Finished)).spans
    host, acts = after(host, view, at_ms=6_000.0)
    assert (host.mode, acts) == ("night", ())
    assert host.wait == "Slurm does not use the host now (a fan is broken)"


def test_a_look_from_before_a_change_ended_does_not_undo_it() -> None:
    came = HostState(host="n1", mode="night", goal="night", since_ms=5_000.0, failures=1, why="why")
    before = HostSeen(host="n1", mode="day", reason="hybridsched: mode day to night")
    assert after(came, before)[0].mode == "night"
    rests = HostState(host="n1", mode="day", goal="day", since_ms=5_000.0)
    assert after(rests, before, mode="day")[0].wait == ""
    assert after(came, before, at_ms=5_001.0)[0].mode == "day"  # by hand
