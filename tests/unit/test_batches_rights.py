"""Whose files a batch may read and write, and what root does for a user."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.errors import BatchFileError, NotYoursError
from hybridsched.batches.layout import open_input, plan_files
from hybridsched.batches.rights import Rights
from hybridsched.batches.work import WorkFolder
from tests.batch_kit import read_ids, run_local, start, write_input

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


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
