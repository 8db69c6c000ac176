"""A pool at one moment, as `pool status` and `top` show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from hybridsched.cli.slurm_view import jobs_on, look_at_slurm, slurm_lines
from hybridsched.cli.words import natural, own_engine_stands, span
from hybridsched.core.policy import IdlePolicy, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState, LaneView, ReplicaView, Signal, Snapshot
from hybridsched.store.found import answer_or
from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyError, decode_policy
from hybridsched.store.telemetry import INDEX_LIFE_MS, SIGNED_OFF_MS, LaneRecord, decode_lane
from hybridsched.workers.policy_observe import Observer
from hybridsched.workers.policy_stats import read_status

if TYPE_CHECKING:
    from redis.asyncio import Redis

_SHOWN_MS = INDEX_LIFE_MS - SIGNED_OFF_MS
"""For so long after its last word a lane is shown; one that has signed off counts as silent for longer."""

ALIVE_MS = 3000.0
"""A policy worker that has said nothing for this long counts as dead: six times its interval of saying so."""


async def look(client: Redis, pool: str, observer: Observer | None = None) -> dict[str, Any]:
    """The pool as the JSON document of `pool status --json`. Pass the observer again to save round trips."""
    observer = observer or Observer(client, pool)
    seen = await observer.look()
    if seen.look_again:
        seen = await observer.look()
    raw, leader = await client.mget(Keys(pool).policy_worker, Keys(pool).leader)
    spoke = await _last_words(client, Keys(pool))
    problem = ""
    policy: PoolPolicy | None = None
    try:
        policy = decode_policy(seen.policy)
    except PolicyError as error:
        problem = str(error)
    snapshot = seen.snapshot
    records = await _lane_records(client, pool, [view.lane for view in snapshot.lanes])
    replicas = {view.replica: view for view in snapshot.replicas}
    limits = IdlePolicy() if policy is None else policy.idle
    slurm = await look_at_slurm(client, pool, snapshot.now_ms, None if policy is None else policy.slurm)
    jobs = {} if slurm is None else await jobs_on(client, pool, [view.lane for view in snapshot.lanes])
    return {
        "schema": 1,
        "pool": pool,
        "at_ms": snapshot.now_ms,
        "policy": None
        if policy is None
        else {"name": policy.name, "kind": policy.kind, "version": policy.version},
        "policy_problem": problem,
        "policy_worker": _worker(raw, leader, snapshot.now_ms),
        "slurm": slurm,
        "holds": [msgspec.to_builtins(hold) for hold in standing(snapshot)],
        "queues": [
            {"model": q.model, "depth": q.depth.value, "oldest_wait_ms": q.oldest_wait_ms.value}
            for q in snapshot.queues
        ],
        "lanes": [
            _lane(view, replicas.get(view.replica), gone, snapshot.now_ms, limits)
            | _words(records.get(view.lane))
            | {"slurm_job": jobs.get(view.lane)}
            for view in sorted(snapshot.lanes, key=lambda view: natural(view.lane))
            if (gone := _gone_ms(view, replicas, spoke, snapshot.now_ms)) is None
            or gone <= INDEX_LIFE_MS - SIGNED_OFF_MS
        ],
    }


def _words(record: LaneRecord | None) -> dict[str, str]:
    """What a lane's worker says beside numbers: why it can run nothing, and whether its engine stands."""
    return {
        "worker_problem": "" if record is None else record.problem,
        "engine_stands": "" if record is None else record.stands,
    }


async def _lane_records(client: Redis, pool: str, lanes: list[str]) -> dict[str, LaneRecord]:
    """What the offline workers of lanes say."""
    if not lanes:
        return {}
    keys = Keys(pool)
    found: Any = await client.mget([keys.lane_telemetry(lane) for lane in lanes])
    records = (decode_lane(raw) for raw in found)
    return {lane: record for lane, record in zip(lanes, records, strict=True) if record is not None}


async def _last_words(client: Redis, keys: Keys) -> dict[str, float]:
    """Server time (ms) at which each replica or lane last published a record."""
    pipe = client.pipeline(transaction=False)
    for index in (keys.lane_index, keys.replica_index):
        pipe.zrange(index, 0, -1, withscores=True)
    nothing: list[tuple[bytes, float]] = []
    found: dict[str, float] = {}
    for answer in await pipe.execute(raise_on_error=False):
        for name, at_ms in answer_or(answer, nothing, "an index of replicas or lanes"):
            found[name.decode("utf-8", "replace")] = at_ms
    return found


def _gone_ms(
    view: LaneView, replicas: Mapping[str, ReplicaView], spoke: Mapping[str, float], now_ms: float
) -> float | None:
    """Time since the last word of a lane's replica whose record is gone; None: it is there.

    It is shown for `_SHOWN_MS` after that. A lane whose own worker still speaks is not gone.
    """
    if view.replica in replicas or view.work.value is not None:
        return None
    at_ms = spoke.get(view.replica, spoke.get(view.lane))
    return None if at_ms is None else max(0.0, now_ms - at_ms)


def standing(snapshot: Snapshot) -> list[Any]:
    """Holds whose time is not over."""
    return [hold for hold in snapshot.holds if hold.stands(snapshot.now_ms)]


def gate_now(view: LaneView) -> Gate:
    """The lane's gate; a closed one in the place of none."""
    return view.gate or Gate(lane=view.lane, state=GateState.CLOSED, reason=Reason.LEASE_EXPIRED)


def _worker(raw: Any, leader: Any, now_ms: float) -> dict[str, Any] | None:
    status = read_status(raw)
    if status is None:
        return None
    age = now_ms - status.at_ms
    return {
        **msgspec.to_builtins(status),
        "age_ms": age,
        "alive": age <= ALIVE_MS and leader == status.leader.encode(),
    }


def _lane(
    view: LaneView, replica: ReplicaView | None, gone_ms: float | None, now_ms: float, limits: IdlePolicy
) -> dict[str, Any]:
    gate = gate_now(view)
    # A gate of an earlier release does not say since when its state has been so.
    since = gate.since_ms or gate.at_ms
    found: dict[str, Any] = {
        "lane": view.lane,
        "replica": view.replica,
        "own_engine": view.own,
        "model": None if replica is None else replica.model,
        "state": gate.state.value,
        "reason": gate.reason.value,
        "since_ms": now_ms - since if view.gate is not None else None,
        "changed_ms": now_ms - gate.at_ms if view.gate is not None else None,
        "gone_ms": gone_ms,
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
    found["offline_stale"] = _old(view.offline_inflight, limits.max_telemetry_age_ms)
    found["online_stale"] = replica is not None and _old(replica.online_inflight, limits.max_telemetry_age_ms)
    found["engine_stale"] = replica is not None and _old(replica.engine_running, limits.max_metric_age_ms)
    found["online_idle_ms"] = None if replica is None else _idle_ms(replica)
    return found


def _old(signal: Signal, limit_ms: float) -> bool:
    """Whether the number is there and says nothing of now: its worker is silent, or its engine is gone."""
    return signal.value is not None and not signal.known(limit_ms)


def _idle_ms(replica: ReplicaView) -> float | None:
    """How long the replica has been idle by now; 0 while it is busy."""
    idle = replica.online_idle_ms
    if idle.value is None or idle.age_ms is None:
        return None
    return 0.0 if (replica.online_inflight.value or 0.0) > 0 else idle.value + idle.age_ms


def headline(status: dict[str, Any]) -> list[str]:
    """What is said above the table of lanes."""
    worker = status["policy_worker"]
    lines = [f"Pool {status['pool']}", _policy_line(status)]
    if worker is None:
        lines.append(
            "Policy worker: none seen in the last minute; start one with `hybridsched worker policy`"
        )
    elif not worker["alive"]:
        lines.append(f"Policy worker: none leads; the last one spoke {span(worker['age_ms'])} ago")
    else:
        cycle = worker["cycle_ms"]
        took = f"p50 {cycle.get('p50', 0.0):.1f} ms, p99 {cycle.get('p99', 0.0):.1f} ms"
        lines.append(
            f"Policy worker: leading, {worker['cycles']} cycles, {took}"
            if worker["cycles"]
            else "Policy worker: leading, in its first cycle"
        )
        if worker["problem"] and worker["version"]:
            lines.append(f"  not taken up: {worker['problem']}")
    lines += slurm_lines(status.get("slurm"))
    for hold in status["holds"]:
        where = f"lane {hold['lane']}" if hold["lane"] else "the whole pool"
        until = "" if hold["until_ms"] is None else f", for {span(hold['until_ms'] - status['at_ms'])} more"
        lines.append(f"Hold {hold['id']}: {where}, by {hold['by']}: {hold['why']}{until}")
    for queue in status["queues"]:
        wait = "" if not queue["oldest_wait_ms"] else f", the oldest for {span(queue['oldest_wait_ms'])}"
        lines.append(f"Queue {queue['model']}: {cell(queue['depth'])} unclaimed{wait}")
    lines += _work_lines(status["lanes"])
    lines += [
        f"Lane {lane['lane']}: its offline worker waits: {lane['worker_problem']}"
        for lane in status["lanes"]
        if lane.get("worker_problem")
    ]
    lines += [
        f"Lane {lane['lane']}: {own_engine_stands(lane['engine_stands'], lane['offline_inflight'])}"
        for lane in status["lanes"]
        if lane.get("engine_stands")
    ]
    if not status["lanes"]:
        lines.append(
            "No replica or lane has published anything; start `hybridsched worker online` and `offline`"
        )
    return lines


def _work_lines(lanes: list[dict[str, Any]]) -> list[str]:
    """Offline work by model, said once: each lane counts what the pool has queued as its own to run."""
    most: dict[str, tuple[float, int]] = {}
    for lane in lanes:
        if lane["work"] is not None and lane["gone_ms"] is None:
            work, count = most.get(lane["model"] or "?", (0.0, 0))
            most[lane["model"] or "?"] = (max(work, lane["work"]), count + 1)
    return [
        f"Offline work {model}: about {work:,.0f} lines, shared by {count} lane{'s' if count > 1 else ''}"
        for model, (work, count) in sorted(most.items())
        if work
    ]


def _policy_line(status: dict[str, Any]) -> str:
    """The policy in force, by the word of the worker that leads; without one, what stands in Redis."""
    policy, worker = status["policy"], status["policy_worker"]
    stored = "" if policy is None else f"{policy['name']} ({policy['kind']}), version {policy['version']}"
    if worker is None or not worker["alive"]:
        if status["policy_problem"]:
            return f"Policy: {status['policy_problem']}"
        return f"Policy: {stored or 'none; set one with `hybridsched pool policy set FILE`'}"
    if not worker["version"]:
        coming = f"; {stored} is about to be taken up" if policy is not None and not worker["problem"] else ""
        why = f": {worker['problem']}" if worker["problem"] else ""
        return f"Policy: none in force, so every gate is closed{coming}{why}"
    if policy is not None and policy["version"] == worker["version"]:
        return f"Policy: {stored}"
    said = f"Policy: {worker['policy']}, version {worker['version']}, is in force"
    return said if policy is None or worker["problem"] else f"{said}; {stored} is about to be taken up"


def cell(value: float | None) -> str:
    """A count as a table shows it."""
    return "?" if value is None else f"{value:.0f}"
