"""One connection shared by all callers of an event loop: commands of one turn leave in one write.

For the hot path of online requests. redis-py's asyncio client takes a connection, a timer and several tasks'
turns for each command, about five times the cost of the command itself; here a command is a packed write and
a future in a queue. redis-py still makes the connection (URL, TLS, login, Sentinel) and owns it: closing the
client closes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis
import redis.asyncio

from hybridsched.store.connection import SOCKET_TIMEOUT_S

_NOTHING = object()
_pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command  # its stub allows one argument only

Arg = str | bytes | int | float


class Wire:
    """Commands on a connection of `client`'s pool that this object keeps for itself.

    It connects at the first command, and again at the first one after a loss. A command is sent once: when
    the connection is lost, or silent for `SOCKET_TIMEOUT_S`, all that wait get the error and decide.

    Args:
        client: whose server, login and life it shares.
        greeting: commands sent right after connecting, ahead of all others; their answers are not looked at.
        listener: takes every message instead of futures (a subscription); with None at the connection's end.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        greeting: Sequence[tuple[Arg, ...]] = (),
        listener: Callable[[Any], None] | None = None,
    ) -> None:
        self._pool: Any = client.connection_pool
        self._greeting = greeting
        self._listener = listener
        self._connection: Any = None
        self._transport: Any = None
        self._lock = asyncio.Lock()
        self._out: list[bytes] = []
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._flushing = False

    async def call(self, *args: Arg) -> Any:
        """Send one command and wait for its answer.

        Raises:
            redis.exceptions.RedisError: the server refused it, or cannot be reached.
        """
        if self._transport is None:
            await self.connect()
        return await self.post(args)

    def post(self, args: tuple[Arg, ...]) -> asyncio.Future[Any]:
        """The same on a connection that stands (`connect`), without waiting; order of posting is kept.

        Raises:
            redis.exceptions.ConnectionError: there is no connection.
            redis.exceptions.DataError: an argument cannot be sent; nothing was.
        """
        return self.post_all([args])[0]

    def post_all(self, commands: Sequence[tuple[Arg, ...]]) -> list[asyncio.Future[Any]]:
        """`post` for several: all of them are sent, or none.

        Raises:
            redis.exceptions.RedisError: as `post`.
        """
        # Packed before anything is queued: a future without its command would take the next one's answer.
        packed = [pack(args) for args in commands]
        self._must_stand()
        loop = asyncio.get_running_loop()
        due = loop.time() + SOCKET_TIMEOUT_S
        futures: list[asyncio.Future[Any]] = [loop.create_future() for _ in packed]
        self._waiting.extend((future, due) for future in futures)
        self._write(packed)
        if self._watch is None:
            self._watch = loop.call_at(due, self._look, loop)
        return futures

    def send(self, args: tuple[Arg, ...]) -> None:
        """Send a command whose answer goes to the listener.

        Raises:
            redis.exceptions.RedisError: as `post`.
        """
        packed = pack(args)
        self._must_stand()
        self._write([packed])

    async def connect(self) -> None:
        """Connect, if it is not connected.

        Raises:
            redis.exceptions.RedisError: the server cannot be reached, or refuses the login.
        """
        async with self._lock:
            if self._transport is not None:
                return
            await self._give_back()
            connection = await self._pool.get_connection()
            transport = connection._writer.transport
            link = _Link(self, transport.get_protocol(), connection._parser.parse_error)
            transport.set_protocol(link)
            self._connection, self._transport = connection, transport
            for command in self._greeting:
                self.post(command).add_done_callback(_look_away)

    def abort(self, error: redis.RedisError) -> None:
        """Drop the connection; all that wait get `error`."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._fail(error)

    async def aclose(self) -> None:
        """Close the connection. The next command would open another."""
        self.abort(redis.ConnectionError("the connection was closed"))
        async with self._lock:
            await self._give_back()

    async def _give_back(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    def _must_stand(self) -> None:
        if self._transport is None:
            raise redis.ConnectionError("the connection was lost before the command was sent")

    def _write(self, packed: list[bytes]) -> None:
        self._out += packed
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        out, self._out = self._out, []
        if self._transport is not None:
            self._transport.write(b"".join(out))

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once in a while: is an answer overdue?"""
        self._watch = None
        if not self._waiting:
            return
        due = self._waiting[0][1]
        if due <= loop.time():
            self.abort(redis.TimeoutError(f"no answer within {SOCKET_TIMEOUT_S:.0f} s"))
        else:
            self._watch = loop.call_at(due, self._look, loop)

    def _heard(self, message: Any) -> None:
        if self._listener is not None:
            self._listener(message)
            return
        if not self._waiting:
            # Nobody asked: from here on no answer could be told from another's.
            self.abort(redis.exceptions.InvalidResponse("the server sent an answer to no command"))
            return
        future, _ = self._waiting.popleft()
        if future.done():
            return
        if isinstance(message, Exception):
            future.set_exception(message)
        else:
            future.set_result(message)

    def _stands(self, link: _Link) -> bool:
        return self._transport is not None and self._transport.get_protocol() is link

    def _lost(self, link: _Link, error: Exception | None) -> None:
        if self._stands(link):
            self._transport = None
            self._fail(redis.ConnectionError(f"the connection was lost: {error or 'closed by the server'}"))

    def _fail(self, error: redis.RedisError) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._out = []
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
        if self._listener is not None:
            self._listener(None)


def pack(args: tuple[Arg, ...]) -> bytes:
    """A command as it goes over the connection.

    Raises:
        redis.exceptions.DataError: an argument is no text, bytes or number, or text with lone surrogates.
    """
    try:
        return _pack(args)
    except (TypeError, ValueError) as error:
        raise redis.DataError(
            f"a {args[0]!r} command cannot be sent: each argument must be bytes, a number, or text without "
            f"lone surrogates ({error})"
        ) from error


class _Link(asyncio.Protocol):
    """Takes the place of redis-py's stream protocol, and passes on to it what closing needs."""

    def __init__(self, wire: Wire, inner: Any, parse_error: Callable[[str], Exception]) -> None:
        self._wire = wire
        self._inner = inner
        self._reader = hiredis.Reader(
            protocolError=redis.exceptions.InvalidResponse, replyError=parse_error, notEnoughData=_NOTHING
        )

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while self._wire._stands(self) and (message := self._reader.gets()) is not _NOTHING:
                self._wire._heard(message)
        except redis.exceptions.InvalidResponse as error:
            self._wire.abort(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._wire._lost(self, exc)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


def _look_away(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
