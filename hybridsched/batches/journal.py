"""The journal of one chunk: finished lines and kept partial tokens, safe against a kill at any byte.

Each claim of a chunk (a fence) appends to a file of its own, so two workers never write to the same one, even
when a worker that was thought dead wakes up again; a reader merges the files of a chunk in the order of their
fences, and the first final record of a line counts. Every record is one JSON object on one line, written by
one write: a record that was cut short does not parse and is passed over.

Durability: a record is in the page cache when `finish` or `keep` returns, which survives the death of any
process; `seal` and `sync` flush to the disk, so a finished chunk and a paused one survive the loss of power.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from hybridsched.batches.cut import ChunkSpan
from hybridsched.batches.errors import BatchFileError, DiskFullError, file_errors
from hybridsched.batches.folder import Folder
from hybridsched.batches.records import error_record
from hybridsched.batches.validate import LineError
from hybridsched.batches.work import WorkFolder

RECOVERED = "recovered.jsonl"
_NAME = re.compile(r"chunk-(\d+)\.(\d+)\.jsonl")


class Final(msgspec.Struct, frozen=True):
    """A finished line."""

    failed: bool
    """Whether it goes to the error file."""
    record: bytes
    """The line to write there, without newline."""


class _Entry(msgspec.Struct, omit_defaults=True):
    """One line of a journal; which fields are there says what it is."""

    line: int = 0
    out: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    err: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    kept: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    span: ChunkSpan | None = None
    sealed: bool = False


_decoder = msgspec.json.Decoder(_Entry)
_encode = msgspec.json.Encoder().encode


class JournalState:
    """What the journals of a chunk, or of several, say together."""

    def __init__(self) -> None:
        self.span: ChunkSpan | None = None
        self.finals: dict[int, Final] = {}
        self.kept: dict[int, msgspec.Raw] = {}
        self.sealed = False

    def read(self, folder: Folder, name: str) -> None:
        """Merge one file into this; one that has gone is as an empty one."""
        path = folder.path / name
        with file_errors("cannot read", path):
            try:
                opened = folder.read_file(name)
            except FileNotFoundError:
                return
        with file_errors("cannot read", path), opened as file:
            for text in file:
                if not text.endswith(b"\n"):
                    return  # a record that was cut short, or is being written
                try:
                    entry = _decoder.decode(text)
                except (msgspec.MsgspecError, RecursionError):
                    continue
                self._take(entry)

    def _take(self, entry: _Entry) -> None:
        if entry.span is not None:
            self.span = entry.span
        elif entry.sealed:
            self.sealed = True
        elif entry.out is not msgspec.UNSET:
            self.finals.setdefault(entry.line, Final(False, bytes(entry.out)))
        elif entry.err is not msgspec.UNSET:
            self.finals.setdefault(entry.line, Final(True, bytes(entry.err)))
        elif entry.kept is not msgspec.UNSET:
            self.kept[entry.line] = msgspec.Raw(bytes(entry.kept))


def journals(folder: Folder) -> list[tuple[int, int, str]]:
    """(chunk, fence, name) of every journal in a work folder, in that order."""
    with file_errors("cannot read the folder", folder.path):
        names = folder.names()
    named = ((_NAME.fullmatch(name), name) for name in names)
    return sorted((int(match[1]), int(match[2]), name) for match, name in named if match)


def read_chunk(folder: Folder, chunk_no: int) -> JournalState:
    """What the journals of one chunk say."""
    state = JournalState()
    for number, _, name in journals(folder):
        if number == chunk_no:
            state.read(folder, name)
    return state


def read_all(folder: Folder) -> JournalState:
    """What every journal in the folder says, recovered ones first."""
    state = JournalState()
    state.read(folder, RECOVERED)
    for _, _, name in journals(folder):
        state.read(folder, name)
    return state


class FinalsInOrder:
    """The finished lines of a folder's journals, asked for in the order of the lines.

    A journal is read when its first line is asked for, and a line forgotten with its answer: results of one
    part may have piled up behind a line of another.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        state = JournalState()
        state.read(folder, RECOVERED)
        self._finals = state.finals
        named = journals(folder)
        begins = [(_first_line(folder, name), place, name) for place, (_, _, name) in enumerate(named)]
        self._ahead = deque(sorted(begins))

    def take(self, line: int) -> Final | None:
        """What the journals say of a line that is behind every one asked for so far."""
        while self._ahead and self._ahead[0][0] <= line:
            _, _, name = self._ahead.popleft()
            state = JournalState()
            state.read(self._folder, name)
            for number, final in state.finals.items():
                if number >= line:
                    self._finals.setdefault(number, final)
        return self._finals.pop(line, None)


def _first_line(folder: Folder, name: str) -> int:
    """The first line of a journal's chunk; 0 when it does not say."""
    path = folder.path / name
    with file_errors("cannot read", path):
        try:
            opened = folder.read_file(name)
        except FileNotFoundError:
            return 0
    with file_errors("cannot read", path), opened as file:
        text = file.readline()
    try:
        span = _decoder.decode(text).span
    except (msgspec.MsgspecError, RecursionError):
        return 0
    return 0 if span is None else span.first_line


def consolidate(work: WorkFolder, *, from_line: int) -> None:
    """Gather all journals into `recovered.jsonl`, for a new ledger that will cut its chunks anew.

    Only for the holder of the folder's exclusive lock. Lines before `from_line` are assembled and dropped.
    """
    state = read_all(work.folder)
    lines = b"".join(_recovered(state, from_line))
    if lines or work.folder.exists(RECOVERED):
        work.disk.write_whole(work.folder, RECOVERED, lines)
    for _, _, name in journals(work.folder):
        work.disk.unlink(work.folder, name)


def _recovered(state: JournalState, from_line: int) -> Iterator[bytes]:
    for line, final in state.finals.items():
        if line >= from_line:
            yield _final_entry(line, final) + b"\n"
    for line, kept in state.kept.items():
        if line >= from_line and line not in state.finals:
            yield _encode(_Entry(line=line, kept=kept)) + b"\n"


def _final_entry(line: int, final: Final) -> bytes:
    record = msgspec.Raw(final.record)
    return _encode(_Entry(line=line, err=record) if final.failed else _Entry(line=line, out=record))


class ChunkJournal:
    """The journal that one claim of a chunk writes."""

    def __init__(
        self,
        work: WorkFolder,
        chunk_no: int,
        fence: int,
        span: ChunkSpan,
        fd: int,
        lines: Collection[int] | None,
    ) -> None:
        self._work = work
        self._path = work.path / _file_name(chunk_no, fence)
        self._span = span
        self._lines = lines
        self._fd: int | None = fd
        self._torn = False
        self.finished: set[int] = set()
        """Numbers of the lines that are final."""
        self.kept: dict[int, dict[str, Any]] = {}
        """Newest kept state of lines that are not final."""
        self.done = 0
        """Lines of the chunk that end in the output file."""
        self.failed = 0
        """Lines of the chunk that end in the error file."""

    @classmethod
    def open(
        cls,
        work: WorkFolder,
        chunk_no: int,
        fence: int,
        span: ChunkSpan,
        *,
        lines: Collection[int] | None = None,
    ) -> ChunkJournal:
        """Begin the journal of a claim and take over what earlier claims have left.

        `lines`: numbers of the chunk's lines, where they are not all those of its span.

        Raises:
            DiskFullError: no space.
            BatchFileError: the file is there already: a fence is used once.
        """
        name = _file_name(chunk_no, fence)
        fd = work.disk.open(work.folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        journal = cls(work, chunk_no, fence, span, fd, lines)
        try:
            journal._write(_encode(_Entry(span=span)))
            journal._take_over(chunk_no)
        except DiskFullError:
            # It holds nothing that is not elsewhere too, and this claim will be tried again.
            journal.close()
            work.disk.unlink(work.folder, name)
            raise
        except BaseException:
            journal.close()
            raise
        return journal

    def _take_over(self, chunk_no: int) -> None:
        earlier = read_chunk(self._work.folder, chunk_no)
        older = JournalState()
        older.read(self._work.folder, RECOVERED)
        for line, final in older.finals.items():
            if self._mine(line) and line not in earlier.finals:
                self._write(_final_entry(line, final))
                earlier.finals[line] = final
        for line, kept in older.kept.items():
            if self._mine(line):
                earlier.kept.setdefault(line, kept)
        for line, final in earlier.finals.items():
            if self._mine(line):
                self._count(line, failed=final.failed)
        for line, kept in earlier.kept.items():
            if self._mine(line) and line not in self.finished:
                # What cannot be read is computed again.
                with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                    self.kept[line] = msgspec.json.decode(kept, type=dict[str, Any])

    def finish(self, line: int, record: bytes, *, failed: bool = False) -> None:
        """Put the result of a line down for good; `record` is a line of the error file if `failed`, else of
        the output file (see `records`).

        A line that is final already keeps its first result.

        Raises:
            DiskFullError: the line is not final; what was finished before is intact.
            ValueError: the line is not of this chunk.
        """
        if not self._mine(line):
            raise ValueError(f"line {line} is not of the chunk of lines from {self._span.first_line} on")
        if line in self.finished:
            return
        self._write(_final_entry(line, Final(failed, record)))
        self._count(line, failed=failed)

    def finish_error(self, error: LineError) -> None:
        """The same for a line that cannot run."""
        record = error_record(
            self._work.files.batch_id, error.line, error.custom_id, code=error.code, message=error.message
        )
        self.finish(error.line, record, failed=True)

    def keep(self, line: int, state: dict[str, Any]) -> None:
        """Put down how far an unfinished line has come (JSON of the caller's own), to go on from later."""
        if not self._mine(line):
            raise ValueError(f"line {line} is not of the chunk of lines from {self._span.first_line} on")
        if line not in self.finished:
            self._write(_encode(_Entry(line=line, kept=msgspec.Raw(_encode(state)))))
            self.kept[line] = state

    def sync(self) -> None:
        """Flush to the disk: at a pause."""
        self._work.disk.fsync(self._open_fd(), self._path)

    def seal(self) -> None:
        """Declare the chunk finished and flush it to the disk. Only after this may it be acknowledged.

        Raises:
            ValueError: a line has no result yet.
        """
        if len(self.finished) != self._span.lines:
            raise ValueError(
                f"the chunk from line {self._span.first_line} on has {self._span.lines} lines, "
                f"{len(self.finished)} are finished"
            )
        self._write(_encode(_Entry(sealed=True)))
        self.sync()
        self._work.disk.sync_folder(self._work.folder)

    def close(self) -> None:
        """Close the file. What was written stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _mine(self, line: int) -> bool:
        if self._lines is not None:
            return line in self._lines
        return self._span.first_line <= line < self._span.next_line

    def _count(self, line: int, *, failed: bool) -> None:
        self.finished.add(line)
        self.kept.pop(line, None)
        if failed:
            self.failed += 1
        else:
            self.done += 1

    def _open_fd(self) -> int:
        if self._fd is None:
            raise BatchFileError(f"{self._path} is closed")
        return self._fd

    def _write(self, entry: bytes) -> None:
        data = (b"\n" if self._torn else b"") + entry + b"\n"
        self._torn = True
        self._work.disk.write(self._open_fd(), data, self._path)
        self._torn = False


def _file_name(chunk_no: int, fence: int) -> str:
    return f"chunk-{chunk_no:08d}.{fence}.jsonl"
