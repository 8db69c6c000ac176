"""One chunk in hand: its lines as runs, its journal, and what it has come to.

`load` and `seal` read and flush files and belong in a thread; the rest happens on the event loop of the lane.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hybridsched.batches.cut import ChunkSpan, Owns
from hybridsched.batches.errors import BatchFileError, DiskFullError
from hybridsched.batches.journal import ChunkJournal
from hybridsched.batches.records import error_record, output_record
from hybridsched.batches.validate import BatchLine, LineError, read_span
from hybridsched.batches.work import WorkFolder
from hybridsched.log import get_logger
from hybridsched.workers import offline_plan as plan
from hybridsched.workers.offline_run import LineResult, LineRun

_log = get_logger("offline")
_decode = msgspec.json.Decoder().decode


class ChunkTotals(msgspec.Struct, kw_only=True):
    """What a chunk has come to so far."""

    lines: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    recomputed: int = 0


class ChunkInHand:
    """A chunk that this worker runs. It is settled when every line has a result in the journal."""

    def __init__(
        self, work: WorkFolder, chunk_no: int, fence: int, span: ChunkSpan, journal: ChunkJournal
    ) -> None:
        self.batch = work.files.batch_id
        self.chunk_no = chunk_no
        self.fence = fence
        self.span = span
        self.totals = ChunkTotals()
        self.started_s = time.monotonic()
        self.failure: BatchFileError | None = None
        """Why its files cannot be written any more, for another reason than a full disk."""
        self.runs: list[LineRun] = []
        """The lines that have no result yet."""
        self.full: DiskFullError | None = None
        """Why results wait in memory: their disk has no space."""
        self.on_settled: Callable[[], None] = lambda: None
        self.on_full: Callable[[], None] = lambda: None
        """Told when it begins to wait for space."""
        self._journal = journal
        self._unwritten: list[tuple[int, bytes, bool]] = []
        self._written_kept: dict[int, plan.Kept] = {}

    @classmethod
    def load(
        cls,
        work: WorkFolder,
        chunk_no: int,
        fence: int,
        span: ChunkSpan,
        *,
        sequence: int,
        owns: Owns | None = None,
    ) -> ChunkInHand:
        """Open the chunk's journal and read its lines; bad ones get their error at once.

        `sequence` orders the chunks in hand: lines of a lower one go first. `owns`: which lines of its span
        are the chunk's (`batches.parts`); None: all.

        Raises:
            DiskFullError: no space for the journal.
            BatchFileError: the input or the journal cannot be used; the message says why.
        """
        with work.open_input() as file:
            lines = read_span(file, span.read_from, span.end, span.first_line, work.index.duplicates)
            if owns is None:
                return cls._load(work, chunk_no, fence, span, lines, sequence)
            mine = [line for line in lines if owns(line)]
        numbers = frozenset(line.line for line in mine)
        return cls._load(work, chunk_no, fence, span, mine, sequence, numbers)

    @classmethod
    def _load(
        cls,
        work: WorkFolder,
        chunk_no: int,
        fence: int,
        span: ChunkSpan,
        lines: Iterable[BatchLine | LineError],
        sequence: int,
        numbers: frozenset[int] | None = None,
    ) -> ChunkInHand:
        journal = ChunkJournal.open(work, chunk_no, fence, span, lines=numbers)
        try:
            chunk = cls(work, chunk_no, fence, span, journal)
            for line in lines:
                if line.line in journal.finished:
                    continue
                if isinstance(line, LineError):
                    journal.finish_error(line)
                    continue
                run = chunk._begin(line, sequence)
                if isinstance(run, LineError):
                    journal.finish_error(run)
                    continue
                if run.kept is not None:
                    chunk._written_kept[line.line] = run.kept
                chunk.runs.append(run)
        except BaseException:
            journal.close()
            raise
        return chunk

    def _begin(self, line: BatchLine, sequence: int) -> LineRun | LineError:
        """A line ready to run. Whatever stands in it, it fails alone."""
        try:
            return LineRun(
                batch=self.batch,
                number=line.line,
                custom_id=line.custom_id,
                path=line.url,
                body=_decode(line.body),
                sink=self,
                order=(sequence, line.line),
                raw_bytes=len(line.body),
                kept=_read_kept(self._journal.kept.get(line.line)),
            )
        except Exception as error:  # noqa: BLE001 - the edge of one line: a chunk must not be lost for it
            _log.error(
                "A line that passed the check cannot be read; it goes to the error file. Report this as a "
                "defect.",
                key="line_not_readable",
                batch=self.batch,
                line=line.line,
                error=repr(error)[:300],
            )
            what = f"line {line.line}: its body cannot be read ({error!r:.300})"
            return LineError(line.line, line.offset, line.custom_id, "line_not_readable", what)

    @property
    def settled(self) -> bool:
        return (not self.runs and not self._unwritten) or self.failure is not None

    @property
    def disk_full(self) -> bool:
        """Whether results wait in memory for space on the disk."""
        return bool(self._unwritten)

    def finished(self, run: LineRun, result: LineResult) -> None:
        """Put a line's result into the journal (`LineSink`)."""
        record, failed = self._record(run, result)
        self.runs.remove(run)
        self.totals.lines += 1
        self.totals.prompt_tokens += result.prompt_tokens
        self.totals.output_tokens += result.output_tokens
        self.totals.recomputed += run.recomputed
        self._unwritten.append((run.number, record, failed))
        self.write()

    def _record(self, run: LineRun, result: LineResult) -> tuple[bytes, bool]:
        """The line for the output or the error file, and whether it is the latter."""
        if result.error_code is None and result.body is not None:
            record = output_record(
                self.batch,
                run.number,
                run.custom_id,
                status_code=result.status_code or 200,
                request_id=result.request_id,
                body=result.body,
            )
            return record, False
        record = error_record(
            self.batch,
            run.number,
            run.custom_id,
            code=result.error_code or "engine_failed",
            message=f"line {run.number}: {result.error_message}",
            status_code=result.status_code,
            request_id=result.request_id,
        )
        return record, True

    def write(self) -> None:
        """Put what waits into the journal. With a full disk it goes on waiting; call again later."""
        try:
            while self._unwritten:
                number, record, failed = self._unwritten[0]
                self._journal.finish(number, record, failed=failed)
                self._unwritten.pop(0)
            self.full = None
        except DiskFullError as error:
            if self.full is None:
                _log.error(
                    "The disk of a batch is full: its results wait in memory, other batches go on.",
                    key="disk_full",
                    batch=self.batch,
                    error=str(error),
                )
                self.full = error
                self.on_full()
        except BatchFileError as error:
            self.failure = error
        if self.settled:
            self.on_settled()

    def keep(self) -> int:
        """Put the tokens of unfinished lines into the journal, where they are new; returns how many lines."""
        count = 0
        try:
            for run in self.runs:
                kept = run.kept
                if kept is not None and self._written_kept.get(run.number) is not kept:
                    self._journal.keep(run.number, _kept_state(kept, run))
                    self._written_kept[run.number] = kept
                    count += 1
        except BatchFileError as error:
            _log.warning(
                "Tokens of paused lines could not be put on the disk; they are computed again if this worker "
                "dies before it goes on.",
                key="keep_failed",
                batch=self.batch,
                error=str(error),
            )
        return count

    def seal(self) -> None:
        """Flush a settled chunk to the disk as finished. Raises what the journal raises."""
        self._journal.seal()

    def leave(self) -> None:
        """Flush an unsettled chunk to the disk; another claim goes on with it."""
        self.keep()
        try:
            self._journal.sync()
        except BatchFileError as error:
            _log.warning(
                "A paused chunk could not be flushed to the disk; it survives the end of this process, but "
                "perhaps not a loss of power.",
                key="sync_failed",
                batch=self.batch,
                error=str(error),
            )

    def close(self) -> None:
        """Close the journal. What was written stays."""
        self._journal.close()

    @property
    def counts(self) -> tuple[int, int]:
        """Lines with a result and lines with an error, earlier claims included."""
        return self._journal.done, self._journal.failed


def _kept_state(kept: plan.Kept, run: LineRun) -> dict[str, Any]:
    state: dict[str, Any] = {"token_ids": kept.token_ids, "text": kept.text, "body": kept.body}
    if run.shape.prompt_ids is None:
        state["prompt_ids"] = kept.prompt_ids
    return state


def _read_kept(state: dict[str, Any] | None) -> plan.Kept | None:
    """Tokens kept by an earlier claim. What cannot be understood (another version's) is passed over."""
    if state is None:
        return None
    try:
        return msgspec.convert({"prompt_ids": [], **state}, plan.Kept)
    except msgspec.ValidationError:
        return None
