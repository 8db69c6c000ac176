"""What Slurm loads: job_submit.lua, prolog and epilog, in the real daemons."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.integration.test_slurm_testbed import processes_with
from tests.slurm import Testbed

LINES = """#!/bin/bash
#SBATCH --partition=offline
#SBATCH --gres=gpu:a100:1
#SBATCH --signal=B:USR2@60
#SBATCH --open-mode=append
#SBATCH --time=10
"""


@pytest.fixture
def node_settings(clean_slurm: Testbed) -> Iterator[Path]:
    """The file of prolog's and epilog's settings, put back after the test."""
    path = clean_slurm.state / "etc" / "hybridsched-node.conf"
    before = path.read_text()
    yield path
    path.write_text(before)


def test_refused_with_the_lines_to_add(clean_slurm: Testbed) -> None:
    answer = clean_slurm.attempt("sbatch", "--partition=offline", stdin="#!/bin/bash\nsleep 1\n")
    assert answer.returncode != 0
    for line in (
        "#SBATCH --gres=hsfill:1",
        "#SBATCH --signal=B:USR2@60",
        "#SBATCH --open-mode=append",
        "#SBATCH --time=",
    ):
        assert line in answer.stderr, answer.stderr
    assert "#SBATCH --requeue" not in answer.stderr, "what is set by itself is not asked for"


def test_defaults_are_set(clean_slurm: Testbed) -> None:
    script = LINES.replace("gpu:a100:1", "gpu:1") + "sleep 1\n"
    job = clean_slurm.job(clean_slurm.sbatch("--hold", script=script))
    assert job["Requeue"] == "1"
    assert "gpu:a100:1" in job["TresPerNode"]


def test_no_requeue_and_truncate_are_refused(clean_slurm: Testbed) -> None:
    answer = clean_slurm.attempt("sbatch", "--no-requeue", "--open-mode=truncate", stdin=LINES + "sleep 1\n")
    assert "#SBATCH --requeue" in answer.stderr
    assert "#SBATCH --open-mode=append" in answer.stderr
    assert answer.returncode != 0


def test_signal_in_the_environment_is_seen(clean_slurm: Testbed) -> None:
    script = LINES.replace("#SBATCH --signal=B:USR2@60\n", "") + "sleep 1\n"
    assert clean_slurm.attempt("sbatch", "--hold", "-o", "/dev/null", stdin=script).returncode != 0
    answer = clean_slurm.attempt(
        "env", "SBATCH_SIGNAL=B:USR2@60", "sbatch", "--hold", "-o", "/dev/null", stdin=script
    )
    assert answer.returncode == 0, answer.stderr


def test_online_jobs_pass_untouched(clean_slurm: Testbed) -> None:
    job = clean_slurm.sbatch("--partition=online", "--hold", "--no-requeue", "--wrap=sleep 1")
    assert clean_slurm.job(job)["Requeue"] == "0"
    assert clean_slurm.run("srun", "--partition=online", "echo", "fine").strip() == "fine"


def test_srun_in_the_offline_partition_is_refused(clean_slurm: Testbed) -> None:
    answer = clean_slurm.attempt("srun", "--partition=offline", "--gres=gpu:a100:1", "true")
    assert answer.returncode != 0
    assert "takes batch jobs only" in answer.stderr


def probe(settings: Path, body: str) -> None:
    """Make `body` the site's own GPU probe."""
    program = settings.parent / "probe.sh"
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    settings.write_text(settings.read_text() + f"gpu_probe = {program}\nprobe_timeout_s = 1\n")


@pytest.mark.parametrize(
    "body",
    ["exit 0", "exit 7", "kill -9 $$", "sleep 600", "trap '' TERM; while :; do sleep 600; done", "exit 127"],
)
def test_a_probe_that_proves_nothing_does_not_drain(
    clean_slurm: Testbed, node_settings: Path, body: str
) -> None:
    probe(node_settings, body)
    job = clean_slurm.sbatch("--nodelist=n1", script=LINES + "echo ran\n")
    clean_slurm.wait_job(job, "COMPLETED")
    assert "ran" in clean_slurm.output(job)
    node = clean_slurm.node("n1")
    assert "DRAIN" not in node["State"], f"{node.get('Reason')}: {clean_slurm.log('hooks')[-2000:]}"
    assert "sleep 600" not in "".join(processes_with(f"SLURM_JOB_ID={job}")), "the probe left a process"
    said = [line for line in clean_slurm.log("hooks").splitlines() if f"prolog job={job} " in line]
    assert bool(said) is (body != "exit 0")


def test_a_missing_probe_does_not_drain(clean_slurm: Testbed, node_settings: Path) -> None:
    node_settings.write_text(node_settings.read_text() + "gpu_probe = /nowhere/probe\n")
    job = clean_slurm.sbatch("--nodelist=n1", script=LINES + "echo ran\n")
    clean_slurm.wait_job(job, "COMPLETED")
    assert "is not on this node" in clean_slurm.log("hooks")


def test_a_broken_gpu_drains_the_node_and_the_job_goes_elsewhere(
    clean_slurm: Testbed, node_settings: Path
) -> None:
    probe(node_settings, "[[ $SLURMD_NODENAME != n1 ]] || { echo GPU $1 has fallen off the bus; exit 1; }")
    job = clean_slurm.sbatch(script=LINES + "echo ran on $SLURMD_NODENAME\n")
    wait_until(lambda: "DRAIN" in clean_slurm.node("n1")["State"], timeout_s=20, what="the drain of n1")
    clean_slurm.wait_job(job, "COMPLETED", timeout_s=40)
    assert "ran on n1" not in clean_slurm.output(job)
    assert "fallen off the bus" in clean_slurm.log("hooks")


def test_a_failure_that_passes_does_not_drain(clean_slurm: Testbed, node_settings: Path) -> None:
    probe(node_settings, '[[ -e "$0.seen" ]] && exit 0; touch "$0.seen"; exit 1')
    job = clean_slurm.sbatch("--nodelist=n1", script=LINES + "echo ran\n")
    clean_slurm.wait_job(job, "COMPLETED")
    assert "DRAIN" not in clean_slurm.node("n1")["State"]


def test_shared_memory_too_small_drains(clean_slurm: Testbed, node_settings: Path) -> None:
    node_settings.write_text(node_settings.read_text().replace("shm_min_mib = 0", "shm_min_mib = 9000000"))
    clean_slurm.sbatch("--nodelist=n1", script=LINES + "echo ran\n")
    wait_until(lambda: "DRAIN" in clean_slurm.node("n1")["State"], timeout_s=20, what="the drain of n1")
    assert "an engine needs 9000000" in clean_slurm.log("hooks")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root submits for others")
def test_the_epilog_frees_what_the_job_left_and_nothing_else(clean_slurm: Testbed) -> None:
    slurm, shm = clean_slurm, clean_slurm.state / "shm"
    (shm / "others").write_text("root's")
    (shm / "older").write_text("from before the job")
    os.chown(shm / "older", 65534, 65534)
    os.utime(shm / "older", (0, 0))
    body = f"""
    cd {shm}
    setsid bash -c 'exec 5>opened; trap "" TERM; while :; do sleep 600; done' > /dev/null 2>&1 &
    disown
    echo data > psm_left; mkdir hybridsched-$SLURM_JOB_ID; echo data > hybridsched-$SLURM_JOB_ID/part
    until [[ -e opened ]]; do sleep 0.05; done
    echo $! > /proc/self/fd/1
    """
    job = slurm.sbatch("--uid=nobody", "--chdir=/", "--nodelist=n1", script=LINES + body)
    slurm.wait_job(job, "COMPLETED", "COMPLETING")
    pid = int(slurm.output(job).split()[-1])
    wait_until(lambda: not (shm / "psm_left").exists(), timeout_s=20, what="the epilog")
    wait_until(
        lambda: not (Path("/proc") / str(pid) / "fd" / "5").exists(), what="the end of the left process"
    )
    wait_until(lambda: slurm.node("n1")["State"] == "IDLE", timeout_s=20, what="n1 idle")
    assert sorted(path.name for path in shm.iterdir()) == ["older", "others"]
    assert not list((slurm.state / "jobs" / "n1").glob("job-*"))
    for path in shm.iterdir():
        path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root submits for others")
def test_the_epilog_leaves_another_job_of_the_user_alone(clean_slurm: Testbed) -> None:
    slurm, shm = clean_slurm, clean_slurm.state / "shm"
    long = slurm.sbatch(
        "--uid=nobody", "--chdir=/", "--nodelist=n1", script=LINES + f"echo data > {shm}/staged\nsleep 600\n"
    )
    slurm.wait_job(long, "RUNNING")
    wait_until((shm / "staged").exists, what="the file of the long job")
    short = slurm.sbatch("--uid=nobody", "--chdir=/", "--nodelist=n1", script=LINES + "true\n")
    slurm.wait_job(short, "COMPLETED")
    wait_until(lambda: f"epilog job={short} " in slurm.log("hooks"), timeout_s=20, what="the epilog")
    assert slurm.job(long)["JobState"] == "RUNNING"
    assert (shm / "staged").exists()
    slurm.run("scancel", "--signal=KILL", "--full", str(long))
    wait_until(lambda: not (shm / "staged").exists(), timeout_s=30, what="the epilog of the long job")


def test_two_epilogs_of_one_job_leave_each_other_alone(clean_slurm: Testbed) -> None:
    """A busy slurmctld asks again, and slurmd may then run a second one beside the first."""
    epilog = clean_slurm.state / "etc" / "epilog.sh"
    env = {
        "SLURM_JOB_ID": "999999",
        "SLURM_JOB_UID": str(os.geteuid()),
        "SLURMD_NODENAME": "n1",
        "SLURM_SCRIPT_CONTEXT": "epilog_slurmd",
    }
    for _ in range(5):
        running = [
            subprocess.Popen([epilog], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
            for _ in range(3)
        ]
        for process in running:
            _, said = process.communicate(timeout=30)
            assert (process.returncode, said) == (0, "")
