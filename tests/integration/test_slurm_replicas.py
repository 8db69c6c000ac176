"""Online replicas as jobs of a real Slurm, kept running by a policy worker in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import redis
from redis.asyncio import Redis

from hybridsched.core.policy import ReplicasPolicy, SlurmPolicy
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from hybridsched.workers.policy_stats import WorkerStatus
from tests.helpers import await_until
from tests.integration.online_rig import MODEL, POOL, Service
from tests.integration.policy_pool import policy
from tests.slurm import Testbed

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent / "hybridsched"
WANTED = ReplicasPolicy(
    model=MODEL,
    count=2,
    gres="gpu:a100:1",
    time_limit_s=3600,
    warm_ms=10_000.0,
    script="workers/online.sbatch",
)
SLURM = SlurmPolicy(enabled=True, observe_ms=300.0, reassert_ms=300.0, notice_s=10, stop_ms=10_000.0)


class Pool:
    """What the test sees of the pool."""

    def __init__(self, slurm: Testbed, client: Redis, worker: subprocess.Popen[bytes], log: Path) -> None:
        self.slurm, self.client, self.worker, self.log = slurm, client, worker, log
        self.telemetry = TelemetryStore(client, POOL)

    async def serving(self) -> dict[str, ReplicaRecord]:
        """Replicas with a healthy engine, by job."""
        known = (await self.telemetry.read_all()).replicas.values()
        return {r.job: r for r in known if r is not None and r.engine.healthy == 1.0}

    async def until(self, check: Callable[[set[str]], bool], what: str, timeout_s: float = 40) -> set[str]:
        """Wait until the jobs that serve are as `check` wants them."""
        found: set[str] = set()

        async def there() -> bool:
            found.clear()
            found.update(await self.serving())
            return check(found)

        try:
            await await_until(there, timeout_s=timeout_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}; serving: {found}\n{self.log.read_text()[-3000:]}") from None
        return set(found)

    async def status(self) -> WorkerStatus:
        raw = await self.client.get(f"hs:{{{POOL}}}:policy-worker")
        assert raw is not None
        return msgspec.json.decode(raw, type=WorkerStatus)


@asynccontextmanager
async def pool(slurm: Testbed, url: str, folder: Path, given: SlurmPolicy) -> AsyncIterator[Pool]:
    client = async_client(url)
    await PolicyStore(client, POOL).set(policy(slurm=given))
    log = folder / "policy.log"
    env = {
        **slurm.env,
        "HYBRIDSCHED_BIN": str(BIN),
        "HYBRIDSCHED_ENGINE": "simulated",
        "HYBRIDSCHED_DRAIN_S": "3",
    }
    with log.open("wb") as out:
        worker = subprocess.Popen(
            [
                *(sys.executable, "-m", "hybridsched", "worker", "policy", "--redis", url, "--pool", POOL),
                *("--scripts", str(ROOT)),
            ],
            cwd=folder,
            env=env,
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield Pool(slurm, client, worker, log)
    finally:
        worker.terminate()
        await asyncio.to_thread(worker.wait, 20)
        await asyncio.to_thread(slurm.clear)
        await client.aclose()


@pytest.mark.timeout(240)
async def test_replicas_on_slurm_come_up_are_replaced_and_survive_slurmctld(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    slurm = clean_slurm
    given = msgspec.structs.replace(SLURM, replicas=(WANTED,))
    async with pool(slurm, valkey_url, tmp_path, given) as made:
        first = await made.until(lambda jobs: len(jobs) == 2, "two replicas")
        for job, record in (await made.serving()).items():
            shown = slurm.job(int(job))
            assert (shown["NodeList"], shown["Partition"]) == (record.node, "online")
        await await_until(
            lambda: [slurm.fill(n) for n in slurm.nodes] == [0] * 4, what="no place without work"
        )

        # A request is served by one of them.
        service = Service(valkey_url)
        assert (await service.end(await service.ask())).status == "ok"

        # One is cancelled: it was told, left the pool, and another comes (after the wait of a quick death).
        gone = min(first)
        slurm.run("scancel", gone)
        second = await made.until(lambda jobs: len(jobs) == 2 and gone not in jobs, "a replacement")
        assert second & first

        # slurmctld restarts: the replicas and their number stay.
        slurm.restart_controller()
        await asyncio.sleep(2)
        assert await made.until(lambda jobs: len(jobs) == 2, "the same replicas") == second
        live = slurm.run("squeue", "-h", "-p", "online", "-o", "%i").split()
        assert set(live) == second

        # slurmctld hangs: cycles go on as before, and requests are served.
        pid = slurm.pid("slurmctld")
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(1)
            before, began = await made.status(), time.monotonic()
            await asyncio.sleep(4)
            after, took_s = await made.status(), time.monotonic() - began
            # 50 ms between cycles, and half as many on a machine that is busy with other tests.
            assert after.cycles - before.cycles > took_s / 0.05 / 2
            assert (await service.end(await service.ask())).status == "ok"
        finally:
            os.kill(pid, signal.SIGCONT)
        await service.close()

        # Asked again, slurmctld shows what it was: nothing was submitted twice.
        assert await made.until(lambda jobs: len(jobs) == 2, "the same after the hang") == second
        await asyncio.sleep(2)
        assert set(slurm.run("squeue", "-h", "-p", "online", "-o", "%i").split()) == second


@pytest.mark.timeout(240)
async def test_a_successor_serves_before_the_time_limit_comes(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """With a limit of 150 s, 10 s of notice, Slurm's minute and 5 s to warm up, one is due after 75 s."""
    one = msgspec.structs.replace(WANTED, count=1, time_limit_s=150, warm_ms=5_000.0)
    given = msgspec.structs.replace(SLURM, replicas=(one,))
    async with pool(clean_slurm, valkey_url, tmp_path, given) as made:
        (elder,) = await made.until(lambda jobs: len(jobs) == 1, "a replica")
        # Whenever one looks, a replica serves.
        gaps = 0
        jobs = {elder}
        deadline = time.monotonic() + 150
        while elder in jobs or not jobs:
            assert time.monotonic() < deadline, f"no successor: {made.log.read_text()[-5000:]}"
            jobs = set(await made.serving())
            gaps += not jobs
            await asyncio.sleep(0.05)
        assert gaps == 0
        shown = await asyncio.to_thread(clean_slurm.wait_job, int(elder), "COMPLETED")
        assert shown["ExitCode"] == "0:0", "it was told to leave and did"
        acts = await EventLog(made.client, POOL).read_all(kinds=["slurm"])
        assert [int(elder)] == [act["job"] for act in acts if act["act"] == "stop"]
        assert [act["outcome"] for act in acts if act["act"] == "submit"] == ["ok", "ok"]


@pytest.mark.timeout(240)
async def test_a_batch_waits_in_slurm_until_a_lane_opens_and_runs_there(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """The whole flow: the job that waits opens the gate, the gate's count starts the job, the batch ends."""
    slurm = clean_slurm
    lines = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": [1, 2, 3 + i], "max_tokens": 4, "ignore_eos": True},
        }
        for i in range(6)
    ]
    folder = slurm.state / "batch"
    folder.mkdir(exist_ok=True)
    source = folder / "six.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = msgspec.structs.replace(SLURM, replicas=(msgspec.structs.replace(WANTED, count=1),))
    async with pool(slurm, valkey_url, tmp_path, given) as made:
        (job,) = await made.until(lambda jobs: len(jobs) == 1, "a replica")
        node = (await made.serving())[job].node
        await await_until(lambda: [slurm.fill(n) for n in slurm.nodes] == [0] * 4, what="closed counts")
        out = slurm.state / "out"
        out.mkdir(exist_ok=True, mode=0o1777)
        said = slurm.run(
            *("env", f"HYBRIDSCHED_BIN={BIN}", f"HYBRIDSCHED_REDIS_URL={valkey_url}"),
            *(f"HYBRIDSCHED_POOL={POOL}", "sbatch", "--parsable", f"--output={out}/%j.out"),
            *(str(ROOT / "workers" / "offline.sbatch"), str(source)),
        )
        number = int(said.strip())
        try:
            shown = await asyncio.to_thread(slurm.wait_job, number, "COMPLETED", timeout_s=60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{slurm.output(number)}\n{made.log.read_text()[-4000:]}") from None
        assert shown["NodeList"] == node
        answers = (folder / "six.output.jsonl").read_text().splitlines()
        assert [json.loads(line)["custom_id"] for line in answers] == [f"c{i}" for i in range(6)]
        await await_until(lambda: slurm.fill(node) == 0, timeout_s=20, what="the count without work")
