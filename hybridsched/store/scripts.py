"""Lua scripts: found by name beside this module, sent once, then called by their digest.

A script is `lua/NAME.lua`; its header says its KEYS, ARGV and what it returns. A line `--@include NAME`
is replaced by `lua/lib/NAME.lua`, so that scripts can share functions without building keys of their own.

    scripts = Scripts(client)
    reply = await scripts.call("depth", keys, args)
    replies = await scripts.call_many([Call("finish", keys, args), ...])     # one pipeline, one round trip

`SyncScripts` is the same for a synchronous client.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from hybridsched.store.wire import Arg as Arg
from hybridsched.store.wire import Wire

_INCLUDE = re.compile(r"^--@include ([a-z_]+)$", re.MULTILINE)


class Call(NamedTuple):
    """One call of a script."""

    name: str
    keys: Sequence[str | bytes]
    args: Sequence[Arg]


@cache
def load(name: str) -> str:
    """The text of script `name` with its includes filled in.

    Raises:
        LookupError: there is no such script or include.
    """
    return _INCLUDE.sub(lambda match: _read(f"lib/{match[1]}"), _read(name))


def _read(name: str) -> str:
    file = resources.files("hybridsched.store").joinpath("lua", *f"{name}.lua".split("/"))
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LookupError(f"there is no script {name!r} in hybridsched/store/lua") from None


@cache
def digest(name: str) -> str:
    """The SHA-1 by which the server knows script `name`."""
    return hashlib.sha1(load(name).encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """Scripts on an asyncio client. Holds no state of the server: a restarted server is taught again."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client: Any = client  # redis-py leaves execute_command untyped

    async def call(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Any:
        """Run one script in one round trip (a second pair only when the server does not know it).

        Raises:
            redis.exceptions.RedisError: the server cannot be reached or the script failed.
        """
        command = ("EVALSHA", digest(name), len(keys), *keys, *args)
        try:
            return await self._client.execute_command(*command)
        except NoScriptError:
            await self._client.script_load(load(name))
            return await self._client.execute_command(*command)

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in order in one pipeline (not a transaction). Results stand in the order of `calls`.

        A call that failed has its `redis.exceptions.ResponseError` in its place; the others have run.

        Raises:
            redis.exceptions.RedisError: the server cannot be reached; any part may have run.
        """
        results = await self._run(calls)
        unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            for name in {calls[i].name for i in unknown}:
                await self._client.script_load(load(name))
            for i, result in zip(unknown, await self._run([calls[i] for i in unknown]), strict=True):
                results[i] = result
        return results

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for name, keys, args in calls:
            pipe.execute_command("EVALSHA", digest(name), len(keys), *keys, *args)
        return list(await pipe.execute(raise_on_error=False))


class WireScripts:
    """Scripts on a `Wire`, for the hot path; see `Scripts`. `names` are taught at each connection."""

    def __init__(self, client: redis.asyncio.Redis, names: Sequence[str]) -> None:
        self.wire = Wire(client, greeting=[("SCRIPT", "LOAD", load(name)) for name in names])

    async def call(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Any:
        """Run one script.

        Raises:
            redis.exceptions.RedisError: the server cannot be reached or the script failed.
        """
        command = ("EVALSHA", digest(name), len(keys), *keys, *args)
        try:
            return await self.wire.call(*command)
        except NoScriptError:
            await self.wire.call("SCRIPT", "LOAD", load(name))
            return await self.wire.call(*command)

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in order in one pipeline; see `Scripts.call_many`."""
        results = await self._run(calls)
        unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            for name in {calls[i].name for i in unknown}:
                await self.wire.call("SCRIPT", "LOAD", load(name))
            for i, result in zip(unknown, await self._run([calls[i] for i in unknown]), strict=True):
                results[i] = result
        return results

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        await self.wire.connect()
        futures = self.wire.post_all(
            [("EVALSHA", digest(name), len(keys), *keys, *args) for name, keys, args in calls]
        )
        results = await asyncio.gather(*futures, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ResponseError):
                raise result
        return results


class SyncScripts:
    """Scripts on a synchronous client; see `Scripts`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client  # redis-py leaves execute_command untyped

    def call(self, name: str, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Any:
        """Run one script.

        Raises:
            redis.exceptions.RedisError: the server cannot be reached or the script failed.
        """
        command = ("EVALSHA", digest(name), len(keys), *keys, *args)
        try:
            return self._client.execute_command(*command)
        except NoScriptError:
            self._client.script_load(load(name))
            return self._client.execute_command(*command)

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts in order in one pipeline; see `Scripts.call_many`."""
        results = self._run(calls)
        unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            for name in {calls[i].name for i in unknown}:
                self._client.script_load(load(name))
            for i, result in zip(unknown, self._run([calls[i] for i in unknown]), strict=True):
                results[i] = result
        return results

    def _run(self, calls: Sequence[Call]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for name, keys, args in calls:
            pipe.execute_command("EVALSHA", digest(name), len(keys), *keys, *args)
        return list(pipe.execute(raise_on_error=False))


def raise_first(results: Iterable[Any]) -> None:
    """Raise the first error that `call_many` put in the place of a result, if there is one."""
    for result in results:
        if isinstance(result, ResponseError):
            raise result
