"""The online worker among engines that lie and writers that mean no good: requests end, the worker lives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
import redis
from redis.asyncio import Redis

from hybridsched.engines.checks import bad_answer
from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.protocol import EngineStats
from hybridsched.engines.simulated.calls import Call
from hybridsched.store.keys import Keys
from hybridsched.store.online_values import EndStatus
from hybridsched.store.replica_names import NameTakenError
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord, TelemetryStore, decode_replica
from hybridsched.workers.engine_probe import PREFIX
from hybridsched.workers.online import OnlineWorker
from tests.helpers import await_until
from tests.integration.online_rig import MODEL, POOL, QUICK, Service, worker

KEYS = Keys(POOL)


@pytest.fixture
async def service(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[Service]:
    made = Service(valkey_url)
    yield made
    await made.close()


async def record(client: Redis, replica: str = "r0") -> ReplicaRecord:
    found = decode_replica(cast("bytes | None", await client.get(KEYS.telemetry(replica))))
    return found or ReplicaRecord(replica=replica, model="", lane="")


async def nothing_held(service: Service, made: OnlineWorker) -> None:
    async def clear() -> bool:
        return sum((await service.queue.depth(MODEL)).claimed) == 0

    for _ in range(200):
        if await clear() and not made.jobs.held() and made.counts.inflight == 0:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still held: {made.jobs.held()}")


class Broken(FakeEngine):
    """Raises what no engine should, once for each entry of `breaks`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(model=MODEL, **options)
        self.breaks: list[Exception] = []
        self.breaks_stats = False

    async def complete(self, *args: Any, **kwargs: Any) -> Any:
        if self.breaks:
            raise self.breaks.pop(0)
        return await super().complete(*args, **kwargs)

    async def stats(self) -> EngineStats:
        if self.breaks_stats:
            raise ValueError("could not convert string to float")
        return await super().stats()


class Passing(FakeEngine):
    """Fails requests and passes its test."""

    async def _accept(self, path: str, body: dict[str, Any] | bytes, request_id: str) -> Call:
        if not request_id.startswith(PREFIX):
            return await super()._accept(path, body, request_id)
        kept, self.next_errors = self.next_errors, []
        try:
            return await super()._accept(path, body, request_id)
        finally:
            self.next_errors = kept


async def test_a_request_that_breaks_its_run_is_answered_and_let_go(
    service: Service, valkey_url: str
) -> None:
    engine = Broken()
    async with worker(valkey_url, "r0", engine) as made:
        engine.breaks = [RuntimeError("odd"), RecursionError()]
        ends = [await service.end(await service.ask(stream=False)) for _ in range(3)]
        assert [(end.status, end.code) for end in ends] == [
            (EndStatus.FAILED, "internal_error"),
            (EndStatus.FAILED, "internal_error"),
            (EndStatus.OK, None),
        ]
        await nothing_held(service, made)


async def test_an_answer_that_cannot_be_written_is_a_failure(service: Service, valkey_url: str) -> None:
    engine = FakeEngine(model=MODEL)
    async with worker(valkey_url, "r0", engine) as made:
        finish = service.queue.finish

        async def spoilt(claimed: Any, end: Any) -> bool:
            if end.status is EndStatus.OK:
                raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
            return await finish(claimed, end)

        made.jobs._queue.finish = spoilt  # type: ignore[method-assign]
        end = await service.end(await service.ask(stream=False))
        assert (end.status, end.code) == (EndStatus.FAILED, "internal_error")
        await nothing_held(service, made)


async def test_an_engine_that_comes_up_with_another_model_answers_nobody(
    service: Service, client: Redis, valkey_url: str
) -> None:
    changed, right = FakeEngine(model=MODEL), FakeEngine(model=MODEL)
    async with worker(valkey_url, "r0", changed) as made, worker(valkey_url, "r1", right):
        await await_until(made.intake.others, what="sight of the other replica")
        changed.serve_instead("another")
        asked = [await service.ask(stream=i % 2 == 0) for i in range(20)]
        ends = [await service.end(one) for one in asked]
        assert {(end.status, end.replica) for end in ends} == {(EndStatus.OK, "r1")}
        await await_until(lambda: not made.watch.healthy, what="the fault")
        assert made.watch.fault == "engine_wrong_model"
        for _ in range(200):
            seen = (await record(client)).engine
            if seen.fault:
                break
            await asyncio.sleep(0.05)
        assert (seen.healthy, seen.fault) == (0.0, "engine_wrong_model")
        changed.serve_instead(MODEL)
        await await_until(lambda: made.watch.healthy, what="its recovery")
        assert made.watch.fault == ""


async def test_alone_it_fails_and_names_the_fault(service: Service, valkey_url: str) -> None:
    engine = FakeEngine(model=MODEL)
    async with worker(valkey_url, "r0", engine) as made:
        refused = await service.end(await service.ask(body={"model": "nobody-has-this"}))
        assert (refused.code, refused.http_status) == ("not_found", 404), "the request's own mistake"
        assert made.watch.healthy
        engine.serve_instead("another")
        end = await service.end(await service.ask())
        assert (end.status, end.code) == (EndStatus.FAILED, "engine_wrong_model")
        await nothing_held(service, made)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_garbage_answer_is_tried_again_within_the_budget(
    service: Service, valkey_url: str, stream: bool
) -> None:
    engine = Passing(model=MODEL)
    garbage = bad_answer(engine.url, "/v1/completions", 200, "it is no JSON object")
    async with worker(valkey_url, "r0", engine) as made:
        engine.next_errors = [garbage]
        first = await service.ask(stream=stream)
        assert (await service.end(first)).status is EndStatus.OK
        assert set(service.answers[first].attempts) == {2}
        engine.next_errors = [garbage] * 3
        end = await service.end(await service.ask(stream=stream))
        assert (end.status, end.code, end.http_status) == (EndStatus.FAILED, "engine_bad_answer", 502)
        assert engine.next_errors == []
        await nothing_held(service, made)


async def test_metrics_that_stand_still_under_offline_work_show_as_frozen(
    service: Service, client: Redis, valkey_url: str
) -> None:
    engine = FakeEngine(model=MODEL)
    engine.stats_override = EngineStats(
        running=0.0, waiting=0.0, kv_use=0.0, iterations_total=7.0, generation_tokens_total=7.0
    )
    store = TelemetryStore(client, POOL)
    async with worker(valkey_url, "r0", engine):
        longest = 0.0
        for _ in range(400):
            await store.publish_lane(LaneRecord(lane="r0", replica="r0", offline_inflight=64, work=100))
            longest = max(longest, (await record(client)).engine.frozen_ms or 0.0)
            if longest > 1500.0:
                break
            await asyncio.sleep(0.05)
        assert longest > 1500.0


async def test_metrics_that_cannot_be_read_age_and_the_worker_serves(
    service: Service, client: Redis, valkey_url: str
) -> None:
    engine = Broken()
    engine.breaks_stats = True
    async with worker(valkey_url, "r0", engine):
        assert (await service.end(await service.ask())).status is EndStatus.OK
        assert (await record(client)).engine.metrics_age_ms is None


async def test_a_second_worker_of_the_same_name_is_refused(service: Service, valkey_url: str) -> None:
    async with worker(valkey_url, "r0", FakeEngine(model=MODEL)) as first:
        with pytest.raises(
            NameTakenError, match=r"replica r0 is served by another worker: process .* stop that"
        ):
            async with worker(valkey_url, "r0", FakeEngine(model=MODEL)):
                pass
        assert first.intake.ready
        end = await service.end(await service.ask())
        assert end.status is EndStatus.OK


async def test_after_a_kill_the_name_is_free_within_its_life(
    service: Service, client: Redis, valkey_url: str
) -> None:
    """A holder that renews no more, as after SIGKILL."""
    await client.set(KEYS.replica_holder("r0"), b"{}", px=int(QUICK.name_life_s * 1000))
    async with worker(valkey_url, "r0", FakeEngine(model=MODEL)):
        assert (await service.end(await service.ask())).status is EndStatus.OK
    assert not await client.exists(KEYS.replica_holder("r0")), "a clean stop frees it at once"


async def test_a_worker_whose_name_was_taken_stops_and_says_so(client: Redis, valkey_url: str) -> None:
    async def robbed() -> None:
        async with worker(valkey_url, "r0", FakeEngine(model=MODEL)) as made:
            await client.set(KEYS.replica_holder("r0"), msgspec.json.encode({"owner": "thief"}), px=60_000)
            await await_until(made._name.lost.is_set, timeout_s=30, what="the loss")

    with pytest.raises(NameTakenError, match="served by another worker"):
        await robbed()
    assert await client.exists(KEYS.replica_holder("r0")), "it is the other's"


# whatever anybody writes

WORDS: tuple[bytes, ...] = (
    *(
        b"",
        b"0",
        b"-1",
        b"1e999",
        b"nan",
        b"abc",
        b"\xff\xfe",
        b"a\r\nX: 1",
        b"9" * 400,
        b"{}",
        b"[]",
        b"null",
    ),
    *(b"{" * 5000, b"[" * 5000, b'{"a":' * 3000, b"/v1/completions", b"/v1/chat/completions", b"1", b"30"),
)
FIELDS = (
    *("id", "path", "body", "stream", "reply", "deadline_ms", "accepted_ms", "cost", "prompt_tokens"),
    *("attempt", "other"),
)
BODIES: tuple[bytes, ...] = (
    *WORDS,
    b'{"prompt":[1],"n":1e400}',
    b'{"prompt":[1],"n":99999999999999999999}',
    b'{"prompt":[1],"stream_options":[]}',
    b'{"prompt":"\xff"}',
    b'{"prompt":"\\ud800"}',
    b'{"prompt":[1],"max_tokens":-1}',
    b'{"prompt":[1],"max_tokens":1e99}',
    b'{"prompt":[' + b"[" * 100_000,
    b'{"messages":' + b'{"a":' * 100_000,
)


async def spoil(client: Any, chance: random.Random) -> None:
    """One thing that whoever can write to Redis can do, short of deleting what others need."""
    fields = {
        "id": b"x%d" % chance.randrange(1000),
        "path": b"/v1/completions",
        "body": chance.choice(BODIES),
        "stream": b"%d" % chance.randrange(2),
        "reply": b"garbage-reply",
        "deadline_ms": b"4102444800000",
        "accepted_ms": b"1700000000000",
        "cost": b"10",
        "prompt_tokens": b"5",
        "attempt": b"1",
    }
    what = chance.randrange(8)
    stream = KEYS.online(MODEL, chance.randrange(3))
    if what < 3:
        for _ in range(chance.randrange(3)):
            fields[chance.choice(FIELDS)] = chance.choice(WORDS)
        for _ in range(chance.randrange(2)):
            fields.pop(chance.choice(list(fields)))
        await client.xadd(stream, fields or {"a": "b"})
        await client.publish(KEYS.wake("r0"), b"wake")
    elif what == 3:
        await client.publish(KEYS.wake("r0"), chance.choice(WORDS))
        await client.publish(KEYS.wake("r0"), b"cancel " + chance.choice(WORDS))
    elif what == 4:
        await client.set(KEYS.gate("r0"), chance.choice(WORDS))
        await client.publish(KEYS.gates, chance.choice(WORDS))
        await client.set(KEYS.gate_epoch("r0"), chance.choice(WORDS))
    elif what == 5:
        await client.set(KEYS.policy_current, chance.choice(WORDS))
        await client.publish(KEYS.policy_channel, chance.choice(WORDS))
    elif what == 6:
        name, record = chance.choice(WORDS), chance.choice((*WORDS, b"nan nan nan nan 1", b"inf 0 0 9 0"))
        await client.hset(KEYS.replicas(MODEL), name, record)
        await client.set(KEYS.lane_telemetry("r0"), chance.choice(WORDS))
    else:
        await client.xadd(stream, fields)
        name = chance.choice(WORDS) or b"nobody"
        await client.xreadgroup("workers", name, {stream: ">"}, count=1)


@pytest.mark.parametrize("seed", range(4))
async def test_a_good_request_is_served_whatever_stands_beside_it(
    service: Service, client: Redis, valkey_url: str, seed: int
) -> None:
    chance = random.Random(seed)
    async with worker(valkey_url, "r0", Broken()) as made:
        for _ in range(12):
            for _ in range(chance.randrange(1, 12)):
                await spoil(client, chance)
            good = await service.ask(stream=chance.random() < 0.5, priority=chance.randrange(3))
            assert (await service.end(good)).status is EndStatus.OK
        assert made.watch.healthy
        await nothing_held(service, made)
