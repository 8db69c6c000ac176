"""Names, owners, changed inputs, locks, and who may write where."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.errors import (
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
from hybridsched.batches.manifest import find_work, read_manifest
from hybridsched.batches.rights import Rights
from hybridsched.batches.scan import InputIndex, scan
from hybridsched.batches.work import WorkFolder
from tests.batch_kit import FaultyDisk, read_ids, run_local, start, write_input

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


@pytest.mark.parametrize(
    "change",
    [
        lambda p: os.utime(p, ns=(1, 1)),
        lambda p: (p.rename(p.with_suffix(".old")), p.write_bytes(p.with_suffix(".old").read_bytes())),
        lambda p: p.chmod(0o640),
    ],
    ids=["touch", "copy", "chmod"],
)
def test_an_input_with_the_same_content_goes_on(source: Path, change: Callable[[Path], object]) -> None:
    work = start(source)
    change(source)
    work.open_input().close()
    again = start(source)
    assert again.resumed
    run_local(again)
    assert len(read_ids(work.files.output)) == 3


def test_a_change_that_sets_the_time_back_is_noticed(source: Path) -> None:
    work = start(source)
    before = source.stat()
    source.write_bytes(source.read_bytes().replace(b'"max_tokens": 8', b'"max_tokens": 9'))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputChangedError, match="content is another"):
        work.open_input()


def test_an_unchanged_input_is_read_once_to_know_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = start(source)
    os.utime(source, ns=(1, 1))
    work.open_input().close()
    monkeypatch.setattr("hybridsched.batches.layout.identify", lambda file: pytest.fail("it was read again"))
    work.open_input().close()


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


def test_a_symbolic_link_in_the_place_of_the_output_is_not_followed(source: Path, tmp_path: Path) -> None:
    work = start(source)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    Path(work.files.output).unlink()
    Path(work.files.output).symlink_to(victim)
    with pytest.raises(BatchFileError):
        run_local(work)
    assert victim.read_text() == "precious"


def let_in(folder: Path) -> None:
    """Let other users reach a folder of pytest's."""
    for one in (folder, *folder.parents):
        if one.stat().st_uid == 0 and one != Path("/") and one != Path("/tmp"):
            one.chmod(one.stat().st_mode | 0o055)


def give(path: Path, uid: int) -> None:
    """Give a folder and all in it away."""
    for one in (path, *path.iterdir()) if path.is_dir() else (path,):
        os.chown(one, uid, uid, follow_symlinks=False)


def start_as(uid: int, source: Path) -> WorkFolder:
    """A batch as user `uid` would have made it, whose folder belongs to that user."""
    work = start(source)
    work.close()
    manifest = work.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"uid":0', f'"uid":{uid}'.encode()))
    let_in(source.parent)
    give(source.parent, uid)
    give(work.path, uid)
    return WorkFolder.open(work.path)


@as_root
def test_a_batch_of_another_user_is_not_mixed_with_files_of_a_third(source: Path, tmp_path: Path) -> None:
    os.chown(source, 1001, 1001)
    let_in(tmp_path)
    with pytest.raises(NotYoursError, match="user 1001"):
        open_input(source, owner=1000)
    open_input(source, owner=1001).close()
    open_input(source).close()
    with pytest.raises(NotYoursError, match="submit it as that user"):
        start(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@as_root
def test_another_user_cannot_use_my_input_or_my_batch(source: Path, tmp_path: Path) -> None:
    work = start(source)
    let_in(tmp_path)
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
    assert done.stdout.split() == ["NotYoursError", "NotYoursError"]


@as_root
def test_root_writes_with_the_users_rights_only_and_the_files_are_theirs(
    source: Path, tmp_path: Path
) -> None:
    opened = start_as(1001, source)
    ran: list[int] = []
    os.chown(tmp_path, 0, 0)  # a folder that the user may not write to
    tmp_path.chmod(0o755)
    Path(opened.files.errors).unlink()
    with pytest.raises(BatchFileError, match="Permission denied"):
        run_local(opened, ran=ran)
    os.chown(tmp_path, 1001, 1001)
    run_local(opened, ran=ran)
    made = [Path(opened.files.output), Path(opened.files.errors), *opened.path.iterdir()]
    assert {path.stat().st_uid for path in made} == {1001}
    assert len(ran) == 3
    opened.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.errors.jsonl",
        "in.jsonl",
        "in.output.jsonl",
    ]


@as_root
@pytest.mark.parametrize("how", ["folder", "file", "hard link"])
def test_root_is_not_led_to_a_foreign_file_by_what_changes_after_the_check(tmp_path: Path, how: str) -> None:
    home, etc = tmp_path / "home", tmp_path / "etc"
    (home / "out").mkdir(parents=True)
    etc.mkdir()
    source = home / "in.jsonl"
    write_input(source, 3)
    work = WorkFolder.create(plan_files(source, "batch_t", errors=home / "out" / "passwd"))
    work.close()
    manifest = work.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"uid":0', b'"uid":1001'))
    let_in(home)
    for folder in (home, home / "out", work.path):
        give(folder, 1001)
    (etc / "passwd").write_text("precious")
    opened = WorkFolder.open(work.path)
    if how == "folder":
        (home / "out").rename(home / "gone")
        (home / "out").symlink_to(etc)
    else:
        (home / "out" / "passwd").unlink()
        if how == "file":
            (home / "out" / "passwd").symlink_to(etc / "passwd")
        else:
            os.link(etc / "passwd", home / "out" / "passwd")
    with contextlib.suppress(BatchFileError):
        run_local(opened)
    with contextlib.suppress(BatchFileError):
        run_local(WorkFolder.open(work.path))
    with contextlib.suppress(BatchFileError):
        Assembler(WorkFolder.open(work.path)).close_out("batch_cancelled", "cancelled")
    found = (etc / "passwd").stat()
    assert ((etc / "passwd").read_text(), found.st_uid) == ("precious", 0)
    assert {path.name for path in etc.iterdir()} == {"passwd"}


@as_root
@pytest.mark.parametrize("name", ["chunk-00000000.7.jsonl", "recovered.jsonl", "state.json", "manifest.json"])
def test_root_gives_nobody_the_results_of_another_through_a_link(tmp_path: Path, name: str) -> None:
    secret = b'{"line":1,"out":{"custom_id":"id-0","secret":1}}\n'
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    (theirs / "journal").write_bytes(secret)
    (theirs / "journal").chmod(0o600)
    mine = tmp_path / "mine"
    mine.mkdir()
    source = mine / "in.jsonl"
    write_input(source, 3)
    work = start_as(1001, source)
    for make in (os.symlink, os.link):
        place = work.path / name
        kept = place.read_bytes() if place.exists() else None
        place.unlink(missing_ok=True)
        make(theirs / "journal", place)
        with pytest.raises(BatchFileError):
            run_local(WorkFolder.open(work.path))
        assert b"secret" not in Path(work.files.output).read_bytes()
        place.unlink()
        if kept is not None:
            place.write_bytes(kept)
            os.chown(place, 1001, 1001)
    run_local(WorkFolder.open(work.path))
    assert b"secret" not in Path(work.files.output).read_bytes()
    assert len(read_ids(work.files.output)) == 3


@as_root
def test_the_rights_of_a_user_are_the_calling_threads_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    secret = tmp_path / "secret"
    secret.write_text("x")
    other = ThreadPoolExecutor(1)
    other.submit(os.getpid).result(10)  # its thread is there before
    with Rights(1001):
        with pytest.raises(PermissionError):
            secret.open()
        assert other.submit(secret.read_text).result(10) == "x"
    other.shutdown()
    with secret.open() as file:
        assert file.read() == "x"


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
