"""Batch files on the real vLLM: as `vllm run-batch` runs them, and what it cannot."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridsched.engines.vllm_http import VllmHttpEngine
from tests.helpers import wait_until
from tests.vllm.engines import MODEL, RealServers, RealVllm, environment

pytestmark = pytest.mark.timeout(600)

FLAGS = ("--max-model-len", "2048")
EMBEDDER = "embedder"
WORDS = [
    "the",
    "gate",
    "opens",
    "when",
    "an",
    "engine",
    "has",
    "been",
    "idle",
    "for",
    "a",
    "whole",
    "window",
    "of",
    "measured",
    "time",
]
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def chat(custom_id: str, source: random.Random, **more: Any) -> dict[str, Any]:
    said = " ".join(source.choices(WORDS, k=source.randint(3, 60)))
    greedy = {"temperature": 0, "max_tokens": source.randint(8, 80)}
    return line(custom_id, CHAT, messages=[{"role": "user", "content": said}], **greedy | more)


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    # Bytes: what a model writes may hold characters that Python takes for the end of a line.
    return [json.loads(text) for text in path.read_bytes().splitlines()] if path.exists() else []


def batch_run(source: Path, *urls: str, **options: Any) -> subprocess.Popen[str]:
    engines = [word for url in urls for word in ("--engine", url)]
    return subprocess.Popen(
        [sys.executable, "-m", "hybridsched", "batch", "run", str(source), *engines, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        **options,
    )


def finish(run: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    counts: dict[str, Any] = json.loads(out)
    return counts


def said(body: dict[str, Any]) -> Any:
    """What a user reads of an answer, without what differs from run to run."""
    if "data" in body:
        return [[round(number, 4) for number in one["embedding"]] for one in body["data"]]
    choices = [
        (c["index"], c["finish_reason"], c["message"]["content"] if "message" in c else c["text"])
        for c in body["choices"]
    ]
    usage = {key: value for key, value in body["usage"].items() if key.endswith("_tokens")}
    return body["object"], body["model"], choices, usage


def test_the_same_file_has_the_same_answers_as_from_run_batch(
    real_servers: RealServers, tmp_path: Path
) -> None:
    source = random.Random(3)
    lines = [chat(f"c{i}", source) for i in range(30)]
    lines[7]["body"]["model"] = "nobody"
    lines[11]["body"]["max_tokens"] = -1
    lines[13]["body"]["stop"] = ["e"]
    lines[17]["body"]["n"] = 2  # which greedy sampling refuses
    file = write(tmp_path / "same.jsonl", lines)

    real_servers.stop()  # run-batch loads the model itself
    theirs_file = tmp_path / "theirs.jsonl"
    subprocess.run(
        [
            *(str(real_servers.python), "-m", "vllm.entrypoints.cli.main", "run-batch"),
            *("-i", str(file), "-o", str(theirs_file), "--model", str(real_servers.models["grouped-query"])),
            *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager", *FLAGS),
            *("--distributed-executor-backend", "uni"),
        ],
        env=environment(tmp_path),
        check=True,
        timeout=500,
        capture_output=True,
    )
    theirs = {row["custom_id"]: row for row in rows(theirs_file)}

    finish(batch_run(file, real_servers.get(*FLAGS).url))
    done, failed = rows(tmp_path / "same.output.jsonl"), rows(tmp_path / "same.errors.jsonl")
    assert [row["custom_id"] for row in done] == [f"c{i}" for i in range(30) if i not in (7, 11, 17)]
    assert [row["custom_id"] for row in failed] == ["c7", "c11", "c17"]
    for row in done:
        other = theirs[row["custom_id"]]
        assert set(row) == set(other) == {"id", "custom_id", "response", "error"}
        assert set(row["response"]) == set(other["response"]) == {"status_code", "request_id", "body"}
        assert (row["response"]["status_code"], row["error"]) == (200, None)
        assert (other["response"]["status_code"], other["error"]) == (200, None)
        assert set(row["response"]["body"]) == set(other["response"]["body"])
        assert said(row["response"]["body"]) == said(other["response"]["body"]), row["custom_id"]
    for row in failed:  # in a file of their own, and the error without the nesting
        other = theirs[row["custom_id"]]
        assert set(row) == set(other)
        assert row["response"]["status_code"] == other["response"]["status_code"]
        assert row["response"]["body"] is other["response"]["body"] is None
        inner = other["error"]["error"]
        assert row["error"]["code"] == inner["type"]
        assert inner["message"] in row["error"]["message"]


@pytest.fixture
def embedder(vllm_venv_python: Path, vllm_models: dict[str, Path]) -> Iterator[RealVllm]:
    """An engine of another model, which has embeddings alone."""
    made = RealVllm(
        vllm_venv_python, vllm_models["multi-head"], "--runner", "pooling", *FLAGS, served_as=EMBEDDER
    )
    yield made
    made.stop()


def test_two_models_completions_embeddings_and_a_kill(
    real_servers: RealServers, embedder: RealVllm, tmp_path: Path
) -> None:
    source = random.Random(5)
    lines = []
    for i in range(240):
        match i % 4:
            case 0:
                ids = [source.randrange(20, 500) for _ in range(source.randint(5, 300))]
                lines.append(
                    line(f"l{i}", COMPLETIONS, prompt=ids, max_tokens=120, temperature=0, ignore_eos=True)
                )
            case 1:
                lines.append(line(f"l{i}", COMPLETIONS, prompt=" ".join(WORDS), max_tokens=i, temperature=0))
            case 2:
                lines.append(chat(f"l{i}", source))
            case _:
                lines.append(line(f"l{i}", EMBEDDINGS, input=f"text {i}") | {})
                lines[-1]["body"]["model"] = EMBEDDER
    file = write(tmp_path / "mixed.jsonl", lines)
    output = tmp_path / "mixed.output.jsonl"
    url = real_servers.get(*FLAGS).url

    first = batch_run(file, url, embedder.url)
    wait_until(lambda: rows(output) or first.poll() is not None, timeout_s=120, what="output as it goes")
    assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    early = rows(output)
    assert 0 < len(early) < len(lines)

    counts = finish(batch_run(file, url, embedder.url))
    done = rows(output)
    assert (counts["done"], counts["failed"]) == (len(lines), 0)
    assert [row["custom_id"] for row in done] == [one["custom_id"] for one in lines]
    assert done[: len(early)] == early, "what was finished is not run again"

    async def again() -> None:
        engines = {MODEL: VllmHttpEngine(url), EMBEDDER: VllmHttpEngine(embedder.url)}
        for row, one in list(zip(done, lines, strict=True))[::7]:
            engine = engines[one["body"]["model"]]
            answer = await engine.complete(one["url"], one["body"], request_id=one["custom_id"], timeout_s=60)
            assert said(answer.body) == said(row["response"]["body"]), one["custom_id"]
        for engine in engines.values():
            await engine.close()

    asyncio.run(again())
