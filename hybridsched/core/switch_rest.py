"""A host at rest that may not be as its mode says: its machine was started anew, or Slurm has no use for it.

Instances of a GPU survive no reboot. A host that was rebooted is drained and read back before anything else;
one whose slurmd alone was started anew, or whose record is down, is read back as it is.
"""

from __future__ import annotations

import msgspec

from hybridsched.core.switch_steps import anew, enter
from hybridsched.core.switch_values import HostSeen, HostState, Step

REASON = "hybridsched: mode "
"""How the reasons of our drains begin."""

HELD = f"{REASON}held"

SLURMS = ("Not responding", "Node unexpectedly rebooted", "gres/")
"""How Slurm's own reasons begin for a node that was started anew, or has not come up with its GRES. What a
person has taken out of service is left alone."""

FAULTS = (*SLURMS, "Prolog ", "Epilog ", "Kill task failed", "batch job complete failure", "Low ")
"""How Slurm's own reasons begin, also those for what jobs run into. Any other is a person's, or a health
check's."""

NO_REASON = "down"
"""`HostSeen.down` where Slurm says no reason. A person has to give one."""

TAKEN = "somebody took it out of service: "

BOOT_SLACK_MS = 60_000.0
"""slurmctld reckons the start of a machine from its uptime: it differs a little from time to time."""

_replace = msgspec.structs.replace


def rested(host: HostState, view: HostSeen, at_ms: float, *, cuts: bool) -> HostState:
    """A host at rest after a look: what is remembered of it, and whether it has to be read back.

    `cuts`: its mode has a layout. Without one there is nothing that a reboot could take away.
    """
    if at_ms <= host.since_ms:  # the look is older than what was done last
        return host
    if view.mode != host.mode:
        if view.down.startswith(REASON) and not view.down.startswith(HELD):
            return anew(host, f"its node record was found out of service ({view.down})", at_ms)
        return host
    booted = _apart(host.booted_ms, view.booted_ms) > BOOT_SLACK_MS
    started = _apart(host.started_ms, view.started_ms) > 0
    host = _replace(
        host,
        booted_ms=host.booted_ms if view.booted_ms is None else view.booted_ms,
        started_ms=host.started_ms if view.started_ms is None else view.started_ms,
    )
    if not view.accepts and view.reason.startswith(REASON) and not view.reason.startswith(HELD):
        return enter(host, Step.VERIFYING, at_ms, checks=f"it was found drained ({view.reason})")
    if cuts and booted:
        return enter(host, Step.VERIFYING, at_ms, checks="its machine was started anew")
    if cuts and started:
        return _replace(host, checks="its slurmd was started anew", again_ms=0.0)
    return host


def doubtful(host: HostState, view: HostSeen) -> bool:
    """Whether a host at rest has to be read back as it is."""
    return bool(host.checks) or view.down.startswith(SLURMS)


def a_persons(reason: str) -> bool:
    """Whether a node is drained or down for a reason that is neither of our changes nor Slurm's own."""
    return bool(reason) and not reason.startswith((REASON, *FAULTS))


def taken_out(view: HostSeen, mode: str) -> str:
    """That somebody has taken a host out of service that stands in a mode, and why; empty: nobody has."""
    if view.accepts:
        return ""
    said = view.down or (view.reason if view.mode == mode else "")
    return f"{TAKEN}{said}" if said != NO_REASON and a_persons(said) else ""


def unused(view: HostSeen | None) -> str:
    """That Slurm does not use a host, in words."""
    reason = view.reason if view is not None else ""
    return f"Slurm does not use the host now{f' ({reason})' if reason else ''}"


def settled(host: HostState, view: HostSeen, at_ms: float) -> HostState:
    """A host at rest of which nothing else is wanted, with what is to be said of it."""
    if at_ms <= host.since_ms:  # the look is from before it came to rest
        return host
    if view.accepts and host.why.startswith(TAKEN):  # it was given back
        host = _replace(host, why="")
    return _replace(host, wait="" if view.accepts or host.why else unused(view))


class UnsettledError(ValueError):
    """Nobody can say now how the GPUs of a host should be cut."""


def stands_in(host: HostState) -> str:
    """The mode for which the GPUs of a host should be cut now.

    Raises:
        UnsettledError: it is held, or in the middle of being cut.
    """
    if host.step is Step.HELD:
        raise UnsettledError(f"it is held: {host.why}")
    if host.step is Step.CUTTING:
        raise UnsettledError(f"its GPUs are being cut for mode {host.goal}")
    if host.left and host.step in (Step.DRAINING, Step.EMPTY):
        raise UnsettledError(f"it is on its way to mode {host.goal} and may be cut otherwise: {host.why}")
    return host.goal if host.step in (Step.CONFIGURING, Step.VERIFYING, Step.WARMING) else host.mode


def _apart(before: float | None, now: float | None) -> float:
    return 0.0 if before is None or now is None else abs(now - before)


def adopted(name: str, view: HostSeen, mode: str, at_ms: float) -> HostState:
    """A host that nobody remembers, as it is seen to stand in a mode."""
    host = HostState(host=name, mode=mode, goal=mode, since_ms=at_ms)
    if not view.accepts and view.reason.startswith(REASON):
        # We drained it, and the journal that said why is gone. Without a job on it, its slurmd may have ended
        # (Slurm notices minutes later), and its GPUs may be half cut. Else it is read back and used.
        why = f"it was found drained ({view.reason}), and no journal says why"
        if not view.jobs and not view.reason.startswith(HELD):
            return anew(host, why, at_ms)
        host = _replace(host, step=Step.VERIFYING, back=True, why=why)
    return host
