"""Cut the next chunk off a batch file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import BinaryIO

import msgspec

from hybridsched.batches.lines import iter_lines
from hybridsched.batches.validate import BatchLine, LineError, check_line

Owns = Callable[[BatchLine | LineError], bool]
"""Says of a line whether it is of a chunk in whose span it stands."""

FARTHEST_BYTES = 32 * 1024 * 1024
"""A chunk of one model reaches over the lines of the others this far at most: it is read under its lease."""


class Cursor(msgspec.Struct, frozen=True):
    """A place between two lines."""

    offset: int = 0
    """Byte offset of the next line."""
    line: int = 1
    """Its physical line number."""


class ChunkSpan(msgspec.Struct, frozen=True):
    """The lines of one chunk. Spans of one file tile it: each begins where the one before ended. In a batch
    with parts (`batches.parts`) those of each part do, and lines of other parts may stand between its own."""

    start: int
    """Byte offset of the first line."""
    end: int
    """Byte offset just past the last line and the blank lines after it."""
    first_line: int
    lines: int
    """Lines that are not blank, bad ones included."""
    tokens: int = 0
    """Estimated prompt and output tokens."""
    next_line: int = 0
    """Physical number of the line at `end`."""
    at_end: bool = False
    """Whether nothing but blank lines, or lines of other parts, follows."""
    skip: int = 0
    """Bytes from `start` to the first line of the chunk."""

    @property
    def read_from(self) -> int:
        """Byte offset of line `first_line`."""
        return self.start + self.skip


def cut_chunk(
    file: BinaryIO,
    cursor: Cursor,
    *,
    max_tokens: int,
    max_lines: int,
    min_lines: int = 1,
    duplicates: Mapping[int, int] | None = None,
    owns: Owns | None = None,
) -> ChunkSpan | None:
    """The next chunk from `cursor` on: at most `max_lines` lines that are not blank and, beyond the first
    `min_lines`, at most `max_tokens` estimated tokens. None when only blank lines are left.

    A bad line counts as a line without tokens. With `owns`, only the lines that it is true for are of the
    chunk. Where none of these is left there is one without lines up to the end, in the place of None.
    """
    if max_lines < 1 or min_lines < 1:
        raise ValueError(f"a chunk holds at least one line; given max {max_lines}, min {min_lines}")
    lines = tokens = 0
    first = number = 0
    begin = cursor.offset
    for raw in iter_lines(file, start=cursor.offset, first_line=cursor.line):
        if owns is not None and lines and raw.offset - begin >= FARTHEST_BYTES:
            return ChunkSpan(
                cursor.offset, raw.offset, first, lines, tokens, raw.number, skip=begin - cursor.offset
            )
        number = raw.number
        verdict = check_line(raw, duplicates=duplicates)
        if owns is not None and not owns(verdict):
            continue
        cost = verdict.tokens if isinstance(verdict, BatchLine) else 0
        full = lines >= max_lines or (lines >= min_lines and tokens + cost > max_tokens)
        if lines and full:
            return ChunkSpan(
                cursor.offset, raw.offset, first, lines, tokens, raw.number, skip=begin - cursor.offset
            )
        if not lines:
            first, begin = raw.number, raw.offset
        lines += 1
        tokens += cost
    if not lines and owns is None:
        return None
    end = file.seek(0, os.SEEK_END)
    return ChunkSpan(
        cursor.offset,
        end,
        first or cursor.line,
        lines,
        tokens,
        number + 1 if number else cursor.line,
        at_end=True,
        skip=begin - cursor.offset,
    )
