"""What is wanted of each host, and what that means: calendar, operators' orders and approvals put together.

`decide` gives the targets that `core.switch` follows; `plan` says for each host what would change, how long
it takes and which jobs it touches. `hybridsched mode plan` and `switch` show the same plan, and the policy
worker follows the same targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo

from hybridsched.core.autonomy import Autonomy
from hybridsched.core.calendar import (
    Change,
    Durations,
    Estimate,
    at_once,
    current,
    estimate,
    next_change,
    span_ms,
)
from hybridsched.core.modes import Mode, ModesPolicy, node_name
from hybridsched.core.policy import ReplicasPolicy
from hybridsched.core.switch import step
from hybridsched.core.switch_values import (
    MOVING,
    HostJob,
    HostSeen,
    HostState,
    Seen,
    Step,
    SwitchState,
    Target,
)
from hybridsched.core.values import Value


class Order(Value, frozen=True, kw_only=True):
    """An operator's order: a mode for all hosts, or for some."""

    id: str
    mode: str
    hosts: tuple[str, ...] = ()
    """Empty: all."""
    by: str = ""
    at_ms: float = 0.0
    until_ms: float | None = None
    """The calendar counts again from then on; None: until the order is withdrawn."""

    def concerns(self, host: str, at_ms: float) -> bool:
        """Whether it counts for a host at a moment."""
        return (not self.hosts or host in self.hosts) and (self.until_ms is None or at_ms < self.until_ms)


class Proposal(Value, frozen=True, kw_only=True):
    """A change of the calendar's own: under way, waiting for an approval, or ahead."""

    id: str
    mode: str
    due_ms: float
    """When the mode's window begins, or began."""
    begin_ms: float
    """When the first host has to leave."""
    ready_ms: float
    """When the last host is expected to serve in the mode, as things stand now."""
    hosts: tuple[str, ...]
    """Those that are not there yet."""
    early: bool = False
    """Whether its hosts should serve when its window begins. Else it begins then, and is never late."""
    approved: bool = True
    """False: it waits for `hybridsched mode approve`, or the policy only suggests."""

    @property
    def late_ms(self) -> float:
        """By how much it will be late, or is; 0: not at all."""
        return max(0.0, self.ready_ms - self.due_ms) if self.hosts and self.early else 0.0


class Decision(Value, frozen=True, kw_only=True):
    """What is wanted now."""

    targets: dict[str, Target]
    scheduled: Change
    """The mode of the calendar now, and since when."""
    proposal: Proposal | None
    """The current mode's, while hosts are not there; else the next one's; None: nothing is ahead."""
    ahead: Proposal | None = None
    """The next one's where `proposal` is the current mode's: it can be approved before its time."""


def decide(
    policy: ModesPolicy,
    zone: tzinfo,
    at_ms: float,
    state: SwitchState,
    durations: Durations,
    *,
    orders: Sequence[Order] = (),
    approvals: frozenset[str] = frozenset(),
    state_ms: float | None = None,
) -> Decision:
    """The target of each host at a moment. `state_ms`: the same by the state's clock; None: it is one."""
    now = current(policy, zone, at_ms)
    ahead = next_change(policy, zone, at_ms)
    hosts = list(policy.all_hosts())
    ordered = {host: order for host in hosts if (order := _order(orders, host, at_ms)) is not None}
    free = [host for host in hosts if host not in ordered]
    aim = ahead_of = None
    state_ms = at_ms if state_ms is None else state_ms
    if now.mode and any(_elsewhere(state, host, now.mode) for host in free):
        aim = _proposal(policy, now, free, state, durations, at_ms, approvals, state_ms)
    if ahead is not None:
        ahead_of = _proposal(policy, ahead, free, state, durations, at_ms, approvals, state_ms)
        # Once begun it goes on, also when a new measurement says that it could have begun later.
        begun = any(host.target == ahead_of.id for host in state.hosts.values())
        if begun or at_ms >= ahead_of.begin_ms:
            aim = ahead_of
    shown = aim if aim is not None else ahead_of
    if shown is not None and not shown.hosts:
        shown = None
    targets: dict[str, Target] = {}
    for host, order in ordered.items():
        targets[host] = Target(mode=order.mode, id=order.id, cause=f"order of {order.by}", ordered=True)
    if aim is not None and aim.approved:
        targets |= {host: Target(mode=aim.mode, id=aim.id) for host in free}
    later = ahead_of if ahead_of is not None and ahead_of is not shown and ahead_of.hosts else None
    return Decision(targets=targets, scheduled=now, proposal=shown, ahead=later)


def change_id(change: Change) -> str:
    """Names one change of the calendar, before and after its moment."""
    return f"{change.mode}@{change.at_ms / 1000.0:.0f}"


def moment_s(name: str) -> float:
    """The moment of a change by its `change_id`, s of the epoch; infinity where that is none."""
    digits = name.rpartition("@")[2]
    return float(digits) if digits.isdecimal() and len(digits) < 12 else float("inf")


def _order(orders: Sequence[Order], host: str, at_ms: float) -> Order | None:
    """The newest order that counts for a host."""
    standing = [order for order in orders if order.concerns(host, at_ms)]
    return max(standing, key=lambda order: (order.at_ms, order.id), default=None)


def _elsewhere(state: SwitchState, host: str, mode: str) -> bool:
    """Whether a host is not at rest in a mode. Not one that has never been seen: nobody can switch it."""
    known = state.hosts.get(host)
    return known is not None and (known.mode != mode or known.step is not Step.SERVING)


def _proposal(
    policy: ModesPolicy,
    change: Change,
    hosts: Sequence[str],
    state: SwitchState,
    durations: Durations,
    at_ms: float,
    approvals: frozenset[str],
    state_ms: float,
) -> Proposal:
    missing = tuple(host for host in hosts if _elsewhere(state, host, change.mode))
    mode = policy.named(change.mode)
    took_ms = 0.0 if mode is None else _whole_ms(policy, mode, missing, state, durations, state_ms)
    early = mode is not None and mode.early
    begin_ms = change.at_ms - policy.margin * took_ms if early else change.at_ms
    name = change_id(change)
    approved = policy.autonomy is Autonomy.AUTO or (policy.autonomy is Autonomy.APPROVE and name in approvals)
    return Proposal(
        id=name,
        mode=change.mode,
        due_ms=change.at_ms,
        begin_ms=begin_ms,
        ready_ms=max(at_ms, begin_ms) + took_ms,
        hosts=missing,
        early=early,
        approved=approved,
    )


def _whole_ms(
    policy: ModesPolicy,
    mode: Mode,
    hosts: Sequence[str],
    state: SwitchState,
    durations: Durations,
    state_ms: float,
) -> float:
    """How long until all of `hosts` serve in a mode, those that are under way less what they have spent."""
    if not hosts:
        return 0.0
    spans = []
    most = policy.max_unavailable
    for host in hosts:
        known = state.hosts.get(host)
        old = known.mode if known is not None else ""
        whole = estimate(durations, policy, old, mode).total_ms
        spent = 0.0
        if known is not None and known.step in MOVING and known.goal == mode.name:
            spent = 0.0 if known.began_ms is None else state_ms - known.began_ms
        spans.append(max(0.0, whole - spent))
        most = min(most, at_once(policy, policy.named(old), mode, len(policy.all_hosts())))
    return span_ms(sorted(spans), most)


# -- the plan, for people --------------------------------------------------------------------------------


class HostPlan(Value, frozen=True, kw_only=True):
    """What a change means for one host."""

    host: str
    old: str
    new: str
    node_old: str
    node_new: str
    layout_old: str
    layout_new: str
    wave: int
    """Hosts of one wave change side by side; 0: it does not change."""
    expected: Estimate | None
    jobs: tuple[HostJob, ...]
    """What runs there and has to leave."""
    wait: str = ""
    """What keeps it from changing, as far as is known now."""


def plan(
    policy: ModesPolicy,
    state: SwitchState,
    seen: Seen,
    targets: Mapping[str, Target],
    durations: Durations,
) -> tuple[HostPlan, ...]:
    """For each host what would change if the targets were followed from here, in the order it would."""
    views = {view.host: view for view in seen.hosts}
    after, _ = step(state, seen, targets, policy)
    rows = []
    started = 0
    for host in policy.all_hosts():
        known = state.hosts.get(host)
        view = views.get(host)
        old = known.mode if known is not None else (view.mode if view is not None else None) or ""
        target = targets.get(host)
        new = policy.named(target.mode) if target is not None else None
        if known is not None and known.step in MOVING:
            new = policy.named(known.goal) if new is None else new
            old = old if new is None or new.name == known.goal else known.goal
        resting = known is None or known.step is Step.SERVING
        never = _never(policy, known, view, target, after.hosts.get(host))
        changes = new is not None and (new.name != old or not resting) and not never
        wave = 0
        if changes and new is not None:
            most = at_once(policy, policy.named(old), new, len(policy.all_hosts()))
            wave = 1 + started // most
            started += 1
        begins = after.hosts.get(host)
        waits = begins is not None and begins.step in (Step.SERVING, Step.HELD) and wave == 1
        wait = begins.wait if begins is not None and waits else "" if changes else never or _wait(known)
        held = known is not None and known.step is Step.HELD
        rows.append(
            HostPlan(
                host=host,
                old=old,
                new=new.name if changes and new is not None else old,
                node_old=_record(policy, old, host),
                node_new=_record(policy, new.name if changes and new is not None else old, host),
                layout_old=_layout(policy, old),
                layout_new=_layout(policy, new.name if changes and new is not None else old),
                wave=wave,
                expected=estimate(durations, policy, "" if held else old, new) if changes and new else None,
                jobs=view.jobs if changes and view is not None else (),
                wait=wait,
            )
        )
    return tuple(rows)


def took_ms(rows: Sequence[HostPlan]) -> float:
    """How long a plan takes: its waves one after another, each as long as its longest host."""
    waves: dict[int, float] = {}
    for row in rows:
        if row.expected is not None:
            waves[row.wave] = max(waves.get(row.wave, 0.0), row.expected.total_ms)
    return sum(waves.values())


def _never(
    policy: ModesPolicy,
    known: HostState | None,
    view: HostSeen | None,
    target: Target | None,
    after: HostState | None,
) -> str:
    """Why a host does not change as long as nobody does something about it; empty: it does."""
    if target is None:
        return ""
    if known is None:
        if target.ordered or (view is not None and view.mode is not None):
            return ""
        return "no node record of it is in service; only an order changes that"
    if known.step is Step.HELD and (not target.ordered or target.id == known.target):
        return f"held until an order: {known.why}"
    if known.step is Step.SERVING and after is not None and after.failures >= policy.attempts:
        return after.wait
    return ""


def _wait(known: HostState | None) -> str:
    if known is None:
        return "not seen yet"
    return known.why if known.step is Step.HELD else known.wait


def _record(policy: ModesPolicy, mode: str, host: str) -> str:
    found = policy.named(mode)
    return "" if found is None else node_name(found, host)


def _layout(policy: ModesPolicy, mode: str) -> str:
    found = policy.named(mode)
    return "" if found is None else found.layout


def wanted_replicas(policy: ModesPolicy, hosts_in: Mapping[str, int]) -> tuple[ReplicasPolicy, ...]:
    """The groups of replicas, given how many hosts stand in each mode or are about to serve there."""
    return tuple(
        ReplicasPolicy(
            model=engine.model,
            name=mode.group(engine),
            count=engine.per_host * hosts_in.get(mode.name, 0),
            gres=engine.gres,
            time_limit_s=engine.time_limit_s,
            script=engine.script,
            arguments=engine.arguments,
            warm_ms=engine.warm_ms,
        )
        for mode in policy.mode
        for engine in mode.engines
    )
