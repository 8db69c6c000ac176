"""A pool whose workers are played by the test: it says what they publish and looks at what is decided."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from hybridsched.core.policy import CyclePolicy, EnginePolicy, IdlePolicy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState
from hybridsched.store.connection import async_client
from hybridsched.store.gates import GateReading, GateStore
from hybridsched.store.policy import PolicyStore
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import EngineRecord, LaneRecord, ReplicaRecord, TelemetryStore
from hybridsched.workers.policy import PolicyWorker
from tests.helpers import await_until

POOL = "scripted"
MODEL = "m"


def policy(**changes: Any) -> PoolPolicy:
    """An idle-window policy with short times, and a lease long enough for a slow machine."""
    given: dict[str, Any] = {
        "name": "test",
        "kind": PolicyKind.IDLE_WINDOW,
        "cycle": CyclePolicy(interval_ms=50.0, lease_ms=1000.0),
        "idle": IdlePolicy(window_ms=100.0),
        "engine": EnginePolicy(kv_tokens=100_000),
    }
    return PoolPolicy(**(given | changes))


def replica(name: str = "r0", **changes: Any) -> ReplicaRecord:
    """A healthy, idle replica with a shared lane."""
    engine = {
        "metrics_age_ms": 0.0,
        "running": 0.0,
        "waiting": 0.0,
        "kv_use": 0.0,
        "frozen_ms": 0.0,
        "healthy": 1.0,
        "health_age_ms": 0.0,
    } | changes.pop("engine", {})
    given = {"online_inflight": 0, "online_idle_ms": 1000.0} | changes
    return ReplicaRecord(replica=name, model=MODEL, lane=name, engine=EngineRecord(**engine), **given)


def lane(name: str = "r0", **changes: Any) -> LaneRecord:
    """A lane with work and nothing in the engine."""
    given = {"offline_inflight": 0, "work": 10, "worker": "w"} | changes
    return LaneRecord(lane=name, replica=name, **given)


class ScriptedPool:
    """Publishes the records again and again as workers do, so that they do not grow stale."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.telemetry = TelemetryStore(client, POOL)
        self.gates = GateStore(client, POOL)
        self.policies = PolicyStore(client, POOL)
        self.replicas: dict[str, ReplicaRecord] = {}
        self.lanes: dict[str, LaneRecord] = {}

    async def say(self, *records: ReplicaRecord | LaneRecord) -> None:
        """Publish records with a nudge, and keep publishing them."""
        for record in records:
            if isinstance(record, ReplicaRecord):
                self.replicas[record.replica] = record
                await self.telemetry.publish(record, nudge=True)
            else:
                self.lanes[record.lane] = record
                await self.telemetry.publish_lane(record, nudge=True)

    async def repeat(self) -> None:
        while True:
            for record in list(self.replicas.values()):
                await self.telemetry.publish(record)
            for work in list(self.lanes.values()):
                await self.telemetry.publish_lane(work)
            await asyncio.sleep(0.05)

    async def gate(self, name: str = "r0") -> GateReading:
        return await self.gates.read(name)

    async def sees(self, state: GateState, reason: Reason, name: str = "r0") -> GateReading:
        """Wait until the gate says this."""
        seen: GateReading | None = None

        async def check() -> bool:
            nonlocal seen
            seen = await self.gate(name)
            return seen.gate is not None and (seen.gate.state, seen.gate.reason) == (state, reason)

        try:
            await await_until(check, timeout_s=5, what=f"gate {name} {state} {reason}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen}") from None
        assert seen is not None
        return seen


@asynccontextmanager
async def scripted(url: str, *, given: PoolPolicy | None = None) -> AsyncIterator[ScriptedPool]:
    """The pool, with a policy, without a policy worker."""
    client = async_client(url)
    pool = ScriptedPool(client)
    if given is not None:
        await pool.policies.set(given)
    repeating = asyncio.create_task(pool.repeat())
    try:
        yield pool
    finally:
        await end_tasks(repeating)
        await client.aclose()


@asynccontextmanager
async def leading(url: str, **options: Any) -> AsyncIterator[PolicyWorker]:
    """A policy worker at work on the pool."""
    client = async_client(url)
    worker = PolicyWorker(client, POOL, **options)
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield worker
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)
        await client.aclose()
