"""A batch's files: their names, inputs and outputs that cannot be used, and an input that changes."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridsched.batches.errors import (
    BatchFileError,
    InputChangedError,
    InputUnreadableError,
    OutputExistsError,
)
from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.work import WorkFolder
from tests.batch_kit import read_ids, run_local, start


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
