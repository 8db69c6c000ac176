"""The offline worker as a job, without Slurm: lanes of its node, other jobs on its batch, what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from hybridsched.batches.errors import OutputExistsError
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.batches import BatchStore
from hybridsched.store.connection import async_client
from hybridsched.store.gates import GateStore
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import decode_holder
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from hybridsched.workers.offline_job import JobOptions, OfflineJob, Outcome, run_offline_job
from hybridsched.workers.offline_submit import submit_file
from hybridsched.workers.slurm_env import JobPlace
from tests.helpers import await_until
from tests.integration.offline_rig import BUDGET, MODEL, POOL, results, undisturbed, write_batch

KEYS = Keys(POOL)
SOON = JobOptions(give_back_s=0.5, leave_after_s=20.0)


class Lanes:
    """Lanes of node n1 on one engine, each with a gate that is renewed."""

    def __init__(self) -> None:
        self.open: set[str] = set()


@asynccontextmanager
async def lanes_of(url: str, engine: str, *names: str, model: str = MODEL) -> AsyncIterator[Lanes]:
    client = async_client(url)
    telemetry, gates, lanes = TelemetryStore(client, POOL), GateStore(client, POOL), Lanes()

    async def renew() -> None:
        while True:
            await client.set(KEYS.leader, "t")
            for name in names:
                await telemetry.publish(
                    ReplicaRecord(replica=name, model=model, lane=name, url=engine, node="n1")
                )
                is_open = name in lanes.open
                gate = Gate(
                    lane=name,
                    state=GateState.OPEN if is_open else GateState.CLOSED,
                    reason=Reason.IDLE if is_open else Reason.ONLINE_ACTIVE,
                    **({"budget": BUDGET} if is_open else {}),
                )
                await gates.publish(gate, leader_token="t", expected_epoch=0, lease_ms=2000)
            await asyncio.sleep(0.1)

    renewing = asyncio.create_task(renew())
    try:
        yield lanes
    finally:
        await end_tasks(renewing)
        await client.aclose()


def job(url: str, source: Path, number: int = 1, *, options: JobOptions = SOON) -> OfflineJob:
    return OfflineJob(
        redis_url=url,
        pool=POOL,
        place=JobPlace(job=str(number), node="n1"),
        source=source,
        speed=20,
        options=options,
    )


def holder(client: redis.Redis, lane: str) -> str:
    """The job that has a lane; empty for none."""
    raw = client.get(KEYS.lane_holder(lane))
    assert raw is None or isinstance(raw, bytes)
    found = decode_holder(raw)
    return found.job if found else ""


async def test_a_job_moves_to_a_lane_that_is_open(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 20)
    expected = await undisturbed(tmp_path, source, engine)
    async with lanes_of(valkey_url, engine, "r0", "r1") as lanes:
        running = asyncio.create_task(job(valkey_url, source).run(asyncio.Event()))
        await await_until(lambda: holder(valkey, "r0") == "1", timeout_s=15, what="the first lane")
        lanes.open = {"r1"}
        async with asyncio.timeout(40):
            assert await running is Outcome.COMPLETE
    assert results(source) == expected
    assert (holder(valkey, "r0"), holder(valkey, "r1")) == ("", "")


async def test_several_jobs_share_a_batch_and_no_lane(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 60)
    expected = await undisturbed(tmp_path, source, engine)
    async with lanes_of(valkey_url, engine, "r0", "r1") as lanes:
        running = [asyncio.create_task(job(valkey_url, source, i).run(asyncio.Event())) for i in (1, 2, 3)]
        both = lambda: {holder(valkey, "r0"), holder(valkey, "r1")} - {""}  # noqa: E731
        await await_until(lambda: len(both()) == 2, timeout_s=15, what="two lanes with two jobs")
        lanes.open = {"r0", "r1"}
        async with asyncio.timeout(60):
            assert await asyncio.gather(*running) == [Outcome.COMPLETE] * 3
    assert results(source) == expected
    assert len(BatchStore(valkey, POOL).all()) == 1


async def test_with_no_lane_for_long_it_leaves(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 5)
    short = JobOptions(leave_after_s=1.0)
    async with asyncio.timeout(30):
        assert await job(valkey_url, source, options=short).run(asyncio.Event()) is Outcome.LEFT
        async with lanes_of(valkey_url, engine, "r0", model="another"):
            assert await job(valkey_url, source, options=short).run(asyncio.Event()) is Outcome.LEFT
        async with lanes_of(valkey_url, engine, "r0"):  # there, and never open
            assert await job(valkey_url, source, options=short).run(asyncio.Event()) is Outcome.LEFT
    assert holder(valkey, "r0") == ""
    assert BatchStore(valkey, POOL).all()[0].done == 0


async def test_a_job_that_runs_nothing_says_so(
    tmp_path: Path,
    engine: str,
    valkey: redis.Redis,
    valkey_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slurm starts jobs beyond the free lanes, and shows them as running."""
    monkeypatch.setattr("hybridsched.workers.lane_claim._SAY_FIRST_S", 0.1)
    monkeypatch.setattr("hybridsched.workers.offline_job._SAY_CLOSED_S", 0.1)
    source = tmp_path / "b.jsonl"
    write_batch(source, 5)
    short = JobOptions(leave_after_s=2.0)
    async with asyncio.timeout(30):
        await job(valkey_url, source, options=short).run(asyncio.Event())
        assert "lane_wait" in "".join(capsys.readouterr())
        async with lanes_of(valkey_url, engine, "r0"):
            await job(valkey_url, source, options=short).run(asyncio.Event())
    # On which stream depends on whether a test before this one has set the log up.
    said = "".join(capsys.readouterr())
    assert said.count("job_waits") == 1
    assert "The lane is closed: the job waits, and runs nothing meanwhile." in said


async def test_a_batch_cancelled_while_the_job_waits_is_ended_by_it(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 5)
    running = asyncio.create_task(job(valkey_url, source).run(asyncio.Event()))
    store = BatchStore(valkey, POOL)
    await await_until(lambda: store.all(), timeout_s=10, what="the batch")
    store.cancel(store.all()[0].id)
    async with asyncio.timeout(20):
        assert await running is Outcome.ENDED
    assert store.all()[0].status is BatchStatus.CANCELLED
    assert set(results(source).values()) == {"batch_cancelled"}


async def test_an_emptied_redis_is_told_of_the_batch_again(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 20)
    expected = await undisturbed(tmp_path, source, engine)
    running = asyncio.create_task(job(valkey_url, source).run(asyncio.Event()))
    store = BatchStore(valkey, POOL)
    await await_until(lambda: store.all(), timeout_s=10, what="the batch")
    valkey.flushall()
    async with lanes_of(valkey_url, engine, "r0") as lanes:
        lanes.open = {"r0"}
        async with asyncio.timeout(40):
            assert await running is Outcome.COMPLETE
    assert results(source) == expected


async def test_it_takes_over_a_batch_of_the_pool_and_leaves_at_a_stop(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 5)
    store = BatchStore(valkey, POOL)
    known = submit_file(store, source, model=MODEL).batch
    assert not known.jobs_only
    stop = asyncio.Event()
    async with lanes_of(valkey_url, engine, "r0"):
        running = asyncio.create_task(job(valkey_url, source).run(stop))
        await await_until(lambda: holder(valkey, "r0") == "1", timeout_s=15, what="the lane")
        assert store.get(known.id).jobs_only
        stop.set()
        async with asyncio.timeout(20):
            assert await running is Outcome.LEFT
    assert holder(valkey, "r0") == ""


async def test_an_output_that_is_somebody_elses_is_an_error(tmp_path: Path, valkey_url: str) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 5)
    (tmp_path / "b.output.jsonl").write_text("mine\n")
    with pytest.raises(OutputExistsError, match="rights of user"):
        await run_offline_job(job(valkey_url, source))


async def test_a_stop_while_redis_is_away(tmp_path: Path) -> None:
    source = tmp_path / "b.jsonl"
    write_batch(source, 5)
    stop = asyncio.Event()
    running = asyncio.create_task(job("redis://127.0.0.1:1", source).run(stop))
    await await_until(lambda: list(tmp_path.glob(".hybridsched-*")), what="the work folder")
    stop.set()
    async with asyncio.timeout(20):
        assert await running is Outcome.LEFT


def acl_of_the_page(pool: str) -> list[str]:
    """The rules that docs/slurm-jobs.md gives the Redis user of users' jobs."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "slurm-jobs.md").read_text()
    rules = page.split("user hybridsched-jobs ", 1)[1].split("```", 1)[0]
    return [word.replace("{POOL}", f"{{{pool}}}") for word in rules.split() if word != "\\"]


async def test_the_redis_user_of_the_page_is_enough_and_no_more(
    tmp_path: Path, engine: str, valkey: redis.Redis, valkey_url: str
) -> None:
    rules = [word.replace("PASSWORD", "secret") for word in acl_of_the_page(POOL)]
    valkey.execute_command("ACL", "SETUSER", "jobs", "reset", *rules)
    url = valkey_url.replace("unix://", "unix://jobs:secret@")
    source = tmp_path / "b.jsonl"
    write_batch(source, 20)
    expected = await undisturbed(tmp_path, source, engine)
    try:
        async with lanes_of(valkey_url, engine, "r0") as lanes:
            valkey.acl_log_reset()
            running = asyncio.create_task(job(url, source).run(asyncio.Event()))
            await await_until(lambda: holder(valkey, "r0") == "1", timeout_s=15, what="the lane")
            lanes.open = {"r0"}
            async with asyncio.timeout(40):
                assert await running is Outcome.COMPLETE
        refused = [
            (entry["object"], entry["context"]) for entry in valkey.acl_log() if entry["username"] == "jobs"
        ]
        # Its nudges are refused, because who may publish could announce an open gate.
        assert set(refused) <= {("publish", "lua"), ("publish", "toplevel")}
        assert results(source) == expected
        theirs = redis.Redis.from_url(url)
        for command in (
            ("SET", KEYS.gate("r0"), "x"),
            ("GET", KEYS.request("id")),
            ("XRANGE", KEYS.online(MODEL, 1), "-", "+"),
            ("XRANGE", KEYS.reply("c"), "-", "+"),
            ("SET", KEYS.policy_current, "x"),
            ("SET", KEYS.leader, "x"),
            ("HSET", KEYS.holds, "*", "x"),
            ("SET", KEYS.telemetry("r0"), "x"),
            ("PUBLISH", KEYS.gates, "x"),
            ("CONFIG", "GET", "*"),
            ("FLUSHALL",),
            ("KEYS", "*"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                theirs.execute_command(*command)
        theirs.close()
    finally:
        valkey.execute_command("ACL", "DELUSER", "jobs")
