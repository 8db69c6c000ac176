"""Judge a whole input once, when a batch is submitted: counts, an estimate of its tokens, and duplicate ids.

A duplicate can only be seen with the whole file in view; the chunks then only need the short list of them.
Memory: 24 bytes a line (a 64-bit hash, an offset and a line number in flat arrays). Equal hashes are
confirmed by reading the lines again.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from hybridsched.batches.lines import RawLine, iter_lines
from hybridsched.batches.validate import BatchLine, LineError, check_line

_BUCKETS = 64
_MAX_MODELS = 32
_MAX_SAMPLES = 20
_REPORT_EVERY = 16_384


class InputIndex(msgspec.Struct, frozen=True):
    """What one pass over the input found."""

    size: int
    """Bytes."""
    lines: int
    """Lines that are not blank; each ends once in the output or the error file."""
    valid: int
    invalid: int
    """Lines that end in the error file without reaching an engine, duplicates included."""
    tokens: int
    """Estimated prompt and output tokens of the valid lines."""
    stripped: int = 0
    """Valid lines that had scheduling fields, which are removed."""
    models: dict[str, int] = {}
    """Valid lines by the model they name; at most 32 names are kept."""
    model_tokens: dict[str, int] = {}
    """Estimated tokens of those lines. An input that an earlier version has judged has none."""
    duplicates: dict[int, int] = {}
    """Line number of each line whose custom_id is taken -> line number of the first with that id."""
    samples: tuple[LineError, ...] = ()
    """The first 20 bad lines."""


def scan(file: BinaryIO, *, progress: Callable[[int], object] | None = None) -> InputIndex:
    """Read the whole input. `progress` is told the bytes read so far, now and then."""
    marks = [_Marks() for _ in range(_BUCKETS)]
    lines = valid = tokens = stripped = 0
    models: dict[str, int] = {}
    model_tokens: dict[str, int] = {}
    samples: list[LineError] = []
    for raw in iter_lines(file):
        verdict = check_line(raw)
        lines += 1
        if verdict.custom_id is not None:
            mark = hash(verdict.custom_id)
            marks[mark % _BUCKETS].add(mark, raw.offset, raw.number)
        if isinstance(verdict, BatchLine):
            valid += 1
            tokens += verdict.tokens
            stripped += bool(verdict.stripped)
            if verdict.model is not None and (verdict.model in models or len(models) < _MAX_MODELS):
                models[verdict.model] = models.get(verdict.model, 0) + 1
                model_tokens[verdict.model] = model_tokens.get(verdict.model, 0) + verdict.tokens
        elif len(samples) < _MAX_SAMPLES:
            samples.append(verdict)
        if progress is not None and lines % _REPORT_EVERY == 0:
            progress(raw.offset)
    duplicates: dict[int, int] = {}
    for bucket in marks:
        for first, number, offset in bucket.duplicates(file):
            duplicates[number] = first
            raw = _line_at(file, offset, number)
            before = check_line(raw)
            after = check_line(raw, duplicates=duplicates)
            if isinstance(before, BatchLine):
                valid -= 1
                tokens -= before.tokens
                stripped -= bool(before.stripped)
                if before.model in models:
                    models[before.model] -= 1
                    model_tokens[before.model] -= before.tokens
                if isinstance(after, LineError):
                    samples.append(after)
    return InputIndex(
        size=file.seek(0, os.SEEK_END),
        lines=lines,
        valid=valid,
        invalid=lines - valid,
        tokens=tokens,
        stripped=stripped,
        models={name: count for name, count in models.items() if count},
        model_tokens={name: count for name, count in model_tokens.items() if models[name]},
        duplicates=dict(sorted(duplicates.items())),
        samples=tuple(sorted(samples, key=lambda e: e.line)[:_MAX_SAMPLES]),
    )


class _Marks:
    """The ids of one bucket, as hashes with the place of their line."""

    def __init__(self) -> None:
        self._hashes = array("q")
        self._offsets = array("Q")
        self._numbers = array("Q")

    def add(self, mark: int, offset: int, number: int) -> None:
        self._hashes.append(mark)
        self._offsets.append(offset)
        self._numbers.append(number)

    def duplicates(self, file: BinaryIO) -> Iterator[tuple[int, int, int]]:
        """(first line, later line, offset of the later line) for each id that comes again, in file order."""
        if len(set(self._hashes)) == len(self._hashes):
            return
        places: dict[int, list[int]] = {}
        for place, mark in enumerate(self._hashes):
            places.setdefault(mark, []).append(place)
        for same in places.values():
            if len(same) == 1:
                continue
            firsts: dict[str, int] = {}
            for place in same:
                offset, number = self._offsets[place], self._numbers[place]
                custom_id = check_line(_line_at(file, offset, number)).custom_id
                if custom_id is None:
                    continue
                first = firsts.setdefault(custom_id, number)
                if first != number:
                    yield first, number, offset


def _line_at(file: BinaryIO, offset: int, number: int) -> RawLine:
    return next(iter_lines(file, start=offset, first_line=number))
