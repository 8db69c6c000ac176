"""What is found in Redis and may have been written by anybody: read without trust, or counted as unknown.

Whoever can write to the pool's Redis can put anything anywhere. A bad item must fail alone: it is passed
over, named once in the log, and never ends the loop that reads it.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from redis.exceptions import ResponseError

from hybridsched.log import get_logger

_T = TypeVar("_T")
_EPOCH = re.compile(rb"(0|[1-9][0-9]{0,17})\Z")
_log = get_logger("store")

MOST_NAMED = 1000
"""Bad items that are remembered as named; then all are forgotten, and named again if they are still there."""

_named: set[str] = set()


def read_json(decoder: msgspec.json.Decoder[_T], raw: bytes | None, what: str, name: str = "") -> _T | None:
    """What the decoder makes of `raw`; None when there is nothing, or when it is none of ours.

    `what` and `name` say in the log which item it was.
    """
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        # RecursionError: an unknown field that is nested thousands of levels deep.
        name_bad(f"{what} {name}".rstrip(), str(error))
        return None


def read_epoch(raw: bytes | None, lane: str) -> int | None:
    """A lane's epoch; 0 when there is none yet, None when it is no count (see gate_publish.lua)."""
    if raw is None:
        return 0
    if not _EPOCH.match(raw):
        name_bad(f"the epoch of lane {lane}", f"{raw[:40]!r} is no count")
        return None
    return int(raw)


def answer_or(answer: Any, instead: _T, where: str) -> Any | _T:
    """An answer of a pipeline that does not raise, or `instead` when the key is of another type.

    Raises the errors that speak of the server and not of one key.
    """
    if not isinstance(answer, Exception):
        return answer
    if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
        name_bad(where, str(answer))
        return instead
    raise answer


def name_bad(where: str, problem: str) -> None:
    """One line in the log for an item that cannot be used; the same place is not named again."""
    if where in _named:
        return
    if len(_named) >= MOST_NAMED:
        _named.clear()
    _named.add(where)
    _log.warning(
        "An item in Redis is none of ours and counts as unknown. Find who writes there, and delete it.",
        key="item_unreadable",
        item=where,
        problem=problem[:300],
    )
