"""A chunk in hand: its journal, a disk that fills up, and tokens that outlive the worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridsched.batches.cut import ChunkSpan, Cursor, cut_chunk
from hybridsched.batches.errors import DiskFullError
from hybridsched.batches.files import Disk
from hybridsched.batches.journal import read_chunk
from hybridsched.batches.layout import plan_files
from hybridsched.batches.work import WorkFolder
from hybridsched.workers.offline_chunks import ChunkInHand
from hybridsched.workers.offline_plan import Kept
from hybridsched.workers.offline_run import LineResult
from tests.batch_kit import start, write_input


class FillingDisk(Disk):
    full = False

    def write(self, fd: int, data: bytes, path: Path) -> None:
        if self.full:
            raise DiskFullError("no space")
        super().write(fd, data, path)


@pytest.fixture
def disk() -> FillingDisk:
    return FillingDisk()


@pytest.fixture
def work(tmp_path: Path, disk: FillingDisk) -> WorkFolder:
    source = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2, i]}}
        for i in range(3)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "not json\n")
    return WorkFolder.create(plan_files(source, "batch_x"), disk=disk)


def span_of(work: WorkFolder) -> ChunkSpan:
    with work.open_input() as file:
        span = cut_chunk(file, Cursor(), max_tokens=10_000, max_lines=10)
    assert span is not None
    return span


def answer(text: str) -> LineResult:
    return LineResult(
        request_id="r", status_code=200, body={"choices": [{"text": text}]}, prompt_tokens=3, output_tokens=1
    )


def test_results_wait_for_space_and_none_is_lost(work: WorkFolder, disk: FillingDisk) -> None:
    chunk = ChunkInHand.load(work, 0, 1, span_of(work), sequence=0)
    settled: list[bool] = []
    chunk.on_settled = lambda: settled.append(True)
    first, second, third = chunk.runs
    chunk.finished(first, answer("a"))
    disk.full = True
    chunk.finished(second, answer("b"))
    chunk.finished(third, answer("c"))
    assert chunk.disk_full
    assert not chunk.settled
    assert not settled
    disk.full = False
    chunk.write()
    assert chunk.settled
    assert settled
    chunk.seal()
    assert chunk.counts == (3, 1)
    state = read_chunk(work.folder, 0)
    assert state.sealed
    assert {line: final.failed for line, final in state.finals.items()} == {
        1: False,
        2: False,
        3: False,
        4: True,
    }
    chunk.close()
    work.close()


def test_tokens_of_a_paused_line_are_there_for_the_next_claim(work: WorkFolder) -> None:
    span = span_of(work)
    chunk = ChunkInHand.load(work, 0, 1, span, sequence=0)
    chunk.finished(chunk.runs[0], answer("a"))
    chunk.runs[0].kept = Kept(prompt_ids=[1, 2, 1], token_ids=[5, 6], text="five six", body={"id": "x"})
    assert chunk.keep() == 1
    assert chunk.keep() == 0, "nothing new, nothing written"
    chunk.leave()
    chunk.close()
    again = ChunkInHand.load(work, 0, 2, span, sequence=0)
    assert [run.number for run in again.runs] == [2, 3]
    kept = again.runs[0].kept
    assert kept == Kept(prompt_ids=[1, 2, 1], token_ids=[5, 6], text="five six", body={"id": "x"})
    assert again.runs[0].paused
    assert again.runs[1].kept is None
    again.close()
    work.close()


def test_a_file_that_begins_with_blank_lines_keeps_its_line_numbers(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 2, blank=False)
    source.write_text("\n\n" + source.read_text())
    work = start(source)
    with work.open_input() as file:
        span = cut_chunk(file, Cursor(), max_tokens=10_000, max_lines=10)
    assert span is not None
    chunk = ChunkInHand.load(work, 0, 1, span, sequence=0)
    assert [run.number for run in chunk.runs] == [3, 4]
    chunk.close()
    work.close()
