"""The policy worker against a real Valkey and scripted telemetry: what it opens, what it closes and why."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import redis

from hybridsched.core.codec import replay
from hybridsched.core.policy import CyclePolicy, IdlePolicy, PolicyKind
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState
from hybridsched.store.connection import async_client
from hybridsched.store.decisions import DecisionLog
from hybridsched.store.events import EventLog
from hybridsched.store.holds import HoldStore
from hybridsched.store.keys import Keys
from hybridsched.workers.policy import PolicyWorker
from hybridsched.workers.policy_stats import WorkerStatus
from tests.helpers import await_until
from tests.integration.policy_pool import MODEL, POOL, lane, leading, policy, replica, scripted

OPEN, CLOSED = GateState.OPEN, GateState.CLOSED
KEYS = Keys(POOL)


async def test_idle_replica_with_work_opens_with_a_budget_and_a_lease(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        seen = await pool.sees(OPEN, Reason.IDLE)
        assert seen.gate is not None
        assert seen.gate.budget.max_inflight == 64
        assert seen.gate.policy_version == 1
        assert 0 < seen.lease_ms <= 1000


async def test_gate_opens_only_after_the_window(valkey: redis.Redis, valkey_url: str) -> None:
    """The interval is 50 times the window: only the look at the end of the window can open it in time."""
    slow = policy(cycle=CyclePolicy(interval_ms=5000.0, lease_ms=20_000.0), idle=IdlePolicy(window_ms=100.0))
    async with scripted(valkey_url, given=slow) as pool, leading(valkey_url) as worker:
        await pool.say(lane(), replica(online_inflight=1, online_idle_ms=0.0))
        await pool.sees(CLOSED, Reason.ONLINE_ACTIVE)
        pool.replicas.clear()
        # One record with a nudge and none after it.
        stamp = await pool.telemetry.publish(replica(online_idle_ms=0.0), nudge=True)
        seen = await pool.sees(OPEN, Reason.IDLE)
        assert seen.gate is not None
        waited = seen.gate.at_ms - stamp
        assert 100.0 <= waited < 2000.0
        records = await DecisionLog(pool.client, POOL).read(lane="r0")
        assert [r.decisions[0].reason for r in records][-2:] == [Reason.IDLE_WINDOW, Reason.IDLE]
        assert worker.stats.cycles < 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"online_inflight": 2, "online_idle_ms": 0.0}, Reason.ONLINE_ACTIVE),
        ({"online_inflight": None}, Reason.TELEMETRY_MISSING),
        ({"engine": {"metrics_age_ms": 60_000.0}}, Reason.METRIC_STALE),
        ({"engine": {"metrics_age_ms": -5000.0}}, Reason.METRIC_MISSING),
        ({"engine": {"running": None}}, Reason.METRIC_MISSING),
        ({"engine": {"running": 3.0, "frozen_ms": 60_000.0}}, Reason.METRIC_FROZEN),
        ({"engine": {"healthy": 0.0}}, Reason.ENGINE_UNHEALTHY),
        ({"engine": {"running": 3.0}}, Reason.FOREIGN_LOAD),
    ],
)
async def test_an_open_gate_closes_with_the_reason(
    valkey: redis.Redis, valkey_url: str, change: dict[str, Any], reason: Reason
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane(offline_peak=0))
        await pool.sees(OPEN, Reason.IDLE)
        await pool.say(replica(**change))
        await pool.sees(CLOSED, reason)


async def test_silence_closes_as_stale_and_then_as_missing(valkey: redis.Redis, valkey_url: str) -> None:
    short = policy(idle=IdlePolicy(window_ms=1.0, max_telemetry_age_ms=200.0))
    async with scripted(valkey_url, given=short) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        pool.replicas.clear()
        await pool.sees(CLOSED, Reason.TELEMETRY_STALE)
        await pool.telemetry.withdraw("r0")
        await pool.sees(CLOSED, Reason.TELEMETRY_MISSING)


async def test_a_lane_without_a_worker_or_work_stays_closed(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica())
        await pool.sees(CLOSED, Reason.NO_WORK)
        await pool.say(lane(work=0))
        await pool.sees(CLOSED, Reason.NO_WORK)
        await pool.say(lane(work=1))
        await pool.sees(OPEN, Reason.IDLE)


async def test_a_claim_counts_before_its_worker_has_said_so(valkey: redis.Redis, valkey_url: str) -> None:
    """The record still says idle; the stream's pending list already holds the claim."""
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        stream = KEYS.online(MODEL, 1)
        valkey.xgroup_create(stream, "workers", "0", mkstream=True)
        entry = valkey.xadd(stream, {"id": "x"})
        valkey.xreadgroup("workers", "r0:abc", {stream: ">"})
        await pool.sees(CLOSED, Reason.ONLINE_ACTIVE)
        valkey.xack(stream, "workers", entry)
        valkey.xdel(stream, entry)
        await pool.sees(OPEN, Reason.IDLE)


async def test_requests_that_nobody_claims_close_every_lane_of_the_model(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        valkey.xadd(KEYS.online(MODEL, 0), {"id": "x", "accepted_ms": "0"})
        await pool.sees(CLOSED, Reason.ONLINE_QUEUED)


async def test_an_opening_is_refused_when_online_came_between_snapshot_and_publication(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool:
        await pool.say(replica(), lane())
        client = async_client(valkey_url)
        worker = PolicyWorker(client, POOL)
        assert await worker.lease.acquire()
        await worker.cycle()
        observe = worker._observer.look

        async def look_then_claim() -> Any:
            seen = await observe()
            valkey.incr(KEYS.gate_epoch("r0"))
            return seen

        valkey.delete(KEYS.gate("r0"))
        worker._observer.look = look_then_claim  # type: ignore[method-assign]
        decisions = await worker.cycle()
        assert [d.state for d in decisions] == [OPEN]
        assert (await pool.gate()).gate is None
        record = (await DecisionLog(client, POOL).read())[-1]
        assert record.outcomes != ("changed",)
        worker._observer.look = observe  # type: ignore[method-assign]
        await worker.cycle()
        assert (await pool.gate()).gate is not None
        await worker.events.close()
        await client.aclose()


async def test_a_hold_closes_at_once_and_a_release_opens(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane(), replica("r1"), lane("r1"))
        await pool.sees(OPEN, Reason.IDLE, "r1")
        holds = HoldStore(pool.client, POOL)
        mine = await holds.put(lane="r1", by="me", why="test")
        await pool.sees(CLOSED, Reason.HELD, "r1")
        await pool.sees(OPEN, Reason.IDLE, "r0")
        await holds.put(by="me", why="all", for_ms=300)
        await pool.sees(CLOSED, Reason.HELD, "r0")
        assert await holds.release([mine])
        await pool.sees(OPEN, Reason.IDLE, "r1")
        await pool.sees(OPEN, Reason.IDLE, "r0")


async def test_a_new_policy_is_taken_up_and_a_bad_one_is_not(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url) as pool, leading(valkey_url) as worker:
        await pool.say(replica(), lane())
        await pool.sees(CLOSED, Reason.POLICY_MISSING)
        assert "no policy is set" in worker.policy.problem
        await pool.policies.set(policy())
        seen = await pool.sees(OPEN, Reason.IDLE)
        valkey.set(KEYS.policy_current, b'{"name":"x","kind":"nonsense"}')
        await await_until(lambda: worker.policy.problem, what="the refusal")
        assert "nonsense" in worker.policy.problem
        cycles = worker.stats.cycles
        await await_until(lambda: worker.stats.cycles > cycles + 3, what="cycles with the old policy")
        seen = await pool.sees(OPEN, Reason.IDLE)
        assert seen.gate is not None
        assert seen.gate.policy_version == 1
        await pool.policies.set(policy(kind=PolicyKind.ONLINE_ONLY))
        seen = await pool.sees(CLOSED, Reason.POLICY_CLOSED)
        assert worker.policy.problem == ""


@pytest.mark.parametrize("lost", ["policy", "all"])
async def test_a_policy_that_is_gone_from_redis_closes_every_gate(
    valkey: redis.Redis, valkey_url: str, lost: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        # With the whole of Redis the operators' holds are gone too: nothing may open on a policy from memory.
        if lost == "policy":
            valkey.delete(KEYS.policy_current)
        else:
            valkey.flushall()
        await pool.say(replica(), lane())
        await pool.sees(CLOSED, Reason.POLICY_MISSING)
        await pool.policies.set(policy())
        await pool.sees(OPEN, Reason.IDLE)


async def test_speed_shortens_the_window_once(valkey: redis.Redis, valkey_url: str) -> None:
    async with (
        scripted(valkey_url, given=policy(idle=IdlePolicy(window_ms=1000.0))) as pool,
        leading(valkey_url, speed=10.0) as worker,
    ):
        await pool.say(replica(online_idle_ms=150.0), lane())
        await pool.sees(OPEN, Reason.IDLE)
        assert worker.policy.policy is not None
        assert worker.policy.policy.idle.window_ms == 100.0


async def test_stop_closes_the_gates_and_gives_the_leadership_up(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool:
        async with leading(valkey_url):
            await pool.say(replica(), lane())
            await pool.sees(OPEN, Reason.IDLE)
        seen = await pool.gate()
        assert seen.gate is None or seen.gate.state is CLOSED
        assert valkey.get(KEYS.leader) is None
        events = await EventLog(pool.client, POOL).read_all(kinds=["gate"])
        assert [e["state"] for e in events][-2:] == ["open", "closed"]
        assert all(set(e) == {"t", "lane", "state", "reason", "mono_s"} for e in events)


async def test_records_replay_to_the_same_decisions_and_status_is_published(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        await pool.say(replica(online_inflight=1, online_idle_ms=0.0))
        await pool.sees(CLOSED, Reason.ONLINE_ACTIVE)
        log = DecisionLog(pool.client, POOL)
        records = await log.read()
        assert len(records) >= 2
        assert [replay(record) for record in records] == [()] * len(records)
        raw = valkey.get(KEYS.policy_worker)
        status = msgspec.json.decode(raw, type=WorkerStatus)
        assert (status.policy, status.version) == ("test", 1)
        assert 0 < valkey.pttl(KEYS.policy_worker) <= 60_000


async def test_no_change_means_no_record_until_the_heartbeat(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url) as worker:
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        cycles = worker.stats.cycles
        await await_until(lambda: worker.stats.cycles > cycles + 10, what="ten cycles")
        records = await DecisionLog(pool.client, POOL).read()
        reasons = [r.decisions[0].reason for r in records if r.decisions]
        assert len(reasons) < 10


async def test_round_trips_do_not_depend_on_the_number_of_lanes(valkey: redis.Redis, valkey_url: str) -> None:
    counts = {}
    for lanes in (1, 8, 64):
        valkey.flushall()
        client = async_client(valkey_url)
        async with scripted(valkey_url, given=policy()) as pool:
            for i in range(lanes):
                await pool.say(replica(f"r{i}"), lane(f"r{i}"))
            worker = PolicyWorker(client, POOL)
            assert await worker.lease.acquire()
            for _ in range(3):
                await worker.cycle()
            await worker.events.flush()
            trips = 0
            for connection in [*client.connection_pool._available_connections]:
                send = connection.send_packed_command

                async def counted(*args: Any, _send: Any = send, **options: Any) -> Any:
                    nonlocal trips
                    trips += 1
                    return await _send(*args, **options)

                connection.send_packed_command = counted
            valkey.delete(*[KEYS.gate(f"r{i}") for i in range(lanes)])
            worker._record_due = worker._status_due = 0.0
            await worker.cycle()
            counts[lanes] = trips
            await worker.events.close()
        await client.aclose()
    # Two reads, one publication, one record.
    assert counts == dict.fromkeys(counts, 4)


async def test_the_standby_takes_over_when_the_leader_falls_silent(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url) as first:
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        async with leading(valkey_url) as second:
            await await_until(lambda: second.lease.leader, what="the standby to see the leader")
            assert not second.lease.token
            # The leader freezes: its cycles stop, its lease runs out.
            blocked = asyncio.Event()

            async def frozen() -> Any:
                await blocked.wait()
                raise redis.ConnectionError("woke up")

            first._observer.look = frozen  # type: ignore[method-assign]
            first._lead_due = float("inf")
            await await_until(lambda: second.lease.token, what="the standby to lead")
            stale = first.lease.token
            assert int(second.lease.token.split(":")[0]) == int(stale.split(":")[0]) + 1
            await await_until(lambda: second.stats.cycles > 1, what="cycles of the new leader")
            seen = await pool.sees(OPEN, Reason.IDLE)
            assert seen.gate is not None
            assert seen.gate.by == second.lease.token
            blocked.set()
