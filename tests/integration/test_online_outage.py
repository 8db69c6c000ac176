"""The store dies under a working replica: what runs goes on, is answered afterwards, and claims resume."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hybridsched.store.embedded import EmbeddedValkey
from hybridsched.store.online_values import EndStatus
from hybridsched.workers.online import OnlineOptions
from hybridsched.workers.online_intake import IntakeOptions
from tests.helpers import await_until
from tests.integration.online_rig import EngineProcess, Service, WorkerProcess, worker


@pytest.mark.parametrize("stream", [True, False])
async def test_a_killed_store_costs_no_request(tmp_path: Path, stream: bool) -> None:
    valkey = EmbeddedValkey(tmp_path, appendonly=True)
    valkey.start()
    service: Service | None = None
    try:
        with EngineProcess() as engine:
            service = Service(valkey.url)
            # The lease is as long as the outage may be here: what is tested is the answer, not the reclaim.
            options = OnlineOptions(intake=IntakeOptions(lease_s=10.0), drain_s=2.0)
            async with worker(valkey.url, "r0", engine.url, options=options) as made:
                running = await service.ask(tokens=120, stream=stream, timeout_ms=60_000)
                await await_until(lambda: made.counts.inflight == 1, what="the request in the engine")
                if stream:
                    await service.first(running)
                valkey.kill()
                await service.close()
                await await_until(
                    lambda: made.counts.inflight == 0, timeout_s=20, what="the engine's end of it"
                )
                assert made.jobs.held(), "its answer is kept"
                valkey.start()
                service = _back(service, valkey.url)
                end = await service.end(running)
                assert end.status is EndStatus.OK
                numbers = service.answers[running].numbers
                assert numbers == sorted(set(numbers))
                if stream:
                    assert service.answers[running].tokens > 0
                after = await service.ask(tokens=3)
                assert (await service.end(after)).status is EndStatus.OK
    finally:
        if service is not None:
            await service.close()
        valkey.stop()


def _back(old: Service, url: str) -> Service:
    """The same service again, reading its reply stream from the beginning."""
    made = Service(url, reply=old.reply)
    made.answers = {request_id: type(answer)() for request_id, answer in old.answers.items()}
    return made


async def test_a_worker_started_before_its_store_serves_when_it_comes(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path, appendonly=True)
    valkey.start()
    url = valkey.url
    valkey.kill()
    with EngineProcess() as engine:
        early = WorkerProcess(url, "r0", engine.url)
        try:
            valkey.start()
            assert valkey.url == url
            service = Service(url)
            assert (await service.end(await service.ask(tokens=3))).status is EndStatus.OK
            await service.close()
            early.send(signal.SIGTERM)
            await await_until(lambda: early.process.poll() is not None, what="the worker's end")
            assert early.process.returncode == 0
        finally:
            early.close()
            valkey.stop()


async def test_a_worker_without_its_store_still_stops(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path, appendonly=True)
    valkey.start()
    with EngineProcess() as engine:
        lonely = WorkerProcess(valkey.url, "r0", engine.url)
        try:
            service = Service(valkey.url)
            await service.end(await service.ask(tokens=3))
            await service.close()
            valkey.kill()
            lonely.send(signal.SIGTERM)
            await await_until(lambda: lonely.process.poll() is not None, timeout_s=20, what="its end")
            assert lonely.process.returncode == 0
        finally:
            lonely.close()
            valkey.stop()
