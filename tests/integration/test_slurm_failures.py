"""What goes wrong with a real Slurm while offline jobs wait and run: every batch complete, nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import redis

from hybridsched.core.values import GateState
from hybridsched.store.batch_values import BatchInfo, BatchStatus
from hybridsched.store.batches import BatchStore
from hybridsched.store.events import EventLog
from hybridsched.store.holds import HoldStore
from tests.helpers import await_until
from tests.integration.offline_rig import LANE, results
from tests.integration.offline_rig import POOL as SITE_POOL
from tests.integration.online_rig import MODEL, POOL
from tests.integration.slurm_jobs_rig import BATCH_LINES, KEYS, BatchCase, Site, until
from tests.integration.test_slurm_replicas import BIN, ROOT, SLURM, WANTED, Pool, pool
from tests.slurm import Testbed

LINES = BATCH_LINES
ONE = (msgspec.structs.replace(WANTED, count=1),)


# -- daemons that die: the gate in the test's hand ------------------------------------------------------


def done_lines(client: redis.Redis, name: str) -> int:
    """Lines of a pool's batches that are done."""
    store = BatchStore(client, name)
    return sum(store.progress(batch.id).done for batch in store.all())


async def ends_complete(made: Site, job: int, *, timeout_s: float = 60) -> dict[str, str]:
    shown = await made.wait(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", timeout_s=timeout_s)
    assert shown["JobState"] == "COMPLETED", made.slurm.output(job)
    return shown


def job_processes(slurm: Testbed, job: int) -> list[psutil.Process]:
    """A job's processes and the slurmstepd above them."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            ours = environment.get("SLURM_CONF") == str(slurm.conf)
            if ours and environment.get("SLURM_JOB_ID") == str(job) and "SLURMD_NODENAME" in environment:
                found += [process, *(p for p in process.parents() if p.name() == "slurmstepd")]
        except psutil.Error:
            continue
    return list(dict.fromkeys(found))


@pytest.mark.timeout(180)
async def test_slurmctld_restarts_under_a_running_job(
    clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    async with case.site() as made:
        await made.gate.set(GateState.OPEN)
        job = made.sbatch(str(case.source), *case.speed, options=("--nodelist=n1",))
        await until(lambda: done_lines(valkey, SITE_POOL) >= 5, timeout_s=40, what="five lines done")
        await made.gate.set(GateState.CLOSED)
        await asyncio.to_thread(clean_slurm.wait_saved, job)
        await asyncio.to_thread(clean_slurm.kill, "slurmctld")
        await made.gate.set(GateState.OPEN)
        alone = done_lines(valkey, SITE_POOL) + 5
        await until(
            lambda: done_lines(valkey, SITE_POOL) >= alone, timeout_s=20, what="work without slurmctld"
        )
        await made.gate.set(GateState.CLOSED)  # so that something is left to do
        await asyncio.to_thread(clean_slurm.up)
        assert done_lines(valkey, SITE_POOL) < len(case.expected) - 1, "it was in the middle"
        await made.gate.set(GateState.OPEN)
        shown = await ends_complete(made, job)
        assert shown["Restarts"] == "0", "the job did not notice"
    assert results(case.source) == case.expected


@pytest.mark.timeout(180)
async def test_a_node_dies_under_a_job_and_comes_back(
    clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    async with case.site() as made:
        await made.gate.set(GateState.OPEN)
        job = made.sbatch(str(case.source), *case.speed, options=("--nodelist=n1",))
        await until(lambda: done_lines(valkey, SITE_POOL) >= 5, timeout_s=40, what="five lines done")
        there = job_processes(clean_slurm, job)
        assert len(there) >= 3, "slurmstepd, the script and the worker"
        assert "slurmstepd" in {process.name() for process in there}
        await asyncio.to_thread(clean_slurm.kill, "slurmd-n1")
        for process in there:
            process.kill()
        died = asyncio.get_running_loop().time()
        kept = done_lines(valkey, SITE_POOL)
        assert kept < LINES - 1, "it was in the middle"
        # The machine boots again, and slurmd says that it knows of no job. slurmctld believes that only of a
        # job that was last known to run more than BatchStartTimeout + 10 s ago, and it asks just once.
        await asyncio.sleep(max(0.0, died + 24 - asyncio.get_running_loop().time()))
        await asyncio.to_thread(clean_slurm.up)
        try:
            await until(lambda: clean_slurm.job(job)["Restarts"] == "1", timeout_s=40, what="the requeue")
        except AssertionError as error:
            seen = "\n".join(clean_slurm.log().splitlines()[-40:])
            raise AssertionError(f"{error}\n{clean_slurm.job(job)}\n{seen}") from None
        assert done_lines(valkey, SITE_POOL) >= kept
        await ends_complete(made, job)
        await until(lambda: valkey.get(KEYS.lane_holder(LANE)) is None, timeout_s=15, what="the free lane")
        await until(lambda: clean_slurm.node("n1")["State"] == "IDLE", timeout_s=20, what="n1 usable")
    assert results(case.source) == case.expected


# -- what the policy worker does about it ---------------------------------------------------------------


class Offline:
    """A pool with one replica on a node, its gate closed by an operator's hold, and users' batches."""

    def __init__(self, made: Pool, node: str, store: redis.Redis, url: str) -> None:
        self.pool, self.node, self.store, self.url = made, node, store, url
        self.slurm = made.slurm
        self.holds = HoldStore(made.client, POOL)

    async def hold(self) -> None:
        await self.holds.put(by="test", why="closed for the test")

    def submit(self, source: Path, *options: str) -> int:
        out = self.slurm.state / "out"
        out.mkdir(exist_ok=True, mode=0o1777)
        said = self.slurm.run(
            *("env", f"HYBRIDSCHED_BIN={BIN}", f"HYBRIDSCHED_REDIS_URL={self.url}"),
            *(f"HYBRIDSCHED_POOL={POOL}", "sbatch", "--parsable", f"--output={out}/%j.out", *options),
            *(str(ROOT / "workers" / "offline.sbatch"), str(source)),
        )
        return int(said.strip())

    def fills(self) -> list[int]:
        return [self.slurm.fill(node) for node in self.slurm.nodes]

    def batches(self) -> list[BatchInfo]:
        return BatchStore(self.store, POOL).all()

    async def acts(self, act: str) -> list[dict[str, object]]:
        return [
            e for e in await EventLog(self.pool.client, POOL).read_all(kinds=["slurm"]) if e["act"] == act
        ]

    async def until(self, check: Callable[[], object], what: str, timeout_s: float = 30) -> None:
        try:
            await until(check, timeout_s=timeout_s, what=what)
        except AssertionError as error:
            queue = self.slurm.run("squeue", "-o", "%i %P %T %r %N")
            raise AssertionError(
                f"{error}; counts {self.fills()}\n{queue}\n{self.pool.log.read_text()[-5000:]}"
            ) from None

    async def ends_complete(self, job: int, *, timeout_s: float = 60) -> dict[str, str]:
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        await self.until(
            lambda: self.slurm.job(job).get("JobState") in ended, f"the end of job {job}", timeout_s
        )
        shown = self.slurm.job(job)
        assert shown["JobState"] == "COMPLETED", self.slurm.output(job)
        return shown


@asynccontextmanager
async def held(
    slurm: Testbed, url: str, folder: Path, store: redis.Redis, **slurm_policy: float
) -> AsyncIterator[Offline]:
    given = msgspec.structs.replace(SLURM, replicas=ONE, **slurm_policy)
    async with pool(slurm, url, folder, given) as made:
        (job,) = await made.until(lambda jobs: len(jobs) == 1, "a replica")
        node = (await made.serving())[job].node
        yield Offline(made, node, store, url)


def write_lines(path: Path, lines: int, tokens: int) -> list[str]:
    """A batch for the pool's model; its ids."""
    ids = [f"c{i}" for i in range(lines)]
    with path.open("w") as file:
        for i, name in enumerate(ids):
            body = {"model": MODEL, "prompt": [1, 2, 3 + i], "max_tokens": tokens, "ignore_eos": True}
            line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return ids


@pytest.mark.timeout(180)
async def test_jobs_that_a_reconfigure_let_through_do_nothing_at_closed_gates(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """`scontrol reconfigure` sets every count to its maximum: a job starts at the closed lane, and another on
    a node without lanes. The first waits there, the second gets back to the queue; both complete, once."""
    slurm = clean_slurm
    sources = [tmp_path / "here.jsonl", tmp_path / "elsewhere.jsonl"]
    ids = [write_lines(source, 6, 4) for source in sources]
    async with held(slurm, valkey_url, tmp_path, valkey, requeue_after_ms=5000.0) as ours:
        await ours.hold()
        await ours.until(lambda: ours.fills() == [0] * 4, "closed counts")
        others = ",".join(node for node in slurm.nodes if node != ours.node)
        here = ours.submit(sources[0], f"--exclude={others}")
        elsewhere = ours.submit(sources[1], f"--exclude={ours.node}")
        await asyncio.sleep(1.5)
        assert {slurm.job(job)["JobState"] for job in (here, elsewhere)} == {"PENDING"}

        before = len(await ours.acts("set_fill"))

        async def reset() -> bool:
            """Each node's count was found wrong and told again."""
            told = (await ours.acts("set_fill"))[before:]
            return {act["node"] for act in told if act["why"] == "reset"} == set(slurm.nodes)

        slurm.run("scontrol", "reconfigure")
        await await_until(reset, timeout_s=5, what="every count re-asserted")
        await ours.until(lambda: ours.fills() == [0] * 4, "counts of 0", timeout_s=2)

        # The same while the policy worker hangs: now there is time enough for Slurm to start them.
        ours.pool.worker.send_signal(signal.SIGSTOP)
        try:
            slurm.run("scontrol", "reconfigure")
            await ours.until(
                lambda: {slurm.job(job)["JobState"] for job in (here, elsewhere)} == {"RUNNING"},
                "the jobs that slipped through",
                timeout_s=15,
            )
        finally:
            ours.pool.worker.send_signal(signal.SIGCONT)
        await ours.until(lambda: ours.fills() == [0] * 4, "counts of 0 again", timeout_s=5)
        await ours.until(lambda: len(ours.batches()) == 2, "both batches known")
        # Where no lane is, none can open: that one is sent back after the policy's time.
        await ours.until(lambda: slurm.job(elsewhere)["Restarts"] == "1", "its requeue", timeout_s=20)
        assert done_lines(valkey, POOL) == 0
        (serving,) = (await ours.pool.serving()).values()
        assert serving.engine.running == 0
        assert ours.fills() == [0] * 4
        slurm.run("scontrol", "update", f"jobid={elsewhere}", "ExcNodeList=")
        await ours.holds.release(await ours.holds.list())
        for job in (here, elsewhere):
            shown = await ours.ends_complete(job)
            assert shown["NodeList"] == ours.node
        assert [batch.status for batch in ours.batches()] == [BatchStatus.COMPLETED] * 2
    assert [list(results(source)) for source in sources] == ids


@pytest.mark.timeout(180)
async def test_a_gate_closed_for_the_policys_time_sends_its_job_back_to_the_queue(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """The last rung: with its place kept, and on from there when the gate opens."""
    slurm = clean_slurm
    source = tmp_path / "batch.jsonl"
    ids = write_lines(source, 200, 150)  # several rounds of the lane: far from done at its third line
    async with held(slurm, valkey_url, tmp_path, valkey, requeue_after_ms=4000.0) as ours:
        job = ours.submit(source)
        await ours.until(lambda: done_lines(valkey, POOL) >= 3, "three lines done")
        await ours.hold()
        closed = asyncio.get_running_loop().time()
        await ours.until(lambda: slurm.job(job)["Restarts"] == "1", "the requeue")
        took_s = asyncio.get_running_loop().time() - closed
        kept = done_lines(valkey, POOL)
        assert took_s > 3.5, "not before its time"
        assert 3 <= kept < len(ids)
        (told,) = await ours.acts("signal_job")
        assert (told["job"], told["why"], told["outcome"]) == (job, "gate_closed", "ok")
        (batch,) = ours.batches()
        assert BatchStore(valkey, POOL).progress(batch.id).running_chunks == 0
        await asyncio.sleep(2)
        assert slurm.job(job)["JobState"] == "PENDING", "it waits for a lane"
        await ours.holds.release(await ours.holds.list())
        shown = await ours.ends_complete(job)
        assert shown["Restarts"] == "1"
        assert len(await ours.acts("signal_job")) == 1
    assert list(results(source)) == ids
    assert "job_leaves" in slurm.output(job)


@pytest.mark.timeout(180)
async def test_a_node_whose_gpu_is_gone_is_drained_and_the_replica_comes_up_elsewhere(
    clean_slurm: Testbed,
    valkey: redis.Redis,
    valkey_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slurm = clean_slurm
    probe = tmp_path / "probe"
    probe.write_text("#!/bin/sh\necho GPU $1 has fallen off the bus\nexit 1\n")
    probe.chmod(0o755)
    monkeypatch.setitem(slurm.env, "HYBRIDSCHED_GPU_PROBE", str(probe))
    given = msgspec.structs.replace(SLURM, replicas=ONE)
    async with pool(slurm, valkey_url, tmp_path, given) as made:
        (job,) = await made.until(lambda jobs: len(jobs) == 1, "a replica")
        node = (await made.serving())[job].node
        engines = [
            p for p in job_processes(slurm, int(job)) if "hybridsched.engines.simulated" in p.cmdline()
        ]
        assert engines
        for process in engines:
            os.kill(process.pid, signal.SIGKILL)
        await until(lambda: "DRAIN" in slurm.node(node)["State"], timeout_s=20, what="the drain")
        assert "fallen off the bus" in slurm.node(node)["Reason"]
        assert f"job {job}" in slurm.node(node)["Reason"]
        shown = await asyncio.to_thread(slurm.wait_job, int(job), "FAILED")
        assert shown["ExitCode"] == "69:0"
        (heir,) = await made.until(lambda jobs: len(jobs) == 1 and job not in jobs, "a replica elsewhere")
        assert (await made.serving())[heir].node != node
        drains = [
            e for e in await EventLog(made.client, POOL).read_all(kinds=["slurm"]) if e["act"] == "drain"
        ]
        assert [event["node"] for event in drains] == [node]
        await await_until(lambda: slurm.fill(node) == 0, what="no offline place on a drained node")
