"""Build the output and error files in input order, chunk by chunk, as the chunks are finished.

`state.json` says up to which byte both files are right. It is replaced atomically after the bytes are on the
disk, so a crash at any point is repaired by cutting the files back to it and appending again. Whoever
finishes a chunk may call `advance`; a lock makes it one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from hybridsched.batches.files import BatchFileError, FileLock, OutputChangedError, file_errors
from hybridsched.batches.journal import (
    RECOVERED,
    Final,
    JournalState,
    consolidate,
    journal_paths,
    read_all,
)
from hybridsched.batches.lines import iter_lines
from hybridsched.batches.records import error_record
from hybridsched.batches.validate import LineError, check_line
from hybridsched.batches.work import WorkFolder

STATE = "state.json"
_CHUNKS_AT_ONCE = 32
_LINES_AT_ONCE = 1000


class Progress(msgspec.Struct, frozen=True):
    """How far the output and error files are assembled."""

    next_chunk: int = 0
    """Number of the next chunk to append; all before it are in the files."""
    offset: int = 0
    """Byte of the input up to which lines are in the files."""
    line: int = 1
    """Physical number of the line at `offset`."""
    done: int = 0
    """Lines in the output file."""
    failed: int = 0
    """Lines in the error file."""
    output_bytes: int = 0
    error_bytes: int = 0
    closed: str = ""
    """batch_expired or batch_cancelled once the rest was reported as that."""
    at_end: bool = False
    """Whether every line is in one of the files."""


class Assembler:
    """Appends finished chunks of one batch to its output and error files."""

    def __init__(self, work: WorkFolder) -> None:
        self._work = work
        self._state_path = work.path / STATE

    def state(self) -> Progress:
        """How far the files are assembled.

        Raises:
            BatchFileError: the state file is damaged.
        """
        try:
            return msgspec.json.decode(self._state_path.read_bytes(), type=Progress)
        except FileNotFoundError:
            return Progress()
        except (OSError, msgspec.MsgspecError) as exc:
            raise BatchFileError(f"{self._state_path} cannot be read: {exc}") from exc

    def advance(self) -> Progress:
        """Append every sealed chunk that follows without a gap. Safe to call at any time, by several workers.

        Raises:
            DiskFullError: no space; nothing is lost, call again when there is.
            OutputChangedError: the output or error file is shorter than what was written to it.
            BatchFileError: a journal does not follow the chunk before it.
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

    def restart(self) -> Progress:
        """Prepare for a new ledger: keep what the journals hold and say where to go on from.

        Only for the holder of the folder's exclusive lock.
        """
        progress = self.advance()
        consolidate(self._work, from_line=progress.line)
        return progress

    def _locked(self, run: Callable[[], Progress]) -> Progress:
        lock = FileLock(self._work.path / "assemble.lock", self._work.disk)
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
        paths: dict[int, list[Path]] = {}
        for number, _, path in journal_paths(self._work.path):
            paths.setdefault(number, []).append(path)
        while not progress.at_end:
            chunks = list(self._ready(progress, paths))
            if not chunks:
                break
            progress = self._append_chunks(progress, chunks)
        self._forget(progress)
        return progress

    def _ready(self, progress: Progress, paths: dict[int, list[Path]]) -> Iterator[JournalState]:
        """Sealed chunks that follow, in order, a bounded number of them."""
        offset = progress.offset
        for number in range(progress.next_chunk, progress.next_chunk + _CHUNKS_AT_ONCE):
            state = JournalState()
            for path in paths.get(number, ()):
                state.read(path)
            if not state.sealed or state.span is None:
                return
            if state.span.start != offset:
                raise BatchFileError(
                    f"{self._work.path}: chunk {number} begins at byte {state.span.start}, expected "
                    f"{offset}; its journal is of another run"
                )
            yield state
            offset = state.span.end

    def _append_chunks(self, progress: Progress, chunks: list[JournalState]) -> Progress:
        finals: list[Final] = []
        span = None
        for chunk in chunks:
            span = chunk.span
            if span is None or len(chunk.finals) != span.lines:
                raise BatchFileError(
                    f"{self._work.path}: a sealed chunk lacks lines; its journal was damaged"
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
        files = self._work.files
        output_bytes = self._put(Path(files.output), progress.output_bytes, b"".join(out))
        error_bytes = self._put(Path(files.errors), progress.error_bytes, b"".join(err))
        progress = msgspec.structs.replace(
            progress,
            done=progress.done + len(out),
            failed=progress.failed + len(err),
            output_bytes=output_bytes,
            error_bytes=error_bytes,
        )
        self._work.disk.write_whole(self._state_path, msgspec.json.encode(progress))
        return progress

    def _put(self, path: Path, length: int, data: bytes) -> int:
        """Cut `path` back to `length` bytes, append `data`, flush. Returns the new length."""
        disk = self._work.disk
        new = length == 0 and not path.exists()
        fd = self._work.open_file(path, os.O_WRONLY | os.O_CREAT)
        try:
            with file_errors("cannot read", path):
                found = os.fstat(fd).st_size
            if found < length:
                raise OutputChangedError(
                    f"{path} has {found:,} bytes, {length:,} were written to it: somebody has changed it. "
                    "Put it back, or remove the work folder and start the batch anew"
                )
            if found > length:
                disk.truncate(fd, length, path)
            if data:
                os.lseek(fd, length, os.SEEK_SET)
                disk.write(fd, data, path)
            if data or found > length:
                disk.fsync(fd, path)
        finally:
            os.close(fd)
        if new:
            disk.sync_folder(path.parent)
        return length + len(data)

    def _close_out(self, progress: Progress, code: str, message: str) -> Progress:
        work = self._work
        held = read_all(work.path)
        piece: list[Final] = []
        with work.open_input() as file:
            for raw in iter_lines(file, start=progress.offset, first_line=progress.line):
                final = held.finals.get(raw.number)
                if final is None:
                    verdict = check_line(raw, duplicates=work.index.duplicates)
                    what = (
                        (verdict.code, verdict.message)
                        if isinstance(verdict, LineError)
                        else (code, f"line {raw.number}: {message}")
                    )
                    final = Final(
                        True,
                        error_record(
                            work.files.batch_id, raw.number, verdict.custom_id, code=what[0], message=what[1]
                        ),
                    )
                piece.append(final)
                if len(piece) >= _LINES_AT_ONCE:
                    place = msgspec.structs.replace(
                        progress, offset=raw.offset + raw.length, line=raw.number + 1, closed=code
                    )
                    progress = self._append(place, piece)
                    piece = []
        progress = self._append(
            msgspec.structs.replace(progress, offset=work.index.size, closed=code, at_end=True), piece
        )
        self._forget(progress)
        return progress

    def _forget(self, progress: Progress) -> None:
        """Remove journals of chunks that are in the files."""
        for number, _, path in journal_paths(self._work.path):
            if progress.at_end or number < progress.next_chunk:
                self._work.disk.unlink(path)
        if progress.at_end:
            self._work.disk.unlink(self._work.path / RECOVERED)
