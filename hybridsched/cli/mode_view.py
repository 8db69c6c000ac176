"""What `hybridsched mode` shows: the same values as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click
import msgspec

from hybridsched.cli.mode_words import said_of
from hybridsched.cli.words import count, span
from hybridsched.core.autonomy import Autonomy
from hybridsched.core.calendar import Durations, next_change
from hybridsched.core.mode_plan import Decision, HostPlan, Order, Proposal, decide, plan, took_ms
from hybridsched.core.modes import ModesPolicy, Window
from hybridsched.core.switch_values import HostState, Step, SwitchState, Target
from hybridsched.store.found import read_json
from hybridsched.store.keys import Keys
from hybridsched.store.modes import ModeStore, Wishes
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import server_ms
from hybridsched.workers.policy_modes_view import ModeStatus

if TYPE_CHECKING:
    from redis.asyncio import Redis

CALENDAR = "calendar"

OLD_MS = 30_000.0
"""A policy worker that leads says more often than this where the hosts stand, also where Slurm is away."""

_STATUS = msgspec.json.Decoder(ModeStatus)


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in Redis of a pool's modes."""

    pool: str
    now_ms: float
    modes: ModesPolicy
    live: ModeStatus | None
    """None: no policy worker has published anything of late."""
    durations: Durations
    wishes: Wishes

    @property
    def zone(self) -> ZoneInfo:
        return ZoneInfo(self.modes.time_zone)

    @property
    def status(self) -> ModeStatus:
        """Raises `ClickException` when nobody has said where the hosts stand."""
        if self.live is None:
            raise click.ClickException(
                f"no policy worker of pool {self.pool} has said of late where hosts stand; start one with "
                "`hybridsched worker policy --hand PROGRAM`, and see that the policy has modes.enabled = true"
            )
        return self.live


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and the targets that it is of."""

    decision: Decision
    rows: tuple[HostPlan, ...]
    to: str | None = None
    """The mode that was asked for, `CALENDAR`, or None: the calendar's next change."""

    @property
    def changes(self) -> int:
        return sum(row.wave > 0 for row in self.rows)


async def read(client: Redis, pool: str) -> Known:
    """Read it. Raises `ClickException` for a pool without modes."""
    policy = await PolicyStore(client, pool).current()
    store = ModeStore(client, pool)
    if policy is None or policy.modes is None:
        what = "no policy" if policy is None else "a policy without a section [modes]"
        journal = await store.journal()
        left = [
            f"{host.host} ({host.step.value})"
            for host in (journal.hosts.values() if journal is not None else ())
            if host.step is not Step.SERVING
        ]
        middle = f". In the middle of a change, and carried on when it has: {', '.join(left)}" if left else ""
        raise click.ClickException(
            f"pool {pool} has {what}; set one that has it with `hybridsched pool policy set FILE`{middle}"
        )
    raw: bytes | None = await client.get(Keys(pool).mode_status)  # type: ignore[assignment]
    live = read_json(_STATUS, raw, "the status of the modes")
    return Known(
        pool=pool,
        now_ms=server_ms(await client.time()),
        modes=policy.modes,
        live=live,
        durations=await store.durations(),
        wishes=await store.wishes(),
    )


# -- list ------------------------------------------------------------------------------------------------


def list_json(known: Known) -> dict[str, Any]:
    """Fields: pool, now, time_zone, current, next, modes."""
    now_ms = known.live.at_ms if known.live is not None else known.now_ms
    ahead = next_change(known.modes, known.zone, now_ms)
    decision = _decide(known, known.wishes.orders)
    return {
        "pool": known.pool,
        "enabled": known.modes.enabled,
        "time_zone": known.modes.time_zone,
        "autonomy": known.modes.autonomy.value,
        "current": decision.scheduled.mode,
        "next": None if ahead is None else {"mode": ahead.mode, "at": _iso(ahead.at_ms, known)},
        "modes": [
            {
                "name": mode.name,
                "layout": mode.layout,
                "node": mode.node,
                "lanes": mode.lanes,
                "early": mode.early,
                "default": mode.name == known.modes.default,
                "windows": [msgspec.to_builtins(window) for window in mode.windows],
                "engines": [msgspec.to_builtins(engine) for engine in mode.engines],
            }
            for mode in known.modes.mode
        ],
    }


def list_text(known: Known) -> str:
    """The same for people."""
    data = list_json(known)
    now = data["current"] or "no mode, whatever stands stays"
    lines = [
        f"By the calendar: {now} ({known.modes.time_zone}). Where hosts stand: `hybridsched mode status`."
    ]
    ahead = next_change(known.modes, known.zone, known.live.at_ms if known.live else known.now_ms)
    if ahead is not None:
        lines.append(f"Next: {ahead.mode} at {_local(ahead.at_ms, known)}.")
    if not data["enabled"]:
        lines.append("modes.enabled is false: nothing is switched.")
    for mode in known.modes.mode:
        windows = "; ".join(map(_window, mode.windows)) or "no window"
        default = "; the one outside every window" if mode.name == known.modes.default else ""
        lines.append("")
        lines.append(f"{mode.name}: {windows}{default}")
        lanes = "open to offline work" if mode.lanes else "closed to offline work"
        early = ", serving when it begins" if mode.early else ""
        lines.append(f"  layout {mode.layout or 'as it is'}, record {mode.node}, lanes {lanes}{early}")
        for engine in mode.engines:
            floor = f", floor {engine.floor}" if engine.floor else ""
            lines.append(f"  {engine.per_host} x {engine.name or engine.model} on {engine.gres}{floor}")
    return "\n".join(lines)


def _window(window: Window) -> str:
    whole = window.start == window.end
    return ",".join(window.days) + (" all day" if whole else f" {window.start}-{window.end}")


# -- status ----------------------------------------------------------------------------------------------


def status_json(known: Known) -> dict[str, Any]:
    """Fields: pool, enabled, at, age_ms, reachable, scheduled, proposal, ahead, hosts, orders, approvals,
    troubles."""
    live = known.status
    return {
        "pool": known.pool,
        "enabled": known.modes.enabled,
        "at": _iso(live.at_ms, known),
        "age_ms": max(0.0, known.now_ms - live.at_ms),
        "reachable": live.seen.reachable,
        "scheduled": live.scheduled,
        "proposal": _proposal_json(live.proposal, known),
        "ahead": _proposal_json(live.ahead, known),
        "hosts": [
            {
                "host": host.host,
                "mode": host.mode,
                "goal": host.goal,
                "step": host.step.value,
                "since_ms": _since_ms(live, host),
                "back": host.back,
                "wait": host.wait,
                "why": host.why,
                "cause": host.cause,
                "says": said_of(host, known.modes, _clock_ms(live)),
            }
            for host in live.state.hosts.values()
        ],
        "orders": [msgspec.to_builtins(order) for order in known.wishes.orders],
        "approvals": sorted(known.wishes.approvals),
        "troubles": live.troubles,
    }


def _since_ms(live: ModeStatus, host: HostState) -> float:
    return max(0.0, _clock_ms(live) - host.since_ms)


def _clock_ms(live: ModeStatus) -> float:
    """The clock of the hosts' states."""
    return live.at_ms if live.state_ms is None else live.state_ms


def _proposal_json(proposal: Proposal | None, known: Known) -> dict[str, Any] | None:
    if proposal is None:
        return None
    return {
        **{key: getattr(proposal, key) for key in ("id", "mode", "approved", "late_ms")},
        "hosts": list(proposal.hosts),
        "due": _iso(proposal.due_ms, known),
        "begin": _iso(proposal.begin_ms, known),
        "ready": _iso(proposal.ready_ms, known),
    }


def held_of(proposal: Proposal, state: SwitchState) -> list[str]:
    """Its hosts that are held: they follow orders only."""
    return [
        name
        for name in proposal.hosts
        if (host := state.hosts.get(name)) is not None and host.step is Step.HELD
    ]


def _proposal_text(proposal: Proposal, known: Known) -> str:
    at_ms = known.status.at_ms
    held = held_of(proposal, known.status.state)
    begun = proposal.begin_ms <= at_ms
    verb = "begins" if not begun else "began" if proposal.approved else "should have begun"
    when = f"{verb} {_local(proposal.begin_ms, known)}"
    if proposal.begin_ms < proposal.due_ms:
        when += f", due {_local(proposal.due_ms, known)}"
    if not proposal.due_ms:
        when = "the mode outside every window"
    late = f" It will be {span(proposal.late_ms)} late." if proposal.due_ms and proposal.late_ms > 0 else ""
    ready = f"ready {_local(proposal.ready_ms, known)}"
    approved = ""
    if not proposal.approved:
        if begun:
            ready = f"takes {span(proposal.ready_ms - at_ms)} from its approval"
        approved = f" Not approved: `hybridsched mode approve {proposal.id}`."
        if known.modes.autonomy is Autonomy.SUGGEST:
            approved = f" Only suggested: `hybridsched mode switch --to {proposal.mode}` orders it."
    if held:
        only = f" Held, and taken along by an order only: {', '.join(held)}."
        approved = only if len(held) == len(proposal.hosts) else approved + only
    hosts = ", ".join(proposal.hosts[:6]) + (
        f" and {len(proposal.hosts) - 6} more" if proposal.hosts[6:] else ""
    )
    return f"To {proposal.mode} ({proposal.id}), {hosts}: {when}, {ready}.{late}{approved}"


def status_text(known: Known) -> str:
    """The same for people."""
    live = known.status
    lines = [f"Scheduled: {live.scheduled or 'no mode'}."]
    age_ms = known.now_ms - live.at_ms
    if age_ms > OLD_MS:
        lines.append(f"This is {span(age_ms)} old: since then no policy worker has said anything.")
    if not live.seen.reachable:
        lines.append("Slurm could not be read at the last look: what follows is older, and hosts wait.")
    if not known.modes.enabled:
        lines.append("modes.enabled is false: no host begins to change.")
    lines += [_proposal_text(one, known) for one in (live.proposal, live.ahead) if one is not None]
    lines += [
        f"Order {order.id} of {order.by}: {order.mode} for {', '.join(order.hosts) or 'all hosts'}"
        + (f" until {_local(order.until_ms, known)}" if order.until_ms is not None else "")
        for order in known.wishes.orders
    ]
    rows = [("host", "mode", "step", "since", "waits for, or why")]
    for host in live.state.hosts.values():
        going = host.mode if host.goal == host.mode else f"{host.mode} to {host.goal}"
        back = " (back)" if host.back else ""
        if host.step is Step.HELD:
            going, back = f"none, was {host.mode}" if host.mode else "none", ""
        since = span(_since_ms(live, host))
        words = said_of(host, known.modes, _clock_ms(live))
        rows.append((host.host, going + back, host.step.value, since, words))
    lines += ["", *_table(rows)]
    late = any(one is not None and one.late_ms > 0 for one in (live.proposal, live.ahead))
    shown = {*live.state.hosts, *([CALENDAR] if late else [])}
    lines += [f"{what}: {words}" for what, words in live.troubles.items() if what not in shown]
    return "\n".join(lines)


# -- plan ------------------------------------------------------------------------------------------------


def plan_of(known: Known, to: str | None, hosts: Sequence[str]) -> Made:
    """What an order would do, or (`to` None) what the calendar does next. Raises `ClickException`."""
    status = known.status
    names = list(known.modes.all_hosts())
    strangers = [host for host in hosts if host not in names]
    if strangers:
        raise click.UsageError(
            f"--node was given {strangers[0]!r}, no host of the policy: {', '.join(names)}"
        )
    modes = [mode.name for mode in known.modes.mode]
    if to is not None and to != CALENDAR and to not in modes:
        raise click.UsageError(f"--to was given {to!r}; there are {', '.join(modes)}, and {CALENDAR}")
    orders = list(known.wishes.orders)
    if to == CALENDAR:
        orders = [order for order in orders if hosts and not (order.hosts and set(order.hosts) <= set(hosts))]
    elif to is not None:
        orders.append(Order(id="plan", mode=to, hosts=tuple(hosts), by="plan", at_ms=float("inf")))
    decision = _decide(known, orders)
    targets = decision.targets
    if to is None and decision.proposal is not None:
        ahead = decision.proposal
        targets = {**targets, **{h: Target(mode=ahead.mode, id=ahead.id) for h in ahead.hosts}}
    rows = plan(known.modes, status.state, status.seen, targets, known.durations)
    if to is None and hosts:
        rows = tuple(row for row in rows if row.host in hosts)
    return Made(decision=decision, rows=rows, to=to)


def _decide(known: Known, orders: Sequence[Order]) -> Decision:
    live = known.live
    return decide(
        known.modes,
        known.zone,
        live.at_ms if live is not None else known.now_ms,
        live.state if live is not None else SwitchState(),
        known.durations,
        orders=orders,
        approvals=known.wishes.approvals,
        state_ms=live.state_ms if live is not None else None,
    )


def plan_json(known: Known, made: Made) -> dict[str, Any]:
    """Fields: pool, proposal (the calendar's), took_ms (all waves), changes, hosts."""
    return {
        "pool": known.pool,
        "proposal": _proposal_json(made.decision.proposal, known),
        "took_ms": took_ms(made.rows),
        "changes": made.changes,
        "hosts": [
            {
                "host": row.host,
                "from": row.old,
                "to": row.new,
                "changes": row.wave > 0,
                "wave": row.wave,
                "node_from": row.node_old,
                "node_to": row.node_new,
                "layout_from": row.layout_old,
                "layout_to": row.layout_new,
                "expected_ms": None if row.expected is None else msgspec.to_builtins(row.expected),
                "total_ms": None if row.expected is None else row.expected.total_ms,
                "jobs": [msgspec.to_builtins(job) for job in row.jobs],
                "wait": row.wait,
            }
            for row in made.rows
        ],
    }


def plan_text(known: Known, made: Made) -> str:
    """The same for people."""
    waits = [f"{row.host} waits: {row.wait}" for row in made.rows if row.wait]
    head = []
    if made.to in (None, CALENDAR):
        ahead = made.decision.proposal
        head = ["The calendar has no change ahead." if ahead is None else _proposal_text(ahead, known)]
    if not made.changes:
        return "\n".join([*head, "No host changes its mode.", *waits])
    rows = [("host", "wave", "mode", "node record", "layout", "takes", "jobs to leave")]
    for row in made.rows:
        if not row.wave or row.expected is None:
            rows.append((row.host, "-", row.old or "unknown", row.node_old, row.layout_old, "-", ""))
            continue
        jobs = ", ".join(f"{job.job} ({job.kind.value})" for job in row.jobs[:6])
        more = f" and {len(row.jobs) - 6} more" if len(row.jobs) > 6 else ""
        rows.append(
            (
                row.host,
                str(row.wave),
                _arrow(row.old, row.new),
                _arrow(row.node_old, row.node_new),
                _arrow(row.layout_old or "as it is", row.layout_new or "as it is"),
                span(row.expected.total_ms),
                (jobs + more) or "none",
            )
        )
    first = next(row for row in made.rows if row.expected is not None).expected
    lines = _table(rows)
    if first is not None:
        lines.append(
            f"{count(made.changes, 'host')}, at most {known.modes.max_unavailable} at once, about "
            f"{span(took_ms(made.rows))} in all. A host: empty {span(first.drain_ms)}, cut "
            f"{span(first.cut_ms)}, Slurm {span(first.slurm_ms)}, engines {span(first.load_ms)}."
        )
    return "\n".join([*head, *lines, *waits])


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old or 'unknown'} > {new}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _local(ms: float, known: Known) -> str:
    """With the zone's short name: the clocks may change between two of them."""
    return _said(ms, known, "%Y-%m-%d %H:%M:%S %Z")


def _iso(ms: float, known: Known) -> str:
    """The same for programs: ISO 8601 with the offset."""
    return _said(ms, known, "%Y-%m-%dT%H:%M:%S%z")


def _said(ms: float, known: Known, form: str) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000.0, known.zone).strftime(form)
    except (OverflowError, ValueError, OSError):  # an order in Redis may say anything
        return f"no date ({ms:g} ms)"
