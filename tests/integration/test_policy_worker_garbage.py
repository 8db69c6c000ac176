"""The policy worker among garbage: what cannot be read closes its own lane, and the others stay open."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState
from hybridsched.store.keys import Keys
from hybridsched.workers.policy import PolicyWorker
from tests.helpers import await_until
from tests.integration.policy_pool import POOL, lane, leading, policy, replica, scripted

OPEN, CLOSED = GateState.OPEN, GateState.CLOSED
KEYS = Keys(POOL)
DEEP = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HUGE = b"9" * 400


async def more_cycles(worker: PolicyWorker, count: int = 3) -> None:
    until = worker.stats.cycles + count

    async def run() -> bool:
        return worker.stats.cycles >= until

    await await_until(run, timeout_s=10, what="the worker goes on")


async def test_garbage_about_one_lane_leaves_the_other_open(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url) as worker:
        await pool.say(replica(), lane(), replica("r1"), lane("r1"))
        await pool.sees(OPEN, Reason.IDLE)
        await pool.sees(OPEN, Reason.IDLE, "r1")
        opened = await pool.gate("r1")
        assert opened.gate is not None
        # Nobody publishes r0 any more: its records are ours to spoil.
        del pool.replicas["r0"], pool.lanes["r0"]
        good = valkey.get(KEYS.telemetry("r0"))
        assert isinstance(good, bytes)
        for bad in (b"", b"\xff", DEEP, good.replace(b'"online_inflight":0', b'"online_inflight":' + HUGE)):
            valkey.set(KEYS.telemetry("r0"), bad)
            valkey.set(KEYS.lane_telemetry("r0"), bad)
            await more_cycles(worker)
            assert (await pool.gate("r0")).gate is None or (await pool.sees(CLOSED, Reason.TELEMETRY_MISSING))
        valkey.zadd(KEYS.replica_index, {b"\xff\xfe": 1e15, b"": 1e15})
        valkey.hset(KEYS.holds, "r0", DEEP)
        await pool.sees(CLOSED, Reason.HELD)
        seen = await pool.sees(OPEN, Reason.IDLE, "r1")
        assert seen.gate is not None
        assert seen.gate.at_ms == opened.gate.at_ms, "it has stood open all the time"


async def test_a_record_cannot_speak_for_another_replica(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(online_inflight=2, online_idle_ms=0.0), lane())
        await pool.sees(CLOSED, Reason.ONLINE_ACTIVE)
        idle = replica("zz")
        await pool.say(idle)
        text = valkey.get(KEYS.telemetry("zz"))
        assert isinstance(text, bytes)
        del pool.replicas["zz"]
        valkey.set(KEYS.telemetry("zz"), text.replace(b'"zz"', b'"r0"'))
        await pool.say(lane(work=11))
        await pool.sees(CLOSED, Reason.ONLINE_ACTIVE)


async def test_an_epoch_that_is_no_count_closes_the_lane_and_is_mended(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        valkey.set(KEYS.gate_epoch("r0"), b"\xffabc")

        async def mended() -> bool:
            return bytes(valkey.get(KEYS.gate_epoch("r0")) or b"").isdigit()

        await await_until(mended, timeout_s=10, what="the epoch is a count again")
        await pool.sees(OPEN, Reason.IDLE)


@pytest.mark.parametrize(
    "key", [KEYS.holds, KEYS.replica_index, KEYS.lane_index, KEYS.policy_current, KEYS.leader, KEYS.decisions]
)
async def test_a_key_of_another_type_does_not_end_the_worker(
    valkey: redis.Redis, valkey_url: str, key: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url) as worker:
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        valkey.delete(key)
        valkey.setbit(key, 7, 1) if key in (KEYS.holds, KEYS.decisions) else valkey.rpush(key, "x")
        if key == KEYS.holds:
            await pool.sees(CLOSED, Reason.HELD)
        if key == KEYS.decisions:
            worker._recorded.clear()  # each cycle wants to write until the log can be written
            await more_cycles(worker)
            await pool.sees(OPEN, Reason.IDLE)
        before = worker.pace.nudges
        valkey.publish(KEYS.telemetry_channel, b"\xff\xfe")
        valkey.publish(KEYS.policy_channel, DEEP[:1000])

        async def heard() -> bool:
            return worker.pace.nudges > before

        await await_until(heard, timeout_s=10, what="nudges are still heard")
        valkey.delete(key)
        if key == KEYS.policy_current:
            await pool.policies.set(policy())
        await pool.say(replica(), lane(work=12))
        await pool.sees(OPEN, Reason.IDLE)


async def test_what_nobody_foresaw_costs_cycles_and_not_the_worker(
    valkey: redis.Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url) as worker:
        await pool.say(replica(), lane())
        await pool.sees(OPEN, Reason.IDLE)
        look, failed = worker._observer.look, 0

        async def broken() -> Any:
            nonlocal failed
            failed += 1
            raise ValueError("garbage of a new kind")

        monkeypatch.setattr(worker._observer, "look", broken)

        async def gone() -> bool:
            return failed > 1 and (await pool.gate()).gate is None

        await await_until(gone, timeout_s=10, what="the gate has died with its lease")
        monkeypatch.setattr(worker._observer, "look", look)
        await pool.sees(OPEN, Reason.IDLE)
