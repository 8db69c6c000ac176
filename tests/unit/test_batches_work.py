"""Names, owners, changed inputs, locks, and who may write where."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridsched.batches.files import (
    BatchFileError,
    DiskFullError,
    InputChangedError,
    InputUnreadableError,
    NotYoursError,
    OutputBusyError,
    OutputExistsError,
    file_errors,
)
from hybridsched.batches.layout import local_batch_id, open_input, plan_files
from hybridsched.batches.work import WorkFolder, find_work, read_manifest
from tests.batch_kit import run_local, start, write_input

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    write_input(path, 3)
    return path


def test_names() -> None:
    files = plan_files("/a/b/in.jsonl", "batch_1")
    assert (files.output, files.errors) == ("/a/b/in.output.jsonl", "/a/b/in.errors.jsonl")
    assert files.work == "/a/b/.hybridsched-batch_1"
    files = plan_files("/a/in", "x", output="/c/results.jsonl")
    assert (files.output, files.errors) == ("/c/results.jsonl", "/c/results.errors.jsonl")
    assert plan_files("/a/in.txt", "x").output == "/a/in.txt.output.jsonl"
    assert plan_files("/a/x/../in.jsonl", "x", errors="/e/./f").errors == "/e/f"
    assert local_batch_id("/a/b") == local_batch_id("/a/b") != local_batch_id("/a/c")
    for output, errors in (("/a/in", None), ("/a/o", "/a/o"), ("/a/o", "/a/in"), ("/a/x/../in", None)):
        with pytest.raises(BatchFileError, match="three different files"):
            plan_files("/a/in", "x", output=output, errors=errors)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: None, "no such file"),
        (lambda p: p.mkdir(), "is a folder"),
        (lambda p: p.write_bytes(b""), "is empty"),
        (lambda p: p.write_bytes(b"\n \n"), "only blank lines"),
        (lambda p: p.write_bytes(b"\xef\xbb\xbf\n"), "only blank lines"),
        (lambda p: p.write_bytes(gzip.compress(b"{}")), "is compressed"),
        (lambda p: p.write_bytes("{}".encode("utf-16")), "is UTF-16"),
        (lambda p: os.mkfifo(p), "no regular file"),
    ],
)
def test_inputs_that_cannot_be_used(tmp_path: Path, make: Callable[[Path], object], text: str) -> None:
    path = tmp_path / "in.jsonl"
    make(path)
    with pytest.raises(InputUnreadableError, match=text):
        start(path)
    assert not list(tmp_path.glob(".hybridsched-*"))


def test_outputs_that_cannot_be_used(source: Path, tmp_path: Path) -> None:
    (tmp_path / "in.output.jsonl").write_text("mine")
    with pytest.raises(OutputExistsError, match="is there already"):
        start(source)
    (tmp_path / "in.output.jsonl").unlink()
    (tmp_path / "in.errors.jsonl").symlink_to("/nowhere")
    with pytest.raises(OutputExistsError):
        start(source)
    with pytest.raises(BatchFileError, match="is no folder"):
        WorkFolder.create(plan_files(source, "x", output=tmp_path / "no" / "out"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda p: p.write_bytes(p.read_bytes() + b"\n"), "bytes and has"),
        (lambda p: p.write_bytes(p.read_bytes().replace(b"id-0", b"id-X")), "content is another"),
        (lambda p: os.utime(p, ns=(1, 1)), "was written to"),
        (lambda p: (p.rename(p.with_suffix(".old")), p.write_bytes(b"")), "is empty"),
        (lambda p: p.unlink(), "no such file"),
    ],
)
def test_a_changed_input_is_noticed(source: Path, change: Callable[[Path], object], text: str) -> None:
    work = start(source)
    change(source)
    with pytest.raises(BatchFileError, match=text):
        work.open_input()
    with pytest.raises(BatchFileError, match=text):
        WorkFolder.open(work.path)
    with pytest.raises(BatchFileError, match=text):
        start(source)


def test_a_copy_put_in_the_place_of_the_input_is_noticed(source: Path) -> None:
    work = start(source)
    before = source.stat()
    content = source.read_bytes()
    source.rename(source.with_suffix(".old"))
    source.write_bytes(content)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputChangedError, match="replaced by another file"):
        work.open_input()


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
        monkeypatch.setattr("hybridsched.batches.work.find_work", lambda output: [])
        monkeypatch.setattr("hybridsched.batches.work._check_targets", lambda files: None)
        with pytest.raises(OutputBusyError, match="just started"):
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


def test_a_symbolic_link_in_the_place_of_the_output_is_not_followed(source: Path, tmp_path: Path) -> None:
    work = start(source)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    Path(work.files.output).unlink()
    Path(work.files.output).symlink_to(victim)
    with pytest.raises(BatchFileError):
        run_local(work)
    assert victim.read_text() == "precious"


@as_root
def test_a_batch_of_another_user_is_not_mixed_with_files_of_a_third(source: Path, tmp_path: Path) -> None:
    os.chown(source, 1001, 1001)
    with pytest.raises(NotYoursError, match="user 1001"):
        open_input(source, owner=1000)
    open_input(source, owner=1001).close()
    open_input(source).close()


@as_root
def test_another_user_cannot_use_my_input_or_my_batch(source: Path, tmp_path: Path) -> None:
    work = start(source)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    code = (
        "import os, sys\n"
        "from hybridsched.batches import files, layout, work\n"
        "os.setgroups([]); os.setgid(1001); os.setuid(1001)\n"
        "for act in (lambda: layout.open_input(sys.argv[1]), lambda: work.WorkFolder.open(sys.argv[2])):\n"
        "    try:\n"
        "        act()\n"
        "        print('opened')\n"
        "    except files.BatchFileError as e:\n"
        "        print(type(e).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(work.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["NotYoursError", "BatchFileError"]


@as_root
def test_root_writes_for_a_user_only_where_that_user_may_and_gives_the_files_to_them(
    source: Path, tmp_path: Path
) -> None:
    work = start(source)
    work.close()
    manifest = work.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"uid":0', b'"uid":1001'))
    for path in (source, work.path):
        os.chown(path, 1001, 1001)
    with pytest.raises(NotYoursError):
        WorkFolder.open(work.path)
    os.chown(tmp_path, 1001, 1001)
    opened = WorkFolder.open(work.path)
    run_local(opened)
    assert Path(opened.files.output).stat().st_uid == 1001
    assert Path(opened.files.errors).stat().st_uid == 1001
