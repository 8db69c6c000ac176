"""Traces of online requests and lengths of offline work, as CSV files: reading and cutting them."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import IO

from hybridsched.core.values import Value

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
SHIPPED_TRACE = "azure_code_2023.csv.gz"
SHIPPED_LENGTHS = "offline_arxiv_summarization.csv.gz"


class TraceError(ValueError):
    """A trace cannot be used. The message names the file, the line and what is allowed."""


class TraceRow(Value, frozen=True, kw_only=True):
    """One request of a trace: when it comes (seconds from the trace's origin) and how long it is (tokens)."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def shipped(name: str) -> Path:
    """Path of a data file that comes with the package."""
    return Path(str(resources.files("hybridsched.data").joinpath(name)))


def read_trace(path: Path, *, kind: str = "trace") -> list[TraceRow]:
    """Rows of a trace CSV (plain or .gz), ordered by arrival.

    The header must name `arrival_s`, `prompt_tokens` and `output_tokens`; other columns are ignored. `kind`
    is what messages call the file.

    Raises:
        TraceError: the file is missing, unreadable, empty, or a line is wrong.
    """
    try:
        with _open(path) as file:
            rows = list(_rows(f"{kind} {path}", file))
    except FileNotFoundError:
        raise TraceError(
            f"{kind} {path} does not exist; give a CSV with the columns {', '.join(COLUMNS)}"
        ) from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise TraceError(f"{kind} {path} cannot be read ({error}); give a CSV or CSV.gz in UTF-8") from None
    if not rows:
        raise TraceError(f"{kind} {path} holds no request; one line a request is needed below the header")
    return sorted(rows, key=lambda row: row.arrival_s)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(name: str, file: Iterable[str]) -> Iterator[TraceRow]:
    reader = csv.reader(file)
    header = next(reader, None)
    if header is None:
        raise TraceError(f"{name} is empty; its first line must name {', '.join(COLUMNS)}")
    names = [cell.strip() for cell in header]
    absent = [column for column in COLUMNS if column not in names]
    if absent and header[0].startswith("{"):
        raise TraceError(f"{name} is no CSV but JSON; the name of a batch in JSONL must end in .jsonl")
    if absent:
        raise TraceError(
            f"{name}, line 1: column {absent[0]!r} is missing (found: {', '.join(names)[:200]}); "
            f"the columns {', '.join(COLUMNS)} are needed"
        )
    twice = [column for column in COLUMNS if names.count(column) > 1]
    if twice:
        raise TraceError(f"{name}, line 1: column {twice[0]!r} is there twice; which is meant is not known")
    places = [names.index(column) for column in COLUMNS]
    for cells in reader:
        if cells:
            yield _row(name, reader.line_num, cells, places)


def _row(name: str, line: int, cells: Sequence[str], places: Sequence[int]) -> TraceRow:
    where = f"{name}, line {line}"
    if len(cells) <= max(places):
        raise TraceError(f"{where}: {len(cells)} cells, {max(places) + 1} are needed")
    arrival, prompt, output = (cells[place].strip() for place in places)
    try:
        arrival_s = float(arrival)
    except ValueError:
        arrival_s = math.nan
    if not (math.isfinite(arrival_s) and arrival_s >= 0):
        raise TraceError(f"{where}: arrival_s is {arrival[:40]!r}; seconds of 0 or more are allowed")
    return TraceRow(
        arrival_s=arrival_s,
        prompt_tokens=_count(where, "prompt_tokens", prompt),
        output_tokens=_count(where, "output_tokens", output),
    )


def _count(where: str, column: str, cell: str) -> int:
    try:
        value = int(cell)
    except ValueError:
        value = 0
    if value < 1:
        raise TraceError(f"{where}: {column} is {cell[:40]!r}; a whole number of 1 or more is allowed")
    return value


def cut(rows: Sequence[TraceRow], start_s: float, duration_s: float) -> list[TraceRow]:
    """Rows that arrive in [start, start + duration), their arrivals counted from `start_s`.

    Raises:
        TraceError: no request arrives in that span.
    """
    end_s = start_s + duration_s
    part = [
        TraceRow(
            arrival_s=row.arrival_s - start_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
        )
        for row in rows
        if start_s <= row.arrival_s < end_s
    ]
    if not part:
        raise TraceError(
            f"no request of the trace arrives from {start_s:g} s to {end_s:g} s; "
            f"it has arrivals from {rows[0].arrival_s:g} s to {rows[-1].arrival_s:g} s"
        )
    return part
