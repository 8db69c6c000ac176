"""The open work folders of a worker's batches."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

from hybridsched.batches.errors import (
    BatchFileError,
    FolderGoneError,
    InputChangedError,
    InputUnreadableError,
    NotYoursError,
    OutputChangedError,
)
from hybridsched.batches.folder import is_gone
from hybridsched.batches.work import WorkFolder
from hybridsched.store.batch_values import BatchInfo

FINAL_ERRORS = (InputChangedError, InputUnreadableError, NotYoursError, OutputChangedError)
"""Errors of a batch's files that no waiting and no other worker can cure."""


def trouble_text(error: BatchFileError) -> str:
    """What to note of a batch that cannot go on from here for now."""
    return f"{error} (seen on {socket.gethostname()})"


class Folders:
    """Opens each batch's work folder once, for the threads of one process."""

    def __init__(self) -> None:
        self._open: dict[str, WorkFolder] = {}
        self._lock = threading.Lock()

    def get(self, batch: BatchInfo) -> WorkFolder:
        """The work folder of a batch, locked against runs without a store.

        Raises:
            BatchFileError: it cannot be used; see `batches.work`.
        """
        with self._lock:
            folder = self._open.get(batch.id)
            if folder is None:
                folder = _open(batch)
                try:
                    folder.lock_shared()
                except BaseException:
                    folder.close()
                    raise
                self._open[batch.id] = folder
            return folder

    def forget(self, batch_id: str) -> None:
        """Close a batch's folder; it is opened anew when it is needed again."""
        with self._lock:
            folder = self._open.pop(batch_id, None)
        if folder is not None:
            folder.close()

    def keep_only(self, batch_ids: set[str]) -> None:
        """Close the folders of batches that have ended."""
        with self._lock:
            ended = [self._open.pop(batch_id) for batch_id in self._open.keys() - batch_ids]
        for folder in ended:
            folder.close()

    def close(self) -> None:
        """Close them all."""
        self.keep_only(set())


def _open(batch: BatchInfo) -> WorkFolder:
    try:
        return WorkFolder.open(batch.work)
    except BatchFileError as exc:
        if isinstance(exc.__cause__, FileNotFoundError) and is_gone(Path(batch.work), batch.uid):
            raise FolderGoneError(
                f"{batch.work} is gone: somebody has removed it before the batch had ended. What is in the "
                "output stays there; submit the input with another --output"
            ) from exc
        raise
