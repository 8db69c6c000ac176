"""Gates on a real Valkey: leases, fencing by leader and by epoch, and the watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from redis.asyncio import Redis

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState
from hybridsched.store.connection import async_client
from hybridsched.store.embedded import EmbeddedValkey
from hybridsched.store.gates import LANES_PER_CALL, GateReading, GateStore, Outcome
from hybridsched.store.keys import Keys
from hybridsched.store.leader import LeaderLease
from tests.helpers import await_until

POOL = "gates"
KEYS = Keys(POOL)
OPEN, CLOSED = GateState.OPEN, GateState.CLOSED
BUDGET = Budget(max_inflight=8, chunk_tokens=1000, slice_tokens=256)


def opened(lane: str = "r0", **changes: object) -> Gate:
    given = {"state": OPEN, "reason": Reason.IDLE, "budget": BUDGET, "policy_version": 3} | changes
    return Gate(lane=lane, **given)  # type: ignore[arg-type]


def closed(lane: str = "r0", reason: Reason = Reason.ONLINE_ACTIVE) -> Gate:
    return Gate(lane=lane, state=CLOSED, reason=reason, grace_ms=40.0)


@pytest.fixture
async def lease(client: Redis) -> LeaderLease:
    made = LeaderLease(client, POOL)
    assert await made.acquire()
    return made


@pytest.fixture
def gates(client: Redis) -> GateStore:
    return GateStore(client, POOL)


async def test_a_gate_comes_back_as_it_was_published_with_epoch_and_time(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    valkey.set(KEYS.gate_epoch("r0"), 7)
    outcome = await gates.publish(opened(), leader_token=lease.token, expected_epoch=7, lease_ms=5000)
    assert outcome is Outcome.CHANGED
    seen = await gates.read("r0")
    assert seen.gate is not None
    assert (seen.gate.state, seen.gate.reason, seen.gate.budget) == (OPEN, Reason.IDLE, BUDGET)
    assert (seen.gate.policy_version, seen.gate.epoch, seen.epoch) == (3, 7, 7)
    seconds, micros = valkey.time()
    assert 0 <= seconds * 1000 + micros / 1000 - seen.gate.at_ms < 5000
    assert 0 < seen.lease_ms <= 5000


async def test_no_gate_reads_as_none(gates: GateStore) -> None:
    seen = await gates.read("nowhere")
    assert (seen.gate, seen.epoch, seen.lease_ms) == (None, 0, 0.0)
    assert await gates.read_many([]) == {}


@pytest.mark.parametrize("stored", [b"", b"open", b'{"lane":"r0"}', b'{"lane":"r0","state":"ajar"}', b"[1]"])
async def test_what_is_no_gate_counts_as_none(gates: GateStore, valkey: redis.Redis, stored: bytes) -> None:
    valkey.set(KEYS.gate("r0"), stored, px=1000)
    assert (await gates.read("r0")).gate is None


async def test_a_renewal_extends_the_lease_and_keeps_the_time_of_the_change(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    await gates.publish(opened(), leader_token=lease.token, lease_ms=1000)
    before = await gates.read("r0")
    outcome = await gates.publish(opened(), leader_token=lease.token, lease_ms=60_000)
    after = await gates.read("r0")
    assert outcome is Outcome.RENEWED
    assert after.gate == before.gate
    assert after.lease_ms > 50_000


async def test_a_changed_budget_is_a_change(gates: GateStore, lease: LeaderLease) -> None:
    await gates.publish(opened(), leader_token=lease.token, lease_ms=1000)
    smaller = Budget(max_inflight=1, chunk_tokens=1, slice_tokens=1)
    outcome = await gates.publish(opened(budget=smaller), leader_token=lease.token, lease_ms=1000)
    assert outcome is Outcome.CHANGED
    gate = (await gates.read("r0")).gate
    assert gate is not None
    assert gate.budget == smaller


async def test_an_opening_decided_before_a_claim_is_refused_and_a_close_is_not(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    decided_on = (await gates.read("r0")).epoch
    valkey.incr(KEYS.gate_epoch("r0"))
    refused = await gates.publish(
        opened(), leader_token=lease.token, expected_epoch=decided_on, lease_ms=1000
    )
    assert refused is Outcome.EPOCH_MOVED
    assert (await gates.read("r0")).gate is None
    done = await gates.publish(closed(), leader_token=lease.token, expected_epoch=decided_on, lease_ms=1000)
    assert done is Outcome.CHANGED
    gate = (await gates.read("r0")).gate
    assert gate is not None
    assert (gate.state, gate.epoch) == (CLOSED, decided_on + 1)


async def test_a_stale_leader_can_neither_open_nor_close(
    gates: GateStore, client: Redis, valkey: redis.Redis
) -> None:
    first, second = LeaderLease(client, POOL), LeaderLease(client, POOL)
    assert await first.acquire()
    assert not await second.acquire()
    assert second.leader == first.token
    stale = first.token
    valkey.delete(KEYS.leader)  # its lease ran out
    assert await second.acquire()
    for gate in (opened(), closed()):
        assert await gates.publish(gate, leader_token=stale, lease_ms=1000) is Outcome.NOT_LEADER
    assert (await gates.read("r0")).gate is None
    assert await gates.publish(opened(), leader_token=second.token, lease_ms=1000) is Outcome.CHANGED
    assert await gates.publish(closed(), leader_token=stale, lease_ms=1000) is Outcome.NOT_LEADER
    gate = (await gates.read("r0")).gate
    assert gate is not None
    assert gate.state is OPEN


async def test_without_a_leader_nobody_opens(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    valkey.delete(KEYS.leader)
    assert await gates.publish(opened(), leader_token=lease.token, lease_ms=1000) is Outcome.NOT_LEADER
    assert await gates.publish(opened(), leader_token="", lease_ms=1000) is Outcome.NOT_LEADER


async def test_close_now_needs_no_leadership_and_defeats_openings_under_way(
    gates: GateStore, lease: LeaderLease
) -> None:
    decided_on = (await gates.read("r0")).epoch
    await gates.close_now("r0", reason=Reason.HELD, by="me")
    late = await gates.publish(opened(), leader_token=lease.token, expected_epoch=decided_on, lease_ms=1000)
    assert late is Outcome.EPOCH_MOVED
    gate = (await gates.read("r0")).gate
    assert gate is not None
    assert (gate.state, gate.reason, gate.by) == (CLOSED, Reason.HELD, "me")


async def test_the_fast_paths_close_keeps_its_time_while_the_policy_agrees(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    text = (
        b'{"epoch":1,"state":"closed","reason":"online_arrived","lane":"r0","at_ms":5.0,"by":"r0",'
        b'"grace_ms":0,"policy_version":3,"budget":{"max_inflight":0,"chunk_tokens":0,"slice_tokens":0}}'
    )
    valkey.set(KEYS.gate("r0"), text, px=100)
    same = closed(reason=Reason.ONLINE_ARRIVED)
    assert await gates.publish(same, leader_token=lease.token, lease_ms=60_000) is Outcome.RENEWED
    assert valkey.get(KEYS.gate("r0")) == text
    assert valkey.pttl(KEYS.gate("r0")) > 50_000
    other = closed(reason=Reason.ONLINE_ACTIVE)
    assert await gates.publish(other, leader_token=lease.token, lease_ms=60_000) is Outcome.CHANGED


async def test_many_lanes_in_one_pipeline_with_an_outcome_each(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    lanes = [f"lane-{i}" for i in range(2 * LANES_PER_CALL + 3)]
    valkey.incr(KEYS.gate_epoch(lanes[-1]))
    outcomes = await gates.publish_many(
        [opened(lane) for lane in lanes], leader_token=lease.token, lease_ms=5000
    )
    assert outcomes == [Outcome.CHANGED] * (len(lanes) - 1) + [Outcome.EPOCH_MOVED]
    seen = await gates.read_many(lanes)
    assert [lane for lane in lanes if seen[lane].gate is None] == [lanes[-1]]


async def test_an_awkward_lane_name_survives(gates: GateStore, lease: LeaderLease) -> None:
    name = 'a"b\\c/dé%s'
    await gates.publish(opened(name), leader_token=lease.token, lease_ms=1000)
    gate = (await gates.read(name)).gate
    assert gate is not None
    assert gate.lane == name


async def test_every_change_is_pushed_to_the_watch_in_order(gates: GateStore, lease: LeaderLease) -> None:
    called: list[Reason] = []
    async with gates.watch("r0", lambda gate: called.append(gate.reason), poll_ms=60_000) as watch:
        assert watch.current.state is CLOSED
        await await_until(lambda: watch.subscriptions, what="the subscription")
        reasons = [Reason.IDLE, Reason.HELD, Reason.FLOOR]
        await gates.publish(opened(), leader_token=lease.token, lease_ms=30_000)
        await await_until(lambda: watch.current.state is OPEN, what="the opening")
        await gates.publish(opened("other"), leader_token=lease.token, lease_ms=30_000)
        for reason in reasons[1:]:
            await gates.publish(closed(reason=reason), leader_token=lease.token, lease_ms=30_000)
        got = [await asyncio.wait_for(anext(watch), 5) for _ in reasons]
        assert [gate.reason for gate in got] == reasons
        assert called == reasons
        assert watch.lease_left_ms == 0.0


async def test_a_change_without_a_push_is_found_by_polling(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    async with gates.watch("r0", poll_ms=20) as watch:
        await gates.publish(opened(), leader_token=lease.token, lease_ms=30_000)
        await await_until(lambda: watch.current.state is OPEN, what="the opening")
        valkey.delete(KEYS.gate("r0"))  # as a lease's end does: no message comes
        await await_until(lambda: watch.current.state is CLOSED, what="the close")
        assert watch.current.reason is Reason.LEASE_EXPIRED
        # Written without a message.
        other = b'{"lane":"r0","state":"closed","reason":"held","at_ms":9e15}'
        valkey.set(KEYS.gate("r0"), other, px=5000)
        await await_until(lambda: watch.current.reason is Reason.HELD, what="the hold")


async def test_renewals_keep_a_watched_gate_open_beyond_its_first_lease(
    gates: GateStore, lease: LeaderLease
) -> None:
    async with gates.watch("r0", poll_ms=50) as watch:
        await gates.publish(opened(), leader_token=lease.token, lease_ms=400)
        await await_until(lambda: watch.current.state is OPEN, what="the opening")
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            await gates.publish(opened(), leader_token=lease.token, lease_ms=400)
            await asyncio.sleep(0.05)
        assert watch.current.state is OPEN
        changes = [gate async for gate in _drain(watch)]
        assert [gate.state for gate in changes] == [OPEN]


async def _drain(watch: object) -> AsyncIterator[Gate]:
    while watch._changes:  # type: ignore[attr-defined]
        yield watch._changes.popleft()  # type: ignore[attr-defined]


async def test_an_older_opening_does_not_undo_a_close() -> None:
    """Pushes and polls come on two connections: what arrives late must not open."""
    client = async_client("redis://127.0.0.1:1")
    watch = GateStore(client, POOL).watch("r0")
    watch._pushed(b'{"lane":"r0","state":"closed","reason":"online_arrived","at_ms":100.0,"epoch":2}')
    watch._pushed(b'{"lane":"r0","state":"open","reason":"idle","at_ms":99.0,"epoch":1}')
    assert watch.current.state is CLOSED
    watch._pushed(b"not a gate")
    assert watch.current.reason is Reason.ONLINE_ARRIVED
    await client.aclose()


def _message(state: str, *, at_ms: float, epoch: int) -> bytes:
    return f'{{"lane":"r0","state":"{state}","reason":"idle","at_ms":{at_ms},"epoch":{epoch}}}'.encode()


async def test_an_opening_of_an_older_epoch_does_not_undo_a_close_of_the_same_moment() -> None:
    client = async_client("redis://127.0.0.1:1")
    watch = GateStore(client, POOL).watch("r0")
    watch._pushed(_message("closed", at_ms=100, epoch=3))
    watch._pushed(_message("open", at_ms=100, epoch=2))
    assert watch.current.state is CLOSED
    watch._pushed(_message("open", at_ms=100, epoch=3))
    assert watch.current.state is OPEN
    # Redis was emptied: the epochs begin anew, and what comes is later than all before.
    watch._pushed(_message("closed", at_ms=101, epoch=3))
    watch._pushed(_message("open", at_ms=102, epoch=0))
    assert watch.current.state is OPEN
    await client.aclose()


async def test_a_polled_lease_counts_from_when_it_was_asked_for() -> None:
    client = async_client("redis://127.0.0.1:1")
    watch = GateStore(client, POOL).watch("r0")
    now_ms = time.monotonic() * 1000.0
    watch._polled(GateReading(gate=opened(), epoch=0, lease_ms=60_000.0), now_ms - 20_000.0)
    assert watch.current.state is OPEN
    assert watch.lease_left_ms <= 40_000.0
    watch._polled(GateReading(gate=opened(), epoch=0, lease_ms=10_000.0), now_ms - 20_000.0)
    assert (watch.current.reason, watch.lease_left_ms) == (Reason.LEASE_EXPIRED, 0.0)
    assert [gate.state async for gate in _drain(watch)] == [OPEN, CLOSED]
    await client.aclose()


async def test_a_lease_that_ended_is_told_also_where_the_gate_opens_again_before_the_timer_ran() -> None:
    client = async_client("redis://127.0.0.1:1")
    watch = GateStore(client, POOL).watch("r0", provisional_ms=1.0)
    watch._pushed(_message("open", at_ms=1, epoch=0))
    time.sleep(0.01)  # the loop is held up: no timer runs
    assert watch.current.state is CLOSED
    watch._pushed(_message("open", at_ms=1, epoch=0))
    assert [gate.state async for gate in _drain(watch)] == [OPEN, CLOSED, OPEN]
    await client.aclose()


async def test_the_lease_ends_during_an_outage_and_the_watch_comes_back(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path) as server:
        client = async_client(server.url)
        lease = LeaderLease(client, POOL)
        gates = GateStore(client, POOL)
        assert await lease.acquire()
        async with gates.watch("r0", poll_ms=50) as watch:
            await gates.publish(opened(grace_ms=12.0), leader_token=lease.token, lease_ms=600)
            await await_until(lambda: watch.current.state is OPEN, what="the opening")
            await await_until(lambda: watch.lease_left_ms > 300, what="the lease to be read")
            server.kill()
            gate = await asyncio.wait_for(anext(watch), 5)
            while gate.state is OPEN:
                gate = await asyncio.wait_for(anext(watch), 5)
            assert gate.reason is Reason.LEASE_EXPIRED
            assert gate.grace_ms == 12.0
            server.start()

            async def publish() -> bool:
                try:
                    await lease.acquire()
                    await gates.publish(opened(), leader_token=lease.token, lease_ms=5000)
                except (redis.RedisError, OSError):
                    return False
                return watch.current.state is OPEN

            await await_until(publish, what="the gate to open again")
        assert watch.outages > 0
        await client.aclose()


async def test_a_new_budget_or_reason_leaves_the_time_of_the_state(
    gates: GateStore, lease: LeaderLease, valkey: redis.Redis
) -> None:
    token = {"leader_token": lease.token, "lease_ms": 60_000.0}

    async def publish(gate: Gate) -> Gate:
        assert await gates.publish(gate, **token) is Outcome.CHANGED  # type: ignore[arg-type]
        now = (await gates.read("r0")).gate
        assert now is not None
        return now

    first = await publish(closed())
    assert first.since_ms == first.at_ms
    other_reason = await publish(closed(reason=Reason.FOREIGN_LOAD))
    assert other_reason.at_ms > first.at_ms
    assert other_reason.since_ms == first.since_ms
    begun = await publish(opened())
    assert begun.since_ms == begun.at_ms
    wider = await publish(opened(budget=Budget(max_inflight=9, chunk_tokens=1, slice_tokens=0)))
    assert wider.at_ms > begun.at_ms
    assert wider.since_ms == begun.since_ms
    ended = await publish(closed())
    assert ended.since_ms == ended.at_ms
