"""The work folder of a batch: made once, taken up again, locked, and in nobody's way when it is gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from hybridsched.batches.errors import (
    BatchFileError,
    DiskFullError,
    OutputBusyError,
    OutputExistsError,
    file_errors,
)
from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.manifest import find_work, read_manifest
from hybridsched.batches.scan import InputIndex, scan
from hybridsched.batches.work import WorkFolder
from tests.batch_kit import FaultyDisk, read_ids, run_local, start, write_input


def test_the_same_input_and_output_are_taken_up_again(source: Path) -> None:
    first = start(source)
    assert not first.resumed
    again = WorkFolder.create(plan_files(source, "batch_other"))
    assert again.resumed
    assert again.files == first.files
    with pytest.raises(OutputBusyError, match="unfinished batch batch_t"):
        WorkFolder.create(plan_files(source, "b", errors=source.with_name("elsewhere")))


def test_of_two_that_start_on_one_output_at_once_one_wins(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        output = tmp_path / f"{first}.out"
        plan = plan_files(source, first, output=output)
        made = WorkFolder.create(plan)
        monkeypatch.setattr("hybridsched.batches.work._PAUSE_S", 0.0)
        monkeypatch.setattr("hybridsched.batches.work.find_work", lambda output: [])
        monkeypatch.setattr("hybridsched.batches.work.check_free", lambda target: None)
        with pytest.raises(OutputBusyError, match=f"unfinished batch {first}"):
            WorkFolder.create(plan_files(source, second, output=output))
        monkeypatch.undo()
        assert find_work(output) == [made.path]
        made.discard()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_half_made_or_half_removed_folder_is_no_batch(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".hybridsched-half").mkdir()
    (tmp_path / ".hybridsched-bad").mkdir()
    (tmp_path / ".hybridsched-bad" / "manifest.json").write_text("{")
    assert find_work(tmp_path / "in.output.jsonl") == []
    with pytest.raises(BatchFileError, match="no batch is there"):
        WorkFolder.open(tmp_path / ".hybridsched-half")
    with pytest.raises(BatchFileError, match="is damaged"):
        read_manifest(tmp_path / ".hybridsched-bad")
    start(source).close()


def test_a_folder_that_is_none_of_ours_or_was_moved_is_refused(source: Path, tmp_path: Path) -> None:
    work = start(source)
    with pytest.raises(BatchFileError, match="no work folder"):
        WorkFolder.open(tmp_path)
    link = tmp_path / ".hybridsched-link"
    link.symlink_to(work.path)
    with pytest.raises(BatchFileError, match="no work folder"):
        WorkFolder.open(link)
    moved = tmp_path / "sub" / work.path.name
    moved.parent.mkdir()
    work.path.rename(moved)
    with pytest.raises(BatchFileError, match="was moved"):
        WorkFolder.open(moved)


def test_locks(source: Path) -> None:
    one = start(source)
    two = WorkFolder.open(one.path)
    three = WorkFolder.open(one.path)
    one.lock_shared()
    two.lock_shared()
    with pytest.raises(OutputBusyError, match="another run"):
        three.lock_exclusive()
    one.close()
    two.close()
    three.lock_exclusive()
    four = WorkFolder.open(one.path)
    with pytest.raises(OutputBusyError, match="a local run"):
        four.lock_shared()
    with pytest.raises(OutputBusyError):
        four.lock_exclusive()


def test_a_lock_goes_with_its_process(source: Path) -> None:
    work = start(source)
    code = (
        "import sys, os\n"
        "from hybridsched.batches.work import WorkFolder\n"
        "w = WorkFolder.open(sys.argv[1]); w.lock_exclusive()\n"
        "print('locked', flush=True); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(work.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdin is not None
    assert child.stdout.readline() == b"locked\n"
    with pytest.raises(OutputBusyError):
        work.lock_exclusive()
    child.kill()
    child.wait(10)
    child.stdin.close()
    child.stdout.close()
    work.lock_exclusive()


def test_full_disks_and_quotas_are_told_from_other_errors() -> None:
    import errno

    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with pytest.raises(DiskFullError, match="finished lines are kept"), file_errors("cannot write", "f"):
            raise OSError(number, os.strerror(number))
    with pytest.raises(BatchFileError) as caught, file_errors("cannot write", "f"):
        raise OSError(errno.EIO, "Input/output error")
    assert not isinstance(caught.value, DiskFullError)


def test_two_batches_cannot_share_a_file(tmp_path: Path) -> None:
    for folder in ("a", "b", "errors"):
        (tmp_path / folder).mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "errors")
    shared = tmp_path / "errors" / "all.jsonl"
    sources = []
    for name in ("a", "b"):
        sources.append(tmp_path / name / "in.jsonl")
        write_input(sources[-1], 3)
    first = WorkFolder.create(plan_files(sources[0], "batch_a", errors=shared))
    clashes = (
        plan_files(sources[1], "batch_b", errors=shared),
        plan_files(sources[1], "batch_b", errors=tmp_path / "linked" / "all.jsonl"),
        plan_files(sources[1], "batch_b", output=shared),
        plan_files(sources[1], "batch_b", errors=first.files.output),
    )
    for clash in clashes:
        with pytest.raises(OutputBusyError, match="unfinished batch batch_a"):
            WorkFolder.create(clash)
        assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["in.jsonl"]
    run_local(first)
    first.remove()
    assert sorted(path.name for path in shared.parent.iterdir()) == ["all.jsonl"]
    with pytest.raises(OutputExistsError, match="there already"):
        WorkFolder.create(clashes[0])


def test_the_same_started_twice_at_one_moment_is_one_batch(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local run's folder has the same name each time: the later one must not undo what the first began."""
    files = plan_files(source, local_batch_id(plan_files(source, "x").output))
    late = threading.Event()
    made = threading.Event()

    def slow(file: BinaryIO, *, progress: object) -> InputIndex:
        found = scan(file)
        if not late.is_set():
            late.set()
            assert made.wait(10)
        return found

    monkeypatch.setattr("hybridsched.batches.seen.scan", slow)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(WorkFolder.create, files)
        assert late.wait(10)
        first = WorkFolder.create(files)
        run_local(first)
        made.set()
        again = second.result(10)
    assert again.resumed
    assert again.files == first.files
    assert len(read_ids(files.output)) == 3


def test_a_start_that_finds_the_disk_full_leaves_nothing(source: Path, tmp_path: Path) -> None:
    for fail_at in range(1, 40):
        disk = FaultyDisk(fail_at, "full")
        try:
            work = start(source, disk)
        except DiskFullError:
            names = {path.name for path in tmp_path.iterdir()}
            assert names <= {"in.jsonl", ".hybridsched-batch_t"}
            assert not (tmp_path / ".hybridsched-batch_t" / "manifest.json").exists()
        else:
            assert fail_at > 10
            disk.fail_at = None
            work.discard()
            break
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_claim_of_a_batch_that_was_removed_by_hand_does_not_stand_in_the_way(
    source: Path, tmp_path: Path
) -> None:
    work = start(source)
    work.close()
    shutil.rmtree(work.path)
    for name in (work.files.output, work.files.errors):
        Path(name).unlink()
    run_local(WorkFolder.create(plan_files(source, "batch_new")))
    assert len(read_ids(work.files.output)) == 3


def test_the_output_reached_by_a_linked_folder_is_the_same_batch(source: Path, tmp_path: Path) -> None:
    start(source).close()
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path)
    again = WorkFolder.create(plan_files(linked / "in.jsonl", "batch_other"))
    assert again.resumed
    assert again.files.batch_id == "batch_t"
