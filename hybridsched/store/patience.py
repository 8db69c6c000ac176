"""Trying again while Redis is away."""

from __future__ import annotations

import random
from collections.abc import Iterator

import redis

TROUBLE = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError, OSError)
"""Errors that may pass when it is tried again."""

_FIRST_S, _MOST_S = 0.05, 1.0


def passes(error: Exception) -> bool:
    """Whether it makes sense to try again. A login that is refused does not come right by itself."""
    return isinstance(error, TROUBLE) and not login_refused(error)


def login_refused(error: BaseException) -> bool:
    """Whether the server does not take our user and password, or wants some. Over a unix socket redis-py
    wraps what says so."""
    kind = redis.AuthenticationError
    return isinstance(error, kind) or isinstance(error.__cause__, kind)


def hopeless(error: BaseException) -> bool:
    """Whether the server says that this user may not: only another URL or ACL changes that, no waiting."""
    return login_refused(error) or isinstance(error, redis.exceptions.NoPermissionError)


def pauses() -> Iterator[float]:
    """Seconds between one try and the next, for ever. Spread by chance: many clients come back at once."""
    pause = _FIRST_S
    while True:
        yield pause * (1.0 + 0.2 * random.random())  # noqa: S311 - no secret
        pause = min(2 * pause, _MOST_S)
