"""Reading answers: one blocking read for all requests of a client process."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import redis.asyncio

from hybridsched.store.connection import MAX_BLOCK_MS
from hybridsched.store.online_values import END_DECODER, End
from hybridsched.store.wire import Wire

_READ_AT_ONCE = 1000
_TRIM_AFTER = 5000
"""Entries read between two trims of the stream: its length stays far under its MAXLEN."""


class Group(msgspec.Struct, frozen=True):
    """Chunks of one streamed answer, as the engine sent them."""

    id: str
    attempt: int
    number: int
    chunks: msgspec.Raw
    """JSON array."""


class Ended(msgspec.Struct, frozen=True):
    """The end of one request."""

    id: str
    attempt: int
    end: End
    groups: int = 0
    """Groups of chunks that were sent before it."""


def parse(flat: list[bytes]) -> Group | Ended | None:
    """One entry of a reply stream (a flat list of names and values); None when it names no request.

    What names one and cannot be read ends that request, and no other, with code `engine_bad_answer`.
    """
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    try:
        request_id, attempt = fields[b"id"].decode(), int(fields[b"attempt"])
    except (KeyError, ValueError):
        return None
    end = fields.get(b"end")
    if end is not None:
        return ended(request_id, attempt, fields.get(b"groups", b"0"), end)
    try:
        return Group(request_id, attempt, int(fields[b"n"]), msgspec.Raw(fields[b"tok"]))
    except (KeyError, ValueError):
        return Ended(request_id, attempt, bad_answer("an entry of its reply stream cannot be read"))


def ended(request_id: str, attempt: int, groups: bytes, end: bytes) -> Ended:
    """The end of a request as Redis keeps it; one that cannot be read is a failure."""
    try:
        return Ended(request_id, attempt, END_DECODER.decode(end), int(groups))
    except (ValueError, RecursionError) as error:
        return Ended(request_id, attempt, bad_answer(f"its end cannot be read ({error})"))


def bad_answer(what: str) -> End:
    """The end of a request whose answer makes no sense."""
    return End.failed("engine_bad_answer", f"the answer is not what an engine sends: {what}", http_status=502)


class ReplyReader:
    """Reads one reply stream from its beginning, each entry once, and trims what was read.

    Keeps a connection of the client's pool for its blocking reads.
    """

    def __init__(self, client: redis.asyncio.Redis, key: str) -> None:
        self._wire = Wire(client)
        self._key = key
        self._last: bytes = b"0-0"
        self._read_since_trim = 0

    async def read(self, block_ms: int = MAX_BLOCK_MS) -> Iterator[Group | Ended]:
        """The next entries; none when nothing came within `block_ms`. After an error just call it again.

        Raises:
            redis.exceptions.RedisError: the server cannot be reached.
        """
        if self._read_since_trim >= _TRIM_AFTER:
            await self._wire.call("XTRIM", self._key, "MINID", "~", self._last)
            self._read_since_trim = 0
        answer = await self._wire.call(
            *("XREAD", "COUNT", _READ_AT_ONCE, "BLOCK", block_ms, "STREAMS", self._key, self._last)
        )
        if not answer:
            return iter(())
        entries = answer[0][1]
        self._last = entries[-1][0]
        self._read_since_trim += len(entries)
        return (entry for _, flat in entries if (entry := parse(flat)) is not None)
