"""What `hybridsched mode status` says of one host: what it waits for, how long yet, and what helps."""

from __future__ import annotations

from hybridsched.cli.words import span
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch import WARM_PATIENCE
from hybridsched.core.switch_rest import TAKEN
from hybridsched.core.switch_values import MOVING, HostState, Step


def said_of(host: HostState, modes: ModesPolicy, now_ms: float) -> str:
    """One sentence; empty: there is nothing to say. `now_ms`: by the clock of the state."""
    if host.step is Step.HELD:
        first = f"{host.wait}; {host.why}" if host.wait else host.why
        return f"{first}; `hybridsched mode switch --to MODE --node {host.host}` brings it back"
    if host.step is Step.SERVING:
        return _at_rest(host, modes, now_ms)
    if host.host not in modes.all_hosts():
        return host.wait or host.why
    return "; ".join(word for word in (_waits(host, now_ms), _limit(host, modes, now_ms)) if word)


def _at_rest(host: HostState, modes: ModesPolicy, now_ms: float) -> str:
    if not host.wait:
        back = host.why and not host.why.startswith(TAKEN)
        return f"its last change went back: {host.why}" if back else host.why
    if 0 < host.failures < modes.attempts and host.blocked_ms > now_ms:
        number = f"try {host.failures + 1} of {modes.attempts}"
        return f"{number} in {span(host.blocked_ms - now_ms)}: {host.why}"
    return _waits(host, now_ms)


def _waits(host: HostState, now_ms: float) -> str:
    """What it waits for; of what failed, when it is tried again."""
    if not (host.tries and host.wait):
        return host.wait or host.why
    rest = host.again_ms - now_ms
    return f"{host.wait}; try {host.tries + 1} {f'in {span(rest)}' if rest > 0 else 'under way'}"


def _limit(host: HostState, modes: ModesPolicy, now_ms: float) -> str:
    """How long that goes on, and what comes then; empty: without a limit, or it is not known."""
    if host.step not in MOVING or not host.wait or host.checks:
        return ""
    waited = now_ms - host.since_ms
    after = "held" if host.back or (host.unsure and host.step is Step.DRAINING) else f"back to {host.mode}"
    if host.step is Step.DRAINING:
        jobs = " to leave" in host.wait
        if jobs and waited < modes.drain_ms:
            return f"requeued in {span(modes.drain_ms - waited)}"
        if not jobs and host.unsure:
            return ""
        return _then(after, modes.drain_ms + modes.requeue_ms - waited)
    if host.step is Step.WARMING:
        mode = modes.named(host.goal)
        engines = () if mode is None else mode.engines
        patience = WARM_PATIENCE * max((e.warm_ms for e in engines if e.per_host), default=0.0)
        return "" if host.back or not patience else _then(after, patience - waited)
    return _then(after, modes.act_ms - waited) if host.tries else ""


def _then(after: str, rest_ms: float) -> str:
    return f"{after} in {span(rest_ms)}" if rest_ms > 0 else ""
