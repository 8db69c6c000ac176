"""What the policy worker says of modes that a person has to look after."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import structlog

from hybridsched.core.autonomy import Autonomy
from hybridsched.core.calendar import Change
from hybridsched.core.mode_plan import Decision, Proposal
from hybridsched.core.switch_values import HostState, Step, SwitchState
from hybridsched.workers.policy_modes_troubles import TroubleLog, troubles_of
from tests.integration.modes_rig import two_modes

REPLACE = msgspec.structs.replace
LATE = Proposal(
    id="day@7", mode="day", due_ms=7e3, begin_ms=1e3, ready_ms=19e3, hosts=("n1",), early=True, approved=True
)
STATE = SwitchState(hosts={n: HostState(host=n, mode="night", goal="night") for n in ("n1", "n2")})


def decided(proposal: Proposal | None) -> Decision:
    return Decision(targets={}, scheduled=Change(mode="night", at_ms=0.0), proposal=proposal)


def found(proposal: Proposal | None, autonomy: Autonomy = Autonomy.APPROVE) -> dict[str, str]:
    modes = REPLACE(two_modes(2), autonomy=autonomy)
    return troubles_of(modes, STATE, decided(proposal), handless=False)


def test_a_switch_that_will_be_late_is_said_also_when_the_approval_is_what_it_lacks() -> None:
    assert found(LATE) == {"calendar": "mode day will be 12 s late: n1 not there yet"}
    waits = found(REPLACE(LATE, approved=False))["calendar"]
    assert "`hybridsched mode approve day@7`" in waits
    assert found(REPLACE(LATE, approved=False), Autonomy.SUGGEST) == {}, "nobody wants it in time"
    assert found(REPLACE(LATE, ready_ms=7e3)) == {}


def test_a_trouble_is_in_the_log_once_and_the_calendar_s_once_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[Any, Any]] = []
    log = TroubleLog()
    with structlog.testing.capture_logs() as lines:
        monkeypatch.setattr("hybridsched.workers.policy_modes_troubles._log", structlog.get_logger())
        for ready_ms in (19e3, 20e3, 7e3, 21e3):  # it comes and goes with what was measured
            log.say(found(REPLACE(LATE, ready_ms=ready_ms)), decided(LATE))
        other = REPLACE(LATE, id="day@8")
        log.say(found(other), decided(other))
        held = STATE.hosts | {"n1": REPLACE(STATE.hosts["n1"], step=Step.HELD, why="no room")}
        failing = STATE.hosts | {"n1": REPLACE(STATE.hosts["n1"], failures=1, wait="tried again later")}
        for hosts in (failing, failing, held, failing, held, STATE.hosts, held):
            state = SwitchState(hosts=hosts)
            log.say(troubles_of(two_modes(2), state, decided(None), handless=False), decided(None))
    said = [(line["what"], line["log_level"]) for line in lines]
    assert said == [("calendar", "warning")] * 2 + [("n1", "warning")] * 3, "fails, is held, is held anew"
