"""Batches that this worker leaves alone for a while: their files cannot be used from here, or have no space.

A batch that cannot go on must not stand before others. So it is not given back to the front of the queue and
holds no place: it is tried again after a time of its own, which doubles while it fails, and the store says
why it waits. The threads of one process share it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from redis import RedisError

from hybridsched.batches.errors import BatchFileError, DiskFullError
from hybridsched.log import get_logger
from hybridsched.workers.offline_folders import trouble_text

_log = get_logger("offline")

BACK_OFF_S = (3.0, 60.0)
"""How long a batch is left alone at first, and at most."""

DISK_FULL = "disk_full"
UNUSABLE = "files_unusable"


class Aside:
    """The batches that are set aside, by id."""

    def __init__(
        self,
        note: Callable[[str, str, str], object],
        *,
        back_off_s: tuple[float, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note(batch, code, message)` tells the store why a batch waits."""
        self._note = note
        self._back_off_s = back_off_s or BACK_OFF_S
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[str, tuple[float, float]] = {}
        self._stuck: dict[str, int] = {}

    def holds(self, batch_id: str) -> bool:
        """Whether the batch is not to be touched now."""
        with self._lock:
            if self._stuck.get(batch_id):
                return True
            until_s, _ = self._until.get(batch_id, (0.0, 0.0))
            return until_s > self._clock()

    def put(self, batch_id: str, error: BatchFileError) -> None:
        """Set a batch aside, for twice as long as the last time if it has not gone on since."""
        with self._lock:
            _, last_s = self._until.get(batch_id, (0.0, 0.0))
            wait_s = min(last_s * 2, self._back_off_s[1]) if last_s else self._back_off_s[0]
            self._until[batch_id] = (self._clock() + wait_s, wait_s)
        code = DISK_FULL if isinstance(error, DiskFullError) else UNUSABLE
        _log.warning(
            "A batch waits: its files have no space or cannot be used from here. Others go on.",
            key="batch_aside",
            batch=batch_id,
            code=code,
            again_in_s=wait_s,
            error=str(error),
        )
        self._tell(batch_id, code, trouble_text(error))

    def stuck(self, batch_id: str, error: BatchFileError) -> None:
        """A chunk holds results that its disk does not take: no other one is taken until `unstuck`."""
        with self._lock:
            self._stuck[batch_id] = self._stuck.get(batch_id, 0) + 1
        self.put(batch_id, error)

    def unstuck(self, batch_id: str) -> None:
        """That chunk has been put down."""
        with self._lock:
            left = self._stuck.get(batch_id, 0) - 1
            if left > 0:
                self._stuck[batch_id] = left
            else:
                self._stuck.pop(batch_id, None)

    def went_on(self, batch_id: str) -> None:
        """A part of the batch has been finished: nothing is held against it any more."""
        with self._lock:
            self._until.pop(batch_id, None)

    def keep_only(self, batch_ids: set[str]) -> None:
        """Forget batches that have ended."""
        with self._lock:
            for batch_id in self._until.keys() - batch_ids:
                del self._until[batch_id]

    def _tell(self, batch_id: str, code: str, message: str) -> None:
        try:
            self._note(batch_id, code, message)
        except (RedisError, OSError) as error:
            _log.debug("Why a batch waits could not be noted; the log has it.", error=str(error))
