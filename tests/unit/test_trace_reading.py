"""Traces: reading, errors with their line, cutting, prompts of an exact length."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hybridsched import traces
from hybridsched.demo import trace
from hybridsched.traces import TraceError, TraceRow

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_plain_and_compressed_alike(tmp_path: Path) -> None:
    text = HEADER + "0,10,2\n1.5,20,3\n"
    plain = write(tmp_path, text)
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    rows = traces.read_trace(plain)
    assert rows == traces.read_trace(packed)
    assert rows == [
        TraceRow(arrival_s=0.0, prompt_tokens=10, output_tokens=2),
        TraceRow(arrival_s=1.5, prompt_tokens=20, output_tokens=3),
    ]


def test_orders_by_arrival_and_ignores_what_it_does_not_need(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "\ufeffuser,output_tokens,arrival_s,prompt_tokens\nx,2,5,10\n\ny,3,1,20\n")
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in traces.read_trace(path)] == [
        (1.0, 20, 3),
        (5.0, 10, 2),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        (HEADER, "holds no request"),
        ("arrival_s,prompt\n", "line 1: column 'prompt_tokens' is missing"),
        (HEADER + "0,1,1\nx,1,1\n", "line 3: arrival_s is 'x'"),
        (HEADER + "nan,1,1\n", "line 2: arrival_s is 'nan'"),
        (HEADER + "inf,1,1\n", "line 2: arrival_s"),
        (HEADER + "-1,1,1\n", "line 2: arrival_s is '-1'"),
        (HEADER + "0,0,1\n", "line 2: prompt_tokens is '0'"),
        (HEADER + "0,5,1.5\n", "line 2: output_tokens is '1.5'"),
        (HEADER + "0,5\n", "line 2: 2 cells, 3 are needed"),
        (HEADER + f"0,{'5' * 200_000},1\n", "cannot be read"),
        (HEADER.replace("\n", ",arrival_s\n") + "0,5,5,7\n", "column 'arrival_s' is there twice"),
        ('{"custom_id": "a"}\n', "must end in .jsonl"),
    ],
)
def test_an_error_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TraceError, match="trace ") as caught:
        traces.read_trace(write(tmp_path, text))
    assert says in str(caught.value)


def test_a_missing_or_broken_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        traces.read_trace(tmp_path / "none.csv")
    broken = tmp_path / "b.csv.gz"
    broken.write_bytes(gzip.compress((HEADER + "0,1,1\n" * 50).encode())[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read_trace(broken)
    packed = bytearray(gzip.compress((HEADER + "0,1,1\n" * 50).encode()))
    packed[10] = 0x07  # a block of a type that there is none of
    broken.write_bytes(packed)
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read_trace(broken)
    broken.write_bytes(b"no gzip")
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read_trace(broken)


def test_cut_takes_the_half_open_span_from_its_start(tmp_path: Path) -> None:
    rows = traces.read_trace(write(tmp_path, HEADER + "0,1,1\n10,2,1\n15,3,1\n20,4,1\n"))
    assert [(r.arrival_s, r.prompt_tokens) for r in traces.cut(rows, 10, 10)] == [(0.0, 2), (5.0, 3)]
    with pytest.raises(TraceError, match=r"from 30 s to 40 s; it has arrivals from 0 s to 20 s"):
        traces.cut(rows, 30, 10)


def test_prompts_are_exact_repeatable_and_share_no_prefix() -> None:
    prompts = [json.loads(trace.prompt_json("s", index, 64)) for index in range(200)]
    assert all(len(prompt) == 64 for prompt in prompts)
    assert all(100 <= token < 1000 for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 200, "two prompts share their first KV block"
    assert json.loads(trace.prompt_json("s", 7, 64)) == prompts[7]
    assert json.loads(trace.prompt_json("other", 7, 64)) != prompts[7]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 4095, 4127, 4128, 4129, 20_000])
def test_every_length_is_exact(length: int) -> None:
    for index in range(20):
        assert len(json.loads(trace.prompt_json("s", index, length))) == length


def test_a_batch_has_the_lengths_in_turn(tmp_path: Path) -> None:
    lengths = [
        TraceRow(arrival_s=0, prompt_tokens=5, output_tokens=2),
        TraceRow(arrival_s=0, prompt_tokens=7, output_tokens=3),
    ]
    path = tmp_path / "batch.jsonl"
    trace.write_batch(path, lengths, lines=3, model="m", salt="b")
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == ["line-000000", "line-000001", "line-000002"]
    assert {(line["method"], line["url"]) for line in lines} == {("POST", "/v1/completions")}
    assert [(len(line["body"]["prompt"]), line["body"]["max_tokens"]) for line in lines] == [
        (5, 2),
        (7, 3),
        (5, 2),
    ]
    assert all(line["body"]["ignore_eos"] is True and "stream" not in line["body"] for line in lines)
    assert lines[0]["body"]["prompt"] != lines[2]["body"]["prompt"]


def test_online_bodies_stream_with_usage() -> None:
    row = TraceRow(arrival_s=0, prompt_tokens=3, output_tokens=4)
    body = json.loads(trace.completion_body("m", row, salt="s", index=0, stream=True))
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) == (3, 4, True)


def test_the_shipped_files_are_whole() -> None:
    online = traces.read_trace(traces.shipped(traces.SHIPPED_TRACE))
    assert len(online) == 8819
    assert max(row.prompt_tokens for row in online) == 7437
    assert len(traces.read_trace(traces.shipped(traces.SHIPPED_LENGTHS))) == 2000
    attribution = traces.shipped("ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "CC-BY-4.0" in attribution
    assert "MIT License" in attribution
