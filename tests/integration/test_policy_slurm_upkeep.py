"""What the policy worker keeps right in Slurm: the parked node, held jobs, arrays, its own life."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from hybridsched.cluster.fake import FakeCluster, FakeJob
from hybridsched.cluster.values import ClusterError, Gres, Job, Node, total
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders, Place
from hybridsched.workers import policy_slurm
from hybridsched.workers.policy_slurm import SlurmSide
from hybridsched.workers.policy_slurm_view import SlurmStatus
from tests.helpers import await_until, wait_until
from tests.integration.policy_pool import MODEL, POOL, policy, replica
from tests.integration.test_policy_slurm import FAST, OFFLINE, Bed, bed

UPKEEP = "hybridsched.workers.policy_slurm_upkeep"


async def status(made: Bed) -> SlurmStatus:
    return msgspec.json.decode(await made.client.get(Keys(POOL).slurm_status) or b"", type=SlurmStatus)


async def test_a_parked_node_that_somebody_resumed_is_put_right(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """`scontrol update nodename=ALL state=resume` means the parked node too."""
    async with bed(valkey_url, tmp_path) as (made, _):
        await made.turn(2)
        assert (await status(made)).troubles == {}
        made.slurm.resume("hspark")
        await made.turn(3)
        park = made.slurm.nodes["hspark"]
        assert made.fill("hspark") == 4, "its count is never steered"
        assert "DRAIN" in park.states
        assert park.reason.startswith("hybridsched-parked")
        park.live = tuple(g for g in park.live if g.name != "hsfill")
        await made.turn(1)
        assert "lacks hsfill" in (await status(made)).troubles["node hspark"]
        await made.turn(2)
        assert made.fill("hspark") == 4
        assert (await status(made)).troubles == {}


async def test_jobs_that_slurm_took_for_impossible_are_let_go_once(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with bed(valkey_url, tmp_path) as (made, _):
        await made.turn(2)
        job = await made.cluster.submit(OFFLINE)
        made.slurm._set(job, priority=0, reason="BadConstraints")
        park = made.slurm.nodes["hspark"]
        park.live = tuple(g for g in park.live if g.name != "hsfill")
        made.cluster.calls.clear()
        await made.turn(1)
        assert not [c for c in made.cluster.calls if c[0] == "update_job"], "the node first"
        await made.turn(2)
        assert not made.slurm.jobs[job].value.held
        made.slurm._set(job, priority=0, reason="BadConstraints")
        await made.turn(3)
        assert made.slurm.jobs[job].value.held, "it asked for what no node has"
        assert f"scontrol release {job}" in (await status(made)).troubles[f"job {job}"]


async def test_no_parked_node_and_no_places_are_said(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with bed(valkey_url, tmp_path) as (made, pool):
        del made.slurm.nodes["hspark"]
        bare = made.slurm.nodes["n1"]
        bare.configured = bare.live = tuple(g for g in bare.live if g.name != "hslane")
        made.slurm.nodes["n2"].not_consumed = ()
        await made.cluster.submit(msgspec.structs.replace(OFFLINE, nodes=("n2",)))
        await pool.say(replica("a", node="n1"))
        made.open("a")
        await made.turn(2)
        assert made.fill("n1") == 0, "nothing would bound the jobs there"
        troubles = (await status(made)).troubles
        assert "no such node" in troubles["node hspark"]
        assert "no hslane" in troubles["node n1"]
        assert "hsfill:no_consume:N" in troubles["node n2"]


async def test_who_takes_the_places_of_offline_work_is_said(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bed(valkey_url, tmp_path) as (made, pool):
        await pool.say(replica("a", node="n1"))
        await made.turn(2)
        made.open("a")
        await made.turn(2)
        assert made.slurm.jobs[await made.cluster.submit(OFFLINE)].value.running
        await made.turn(2)
        assert (await status(made)).troubles == {}, "a place for a lane is as it should be"
        greedy = msgspec.structs.replace(
            OFFLINE, partition="online", gres=(Gres(name="hslane", count=2),), nodes=("n2",)
        )
        job = await made.cluster.submit(greedy)
        hidden = await made.cluster.submit(msgspec.structs.replace(greedy, nodes=("n3",)))
        made.slurm._set(hidden, partition="debug")
        await made.turn(2)
        troubles = (await status(made)).troubles
        assert troubles.keys() == {f"job {job}"}
        assert "in partition online takes 2 hslane more on n2" in troubles[f"job {job}"]
        monkeypatch.setattr(f"{UPKEEP}.UNSEEN_S", 0.0)
        await made.turn(2)
        troubles = (await status(made)).troubles
        assert troubles.keys() == {f"job {job}", "node n3"}
        assert "2 hslane there are taken by jobs of other partitions" in troubles["node n3"]
        await made.cluster.cancel(job)
        await made.cluster.cancel(hidden)
        await made.turn(2)
        assert (await status(made)).troubles == {}


async def test_one_task_of_an_array_is_told_to_leave_and_not_all(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = msgspec.structs.replace(FAST, requeue_after_ms=1.0, fill_hysteresis_ms=0.0)
    async with bed(valkey_url, tmp_path, slurm) as (made, pool):
        await pool.say(replica("a", node="n1"), replica("b", node="n1"))
        # Tasks 0 and 1 of array 7. The array's own number is that of one of its tasks.
        for number, task in ((8, 0), (7, 1)):
            value = Job(
                id=number,
                array_job=7,
                array_task=task,
                partition="offline",
                state="RUNNING",
                nodes=("n1",),
                gres=OFFLINE.gres,
                start_ms=made.slurm.now_ms - 60_000.0,
                restarts=0,
            )
            made.slurm.jobs[number] = FakeJob(value=value, spec=OFFLINE)
        holders = LaneHolders(pool.client, POOL)
        for lane, job in (("a", "7_0"), ("b", "7_1")):
            place = Place(lane=lane, replica=lane, model=MODEL, url="")
            await holders.claim([place], owner=lane, job=job, open_only=False)
        await made.turn()
        made.open("a")
        made.open("b", is_open=False, ago_ms=1000.0)
        await made.turn(2)
        assert made.slurm.signals == [(7, "USR2", False)], "task 1 of array 7, whose gate is closed"
        monkeypatch.setattr("hybridsched.workers.policy_slurm_acts.NOTICE_S", 0.0)
        await asyncio.sleep(0.06)
        await made.turn()
        assert made.slurm.jobs[7].value.pending
        assert made.slurm.jobs[8].value.running, "its gate is open"
        monkeypatch.setattr(f"{UPKEEP}.SETTLED_S", 0.0)
        made.open("b")
        made.slurm.jobs[8].eligible_ms = made.slurm.now_ms + 1e9
        await made.turn(3)
        assert made.slurm.jobs[7].value.running
        assert made.slurm.jobs[8].eligible_ms > made.slurm.now_ms, "only the task that waits is hastened"


async def test_a_wait_that_slurm_did_not_cut_short_is_cut_short_at_the_next_try(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{UPKEEP}.SETTLED_S", 0.0)
    async with bed(valkey_url, tmp_path) as (made, pool):
        await pool.say(replica("a", node="n1"))
        await made.turn(2)
        made.open("a")
        await made.turn(2)
        job = await made.cluster.submit(OFFLINE)
        assert made.slurm.jobs[job].value.running
        made.slurm.requeue(job)
        assert made.slurm.jobs[job].value.reason == "BeginTime"
        orders: list[int] = []
        real = made.cluster.update_job

        async def refused_once(number: int, change: Any, *, task: int | None = None) -> None:
            orders.append(number)
            if len(orders) == 1:
                raise ClusterError("timed out", code="timeout", retryable=True)
            await real(number, change, task=task)

        monkeypatch.setattr(made.cluster, "update_job", refused_once)
        await made.turn(5)
        assert orders == [job, job]
        assert made.slurm.jobs[job].value.running


@pytest.mark.parametrize(
    ("auth", "delay_ms", "starts"),
    [
        ("", 121_000.0, True),
        ("", 3_600_000.0, False),
        ("", 60_000.0, False),
        ("socket=/x,cred_expire=6", 7_000.0, True),
    ],
)
async def test_only_slurm_s_own_wait_is_cut_short(
    valkey: redis.Redis,
    valkey_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    auth: str,
    delay_ms: float,
    starts: bool,
) -> None:
    """`scontrol requeue J; scontrol update jobid=J starttime=now+1hour`: it ran three seconds later."""
    monkeypatch.setattr(f"{UPKEEP}.SETTLED_S", 0.0)
    slurm = msgspec.structs.replace(FAST, fill_hysteresis_ms=0.0)
    async with bed(valkey_url, tmp_path, slurm) as (made, pool):
        made.slurm.config["AuthInfo"] = auth
        await pool.say(replica("a", node="n1"))
        await made.turn(2)
        job = await made.cluster.submit(OFFLINE)
        made.slurm._set(job, state="RUNNING", nodes=("n1",))
        made.slurm.requeue(job)
        made.slurm.jobs[job].eligible_ms = made.slurm.now_ms + delay_ms
        made.slurm._set(job, begin_ms=made.slurm.now_ms + delay_ms)
        made.open("a")
        await made.turn(4)
        assert made.slurm.jobs[job].value.running is starts


async def test_a_job_that_failed_as_it_was_started_again_is_told(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with bed(valkey_url, tmp_path) as (made, _):
        job = await made.cluster.submit(OFFLINE)
        now = made.slurm.now_ms
        made.slurm._set(job, state="FAILED", restarts=1, start_ms=now, end_ms=now, reason="NonZeroExitCode")
        await made.turn(2)
        assert "submits the same again" in (await status(made)).troubles[f"job {job}"]


class Faulty(FakeCluster):
    """One reading fails as nobody has foreseen."""

    faults: list[Exception]

    async def nodes(self, names: Any = ()) -> tuple[Node, ...]:
        if self.faults:
            raise self.faults.pop()
        return await super().nodes(names)


@pytest.mark.parametrize(
    "fault",
    [
        ClusterError("cannot be started", code="unreachable", retryable=True),
        OSError(24, "Too many"),
        KeyError("x"),
    ],
)
async def test_an_error_that_nobody_has_foreseen_is_survived(
    valkey: redis.Redis,
    valkey_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
) -> None:
    monkeypatch.setattr(policy_slurm, "RETRY_S", (0.05, 0.05))
    async with bed(valkey_url, tmp_path) as (made, _):
        faulty = Faulty(made.slurm)
        faulty.faults = [fault]
        running = asyncio.create_task(made.task.run())
        try:
            made.side._thread = threading.current_thread()

            def closed() -> bool:
                made.side.offer(made.policy, "leader")
                return not faulty.faults and made.fill("n1") == 0

            made.task._cluster = made.task.acts._cluster = faulty
            await await_until(closed, what="the counts after the fault")
            assert not running.done()
        finally:
            made.side._ended.set()
            made.side._thread = None
            await running


def test_slurms_part_starts_again_when_it_cannot_start(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor for an event loop, say: the counts must not stand open until somebody restarts it."""
    monkeypatch.setattr(policy_slurm, "RETRY_S", (0.05, 0.05))
    cluster, tries = FakeCluster(), []

    def made() -> FakeCluster:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(24, "Too many open files")
        return cluster

    side = SlurmSide(valkey_url, POOL, scripts=tmp_path, cluster=made)

    def closed() -> bool:
        side.offer(policy(slurm=FAST), "leader")
        return total(cluster.slurm.nodes["n1"].live, "hsfill") == 0

    try:
        wait_until(closed, timeout_s=20, what="the counts after the second start")
        assert len(tries) == 2
    finally:
        side.end()


async def test_jobs_that_have_no_lane_are_named(valkey: redis.Redis, valkey_url: str, tmp_path: Path) -> None:
    """The count is a gate and no supply: three jobs come for one free lane."""
    async with bed(valkey_url, tmp_path) as (made, pool):
        await pool.say(replica("a", node="n1"))
        await made.turn()
        made.open("a")
        await made.turn()
        jobs = [await made.cluster.submit(OFFLINE) for _ in range(3)]
        assert all(made.slurm.jobs[job].value.running for job in jobs)
        place = Place(lane="a", replica="a", model=MODEL, url="")
        await LaneHolders(pool.client, POOL).claim([place], owner="w", job=str(jobs[1]), open_only=False)
        await made.turn(2)
        assert made.fill("n1") == 0, "none is free any more"
        assert (await status(made)).without_lane == (jobs[0], jobs[2])
