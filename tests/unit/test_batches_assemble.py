"""In-order assembly, and what is left after a crash or a full disk at every single file operation."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.errors import DiskFullError, OutputChangedError
from hybridsched.batches.journal import RECOVERED, ChunkJournal, FinalsInOrder, journals
from hybridsched.batches.verify import check_files
from hybridsched.batches.work import WorkFolder
from tests.batch_kit import (
    CrashError,
    FaultyDisk,
    answer,
    cut_all,
    read_ids,
    run_chunk,
    run_local,
    start,
    write_input,
)

BAD = frozenset({2, 7})


def check_complete(source: Path, work: WorkFolder, ids: list[str]) -> None:
    found = check_files(source, work.files.output, work.files.errors)
    assert found.exact, found
    assert read_ids(work.files.output) == [name for i, name in enumerate(ids) if i not in BAD]
    assert read_ids(work.files.errors) == [name for i, name in enumerate(ids) if i in BAD]


def test_output_follows_input_order_as_chunks_finish_out_of_order(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    ids = write_input(source, 10, bad=BAD)
    work = start(source)
    spans = cut_all(work, 3)
    assert [span.lines for span in spans] == [3, 3, 3, 1]
    assembler = Assembler(work)
    run_chunk(work, 2, 1, spans[2])
    assert assembler.advance().next_chunk == 0
    run_chunk(work, 0, 2, spans[0])
    progress = assembler.advance()
    assert (progress.next_chunk, progress.done, progress.failed) == (1, 2, 1)
    assert read_ids(work.files.output) == ["id-0", "id-1"]
    run_chunk(work, 1, 3, spans[1])
    assert assembler.advance().next_chunk == 3
    run_chunk(work, 3, 4, spans[3])
    progress = assembler.advance()
    assert progress.at_end
    assert (progress.done, progress.failed) == (8, 2)
    check_complete(source, work, ids)
    assert journals(work.folder) == []
    work.remove()
    assert not work.path.exists()


def test_what_has_piled_up_is_not_held_in_memory_at_once(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 60, bad=BAD)
    work = start(source)
    spans = cut_all(work, 3)
    for number, span in enumerate(spans[1:], 1):  # the first chunk has not run
        run_chunk(work, number, 1, span)
    held = FinalsInOrder(work.folder)
    most, found = 0, 0
    for line in range(1, spans[-1].next_line):
        found += held.take(line) is not None
        most = max(most, len(held._finals))
    assert (found, most) == (57, 2)
    progress = Assembler(work).close_out("batch_cancelled", "it was cancelled")
    assert (progress.done, progress.failed, progress.cut) == (56, 4, 2)
    work.close()


def test_record_format(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 3, bad=frozenset({1}))
    work = start(source)
    run_local(work)
    first = json.loads(Path(work.files.output).read_text().splitlines()[0])
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert first["response"] == {"status_code": 200, "request_id": "r", "body": {"text": "ok"}}
    assert first["error"] is None
    bad = json.loads(Path(work.files.errors).read_text())
    assert bad["response"] is None
    assert bad["custom_id"] == "id-1"
    assert bad["error"]["code"] == "invalid_url"
    assert bad["error"]["line"] == 3
    assert bad["error"]["message"].startswith("line 3: ")
    assert Path(work.files.output).stat().st_mode & 0o777 == 0o600
    assert work.path.stat().st_mode & 0o777 == 0o700


def whole_run(source: Path, disk: FaultyDisk) -> WorkFolder:
    """Start or take up, run in chunks with a pause in the middle of one, assemble. The folder stays."""
    work = start(source, disk)
    try:
        assembler = Assembler(work)
        progress = assembler.restart()
        spans = cut_all(work, 4)
        if spans:
            run_chunk(work, progress.next_chunk, 1, spans[0], upto=2)
        for number, span in enumerate(spans, progress.next_chunk):
            run_chunk(work, number, 2, span)
            assembler.advance()
    finally:
        work.close()
    return work


def operations(tmp_path: Path) -> int:
    source = tmp_path / "count.jsonl"
    write_input(source, 10, bad=BAD)
    disk = FaultyDisk()
    whole_run(source, disk)
    return disk.calls


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_a_failure_at_any_file_operation_loses_nothing_and_repeats_nothing(tmp_path: Path, kind: str) -> None:
    total = operations(tmp_path)
    assert total > 60
    for fail_at in range(1, total + 1):
        folder = tmp_path / f"{kind}-{fail_at}"
        folder.mkdir()
        source = folder / "in.jsonl"
        ids = write_input(source, 10, bad=BAD)
        failed: type[BaseException] | None = None
        try:
            whole_run(source, FaultyDisk(fail_at, kind))
        except (CrashError, DiskFullError) as exc:
            failed = type(exc)
        assert failed is (CrashError if kind == "crash" else DiskFullError), fail_at
        work = whole_run(source, FaultyDisk())
        check_complete(source, work, ids)
        again = WorkFolder.open(work.path)
        again.remove()
        assert sorted(p.name for p in folder.iterdir()) == ["in.errors.jsonl", "in.jsonl", "in.output.jsonl"]


def test_two_crashes_in_a_row(tmp_path: Path) -> None:
    total = operations(tmp_path)
    for first in range(5, total, 7):
        for second in range(1, 40, 5):
            folder = tmp_path / f"{first}-{second}"
            folder.mkdir()
            source = folder / "in.jsonl"
            ids = write_input(source, 10, bad=BAD)
            with pytest.raises(CrashError):
                whole_run(source, FaultyDisk(first))
            with contextlib.suppress(CrashError):
                whole_run(source, FaultyDisk(second))
            check_complete(source, whole_run(source, FaultyDisk()), ids)


@pytest.mark.parametrize("kind", ["crash", "full"])
def test_a_failure_while_the_folder_is_removed(tmp_path: Path, kind: str) -> None:
    for fail_at in range(1, 8):
        folder = tmp_path / f"{kind}-{fail_at}"
        folder.mkdir()
        source = folder / "in.jsonl"
        ids = write_input(source, 10, bad=BAD)
        work = whole_run(source, FaultyDisk())
        dying = WorkFolder.open(work.path, disk=FaultyDisk(fail_at + 1, kind))
        with contextlib.suppress(CrashError, DiskFullError):
            dying.remove()
        assert check_files(source, work.files.output, work.files.errors).exact
        assert read_ids(work.files.output) == [name for i, name in enumerate(ids) if i not in BAD]


def test_finished_lines_are_not_run_again(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 10)
    work = start(source)
    spans = cut_all(work, 4)
    run_chunk(work, 0, 1, spans[0], upto=3)
    run_chunk(work, 2, 2, spans[2], upto=1)
    ran: list[int] = []
    run_chunk(work, 0, 3, spans[0], ran=ran)
    assert len(ran) == 1
    ran.clear()
    run_local(work, max_lines=3, ran=ran)  # a new ledger cuts elsewhere, and still knows what was finished
    assert len(ran) == 10 - 4 - 1
    assert check_files(source, work.files.output, work.files.errors).done == 10


def test_recovered_lines_survive_a_second_new_ledger(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 10)
    work = start(source)
    run_chunk(work, 2, 1, cut_all(work, 4)[2], upto=1)
    assembler = Assembler(work)
    assembler.restart()
    assembler.restart()
    assert (work.path / RECOVERED).exists()
    ran: list[int] = []
    run_local(work, max_lines=5, ran=ran)
    assert len(ran) == 9
    assert not (work.path / RECOVERED).exists()


def test_a_worker_that_lost_its_lease_cannot_disturb(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 4)
    work = start(source)
    (span,) = cut_all(work, 4)
    stale = ChunkJournal.open(work, 0, 1, span)
    run_chunk(work, 0, 2, span)
    from hybridsched.batches.validate import BatchLine, read_span

    with work.open_input() as file:
        first = next(read_span(file, span.read_from, span.end, span.first_line, {}))
    assert isinstance(first, BatchLine)
    stale.finish(first.line, answer(work, first, "late"))
    assert Assembler(work).advance().at_end
    stale.finish(span.next_line - 1, b"{}")
    assert Assembler(work).advance().done == 4
    assert check_files(source, work.files.output, work.files.errors).exact
    stale.close()


@pytest.mark.parametrize("code", ["batch_expired", "batch_cancelled"])
def test_close_out_keeps_what_is_finished_and_reports_the_rest(tmp_path: Path, code: str) -> None:
    source = tmp_path / "in.jsonl"
    ids = write_input(source, 10, bad=BAD)
    work = start(source)
    spans = cut_all(work, 3)
    run_chunk(work, 0, 1, spans[0])
    run_chunk(work, 2, 2, spans[2])
    run_chunk(work, 3, 3, spans[3], upto=0)
    progress = Assembler(work).close_out(code, "the deadline has passed")
    assert progress.at_end
    assert progress.closed == code
    assert read_ids(work.files.output) == ["id-0", "id-1", "id-6", "id-8"]
    assert read_ids(work.files.errors) == [name for name in ids if name not in read_ids(work.files.output)]
    errors = [json.loads(text)["error"] for text in Path(work.files.errors).read_text().splitlines()]
    assert [error["code"] for error in errors] == [
        "invalid_url",
        *[code] * 3,
        "invalid_url",
        code,
    ]
    assert Assembler(work).advance() == progress
    assert Assembler(work).close_out(code, "again") == progress


def test_a_crash_at_any_operation_of_close_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridsched.batches.assemble._LINES_AT_ONCE", 3)
    fail_at = 0
    while True:
        fail_at += 1
        folder = tmp_path / str(fail_at)
        folder.mkdir()
        source = folder / "in.jsonl"
        ids = write_input(source, 12, bad=BAD)
        work = start(source)
        spans = cut_all(work, 4)
        run_chunk(work, 0, 1, spans[0])
        run_chunk(work, 1, 2, spans[1], upto=2)
        work.close()
        dying = WorkFolder.open(work.path, disk=FaultyDisk(fail_at + 1))
        try:
            Assembler(dying).close_out("batch_cancelled", "cancelled")
            break
        except CrashError:
            dying.close()
        progress = Assembler(WorkFolder.open(work.path)).close_out("batch_cancelled", "cancelled")
        assert progress.at_end
        assert check_files(source, work.files.output, work.files.errors).exact
        assert read_ids(work.files.output) == ["id-0", "id-1", "id-3", "id-4", "id-5"]
        assert len(read_ids(work.files.errors)) == len(ids) - 5
    assert fail_at > 20


def test_an_output_that_somebody_shortened_is_not_silently_filled(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 6)
    work = start(source)
    spans = cut_all(work, 3)
    run_chunk(work, 0, 1, spans[0])
    Assembler(work).advance()
    Path(work.files.output).write_text("")
    run_chunk(work, 1, 2, spans[1])
    with pytest.raises(OutputChangedError, match="somebody has changed it"):
        Assembler(work).advance()


def test_a_record_cut_short_by_a_full_disk_does_not_spoil_the_next(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 2, blank=False)
    work = start(source)
    (span,) = cut_all(work, 2)
    disk = FaultyDisk(kind="full")
    work.disk = disk
    journal = ChunkJournal.open(work, 0, 1, span)
    disk.fail_at = disk.calls + 1
    with pytest.raises(DiskFullError):
        journal.finish(1, b'{"custom_id":"id-0"}')
    assert journal.finished == set()
    journal.finish(1, b'{"custom_id":"id-0"}')
    journal.keep(2, {"tokens": [1, 2]})
    journal.keep(2, {"tokens": [1, 2, 3]})
    journal.close()
    later = ChunkJournal.open(work, 0, 2, span)
    assert later.finished == {1}
    assert later.kept == {2: {"tokens": [1, 2, 3]}}
    with pytest.raises(ValueError, match="1 are finished"):
        later.seal()
    with pytest.raises(ValueError, match="not of the chunk"):
        later.finish(3, b"{}")
    later.finish(2, b'{"custom_id":"id-1"}')
    later.seal()
    later.close()
    assert Assembler(work).advance().at_end
    assert read_ids(work.files.output) == ["id-0", "id-1"]
