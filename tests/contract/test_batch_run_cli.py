"""`hybridsched batch run` as a user runs it, whole, on a simulated engine."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridsched.batches.verify import check_files
from tests.contract.batch_command import HS, hs
from tests.contract.engine_servers import SimulatedServer
from tests.helpers import wait_until

DATA = Path(__file__).parent.parent / "data"


@contextmanager
def engine(*flags: str, speed: float) -> Iterator[str]:
    server = SimulatedServer(*flags, speed=speed, model="tiny")
    try:
        yield server.url
    finally:
        server.stop()


def test_the_messy_file_ends_line_by_line(tmp_path: Path) -> None:
    source = tmp_path / "messy.jsonl"
    source.write_bytes((DATA / "messy_batch.jsonl").read_bytes())
    verdicts = [json.loads(text) for text in (DATA / "messy_batch.verdicts.jsonl").read_text().splitlines()]
    with engine("--max-model-len", "2048", speed=20.0) as url:
        done = hs("run", source, "--engine", url, "--json")
        assert done.code == 0, done.err
        again = hs("run", source, "--engine", url)
        assert again.code == 0
        assert "nothing to do" in again.err
    output, errors = tmp_path / "messy.output.jsonl", tmp_path / "messy.errors.jsonl"
    found = check_files(source, output, errors)
    assert found.exact
    assert found.lines == 27
    failed = {record["error"]["line"]: record for record in map(json.loads, errors.read_text().splitlines())}
    assert list(failed) == sorted(failed)
    for verdict in verdicts:
        if "error" in verdict:
            record = failed[verdict["line"]]
            assert record["error"]["code"] == verdict["error"]
            assert record["error"]["message"] == verdict["message"]
            assert record["custom_id"] == verdict["custom_id"]
            assert record["response"] is None
    by_engine = {line for line, record in failed.items() if record["response"] is not None}
    assert {19, 20, 21} <= by_engine
    assert failed[19]["response"]["status_code"] == 404
    assert not list(tmp_path.glob(".hybridsched-*"))


def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    with source.open("w") as file:
        for i in range(60):
            body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 60, "ignore_eos": True}
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    output = tmp_path / "in.output.jsonl"
    with engine("--max-num-seqs", "4", speed=4.0) as url:
        command = [*HS, "batch", "run", str(source), "--engine", url]
        killed = 0
        for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
            before = journal_bytes(tmp_path)
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            try:
                wait_until(
                    lambda before=before, process=process: (  # type: ignore[misc]
                        journal_bytes(tmp_path) > before + 2000 or process.poll() is not None
                    ),
                    timeout_s=30,
                    what="some finished lines",
                )
                if process.poll() is None:
                    process.send_signal(number)
                    killed += 1
                _, said = process.communicate(timeout=30)
                assert b"Traceback" not in said
            finally:
                process.kill()
        assert killed >= 2
        done = hs("run", source, "--engine", url)
        assert done.code == 0, done.err
        assert "An earlier run of" in done.err
    found = check_files(source, output, tmp_path / "in.errors.jsonl")
    assert found.exact
    assert found.done == 60
    assert not list(tmp_path.glob(".hybridsched-*"))


def journal_bytes(folder: Path) -> int:
    """Bytes of results on disk so far: assembled, in journals, and recovered."""
    total = 0
    for path in [*folder.glob("*.output.jsonl"), *folder.glob(".hybridsched-*/*.jsonl")]:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total
