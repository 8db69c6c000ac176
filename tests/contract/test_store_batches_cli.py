"""`hybridsched batch` as a user runs it: against a real Valkey, and a whole run on a simulated engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import msgspec
import pytest
import redis

from hybridsched.batches.verify import check_files
from hybridsched.ports import KeptPorts
from hybridsched.store.batch_values import BatchStatus, ClaimedChunk
from hybridsched.store.batches import BatchStore
from hybridsched.store.keys import Keys
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord
from hybridsched.workers.offline_folders import Folders
from tests.batch_kit import run_local, write_input
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
    nobody = (
        "no offline worker serves model m; start one: hybridsched worker offline --replica NAME --model m "
        "--engine http://HOST:PORT"
    )
    assert f"It waits: {nobody}" in made.err
    assert f"waits     no_worker: {nobody}" in shown.out
    assert str(source) in shown.out
    as_json = hs("status", batch_id, "--pool", "p", "--json", url=valkey_url).json
    assert as_json["remaining"] == 5  # type: ignore[index]
    assert as_json["waits"] == {"code": "no_worker", "message": nobody}  # type: ignore[index]
    listed = hs("list", "--pool", "p", "--json", url=valkey_url).json
    assert [one["id"] for one in listed] == [batch_id]  # type: ignore[attr-defined]
    assert batch_id in hs("list", "--pool", "p", url=valkey_url).out
    assert "no batches" in hs("list", "--pool", "other", url=valkey_url).err

    waited = hs("wait", batch_id, "--pool", "p", "--timeout", "100ms", url=valkey_url)
    assert waited.code == 1
    assert "Gave up" in waited.err
    assert f"{batch_id} waits: {nobody}" in waited.err
    cancelled = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert cancelled.code == 0
    assert cancelled.err == "", "what it logs on the way is no news for its user"
    assert "is cancelled: 0 of 5 completed (0 %), 1 failed, 4 cancelled before they had run" in cancelled.out
    assert check_files(source, batch.output, batch.errors).exact
    assert not Path(batch.work).exists()
    ended = hs("status", batch_id, "--pool", "p", url=valkey_url).out
    assert "0 of 5 completed (0 %), 1 failed, 4 cancelled before they had run" in ended
    assert "waits" not in ended
    assert hs("wait", batch_id, "--pool", "p", url=valkey_url).code == 1
    late = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert late.code == 1
    assert f"{batch_id} is cancelled already, and nothing was changed" in late.err
    assert batch.output in late.err
    assert hs("list", "--pool", "p", "--active", "--json", url=valkey_url).json == []


def worker_of(client: redis.Redis, model: str, *, at: float | None = None, problem: str = "") -> None:
    """The record of an offline worker that has just spoken, or did at server second `at`."""
    keys = Keys("p")
    record = LaneRecord(lane="r0", replica="r0", worker="w", model=model, problem=problem)
    client.set(keys.lane_telemetry("r0"), msgspec.json.encode(record))
    seconds = at if at is not None else float(client.time()[0])
    client.zadd(keys.lane_index, {"r0": seconds * 1000.0})


def test_with_a_worker_of_the_model_nothing_is_said_and_it_ends_what_is_cancelled(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    worker_of(valkey, "other")
    replica = ReplicaRecord(replica="r7", model="m", lane="r7", url="http://127.0.0.1:8007")
    valkey.set(Keys("p").telemetry("r7"), msgspec.json.encode(replica))
    valkey.zadd(Keys("p").replica_index, {"r7": 1.0})
    store = BatchStore(valkey, "p")
    assert (store.workers("m"), store.workers("other"), store.workers(None)) == (0, 1, 1)
    lonely = hs("submit", source, "--pool", "p", "--output", source.parent / "x", url=valkey_url)
    assert "(those that are up serve other); start one: " in lonely.err
    assert "offline --replica r7 --model m --engine http://127.0.0.1:8007" in lonely.err
    worker_of(valkey, "m")
    assert store.workers("m") == 1
    made = hs("submit", source, "--pool", "p", url=valkey_url)
    assert "waits" not in made.err
    batch_id = made.out.strip()
    assert "no_worker" not in hs("status", batch_id, "--pool", "p", url=valkey_url).out
    assert "is cancelling" in hs("cancel", batch_id, "--pool", "p", url=valkey_url).out
    assert store.get(batch_id).status is BatchStatus.CANCELLING
    worker_of(valkey, "m", at=1.0)
    assert store.workers("m") == 0
    assert "is cancelled" in hs("cancel", batch_id, "--pool", "p", url=valkey_url).out


def gate_of(client: redis.Redis, **fields: object) -> None:
    gate = {"lane": "r0", "state": "closed", "reason": "held"} | fields
    client.set(Keys("p").gate("r0"), json.dumps(gate))


def test_a_batch_that_stands_still_says_why_its_lanes_are_closed(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    worker_of(valkey, "m", at=float(valkey.time()[0]) + 3600.0)  # lives for as many commands as follow
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()

    def waits() -> dict[str, str] | None:
        return hs("status", batch_id, "--pool", "p", "--json", url=valkey_url).json["waits"]  # type: ignore[index,no-any-return]

    dead = waits()
    assert dead is not None
    assert dead["code"] == "lease_expired"
    assert "the policy worker is dead" in dead["message"]
    assert "worker policy" in dead["message"]
    gate_of(valkey)
    held = waits()
    assert held is not None
    assert held["code"] == "held"
    assert "waits     held: " in hs("status", batch_id, "--pool", "p", url=valkey_url).out
    gate_of(valkey, state="open", reason="idle")
    assert waits() is None
    later = float(valkey.time()[0]) + 3600.0
    worker_of(valkey, "m", at=later, problem="engine_unhealthy: engine X does not answer")
    assert waits() == {
        "code": "engine_unhealthy",
        "message": "lane r0 is open, and its offline worker waits: engine X does not answer",
    }


def test_ctrl_c_ends_the_wait_and_not_the_batch(valkey: redis.Redis, valkey_url: str, source: Path) -> None:
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()
    with subprocess.Popen(
        [*HS, "batch", "wait", batch_id, "--pool", "p", "--redis", valkey_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored in a test run that a shell has put in the background, and inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        seen = int(valkey.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0))

        def looks() -> bool:
            calls = valkey.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0)
            return int(calls) >= seen + 4

        wait_until(looks, timeout_s=30, what="the wait")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the batch goes on" in said
    assert f"batch cancel {batch_id}" in said
    assert "Abort" not in said
    assert BatchStore(valkey, "p").get(batch_id).status is BatchStatus.VALIDATING


def test_a_chunk_that_somebody_has_is_not_taken_from_him_by_a_cancel(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()
    store = BatchStore(valkey, "p")
    store.plan_chunk(
        store.get(batch_id), end=10, first_line=1, lines=1, tokens=1, next_line=2, at_end=False, ahead=9
    )
    claimed = store.claim_chunk(batch_id, 0, owner="w", lease_ms=1500)
    assert isinstance(claimed, ClaimedChunk)
    until_ms = claimed.chunk.lease_ms
    assert "is cancelled" in hs("cancel", batch_id, "--pool", "p", url=valkey_url).out
    finished_ms = store.get(batch_id).finished_ms
    assert finished_ms is not None
    assert finished_ms >= until_ms, "not before the lease was over"


def test_a_batch_whose_files_are_elsewhere_stays_cancelling_and_says_why(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()
    store = BatchStore(valkey, "p")
    work = Path(store.get(batch_id).work)
    work.rename(work.with_name("moved"))
    done = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert done.code == 0
    assert "its files cannot be used from here" in done.err
    assert store.get(batch_id).status is BatchStatus.CANCELLING


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


def test_a_finished_batch_that_is_submitted_again_is_named(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    store = BatchStore(valkey, "default")
    folders = Folders()
    work = folders.get(store.get(batch_id))
    run_local(work)
    work.remove()
    folders.close()
    valkey.hset(store.keys.batch(batch_id), mapping={"at_end": 1})
    fence = store.claim_finalize(batch_id, lease_ms=1000)
    assert fence is not None
    store.finalized(batch_id, fence, BatchStatus.COMPLETED, done=4, failed=1)
    again = hs("submit", source, url=valkey_url)
    assert again.code == 1
    assert f"Batch {batch_id}, which is completed, has written it" in again.err
    assert "--output" in again.err


def test_progress_tells_answered_lines_from_lines_in_the_output(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    shown = hs("status", batch_id, url=valkey_url).out
    assert (
        "0 of 5 answered (0 %), 0 of them failed; in the files as soon as all lines before them are" in shown
    )
    waited = hs("wait", batch_id, "--timeout", "100ms", url=valkey_url)
    assert "0 of 5 answered" in waited.out
    assert "output" not in waited.out


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
        (["submit", "{missing}"], 2, "no such file"),
        (["submit", "{folder}"], 2, "is a folder"),
        (["submit", "{empty}"], 1, "is empty"),
        (["submit", "{file}", "--output", "{file}"], 2, "three different files"),
        (["submit", "{file}", "--output", "{missing}/x"], 2, "is no folder"),
        (["submit", "{file}", "--deadline", "soon"], 2, "neither a span"),
        (["submit", "{file}", "--deadline", "2001-01-01"], 2, "in the past"),
        (["submit", "{file}", "--deadline", "99999999999999d"], 2, "more than 366 days"),
        (["submit", "{file}", "--deadline", "9" * 400 + "d"], 2, "more than 366 days"),
        (["submit", "{file}", "--deadline", "9999-12-31"], 2, "more than 366 days"),
        (["submit", "{file}", "--deadline", "0001-01-01"], 2, "neither a span"),
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
        (["run", "{missing}", "--engine", "http://127.0.0.1:9"], 2, "no such file"),
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
    for url, code, text in ((f"unix://{tmp_path}/none", 1, "Redis"), ("http://x", 2, "must begin with")):
        done = hs("list", "--redis", url)
        assert done.code == code
        assert text in done.err


@contextmanager
def engine(*options: str) -> Iterator[str]:
    ports = KeptPorts([0])
    (port,) = ports.numbers
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
        ports.close()


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


def test_a_record_that_cannot_be_read_is_named_on_stderr_and_the_others_are_shown(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    hs("submit", source, "--pool", "p", url=valkey_url)
    (good,) = BatchStore(valkey, "p").all()
    valkey.zadd("hs:{p}:batches", {"batch_bad": 1})
    valkey.hset("hs:{p}:batch:batch_bad", mapping={"id": "batch_bad", "deadline_ms": "1e300"})
    seen = hs("list", "--pool", "p", "--json", url=valkey_url)
    assert seen.code == 0
    assert good.id in seen.out
    assert isinstance(seen.json, list)
    assert "batch_bad" in seen.err
    shown = hs("status", good.id, "--pool", "p", url=valkey_url)
    assert (shown.code, good.id in shown.out) == (0, True)
    refused = hs("status", "batch_bad", "--pool", "p", url=valkey_url)
    assert refused.code == 1
    assert "is no batch that can be read" in refused.err


@pytest.mark.parametrize("name", ["lane_index", "replica_index"])
def test_an_index_of_another_type_is_named_and_the_batch_stays_queued(
    valkey: redis.Redis, valkey_url: str, source: Path, name: str
) -> None:
    index = getattr(Keys("p"), name)
    valkey.set(index, "x")
    named = f"WRONGTYPE {index} is a string, not a zset"
    made = hs("submit", source, "--pool", "p", url=valkey_url)
    assert made.code == 0, made.err
    assert named in made.err
    batch_id = made.out.strip()
    assert BatchStore(valkey, "p").get(batch_id).lines == 5
    shown = hs("status", batch_id, "--pool", "p", url=valkey_url)
    assert (shown.code, "workers_unknown" in shown.out, named in shown.out) == (0, True, True)
    cancelled = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert (cancelled.code, named in cancelled.err) == (0, name == "lane_index")


@pytest.mark.parametrize("name", ["batches", "batches_active"])
def test_a_list_of_batches_of_another_type_is_named_and_nothing_is_queued(
    valkey: redis.Redis, valkey_url: str, source: Path, name: str
) -> None:
    key = getattr(Keys("p"), name)
    valkey.set(key, "x")
    made = hs("submit", source, "--pool", "p", url=valkey_url)
    assert made.code == 1
    assert f"WRONGTYPE {key} is a string, not a zset" in made.err
    assert "Redis 7.0" not in made.err
    assert made.err.count("\n") == 1
    assert [one for one in valkey.keys("hs:{p}:batch:*") if b"chunk" not in one] == []
    listed = hs("list", "--pool", "p", *(["--active"] if name == "batches_active" else []), url=valkey_url)
    assert (listed.code, key in listed.err) == (1, True)
    valkey.delete(key)
    again = hs("submit", source, "--pool", "p", url=valkey_url)
    assert again.code == 0, again.err
    assert hs("status", again.out.strip(), "--pool", "p", url=valkey_url).code == 0


def test_an_input_that_fails_while_it_is_read_is_not_blamed_on_redis(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    made = hs("submit", "/proc/self/mem", "--pool", "p", "-o", str(tmp_path / "o.jsonl"), url=valkey_url)
    assert made.code == 1
    assert "/proc/self/mem" in made.err
    assert "Redis" not in made.err
    assert made.err.count("\n") == 1


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("verb", ["submit", "run"])
def test_a_name_that_is_not_utf_8_is_refused_in_a_sentence(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path, verb: str, there: bool
) -> None:
    folder = tmp_path / "only"
    folder.mkdir()
    file = os.fsdecode(os.fsencode(folder) + b"/\xff\xfe.jsonl")
    if there:
        Path(file).write_text("{}\n")
    where = ["--pool", "p", "--redis", valkey_url] if verb == "submit" else ["--engine", "http://127.0.0.1:1"]
    made = subprocess.run([*HS, "batch", verb, file, *where], capture_output=True, check=False)
    assert made.returncode == 2
    assert b"is not UTF-8" in made.stderr
    assert b"surrogates" not in made.stderr
    assert b"Traceback" not in made.stderr
    assert len(list(folder.iterdir())) == int(there)
