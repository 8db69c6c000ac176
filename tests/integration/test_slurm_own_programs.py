"""`batch submit --sbatch`, `lane run` and a researcher's own loop as Slurm jobs on real daemons."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from hybridsched.core.values import GateState
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.batches import BatchStore
from tests.integration.offline_rig import LANE, POOL, results, simulated_engine, undisturbed, write_batch
from tests.integration.slurm_jobs_rig import BIN, KEYS, WORKERS, Site, site, until
from tests.integration.test_lane_programs import LOOP, PROGRAM, batches
from tests.slurm import Testbed


def submit(pool: Site, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`hybridsched batch submit` as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "hybridsched", "batch", "submit", *words],
        capture_output=True,
        text=True,
        env=pool.slurm.env | pool.environment,
        cwd=cwd,
        timeout=60,
        check=False,
    )


@pytest.mark.timeout(240)
async def test_batch_submit_sbatch_runs_one_file_and_many(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str
) -> None:
    names = ["one.jsonl", "two.jsonl", "three.jsonl"]
    expected = {}
    with simulated_engine(tmp_path) as engine:
        for seed, name in enumerate(names):
            write_batch(tmp_path / name, 12, seed=seed)
            (tmp_path / str(seed)).mkdir()
            expected[name] = await undisturbed(tmp_path / str(seed), tmp_path / name, engine)
        async with site(clean_slurm, valkey_url, engine) as pool:
            await pool.gate.set(GateState.OPEN)
            said = await asyncio.to_thread(
                submit, pool, "--sbatch", "one.jsonl", "--time", "5m", cwd=tmp_path
            )
            assert said.returncode == 0, said.stderr
            job = int(said.stdout)
            store = BatchStore(valkey, POOL)
            batch = store.all()[0]
            assert batch.id in said.stderr
            seen = await pool.wait(job, "COMPLETED", "FAILED", timeout_s=60)
            assert seen["JobState"] == "COMPLETED"
            assert seen["TimeLimit"] == "00:05:00"
            assert seen["Comment"] == f"hybridsched {batch.id}"
            (tmp_path / "list.txt").write_text("two.jsonl\nthree.jsonl\n")
            said = await asyncio.to_thread(
                submit, pool, "--sbatch", "@list.txt", "--at-once", "1", "--json", cwd=tmp_path
            )
            assert said.returncode == 0, said.stderr
            found = json.loads(said.stdout)
            assert [Path(one["input"]).name for one in found["batches"]] == names[1:]
            await until(
                lambda: [one.status for one in store.all()] == [BatchStatus.COMPLETED] * 3,
                timeout_s=100,  # the second task of the array waits for Slurm's own next look
                what="three batches",
            )
            refused = await asyncio.to_thread(
                submit,
                pool,
                "--sbatch",
                "one.jsonl",
                "-o",
                "again.jsonl",
                "--partition",
                "nowhere",
                cwd=tmp_path,
            )
            assert refused.returncode == 1
            assert "partition" in refused.stderr
    for name in names:
        assert results(tmp_path / name) == expected[name]


async def test_lane_run_in_a_job_goes_on_in_its_next_run(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str
) -> None:
    place, program = tmp_path / "place", tmp_path / "program.py"
    program.write_text(PROGRAM)
    async with site(clean_slurm, valkey_url, "http://127.0.0.1:9") as pool:
        script = pool.script(f"exec {BIN} lane run -- {sys.executable} {program} {place} 400")
        job = pool.sbatch(script=script, options=("--nodelist=n1",))
        await until(lambda: valkey.get(KEYS.lane_holder(LANE)), what="the lane's holder")
        assert "begins" not in clean_slurm.output(job)
        await pool.gate.set(GateState.OPEN)
        await until(lambda: "batch 5\n" in clean_slurm.output(job), what="five batches")
        clean_slurm.run("scancel", "--signal=USR2", "--batch", str(job))
        await pool.wait(job, "PENDING", timeout_s=20)
        saved = int(place.read_text())
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=60)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
    said = clean_slurm.output(job)
    assert saved >= 5
    assert f"begins at {saved}\n" in said
    assert batches(said) == list(range(1, 401)), "each once"


async def test_a_loop_of_ones_own_in_a_job_goes_on_in_its_next_run(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str
) -> None:
    place, program = tmp_path / "place", tmp_path / "loop.py"
    program.write_text(LOOP)
    async with site(clean_slurm, valkey_url, "http://127.0.0.1:9") as pool:
        await pool.gate.set(GateState.OPEN)
        script = pool.script(f"exec {sys.executable} {program} {place} 400")
        job = pool.sbatch(script=script, options=("--nodelist=n1",))
        await until(lambda: "batch 5\n" in clean_slurm.output(job), what="five batches")
        await pool.gate.set(GateState.CLOSED)
        await asyncio.sleep(0.5)
        clean_slurm.run("scancel", "--signal=USR2", "--batch", str(job))
        await pool.wait(job, "PENDING", timeout_s=20)
        await until(lambda: valkey.get(KEYS.lane_holder(LANE)) is None, what="the free lane")
        await pool.gate.set(GateState.OPEN)
        await pool.wait(job, "COMPLETED", "FAILED", timeout_s=60)
        assert clean_slurm.job(job)["JobState"] == "COMPLETED", clean_slurm.output(job)
    said = clean_slurm.output(job)
    assert said.count("begins at") == 2
    assert batches(said) == list(range(1, 401)), "each once"


DELAYS_S = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)


def shell_listens(job: int) -> bool:
    """Whether the batch shell of a job has a handler for USR2, or ignores it, by now."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"SLURM_JOB_ID={job}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if not mine or b"slurm_script" not in (folder / "cmdline").read_bytes():
                continue
            masks = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        except OSError:  # it has ended
            continue
        return bool((int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16)) >> (signal.SIGUSR2 - 1) & 1)
    return False


async def told_while_starting(
    pool: Site, slurm: Testbed, script: Path, *words: str
) -> dict[float, dict[str, str]]:
    """One job for each delay, told to leave so long after Slurm has started it. What became of each."""
    seen = {}
    for delay_s in DELAYS_S:
        job = pool.sbatch(*words, script=script, options=("--nodelist=n1",))
        await pool.wait(job, "RUNNING", timeout_s=30)
        await asyncio.sleep(delay_s)
        listens = shell_listens(job)
        slurm.run("scancel", "--signal=USR2", "--batch", str(job))
        # A loaded machine takes seconds to start a program; a notice that was lost would never show.
        for _ in range(60):
            now = seen[delay_s] = slurm.job(job)
            if now["JobState"] not in ("RUNNING", "COMPLETING") or now["Restarts"] != "0":
                break
            await asyncio.sleep(0.25)
        seen[delay_s]["said"] = slurm.output(job)
        # Slurm itself drops a signal that comes before the batch shell exists.
        if "sent signal 12 to pid" not in "".join(
            line for line in slurm.log("slurmd-n1").splitlines() if f"StepId={job}.batch" in line
        ):
            assert now["JobState"] == "RUNNING", now
            del seen[delay_s]
        # Between its start and its first line no script can hear: it ends as FAILED 0:12, whatever it says.
        elif not listens:
            del seen[delay_s]
        slurm.run("scancel", str(job))
    return seen


async def test_own_sbatch_goes_back_to_the_queue_whenever_it_is_told(
    clean_slurm: Testbed, valkey_url: str
) -> None:
    """Told before its program listened, a job was FAILED 0:12 and gone."""
    async with site(clean_slurm, valkey_url, "http://127.0.0.1:9") as pool:
        found = await told_while_starting(pool, clean_slurm, WORKERS / "own.sbatch", "sleep", "600")
    assert len(found) >= 3
    for delay_s, job in found.items():
        assert job["Restarts"] == "1", (
            delay_s,
            job["JobState"],
            job["Reason"],
            job.get("ExitCode"),
            job["said"],
        )


async def test_an_own_script_that_ignores_the_signal_first_does_not_fail(
    clean_slurm: Testbed, valkey_url: str
) -> None:
    body = "from hybridsched import lane; lane.wait_open()"
    async with site(clean_slurm, valkey_url, "http://127.0.0.1:9") as pool:
        script = pool.script(f"trap '' USR2\nexec {sys.executable} -c '{body}'")
        found = await told_while_starting(pool, clean_slurm, script)
    for delay_s, job in found.items():
        assert job["Restarts"] == "1" or job["JobState"] == "RUNNING", (delay_s, job)


async def test_a_job_that_was_submitted_from_a_lane_holds_its_own_or_none(
    tmp_path: Path, clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str
) -> None:
    """sbatch hands the environment on, with the lane of the job that called it."""
    inner_out = tmp_path / "inner.out"
    async with site(clean_slurm, valkey_url, "http://127.0.0.1:9") as pool:
        clean_slurm.set_fill("n2", 1)  # as where there is a lane, which the inner job waits for in vain
        await pool.gate.set(GateState.OPEN)
        program = "from hybridsched import lane; print(lane.wait_open(3), lane.engine_url(), flush=True)"
        inner = pool.script(f"exec {sys.executable} -c '{program}'").rename(tmp_path / "inner.sbatch")
        call = f"sbatch -o {inner_out} --nodelist=n2 {inner}; exec sleep 600"
        job = pool.sbatch("bash", "-c", call, script=WORKERS / "own.sbatch", options=("--nodelist=n1",))
        await until(
            lambda: inner_out.exists() and inner_out.read_text().endswith("None\n"), what="the inner job"
        )
        assert inner_out.read_text().splitlines()[-1] == "False None"
        clean_slurm.run("scancel", str(job))
