"""How one host goes from step to step: forward when an act succeeds, back or into the hold when it fails."""

from __future__ import annotations

import msgspec

from hybridsched.core.calendar import CUT, SLURM
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_values import (
    AGAIN_MS,
    Check,
    Cut,
    DrainHost,
    EnterRecord,
    HostState,
    Instruction,
    LeaveRecords,
    Result,
    ResumeHost,
    Step,
    SwitchState,
    Target,
    Verify,
)

CHECK_AGAIN_MS = 30_000.0
"""A host that Slurm does not use and whose GPUs are cut as they should be is read back again after this."""

_replace = msgspec.structs.replace


def later(host: HostState, passed_ms: float) -> HostState:
    """The host after time in which nobody looked: it counts for no limit."""
    told = {key: at + passed_ms for key, at in host.told.items()}
    return _replace(host, since_ms=host.since_ms + passed_ms, told=told)


def moved(host: HostState, by_ms: float) -> HostState:
    """The host by a clock that was set: every span stays as long as it was."""
    shifted = {
        name: None if (at := getattr(host, name)) is None else at + by_ms
        for name in ("began_ms", "drained_ms")
    }
    times = {name: at + by_ms if (at := getattr(host, name)) else at for name in ("again_ms", "blocked_ms")}
    return _replace(later(host, by_ms), **shifted, **times)


def rewritten(state: SwitchState, policy: ModesPolicy) -> set[str]:
    """Hosts whose only node record is being written anew, from when slurmctld was told to take that up: that
    it is away may be our own doing, and only the step itself, or the way back, brings it up again."""
    if policy.way != "reconfigure":
        return set()
    back = (Step.EMPTY, Step.CUTTING)
    return {
        name
        for name, host in state.hosts.items()
        if name in policy.all_hosts() and (host.step is Step.CONFIGURING or (host.back and host.step in back))
    }


def enter(host: HostState, to: Step, at_ms: float, **changes: object) -> HostState:
    """The host at the start of a step."""
    plain = {"tries": 0, "again_ms": 0.0, "asked": "", "wait": "", "verified": False, "checks": ""}
    return _replace(host, **(plain | {"step": to, "since_ms": at_ms} | changes))


def started(host: HostState, target: Target, at_ms: float) -> HostState:
    """The host at the beginning of its way to another mode."""
    return enter(
        host,
        Step.DRAINING,
        at_ms,
        goal=target.mode,
        target=target.id,
        cause=target.cause,
        began_ms=at_ms,
        back=False,
        left=host.step is Step.HELD,
        unsure=host.step is Step.HELD or bool(host.checks),
        drained_ms=None,
        booted_ms=None,
        started_ms=None,
        told={},
        refused={},
        spans={},
        why="",
    )


def span(host: HostState, part: str, at_ms: float) -> dict[str, float]:
    """The spans with the time since the step began added to one part."""
    return {**host.spans, part: host.spans.get(part, 0.0) + max(0.0, at_ms - host.since_ms)}


def succeeded(host: HostState, act: Instruction, at_ms: float, policy: ModesPolicy) -> HostState:
    """The host after an act was done."""
    match act:
        case DrainHost():
            return _replace(host, drained_ms=at_ms, tries=0, again_ms=0.0)
        case LeaveRecords():
            cuts = _layout(policy, host.mode) != _layout(policy, host.goal) or host.back or host.unsure
            after = Step.CUTTING if cuts and _layout(policy, host.goal) else Step.CONFIGURING
            return enter(host, after, at_ms, spans=span(host, SLURM, at_ms))
        case Cut():
            return enter(host, Step.CONFIGURING, at_ms, spans=span(host, CUT, at_ms))
        case EnterRecord():
            return enter(host, Step.VERIFYING, at_ms, spans=span(host, SLURM, at_ms))
        case Check():
            again = at_ms + CHECK_AGAIN_MS
            return _replace(host, checks="", tries=0, again_ms=again, wait="")
        case Verify():
            return _replace(host, verified=True, tries=0, again_ms=0.0, wait="")
        case ResumeHost() if host.checks:  # it stands as it stood
            return enter(host, Step.SERVING, at_ms, drained_ms=None)
        case ResumeHost():
            return enter(host, Step.WARMING, at_ms, left=False, spans=span(host, SLURM, at_ms))
        case _:
            return host


def failed(host: HostState, why: str, at_ms: float, policy: ModesPolicy) -> HostState:
    """Back to the old mode; when that was under way already, held. One that is read back is cut anew."""
    if host.checks:
        return anew(host, f"{host.checks}: {why}", at_ms)
    if host.back:
        return enter(host, Step.HELD, at_ms, why=f"{host.why}; on the way back: {why}", wait="")
    why = f"{host.why}; {why}" if host.unsure and host.why else why
    if host.unsure and host.step is Step.DRAINING:  # nothing to go back to
        return enter(host, Step.HELD, at_ms, why=why, wait="")
    failures = host.failures + 1
    blocked = at_ms + policy.retry_ms * 2.0 ** min(failures - 1, 10)
    host = _replace(host, back=True, why=why, failures=failures, blocked_ms=blocked)
    if host.step is Step.WARMING:  # engines of the new mode may run there
        return enter(host, Step.DRAINING, at_ms, goal=host.mode, left=True, drained_ms=None, told={})
    if host.left:
        return enter(host, Step.EMPTY, at_ms, goal=host.mode)
    return enter(host, Step.VERIFYING, at_ms, goal=host.mode, verified=True)  # as it was before


def anew(host: HostState, why: str, at_ms: float) -> HostState:
    """A host at rest whose GPUs or node record are not as its mode says: emptied, and brought into its mode
    once more."""
    return enter(
        host,
        Step.DRAINING,
        at_ms,
        goal=host.mode,
        cause="it was not as its mode says",
        began_ms=at_ms,
        why=why,
        back=False,
        left=False,
        unsure=True,
        drained_ms=None,
        told={},
        spans={},
        booted_ms=None,
        started_ms=None,
    )


def _layout(policy: ModesPolicy, name: str) -> str:
    mode = policy.named(name)
    return "" if mode is None else mode.layout


def again(host: HostState, result: Result) -> HostState:
    """The host after an act that failed for a while: it is tried again, later each time."""
    wait = min(AGAIN_MS[0] * 2.0 ** min(host.tries, 10), AGAIN_MS[1])
    return _replace(host, tries=host.tries + 1, again_ms=result.at_ms + wait, wait=result.error)
