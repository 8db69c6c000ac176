"""Journals cut at any byte, with any cutting into chunks, any bad lines and any number of crashes."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import Cursor, cut_chunk
from hybridsched.batches.journal import ChunkJournal, journals
from hybridsched.batches.lines import iter_lines
from hybridsched.batches.validate import BatchLine, read_span
from hybridsched.batches.verify import check_files
from tests.batch_kit import answer, cut_all, read_ids, run_local, start, write_input

LINES = st.integers(1, 12)


@st.composite
def crashes(draw: st.DrawFn) -> list[tuple[int, list[int], float]]:
    """Runs that die: (lines a chunk, lines finished of each chunk, where the newest journal is cut)."""
    one = st.tuples(
        st.integers(1, 5),
        st.lists(st.integers(0, 5), min_size=1, max_size=4),
        st.floats(0, 1),
    )
    return draw(st.lists(one, max_size=3))


@settings(max_examples=120, deadline=None)
@given(lines=LINES, bad=st.frozensets(st.integers(0, 11)), runs=crashes(), last=st.integers(1, 13))
def test_every_line_ends_once_and_in_order(
    lines: int, bad: frozenset[int], runs: list[tuple[int, list[int], float]], last: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        ids = write_input(source, lines, bad=bad)
        work = start(source)
        assembler = Assembler(work)
        safe: set[int] = set()
        for max_lines, finished, cut in runs:
            progress = assembler.restart()
            spans = cut_all(work, max_lines)
            newest: Path | None = None
            for number, (span, count) in enumerate(zip(spans, finished, strict=False), progress.next_chunk):
                journal = ChunkJournal.open(work, number, 1, span)
                safe |= journal.finished
                with work.open_input() as file:
                    for verdict in read_span(file, span.read_from, span.end, span.first_line, {}):
                        if count <= 0:
                            break
                        count -= 1
                        if isinstance(verdict, BatchLine):
                            journal.keep(verdict.line, {"tokens": [verdict.line]})
                            journal.finish(verdict.line, answer(work, verdict))
                        else:
                            journal.finish_error(verdict)
                if len(journal.finished) == span.lines:
                    journal.seal()
                safe |= journal.finished
                journal.close()
                newest = work.path / f"chunk-{number:08d}.1.jsonl"
            if newest is not None:
                data = newest.read_bytes()
                newest.write_bytes(data[: int(len(data) * cut)])
                safe = set()  # counted again from what is left
                for _, _, name in journals(work.folder):
                    safe |= {
                        json.loads(text)["line"]
                        for text in (work.path / name).read_bytes().split(b"\n")[:-1]
                        if b'"out"' in text or b'"err"' in text
                    }
        ran: list[int] = []
        run_local(work, max_lines=last, ran=ran)
        assert len(ran) == len(set(ran))
        assert not safe & set(ran), "a finished line was run again"
        found = check_files(source, work.files.output, work.files.errors)
        assert found.exact
        assert read_ids(work.files.output) == [name for i, name in enumerate(ids) if i not in bad]
        assert read_ids(work.files.errors) == [name for i, name in enumerate(ids) if i in bad]
        work.close()


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(
        st.one_of(
            st.just(b""),
            st.just(b" \t"),
            st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")),
            st.sampled_from(
                [json.dumps({"custom_id": str(i), "body": {"prompt": [i] * i}}).encode() for i in range(9)]
            ),
        ),
        max_size=20,
    ),
    end=st.booleans(),
    crlf=st.booleans(),
    max_lines=st.integers(1, 6),
    max_tokens=st.integers(0, 600),
)
def test_chunks_tile_the_file(
    data: list[bytes], end: bool, crlf: bool, max_lines: int, max_tokens: int
) -> None:
    newline = b"\r\n" if crlf else b"\n"
    content = newline.join(data) + (newline if end else b"")
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        every = list(iter_lines(file))
        cursor = Cursor()
        seen: list[int] = []
        span = None
        while (cut := cut_chunk(file, cursor, max_tokens=max_tokens, max_lines=max_lines)) is not None:
            assert span is None or not span.at_end
            span = cut
            assert span.start == cursor.offset
            inside = list(iter_lines(file, start=span.start, end=span.end, first_line=cursor.line))
            assert len(inside) == span.lines <= max_lines
            assert inside[0].number == span.first_line
            assert all(raw.number < span.next_line for raw in inside)
            seen += [raw.number for raw in inside]
            cursor = Cursor(span.end, span.next_line)
        assert seen == [raw.number for raw in every]
        assert not every or (span is not None and span.at_end and span.end == len(content))
