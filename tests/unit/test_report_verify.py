"""Counting a batch from its files: whole, stopped in the middle, and with results that should not be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridsched.batches.cut import ChunkSpan
from hybridsched.batches.journal import ChunkJournal
from hybridsched.batches.layout import BatchFiles, plan_files
from hybridsched.batches.records import error_record, output_record
from hybridsched.batches.work import WorkFolder
from hybridsched.report.verify import verify_batch

BATCH = "b1"
LIMIT = 3


def line(number: int) -> bytes:
    body = {"model": "m", "prompt": [1, 2], "max_tokens": LIMIT, "ignore_eos": True}
    return json.dumps(
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
    ).encode()


def result(number: int, *, tokens: int = LIMIT) -> bytes:
    body = {"usage": {"prompt_tokens": 2, "completion_tokens": tokens}}
    return output_record(BATCH, number, f"c{number}", status_code=200, request_id="x", body=body)


def failure(number: int) -> bytes:
    return error_record(BATCH, number, None, code="bad", message="is bad")


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    """Lines 1, 2, 4, 5 and 6; line 3 is blank; line 5 is no JSON."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([line(1), line(2), b"", line(4), b"{oops", line(6)]))
    return plan_files(source, BATCH)


def write(name: str, *records: bytes) -> None:
    Path(name).write_bytes(b"".join(record + b"\n" for record in records))


def test_a_finished_batch(files: BatchFiles) -> None:
    write(files.output, result(1), result(2), result(4), result(6))
    write(files.errors, failure(5))
    check = verify_batch(files)
    assert (check.lines, check.completed, check.failed) == (5, 4, 1)
    assert (check.remaining, check.missing, check.duplicates, check.wrong_length) == (0, 0, 0, 0)
    assert (check.prompt_tokens, check.output_tokens) == (8, 4 * LIMIT)


def test_a_line_that_is_nowhere_is_missing_and_one_that_is_twice_is_counted(files: BatchFiles) -> None:
    write(files.output, result(1), result(2), result(2), result(6, tokens=LIMIT - 1))
    write(files.errors, failure(5), failure(1))
    check = verify_batch(files)
    assert (check.completed, check.failed, check.missing, check.remaining) == (3, 1, 1, 0)
    assert check.duplicates == 2  # line 2 twice in the output, line 1 in both files
    assert check.wrong_length == 1


def test_a_result_of_no_line_is_one_too_many(files: BatchFiles) -> None:
    write(files.output, result(1), result(2), result(4), result(6), result(77))
    write(files.errors, failure(5))
    check = verify_batch(files)
    assert (check.completed, check.duplicates) == (4, 1)


def test_a_stopped_batch_keeps_its_place(files: BatchFiles) -> None:
    work = WorkFolder.create(files)
    try:
        size = Path(files.input).stat().st_size
        span = ChunkSpan(start=0, end=size, first_line=1, next_line=7, lines=5, at_end=True)
        journal = ChunkJournal.open(work, 0, 1, span)
        journal.finish(2, result(2))
        journal.finish(5, failure(5), failed=True)
        first = {"usage": {"prompt_tokens": 2, "completion_tokens": 1}}
        journal.keep(4, {"token_ids": [9], "text": "t", "body": first})
        journal.close()
    finally:
        work.close()
    check = verify_batch(files)
    assert (check.completed, check.failed, check.remaining, check.missing) == (1, 1, 3, 0)
    assert (check.kept_prompt_tokens, check.kept_tokens) == (2, 1)


def test_a_hole_in_the_assembled_part_is_missing_even_while_the_batch_goes_on(files: BatchFiles) -> None:
    WorkFolder.create(files).close()
    write(files.output, result(1), result(4))
    check = verify_batch(files)
    assert (check.completed, check.missing, check.remaining) == (2, 1, 2)
