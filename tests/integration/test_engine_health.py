"""Engines that answer their health check and cannot be used: taken out, started again, put back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import redis

from hybridsched.core.decide import decide
from hybridsched.core.policy import HealthPolicy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState, Signal
from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.protocol import Completion, EngineStats
from hybridsched.store.connection import async_client
from hybridsched.store.online_values import EndStatus
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.workers import engine_keeper
from hybridsched.workers import online as online_module
from hybridsched.workers.engine_probe import PREFIX
from hybridsched.workers.online import OnlineWorker
from hybridsched.workers.policy_observe import Observer
from tests.helpers import await_until
from tests.integration.online_rig import MODEL, POOL, Service, worker

POLICY = PoolPolicy(
    name="quick",
    kind=PolicyKind.IDLE_WINDOW,
    health=HealthPolicy(
        doubt_ms=500, test_ms=1000, drain_ms=2000, memory_growth_mib=100.0, settle_ms=0.0, restarts=1
    ),
)


class Patient(FakeEngine):
    """An engine in memory with the ways to fail that no health check sees; `start_again` heals all."""

    def __init__(self) -> None:
        super().__init__(model=MODEL)
        self.asleep = False
        self.wrong = False
        self.page: EngineStats | None = None
        self.mib = 1000.0

    async def stats(self) -> EngineStats:
        measured = await super().stats()
        return self.page or msgspec.structs.replace(measured, awake=0.0 if self.asleep else 1.0)

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        answer = await super().complete(path, body, request_id=request_id, timeout_s=timeout_s)
        if self.wrong:
            answer.body["choices"][0]["text"] += " and more"
        return answer

    def start_again(self) -> None:
        self.asleep = self.wrong = False
        self.page, self.mib = None, 1000.0
        self.set_auto(True)

    @property
    def served(self) -> list[str]:
        """Ids of requests, tests left out."""
        return [request_id for _, request_id in self.requests if not request_id.startswith(PREFIX)]


@pytest.fixture
async def service(valkey: redis.Redis, valkey_url: str) -> AsyncIterator[Service]:
    client = async_client(valkey_url)
    await PolicyStore(client, POOL).set(POLICY)
    await client.aclose()
    made = Service(valkey_url)
    yield made
    await made.close()


@pytest.fixture(autouse=True)
def quick_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_keeper, "MEMORY_S", 0.05)
    monkeypatch.setattr(engine_keeper, "MOVED_S", 0.3)


class Bed:
    """A patient with its worker, and as many good engines beside it."""

    def __init__(self, patient: Patient, made: OnlineWorker, url: str) -> None:
        self.patient, self.made, self._url = patient, made, url

    async def fault(self, code: str) -> None:
        await await_until(lambda: self.made.watch.fault == code, timeout_s=20, what=code)

    async def restart_asked(self) -> None:
        await await_until(lambda: self.made.watch.restarts == 1, timeout_s=20, what="the wish for a restart")
        assert not self.made.intake.ready
        await self._published(lambda record: record.engine.restarts == 1 and record.engine.healthy == 0.0)

    async def _published(self, right: Callable[[Any], bool]) -> None:
        client = async_client(self._url)
        store = TelemetryStore(client, POOL)

        async def there() -> bool:
            record = (await store.read_all()).replicas.get("r0")
            return record is not None and right(record)

        try:
            await await_until(there, what="the replica's record")
        finally:
            await client.aclose()

    async def back(self) -> None:
        await await_until(lambda: self.made.intake.ready, timeout_s=20, what="the replica's return")
        assert self.made.watch.fault == ""


@asynccontextmanager
async def bed(valkey_url: str, monkeypatch: pytest.MonkeyPatch, *, others: int = 0) -> AsyncIterator[Bed]:
    patient = Patient()

    class Memory:
        def __init__(self, url: str) -> None:
            self._sick = url == patient.url

        def mib(self) -> float | None:
            return patient.mib if self._sick else 500.0

    monkeypatch.setattr(online_module, "ProcessMemory", Memory)
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(worker(valkey_url, "r0", patient))
        await await_until(lambda: made.policy.policy.name == "quick", what="the policy")
        for number in range(others):
            good = FakeEngine(model=MODEL, url=f"fake://{number}")
            await stack.enter_async_context(worker(valkey_url, f"r{number + 1}", good))
        if others:
            await await_until(made.intake.others, what="sight of the other replica")
        yield Bed(patient, made, valkey_url)


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_of_an_engine_that_hangs_are_answered_elsewhere(
    service: Service, valkey_url: str, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with bed(valkey_url, monkeypatch, others=1) as sick:
        sick.patient.set_auto(False)
        asked = [await service.ask(stream=stream) for _ in range(12)]
        await await_until(lambda: sick.patient.served, what="a request at the engine that hangs")
        assert await sick.patient.healthy(), "its health check says nothing of it"
        ends = [await service.end(one, timeout_s=30) for one in asked]
        assert {(end.status, end.replica) for end in ends} == {(EndStatus.OK, "r1")}
        await sick.restart_asked()
        assert sick.made.watch.fault == "engine_hung"
        sick.patient.start_again()
        await sick.back()


async def test_alone_it_runs_them_itself_once_it_is_back(
    service: Service, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(valkey_url, monkeypatch) as sick:
        sick.patient.set_auto(False)
        asked = await service.ask()
        await sick.restart_asked()
        sick.patient.start_again()
        end = await service.end(asked)
        assert (end.status, end.replica) == (EndStatus.OK, "r0")


async def test_an_engine_that_has_forgotten_its_weights_after_a_wake(
    service: Service, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(valkey_url, monkeypatch) as sick:
        assert (await service.end(await service.ask())).status is EndStatus.OK
        sick.patient.asleep = True
        await sick.fault("engine_asleep")
        before = len(sick.patient.served)
        asked = await service.ask()
        sick.patient.wrong = True
        sick.patient.asleep = False
        await sick.restart_asked()
        assert sick.made.watch.fault == "engine_wrong_answer"
        assert len(sick.patient.served) == before, "no request had an answer of its own"
        sick.patient.start_again()
        assert (await service.end(asked)).status is EndStatus.OK
        await sick.back()


async def test_one_that_wakes_well_serves_at_once(
    service: Service, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(valkey_url, monkeypatch) as sick:
        sick.patient.asleep = True
        await sick.fault("engine_asleep")
        asked = await service.ask()
        sick.patient.asleep = False
        assert (await service.end(asked)).status is EndStatus.OK
        assert sick.made.watch.restarts == 0


async def test_metrics_that_stand_still_while_requests_are_answered(
    service: Service, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate cannot be decided on them; online loses nothing by them, also when a restart does not help."""
    async with bed(valkey_url, monkeypatch, others=1) as sick:
        sick.patient.page = msgspec.structs.replace(await sick.patient.stats(), running=1.0)
        await sick.restart_asked()
        assert sick.made.watch.fault == "metric_frozen"
        assert (await service.end(await service.ask())).status is EndStatus.OK
        sick.patient.start_again()
        await sick.back()
        assert len(sick.patient.requests) > len(sick.patient.served)
        sick.patient.page = msgspec.structs.replace(await sick.patient.stats(), running=1.0)
        await asyncio.sleep(2.0)
        assert sick.made.intake.ready, "its restarts are used up, and it answers"
        assert sick.made.watch.restarts == 1


async def test_an_engine_that_grows_lets_its_requests_end_first(
    service: Service, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(valkey_url, monkeypatch, others=1) as sick:
        sick.patient.set_auto(False)
        asked = [await service.ask(tokens=4) for _ in range(8)]
        await await_until(lambda: sick.patient.served, what="a request there")
        held = sick.made.counts.inflight
        sick.patient.mib = 1101.0
        await sick.fault("engine_memory")
        assert not sick.made.intake.ready
        assert sick.made.counts.inflight == held, "it works: what it holds may end"
        sick.patient.set_auto(True)
        ends = [await service.end(one) for one in asked]
        assert {end.status for end in ends} == {EndStatus.OK}
        assert "r0" in {end.replica for end in ends}
        await sick.restart_asked()
        sick.patient.start_again()
        await sick.back()


async def test_its_gate_says_why_it_is_closed(
    service: Service, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(valkey_url, monkeypatch) as sick:
        sick.patient.set_auto(False)
        await service.ask()
        await sick.restart_asked()
        client = async_client(valkey_url)
        try:
            observer = Observer(client, POOL)
            await observer.look()
            seen = await observer.look()
        finally:
            await client.aclose()
        held = msgspec.structs.replace(
            seen.snapshot,
            lanes=tuple(
                msgspec.structs.replace(lane, offline_inflight=Signal(value=0.0, age_ms=0.0))
                for lane in seen.snapshot.lanes
            ),
        )
        (decision,) = decide(held, POLICY)
        assert (decision.state, decision.reason) == (GateState.CLOSED, Reason.ENGINE_HUNG)
