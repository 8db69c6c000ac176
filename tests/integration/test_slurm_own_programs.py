"""`batch submit --sbatch`, `lane run` and a researcher's own loop as Slurm jobs on real daemons."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import redis

from hybridsched.core.values import GateState
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.batches import BatchStore
from tests.helpers import wait_until
from tests.integration.offline_rig import LANE, POOL, simulated_engine, write_batch
from tests.integration.slurm_jobs_rig import BIN, KEYS, Site, results, site
from tests.integration.test_lane_programs import LOOP, PROGRAM, batches
from tests.integration.test_offline_worker import undisturbed
from tests.slurm import Testbed


async def until(check: Callable[[], object], *, timeout_s: float = 40, what: str) -> None:
    await asyncio.to_thread(wait_until, check, timeout_s=timeout_s, what=what)


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
