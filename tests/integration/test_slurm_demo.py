"""`hybridsched demo --slurm`: real daemons, real sbatch jobs, the same report, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridsched.demo.slurm_testbed import Testbed
from tests.helpers import alive, wait_until
from tests.integration.test_demo_run import LINES, TRACE, demo, rows, write_batch
from tests.slurm import require_slurm


@pytest.fixture
def state() -> Iterator[Path]:
    """A short path, as a unix socket needs it, for daemons' state; nothing may run there at the end."""
    require_slurm()
    with tempfile.TemporaryDirectory(prefix="hs-sd-") as folder:
        state = Path(folder) / "slurm"
        yield state
        wait_until(lambda: not processes(state), timeout_s=40, what="the end of the daemons and jobs")
        assert not state.exists()


def processes(state: Path) -> list[str]:
    """Daemons and jobs of the Slurm in `state`, by command line or by environment."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            continue
        words = " ".join(process.info["cmdline"] or ())
        try:
            environment = process.environ().get("SLURM_CONF", "")
        except psutil.Error:
            environment = ""
        if str(state) in words or environment.startswith(str(state)):
            found.append(words)
    return found


@pytest.mark.timeout(240)
def test_the_demo_runs_through_slurm(tmp_path: Path, state: Path) -> None:
    report = tmp_path / "report"
    done = demo(
        *("--slurm", "--slurm-state", str(state), "--gpus", "4", "--speed", "2", "--duration", "24"),
        *("--report", str(report), "--json"),
        timeout_s=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    for part in (summary["online"], summary["online_only"]):
        assert part["requests"] == part["ok"] > 0
    offline = summary["offline"]
    assert offline["completed"] > 0
    assert offline["lines"] == offline["completed"] + offline["failed"] + offline["remaining"]
    assert (offline["missing"], offline["duplicates"], offline["wrong_length"]) == (0, 0, 0)
    assert summary["harvest"]["harvested_s"] > 0
    assert len(summary["engines"]) == 4
    assert summary["restarts"] == {}

    slurm = summary["slurm"]
    assert slurm["nodes"] == 2
    jobs = slurm["jobs"]
    online = [job for job in jobs if job["name"].startswith("hs-")]
    assert [job["partition"] for job in online] == ["online"] * 4
    assert sorted(job["node"] for job in online) == ["n1", "n1", "n2", "n2"]
    first = [job for job in jobs if job["partition"] == "offline" and job["run"] == 1]
    assert len({job["id"] for job in first}) == 5, "one for each lane, and one that waits"
    assert sum(job["start_s"] is not None and job["start_s"] <= 0 for job in first) == 4
    assert slurm["gate_open_to_job_running_ms"]["max"] is not None
    assert slurm["fill_changes"] >= 2, "raised on each node"
    (reclaim,) = slurm["reclaims"]
    assert reclaim["submit_to_gpu_ms"] is not None
    assert reclaim["offline_requeued"]

    written = rows(report / "events.jsonl")
    assert {"set_fill", "submit"} <= {row["act"] for row in written if row["t"] == "slurm"}
    assert len(list((report / "engines").glob("together-*.jsonl"))) == 4
    assert len(list((report / "engines").glob("baseline-*.jsonl"))) == 4
    assert (report / "logs" / "slurm" / "slurmctld.log").stat().st_size > 0
    assert "Slurm jobs" in (report / "report.html").read_text(encoding="utf-8")


def trace_of(folder: Path) -> Path:
    path = folder / "trace.csv"
    path.write_text(TRACE)
    return path


@pytest.mark.timeout(120)
def test_a_users_batch_is_complete_at_the_end(tmp_path: Path, state: Path) -> None:
    report = tmp_path / "report"
    batch = write_batch(tmp_path / "mine.jsonl", output_tokens=30)
    done = demo(
        *("--slurm", "--slurm-state", str(state), "--gpus", "1", "--speed", "4", "--no-baseline", "--finish"),
        *("--trace", str(trace_of(tmp_path)), "--start", "0", "--duration", "10"),
        *("--batch", str(batch), "--report", str(report), "--json"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    offline = summary["offline"]
    assert (offline["lines"], offline["completed"], offline["failed"]) == (LINES + 2, LINES, 2)
    assert (offline["remaining"], offline["missing"], offline["duplicates"]) == (0, 0, 0)
    output = rows(report / "batch.output.jsonl")
    assert [row["custom_id"] for row in output] == [f"c{number}" for number in range(LINES)]
    jobs = [job for job in summary["slurm"]["jobs"] if job["partition"] == "offline"]
    assert "COMPLETED" in {job["state"] for job in jobs}


def test_a_policy_that_opens_no_gate_is_refused(tmp_path: Path) -> None:
    refused = demo("--slurm", "--policy", "online-only", "--report", str(tmp_path / "report"))
    assert refused.returncode == 2
    assert "no offline job would start" in refused.stderr
    assert demo("--slurm-state", str(tmp_path)).returncode == 2


def test_what_a_killed_demo_and_its_guard_left_is_taken_down_by_the_next(state: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from hybridsched.demo.slurm_testbed import Testbed\n"
        "with Testbed(gpus=1, state=Path(sys.argv[1]), logs=Path(sys.argv[2])):\n"
        "    print('up', flush=True); time.sleep(60)\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(state), str(tmp_path / "logs")], stdout=subprocess.PIPE
    )
    assert first.stdout is not None
    assert first.stdout.readline() == b"up\n"
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(state) in words and any(word.endswith("/guard") for word in words):
            process.kill()
    first.kill()
    first.wait(10)
    first.stdout.close()
    left = {int(path.read_text()) for path in (state / "run").glob("*.pid")}
    assert len(left) == 3
    with Testbed(gpus=1, state=state, logs=tmp_path / "again"):
        running = {int(path.read_text()) for path in (state / "run").glob("*.pid")}
        assert running.isdisjoint(left)
        assert not any(alive(pid) for pid in left)
    assert (tmp_path / "again" / "slurmctld.log").exists()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_a_demo_that_is_stopped(tmp_path: Path, state: Path, number: signal.Signals) -> None:
    trace = trace_of(tmp_path)
    report = tmp_path / "report"
    environment = {name: value for name, value in os.environ.items() if name != "HYBRIDSCHED_REDIS_URL"}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "hybridsched", "demo", "--slurm", "--slurm-state", str(state)),
                *("--gpus", "2", "--trace", str(trace), "--start", "0", "--duration", "10", "--speed", "0.5"),
                *("--no-baseline", "--report", str(report)),
            ],
            stdout=said,
            stderr=said,
            env=environment,
        )
    try:
        wait_until(
            lambda: process.poll() is not None or (report / "load" / "together.begin").exists(),
            timeout_s=60,
            what="the start of the trace",
        )
        assert process.poll() is None, (tmp_path / "said").read_text()
        assert len(processes(state)) > 4
    finally:
        process.send_signal(number)
        process.wait(40)
