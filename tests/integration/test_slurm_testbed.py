"""The testbed: real Slurm daemons of its own, which leave nothing behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.slurm import TESTBED, Testbed, new_state, require_slurm, sweep

JOB = """#!/bin/bash
#SBATCH --partition=offline
#SBATCH --requeue
#SBATCH --signal=B:USR2@60
#SBATCH --open-mode=append
#SBATCH --time=10
"""


def processes_with(text: str) -> list[str]:
    """Command lines of the processes whose command line, environment or folder holds `text`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            cmdline = (folder / "cmdline").read_bytes()
            where = str((folder / "cwd").readlink()) + "/"
            if text in where or text.encode() in cmdline + (folder / "environ").read_bytes():
                found.append(cmdline.replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.fixture
def small() -> Testbed:
    require_slurm()
    sweep()
    return Testbed(new_state(), nodes=1, gpus=2)


def test_up_is_idempotent_and_down_wipes(small: Testbed) -> None:
    try:
        small.up()
        pids = {name: small.pid(name) for name in ("munged", "slurmctld", "slurmd-n1")}
        small.up()
        assert pids == {name: small.pid(name) for name in pids}, "a second up starts nothing again"
        assert small.node("n1")["Gres"] == "gpu:a100:2,hsfill:2,hslane:2"
        assert small.node("hspark")["State"] == "DOWN"
        # A job that leaves a process behind which no longer has a parent of its own.
        script = JOB + "(setsid sleep 600 &)\necho started\nsleep 600\n"
        job = small.sbatch("--gres=hsfill:1", script=script)
        small.wait_job(job, "RUNNING")
        wait_until(lambda: "started" in small.output(job), what="the job's output")
    finally:
        small.down()
    assert not small.state.exists()
    assert processes_with(f"{small.state}/") == []


def test_up_without_numbers_takes_the_shape_that_was_prepared(small: Testbed) -> None:
    """It refused, and advised to wipe the folder with the files that had been edited."""
    try:
        small.up("--prepare")
        answer = subprocess.run(
            [TESTBED / "up", "--state", small.state, "--prepare"], capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stderr
        assert "nodes=1 " in (small.state / "etc" / "shape").read_text()
    finally:
        small.down()


def test_up_refuses_another_shape(small: Testbed) -> None:
    try:
        small.up("--prepare")
        answer = subprocess.run(
            [TESTBED / "up", "--state", small.state, "--nodes", "3"], capture_output=True, text=True
        )
        assert answer.returncode == 1
        assert "nodes=1" in answer.stderr
        assert "down --wipe" in answer.stderr
    finally:
        small.down()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nodes", "none"], "--nodes was given 'none'"),
        (["--colour", "red"], "--colour is no option"),
        (["--state", "/tmp/with blank"], "may hold only letters"),
        (["--state", "/tmp/" + "x" * 90], "longer than 80 bytes"),
    ],
)
def test_up_says_what_is_wrong(options: list[str], says: str) -> None:
    require_slurm()
    answer = subprocess.run([TESTBED / "up", *options], capture_output=True, text=True)
    assert answer.returncode == 2
    assert says in answer.stderr
    assert answer.stdout == ""


def test_down_keeps_a_folder_that_is_no_testbed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    answer = subprocess.run([TESTBED / "down", "--state", tmp_path, "--wipe"], capture_output=True, text=True)
    assert answer.returncode == 1
    assert "nothing was removed" in answer.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_daemons_of_a_dead_run_are_taken_down(small: Testbed) -> None:
    """A run that was killed leaves daemons, and pid files that may say nothing any more."""
    small.up()
    for file in (small.state / "run").glob("*.pid"):
        file.unlink()
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True)
    folder = small.state.rename(small.state.with_name(f"hs-slurm-{dead.stdout.strip()}-x"))
    try:
        folder.rename(small.state)
        assert processes_with(f"{small.state}/")
    finally:
        small.down()
    assert processes_with(f"{small.state}/") == []


def test_status(small: Testbed) -> None:
    def status() -> subprocess.CompletedProcess[str]:
        return subprocess.run([TESTBED / "status", "--state", small.state], capture_output=True, text=True)

    try:
        assert status().returncode == 1
        small.up()
        assert status().returncode == 0
        small.kill("slurmd-n1")
        answer = status()
        assert answer.returncode == 1
        assert "slurmd-n1 does not run" in answer.stdout
        small.up()
        assert status().returncode == 0
    finally:
        small.down()


def test_gate_count_starts_and_holds_jobs(clean_slurm: Testbed) -> None:
    """hsfill as a live admission gate, with jobs that stay valid while every count is 0."""
    slurm = clean_slurm
    for node in slurm.nodes:
        slurm.set_fill(node, 0)
    job = slurm.sbatch("--gres=hsfill:1", script=JOB + "echo on $SLURMD_NODENAME; sleep 60\n")
    assert slurm.job(job)["JobState"] == "PENDING"
    slurm.set_fill("n2", 1)
    assert slurm.wait_job(job, "RUNNING")["NodeList"] == "n2"
    slurm.run("scontrol", "reconfigure")
    wait_until(lambda: slurm.fill("n3") == slurm.gpus, what="the count that reconfigure resets")


def started_s(job: Mapping[str, str]) -> float:
    """When a job's run began, in seconds since 1970; Slurm counts whole ones."""
    return datetime.fromisoformat(job["StartTime"]).timestamp()


def test_preemption_sends_the_users_signal_and_requeues(clean_slurm: Testbed) -> None:
    slurm = clean_slurm
    # A job that only exits within the grace is not requeued by Slurm 22.05, it counts as completed or failed:
    # it has to ask for that itself.
    script = (
        JOB
        + "trap 'echo got USR2; scontrol requeue $SLURM_JOB_ID; exit 0' USR2\n"
        + "echo run ${SLURM_RESTART_COUNT:-0}\nsleep 600 & wait\n"
    )
    victim = slurm.sbatch("--gres=gpu:a100:4", "--nodelist=n1", script=script)
    began = started_s(slurm.wait_job(victim, "RUNNING"))
    # At once: PreemptExemptTime leaves the script the time to listen. Without it the signal may be lost (the
    # job stays until the grace is over), or be the job's end (FAILED 0:12).
    online = slurm.sbatch("--partition=online", "--gres=gpu:a100:1", "--nodelist=n1", "--wrap=sleep 600")
    assert started_s(slurm.wait_job(online, "RUNNING")) - began >= 5
    assert "got USR2" in slurm.output(victim)
    slurm.wait_job(victim, "PENDING")
    slurm.run("scancel", str(online))
    slurm.wait_job(victim, "RUNNING", timeout_s=60)
    wait_until(lambda: "run 1" in slurm.output(victim), what="the second run, in the same file")
    assert "run 0" in slurm.output(victim)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root submits for others")
def test_jobs_of_another_user_run(clean_slurm: Testbed) -> None:
    job = clean_slurm.sbatch(
        "--uid=nobody", "--gres=gpu:a100:1", "--chdir=/", script=JOB + "id -un; echo $CUDA_VISIBLE_DEVICES\n"
    )
    clean_slurm.wait_job(job, "COMPLETED")
    assert clean_slurm.output(job).split() == ["nobody", "0"]
