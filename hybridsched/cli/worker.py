"""`hybridsched worker`: start one of the three loops in the foreground."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any

import click

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _name(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _NAME.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is not a name: use 1 to 64 letters, digits, '.', '_', '-', the first no sign",
            param=param,
        )
    return value


def _model(_ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not value or any(c in value for c in "{}\n\r\0 "):
        raise click.BadParameter(f"{value!r} is not a model name: no blanks and no braces", param=param)
    return value


def _engine_url(_ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+/?", value):
        raise click.BadParameter(
            f"{value!r} is not an engine's address: give http://HOST:PORT, without a path", param=param
        )
    return value.rstrip("/")


_engine_option = click.option(
    "--engine",
    "engine_url",
    required=True,
    callback=_engine_url,
    help="http://HOST:PORT of the replica's vLLM.",
)


def _common(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option(
            "--redis",
            "redis_option",
            envvar="HYBRIDSCHED_REDIS_URL",
            metavar="URL",
            help="redis://, rediss://, unix:// or sentinel:// address of the pool's Redis or Valkey.",
        ),
        click.option(
            "--pool",
            default="default",
            show_default=True,
            envvar="HYBRIDSCHED_POOL",
            callback=_name,
            help="The pool's name.",
        ),
        click.option(
            "--speed",
            default=1.0,
            show_default=True,
            type=click.FloatRange(min=0.01, max=100),
            help="How many times faster than the wall clock the simulated engines run.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _run(start: Callable[[str], Coroutine[Any, Any, None]], redis_option: str | None) -> None:
    """Resolve the Redis address and run a loop until it ends or is told to stop."""
    import asyncio

    from hybridsched import log
    from hybridsched.store.connection import StoreError, resolve_url

    log.configure(level=click.get_current_context().meta.get("hybridsched.log_level", "info"))
    try:
        url = resolve_url(redis_option)
        if url is None:
            raise click.UsageError(
                "a worker needs the pool's Redis: give --redis URL or set HYBRIDSCHED_REDIS_URL"
            )
        asyncio.run(start(url))
    except StoreError as error:
        raise click.ClickException(str(error)) from error


@click.group()
def worker() -> None:
    """Run one of the three loops: online, offline, policy."""


@worker.command()
@_common
@click.option("--replica", required=True, callback=_name, help="This replica's name in the pool.")
@click.option("--model", required=True, callback=_model, help="The model it serves.")
@click.option(
    "--engine", "engine_url", required=True, callback=_engine_url, help="http://HOST:PORT of its vLLM."
)
def online(
    redis_option: str | None, pool: str, speed: float, replica: str, model: str, engine_url: str
) -> None:
    """Serve online requests on one engine.

    The loop pulls requests while its engine has room, closes the engine's lane as it takes one,
    and answers each request even when the engine dies.
    """

    async def start(url: str) -> None:
        from hybridsched.log import get_logger
        from hybridsched.workers.online import run_online

        await run_online(
            redis_url=url,
            pool=pool,
            replica=replica,
            model=model,
            engine_url=engine_url,
            speed=speed,
            log=get_logger("online"),
        )

    _run(start, redis_option)


@worker.command()
@_common
@click.option("--lane", callback=_name, help="The lane's name; default: the replica's.")
@click.option("--replica", required=True, callback=_name, help="The replica whose engine the lane shares.")
@click.option("--model", required=True, callback=_model, help="The model that its batches ask for.")
@click.option(
    "--engine", "engine_url", required=True, callback=_engine_url, help="http://HOST:PORT of its vLLM."
)
@click.option("--burst", is_flag=True, help="End when no batch has work left.")
def offline(
    redis_option: str | None,
    pool: str,
    speed: float,
    lane: str | None,
    replica: str,
    model: str,
    engine_url: str,
    burst: bool,
) -> None:
    """Run batches on one lane while its gate is open.

    A closed gate stops it at the next chunk, or at the engine's next iteration, as the policy
    says; nothing that is finished is lost.
    """

    async def start(url: str) -> None:
        from hybridsched.workers.offline import run_offline

        await run_offline(
            redis_url=url,
            pool=pool,
            lane=lane or replica,
            replica=replica,
            model=model,
            engine_url=engine_url,
            speed=speed,
            burst=burst,
        )

    _run(start, redis_option)


@worker.command()
@_common
@click.option("--standby/--no-standby", default=True, help="Wait for the lead when another worker holds it.")
def policy(redis_option: str | None, pool: str, speed: float, standby: bool) -> None:
    """Measure the pool, decide which gates are open, and record why."""

    async def start(url: str) -> None:
        from hybridsched.workers.policy import run_policy

        await run_policy(redis_url=url, pool=pool, speed=speed, standby=standby)

    _run(start, redis_option)
