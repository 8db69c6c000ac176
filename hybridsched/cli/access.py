"""What the commands that look at or steer a pool share: their options, and how they reach Redis."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from redis.asyncio import Redis

    _FloatParam = click.ParamType[float]
else:
    # Generic only from click 8.5 on.
    _FloatParam = click.ParamType

T = TypeVar("T")

_POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1.0, "s": 1000.0, "m": 60_000.0, "h": 3_600_000.0, "d": 86_400_000.0}


def _pool_name(_ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not _POOL.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is not a name: use 1 to 64 letters, digits, '.', '_', '-', the first no sign",
            param=param,
        )
    return value


def pool_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --redis and --pool to a command, as `redis_option` and `pool`."""
    command = click.option(
        "--pool",
        default="default",
        show_default=True,
        envvar="HYBRIDSCHED_POOL",
        callback=_pool_name,
        help="The pool's name.",
    )(command)
    return click.option(
        "--redis",
        "redis_option",
        envvar="HYBRIDSCHED_REDIS_URL",
        metavar="URL",
        help="redis://, rediss://, unix:// or sentinel:// address of the pool's Redis or Valkey.",
    )(command)


def with_redis(redis_option: str | None, doing: str, work: Callable[[Redis], Awaitable[T]]) -> T:
    """Run `work` with a client; errors of Redis become one sentence. `doing` stands in it.

    Raises:
        click.UsageError: no server was named.
        click.ClickException: the server cannot be used, or what stands in it cannot.
    """
    import asyncio

    from hybridsched.store.connection import StoreError, async_client, resolve_url, store_errors

    url = resolve_url(redis_option)
    if url is None:
        raise click.UsageError("the pool's Redis is not known: give --redis URL or set HYBRIDSCHED_REDIS_URL")

    async def session(address: str) -> T:
        client = async_client(address, name="hybridsched-cli")
        try:
            return await work(client)
        finally:
            await client.aclose()

    try:
        with store_errors(url, doing):
            return asyncio.run(session(url))
    except StoreError as error:
        raise click.ClickException(str(error)) from error


def on_terminal() -> bool:
    """Whether standard output is looked at by a person."""
    return sys.stdout.isatty()


class Duration(_FloatParam):
    """A span such as 90s, 15m or 1h30m, in milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        parts = _PART.findall(value)
        if not parts or "".join(number + unit for number, unit in parts) != value:
            self.fail(f"{value!r} is not a duration; write it like 90s, 15m, 1h30m or 2d", param, ctx)
        total = sum(float(number) * _UNIT_MS[unit] for number, unit in parts)
        if total <= 0:
            self.fail(f"{value!r} is no time at all; give a duration above 0", param, ctx)
        return float(total)
