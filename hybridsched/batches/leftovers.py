"""Work folders that are no batch's: of one that has ended, or of a start that died before there was a batch.

A folder is a batch's from the moment its manifest stands in it until that is renamed to `ended.json`: one
step each. Both happen, like the removal of what is left, under the folder's lock. The lock's file goes last,
still locked: who opened it before finds that it is not the folder's lock any more (`FileLock.is_current`).
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from hybridsched.batches.claims import drop_claim
from hybridsched.batches.errors import BatchFileError, file_errors
from hybridsched.batches.files import Disk, FileLock
from hybridsched.batches.folder import Folder
from hybridsched.batches.layout import WORK_PREFIX
from hybridsched.batches.manifest import MANIFEST, Manifest, open_work

ENDED = "ended.json"
"""The manifest of a batch that has ended: all in its folder can go."""

LOCK = "lock"


def has_batch(folder: Folder) -> bool:
    """Whether a batch is in a work folder. Asks the server anew on a network file system.

    Raises:
        BatchFileError: it cannot be known.
    """
    return MANIFEST in _names(folder)


def was_ended(folder: Folder) -> bool:
    """Whether somebody died who was removing this work folder."""
    return ENDED in _names(folder)


def remove_folder(folder: Folder, lock: FileLock, place: Folder, disk: Disk) -> None:
    """Remove a work folder, in which no batch is any more, from `place`. For who holds its lock; closes that.

    Raises:
        BatchFileError: something in it cannot be removed. The next start that comes by tries again.
    """
    for name in _names(folder):
        if name not in (ENDED, LOCK):
            disk.unlink(folder, name)
    disk.unlink(folder, ENDED)
    disk.unlink(folder, LOCK)
    lock.close()
    _remove_empty(folder.path.name, place, disk)


def sweep(output: Path, disk: Disk) -> None:
    """Remove what processes that died have left beside `output` of their work folders; nothing else."""
    place: Folder | None = None
    for path in output.parent.glob(f"{WORK_PREFIX}*"):
        if path.is_symlink():
            continue  # a claim
        with suppress(BatchFileError):  # somebody else's, or in use: it stays
            folder = open_work(path)
            if folder.uid == os.geteuid():
                place = place or Folder.open(path.parent, rights=folder.rights)
                sweep_folder(folder, place, disk)


def sweep_folder(folder: Folder, place: Folder, disk: Disk) -> None:
    """Remove one work folder, if no batch is in it and nobody has its lock.

    Raises:
        BatchFileError: it cannot be removed.
    """
    names = _names(folder)
    if not names:
        _remove_empty(folder.path.name, place, disk)
    if not _is_left(names):
        return
    lock = FileLock(folder, LOCK, disk)
    try:
        if lock.take(wait=False) and lock.is_current() and _is_left(_names(folder)):
            _drop_claims(folder, disk)
            remove_folder(folder, lock, place, disk)
    finally:
        lock.close()


def _drop_claims(folder: Folder, disk: Disk) -> None:
    """Give up the claims of a batch that has ended, as far as they are there."""
    if not was_ended(folder):
        return
    with file_errors("cannot read", folder.path / ENDED), folder.read_file(ENDED) as file:
        files = msgspec.json.decode(file.read(), type=Manifest).files
    for path in (Path(files.output), Path(files.errors)):
        drop_claim(Folder.open(path.parent, rights=folder.rights), path.name, files.batch_id, disk)


def _is_left(names: list[str]) -> bool:
    """Whether there is nothing but what a start makes before the manifest, or the batch has ended."""
    if LOCK not in names or MANIFEST in names:
        return False
    return ENDED in names or all(
        name == LOCK or (name.startswith(f"{MANIFEST}.") and name.endswith(".tmp")) for name in names
    )


def _names(folder: Folder) -> list[str]:
    with file_errors("cannot read the folder", folder.path):
        try:
            return folder.names()
        except FileNotFoundError:
            return []
        except OSError as exc:
            if exc.errno == errno.ESTALE:
                return []
            raise


def _remove_empty(name: str, place: Folder, disk: Disk) -> None:
    try:
        disk.rmdir(place, name)
    except BatchFileError as exc:
        # Somebody else was faster, or has just opened the lock: that one tidies up after itself.
        if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno not in _TAKEN:
            raise


_TAKEN = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ESTALE)
