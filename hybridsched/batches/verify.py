"""Check a finished batch: every line of the input exactly once, in order, in one of the two files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hybridsched.batches.errors import file_errors
from hybridsched.batches.layout import open_input
from hybridsched.batches.lines import iter_lines
from hybridsched.batches.validate import check_line


class FileCheck(msgspec.Struct, frozen=True):
    """What a comparison of input, output and error file found."""

    lines: int = 0
    """Lines of the input that are not blank."""
    done: int = 0
    """Of them, lines with a result in the output file."""
    failed: int = 0
    """Of them, lines in the error file."""
    missing: int = 0
    """Of them, lines in neither."""
    extra: int = 0
    """Results that answer no line of the input, or a line that was answered before (duplicates)."""

    @property
    def exact(self) -> bool:
        """Whether every line is there exactly once."""
        return self.missing == 0 and self.extra == 0


class _ErrorLine(msgspec.Struct):
    line: int = 0


class _Answer(msgspec.Struct):
    custom_id: str | None = None
    error: _ErrorLine | None = None


def check_files(source: str | Path, output: str | Path, errors: str | Path) -> FileCheck:
    """Walk the three files side by side, in constant memory.

    A missing output or error file counts as an empty one.

    Raises:
        InputUnreadableError: the input cannot be read.
    """
    lines = done = failed = missing = extra = 0
    results = _results(Path(output))
    faults = _faults(Path(errors))
    result = next(results, None)
    fault = next(faults, None)
    with open_input(source) as file:
        for raw in iter_lines(file):
            lines += 1
            while fault is not None and fault < raw.number:
                extra += 1
                fault = next(faults, None)
            if fault == raw.number:
                failed += 1
                fault = next(faults, None)
            elif result is not None and result == check_line(raw).custom_id:
                done += 1
                result = next(results, None)
            else:
                missing += 1
    extra += (fault is not None) + sum(1 for _ in faults)
    extra += (result is not None) + sum(1 for _ in results)
    return FileCheck(lines, done, failed, missing, extra)


def _results(path: Path) -> Iterator[str]:
    for answer in _answers(path):
        yield answer.custom_id or ""


def _faults(path: Path) -> Iterator[int]:
    for answer in _answers(path):
        yield answer.error.line if answer.error is not None else 0


def _answers(path: Path) -> Iterator[_Answer]:
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(_Answer)
    with file_errors("cannot read", path), path.open("rb") as file:
        for text in file:
            if text.strip():
                try:
                    yield decoder.decode(text)
                except (msgspec.MsgspecError, RecursionError):
                    yield _Answer()
