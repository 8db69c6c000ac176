"""redis-py's asyncio connections, made to write like its synchronous ones and to hear every cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any

import hiredis
import redis


@cache
def quick(kind: type[Any]) -> type[Any]:
    """The asyncio connection class `kind` with two of redis-py's costs taken out.

    - It writes commands with hiredis in C; redis-py's asyncio connections do it in Python, which is a quarter
      of a busy client's CPU.
    - It bounds a write with `asyncio.timeout`. redis-py uses `asyncio.wait_for`, which starts a task for each
      command, and which before Python 3.12 forgets a cancellation that arrives as the write ends: a cancelled
      worker then goes on for ever.
    """

    def pack_command(self: Any, *args: Any) -> list[bytes]:
        words = args[0].encode().split() if isinstance(args[0], str) else args[0].split()
        try:
            return [hiredis.pack_command((*words, *args[1:]))]
        except TypeError:  # an argument that only redis-py's own encoder knows, or knows how to refuse
            packed: list[bytes] = kind.pack_command(self, *args)
            return packed

    def pack_commands(self: Any, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join([part for command in commands for part in pack_command(self, *command)])]

    async def send_packed_command(
        self: Any, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        if not self.is_connected:
            await self.connect()
        if check_health and not self.greets:
            await self.check_health()
        if isinstance(command, str):
            command = command.encode()
        try:
            async with asyncio.timeout(self.socket_timeout):
                self._writer.writelines([command] if isinstance(command, bytes) else command)
                await self._writer.drain()
        except TimeoutError:
            await self.disconnect(nowait=True)
            raise redis.TimeoutError("Timeout writing to socket") from None
        except OSError as error:
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(f"Error while writing to socket: {error}") from error
        except BaseException:
            # Part of the command may be out: what follows on this connection would answer something else.
            await self.disconnect(nowait=True)
            raise

    def unchecked(greet: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        # A connection that has just been made needs no check. Where the login is refused, the check's PING
        # would fail and connect again, whose first command would be checked, and so on without end.
        async def greet_unchecked(self: Any, *args: Any, **options: Any) -> None:
            self.greets = True
            try:
                await greet(self, *args, **options)
            finally:
                self.greets = False

        return greet_unchecked

    # redis-py has the second one from 5.3 on; it connects by it.
    greetings = [name for name in ("on_connect", "on_connect_check_health") if hasattr(kind, name)]
    return type(
        kind.__name__,
        (kind,),
        {
            "pack_command": pack_command,
            "pack_commands": pack_commands,
            "send_packed_command": send_packed_command,
            "greets": False,
            **{name: unchecked(getattr(kind, name)) for name in greetings},
        },
    )
