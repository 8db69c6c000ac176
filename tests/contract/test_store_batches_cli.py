"""`hybridsched batch` as a user runs it: against a real Valkey, and a whole run on a simulated engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import redis

from hybridsched.batches.verify import check_files
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.batches import BatchStore
from tests.batch_kit import write_input
from tests.helpers import wait_until

DATA = Path(__file__).parent.parent / "data"
HS = [sys.executable, "-m", "hybridsched.cli.main"]


class Done:
    """How a command ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr
        assert "Traceback" not in self.err, self.err

    @property
    def json(self) -> object:
        return json.loads(self.out)


def hs(*args: object, url: str = "", cwd: Path | None = None) -> Done:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDSCHED_")}
    if url:
        environment["HYBRIDSCHED_REDIS_URL"] = url
    command = [*HS, "batch", *map(str, args)]
    return Done(subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    write_input(path, 5, bad=frozenset({1}))
    return path


def test_submit_status_list_cancel_wait(valkey: redis.Redis, valkey_url: str, source: Path) -> None:
    made = hs("submit", source, "--pool", "p", "--deadline", "2h", url=valkey_url)
    assert made.code == 0, made.err
    batch_id = made.out.strip()
    assert batch_id.startswith("batch_")
    assert "5 lines" in made.err
    assert "1 lines cannot run" in made.err
    store = BatchStore(valkey, "p")
    batch = store.get(batch_id)
    assert (batch.lines, batch.model, batch.uid) == (5, "m", os.geteuid())
    assert batch.deadline_ms is not None
    assert abs(batch.deadline_ms - batch.submitted_ms - 7_200_000) < 1000

    again = hs("submit", source, "--pool", "p", "--json", url=valkey_url)
    assert again.json["id"] == batch_id  # type: ignore[index]
    assert again.json["known"] is True  # type: ignore[index]

    shown = hs("status", batch_id, "--pool", "p", url=valkey_url)
    assert shown.code == 0
    assert "validating" in shown.out
    assert str(source) in shown.out
    as_json = hs("status", batch_id, "--pool", "p", "--json", url=valkey_url).json
    assert as_json["remaining"] == 5  # type: ignore[index]
    listed = hs("list", "--pool", "p", "--json", url=valkey_url).json
    assert [one["id"] for one in listed] == [batch_id]  # type: ignore[attr-defined]
    assert batch_id in hs("list", "--pool", "p", url=valkey_url).out
    assert "no batches" in hs("list", "--pool", "other", url=valkey_url).err

    waited = hs("wait", batch_id, "--pool", "p", "--timeout", "100ms", url=valkey_url)
    assert waited.code == 1
    assert "Gave up" in waited.err
    cancelled = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert cancelled.code == 0
    assert "cancelling" in cancelled.out
    fence = store.claim_finalize(batch_id, lease_ms=1000)
    assert fence is not None
    store.finalized(batch_id, fence, BatchStatus.CANCELLED, done=0, failed=5)
    assert hs("wait", batch_id, "--pool", "p", url=valkey_url).code == 1
    late = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert late.code == 1
    assert "is cancelled" in late.err
    assert hs("list", "--pool", "p", "--active", "--json", url=valkey_url).json == []


def test_a_completed_batch_ends_a_wait_with_success(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    store = BatchStore(valkey, "default")
    valkey.hset(store.keys.batch(batch_id), mapping={"at_end": 1})
    fence = store.claim_finalize(batch_id, lease_ms=1000)
    assert fence is not None
    store.finalized(batch_id, fence, BatchStatus.COMPLETED, done=4, failed=1)
    waited = hs("wait", batch_id, "--json", url=valkey_url)
    assert waited.code == 0
    assert waited.json["done"] == 4  # type: ignore[index]


def test_a_batch_that_the_store_has_lost_goes_on(valkey: redis.Redis, valkey_url: str, source: Path) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    valkey.flushall()
    again = hs("submit", source, url=valkey_url)
    assert again.out.strip() == batch_id
    assert "goes on from there" in again.err
    assert BatchStore(valkey, "default").get(batch_id).lines == 5


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["submit", "{missing}"], 1, "no such file"),
        (["submit", "{folder}"], 1, "is a folder"),
        (["submit", "{empty}"], 1, "is empty"),
        (["submit", "{file}", "--output", "{file}"], 1, "three different files"),
        (["submit", "{file}", "--output", "{missing}/x"], 1, "is no folder"),
        (["submit", "{file}", "--deadline", "soon"], 2, "neither a span"),
        (["submit", "{file}", "--deadline", "2001-01-01"], 2, "in the past"),
        (["submit", "{file}", "--pool", "a b"], 2, "not a name"),
        (["submit"], 2, "Missing argument"),
        (["status", "batch_0"], 1, "no batch 'batch_0'"),
        (["wait", "batch_0"], 1, "no batch"),
        (["wait", "batch_0", "--timeout", "x"], 2, "not a duration"),
        (["cancel", "batch_0"], 1, "no batch"),
        (["run", "{file}"], 2, "--engine"),
        (["run", "{file}", "--engine", "localhost:8000"], 2, "not an engine's address"),
        (["run", "{file}", "--engine", "http://h:1/v1"], 2, "without a path"),
        (["run", "{file}", "--engine", "http://127.0.0.1:9"], 1, "no engine answers"),
        (["run", "{missing}", "--engine", "http://127.0.0.1:9"], 1, "no such file"),
    ],
)
def test_one_clear_sentence(
    valkey_url: str, valkey: redis.Redis, source: Path, args: list[str], code: int, text: str
) -> None:
    folder = source.parent
    (folder / "empty.jsonl").touch()
    names = {
        "{missing}": folder / "missing.jsonl",
        "{folder}": folder,
        "{empty}": folder / "empty.jsonl",
        "{file}": source,
    }

    def fill(arg: str) -> str:
        for name, path in names.items():
            arg = arg.replace(name, str(path))
        return arg

    done = hs(*map(fill, args), url=valkey_url)
    assert done.code == code, done.err
    assert text in done.err
    assert done.out == ""
    assert not list(folder.glob(".hybridsched-*"))
    assert not list(folder.glob("*.output.jsonl"))


def test_a_store_that_is_not_there(source: Path, tmp_path: Path) -> None:
    nowhere = hs("submit", source)
    assert nowhere.code == 2
    assert "--redis" in nowhere.err
    for url, text in ((f"unix://{tmp_path}/none", "Redis"), ("http://x", "must begin with")):
        done = hs("list", "--redis", url)
        assert done.code == 1
        assert text in done.err


@contextmanager
def engine(*options: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "hybridsched.engines.simulated", "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--served-model-name", "tiny", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def healthy() -> bool:
        assert process.poll() is None
        try:
            with urlopen(f"{url}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    try:
        wait_until(healthy, what="the simulated engine")
        yield url
    finally:
        process.kill()
        process.wait(10)


def test_the_messy_file_ends_line_by_line(tmp_path: Path) -> None:
    source = tmp_path / "messy.jsonl"
    source.write_bytes((DATA / "messy_batch.jsonl").read_bytes())
    verdicts = [json.loads(text) for text in (DATA / "messy_batch.verdicts.jsonl").read_text().splitlines()]
    with engine("--speed", "20", "--max-model-len", "2048") as url:
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
    with engine("--speed", "4", "--max-num-seqs", "4") as url:
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
