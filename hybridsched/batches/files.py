"""The file operations that batches are built of, and their errors.

`Disk` is the only thing in this package that changes files. Tests hand in one that fails at a chosen call,
which is how every crash and a full disk are tried.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class BatchFileError(Exception):
    """A batch's files cannot be used as asked. The text says what was found and what to do."""

    code = "batch_file_error"


class InputUnreadableError(BatchFileError):
    """The input is missing, a folder, empty, compressed or not readable."""

    code = "input_unreadable"


class InputChangedError(BatchFileError):
    """The input is not the file that the batch was started with."""

    code = "input_changed"


class NotYoursError(BatchFileError):
    """A file belongs to another user."""

    code = "not_yours"


class OutputBusyError(BatchFileError):
    """Another run works on the same output."""

    code = "output_busy"


class OutputExistsError(BatchFileError):
    """The output or error file is there already and belongs to no unfinished batch."""

    code = "output_exists"


class OutputChangedError(BatchFileError):
    """The output or error file, or the work folder, was changed by someone else while the batch ran."""

    code = "output_changed"


class DiskFullError(BatchFileError):
    """No space, or no quota, is left. Everything finished so far is intact; free space and run again."""

    code = "disk_full"


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def file_errors(what: str, path: str | Path) -> Iterator[None]:
    """Turn an `OSError` into a `BatchFileError` that names the file."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise DiskFullError(
                f"{what} {path}: {exc.strerror}; free some space and run again, finished lines are kept"
            ) from exc
        raise BatchFileError(f"{what} {path}: {exc.strerror or exc}") from exc


class Disk:
    """Real file operations. Each raises `DiskFullError` or `BatchFileError`."""

    def open(self, path: Path, flags: int) -> int:
        """Open for writing; a new file gets mode 0600. Never follows a symbolic link."""
        with file_errors("cannot open", path):
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, data: bytes, path: Path) -> None:
        """Write all of `data`. After an error a part of it may stand in the file."""
        with file_errors("cannot write", path):
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

    def fsync(self, fd: int, path: Path) -> None:
        with file_errors("cannot flush", path):
            os.fsync(fd)

    def truncate(self, fd: int, length: int, path: Path) -> None:
        with file_errors("cannot truncate", path):
            os.ftruncate(fd, length)

    def replace(self, source: Path, target: Path) -> None:
        with file_errors("cannot replace", target):
            source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone already is fine."""
        with file_errors("cannot remove", path):
            path.unlink(missing_ok=True)

    def mkdir(self, path: Path) -> None:
        with file_errors("cannot make the folder", path):
            path.mkdir(mode=FOLDER_MODE)

    def rmdir(self, path: Path) -> None:
        with file_errors("cannot remove the folder", path):
            path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Make renames and new names in a folder durable."""
        with file_errors("cannot flush", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def write_whole(self, path: Path, data: bytes) -> None:
        """Put `data` at `path` so that after any crash either the old or the new content is there."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        fd = self.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.write(fd, data, temporary)
            self.fsync(fd, temporary)
        finally:
            os.close(fd)
        self.replace(temporary, path)
        self.sync_folder(path.parent)


DISK = Disk()


class FileLock:
    """A `flock` that ends with the process. Not inherited by child processes."""

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        self._path = path
        self._fd: int | None = disk.open(path, os.O_RDWR | os.O_CREAT)

    def take(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Take the lock. Returns False when another holds it and `wait` is false."""
        if self._fd is None:
            raise ValueError(f"the lock {self._path} is closed")
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(self._fd, kind)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise BatchFileError(
                f"cannot lock {self._path}: {exc.strerror}; the file system must support flock"
            ) from exc
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
