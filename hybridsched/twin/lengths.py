"""Lengths of offline work: from a file of lengths, or of the lines of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hybridsched.batches.lines import iter_lines
from hybridsched.batches.validate import BatchLine, check_line
from hybridsched.core.values import Value
from hybridsched.traces import TraceError, read_trace


class Length(Value, frozen=True, kw_only=True):
    """Tokens of one line."""

    prompt_tokens: int
    output_tokens: int


def read_lengths(path: Path, told: Callable[[str], None] = lambda note: None) -> list[Length]:
    """The lengths in a file, in its order.

    A name that ends in `.jsonl` is a batch in the OpenAI format: prompts given as token ids count exactly,
    text by its bytes. Each line is taken to make all of its `max_tokens`, in one sequence even where it asks
    for several (`n`), and an embedding to make one token. Lines that could not run take no engine's time and
    are left out, and `told` hears of them. Any other file is a CSV with the columns of a trace, whose
    arrivals do not matter.

    Raises:
        TraceError: the file cannot be read, or holds no line that could run.
    """
    if path.suffix == ".jsonl":
        return _batch_lengths(path, told)
    return [
        Length(prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)
        for row in read_trace(path, kind="batch")
    ]


def _batch_lengths(path: Path, told: Callable[[str], None]) -> list[Length]:
    try:
        with path.open("rb") as file:
            verdicts = [check_line(raw) for raw in iter_lines(file)]
    except OSError as error:
        raise TraceError(f"batch {path} cannot be read ({error.strerror}); give a JSONL file") from None
    lengths = [
        Length(
            prompt_tokens=max(1, verdict.prompt_tokens),
            output_tokens=max(1, verdict.max_tokens * verdict.n),
        )
        for verdict in verdicts
        if isinstance(verdict, BatchLine)
    ]
    bad = [verdict for verdict in verdicts if not isinstance(verdict, BatchLine)]
    if not lengths:
        why = f"the first, line {bad[0].line}, is wrong: {bad[0].message}" if bad else "it is empty"
        raise TraceError(f"batch {path} holds no line that could run; {why}")
    if bad:
        told(
            f"{len(bad)} of {len(verdicts)} lines of batch {path} could not run and are left out; the first, "
            f"line {bad[0].line}: {bad[0].message}"
        )
    return lengths


def repeated(lengths: Sequence[Length], lines: int) -> Iterator[Length]:
    """So many lines, with the lengths in turn."""
    return itertools.islice(itertools.cycle(lengths), lines)
