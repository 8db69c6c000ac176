"""`sbatch workers/offline.sbatch FILE` on real Slurm daemons: every id once, whatever comes between."""

from __future__ import annotations

import asyncio
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import redis

from hybridsched.core.values import GateState
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.batches import BatchStore
from tests.integration.offline_rig import (
    LANE,
    POOL,
    results,
    undisturbed,
    write_batch,
)
from tests.integration.slurm_jobs_rig import (
    BATCH_LINES,
    KEYS,
    BatchCase,
    Site,
    bin_for_others,
    is_root,
    site,
    until,
)
from tests.slurm import Testbed

LINES = BATCH_LINES


def only_batch(client: redis.Redis) -> Any:
    """The one batch of the pool; None before it is registered."""
    found = BatchStore(client, POOL).all()
    assert len(found) <= 1
    return found[0] if found else None


async def until_done(client: redis.Redis, lines: int, *, timeout_s: float = 60) -> None:
    """Wait until so many lines of the one batch are done."""
    store = BatchStore(client, POOL)

    def there() -> bool:
        batch = only_batch(client)
        return batch is not None and store.progress(batch.id).done >= lines

    await until(there, timeout_s=timeout_s, what=f"{lines} lines done")


async def until_free(client: redis.Redis) -> None:
    await until(lambda: client.get(KEYS.lane_holder(LANE)) is None, timeout_s=15, what="the free lane")


async def test_a_job_waits_for_a_lane_runs_and_completes(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    async with case.site() as pool:
        pool.close_all()
        job = pool.sbatch(str(case.source), *case.speed)
        await pool.wait(job, "PENDING")
        assert clean_slurm.job(job)["Requeue"] == "1"
        assert only_batch(valkey) is None
        clean_slurm.set_fill("n1", 1)
        await pool.wait(job, "RUNNING", timeout_s=30)
        await until(lambda: valkey.get(KEYS.lane_holder(LANE)), timeout_s=30, what="the lane's holder")
        assert clean_slurm.job(job)["NodeList"] == "n1"
        assert only_batch(valkey).done == 0, "nothing runs before the gate is open"
        await pool.gate.set(GateState.OPEN)
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=60)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
        await until_free(valkey)
    assert results(case.source) == case.expected
    batch = only_batch(valkey)
    assert (batch.status, batch.done, batch.failed) == (BatchStatus.COMPLETED, LINES - 1, 1)
    assert batch.jobs_only
    assert not list(tmp_path.glob(".*hybridsched*"))


async def test_usr2_keeps_the_place_and_slurm_runs_it_again(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    async with case.site() as pool:
        await pool.gate.set(GateState.OPEN)
        job = pool.sbatch(str(case.source), *case.speed, options=("--nodelist=n1",))
        await until_done(valkey, 5)
        clean_slurm.run("scancel", "--signal=USR2", "--batch", str(job))
        await pool.wait(job, "PENDING", timeout_s=20)
        await until_free(valkey)
        batch = only_batch(valkey)
        assert BatchStore(valkey, POOL).progress(batch.id).running_chunks == 0
        assert batch.status is BatchStatus.IN_PROGRESS
        # The second time through Slurm's own command, as the last rung of the ladder does it.
        before = BatchStore(valkey, POOL).progress(batch.id).done
        await until_done(valkey, before + 3)
        clean_slurm.run("scontrol", "requeue", str(job))
        await pool.wait(job, "PENDING", timeout_s=20)
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=90)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
        assert clean_slurm.job(job)["Restarts"] == "2"
    assert results(case.source) == case.expected
    said = clean_slurm.output(job)
    assert re.findall(r"offline.sbatch: job \d+ on n1, run (\d)", said) == ["1", "2", "3"], said
    assert len(re.findall("job_leaves", said)) >= 1
    assert kept(tmp_path) == 0


def kept(folder: Path) -> int:
    """Work folders that are left."""
    return len(list(folder.glob(".*hybridsched*")))


async def test_a_job_over_its_time_limit_goes_on_in_its_next_run(
    clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    async with case.site() as pool:
        await pool.gate.set(GateState.OPEN)
        # A limit of one minute with a notice of 60 s: the signal comes when Slurm looks next, every 30 s.
        options = ("--nodelist=n1", "--time=1")
        job = pool.sbatch(str(case.source), *case.speed, options=options)
        await until_done(valkey, 5)
        await pool.gate.set(GateState.CLOSED)  # so that something is left to do
        # Before its next run, which says at once how long it has.
        await until(lambda: "job_leaves" in clean_slurm.output(job), timeout_s=60, what="the notice")
        clean_slurm.run("scontrol", "update", f"jobid={job}", "TimeLimit=30")
        await until(lambda: clean_slurm.job(job)["Restarts"] == "1", timeout_s=60, what="a second run")
        await pool.gate.set(GateState.OPEN)
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=90)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
        first, *_, last = re.split(r"offline.sbatch: job \d+ on n1, run", clean_slurm.output(job))[1:]
        assert "s are left of the time limit" in first
        assert "s are left of the time limit" not in last
    assert results(case.source) == case.expected


async def test_scancel_ends_the_job_and_submitting_again_goes_on(
    clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    async with case.site() as pool:
        await pool.gate.set(GateState.OPEN)
        job = pool.sbatch(str(case.source), *case.speed)
        await until_done(valkey, 5)
        clean_slurm.run("scancel", str(job))
        await pool.wait(job, "CANCELLED", timeout_s=30)
        done = BatchStore(valkey, POOL).progress(only_batch(valkey).id).done
        assert done >= 5
        again = pool.sbatch(str(case.source), *case.speed)
        await pool.wait(again, "COMPLETED", "FAILED", timeout_s=90)
        assert clean_slurm.job(again)["JobState"] == "COMPLETED", clean_slurm.output(again)
        assert clean_slurm.job(job)["JobState"] == "CANCELLED", "it was not requeued"
        third = pool.sbatch(str(case.source))
        await pool.wait(third, "COMPLETED", "FAILED", timeout_s=60)
        assert "complete already" in clean_slurm.output(third)
    assert results(case.source) == case.expected


# Slurm leaves a job alone for PreemptExemptTime (5 s): there is work for several times as long.
@pytest.mark.parametrize("case", [2 * BATCH_LINES], indirect=True)
async def test_online_takes_its_gpu_back_and_the_job_goes_on(
    clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    async with case.site() as pool:
        await pool.gate.set(GateState.OPEN)
        gres = "--gres=hsfill:1,gpu:a100:4"
        job = pool.sbatch(str(case.source), *case.speed, "--idle-gpus", options=("--nodelist=n1", gres))
        await until_done(valkey, 5)
        online = clean_slurm.sbatch(
            "--partition=online", "--nodelist=n1", "--gres=gpu:a100:1", "--wrap=sleep 3"
        )
        await pool.wait(online, "RUNNING", timeout_s=60)
        assert clean_slurm.job(job)["JobState"] == "PENDING"
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=90)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
        assert clean_slurm.job(job)["Restarts"] == "1"
    assert results(case.source) == case.expected


@pytest.mark.skipif(not is_root(), reason="only root or SlurmUser suspends")
async def test_a_suspended_job_gives_its_place_back_and_goes_on_in_its_next_run(
    clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    """The last rung of the ladder, on a job that hears no signal."""
    async with case.site() as pool:
        await pool.gate.set(GateState.OPEN)
        job = pool.sbatch(str(case.source), *case.speed, options=("--nodelist=n1",))
        await until_done(valkey, 5)
        clean_slurm.run("scontrol", "suspend", str(job))
        await pool.wait(job, "SUSPENDED")
        # As the policy worker does it; without the filter scancel tries for minutes.
        clean_slurm.run("scancel", "--state=RUNNING", "--signal=USR2", "--batch", str(job))
        clean_slurm.run("scontrol", "requeue", str(job))
        await pool.wait(job, "PENDING", timeout_s=40)
        held = lambda: clean_slurm.job(job)["Reason"] == "JobHeldAdmin"  # noqa: E731
        await until(held, timeout_s=20, what="the hold that Slurm takes a suspension for")
        clean_slurm.run("scontrol", "release", str(job))
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=90)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
    assert results(case.source) == case.expected


async def test_an_array_runs_one_file_a_task_and_requeues_its_tasks_one_by_one(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, pool_url: str, engine: str
) -> None:
    sources = [tmp_path / "a.jsonl", tmp_path / "b c.jsonl"]
    expected = []
    for seed, source in enumerate(sources):
        write_batch(source, 30, seed=seed)
        (tmp_path / str(seed)).mkdir()
        expected.append(await undisturbed(tmp_path / str(seed), source, engine))
    names = tmp_path / "files.txt"
    names.write_text("".join(f"{source}\r\n\n" for source in sources))
    async with site(clean_slurm, pool_url, engine) as pool:
        job = pool.sbatch(f"@{names}", options=("--array=0-1", "--nodelist=n1"))
        await until(lambda: "job_batch" in output(pool, "a.jsonl"), timeout_s=30, what="the first task")
        clean_slurm.run("scancel", "--signal=USR2", "--batch", f"{job}_0")
        await until(
            lambda: "run 2" in output(pool, "a.jsonl"), timeout_s=40, what="the second run of the first task"
        )
        await pool.gate.set(GateState.OPEN)
        store = BatchStore(valkey, POOL)
        await until(
            lambda: [batch.status for batch in store.all()] == [BatchStatus.COMPLETED] * 2,
            timeout_s=90,
            what="both batches",
        )
        await until(
            lambda: not clean_slurm.run("squeue", "-h", "-o", "%i").strip(), timeout_s=20, what="the end"
        )
    assert [results(source) for source in sources] == expected
    assert output(pool, "b c.jsonl").count("run 1") == 1
    assert "run 2" not in output(pool, "b c.jsonl"), "the other task was left alone"


def output(pool: Site, name: str) -> str:
    """The output of the job that runs file `name`."""
    texts = [path.read_text(errors="replace") for path in (pool.slurm.state / "out").glob("*.out")]
    return next((text for text in texts if f"/{name}\n" in text), "")


@pytest.mark.skipif(not is_root(), reason="only root submits for others")
async def test_another_user_cannot_read_the_file(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, pool_url: str, engine: str
) -> None:
    source = clean_slurm.state / "out" / "private.jsonl"
    source.parent.mkdir(exist_ok=True)
    source.parent.chmod(0o1777)
    write_batch(source, 3)
    source.chmod(0o600)
    before = set(source.parent.iterdir())
    async with site(clean_slurm, pool_url, engine) as pool:
        await pool.gate.set(GateState.OPEN)
        pool.environment["HYBRIDSCHED_BIN"] = str(bin_for_others(clean_slurm.state))
        job = pool.sbatch(str(source), options=("--uid=nobody", f"--chdir={source.parent}"))
        await pool.wait(job, "FAILED", "COMPLETED")
        said = clean_slurm.output(job)
    assert clean_slurm.job(job)["ExitCode"] == "1:0", said
    assert f"{source}: Permission denied" in said
    assert "the rights of user 65534" in said
    assert only_batch(valkey) is None
    assert {path for path in source.parent.iterdir() if path.suffix != ".out"} <= before


def test_what_cannot_be_run_is_said_in_the_jobs_output(clean_slurm: Testbed, tmp_path: Path) -> None:
    pool = Site(clean_slurm, "redis://127.0.0.1:1", None)  # type: ignore[arg-type]
    for words, says in (
        ((), "no file was given"),
        (("a.jsonl", "b.jsonl"), "add --array=0-1"),
        (("@nowhere",), "the list of files nowhere cannot be read"),
        (("-x.jsonl",), f"-x.jsonl is none in {tmp_path}; write sbatch workers/offline.sbatch FILE"),
        (("--deadline", "1h", "--"), "no file was given"),
    ):
        job = pool.sbatch(*words, options=(f"--chdir={tmp_path}",))
        clean_slurm.wait_job(job, "FAILED")
        assert says in clean_slurm.output(job)
        assert clean_slurm.job(job)["ExitCode"] == "2:0"
    pool.environment["HYBRIDSCHED_BIN"] = "/nowhere/hybridsched"
    job = pool.sbatch("a.jsonl")
    clean_slurm.wait_job(job, "FAILED")
    assert "set HYBRIDSCHED_BIN" in clean_slurm.output(job)


def test_names_that_begin_with_a_dash_reach_the_worker(clean_slurm: Testbed, tmp_path: Path) -> None:
    pool = Site(clean_slurm, "redis://127.0.0.1:1", None)  # type: ignore[arg-type]
    program = tmp_path / "words"
    program.write_text('#!/bin/bash\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)
    pool.environment["HYBRIDSCHED_BIN"] = str(program)
    (tmp_path / "-x.jsonl").touch()
    for words, said in (
        (("-x.jsonl", "--deadline", "1h"), "<./-x.jsonl><--deadline><1h>"),
        (("--", "-x.jsonl"), "<./-x.jsonl>"),
        (("--deadline", "1h", "--", "-x.jsonl"), "<./-x.jsonl><--deadline><1h>"),
        (("a.jsonl", "--output", "-o.jsonl"), "<a.jsonl><--output><-o.jsonl>"),
    ):
        job = pool.sbatch(*words, options=(f"--chdir={tmp_path}",))
        clean_slurm.wait_job(job, "COMPLETED")
        assert f"<worker><offline><--slurm-job>{said}" in clean_slurm.output(job)


async def test_signals_at_any_time_leave_every_id_once(
    clean_slurm: Testbed, valkey: redis.Redis, case: BatchCase
) -> None:
    """USR2 while the shell starts, while Python starts, while it works."""
    rng = random.Random(7)
    async with case.site() as pool:
        await pool.gate.set(GateState.OPEN)
        job = pool.sbatch(str(case.source), *case.speed)
        runs = 0
        while runs < 3:
            state = (await pool.wait(job, "RUNNING", "COMPLETED", "FAILED"))["JobState"]
            if state != "RUNNING":
                break
            await asyncio.sleep(rng.choice([0.0, 0.2, 0.5, 1.0]))
            clean_slurm.attempt("scancel", "--signal=USR2", "--batch", str(job))
            runs += 1
            await until(
                lambda runs=runs: int(clean_slurm.job(job)["Restarts"]) >= runs,
                timeout_s=30,
                what=f"restart {runs}",
            )
            clean_slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=90)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
    assert results(case.source) == case.expected


def test_the_script_is_good_bash() -> None:
    script = Path(__file__).resolve().parents[2] / "workers" / "offline.sbatch"
    assert os.access(script, os.X_OK)
    assert "set -e" not in script.read_text()
