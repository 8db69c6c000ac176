"""A pool at one moment, as `pool status` and `top` show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hybridsched.cli.words import span
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState, LaneView, ReplicaView, Signal, Snapshot
from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyError, decode_policy
from hybridsched.workers.policy_observe import Observer
from hybridsched.workers.policy_stats import WorkerStatus

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from rich.console import RenderableType

ALIVE_MS = 3000.0
"""A policy worker that has said nothing for this long counts as dead: six times its interval of saying so."""


async def look(client: Redis, pool: str, observer: Observer | None = None) -> dict[str, Any]:
    """The pool as the JSON document of `pool status --json`. Pass the observer again to save round trips."""
    observer = observer or Observer(client, pool)
    seen = await observer.look()
    if seen.look_again:
        seen = await observer.look()
    raw, leader = await client.mget(Keys(pool).policy_worker, Keys(pool).leader)
    problem = ""
    policy: PoolPolicy | None = None
    try:
        policy = decode_policy(seen.policy)
    except PolicyError as error:
        problem = str(error)
    snapshot = seen.snapshot
    replicas = {view.replica: view for view in snapshot.replicas}
    return {
        "schema": 1,
        "pool": pool,
        "at_ms": snapshot.now_ms,
        "policy": None
        if policy is None
        else {"name": policy.name, "kind": policy.kind, "version": policy.version},
        "policy_problem": problem,
        "policy_worker": _worker(raw, leader, snapshot.now_ms),
        "holds": [msgspec.to_builtins(hold) for hold in standing(snapshot)],
        "queues": [
            {"model": q.model, "depth": q.depth.value, "oldest_wait_ms": q.oldest_wait_ms.value}
            for q in snapshot.queues
        ],
        "lanes": [_lane(view, replicas.get(view.replica), snapshot.now_ms) for view in snapshot.lanes],
    }


def standing(snapshot: Snapshot) -> list[Any]:
    """Holds whose time is not over."""
    return [h for h in snapshot.holds if h.until_ms is None or h.until_ms > snapshot.now_ms]


def gate_now(view: LaneView) -> Gate:
    """The lane's gate; a closed one in the place of none."""
    return view.gate or Gate(lane=view.lane, state=GateState.CLOSED, reason=Reason.LEASE_EXPIRED)


def _worker(raw: Any, leader: Any, now_ms: float) -> dict[str, Any] | None:
    if raw is None:
        return None
    try:
        status = msgspec.json.decode(raw, type=WorkerStatus)
    except msgspec.MsgspecError:
        return None
    age = now_ms - status.at_ms
    return {
        **msgspec.to_builtins(status),
        "age_ms": age,
        "alive": age <= ALIVE_MS and leader == status.leader.encode(),
    }


def _lane(view: LaneView, replica: ReplicaView | None, now_ms: float) -> dict[str, Any]:
    gate = gate_now(view)
    found: dict[str, Any] = {
        "lane": view.lane,
        "replica": view.replica,
        "model": None if replica is None else replica.model,
        "state": gate.state.value,
        "reason": gate.reason.value,
        "since_ms": now_ms - gate.at_ms if view.gate is not None else None,
        "budget": msgspec.to_builtins(gate.budget),
        "policy_version": gate.policy_version,
        "epoch": view.epoch,
        "offline_inflight": view.offline_inflight.value,
        "work": view.work.value,
        "telemetry_age_ms": None if replica is None else replica.online_inflight.age_ms,
    }
    for name in (
        "online_inflight",
        "engine_running",
        "engine_waiting",
        "kv_use",
        "ttft_p99_ms",
        "tpot_p99_ms",
    ):
        signal: Signal | None = None if replica is None else getattr(replica, name)
        found[name] = None if signal is None else signal.value
    found["online_idle_ms"] = None if replica is None else _idle_ms(replica)
    return found


def _idle_ms(replica: ReplicaView) -> float | None:
    """How long the replica has been idle by now; 0 while it is busy."""
    idle = replica.online_idle_ms
    if idle.value is None or idle.age_ms is None:
        return None
    return 0.0 if (replica.online_inflight.value or 0.0) > 0 else idle.value + idle.age_ms


def render(status: dict[str, Any]) -> RenderableType:
    """The same for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("lane", "model", "gate", "reason", "since", "budget"):
        table.add_column(title)
    for title in ("online", "idle for", "offline", "work", "running", "waiting", "KV"):
        table.add_column(title, justify="right")
    for lane in status["lanes"]:
        is_open = lane["state"] == "open"
        table.add_row(
            lane["lane"],
            lane["model"] or "?",
            Text(lane["state"], style="green" if is_open else "yellow"),
            lane["reason"],
            span(lane["since_ms"]) if lane["since_ms"] is not None else "-",
            str(lane["budget"]["max_inflight"]) if is_open else "-",
            _cell(lane["online_inflight"]),
            span(lane["online_idle_ms"]) if lane["online_idle_ms"] is not None else "?",
            _cell(lane["offline_inflight"]),
            _cell(lane["work"]),
            _cell(lane["engine_running"]),
            _cell(lane["engine_waiting"]),
            "?" if lane["kv_use"] is None else f"{lane['kv_use'] * 100:.0f} %",
        )
    lines = [Text(line) for line in headline(status)]
    return Group(*lines, Text(""), table) if status["lanes"] else Group(*lines)


def headline(status: dict[str, Any]) -> list[str]:
    """What is said above the table of lanes."""
    policy, worker = status["policy"], status["policy_worker"]
    lines = [f"Pool {status['pool']}"]
    if status["policy_problem"]:
        lines.append(f"Policy: {status['policy_problem']}")
    elif policy is None:
        lines.append("Policy: none, so every gate is closed; set one with `hybridsched pool policy set FILE`")
    else:
        lines.append(f"Policy: {policy['name']} ({policy['kind']}), version {policy['version']}")
    if worker is None:
        lines.append(
            "Policy worker: none seen in the last minute; start one with `hybridsched worker policy`"
        )
    elif not worker["alive"]:
        lines.append(f"Policy worker: none leads; the last one spoke {span(worker['age_ms'])} ago")
    else:
        cycle = worker["cycle_ms"]
        lines.append(
            f"Policy worker: leading, {worker['cycles']} cycles, "
            f"p50 {cycle['p50']:.1f} ms, p99 {cycle['p99']:.1f} ms"
        )
        if worker["problem"]:
            lines.append(f"  not taken up: {worker['problem']}")
    for hold in status["holds"]:
        where = f"lane {hold['lane']}" if hold["lane"] else "the whole pool"
        until = "" if hold["until_ms"] is None else f", for {span(hold['until_ms'] - status['at_ms'])} more"
        lines.append(f"Hold: {where}, by {hold['by']}: {hold['why']}{until}")
    for queue in status["queues"]:
        wait = "" if not queue["oldest_wait_ms"] else f", the oldest for {span(queue['oldest_wait_ms'])}"
        lines.append(f"Queue {queue['model']}: {_cell(queue['depth'])} unclaimed{wait}")
    if not status["lanes"]:
        lines.append(
            "No replica or lane has published anything; start `hybridsched worker online` and `offline`"
        )
    return lines


def _cell(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"
