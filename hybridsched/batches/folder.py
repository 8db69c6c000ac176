"""An open folder of a batch: every file in it is reached through the handle, never by its path again.

Between two looks at a path anything may have been put in its place. So a batch's folders are opened once,
with the rights of the batch's user, and the files in them by name relative to the handle, following no link;
what is opened must be a regular file of that user that has no second name.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from pathlib import Path
from typing import BinaryIO

from hybridsched.batches.errors import (
    FILE_MODE,
    FOLDER_MODE,
    FolderGoneError,
    NotYoursError,
    OutputChangedError,
    file_errors,
)
from hybridsched.batches.rights import Rights

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """A folder that is open as long as this object lives: a thread that still uses it must not find another
    file under its number.

    Operations that change something raise `OSError`; `Disk` turns that into errors with a sentence.
    """

    def __init__(self, path: Path, fd: int, rights: Rights) -> None:
        self.path = path
        """For messages."""
        self.rights = rights
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str | Path, *, rights: Rights | None = None) -> Folder:
        """Open a folder with the rights of a user; without any, of the user whom the folder belongs to, and
        then it must be no link.

        Raises:
            FolderGoneError: it is not there, and it was (see `is_gone`).
            NotYoursError: it belongs to somebody whose rights this process cannot take.
            BatchFileError: it cannot be opened, or it is not there and perhaps never was on this machine.
        """
        place = Path(path)
        if rights is not None:
            with file_errors("cannot open the folder", place):
                try:
                    with rights:
                        fd = os.open(place, _OPEN_FOLDER)
                except FileNotFoundError:
                    if is_gone(place, rights.uid):
                        raise FolderGoneError(f"{place} is gone: somebody has removed it") from None
                    raise
            return cls(place, fd, rights)
        with file_errors("cannot open the folder", place):
            owner = os.lstat(place).st_uid
        if os.geteuid() not in (0, owner):
            raise NotYoursError(
                f"{place} belongs to user {owner} and this process runs as user {os.geteuid()}; a batch uses "
                "files of its own user only"
            )
        rights = Rights(owner)
        with file_errors("cannot open the folder", place), rights:
            made = cls(place, os.open(place, _OPEN_FOLDER | os.O_NOFOLLOW), rights)
        if os.fstat(made._fd).st_uid != owner:
            raise NotYoursError(f"{place} changed hands while it was opened; it is left alone")
        return made

    @property
    def uid(self) -> int:
        """The user whose files are used here."""
        return self.rights.uid

    def open_file(self, name: str, flags: int) -> int:
        """Open a file of the batch's user, following no link; a new one gets mode 0600.

        Raises:
            OSError: as `os.open`.
            FolderGoneError: there is no folder any more to make it in.
            OutputChangedError, NotYoursError: what stands there is none of the batch's own files.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            with self.rights:
                fd = os.open(_plain(name), flags, FILE_MODE, dir_fd=self._fd)
        except FileNotFoundError:
            if flags & os.O_CREAT:
                raise FolderGoneError(f"{self.path} is gone: somebody has removed it") from None
            raise
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise OutputChangedError(
                    f"{self.path / name} is a link or no file: somebody has put it there. A batch writes and "
                    "reads only regular files of its own"
                ) from exc
            raise
        try:
            self._check(os.fstat(fd), name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check(self, found: os.stat_result, name: str) -> None:
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OutputChangedError(
                f"{self.path / name} is no regular file or has a second name (a hard link): somebody has put "
                "it there. A batch writes and reads only regular files of its own"
            )
        if found.st_uid != self.uid:
            raise NotYoursError(
                f"{self.path / name} belongs to user {found.st_uid}, the batch to user {self.uid}; a batch "
                "uses files of its own user only"
            )

    def read_file(self, name: str) -> BinaryIO:
        """Open a file for reading; see `open_file`. The caller closes it."""
        return os.fdopen(self.open_file(name, os.O_RDONLY), "rb")

    def exists(self, name: str) -> bool:
        """Whether anything stands under this name, a link that leads nowhere too.

        Raises:
            BatchFileError: it cannot be known.
        """
        with file_errors("cannot look for", self.path / name):
            try:
                with self.rights:
                    os.stat(_plain(name), dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def names(self) -> list[str]:
        """What is in it. Asks the server anew where the folder is on a network file system."""
        with self.rights:
            fd = os.open(".", _OPEN_FOLDER, dir_fd=self._fd)
            try:
                return os.listdir(fd)  # noqa: PTH208 - a handle has no Path
            finally:
                os.close(fd)

    def replace(self, source: str, target: str) -> None:
        with self.rights:
            os.replace(_plain(source), _plain(target), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        with self.rights:
            os.unlink(_plain(name), dir_fd=self._fd)

    def make_link(self, name: str, text: str) -> None:
        """A symbolic link with any text, in one step; never followed by us."""
        with self.rights:
            os.symlink(text, _plain(name), dir_fd=self._fd)

    def read_link(self, name: str) -> str:
        with self.rights:
            return os.readlink(_plain(name), dir_fd=self._fd)

    def make_folder(self, name: str) -> None:
        with self.rights:
            os.mkdir(_plain(name), FOLDER_MODE, dir_fd=self._fd)

    def remove_folder(self, name: str) -> None:
        with self.rights:
            os.rmdir(_plain(name), dir_fd=self._fd)

    def sync(self) -> None:
        """Make new names, renames and removals durable."""
        os.fsync(self._fd)


def is_gone(path: Path, uid: int) -> bool:
    """Whether a folder that belonged to `uid` was removed, rather than being one that this machine does not
    see: the nearest folder around it that is there is that user's own, or holds other things.

    An empty mount point says nothing.
    """
    for parent in path.parents:
        try:
            found = parent.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return False
        if parent == Path(parent.root):
            return False
        if uid != 0:
            return found.st_uid == uid
        try:
            return found.st_uid == uid and any(parent.iterdir())
        except OSError:
            return False
    return False


def _plain(name: str) -> str:
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no name of a file in a folder")
    return name
