"""A log of the requests that workers sent to an engine: for reports on engines that log no iterations."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hybridsched.core.values import Value

_ENCODE = msgspec.json.Encoder().encode
_DECODE = msgspec.json.Decoder


class RequestRow(Value, frozen=True, kw_only=True):
    """One request to the engine, as the worker that sent it saw it."""

    s: float
    """When it was sent, and when its answer was there: seconds of the host's monotonic clock."""
    e: float
    offline: bool
    id: str
    """The batch line's custom_id, or the online request's id."""
    prompt: int = 0
    """Prompt tokens; 0 where the answer does not say."""
    cached: int = 0
    """Those of them that the prefix cache had, where the engine says."""
    output: int = 0
    """Tokens generated."""
    end: str = "ok"
    """ok; abort: ended by a pause, with its tokens; closed: its connection was closed; error: no answer."""


def tokens_of(usage: Any) -> dict[str, int]:
    """`prompt`, `cached` and `output` of a row, from the usage of an answer; 0 for what it does not say."""
    used = usage if isinstance(usage, dict) else {}
    details = used.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return {
        "prompt": _count(used.get("prompt_tokens")),
        "cached": _count(cached),
        "output": _count(used.get("completion_tokens")),
    }


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


class RequestLog:
    """Appends rows to a file, each with one write. Several processes may have one file."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: the file cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab", buffering=0)

    def add(self, row: RequestRow) -> None:
        self._file.write(_ENCODE(row) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_requests(path: Path) -> tuple[list[RequestRow], int]:
    """The rows of a log, and how many lines are torn (by a kill). A missing file has none of either.

    Raises:
        msgspec.ValidationError: a line is JSON and no row.
    """
    decoder, rows, torn = _DECODE(RequestRow), [], 0
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                rows.append(decoder.decode(line))
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                torn += 1
    return rows, torn
