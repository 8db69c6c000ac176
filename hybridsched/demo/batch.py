"""The demo's offline batch: started on disk and in the store, watched, left where it can be gone on with."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import redis

from hybridsched.batches.layout import BatchFiles, plan_files
from hybridsched.batches.work import WorkFolder
from hybridsched.store.batch_values import BatchInfo, BatchProgress, NewBatch
from hybridsched.store.batches import BatchStore, new_batch_id


def result_files(report: Path) -> tuple[Path, Path]:
    """Output and error file of the batch in a report folder."""
    return report / "batch.output.jsonl", report / "batch.errors.jsonl"


class RunningBatch:
    """A batch that the pool knows."""

    def __init__(self, store: BatchStore, files: BatchFiles) -> None:
        self._store = store
        self.files = files
        self.id = files.batch_id

    @classmethod
    def of(cls, store: BatchStore, info: BatchInfo) -> RunningBatch:
        """One that others have submitted."""
        return cls(store, BatchFiles(info.id, info.input, info.output, info.errors, info.work))

    def progress(self) -> BatchProgress:
        """Counts as the store knows them: for the display, not for the report."""
        return self._store.progress(self.id)

    def ended(self) -> bool:
        """Whether nothing more will happen to it."""
        return self._store.get(self.id).status.ended


class DemoBatch(RunningBatch):
    """One batch file under way, with its results in the report folder.

    Raises (from the constructor):
        BatchFileError: the input cannot be used or the outputs cannot be written.
    """

    def __init__(self, client: redis.Redis, pool: str, source: Path, report: Path) -> None:
        output, errors = result_files(report)
        work = WorkFolder.create(plan_files(source, new_batch_id(), output=output, errors=errors))
        try:
            super().__init__(BatchStore(client, pool), work.files)
            self._index = work.index
        finally:
            work.close()

    def submit(self, model: str) -> None:
        """Hand it to the pool's workers."""
        self._store.submit(
            NewBatch(
                id=self.id,
                user=getpass.getuser(),
                uid=os.geteuid(),
                model=model,
                input=self.files.input,
                output=self.files.output,
                errors=self.files.errors,
                work=self.files.work,
                bytes=self._index.size,
                lines=self._index.lines,
                tokens=self._index.tokens,
            )
        )
