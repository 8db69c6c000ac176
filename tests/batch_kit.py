"""Batches for tests: inputs, a pretend worker on disk, and a disk that fails when told."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import ChunkSpan, Cursor, cut_chunk
from hybridsched.batches.errors import DiskFullError
from hybridsched.batches.files import Disk
from hybridsched.batches.folder import Folder
from hybridsched.batches.journal import ChunkJournal
from hybridsched.batches.layout import plan_files
from hybridsched.batches.records import output_record
from hybridsched.batches.validate import BatchLine, read_span
from hybridsched.batches.work import WorkFolder


class CrashError(BaseException):
    """The process dies here."""


class FaultyDisk(Disk):
    """Counts the calls that change something, and fails at one of them.

    `kind` "crash": nothing of that call happens and all after it is dead, as after kill -9 (of a write, half
    happens). "full": the call fails with ENOSPC (a write after half of it), later ones work.
    """

    def __init__(self, fail_at: int | None = None, kind: str = "crash") -> None:
        self.calls = 0
        self.fail_at = fail_at
        self.kind = kind
        self.dead = False

    def _step(self, partial: Callable[[], object] = lambda: None) -> None:
        if self.dead:
            raise CrashError
        self.calls += 1
        if self.calls == self.fail_at:
            partial()
            if self.kind == "full":
                raise DiskFullError("no space left (test)") from OSError(errno.ENOSPC, "no space left")
            self.dead = True
            raise CrashError

    def open(self, folder: Folder, name: str, flags: int) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            self._step()
        return super().open(folder, name, flags)

    def write(self, fd: int, data: bytes, path: Path) -> None:
        self._step(lambda: super(FaultyDisk, self).write(fd, data[: len(data) // 2], path))
        super().write(fd, data, path)

    def fsync(self, fd: int, path: Path) -> None:
        self._step()

    def truncate(self, fd: int, length: int, path: Path) -> None:
        self._step()
        super().truncate(fd, length, path)

    def replace(self, folder: Folder, source: str, target: str) -> None:
        self._step()
        super().replace(folder, source, target)

    def unlink(self, folder: Folder, name: str) -> None:
        self._step()
        super().unlink(folder, name)

    def link(self, folder: Folder, name: str, text: str) -> None:
        self._step()
        super().link(folder, name, text)

    def mkdir(self, folder: Folder, name: str) -> None:
        self._step()
        super().mkdir(folder, name)

    def rmdir(self, folder: Folder, name: str) -> None:
        self._step()
        super().rmdir(folder, name)

    def sync_folder(self, folder: Folder) -> None:
        self._step()


def write_input(
    path: Path, lines: int, *, bad: frozenset[int] = frozenset(), blank: bool = True
) -> list[str]:
    """A batch file; returns its custom_ids in order. `bad` lines have a wrong url."""
    ids = [f"id-{i}" for i in range(lines)]
    with path.open("w", encoding="utf-8", newline="") as file:
        for i, name in enumerate(ids):
            body = {"model": "m", "prompt": [1] * 8, "max_tokens": 8}
            url = "/nope" if i in bad else "/v1/completions"
            file.write(json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}))
            file.write("\n\n" if blank and i % 3 == 0 else "\n")
    return ids


def start(source: Path, disk: Disk | None = None) -> WorkFolder:
    return WorkFolder.create(plan_files(source, "batch_t"), disk=disk or Disk())


def cut_all(work: WorkFolder, max_lines: int) -> list[ChunkSpan]:
    """Every chunk from where the output is assembled to."""
    state = Assembler(work).state()
    cursor = Cursor(state.offset, state.line)
    spans: list[ChunkSpan] = []
    with work.open_input() as file:
        while span := cut_chunk(
            file, cursor, max_tokens=10**9, max_lines=max_lines, duplicates=work.index.duplicates
        ):
            spans.append(span)
            cursor = Cursor(span.end, span.next_line)
    return spans


def answer(work: WorkFolder, line: BatchLine, text: str = "ok") -> bytes:
    return output_record(
        work.files.batch_id, line.line, line.custom_id, status_code=200, request_id="r", body={"text": text}
    )


def run_chunk(
    work: WorkFolder,
    number: int,
    fence: int,
    span: ChunkSpan,
    *,
    ran: list[int] | None = None,
    upto: int = 10**9,
) -> None:
    """Run the lines of a chunk that are not final yet, at most `upto` of them; seal it when all are."""
    journal = ChunkJournal.open(work, number, fence, span)
    try:
        with work.open_input() as file:
            for verdict in read_span(file, span.read_from, span.end, span.first_line, work.index.duplicates):
                if verdict.line in journal.finished:
                    continue
                if upto <= 0:
                    return
                upto -= 1
                if isinstance(verdict, BatchLine):
                    journal.finish(verdict.line, answer(work, verdict))
                else:
                    journal.finish_error(verdict)
                if ran is not None:
                    ran.append(verdict.line)
        journal.seal()
    finally:
        journal.close()


def run_local(work: WorkFolder, *, max_lines: int = 4, ran: list[int] | None = None) -> None:
    """A whole run without a store, as after any crash: restart, every chunk, assemble."""
    assembler = Assembler(work)
    progress = assembler.restart()
    for number, span in enumerate(cut_all(work, max_lines), progress.next_chunk):
        run_chunk(work, number, 1, span, ran=ran)
        assembler.advance()


def read_ids(path: str | Path) -> list[str]:
    """custom_ids of an output or error file; fails on a line that is no JSON."""
    file = Path(path)
    return [json.loads(text)["custom_id"] for text in file.read_text().splitlines()] if file.exists() else []
