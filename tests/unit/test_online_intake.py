"""Room for online requests, who else is there, and the policy that a worker follows."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
import structlog

from hybridsched.core.policy import EnginePolicy, IdlePolicy, OnlinePolicy, PolicyKind, PoolPolicy
from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.protocol import EngineInfo
from hybridsched.store.connection import StoreError
from hybridsched.store.online import OnlineQueue
from hybridsched.store.policy import PolicyStore
from hybridsched.workers.online_engine import EngineWatch
from hybridsched.workers.online_intake import Intake, IntakeOptions, live_record
from hybridsched.workers.online_policy import PolicyFollower
from hybridsched.workers.online_telemetry import OnlineCounts


class FakePolicies:
    def __init__(self, policy: PoolPolicy | None) -> None:
        self.policy: PoolPolicy | None = policy
        self.broken = False

    async def current(self) -> PoolPolicy | None:
        if self.broken:
            raise StoreError("no policy")
        return self.policy


def follower(policy: PoolPolicy | None, *, speed: float = 1.0, **kwargs: Any) -> PolicyFollower:
    return PolicyFollower(cast("PolicyStore", FakePolicies(policy)), speed=speed, **kwargs)


class Bench:
    """An intake without its loops."""

    def __init__(self, policy: PoolPolicy) -> None:
        self.counts = OnlineCounts()
        self.watch = EngineWatch(
            FakeEngine(model="m"), model="m", held=lambda: 0, changed=lambda healthy: None, hung=lambda: None
        )
        self.watch.healthy = True
        self.policy = follower(policy)
        self.intake = Intake(
            cast("OnlineQueue", None),
            model="m",
            replica="r0",
            consumer="r0:x",
            lane="r0",
            counts=self.counts,
            watch=self.watch,
            policy=self.policy,
            events=cast("Any", None),
            options=IntakeOptions(),
        )

    def knows(self, **fields: Any) -> None:
        defaults: dict[str, Any] = {"models": ("m",), "max_model_len": None, "kv_tokens": None}
        self.watch.info = EngineInfo(**(defaults | {"block_size": 16} | fields))


async def bench(**online: Any) -> Bench:
    policy = PoolPolicy(
        name="p",
        kind=PolicyKind.IDLE_WINDOW,
        version=1,
        online=OnlinePolicy(**online),
        engine=EnginePolicy(max_num_seqs=16),
    )
    made = Bench(policy)
    made.policy.policy = policy  # past its check, which has its own tests
    return made


async def test_room_is_the_least_of_cap_and_slots() -> None:
    made = await bench(max_inflight=4)
    assert made.intake.room() == 4
    made.counts.begin(100)
    made.counts.widen(3)
    assert made.intake.room() == 1, "n=3 takes three sequences"
    made.counts.end(100, 3)
    assert made.intake.room() == 4
    assert (await bench(max_inflight=64)).intake.room() == 16


async def test_kv_is_a_bound_only_where_it_is_known() -> None:
    made = await bench(max_inflight=8)
    made.counts.begin(5_000)
    assert made.intake.room() == 7, "unknown: slots decide"
    made.knows(kv_tokens=4_000)
    assert made.intake.room() == 0
    made.counts.end(5_000)
    assert made.intake.room() == 8, "an empty engine takes a request of any length"


async def test_no_room_while_the_engine_is_down() -> None:
    made = await bench(max_inflight=8)
    made.watch.suspect()
    assert not made.watch.healthy
    assert made.intake.room() == 0
    await made.intake.stop()
    made.watch.healthy = True
    assert (made.intake.ready, made.intake.room()) == (False, 0)


@pytest.mark.parametrize(
    ("record", "live"),
    [
        (b"2000 10 0 64 0", True),
        (b"999 10 0 64 0", False),
        (b"2000 10 0 0 0", False),
        (b"garbage", False),
        (b"x 10 0 64 0", False),
    ],
)
def test_which_records_are_of_replicas_that_take_requests(record: bytes, live: bool) -> None:
    assert live_record(record, 1000.0) is live


async def test_the_policy_is_taken_at_speed_once_per_version() -> None:
    heard: list[int] = []
    policy = PoolPolicy(name="p", kind=PolicyKind.UNPROTECTED, version=3, idle=IdlePolicy(window_ms=100.0))
    made = follower(policy, speed=10.0, changed=lambda: heard.append(1))
    assert made.closes_gates, "until a policy is known, a claim closes the gate"
    await made.load()
    await made.load()
    assert (made.policy.idle.window_ms, made.closes_gates, heard) == (10.0, False, [1])


async def test_an_unreadable_policy_leaves_the_last_in_force() -> None:
    store = FakePolicies(PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW, version=1))
    made = PolicyFollower(cast("PolicyStore", store), speed=1.0)
    await made.load()
    store.broken = True
    with pytest.raises(StoreError):
        await made.load()
    store.broken, store.policy = False, None
    await made.load()
    assert made.policy.name == "p"


async def test_a_policy_out_of_range_is_refused_once_and_the_last_stays() -> None:
    good = PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW, version=1)
    store = FakePolicies(good)
    made = PolicyFollower(cast("PolicyStore", store), speed=1.0)
    await made.load()
    store.policy = PoolPolicy(
        name="slip", kind=PolicyKind.UNPROTECTED, version=2, idle=IdlePolicy(window_ms=-5.0)
    )
    with structlog.testing.capture_logs() as said:
        for _ in range(3):
            await made.load()
    assert (made.policy.name, made.closes_gates) == ("p", True)
    assert [one["key"] for one in said] == ["policy_refused"]
    assert "idle.window_ms: was given -5" in said[0]["problem"]
    store.policy = msgspec.structs.replace(good, name="mended", version=3)
    await made.load()
    assert made.policy.name == "mended"


async def test_counts_know_edges_and_latencies() -> None:
    counts = OnlineCounts()
    assert counts.idle_ms() >= 0.0
    counts.begin(10)
    assert (counts.edge.is_set(), counts.idle_ms()) == (True, 0.0)
    counts.edge.clear()
    counts.begin(10)
    assert not counts.edge.is_set(), "busier is no edge"
    assert not counts.end(10)
    assert counts.end(10)
    assert counts.edge.is_set()
    assert (counts.inflight, counts.tokens, counts.sequences) == (0, 0, 0)
    assert (counts.ttft_p99_ms(), counts.tpot_p99_ms()) == (None, None)
    counts.first_token(120.0)
    counts.decoded(15.0)
    assert (counts.ttft_p99_ms(), counts.tpot_p99_ms()) == (120.0, 15.0)


async def test_the_watch_follows_health_and_asks_what_the_engine_can_hold() -> None:
    engine = FakeEngine(model="m")
    said: list[bool] = []
    watch = EngineWatch(engine, model="m", held=lambda: 0, changed=said.append, hung=lambda: None)
    assert watch.capacity.kv_tokens is None
    assert await watch.check()
    assert watch.info is not None
    assert watch.capacity.kv_tokens == watch.info.kv_tokens
    assert watch.checked_at is not None
    engine.die()
    assert not await watch.check()
    watch.healthy = True
    watch.suspect()
    watch.suspect()
    assert said == [False]
