"""Read a JSONL file of any size line by line, in memory bounded by its longest line.

The file is read as bytes: a byte-order mark, CRLF, blank lines, bytes that are not UTF-8, NUL and a last line
without newline are all met in practice, and one bad line must not make its neighbours unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line that is read into memory. Longer ones are skipped and reported; OpenAI limits a whole file to
200 MB, and a prompt of a million tokens is about 4 MB."""


class RawLine(NamedTuple):
    """One line that is not blank, as it stands in the file."""

    number: int
    """Physical line number from 1; blank lines count."""
    offset: int
    """Byte offset of its first byte."""
    length: int
    """Bytes up to the start of the next line, newline included."""
    data: bytes | None
    """The line without byte-order mark and line end; None when it is longer than the limit."""


def iter_lines(
    file: BinaryIO,
    *,
    start: int = 0,
    end: int | None = None,
    first_line: int = 1,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[RawLine]:
    """Yield the lines of `file` that are not blank, from byte `start` up to byte `end` (None: to the end).

    `start` must be the beginning of a line, and `first_line` its number. A line that begins before `end` is
    yielded whole.
    """
    file.seek(start)
    offset, number = start, first_line
    readline = file.readline
    limit = max_line_bytes + 1
    while end is None or offset < end:
        data = readline(limit)
        if not data:
            return
        length = len(data)
        if length == limit and not data.endswith(b"\n"):
            length += _skip_line(file)
            yield RawLine(number, offset, length, None)
        else:
            if offset == 0 and data.startswith(BOM):
                data = data[len(BOM) :]
            text = data.strip(b" \t\r\n")
            if text:
                yield RawLine(number, offset, length, text)
        offset += length
        number += 1


def _skip_line(file: BinaryIO) -> int:
    """Read on to the end of the current line without keeping it. Returns the number of bytes skipped."""
    skipped = 0
    while piece := file.readline(1 << 20):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
