"""Traces of online requests and lengths of offline work: reading, cutting, and prompts of an exact length."""

from __future__ import annotations

import csv
import functools
import gzip
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import IO

from hybridsched.core.values import Value

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
SHIPPED_TRACE = "azure_code_2023.csv.gz"
SHIPPED_LENGTHS = "offline_arxiv_summarization.csv.gz"

_TOKEN_IDS = [str(i) for i in range(100, 1000)]
"""Token ids that prompts are made of. Three digits are in every vocabulary and keep the JSON short."""
_OWN = 32
"""Tokens at the start of a prompt that are its own: two KV blocks, after which a prefix is never shared."""
_TAIL = 4096
"""Tokens of the text that the rest of every prompt is cut from (over and over)."""


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


def read_trace(path: Path) -> list[TraceRow]:
    """Rows of a trace CSV (plain or .gz), ordered by arrival.

    The header must name `arrival_s`, `prompt_tokens` and `output_tokens`; other columns are ignored.

    Raises:
        TraceError: the file is missing, unreadable, empty, or a line is wrong.
    """
    try:
        with _open(path) as file:
            rows = list(_rows(path, file))
    except FileNotFoundError:
        raise TraceError(
            f"trace {path} does not exist; give a CSV with the columns {', '.join(COLUMNS)}"
        ) from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path} cannot be read ({error}); give a CSV or CSV.gz in UTF-8") from None
    if not rows:
        raise TraceError(f"trace {path} holds no request; one line a request is needed below the header")
    return sorted(rows, key=lambda row: row.arrival_s)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(path: Path, file: Iterable[str]) -> Iterator[TraceRow]:
    reader = csv.reader(file)
    header = next(reader, None)
    if header is None:
        raise TraceError(f"trace {path} is empty; its first line must name {', '.join(COLUMNS)}")
    names = [name.strip() for name in header]
    absent = [name for name in COLUMNS if name not in names]
    if absent:
        raise TraceError(
            f"trace {path}, line 1: column {absent[0]!r} is missing (found: {', '.join(names)[:200]}); "
            f"the columns {', '.join(COLUMNS)} are needed"
        )
    places = [names.index(name) for name in COLUMNS]
    for cells in reader:
        if cells:
            yield _row(path, reader.line_num, cells, places)


def _row(path: Path, line: int, cells: Sequence[str], places: Sequence[int]) -> TraceRow:
    where = f"trace {path}, line {line}"
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


@functools.cache
def _tail() -> str:
    source = random.Random("tail")  # noqa: S311 - must be repeatable, guards no secret
    return ",".join(source.choices(_TOKEN_IDS, k=_TAIL)) + ","


def prompt_json(salt: str, index: int, length: int) -> str:
    """A prompt of exactly `length` token ids as a JSON array.

    The same salt and index give the same prompt; two of them share no prefix worth caching. Each token takes
    four characters, so most of a prompt is cut out of one long text: drawing millions takes seconds.
    """
    source = random.Random(f"{salt}/{index}")  # noqa: S311 - must be repeatable, guards no secret
    own = ",".join(source.choices(_TOKEN_IDS, k=min(_OWN, length)))
    rest = length - _OWN
    if rest <= 0:
        return f"[{own}]"
    start = source.randrange(_TAIL)
    text = _tail() * ((start + rest) // _TAIL + 1)
    return f"[{own},{text[4 * start : 4 * (start + rest) - 1]}]"


def completion_body(model: str, row: TraceRow, *, salt: str, index: int, stream: bool) -> bytes:
    """Body of `/v1/completions` with exactly the row's prompt and output lengths. `model` is plain ASCII."""
    tail = ',"stream":true,"stream_options":{"include_usage":true}' if stream else ""
    return (
        f'{{"model":"{model}","prompt":{prompt_json(salt, index, row.prompt_tokens)},'
        f'"max_tokens":{row.output_tokens},"ignore_eos":true,"temperature":0{tail}}}'
    ).encode()


def write_batch(path: Path, lengths: Sequence[TraceRow], *, lines: int, model: str, salt: str) -> None:
    """Write a batch file in the OpenAI format whose lines have the lengths of `lengths`, in turn."""
    with path.open("wb") as file:
        for number, row in enumerate(itertools.islice(itertools.cycle(lengths), lines)):
            body = completion_body(model, row, salt=salt, index=number, stream=False)
            file.write(
                f'{{"custom_id":"line-{number:06d}","method":"POST","url":"/v1/completions","body":'.encode()
                + body
                + b"}\n"
            )
