"""`hybridsched batch` and what it cannot use: words, files, a store that is away or holds something else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import redis

from hybridsched.store.batches import BatchStore
from hybridsched.store.keys import Keys
from tests.contract.batch_command import HS, hs


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
