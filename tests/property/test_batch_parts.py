"""Batches whose lines name several models: cut into parts, run in any order, killed anywhere, begun anew."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import ChunkSpan, Cursor, cut_chunk
from hybridsched.batches.journal import journals
from hybridsched.batches.parts import begin_parts, models_apart, owner_of, owner_of_chunk
from hybridsched.batches.progress import Progress
from hybridsched.batches.validate import BatchLine, LineError, read_span
from hybridsched.batches.verify import check_files
from hybridsched.batches.work import WorkFolder
from hybridsched.workers.offline_chunks import ChunkInHand
from hybridsched.workers.offline_run import LineResult
from tests.batch_kit import read_ids, start

KINDS = ("a", "b", "c", None, "bad", "twice", "blank")
"""Models of lines; no model; a wrong url; a custom_id that was used; a blank line."""


def write(path: Path, kinds: list[str | None]) -> None:
    with path.open("w") as file:
        for number, kind in enumerate(kinds):
            if kind == "blank":
                file.write("\n")
                continue
            body = {"prompt": [1] * 4, "max_tokens": 4}
            if kind is not None:
                body["model"] = kind if len(kind) == 1 else "b"  # type: ignore[assignment]
            name = "same" if kind == "twice" else f"id-{number}"
            url = "/nope" if kind == "bad" else "/v1/completions"
            file.write(json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n")


class Ledger:
    """Cursors and chunks of each part, as the store has them."""

    def __init__(self, work: WorkFolder, models: tuple[str, ...]) -> None:
        self.work = work
        self.assembler = Assembler(work)
        place = self.assembler.restart(models)
        count = max(1, len(models))
        begin = Cursor(place.offset, place.line)
        self.cursors: list[Cursor | None] = [None if place.at_end else begin for _ in range(count)]
        self.next = [part.next_chunk for part in place.parts] or [place.next_chunk]
        self.spans: dict[int, ChunkSpan] = {}
        self.fence = 0

    def plan(self, part: int, max_lines: int) -> None:
        cursor = self.cursors[part]
        if cursor is None:
            return
        number = self.next[part]
        with self.work.open_input() as file:
            span = cut_chunk(
                file,
                cursor,
                max_tokens=10**9,
                max_lines=max_lines,
                duplicates=self.work.index.duplicates,
                owns=owner_of_chunk(self.assembler.state(), number),
            )
        if span is None:  # only blank lines are left, and no parts
            self.cursors[part] = None
            return
        assert span.start == cursor.offset
        self.spans[number] = span
        self.next[part] += len(self.cursors)
        self.cursors[part] = None if span.at_end else Cursor(span.end, span.next_line)

    def run(self, number: int, upto: int, ran: dict[int, str | None]) -> None:
        """Claim a chunk and run up to so many lines of it; then it is finished, or its worker is killed."""
        self.fence += 1
        state = self.assembler.state()
        owns = owner_of_chunk(state, number)
        chunk = ChunkInHand.load(self.work, number, self.fence, self.spans[number], sequence=0, owns=owns)
        for run in list(chunk.runs)[:upto]:
            assert run.number not in ran, "a finished line runs again"
            ran[run.number] = state.models[number % len(state.models)] if state.models else None
            chunk.finished(run, LineResult(request_id="r", status_code=200, body={"n": run.number}))
        if chunk.settled:
            chunk.seal()
            del self.spans[number]
            self.assembler.advance()
        chunk.close()


def names(kinds: list[str | None], work: WorkFolder) -> dict[int, str]:
    """Line -> the model whose workers have to run it."""
    models = models_apart(work.index)
    named = {i + 1: kind for i, kind in enumerate(kinds)}
    with work.open_input() as file:
        lines = list(read_span(file, 0, None, 1, work.index.duplicates))
    wanted = {one.line: named[one.line] or models[0] for one in lines if isinstance(one, BatchLine)}
    return {line: name if len(name) == 1 else "b" for line, name in wanted.items()}


@settings(max_examples=150, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=16).map(lambda some: ["b", *some, "c"]),
    turns=st.lists(
        st.one_of(
            st.tuples(st.just("plan"), st.integers(0, 2), st.integers(1, 4)),
            st.tuples(st.just("run"), st.integers(0, 9), st.integers(0, 5)),
            st.tuples(st.just("anew"), st.booleans(), st.just(0)),
            st.tuples(st.just("assemble"), st.just(0), st.just(0)),
        ),
        max_size=25,
    ),
    size=st.integers(1, 5),
    cancelled=st.booleans(),
)
def test_each_line_ends_once_in_order_and_on_an_engine_of_its_model(
    kinds: list[str | None], turns: list[tuple[str, int, int]], size: int, cancelled: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        write(source, kinds)
        work = start(source)
        models = models_apart(work.index)
        assert len(models) >= 2
        assert sum(work.index.models.values()) <= work.index.valid
        wanted = names(kinds, work)
        ran: dict[int, str | None] = {}
        ledger = Ledger(work, models)
        for what, first, second in turns:
            if what == "plan":
                ledger.plan(first % len(ledger.cursors), second)
            elif what == "run" and ledger.spans:
                ledger.run(sorted(ledger.spans)[first % len(ledger.spans)], second, ran)
            elif what == "anew":  # the store was lost; with one model for all, or one for each
                ledger = Ledger(work, models if first else ())
            else:
                ledger.assembler.advance()
        if cancelled:
            progress = ledger.assembler.close_out("batch_cancelled", "it was cancelled")
            assert progress.cut == len(wanted) - len(ran)
        else:
            while any(ledger.cursors) or ledger.spans:
                for part in range(len(ledger.cursors)):
                    ledger.plan(part, size)
                for number in sorted(ledger.spans, reverse=True):
                    ledger.run(number, 10**9, ran)
            progress = ledger.assembler.advance()
            assert set(ran) == set(wanted)
        assert progress.at_end
        assert all(model in (None, wanted[line]) for line, model in ran.items())
        assert journals(work.folder) == []
        found = check_files(source, work.files.output, work.files.errors)
        assert found.exact
        assert found.done == len(ran) == progress.done
        rows = [json.loads(text) for text in Path(work.files.output).read_text().splitlines()]
        assert [row["response"]["body"]["n"] for row in rows] == sorted(ran)
        assert len(read_ids(work.files.errors)) == progress.failed
        work.close()


@given(first=st.integers(0, 50), count=st.integers(2, 5))
def test_numbers_of_chunks_begin_above_those_that_were_given_out(first: int, count: int) -> None:
    parts = begin_parts(Progress(next_chunk=first), [str(i) for i in range(count)])
    assert [part.next_chunk % count for part in parts] == list(range(count))
    assert min(part.next_chunk for part in parts) >= first


def test_a_sparse_part_is_read_in_pieces_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    write(source, ["a", *["b"] * 40, "a", *["b"] * 40, "a", *["b"] * 40])
    work = start(source)
    monkeypatch.setattr("hybridsched.batches.cut.FARTHEST_BYTES", 1000)
    ledger = Ledger(work, models_apart(work.index))
    ran: dict[int, str | None] = {}
    while ledger.cursors[1]:
        ledger.plan(1, 10)
    spans = list(ledger.spans.values())
    assert [span.lines for span in spans] == [1, 1, 1, 0]
    assert all(span.end - span.read_from < 1200 for span in spans[:-1])
    while any(ledger.cursors) or ledger.spans:
        ledger.plan(0, 10)
        for number in sorted(ledger.spans):
            ledger.run(number, 10**9, ran)
    assert check_files(source, work.files.output, work.files.errors).exact
    work.close()


def test_a_bad_line_is_of_the_first_part() -> None:
    error = LineError(1, 0, None, "invalid_json", "no")
    assert owner_of(("a", "b"), 0)(error)
    assert not owner_of(("a", "b"), 1)(error)
