"""The policy worker's Slurm part against a Slurm in memory, and gates while Slurm hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import redis
from redis.asyncio import Redis

from hybridsched.cluster.fake import FakeCluster
from hybridsched.cluster.values import ClusterError, Gres, JobSpec, total
from hybridsched.core.policy import PoolPolicy, ReplicasPolicy, SlurmPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.replica_values import read_tag
from hybridsched.core.values import GateState
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.gpu_reports import GpuReport, GpuReports
from hybridsched.store.job_models import LIFE_S
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders, Place
from hybridsched.workers.lane_claim import Seeker
from hybridsched.workers.policy import PolicyWorker
from hybridsched.workers.policy_slurm import SlurmSide, SlurmTask
from hybridsched.workers.policy_slurm_acts import parse_gres
from hybridsched.workers.policy_slurm_view import LaneSeen, SlurmStatus
from tests.helpers import await_until
from tests.integration.policy_pool import MODEL, POOL, ScriptedPool, lane, leading, policy, replica, scripted

FAST = SlurmPolicy(enabled=True, observe_ms=20.0, reassert_ms=50.0, fill_hysteresis_ms=100.0)
OFFLINE = JobSpec(
    name="off",
    script="#!/bin/sh\n",
    partition="offline",
    gres=(Gres(name="hsfill"), Gres(name="hslane")),
    requeue=True,
)


class Bed:
    """The Slurm part in this event loop, its Slurm in memory, its policy worker played by the test."""

    def __init__(self, url: str, client: Redis, folder: Path, slurm: SlurmPolicy) -> None:
        self.cluster = FakeCluster()
        self.slurm = self.cluster.slurm
        self.slurm.now_ms = time.time() * 1000.0
        self.side = SlurmSide(url, POOL, scripts=folder)
        self.events = EventLog(client, POOL)
        self.task = SlurmTask(self.side, self.cluster, client, self.events)
        self.client = client
        self.set(slurm)

    def set(self, slurm: SlurmPolicy) -> None:
        self.policy = policy(slurm=slurm)

    async def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.side._thread = self.side._thread or _NoThread()  # type: ignore[assignment]
            self.side.offer(self.policy, "leader")
            self.task._due_s = 0.0
            await self.task.turn()

    def fill(self, node: str) -> int:
        return total(self.slurm.nodes[node].live, "hsfill")

    def open(self, lane: str, *, is_open: bool = True, ago_ms: float = 0.0) -> None:
        self.side.gate(lane, is_open=is_open)
        seen = self.side.gates[lane]
        self.side.gates[lane] = LaneSeen(open=is_open, since_ms=seen.since_ms - ago_ms)

    def replica_jobs(self) -> list[int]:
        live = [j.value for j in self.slurm.jobs.values() if j.value.pending or j.value.running]
        return [job.id for job in live if read_tag(job.comment) is not None]


class _NoThread:
    def join(self, timeout: float) -> None: ...


@asynccontextmanager
async def bed(url: str, folder: Path, slurm: SlurmPolicy = FAST) -> AsyncIterator[tuple[Bed, ScriptedPool]]:
    async with scripted(url) as pool:
        made = Bed(url, pool.client, folder, slurm)
        made.slurm.user = made.task._user
        yield made, pool
        await made.events.close()


async def test_counts_follow_the_gates_and_the_parked_node_keeps_its_own(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with bed(valkey_url, tmp_path) as (made, pool):
        await pool.say(replica("a", node="n1"), replica("b", node="n1"), replica("c", node="n2"))
        await made.turn(2)
        assert [made.fill(n) for n in ("n1", "n2", "n3", "n4", "hspark")] == [0, 0, 0, 0, 4]
        made.open("a")
        made.open("c")
        await made.turn(2)
        assert [made.fill(n) for n in ("n1", "n2", "n3")] == [1, 1, 0]
        made.open("a", is_open=False)
        await made.turn(2)
        assert made.fill("n1") == 1, "a burst does not lower it"
        made.open("a", is_open=False, ago_ms=200.0)
        await made.turn(2)
        assert made.fill("n1") == 0
        made.slurm.reconfigure()
        await made.turn(2)
        assert [made.fill(n) for n in ("n1", "n2", "n3", "n4", "hspark")] == [0, 1, 0, 0, 4]
        await made.events.flush()
        acts = await made.events.read_all(kinds=["slurm"])
        assert {"act": "set_fill", "node": "n2", "count": 1, "why": "lanes_open"}.items() <= acts[5].items()


async def test_a_waiting_job_is_kept_from_nodes_without_its_model(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with bed(valkey_url, tmp_path) as (made, pool):
        big = msgspec.structs.replace(replica("b", node="n2"), model="big")
        await pool.say(replica("a", node="n1"), big)
        await made.turn(2)
        named = made.slurm.submit(msgspec.structs.replace(OFFLINE, comment="hybridsched b1 model=big"))
        mute = made.slurm.submit(OFFLINE)
        made.slurm.jobs[mute].value = msgspec.structs.replace(made.slurm.jobs[mute].value, excluded=("n4",))

        def excluded(job: int) -> list[str]:
            return sorted(made.slurm.jobs[job].value.excluded)

        await made.turn(3)
        assert excluded(named) == ["n1", "n3", "n4"]
        assert excluded(mute) == ["n4"], "its model is not known: what its user wants stays"
        calls = [call for call in made.cluster.calls if call[0] == "update_job"]
        assert len(calls) == 1, "set when it changes"
        await pool.say(msgspec.structs.replace(replica("c", node="n3"), model="big"))
        await asyncio.sleep(FAST.reassert_ms / 1000.0)  # a job is not told again sooner
        await made.turn(2)
        assert excluded(named) == ["n1", "n4"]
        status = msgspec.json.decode(await pool.client.get(Keys(POOL).slurm_status) or b"", type=SlurmStatus)
        assert status.serving == {"m": ["n1"], "big": ["n2", "n3"]}
        assert (status.waiting, status.models) == ({"big": 1, "": 1}, {str(named): "big", str(mute): ""})

        # It starts in the wrong place, says what it needs as it looks for a lane, and is told to leave.
        made.slurm.cancel(named)
        made.open("a")
        await made.turn(2)
        assert made.slurm.jobs[mute].value.nodes == ("n1",)
        seeker = Seeker(LaneHolders(pool.client, POOL), owner="o", job=str(mute), node="n1", model="big")
        assert await seeker.find(asyncio.Event(), within_s=0.1) is None
        assert 0 < await pool.client.ttl(Keys(POOL).lane_job_model(str(mute))) <= LIFE_S
        await made.task.acts.keep_away(made.slurm.jobs[mute].value, ("n1",), "")
        assert (made.task.acts.problem, excluded(mute)) == ("", ["n4"]), "it has started in between"
        made.set(msgspec.structs.replace(FAST, wrong_node_ms=1.0))
        made.slurm.jobs[mute].value = msgspec.structs.replace(
            made.slurm.jobs[mute].value, start_ms=time.time() * 1000.0 - 1000.0
        )
        await made.turn(3)
        assert made.slurm.signals == [(mute, "USR2", False)]
        made.slurm.requeue(mute)
        await made.turn(2)
        assert excluded(mute) == ["n1", "n4"]


async def test_a_job_at_a_gate_that_stays_closed_is_told_to_leave_and_at_last_requeued(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path, monkeypatch: Any
) -> None:
    slurm = msgspec.structs.replace(FAST, requeue_after_ms=1.0, fill_hysteresis_ms=0.0)
    async with bed(valkey_url, tmp_path, slurm) as (made, pool):
        await pool.say(replica("a", node="n1"))
        made.slurm.now_ms -= 60_000.0
        made.open("a")
        job = await made.cluster.submit(msgspec.structs.replace(OFFLINE, nodes=("n1",)))
        place = Place(lane="a", replica="a", model=MODEL, url="")
        await LaneHolders(pool.client, POOL).claim([place], owner="w", job=str(job), open_only=False)
        await made.turn(2)
        made.open("a", is_open=False, ago_ms=1000.0)
        await made.turn()
        assert (job, "USR2", False) in made.slurm.signals
        assert made.slurm.jobs[job].value.running
        monkeypatch.setattr("hybridsched.workers.policy_slurm_acts.NOTICE_S", 0.0)
        await asyncio.sleep(0.06)
        await made.turn()
        assert made.slurm.jobs[job].value.pending
        assert made.slurm.signals.count((job, "USR2", False)) == 1
        made.open("a")
        await made.turn(3)
        assert made.slurm.jobs[job].value.pending, "slurmd may refuse the next run in the second of the last"
        monkeypatch.setattr("hybridsched.workers.policy_slurm_upkeep.SETTLED_S", 0.0)
        await made.turn(3)
        assert made.slurm.jobs[job].value.running, "the wait after a requeue is skipped for an open lane"


async def test_replicas_come_up_die_and_are_replaced(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    (tmp_path / "online.sbatch").write_text("#!/bin/sh\n")
    wanted = ReplicasPolicy(
        model="org/m", count=2, gres="gpu:a100:1", script="online.sbatch", arguments=("--x",)
    )
    async with bed(valkey_url, tmp_path, msgspec.structs.replace(FAST, replicas=(wanted,))) as (made, pool):
        await made.turn(3)
        first = made.replica_jobs()
        assert len(first) == 2
        spec = made.slurm.jobs[first[0]].spec
        assert spec.environment["HYBRIDSCHED_MODEL"] == "org/m"
        assert (spec.name, spec.signal, spec.requeue) == ("hs-org-m", "B:USR2@60", False)
        assert (spec.arguments, spec.time_limit_min) == (("--x",), 1440)
        await pool.say(*(replica(f"r{job}", node="n1", job=str(job)) for job in first))
        await made.turn(2)
        status = msgspec.json.decode(await pool.client.get(Keys(POOL).slurm_status) or b"", type=SlurmStatus)
        assert status.replicas == {"org/m": {"wanted": 2, "jobs": 2, "serving": 2}}
        made.slurm.finish(first[0], "FAILED")
        await made.turn(2)
        assert len(made.replica_jobs()) == 1, "it had served for no time: the next one waits"
        assert made.task.fleet.troubles


async def test_a_script_outside_the_folder_is_refused(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "evil").write_text("#!/bin/sh\n")
    wanted = ReplicasPolicy(model="m", script="../evil")
    async with bed(valkey_url, folder, msgspec.structs.replace(FAST, replicas=(wanted,))) as (made, _):
        await made.turn(2)
        assert made.slurm.jobs == {}
        assert "is no file below" in made.task.fleet.troubles[0].last


async def test_somebody_elses_jobs_are_not_ours(valkey: redis.Redis, valkey_url: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("#!/bin/sh\n")
    wanted = ReplicasPolicy(model="m", script="s", gres="gpu:a100:1")
    async with bed(valkey_url, tmp_path, msgspec.structs.replace(FAST, replicas=(wanted,))) as (made, _):
        await made.turn(2)
        comment = made.slurm.jobs[1].value.comment
        await made.cluster.submit(JobSpec(name="x", script="#!/bin/sh\n", comment=comment, user="mallory"))
        await made.turn(2)
        assert made.slurm.jobs[2].value.running
        assert made.slurm.jobs[1].value.running


async def test_a_reported_gpu_drains_its_node(valkey: redis.Redis, valkey_url: str, tmp_path: Path) -> None:
    async with bed(valkey_url, tmp_path) as (made, pool):
        reports = GpuReports(pool.client, POOL)
        await reports.report(GpuReport(job=7, node="n2", why="GPU 1 is lost"))
        await made.turn()
        assert made.slurm.nodes["n2"].reason == "hybridsched: job 7: GPU 1 is lost"
        assert await reports.read() == []
        await reports.report(GpuReport(job=8, node="n3", why="GPU 0 is lost"))
        await made.turn(2)
        assert "DRAIN" not in made.slurm.nodes["n3"].states, "the policy allows one"
        assert await reports.read() == []


async def test_nothing_is_asked_of_a_slurm_that_cannot_be_read_or_by_one_who_does_not_lead(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with bed(valkey_url, tmp_path) as (made, _):
        made.slurm.down = True
        await made.turn(3)
        assert {call[0] for call in made.cluster.calls} == {"jobs", "nodes"}
        assert "no slurmctld answers" in made.task.problem
        made.cluster.calls.clear()
        made.side.offer(made.policy, "")
        made.task._due_s = 0.0
        await made.task.turn()
        assert made.cluster.calls == []


class HangingCluster(FakeCluster):
    """A slurmctld that takes every call and never answers."""

    async def _reach(self, *call: object) -> None:
        self.calls.append(call)
        await asyncio.sleep(30)
        raise ClusterError("no answer", code="timeout", retryable=True)


def slurm_policy() -> PoolPolicy:
    return policy(slurm=FAST)


async def test_waiting_jobs_open_a_gate_at_which_nobody_stands(valkey: redis.Redis, valkey_url: str) -> None:
    cluster = FakeCluster()
    for name in ("n1", "n2", "n3", "n4"):
        cluster.slurm.set_gres_count(name, "hsfill", 0)
    async with scripted(valkey_url, given=slurm_policy()) as pool:
        side = SlurmSide(valkey_url, POOL, cluster=lambda: cluster)
        await pool.say(replica("r0", node="n1"))
        try:
            async with leading(valkey_url, slurm=side):
                await pool.sees(GateState.CLOSED, Reason.NO_WORK)
                cluster.slurm.submit(OFFLINE)
                await pool.sees(GateState.OPEN, Reason.IDLE)
                await await_until(lambda: cluster.slurm.jobs[1].value.running, what="the job")
                assert cluster.slurm.jobs[1].value.nodes == ("n1",)
        finally:
            await asyncio.to_thread(side.end)


async def test_gates_go_on_while_slurm_hangs(valkey: redis.Redis, valkey_url: str) -> None:
    cluster = HangingCluster()
    async with scripted(valkey_url, given=slurm_policy()) as pool:
        side = SlurmSide(valkey_url, POOL, cluster=lambda: cluster)
        await pool.say(replica("r0", node="n1"), lane("r0"))
        try:
            async with leading(valkey_url, slurm=side) as worker:
                await await_until(lambda: cluster.calls, what="a call that hangs")
                cycles = worker.stats.cycles
                for _ in range(3):
                    await pool.sees(GateState.OPEN, Reason.IDLE)
                    await pool.say(replica("r0", node="n1", online_inflight=1, online_idle_ms=0.0))
                    await pool.sees(GateState.CLOSED, Reason.ONLINE_ACTIVE)
                    await pool.say(replica("r0", node="n1"))
                # Six states, each seen by a cycle; the first may have been there before.
                assert worker.stats.cycles >= cycles + 5
                assert len(cluster.calls) == 2
        finally:
            side._ended.set()


async def test_without_slurm_in_the_policy_no_thread_starts(valkey: redis.Redis, valkey_url: str) -> None:
    client = async_client(valkey_url)
    side = SlurmSide(valkey_url, POOL)
    worker = PolicyWorker(client, POOL, slurm=side)
    await worker._lead()
    await worker.cycle()
    assert side._thread is None
    await worker._leave()
    await client.aclose()


def test_gres_words() -> None:
    assert parse_gres("gpu:a100:2") == Gres(name="gpu", type="a100", count=2)
    assert parse_gres("gpu:2") == Gres(name="gpu", count=2)
    assert parse_gres("gpu:1g.10gb") == Gres(name="gpu", type="1g.10gb", count=1)
