"""The lock of a work folder: who has it, and finds the manifest there then, has the batch."""

from __future__ import annotations

from contextlib import suppress

from hybridsched.batches.errors import BatchFileError, BatchGoneError, FolderGoneError
from hybridsched.batches.files import Disk, FileLock
from hybridsched.batches.folder import Folder
from hybridsched.batches.leftovers import LOCK, has_batch, remove_folder, sweep_folder


class BatchLock:
    """The lock of one open work folder, which stands in `place`. Nothing here waits."""

    def __init__(self, folder: Folder, place: Folder, disk: Disk) -> None:
        self._folder = folder
        self._place = place
        self._disk = disk
        self._file = self._open()

    def take(self, *, shared: bool = False) -> bool:
        """Take the lock that stands in the folder now, batch or none. False: another has it.

        Raises:
            BatchGoneError: the folder is not there any more.
        """
        while self._file.take(shared=shared, wait=False):
            if self._file.is_current():
                return True
            self._renew()
        return False

    def take_batch(self, *, shared: bool = False) -> bool:
        """Take the lock of a batch that is there. False: another has it.

        Raises:
            BatchGoneError: it is not there any more.
        """
        if not self.take(shared=shared):
            return False
        if has_batch(self._folder):
            return True
        self._file.close()
        with suppress(BatchFileError):  # the next start removes what stays
            sweep_folder(self._folder, self._place, self._disk)
        raise self._gone()

    def hold(self) -> None:
        """Take it unless this object has it; where another has it, that one stays."""
        if not self._file.held:
            self._renew()
            self._file.take(wait=False)

    def release(self) -> None:
        """Let others take it."""
        self._file.release()

    def remove_folder(self) -> None:
        """Remove the folder, in which no batch is any more; see `leftovers`."""
        remove_folder(self._folder, self._file, self._place, self._disk)

    def close(self) -> None:
        """Release it for good."""
        self._file.close()

    def _renew(self) -> None:
        self._file.close()
        self._file = self._open()

    def _open(self) -> FileLock:
        try:
            return FileLock(self._folder, LOCK, self._disk)
        except FolderGoneError as exc:
            raise self._gone() from exc

    def _gone(self) -> BatchGoneError:
        return BatchGoneError(
            f"{self._folder.path}: no batch is there any more: it has ended, or somebody has removed the "
            "folder. What is in the output stays there"
        )
