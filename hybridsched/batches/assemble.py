"""Build the output and error files in input order, chunk by chunk, as the chunks are finished.

`state.json` says up to which byte both files are right. It is replaced atomically after the bytes are on the
disk, so a crash at any point is repaired by cutting the files back to it and appending again. Whoever
finishes a chunk may call `advance`; a lock makes it one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from hybridsched.batches.errors import (
    RESUME,
    BatchFileError,
    OutputChangedError,
    ResultsLostError,
    file_errors,
)
from hybridsched.batches.files import FileLock
from hybridsched.batches.journal import (
    RECOVERED,
    Final,
    FinalsInOrder,
    JournalState,
    consolidate,
    journals,
)
from hybridsched.batches.lines import iter_lines
from hybridsched.batches.parts import Merge, PartsDamagedError, begin_parts
from hybridsched.batches.progress import Progress, read_progress, write_progress
from hybridsched.batches.records import error_record
from hybridsched.batches.recover import recover_progress
from hybridsched.batches.targets import Target
from hybridsched.batches.validate import LineError, check_line
from hybridsched.batches.work import WorkFolder

_CHUNKS_AT_ONCE = 32
_LINES_AT_ONCE = 1000


class Assembler:
    """Appends finished chunks of one batch to its output and error files."""

    def __init__(self, work: WorkFolder) -> None:
        self._work = work

    def state(self) -> Progress:
        """How far the files are assembled.

        Raises:
            ResultsLostError: the state file is gone or damaged.
        """
        return read_progress(self._work.folder)

    def advance(self) -> Progress:
        """Append every sealed chunk that follows without a gap. Safe to call at any time, by several workers.

        Raises:
            DiskFullError: no space; nothing is lost, call again when there is.
            OutputChangedError: the output or error file is not what was written to it.
            ResultsLostError: a journal or the state file is not what was written either.
        """
        return self._locked(self._advance)

    def close_out(self, code: str, message: str) -> Progress:
        """End the batch here: finished lines are kept, every other line goes to the error file.

        A line that is bad by itself gets its own error, every other one `code` (batch_expired or
        batch_cancelled) and `message`. Only when no worker runs chunks of the batch any more.

        Raises: see `advance`.
        """

        def run() -> Progress:
            progress = self._advance()
            return progress if progress.at_end else self._close_out(progress, code, message)

        return self._locked(run)

    def restart(self, models: Sequence[str] = ()) -> Progress:
        """Prepare for a new ledger: keep what the journals hold and say where to go on from.

        `models`: the batch is cut into parts by these (see `batches.parts`).

        Where state or journals are gone or damaged it goes on from what is left: the files say themselves how
        far they are, and lines that no journal knows run again. Only for the holder of the folder's exclusive
        lock.

        Raises: see `advance`; of `OutputChangedError` only what the files themselves lack or hold too much.
        """
        progress = self._locked(self._restart)
        consolidate(self._work, from_line=progress.line)
        if not (models or progress.parts):
            return progress
        # After the journals: no chunk that was cut otherwise may be read as one of these.
        progress = msgspec.structs.replace(progress, parts=begin_parts(progress, models))
        write_progress(self._work.folder, progress, self._work.disk)
        return progress

    def _restart(self) -> Progress:
        work = self._work
        work.make_missing()
        progress: Progress | None = None
        with suppress(ResultsLostError):
            progress = self.state()
        if progress is None or not self._same_files(progress):
            progress = recover_progress(work, progress)
            write_progress(work.folder, progress, work.disk)
        try:
            return self._advance()
        except ResultsLostError:
            return self.state()

    def _same_files(self, progress: Progress) -> bool:
        known = ((self._work.output, progress.output_inode), (self._work.errors, progress.error_inode))
        return all(_inode(target) == inode for target, inode in known)

    def _locked(self, run: Callable[[], Progress]) -> Progress:
        lock = FileLock(self._work.folder, "assemble.lock", self._work.disk)
        try:
            lock.take()
            return run()
        finally:
            lock.close()

    def _advance(self) -> Progress:
        progress = self.state()
        if progress.at_end or progress.closed:
            self._forget(progress)
            return progress
        names: dict[int, list[str]] = {}
        for number, _, name in journals(self._work.folder):
            names.setdefault(number, []).append(name)
        if progress.parts:
            progress = self._merge(progress, names)
        while not (progress.at_end or progress.parts):
            chunks = list(self._ready(progress, names))
            if not chunks:
                break
            progress = self._append_chunks(progress, chunks)
        self._forget(progress)
        return progress

    def _merge(self, progress: Progress, names: dict[int, list[str]]) -> Progress:
        """Append what the chunks of all parts hold, as far as no line is missing in between."""
        merge = Merge(lambda number: self._read(names[number]) if number in names else None)
        more = True
        while more and not progress.at_end:
            place, finals = progress, list[Final]()
            for _ in range(_CHUNKS_AT_ONCE):
                try:
                    step = None if place.at_end else merge.step(place)
                except PartsDamagedError as exc:
                    raise ResultsLostError(
                        f"{self._work.path}: {exc}; a journal was damaged, or is of another run. {RESUME}"
                    ) from exc
                if step is None:
                    more = False
                    break
                place = step[0]
                finals += step[1]
            if place is not progress:
                progress = self._append(place, finals)
        return progress

    def _read(self, names: Iterable[str]) -> JournalState:
        state = JournalState()
        for name in names:
            state.read(self._work.folder, name)
        return state

    def _ready(self, progress: Progress, names: dict[int, list[str]]) -> Iterator[JournalState]:
        """Sealed chunks that follow, in order, a bounded number of them."""
        offset = progress.offset
        for number in range(progress.next_chunk, progress.next_chunk + _CHUNKS_AT_ONCE):
            state = self._read(names.get(number, ()))
            if not state.sealed or state.span is None:
                return
            if state.span.start != offset:
                raise ResultsLostError(
                    f"{self._work.path}: chunk {number} begins at byte {state.span.start}, expected "
                    f"{offset}; its journal is of another run. {RESUME}"
                )
            yield state
            offset = state.span.end

    def _append_chunks(self, progress: Progress, chunks: list[JournalState]) -> Progress:
        finals: list[Final] = []
        span = None
        for chunk in chunks:
            span = chunk.span
            if span is None or len(chunk.finals) != span.lines:
                raise ResultsLostError(
                    f"{self._work.path}: a finished chunk lacks lines; its journal was damaged. {RESUME}"
                )
            finals.extend(chunk.finals[line] for line in sorted(chunk.finals))
        if span is None:
            return progress
        return self._append(
            msgspec.structs.replace(
                progress,
                next_chunk=progress.next_chunk + len(chunks),
                offset=span.end,
                line=span.next_line,
                at_end=span.at_end,
            ),
            finals,
        )

    def _append(self, progress: Progress, finals: Iterable[Final]) -> Progress:
        """Append results to both files, and record the places in `progress` as reached."""
        out: list[bytes] = []
        err: list[bytes] = []
        for final in finals:
            (err if final.failed else out).append(final.record + b"\n")
        work = self._work
        output_bytes = self._put(work.output, progress.output_inode, progress.output_bytes, b"".join(out))
        error_bytes = self._put(work.errors, progress.error_inode, progress.error_bytes, b"".join(err))
        progress = msgspec.structs.replace(
            progress,
            done=progress.done + len(out),
            failed=progress.failed + len(err),
            output_bytes=output_bytes,
            error_bytes=error_bytes,
        )
        write_progress(work.folder, progress, work.disk)
        return progress

    def _put(self, target: Target, inode: int, length: int, data: bytes) -> int:
        """Cut a file back to `length` bytes, append `data`, flush. Returns the new length."""
        disk, path = self._work.disk, target.path
        try:
            fd = disk.open(target.folder, target.name, os.O_WRONLY)
        except BatchFileError as exc:
            if isinstance(exc.__cause__, FileNotFoundError):
                raise OutputChangedError(f"{path} is gone: somebody has removed it. {_ANEW}") from exc
            raise
        try:
            with file_errors("cannot read", path):
                found = os.fstat(fd)
            if inode not in (0, found.st_ino):
                raise OutputChangedError(
                    f"{path} is another file than the batch has made: somebody has replaced it. {_ANEW}"
                )
            if found.st_size < length:
                raise OutputChangedError(
                    f"{path} has {found.st_size:,} bytes, {length:,} were written to it: somebody has "
                    f"changed it. {_ANEW}"
                )
            if found.st_size > length:
                disk.truncate(fd, length, path)
            if data:
                os.lseek(fd, length, os.SEEK_SET)
                disk.write(fd, data, path)
            if data or found.st_size > length:
                disk.fsync(fd, path)
        finally:
            os.close(fd)
        return length + len(data)

    def _close_out(self, progress: Progress, code: str, message: str) -> Progress:
        work = self._work
        held = FinalsInOrder(work.folder)
        piece: list[Final] = []
        cut = progress.cut
        with work.open_input() as file:
            for raw in iter_lines(file, start=progress.offset, first_line=progress.line):
                final = held.take(raw.number)
                if final is None:
                    verdict = check_line(raw, duplicates=work.index.duplicates)
                    what = (
                        (verdict.code, verdict.message)
                        if isinstance(verdict, LineError)
                        else (code, f"line {raw.number}: {message}")
                    )
                    cut += not isinstance(verdict, LineError)
                    final = Final(
                        True,
                        error_record(
                            work.files.batch_id, raw.number, verdict.custom_id, code=what[0], message=what[1]
                        ),
                    )
                piece.append(final)
                if len(piece) >= _LINES_AT_ONCE:
                    place = msgspec.structs.replace(
                        progress, offset=raw.offset + raw.length, line=raw.number + 1, closed=code, cut=cut
                    )
                    progress = self._append(place, piece)
                    piece = []
        progress = self._append(
            msgspec.structs.replace(progress, offset=work.index.size, closed=code, cut=cut, at_end=True),
            piece,
        )
        self._forget(progress)
        return progress

    def _forget(self, progress: Progress) -> None:
        """Remove journals of chunks that are in the files."""
        for number, _, name in journals(self._work.folder):
            if progress.at_end or progress.holds(number):
                self._work.disk.unlink(self._work.folder, name)
        if progress.at_end:
            self._work.disk.unlink(self._work.folder, RECOVERED)


_ANEW = (
    "Put it back with all its content and give the same command again, or remove the work folder and start "
    "the batch anew"
)


def _inode(target: Target) -> int:
    with file_errors("cannot read", target.path), target.folder.read_file(target.name) as file:
        return os.fstat(file.fileno()).st_ino
