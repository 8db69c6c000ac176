"""What `hybridsched worker` takes for a name, a model and an engine's address."""

from __future__ import annotations

import re

import click

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def worker_name(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A name in the pool, of a replica or a lane."""
    if value is not None and not _NAME.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is not a name: use 1 to 64 letters, digits, '.', '_', '-', the first no sign",
            param=param,
        )
    return value


def model_name(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A model, as requests name it."""
    from hybridsched.core.values import is_model_name

    if value is not None and not is_model_name(value):
        raise click.BadParameter(f"{value!r} is not a model name: no blanks and no braces", param=param)
    return value


def engine_address(_ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Where an engine listens, without a slash at its end."""
    if value is not None and not re.fullmatch(r"https?://[^\s/]+/?", value):
        raise click.BadParameter(
            f"{value!r} is not an engine's address: give http://HOST:PORT, without a path", param=param
        )
    return None if value is None else value.rstrip("/")
