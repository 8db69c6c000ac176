"""Slurm's files on disk: read as they stand, and written whole or not at all."""

from __future__ import annotations

import contextlib
import difflib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path


class InstallError(Exception):
    """The files could not be written, or the site's own do not allow it. Says what to do."""


@dataclass(frozen=True)
class Change:
    """One file to write."""

    path: Path
    before: str | None
    """None when the file is new."""
    after: str
    mode: int

    @property
    def is_needed(self) -> bool:
        return self.before != self.after

    def diff(self) -> str:
        """Unified diff, empty when nothing changes."""
        old = f"{self.path}" if self.before is not None else "/dev/null"
        lines = difflib.unified_diff(
            (self.before or "").split("\n"),
            self.after.split("\n"),
            fromfile=old,
            tofile=str(self.path),
            lineterm="",
        )
        return "".join(line + "\n" for line in lines)


def read(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # a carriage return in a comment ends no line
            return file.read()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InstallError(f"{path} cannot be read: {error}") from error


def read_included(path: Path) -> str:
    text = read(path)
    if text is None:
        raise InstallError(f"{path} does not exist, and slurm.conf includes it: Slurm would not start either")
    return text


def free_name(path: Path) -> Path:
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def write(change: Change) -> None:
    # A link (as a shared slurm.conf often is) stays one: what it points to is replaced.
    target = change.path.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(change.after)
            file.flush()
            os.fsync(file.fileno())
        mode = change.mode
        if target.exists():
            was = target.stat()
            mode = was.st_mode & 0o7777 | (change.mode & 0o111)
            if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(name, was.st_uid, was.st_gid)
        Path(name).chmod(mode)
        Path(name).replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
