"""`hybridsched worker replica`: engine and online worker live and die together."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from hybridsched.core.policy import HealthPolicy, PolicyKind, PoolPolicy
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.store.connection import async_client
from hybridsched.store.gpu_reports import GpuReport, GpuReports
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from hybridsched.workers.gpu_probe import Verdict, job_gpus, probe_gpus
from hybridsched.workers.replica_job import ENGINE_DIED, GPU_LOST, NOT_STARTED, engine_command, replica_name
from hybridsched.workers.slurm_env import JobPlace
from tests.helpers import wait_until
from tests.integration.offline_rig import simulated_engine
from tests.integration.online_rig import MODEL, POOL, Service

SLURM = {"SLURM_JOB_ID": "41", "SLURMD_NODENAME": "n7", "SLURM_JOB_NAME": "hs-tiny", "SLURM_JOB_GPUS": "2"}
SIMULATED = ("simulated", "--port", "{port}", "--served-model-name", MODEL)


QUICK_HEALTH = PoolPolicy(
    name="quick", kind=PolicyKind.IDLE_WINDOW, health=HealthPolicy(doubt_ms=500, test_ms=1000)
)


def post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=20) as answer:
        assert answer.status == 200


class Replica:
    """The command in a process of its own."""

    def __init__(self, url: str, folder: Path, *command: str, options: tuple[str, ...] = ()) -> None:
        self._log = folder / "replica.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hybridsched", "worker", "replica", "--redis", url),
                    *("--pool", POOL, "--model", MODEL, *options, "--", *(command or SIMULATED)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **SLURM},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def engine(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def end(self, timeout_s: float = 20.0) -> int:
        return self.process.wait(timeout_s)


@pytest.fixture
def replicas(valkey: redis.Redis, valkey_url: str, tmp_path: Path) -> Iterator[list[Replica]]:
    started: list[Replica] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def record(valkey_url: str, name: str = "hs-tiny-41") -> ReplicaRecord | None:
    async def read() -> ReplicaRecord | None:
        client = async_client(valkey_url)
        try:
            return (await TelemetryStore(client, POOL).read_all()).replicas.get(name)
        finally:
            await client.aclose()

    return asyncio.run(read())


def serving(valkey_url: str) -> bool:
    found = record(valkey_url)
    return found is not None and found.engine.healthy == 1.0


def start(
    replicas: list[Replica], valkey_url: str, folder: Path, *command: str, options: tuple[str, ...] = ()
) -> Replica:
    replicas.append(Replica(valkey_url, folder, *command, options=options))
    return replicas[-1]


def test_it_says_where_it_is_and_leaves_at_usr2(
    replicas: list[Replica], valkey_url: str, tmp_path: Path
) -> None:
    replica = start(replicas, valkey_url, tmp_path)
    wait_until(lambda: serving(valkey_url), timeout_s=30, what="a serving replica")
    found = record(valkey_url)
    assert found is not None
    assert (found.node, found.job, found.lane) == ("n7", "41", "hs-tiny-41")
    assert found.url.startswith("http://127.0.0.1:")
    engine = replica.engine()
    replica.process.send_signal(signal.SIGUSR2)
    assert replica.end() == 0
    assert record(valkey_url) is None
    assert not engine.is_running()


def test_a_port_in_use_makes_no_replica_of_somebody_elses_engine(
    replicas: list[Replica], valkey_url: str, tmp_path: Path
) -> None:
    with simulated_engine(tmp_path, model=MODEL) as other:
        port = other.rpartition(":")[2]
        replica = start(replicas, valkey_url, tmp_path, options=("--port", port))
        assert replica.end() == NOT_STARTED
    assert "engine_port_taken" in replica.log
    assert record(valkey_url) is None


def test_an_engine_that_hangs_is_started_again_in_its_place(
    replicas: list[Replica], valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    replica = start(replicas, valkey_url, tmp_path)
    wait_until(lambda: serving(valkey_url), timeout_s=30, what="a serving replica")
    found = record(valkey_url)
    assert found is not None
    first = replica.engine()

    async def ask() -> tuple[str, str]:
        client = async_client(valkey_url)
        await PolicyStore(client, POOL).set(QUICK_HEALTH)
        service = Service(valkey_url)
        engine = VllmHttpEngine(found.url)
        try:
            await asyncio.to_thread(post, f"{found.url}/pause?mode=keep")
            assert await engine.healthy(), "its health check says nothing of it"
            request = await service.ask(timeout_ms=60_000)
            end = await service.end(request, timeout_s=60)
            return end.status, end.replica or ""
        finally:
            await engine.close()
            await service.close()
            await client.aclose()

    assert asyncio.run(ask()) == ("ok", "hs-tiny-41")
    assert replica.process.poll() is None
    assert replica.engine() != first
    assert not first.is_running()
    assert "engine_hung" in replica.log
    replica.process.send_signal(signal.SIGUSR2)
    assert replica.end() == 0


def test_usr2_lets_requests_in_flight_end(replicas: list[Replica], valkey_url: str, tmp_path: Path) -> None:
    replica = start(replicas, valkey_url, tmp_path)
    wait_until(lambda: serving(valkey_url), timeout_s=30, what="a serving replica")

    async def ask() -> str:
        service = Service(valkey_url)
        try:
            request = await service.ask(tokens=150)
            await service.first(request)
            replica.process.send_signal(signal.SIGUSR2)
            end = await service.end(request)
            assert (end.usage or {})["completion_tokens"] == 150  # chunks may hold several
            return end.status
        finally:
            await service.close()

    assert asyncio.run(ask()) == "ok"
    assert replica.end() == 0


@pytest.mark.parametrize(("probe_status", "expected"), [(0, ENGINE_DIED), (1, GPU_LOST), (7, ENGINE_DIED)])
def test_a_dead_engine_ends_the_job_and_a_lost_gpu_is_reported(
    replicas: list[Replica], valkey_url: str, tmp_path: Path, probe_status: int, expected: int
) -> None:
    probe = tmp_path / "probe"
    probe.write_text(f"#!/bin/sh\necho GPU $1 speaks\nexit {probe_status}\n")
    probe.chmod(probe.stat().st_mode | stat.S_IXUSR)
    replica = start(replicas, valkey_url, tmp_path, options=("--gpu-probe", str(probe)))
    wait_until(lambda: serving(valkey_url), timeout_s=30, what="a serving replica")
    replica.engine().kill()
    assert replica.end() == expected
    assert record(valkey_url) is None

    async def reports() -> list[GpuReport]:
        client = async_client(valkey_url)
        try:
            return await GpuReports(client, POOL).read()
        finally:
            await client.aclose()

    why = f"{probe} ended with 1: GPU 2 speaks"
    assert asyncio.run(reports()) == ([GpuReport(job=41, node="n7", why=why)] if expected == GPU_LOST else [])


def test_the_engine_dies_with_its_wrapper(replicas: list[Replica], valkey_url: str, tmp_path: Path) -> None:
    replica = start(replicas, valkey_url, tmp_path)
    wait_until(lambda: serving(valkey_url), timeout_s=30, what="a serving replica")
    engine = replica.engine()
    replica.process.kill()
    replica.process.wait()
    wait_until(lambda: not engine.is_running() or engine.status() == "zombie", what="the engine's end")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("/no/such/engine",), "engine_not_started"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "engine_start_failed"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "engine_start_timeout"),
    ],
)
def test_an_engine_that_does_not_start_is_a_failure(
    replicas: list[Replica], valkey_url: str, tmp_path: Path, command: tuple[str, ...], says: str
) -> None:
    options = ("--start-timeout", "1", "--gpu-probe", "/no/probe")
    replica = start(replicas, valkey_url, tmp_path, *command, options=options)
    assert replica.end() == NOT_STARTED
    assert says in replica.log


def test_stopped_while_the_engine_starts(replicas: list[Replica], valkey_url: str, tmp_path: Path) -> None:
    replica = start(replicas, valkey_url, tmp_path, sys.executable, "-c", "import time; time.sleep(60)")
    wait_until(lambda: "replica_started" in replica.log, timeout_s=20, what="the start")
    replica.process.send_signal(signal.SIGTERM)
    assert replica.end() == 0


def test_names_and_commands() -> None:
    place = JobPlace(job="12_3", node="n1")
    assert replica_name(place, "my job/ä") == "my-job-12_3"
    assert replica_name(place, "") == "replica-12_3"
    assert engine_command(["vllm", "--port={port}"], 5) == ["vllm", "--port=5"]
    assert engine_command(["simulated"], 5)[1:] == ["-m", "hybridsched.engines.simulated"]
    assert job_gpus({"CUDA_VISIBLE_DEVICES": "0,MIG-1"}) == ("0", "MIG-1")
    assert job_gpus({}) == ()


async def test_nothing_to_probe_proves_nothing() -> None:
    assert await probe_gpus([]) == Verdict(broken=None, why="the job has no GPU")
    assert (await probe_gpus(["0"], probe="/no/nvidia-smi")).broken is None
