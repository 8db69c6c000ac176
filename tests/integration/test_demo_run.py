"""The demo as a whole, short and small: its report, its exit status, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from hybridsched.core.codec import decode_record, replay
from hybridsched.store.embedded import EmbeddedValkey
from tests.helpers import wait_until

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{at:.2f},{300 + 37 * number % 900},{5 + number % 20}\n"
    for number, at in enumerate([0.5, 0.6, 0.7, 3.0, 3.1, 3.2, 3.3, 6.0, 6.1, 9.0])
)
LINES = 12


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def write_batch(path: Path, *, output_tokens: int) -> Path:
    """Good lines, a broken one, and one with a wrong url."""
    lines = [
        json.dumps(
            {
                "custom_id": f"c{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "model": "mine",
                    "prompt": [100 + (7 * number + place) % 800 for place in range(200 + 60 * number)],
                    "max_tokens": output_tokens,
                    "ignore_eos": True,
                },
            }
        )
        for number in range(LINES)
    ]
    lines.insert(3, "{broken")
    lines.append(
        json.dumps({"custom_id": "odd", "method": "POST", "url": "/v2/odd", "body": {"model": "mine"}})
    )
    path.write_text("\n".join(lines))
    return path


def demo(*arguments: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HYBRIDSCHED_REDIS_URL"}
    return subprocess.run(
        [sys.executable, "-m", "hybridsched", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
    )


def test_a_redis_that_is_not_there_is_one_error_and_leaves_no_folder(tmp_path: Path) -> None:
    done = demo("--redis", "redis://127.0.0.1:1", "--report", str(tmp_path / "report"))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "report").exists()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ours(folder: Path) -> list[int]:
    """Processes whose command line names the folder: children of a demo."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(folder) in part for part in process.info["cmdline"] or ())
    ]


def test_a_users_batch_is_finished_beside_the_trace(tmp_path: Path, trace: Path) -> None:
    report = tmp_path / "report"
    batch = write_batch(tmp_path / "mine.jsonl", output_tokens=30)
    done = demo(
        *("--trace", str(trace), "--start", "0", "--duration", "10", "--speed", "4", "--gpus", "2"),
        *("--batch", str(batch), "--report", str(report), "--finish", "--json"),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((report / "summary.json").read_text())
    for part in (summary["online"], summary["online_only"]):
        assert (part["requests"], part["ok"]) == (10, 10)
    offline = summary["offline"]
    assert (offline["lines"], offline["completed"], offline["failed"]) == (LINES + 2, LINES, 2)
    assert (offline["remaining"], offline["missing"], offline["duplicates"]) == (0, 0, 0)
    assert offline["wrong_length"] == 0
    assert offline["output_tokens"] == LINES * 30
    assert summary["harvest"]["engine_seconds"] >= 20
    assert summary["restarts"] == {}
    output = rows(report / "batch.output.jsonl")
    assert [row["custom_id"] for row in output] == [f"c{number}" for number in range(LINES)]
    assert [row["custom_id"] for row in rows(report / "batch.errors.jsonl")] == [None, "odd"]
    with (report / "requests.csv").open() as file:
        assert Counter(row["pass"] for row in csv.DictReader(file)) == {"baseline": 10, "together": 10}
    decided = [decode_record(line) for line in (report / "decisions.jsonl").read_bytes().splitlines()]
    assert decided
    assert [replay(record) for record in decided] == [()] * len(decided), "a live log replays as it was"
    assert {row["t"] for row in rows(report / "events.jsonl")} >= {"gate", "resume"}
    assert "plotly" in (report / "report.html").read_text(encoding="utf-8")
    assert ours(report) == []

    again = demo("--trace", str(trace), "--report", str(report), "--duration", "10", "--start", "0")
    assert again.returncode == 2
    assert "your own batch" in again.stderr
    assert (report / "batch.output.jsonl").exists(), "the results of a user's batch were touched"


def test_a_run_that_stops_with_the_trace_keeps_the_rest(tmp_path: Path, trace: Path) -> None:
    report = tmp_path / "report"
    done = demo(
        *("--trace", str(trace), "--start", "0", "--duration", "10", "--speed", "4", "--gpus", "1"),
        *("--report", str(report), "--no-baseline"),
    )
    assert done.returncode == 0, done.stderr
    assert "harvested" in done.stdout
    summary = json.loads((report / "summary.json").read_text())
    assert summary["online_only"] is None
    offline = summary["offline"]
    assert offline["lines"] == 40
    assert offline["completed"] + offline["failed"] + offline["remaining"] == 40
    assert offline["remaining"] > 0
    assert (offline["missing"], offline["duplicates"]) == (0, 0)
    assert summary["pauses"]["signals"] >= 1
    assert list(report.glob(".hybridsched-*")), "the batch cannot be gone on with"


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short folder for temporary files of the demo alone."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def started(report: Path, trace: Path, temporary: Path) -> subprocess.Popen[bytes]:
    """A small demo that has begun its trace, which takes 100 s: it does not end by itself meanwhile."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "hybridsched", "demo", "--trace", str(trace), "--start", "0"),
            *("--duration", "10", "--speed", "0.1", "--gpus", "1", "--report", str(report), "--no-baseline"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        wait_until(lambda: (report / "load" / "together.begin").exists(), timeout_s=60, what="the start")
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def test_a_demo_that_is_told_to_stop_leaves_no_process_and_no_socket(
    tmp_path: Path, trace: Path, sockets: Path
) -> None:
    report = tmp_path / "report"
    process = started(report, trace, sockets)
    try:
        assert len(list(sockets.glob("hs-*"))) == 1
        children = psutil.Process(process.pid).children(recursive=True)
        second = demo("--trace", str(trace), "--start", "0", "--duration", "10", "--report", str(report))
        assert second.returncode == 2
        assert f"another demo (process {process.pid}) is writing" in second.stderr
    finally:
        process.terminate()
        status = process.wait(60)
    assert status == 1
    assert list(sockets.iterdir()) == []
    assert not psutil.wait_procs(children, timeout=15)[1]


def test_a_redis_of_the_users_is_left_as_it_was(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path, trace: Path
) -> None:
    valkey.set("mine", "1")
    done = demo(
        *("--trace", str(trace), "--start", "0", "--duration", "10", "--speed", "4", "--gpus", "1"),
        *("--report", str(tmp_path / "report"), "--no-baseline", "--redis", valkey_url),
    )
    assert done.returncode == 0, done.stderr
    assert valkey.keys("*") == [b"mine"]
    assert rows(tmp_path / "report" / "decisions.jsonl"), "and yet they were there to be read"


def test_a_killed_demo_leaves_no_process_and_its_socket_goes_at_the_next_start(
    tmp_path: Path, trace: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = started(tmp_path / "report", trace, sockets)
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 6, "Valkey, engine, three workers and the load"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    gone, alive = psutil.wait_procs(children, timeout=15)
    assert not alive, [child.cmdline() for child in alive]
    assert len(gone) == len(children)
    (left,) = sockets.glob("hs-*")
    monkeypatch.setattr("tempfile.tempdir", str(sockets))
    with EmbeddedValkey(tmp_path / "valkey"):
        assert not left.exists()
        assert len(list(sockets.glob("hs-*"))) == 1
    assert list(sockets.iterdir()) == []
