"""The file operations that batches are built of.

`Disk` is the only thing in this package that changes files. Tests hand in one that fails at a chosen call,
which is how every crash and a full disk are tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from hybridsched.batches.errors import BatchFileError, file_errors
from hybridsched.batches.folder import Folder


class Disk:
    """Real file operations, each in an open folder. Each raises `DiskFullError` or `BatchFileError`."""

    def open(self, folder: Folder, name: str, flags: int) -> int:
        """Open for writing; see `Folder.open_file`."""
        with file_errors("cannot open", folder.path / name):
            return folder.open_file(name, flags)

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

    def replace(self, folder: Folder, source: str, target: str) -> None:
        with file_errors("cannot replace", folder.path / target):
            folder.replace(source, target)

    def unlink(self, folder: Folder, name: str) -> None:
        """Remove a file; one that is gone already is fine."""
        with file_errors("cannot remove", folder.path / name), contextlib.suppress(FileNotFoundError):
            folder.unlink(name)

    def link(self, folder: Folder, name: str, text: str) -> None:
        """Make a symbolic link that holds `text`."""
        with file_errors("cannot make", folder.path / name):
            folder.make_link(name, text)

    def mkdir(self, folder: Folder, name: str) -> None:
        with file_errors("cannot make the folder", folder.path / name):
            folder.make_folder(name)

    def rmdir(self, folder: Folder, name: str) -> None:
        with file_errors("cannot remove the folder", folder.path / name):
            folder.remove_folder(name)

    def sync_folder(self, folder: Folder) -> None:
        """Make renames and new names in a folder durable."""
        with file_errors("cannot flush", folder.path):
            folder.sync()

    def write_whole(self, folder: Folder, name: str, data: bytes) -> None:
        """Put `data` under `name` so that after any crash either the old or the new content is there."""
        temporary = f"{name}.{os.getpid()}.{threading.get_native_id()}.tmp"
        path = folder.path / temporary
        self.unlink(folder, temporary)  # what a process with the same numbers left when it died
        fd = self.open(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self.write(fd, data, path)
            self.fsync(fd, path)
        finally:
            os.close(fd)
        self.replace(folder, temporary, name)
        self.sync_folder(folder)


DISK = Disk()


class FileLock:
    """A `flock` that ends with the process. Not inherited by child processes."""

    def __init__(self, folder: Folder, name: str, disk: Disk = DISK) -> None:
        self._folder = folder
        self._name = name
        self._path = folder.path / name
        self._fd: int | None = disk.open(folder, name, os.O_RDWR | os.O_CREAT)
        self.held = False
        """Whether this object has the lock."""

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
        self.held = True
        return True

    def is_current(self) -> bool:
        """Whether the lock's file still stands under its name. One that was removed keeps nobody out.

        Raises:
            BatchFileError: it cannot be known.
        """
        if self._fd is None:
            return False
        try:
            with file_errors("cannot look for", self._path):  # opened: a file server is asked anew then
                fd = self._folder.open_file(self._name, os.O_RDWR)
        except BatchFileError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                return False
            raise
        try:
            return os.path.samestat(os.fstat(fd), os.fstat(self._fd))
        finally:
            os.close(fd)

    def release(self) -> None:
        """Let others take it; it can be taken again."""
        self.held = False
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the lock for good."""
        self.held = False
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
