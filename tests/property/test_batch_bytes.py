"""Whatever bytes stand in a batch file: each line runs or fails by itself, and each ends exactly once."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import Cursor, cut_chunk
from hybridsched.batches.layout import plan_files
from hybridsched.batches.verify import check_files
from hybridsched.batches.work import WorkFolder
from hybridsched.core.values import Budget
from hybridsched.engines.protocol import Completion
from hybridsched.workers.offline_chunks import ChunkInHand
from hybridsched.workers.offline_lines import LineExecutor
from tests.helpers import await_until
from tests.unit.step_engine import StepEngine

NUMBERS = st.sampled_from(
    [
        "1e999",
        "-1e999",
        "1" * 310 + ".0",
        "1" * 400,
        "-" + "1" * 400,
        "1" * 5000,
        "1e-999",
        "-0",
        "1e400",
        "2.5",
    ]
)
TEXTS = st.text(max_size=6).map(json.dumps) | st.sampled_from(
    ['"\\ud800"', '"\\u0000"', '"x', '"\\x"', "NaN", ""]
)
LEAVES = st.one_of(
    NUMBERS, TEXTS, st.integers().map(str), st.sampled_from(["null", "true", "false", "01", "1."])
)
FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "input", "max_tokens", "max_completion_tokens", "min_tokens", "n", "stop"]
) | st.sampled_from(
    ["temperature", "stream", "seed", "priority", "request_id", "tools", "content", "logprobs", "x", "é"]
)


def array(items: list[str]) -> str:
    return "[" + ",".join(items) + "]"


def record(items: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in items) + "}"


VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(array)
        | st.lists(st.tuples(FIELDS, inner), max_size=4).map(record)
        | st.tuples(st.sampled_from([3, 150, 250, 700, 980, 3000]), inner).map(
            lambda deep: "[" * deep[0] + deep[1] + "]" * deep[0]
        )
    ),
    max_leaves=8,
)
URLS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
BODIES = st.lists(st.tuples(FIELDS, VALUES), max_size=5).map(record)
LINES = st.one_of(
    st.tuples(URLS, BODIES),
    st.tuples(URLS, VALUES),
).map(lambda made: f'{{"custom_id":"bad","method":"POST","url":"{made[0]}","body":{made[1]}}}'.encode())
ODD = st.one_of(
    LINES,
    st.lists(st.tuples(st.sampled_from(["custom_id", "method", "url", "body"]), VALUES)).map(
        lambda fields: record(fields).encode()
    ),
    st.binary(max_size=30),
).map(lambda data: data.replace(b"\n", b" ").replace(b"\r", b" "))


def good(name: str) -> bytes:
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 2}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}).encode()


def body_line(body: str) -> bytes:
    return b'{"custom_id":"bad","method":"POST","url":"/v1/completions","body":%s}' % body.encode()


def deep(levels: int) -> str:
    return '{"x":' + "[" * levels + "]" * levels + "}"


@settings(max_examples=150, deadline=None)
@example(odd=[body_line('{"model":"m","prompt":"x","temperature":-1e999}')])
@example(odd=[body_line('{"x":1e999}')])
@example(odd=[body_line('{"prompt":[%s.0]}' % ("1" * 310))])
@example(odd=[body_line('{"max_tokens":%s}' % ("1" * 400))])
@example(odd=[body_line(deep(974))])
@example(odd=[b'{"custom_id":"bad","method":%s1%s}' % (b"[" * 990, b"]" * 990)])
@given(odd=st.lists(ODD, min_size=1, max_size=4))
def test_every_line_ends_once_and_none_takes_another_with_it(odd: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(Path(folder), odd))


async def _run(folder: Path, odd: list[bytes]) -> None:
    source = folder / "in.jsonl"
    source.write_bytes(b"\n".join([good("first"), *odd, good("last")]) + b"\n")
    work = WorkFolder.create(plan_files(source, "batch_x"))
    with work.open_input() as file:
        span = cut_chunk(file, Cursor(), max_tokens=10**12, max_lines=100, duplicates=work.index.duplicates)
    assert span is not None
    chunk = ChunkInHand.load(work, 0, 1, span, sequence=0)
    engine = StepEngine()
    engine.fault = lambda path, body: _answer(path)
    troubles: list[Any] = []
    executor = LineExecutor(engine, admits=lambda *_: True, on_trouble=troubles.append)
    executor.admit(Budget(max_inflight=8, chunk_tokens=0, slice_tokens=64))
    executor.submit(chunk.runs)
    await await_until(lambda: chunk.settled)
    await executor.close()
    assert not troubles, "a line must not put the engine in doubt"
    chunk.seal()
    chunk.close()
    Assembler(work).advance()
    check = check_files(source, work.files.output, work.files.errors)
    assert check.exact, check
    done = [json.loads(text)["custom_id"] for text in work.output.path.read_bytes().splitlines()]
    assert done[0] == "first"
    assert done[-1] == "last"


def _answer(path: str) -> Completion:
    if path == "/v1/embeddings":
        return Completion(status=200, body={"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3}})
    choice = {"text": "a", "message": {"content": "a"}, "finish_reason": "stop"}
    return Completion(status=200, body={"choices": [choice], "usage": {"prompt_tokens": 3}})


@pytest.mark.parametrize(
    ("body", "code", "place"),
    [
        ('{"temperature":-1e999}', "number_out_of_range", "body.temperature"),
        ('{"n":1e999}', "number_out_of_range", "body.n"),
        ('{"a":{"b":[%s.0]}}' % ("1" * 310), "number_out_of_range", "body.a"),
        ('{"a":%s}' % ("1" * 5000), "number_out_of_range", "body.a"),
        (deep(199), "nested_too_deep", "200"),
    ],
)
def test_what_cannot_be_read_has_its_own_verdict(tmp_path: Path, body: str, code: str, place: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(body_line(deep(198)) + b"\n" + body_line(body) + b"\n")
    samples = WorkFolder.create(plan_files(source, "batch_x")).index.samples
    assert [(sample.line, sample.code, sample.custom_id) for sample in samples] == [(2, code, "bad")]
    assert place in samples[0].message
