"""The online worker between a real Valkey and the simulated engine: every request ends, whatever dies."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from hybridsched.core.policy import OnlinePolicy, PolicyKind, PoolPolicy
from hybridsched.store.events import EventLog
from hybridsched.store.gates import GateStore
from hybridsched.store.online_values import EndStatus
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.workers.online import OnlineOptions
from hybridsched.workers.online_intake import IntakeOptions
from hybridsched.workers.online_jobs import JobOptions
from tests.helpers import await_until
from tests.integration.online_rig import MODEL, POOL, EngineProcess, Service, WorkerProcess, worker


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """An engine that the tests of this module share and leave alive."""
    with EngineProcess() as made:
        yield made


@pytest.fixture
async def service(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[Service]:
    made = Service(valkey_url)
    yield made
    await made.close()


def open_gate(valkey: redis.Redis, lane: str) -> None:
    keys = f"hs:{{{POOL}}}:"
    gate = {
        "lane": lane,
        "state": "open",
        "reason": "idle",
        "budget": {"max_inflight": 4, "chunk_tokens": 100, "slice_tokens": 0},
    }
    valkey.set(f"{keys}gate:{lane}", json.dumps(gate), px=10_000)


async def test_a_stream_and_a_whole_answer(
    service: Service, valkey: redis.Redis, valkey_url: str, engine: EngineProcess
) -> None:
    async with worker(valkey_url, "r0", engine.url):
        streamed = await service.ask(tokens=20)
        whole = await service.ask(tokens=5, stream=False)
        end = await service.end(streamed)
        assert (end.status, end.finish_reason, end.replica) == (EndStatus.OK, "length", "r0")
        assert end.usage is not None
        assert (end.usage["prompt_tokens"], end.usage["completion_tokens"]) == (32, 20)
        answer = service.answers[streamed]
        assert answer.numbers == list(range(1, len(answer.numbers) + 1))
        assert all(chunk["choices"] for chunk in answer.chunks), "no usage event: it was not asked for"
        end = await service.end(whole)
        assert end.status is EndStatus.OK
        body = json.loads(bytes(end.body))
        assert body["usage"]["completion_tokens"] == 5
        assert service.answers[whole].chunks == []
        with_usage = await service.ask(tokens=3, body={"stream_options": {"include_usage": True}})
        await service.end(with_usage)
        assert service.answers[with_usage].chunks[-1]["usage"]["completion_tokens"] == 3
    assert valkey.xlen(f"hs:{{{POOL}}}:online:{MODEL}:1") == 0, "answered requests leave the stream"
    assert valkey.hlen(f"hs:{{{POOL}}}:replicas:{MODEL}") == 0, "a clean stop leaves no record"
    assert not valkey.exists(f"hs:{{{POOL}}}:telemetry:r0")


async def test_the_engines_refusal_is_passed_on(
    service: Service, valkey_url: str, engine: EngineProcess
) -> None:
    async with worker(valkey_url, "r0", engine.url):
        for stream in (True, False):
            end = await service.end(await service.ask(body={"max_tokens": 10**9}, stream=stream))
            assert (end.status, end.http_status, end.code) == (EndStatus.FAILED, 400, "bad_request")
            assert "error" in json.loads(bytes(end.body))
            end = await service.end(await service.ask(body={"model": "other"}, stream=stream))
            assert (end.status, end.http_status, end.code) == (EndStatus.FAILED, 404, "not_found")


async def test_the_deadline_ends_a_request_in_the_engine(
    service: Service, valkey_url: str, engine: EngineProcess
) -> None:
    async with worker(valkey_url, "r0", engine.url) as made:
        for stream in (True, False):
            end = await service.end(await service.ask(tokens=10_000, stream=stream, timeout_ms=400))
            assert (end.status, end.code) == (EndStatus.EXPIRED, "deadline_exceeded")
        assert made.counts.inflight == 0
        await await_until(
            lambda: made.watch.tracker.last is not None and made.watch.tracker.last.running == 0,
            what="the engine without the requests",
        )


async def test_a_request_that_waited_past_its_deadline_is_never_run(
    service: Service, valkey_url: str, engine: EngineProcess
) -> None:
    late = await service.ask(timeout_ms=30)

    async def waited() -> bool:
        return ((await service.queue.depth(MODEL)).oldest_wait_ms or 0.0) > 30.0

    await await_until(waited, what="the deadline")
    async with worker(valkey_url, "r0", engine.url) as made:
        end = await service.end(late)
        assert end.status is EndStatus.EXPIRED
        assert made.counts.ttft_p99_ms() is None


async def test_cancelling_ends_a_running_request(
    service: Service, valkey_url: str, engine: EngineProcess
) -> None:
    async with worker(valkey_url, "r0", engine.url) as made:
        running = await service.ask(tokens=10_000)
        await service.first(running)
        assert await service.queue.cancel(running) == "aborting"
        assert (await service.end(running)).status is EndStatus.CANCELLED
        assert made.counts.inflight == 0


async def test_the_gate_is_closed_before_the_engine_has_the_request(
    service: Service, valkey: redis.Redis, valkey_url: str, engine: EngineProcess
) -> None:
    async with worker(valkey_url, "r0", engine.url) as made:
        open_gate(valkey, "r0")
        seen: list[str] = []
        start = made.jobs.start

        def watching(claimed: object, at: float) -> None:
            gate = json.loads(valkey.get(f"hs:{{{POOL}}}:gate:r0") or b"{}")
            seen.append(f"{gate.get('state')} {gate.get('reason')} {gate.get('by')}")
            start(claimed, at)  # type: ignore[arg-type]

        made.jobs.start = watching  # type: ignore[method-assign]
        await service.end(await service.ask())
        assert seen == ["closed online_arrived r0"]
    async with EventLog(service.client, POOL) as log:
        events = await log.read_all(kinds=["signal"])
    assert len(events) == 1
    assert (events[0]["lane"], events[0]["replica"]) == ("r0", "r0")
    assert 0 <= events[0]["claimed_mono_s"] - events[0]["mono_s"] < 5


async def test_the_unprotected_policy_leaves_the_gate_open(
    service: Service, valkey: redis.Redis, valkey_url: str, engine: EngineProcess
) -> None:
    await PolicyStore(service.client, POOL).set(PoolPolicy(name="harm", kind=PolicyKind.UNPROTECTED))
    async with worker(valkey_url, "r0", engine.url) as made:
        await await_until(lambda: made.policy.policy.name == "harm", what="the policy")
        open_gate(valkey, "r0")
        await service.end(await service.ask())
        gate = await GateStore(service.client, POOL).read("r0")
        assert gate.gate is not None
        assert gate.gate.state == "open"


async def test_urgent_requests_go_first(service: Service, valkey_url: str, engine: EngineProcess) -> None:
    one = PoolPolicy(name="one", kind=PolicyKind.IDLE_WINDOW, online=OnlinePolicy(max_inflight=1))
    await PolicyStore(service.client, POOL).set(one)
    low = [await service.ask(priority=2, tokens=2) for _ in range(2)]
    normal = [await service.ask(priority=1, tokens=2) for _ in range(2)]
    urgent = [await service.ask(priority=0, tokens=2) for _ in range(2)]
    order: list[str] = []
    async with worker(valkey_url, "r0", engine.url, wait=False) as made:
        await made.policy.load()
        start = made.jobs.start

        def noting(claimed: object, at: float) -> None:
            order.append(claimed.id)  # type: ignore[attr-defined]
            start(claimed, at)  # type: ignore[arg-type]

        made.jobs.start = noting  # type: ignore[method-assign]
        for request_id in [*low, *normal, *urgent]:
            assert (await service.end(request_id)).status is EndStatus.OK
    assert order == [*urgent, *normal, *low]


async def test_load_is_spread_over_the_replicas(
    service: Service, valkey_url: str, engine: EngineProcess
) -> None:
    async with (
        worker(valkey_url, "r0", engine.url),
        worker(valkey_url, "r1", engine.url),
        worker(valkey_url, "r2", engine.url),
    ):
        ids = []
        for _ in range(30):
            ids.append(await service.ask(prompt=600, tokens=200))
            await asyncio.sleep(0.002)
        ends = [await service.end(i, timeout_s=60) for i in ids]
    counts = {name: sum(end.replica == name for end in ends) for name in ("r0", "r1", "r2")}
    assert sum(counts.values()) == 30
    assert min(counts.values()) >= 7, counts


async def test_telemetry_says_busy_and_idle(service: Service, valkey_url: str, engine: EngineProcess) -> None:
    store = TelemetryStore(service.client, POOL)

    async def inflight() -> int | None:
        record = (await store.read_all()).replicas.get("r0")
        return None if record is None else record.online_inflight

    async with worker(valkey_url, "r0", engine.url):
        await await_until(lambda: _is(inflight, 0), what="the first record")
        running = await service.ask(tokens=10_000)
        await await_until(lambda: _is(inflight, 1), what="the busy record")
        await service.first(running)
        await service.queue.cancel(running)
        await service.end(running)
        await await_until(lambda: _is(inflight, 0), what="the idle record")
        record = (await store.read_all()).replicas["r0"]
        assert record is not None
        assert (record.lane, record.model, record.url) == ("r0", MODEL, engine.url)
        assert record.engine.healthy == 1.0
        assert record.engine.ttft_p99_ms is not None
        await await_until(lambda: _metrics_known(store), what="metrics with nothing running")


async def _is(read: object, wanted: int) -> bool:
    return bool(await read() == wanted)  # type: ignore[operator]


async def _metrics_known(store: TelemetryStore) -> bool:
    record = (await store.read_all()).replicas["r0"]
    return record is not None and record.engine.running == 0 and record.engine.frozen_ms == 0


# The engine dies


@pytest.mark.parametrize("stream", [True, False])
async def test_a_killed_engine_fails_what_it_ran_and_serves_again_after_its_restart(
    service: Service, valkey_url: str, stream: bool
) -> None:
    with EngineProcess() as mine:
        async with worker(valkey_url, "r0", mine.url) as made:
            running = await service.ask(tokens=10_000, stream=stream)
            if stream:
                await service.first(running, count=3)
            else:
                await await_until(lambda: made.counts.inflight == 1, what="the request in the engine")
            mine.kill()
            end = await service.end(running)
            assert end.status is EndStatus.FAILED
            assert end.code == ("engine_failed" if stream else "engine_died")
            await await_until(lambda: not made.intake.ready, what="the engine's death to be seen")
            waiting = await service.ask(tokens=3)
            mine.start()
            assert (await service.end(waiting)).status is EndStatus.OK


async def test_before_any_token_another_replica_takes_over(
    service: Service, valkey_url: str, engine: EngineProcess
) -> None:
    with EngineProcess() as mine:
        async with worker(valkey_url, "r0", mine.url) as first:
            running = await service.ask(tokens=500, stream=False)
            await await_until(lambda: first.counts.inflight == 1, what="the request in the engine")
            async with worker(valkey_url, "r1", engine.url):
                await await_until(first.intake.others, what="the other replica to be known")
                mine.kill()
                end = await service.end(running)
                assert (end.status, end.replica) == (EndStatus.OK, "r1")


async def test_a_hung_engine_does_not_keep_a_client_waiting(service: Service, valkey_url: str) -> None:
    with EngineProcess() as mine:
        quick = OnlineOptions(
            intake=IntakeOptions(lease_s=1.0), jobs=JobOptions(idle_timeout_s=0.5), drain_s=0.5
        )
        async with worker(valkey_url, "r0", mine.url, options=quick):
            running = await service.ask(tokens=10_000)
            await service.first(running)
            mine.send(signal.SIGSTOP)
            end = await service.end(running)
            assert (end.status, end.code) == (EndStatus.FAILED, "engine_failed")
            mine.send(signal.SIGCONT)


async def test_a_whole_answer_of_a_hung_engine_is_given_up_by_its_health(
    service: Service, valkey_url: str
) -> None:
    with EngineProcess() as mine:
        quick = OnlineOptions(intake=IntakeOptions(lease_s=1.0), hung_s=0.3, drain_s=0.5)
        async with worker(valkey_url, "r0", mine.url, options=quick) as made:
            running = await service.ask(tokens=10_000, stream=False, timeout_ms=60_000)
            await await_until(lambda: made.counts.inflight == 1, what="the request in the engine")
            mine.send(signal.SIGSTOP)
            end = await service.end(running)
            assert (end.status, end.code, end.http_status) == (EndStatus.FAILED, "engine_timeout", 504)
            mine.send(signal.SIGCONT)


async def test_a_full_engine_is_a_clear_failure(service: Service, valkey_url: str) -> None:
    with EngineProcess("--max-num-queued-reqs", "1") as mine:
        async with worker(valkey_url, "r0", mine.url) as made:
            running = await service.ask(tokens=10_000)
            await service.first(running)
            end = await service.end(await service.ask())
            assert (end.status, end.code, end.http_status) == (EndStatus.FAILED, "engine_busy", 503)
            assert made.intake.ready, "a full engine is a healthy one"
            await service.queue.cancel(running)
            await service.end(running)


async def test_an_engine_that_comes_later(service: Service, valkey_url: str) -> None:
    late = EngineProcess()
    try:
        async with worker(valkey_url, "r0", late.url, wait=False):
            waiting = await service.ask(tokens=3)
            late.start()
            assert (await service.end(waiting)).status is EndStatus.OK
    finally:
        late.close()


# The worker dies or is stopped


async def test_a_killed_worker_loses_nothing(
    service: Service, valkey: redis.Redis, valkey_url: str, engine: EngineProcess
) -> None:
    dying = WorkerProcess(valkey_url, "r0", engine.url)
    try:
        streamed = await service.ask(tokens=10_000)
        await service.first(streamed)
        untouched = await service.ask(tokens=400, stream=False)
        await await_until(
            lambda: valkey.xpending(f"hs:{{{POOL}}}:online:{MODEL}:1", "workers")["pending"] == 2,
            what="both claimed",
        )
        dying.send(signal.SIGKILL)
        async with worker(valkey_url, "r1", engine.url):
            end = await service.end(untouched)
            assert (end.status, end.replica) == (EndStatus.OK, "r1")
            assert service.answers[untouched].attempts[-1] == 2
            end = await service.end(streamed)
            assert (end.status, end.code) == (EndStatus.FAILED, "engine_lost"), "its client has seen tokens"
    finally:
        dying.close()


async def test_sigterm_finishes_what_is_in_flight(
    service: Service, valkey: redis.Redis, valkey_url: str, engine: EngineProcess
) -> None:
    stopping = WorkerProcess(valkey_url, "r0", engine.url)
    try:
        running = await service.ask(tokens=60)
        await service.first(running)
        stopping.send(signal.SIGTERM)
        assert (await service.end(running)).status is EndStatus.OK
        await await_until(lambda: stopping.process.poll() is not None, what="the worker's end")
        assert stopping.process.returncode == 0
        assert valkey.hlen(f"hs:{{{POOL}}}:replicas:{MODEL}") == 0
    finally:
        stopping.close()


async def test_a_stop_gives_back_what_has_sent_nothing(
    service: Service, valkey_url: str, engine: EngineProcess
) -> None:
    hasty = OnlineOptions(intake=IntakeOptions(lease_s=1.0), drain_s=0.05)
    async with worker(valkey_url, "r0", engine.url, options=hasty) as made:
        silent = await service.ask(tokens=500, stream=False)
        talking = await service.ask(tokens=10_000)
        await service.first(talking)
        await await_until(lambda: made.counts.inflight == 2, what="both in the engine")
    end = await service.end(talking)
    assert (end.status, end.code) == (EndStatus.FAILED, "worker_stopped")
    async with worker(valkey_url, "r1", engine.url):
        end = await service.end(silent)
        assert (end.status, end.replica) == (EndStatus.OK, "r1")
        assert service.answers[silent].attempts == [1], "a stop is no attempt"
