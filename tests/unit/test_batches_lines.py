"""Lines and their verdicts: the messy file as a whole, and each oddity by itself."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest

from hybridsched.batches.lines import RawLine, iter_lines
from hybridsched.batches.scan import scan
from hybridsched.batches.validate import SCHEDULING_FIELDS, BatchLine, LineError, check_line, read_span

DATA = Path(__file__).parent.parent / "data"


def line(**fields: object) -> bytes:
    envelope = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "x"},
    }
    return json.dumps(envelope | fields).encode()


def verdict(data: bytes, **options: object) -> BatchLine | LineError:
    return check_line(RawLine(1, 0, len(data), data), **options)  # type: ignore[arg-type]


def test_messy_file_has_the_verdicts_of_the_golden_file() -> None:
    with (DATA / "messy_batch.jsonl").open("rb") as file:
        index = scan(file)
        found = []
        for item in read_span(file, 0, None, 1, index.duplicates):
            if isinstance(item, BatchLine):
                found.append(
                    {
                        "line": item.line,
                        "custom_id": item.custom_id,
                        "url": item.url,
                        "model": item.model,
                        "tokens": item.tokens,
                    }
                )
                assert json.loads(item.body)["model"] == item.model
            else:
                found.append(
                    {
                        "line": item.line,
                        "custom_id": item.custom_id,
                        "error": item.code,
                        "message": item.message,
                    }
                )
                assert f"line {item.line}: " in item.message
    golden = DATA / "messy_batch.verdicts.jsonl"
    assert found == [json.loads(text) for text in golden.read_text().splitlines()]
    numbers = [entry["line"] for entry in found]
    assert numbers == [number for number in range(1, 30) if number not in (3, 4)]
    assert (index.lines, index.valid, index.invalid) == (27, 13, 14)
    assert index.duplicates == {8: 7}


def test_offsets_lead_back_to_the_line() -> None:
    with (DATA / "messy_batch.jsonl").open("rb") as file:
        for raw in list(iter_lines(file)):
            again = next(iter_lines(file, start=raw.offset, first_line=raw.number))
            assert again == raw


def test_lines_of_every_shape() -> None:
    data = b"\xef\xbb\xbfa\r\n\r\n \t \nb\n\n\nc\x00d"
    found = list(iter_lines(io.BytesIO(data)))
    assert [(raw.number, raw.data) for raw in found] == [(1, b"a"), (4, b"b"), (7, b"c\x00d")]
    assert [data[raw.offset : raw.offset + raw.length] for raw in found] == [
        b"\xef\xbb\xbfa\r\n",
        b"b\n",
        b"c\x00d",
    ]


@pytest.mark.parametrize("size", [9, 10, 11, 50])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_longer_than_the_limit_is_skipped_and_the_next_is_read(size: int, end: bytes) -> None:
    data = b"x" * size + end + (b"next\n" if end else b"")
    found = list(iter_lines(io.BytesIO(data), max_line_bytes=10))
    whole = size + len(end) <= 10 + 1 if end else size <= 10
    assert (found[0].data is not None) == whole
    assert found[0].length == size + len(end)
    if end:
        assert found[1].data == b"next"
        assert found[1].number == 2
    if not whole:
        bad = check_line(found[0])
        assert isinstance(bad, LineError)
        assert bad.code == "line_too_long"


@pytest.mark.parametrize(
    ("data", "code", "custom_id"),
    [
        (line(custom_id=""), "invalid_custom_id", None),
        (line(custom_id=None), "invalid_custom_id", None),
        (line(custom_id=["a"]), "invalid_custom_id", None),
        (line(method="post"), "invalid_method", "a"),
        (line(method=1), "invalid_method", "a"),
        (line(url=None), "invalid_url", "a"),
        (line(url=["/v1/completions"]), "invalid_url", "a"),
        (line(url="/v1/completions/"), "invalid_url", "a"),
        (line(url="/v1/completions?x=1"), "invalid_url", "a"),
        (line(url="//example.org/v1/completions"), "invalid_url", "a"),
        (line(body=[]), "invalid_body", "a"),
        (line(body="{}"), "invalid_body", "a"),
        (line(body=None), "invalid_body", "a"),
        (line(body={"stream": "true"}), "stream_not_allowed", "a"),
        (line(body={"stream": 1}), "stream_not_allowed", "a"),
        (line() + b"}", "invalid_json", None),
        (b'{"custom_id": "\xc3\x28"}', "not_utf8", None),
        (line(body={"prompt": "\ud800"}), "invalid_json", "a"),
        (line(custom_id="\ud800"), "invalid_json", None),
        (b"[" * 100_000, "nested_too_deep", None),
        (b'"text"', "not_an_object", None),
        (b"{}", "missing_field", None),
        (line(body={"t": float("inf")}), "invalid_json", "a"),
    ],
)
def test_bad_lines(data: bytes, code: str, custom_id: str | None) -> None:
    found = verdict(data)
    assert isinstance(found, LineError)
    assert (found.code, found.custom_id) == (code, custom_id)
    assert found.message.startswith("line 1: ")
    assert len(found.message) < 400


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"custom_id": "a", "body": {"x": NaN}}', "(NaN is no JSON)"),
        (b'{"custom_id": "a", "body": {"x": -Infinity}}', "(-Infinity is no JSON)"),
        (b'{"custom_id": "a", "body": {"x": "\\ud83d!"}}', "(the lone surrogate \\ud83d is no JSON)"),
        # Both count from 1: the T of True is the seventh byte, and so is the bad one.
        (b'{"a": True}', "(byte 7)"),
        (b'{"a":"\xff"}', "byte 7 (0xff)"),
    ],
)
def test_what_is_no_json_is_named_and_bytes_count_from_one(data: bytes, says: str) -> None:
    bad = verdict(data)
    assert isinstance(bad, LineError)
    assert says in bad.message


def test_a_long_value_is_not_copied_into_the_message() -> None:
    found = verdict(line(url="x" * 1_000_000))
    assert isinstance(found, LineError)
    assert len(found.message) < 400


@pytest.mark.parametrize("stream", [False, None])
def test_stream_that_is_off_is_fine(stream: object) -> None:
    assert isinstance(verdict(line(body={"stream": stream})), BatchLine)


@pytest.mark.parametrize("field", SCHEDULING_FIELDS)
def test_scheduling_fields_are_taken_out_of_the_body_and_the_line_runs(field: str) -> None:
    escaped = field.replace("r", "\\u0072", 1)
    for name in (field, escaped):
        body = b'{"model":"m","%s":-100,"prompt":[1,2,3],"%s":{"a":1}}' % (name.encode(), field.encode())
        data = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":%s}' % body
        found = verdict(data)
        assert isinstance(found, BatchLine)
        assert found.stripped == (field,)
        assert json.loads(found.body) == {"model": "m", "prompt": [1, 2, 3]}


def test_a_body_without_scheduling_fields_is_not_touched() -> None:
    body = b'{ "model" : "m", "prompt":"\\u00e9 1.0e5", "x": 1.00, "max_tokens": 7, "n": 2 }'
    found = verdict(b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":%s}' % body)
    assert isinstance(found, BatchLine)
    assert found.body == body
    assert (found.n, found.max_tokens) == (2, 7)


def test_estimates() -> None:
    def tokens(url: str = "/v1/completions", **body: object) -> int:
        found = verdict(line(url=url, body=body))
        assert isinstance(found, BatchLine)
        return found.tokens

    assert tokens(prompt=[5] * 1000, max_tokens=24) == 1024
    assert tokens(prompt="x" * 398, max_tokens=1) == 101
    assert tokens(prompt=[1], max_tokens=-1) == 1 + 256
    assert tokens(prompt=[1], max_tokens=10, max_completion_tokens=20) == 21
    assert tokens(prompt=[1], max_tokens=10, n=3) == 31
    assert tokens("/v1/embeddings", input="x" * 38) == 10
    assert tokens() == 1 + 256


def test_models_are_checked_where_they_are_known() -> None:
    assert isinstance(verdict(line(), models={"m"}), BatchLine)
    found = verdict(line(), models={"other"})
    assert isinstance(found, LineError)
    assert found.code == "model_not_found"
    assert isinstance(verdict(line(body={}), models={"other"}), BatchLine)


def test_scan_finds_every_later_line_with_an_id_that_is_taken() -> None:
    ids = ["a", "b", "a", "c", "a", "b"]
    data = b"\n".join(line(custom_id=name) for name in ids) + b"\n" + line(custom_id="c", method="GET")
    index = scan(io.BytesIO(data))
    assert index.duplicates == {3: 1, 5: 1, 6: 2, 7: 4}
    assert (index.lines, index.valid, index.invalid) == (7, 3, 4)
    assert [sample.line for sample in index.samples] == [3, 5, 6, 7]


def test_scan_confirms_equal_hashes_by_reading_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridsched.batches.scan.hash", lambda text: 7, raising=False)
    data = b"\n".join(line(custom_id=name) for name in ("a", "b", "c", "b"))
    assert scan(io.BytesIO(data)).duplicates == {4: 2}


def test_a_bad_line_takes_its_id() -> None:
    data = line(custom_id="a", url="/nope") + b"\n" + line(custom_id="a")
    assert scan(io.BytesIO(data)).duplicates == {2: 1}


def test_verdicts_can_be_encoded() -> None:
    found = verdict(line(custom_id="nul-\x00"))
    assert isinstance(found, BatchLine)
    assert b"nul-\\u0000" in msgspec.json.encode(found.custom_id)
