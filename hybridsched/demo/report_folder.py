"""The report folder: chosen, held by one run at a time, and cleared of an earlier report of a demo."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hybridsched.demo.errors import DemoUsageError

MARK = "demo.json"
"""File that says that a folder is a report of the demo."""

LOCK = "demo.lock"
"""File that a run holds locked while it writes; it holds the run's process id."""

SHORT_TRACE = "trace-short.csv"
"""The trace that real engines are given, with the shipped one's times and shorter requests."""

_RESULTS = (
    *("summary.json", "report.html", "requests.csv", "decisions.jsonl", "events.jsonl", "compare.json"),
    "total.json",
    *("batch.jsonl", "batch.output.jsonl", "batch.errors.jsonl", SHORT_TRACE),
)
_FOLDERS = ("engines", "logs", "load", "valkey")


class _Mark(msgspec.Struct):
    generated: bool
    """Whether the batch was the demo's own: then its results may be replaced."""


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted`-2, -3, ... that holds no results of a user's own batch."""
    number, folder = 1, wanted
    while holds_own_results(folder):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def holds_own_results(folder: Path) -> bool:
    """Whether lines of a user's own batch have been finished there: nothing of that may be lost.

    A run that was stopped before the first line leaves none.
    """
    try:
        mark = msgspec.json.decode((folder / MARK).read_bytes(), type=_Mark)
    except (OSError, msgspec.MsgspecError):
        return False
    if mark.generated:
        return False
    results = [folder / "batch.output.jsonl", folder / "batch.errors.jsonl"]
    return any(_size(path) > 0 for path in (*results, *folder.glob(".hybridsched-*/*.jsonl")))


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder for one run: two at once would mix their files. Made when it is missing.

    Raises:
        DemoUsageError: another run has it, something else is there, or it cannot be used.
    """
    made = not folder.exists()
    if not made and not _is_ours(folder):
        raise DemoUsageError(
            f"report folder {folder} is not empty and no report of the demo; choose another with --report"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DemoUsageError(f"report folder {folder} cannot be used: {error}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 20).decode("ascii", "replace").strip() or "unknown"
            raise DemoUsageError(
                f"another demo (process {owner}) is writing to report folder {folder}; wait for its end, or "
                "choose another with --report"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)
        if made:
            _remove_unused(folder)


def prepare(folder: Path, *, generated: bool) -> None:
    """Clear an earlier report out of a folder that is held. Nothing that is not the demo's is touched.

    Raises:
        DemoUsageError: the results of a batch of the user's own are there, or it cannot be used.
    """
    try:
        if holds_own_results(folder):
            raise DemoUsageError(
                f"report folder {folder} holds the results of your own batch; choose another with --report, "
                "or move it away"
            )
        if (folder / MARK).exists():
            _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).write_bytes(msgspec.json.encode(_Mark(generated=generated)))
    except OSError as error:
        raise DemoUsageError(f"report folder {folder} cannot be used: {error}") from None


def _is_ours(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    return (folder / MARK).exists() or all(path.name == LOCK for path in folder.iterdir())


def _remove_unused(folder: Path) -> None:
    """A folder that this run made and then had no use for."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [LOCK]:
            (folder / LOCK).unlink()
            folder.rmdir()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _clear(folder: Path) -> None:
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)
    for part in _FOLDERS:
        _remove_files(folder / part)
    for path in folder.glob(".hybridsched-*"):
        if path.is_dir() and not path.is_symlink():
            _remove_files(path)
        else:
            path.unlink()


def _remove_files(folder: Path) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_files(path)
        else:
            path.unlink()
    folder.rmdir()
