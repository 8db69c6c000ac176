"""What a person has to know of the modes: for `mode status`, and once each in the log."""

from __future__ import annotations

from collections.abc import Collection

from hybridsched.core.autonomy import Autonomy
from hybridsched.core.mode_plan import Decision
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_values import Step, SwitchState
from hybridsched.log import get_logger

NO_HAND = "the policy worker was started without --hand PROGRAM, so nothing can be done on hosts"

CALENDAR = "calendar"

_log = get_logger("policy-modes")


def troubles_of(
    modes: ModesPolicy, state: SwitchState, decision: Decision, *, handless: bool
) -> dict[str, str]:
    """By host, or `calendar` and `hand`."""
    found = {
        name: host.why if host.step is Step.HELD else host.wait or host.why
        for name, host in state.hosts.items()
        if host.step is Step.HELD
        or host.failures
        or name not in modes.all_hosts()
        or (host.tries and (host.checks or host.step is Step.SERVING))
    }
    if handless and modes.enabled:
        found["hand"] = NO_HAND
    for name in modes.all_hosts():
        if name not in state.hosts:
            found[name] = "no node record of it is in service, so its mode is not known"
    late = _late(modes, decision)
    return found | ({CALENDAR: late} if late else {})


def _late(modes: ModesPolicy, decision: Decision) -> str:
    """That a switch will be late, before it is; empty: none will, or nobody wants it in time."""
    one = decision.proposal
    if one is None or one.late_ms <= 0 or not modes.enabled or modes.autonomy is Autonomy.SUGGEST:
        return ""
    why = f"{_named(one.hosts)} not there yet"
    if not one.approved:
        why = f"it is not approved (`hybridsched mode approve {one.id}`), and {why}"
    return f"mode {one.mode} will be {one.late_ms / 1000.0:.0f} s late: {why}"


class TroubleLog:
    """Says each trouble once for as long as it lasts, and the calendar's once for each change of its."""

    def __init__(self) -> None:
        self._said: dict[str, set[str]] = {}
        self._change = ""

    def say(self, troubles: dict[str, str], decision: Decision | None) -> None:
        """After each look."""
        self._said = {what: words for what, words in self._said.items() if what in troubles}
        for what, words in troubles.items():
            if what == CALENDAR:
                proposal = decision.proposal if decision is not None else None
                change = "" if proposal is None else proposal.id
                new = change != self._change
                self._change = change
            else:
                before = self._said.setdefault(what, set())
                new = words not in before
                before.add(words)
            if new:
                _log.warning("The modes need a look.", key="mode_trouble", what=what, why=words)


def _named(hosts: Collection[str]) -> str:
    """Some hosts in few words."""
    named = list(hosts)
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    return ", ".join(named[:4]) + more
