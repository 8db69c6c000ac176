"""The end of a cancelled batch where no worker is there to write it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridsched.store.batch_values import BatchInfo
    from hybridsched.store.batches import BatchStore

_LOOK_S = 0.2
_LEASE_S = 12.0
"""Longer than a dead worker keeps a chunk to itself."""


def end_here(store: BatchStore, batch: BatchInfo) -> str:
    """Write the end of a cancelled batch that no live worker has. Returns why it could not be done.

    Whoever ends a batch needs its lease and fence from the store, so a worker that comes up meanwhile does no
    harm. One that lives ends it by itself.
    """
    import redis

    from hybridsched.batches.errors import BatchFileError
    from hybridsched.store.batch_reader import WRONG_TYPE
    from hybridsched.workers.offline_feed import end_batch
    from hybridsched.workers.offline_folders import Folders

    models = tuple(part.model for part in batch.parts) or (batch.model,)
    try:
        if batch.status.ended or (not batch.jobs_only and store.workers(*models)):
            return ""
    except redis.ResponseError as error:
        if not str(error).startswith(WRONG_TYPE):
            raise
        return f"Whether a worker is there to end it cannot be seen: {error}; delete that key, it comes back"
    folders = Folders()
    until_s = time.monotonic() + _LEASE_S
    try:
        while not end_batch(store, folders, batch):
            batch = store.get(batch.id)
            if batch.status.ended or time.monotonic() > until_s:
                return ""
            time.sleep(_LOOK_S)
    except BatchFileError as error:
        return f"No worker is there to end it, and its files cannot be used from here: {error}"
    finally:
        folders.close()
    return ""
