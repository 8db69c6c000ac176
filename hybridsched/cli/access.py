"""What the commands that look at or steer a pool share: their options, and how they reach Redis."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from hybridsched.store.errors import StoreError

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

    from hybridsched.store.connection import async_client, resolve_url, store_errors
    from hybridsched.store.errors import StoreError

    url = resolve_url(redis_option)
    if url is None:
        raise click.UsageError("the pool's Redis is not known: give --redis URL or set HYBRIDSCHED_REDIS_URL")

    log_to_stderr()

    async def session(address: str) -> T:
        client = async_client(address, name="hybridsched-cli")
        try:
            return await work(client)
        except BrokenPipeError as error:
            # The client wraps what its socket says: this comes of our own output, and is no fault of Redis.
            raise _ReaderGoneError from error
        finally:
            await client.aclose()

    try:
        with store_errors(url, doing):
            return asyncio.run(session(url))
    except StoreError as error:
        raise store_problem(error) from error
    except _ReaderGoneError as error:
        raise BrokenPipeError from error


class _RefusedError(click.ClickException):
    exit_code = 2


def job_problem(error: StoreError) -> click.ClickException:
    """The same for a program inside a Slurm job, where a refusal gets 2 as well: 1 is the batch's own end."""
    from hybridsched.store.errors import StoreRefused

    return _RefusedError(str(error)) if isinstance(error, StoreRefused) else store_problem(error)


def store_problem(error: StoreError) -> click.ClickException:
    """Exit status 2 for an address that cannot be one, 1 for everything that Redis or a network does."""
    from hybridsched.store.errors import StoreUrlError

    if isinstance(error, StoreUrlError):
        return click.UsageError(str(error))
    return click.ClickException(str(error))


class _ReaderGoneError(Exception):
    """Whoever read our output has gone."""


def log_to_stderr(level: str | None = None) -> None:
    """Have what is logged on the way (items in Redis that cannot be read) kept off standard output.

    `level`: log nothing below it unless the user asks for more than the default.
    """
    from hybridsched import log

    context = click.get_current_context(silent=True)
    asked = context.meta.get("hybridsched.log_level") if context else None
    log.configure(level=level if level and asked in (None, "info") else asked or "info")


def on_terminal() -> bool:
    """Whether standard output is looked at by a person."""
    return sys.stdout.isatty()


def screen_width() -> int:
    """Columns that a table may take: those of the terminal, or COLUMNS; wide where nobody said."""
    import shutil

    return shutil.get_terminal_size(fallback=(200, 50)).columns


class Duration(_FloatParam):
    """A span such as 90s, 15m or 1h30m, in milliseconds."""

    name = "duration"
    longest_days = 3660

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        total = span_ms(value)
        if total is None:
            self.fail(f"{value!r} is not a duration; write it like 90s, 15m, 1h30m or 2d", param, ctx)
        if total <= 0:
            self.fail(f"{value!r} is no time at all; give a duration above 0", param, ctx)
        return self.bounded(total, value, param, ctx)

    def bounded(
        self, ms: float, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """`ms`, when it is not too long."""
        if not ms <= self.longest_days * _UNIT_MS["d"]:
            given = str(value)[:40]
            self.fail(f"{given!r} is more than {self.longest_days} days, which is the most", param, ctx)
        return ms


class Deadline(Duration):
    """A span from now, or a moment, as milliseconds from now."""

    name = "deadline"
    longest_days = 366
    """As `store.batch_values.LONGEST_DEADLINE_MS` has it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from datetime import datetime

        if isinstance(value, int | float) or span_ms(value) is not None:
            return super().convert(value, param, ctx)
        try:
            moment = datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            self.fail(
                f"{value[:40]!r} is neither a span (90m, 2h, 1d) nor a moment (2026-11-30T07:00, local time "
                "unless it has an offset)",
                param,
                ctx,
            )
        ahead = moment - time.time()
        if ahead <= 0:
            self.fail(f"{value!r} is in the past; give a deadline ahead", param, ctx)
        return self.bounded(ahead * 1000.0, value, param, ctx)


def span_ms(text: str) -> float | None:
    """A span such as 1h30m in milliseconds; None when the text is none."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return float(sum(float(number) * _UNIT_MS[unit] for number, unit in parts))
