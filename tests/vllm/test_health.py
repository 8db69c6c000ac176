"""The health of the real vLLM: one that hangs behind a good health check, is put to sleep, or grows."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import redis

from hybridsched.core.policy import HealthPolicy, PolicyKind, PoolPolicy
from hybridsched.store.connection import async_client
from hybridsched.store.online_values import EndStatus
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from hybridsched.telemetry.process_memory import ProcessMemory
from tests.helpers import await_until
from tests.integration import online_rig
from tests.integration.online_rig import POOL, Service, worker
from tests.vllm.engines import MODEL, ROOT, RealServers, environment

pytestmark = pytest.mark.timeout(600)
FLAGS = ("--max-model-len", "2048")
QUICK = PoolPolicy(
    name="quick", kind=PolicyKind.IDLE_WINDOW, health=HealthPolicy(doubt_ms=1000, test_ms=3000)
)


@pytest.fixture
async def service(
    valkey: redis.Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    monkeypatch.setattr(online_rig, "MODEL", MODEL)
    client = async_client(valkey_url)
    await PolicyStore(client, POOL).set(QUICK)
    await client.aclose()
    made = Service(valkey_url)
    yield made
    await made.close()


def post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
        assert answer.status == 200


async def test_hung_and_asleep_and_back(real_servers: RealServers, service: Service, valkey_url: str) -> None:
    url = real_servers.get(*FLAGS).url
    async with worker(valkey_url, "r0", url, wait=False) as made:
        await await_until(lambda: made.intake.ready, timeout_s=60, what="a replica that has passed its test")
        await await_until(lambda: made.policy.policy.name == "quick", what="the policy")
        assert (await service.end(await ask(service), timeout_s=60)).status is EndStatus.OK

        post(f"{url}/pause?mode=keep")
        held = await ask(service)
        await await_until(lambda: made.watch.restarts == 1, timeout_s=60, what="the wish for a restart")
        assert made.watch.fault == "engine_hung"
        assert not made.intake.ready
        post(f"{url}/resume")
        end = await service.end(held, timeout_s=60)
        assert end.status is EndStatus.OK, "it went back to the queue, and the engine has recovered by itself"

        post(f"{url}/sleep?level=1&mode=keep")
        await await_until(
            lambda: made.watch.fault == "engine_asleep", timeout_s=30, what="sight of the sleep"
        )
        waiting = await ask(service)
        post(f"{url}/wake_up")
        assert (await service.end(waiting, timeout_s=60)).status is EndStatus.OK
        assert made.watch.restarts == 1


async def ask(service: Service, *, tokens: int = 12) -> str:
    prompt = [20 + i for i in range(30)]
    return await service.ask(body={"model": MODEL, "prompt": prompt}, tokens=tokens, timeout_ms=240_000)


GROWTH_MIB = 100.0
DRIFT = PoolPolicy(
    name="drift",
    kind=PolicyKind.IDLE_WINDOW,
    health=HealthPolicy(memory_growth_mib=GROWTH_MIB, settle_ms=500, drain_ms=60_000),
)


@contextmanager
def replica(real_servers: RealServers, redis_url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`hybridsched worker replica` with a vLLM that keeps 40 MiB of every completion, while told to."""
    engine = [
        *(str(real_servers.python), "-m", "vllm.entrypoints.cli.main", "serve"),
        *(str(real_servers.models["grouped-query"]), "--served-model-name", MODEL, "--host", "127.0.0.1"),
        *("--port", "{port}", "--dtype", "float32", "--enforce-eager", *FLAGS),
        *("--distributed-executor-backend", "uni", "--middleware", "growing_engine.Grow"),
    ]
    with (folder / "replica.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hybridsched", "worker", "replica", "--redis", redis_url),
                *("--pool", POOL, "--model", MODEL, "--replica", "r0", "--", *engine),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment(folder)
            | {
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests/vllm"))),
                "GROW_WHILE": str(folder / "grow"),
            },
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


async def test_one_that_grows_is_started_again_and_no_request_is_lost(
    real_servers: RealServers, service: Service, valkey_url: str, tmp_path: Path
) -> None:
    real_servers.stop()
    await PolicyStore(service.client, POOL).set(DRIFT)
    telemetry = TelemetryStore(service.client, POOL)
    found: ReplicaRecord | None = None

    async def serves(restarts: int = 0) -> bool:
        nonlocal found
        found = (await telemetry.read_all()).replicas.get("r0")
        return found is not None and found.engine.healthy == 1.0 and found.engine.restarts == restarts

    async def taken_out() -> bool:
        record = (await telemetry.read_all()).replicas.get("r0")
        return record is not None and record.engine.healthy == 0.0 and record.engine.fault == "engine_memory"

    with replica(real_servers, valkey_url, tmp_path) as process:
        log = tmp_path / "replica.log"
        try:
            await await_until(serves, timeout_s=300, what="a replica that serves")
            assert found is not None
            memory = ProcessMemory(found.url)
            first = psutil.Process(process.pid).children()[0]
            small = await asyncio.to_thread(memory.mib)
            assert small is not None
            await asyncio.sleep(6.0)  # it has been weighed once it had settled

            (tmp_path / "grow").touch()
            asked = [await ask(service, tokens=1200)]  # held while it grows
            await service.first(asked[0])
            asked += [await ask(service) for _ in range(4)]
            large = small
            while large < small + GROWTH_MIB:
                await asyncio.sleep(0.2)
                large = await asyncio.to_thread(memory.mib) or large
            await await_until(taken_out, timeout_s=60, what="the engine taken out for its memory")
            (tmp_path / "grow").unlink()  # the next one would grow as well
            asked += [await ask(service) for _ in range(3)]  # these wait for it
            ends = [await service.end(one, timeout_s=300) for one in asked]
            assert {end.status for end in ends} == {EndStatus.OK}
            assert [end.usage and end.usage["completion_tokens"] for end in ends] == [1200, *[12] * 7]
            await await_until(lambda: serves(1), timeout_s=300, what="its return")
            assert not first.is_running()
            again = await asyncio.to_thread(ProcessMemory(found.url).mib)
            assert again is not None
            assert again < large, "another process, which has not grown"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text(errors='replace')[-4000:]}") from error
