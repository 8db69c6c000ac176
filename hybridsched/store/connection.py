"""Connections to Redis or Valkey, and what can go wrong with them, in words.

URLs:

    redis://[user:password@]host:port/db        rediss://... with TLS
    unix://[user:password@]/path/to/socket      ?db=N
    sentinel://[user:password@]host:port,host:port/service[?db=N&ssl=true&sentinel_password=...]

Replies are bytes (`decode_responses` is off). A blocking read must be shorter than the socket timeout:
use at most `MAX_BLOCK_MS`. Redis errors are redis-py's own; wrap an operation in `store_errors(...)` to turn
them into a `StoreError` that says what failed and what to do. No password appears in any message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from hybridsched.store.embedded import EmbeddedValkey
from hybridsched.store.errors import StoreError, StoreRefused, StoreUnavailable, StoreUrlError
from hybridsched.store.patience import login_refused
from hybridsched.store.quick import quick

__all__ = [
    "MAX_BLOCK_MS",
    "EmbeddedValkey",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUrlError",
    "async_client",
    "explain",
    "redact",
    "resolve_url",
    "store_errors",
    "sync_client",
]

URL_VARIABLE = "HYBRIDSCHED_REDIS_URL"
"""Environment variable that names the server when an option does not."""

SOCKET_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
MAX_BLOCK_MS = 5_000
"""Longest BLOCK of a blocking read: half the socket timeout, so that silence is never taken for a fault."""

_SCHEMES = ("redis", "rediss", "unix", "sentinel")


def resolve_url(option: str | None, environ: Mapping[str, str] | None = None) -> str | None:
    """The URL to use: `option` (from `--redis`), else the environment, else None (nothing was given)."""
    if option:
        return option
    return (os.environ if environ is None else environ).get(URL_VARIABLE) or None


def redact(url: str) -> str:
    """The URL with every password replaced by `***`, fit for messages and logs."""
    # Up to the last @: a password may hold one, and whatever else a URL should have quoted.
    hidden = re.sub(r"(?<=://)([^@:/?\s]*):\S*@", r"\1:***@", url)
    return re.sub(r"((?:^|[?&])[a-z_]*password=)[^&]*", r"\1***", hidden)


def async_client(url: str, *, name: str | None = None) -> redis.asyncio.Redis:
    """An asyncio client with a pool of its own. It connects at the first command. `name`: CLIENT SETNAME.

    A command is sent a second time when its connection turns out to be closed (never after a timeout), so
    what is sent must bear that; the scripts of the package do.

    Raises:
        StoreUrlError: the URL cannot be understood.
    """
    retry = AsyncRetry(NoBackoff(), 1, (redis.ConnectionError,))
    options = _options(name) | {"retry": retry}
    if _scheme(url) == "sentinel":
        hosts, service, server, sentinel = _sentinel(url)
        watch: Any = AsyncSentinel(hosts, sentinel_kwargs=sentinel, **options, **server)  # type: ignore[no-untyped-call]
        client: redis.asyncio.Redis = watch.master_for(service)
    else:
        with _bad_url(url):
            client = redis.asyncio.Redis.from_url(url, **options)
    pool: Any = client.connection_pool
    pool.connection_class = quick(pool.connection_class)
    return client


def sync_client(url: str, *, name: str | None = None) -> redis.Redis:
    """The same, synchronous and safe to share between threads.

    Raises:
        StoreUrlError: the URL cannot be understood.
    """
    options = _options(name) | {"retry": Retry(NoBackoff(), 1, (redis.ConnectionError,))}
    if _scheme(url) == "sentinel":
        hosts, service, server, sentinel = _sentinel(url)
        watch: Any = Sentinel(hosts, sentinel_kwargs=sentinel, **options, **server)  # type: ignore[no-untyped-call]
        return cast("redis.Redis", watch.master_for(service))
    with _bad_url(url):
        return redis.Redis.from_url(url, **options)


def _options(name: str | None) -> dict[str, Any]:
    return {
        "decode_responses": False,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "health_check_interval": 15,
        "client_name": name,
        "protocol": 2,
    }


def _scheme(url: str) -> str:
    scheme = url.partition("://")[0]
    if scheme not in _SCHEMES or "://" not in url:
        raise StoreUrlError(
            f"the Redis URL {redact(url)!r} cannot be understood: it must begin with "
            f"{', '.join(f'{name}://' for name in _SCHEMES)}; for example redis://localhost:6379/0"
        )
    return scheme


@contextmanager
def _bad_url(url: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, redis.RedisError) as error:
        raise StoreUrlError(f"the Redis URL {redact(url)!r} cannot be understood: {error}") from None


def _sentinel(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any], dict[str, Any]]:
    """Hosts, service, options for the server, options for the sentinels."""
    with _bad_url(url):
        parts = urlsplit(url)
        userinfo, _, hostlist = parts.netloc.rpartition("@")
        hosts = []
        for item in hostlist.split(","):
            host, _, port = item.rpartition(":") if ":" in item else (item, "", "26379")
            if not host:
                raise ValueError("a sentinel has no host name")
            hosts.append((host.strip("[]"), int(port)))
        service = parts.path.strip("/")
        if not service:
            raise ValueError("it names no service; write sentinel://host:26379,host:26379/SERVICE")
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        unknown = query.keys() - {"db", "ssl", "sentinel_password", "sentinel_username"}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} is not known; use db, ssl, sentinel_password")
        user, _, password = userinfo.partition(":")
        server: dict[str, Any] = {"db": int(query.get("db", "0"))}
        if user:
            server["username"] = unquote(user)
        if password:
            server["password"] = unquote(password)
        sentinel: dict[str, Any] = {"socket_timeout": CONNECT_TIMEOUT_S}
        for key in ("password", "username"):
            if f"sentinel_{key}" in query:
                sentinel[key] = query[f"sentinel_{key}"]
        if query.get("ssl", "false").lower() in ("1", "true", "yes"):
            server["ssl"] = sentinel["ssl"] = True
        return hosts, service, server, sentinel


@contextmanager
def store_errors(url: str, doing: str) -> Iterator[None]:
    """Turn redis-py's errors within the block into `StoreError`s. `doing`: "reading the gate of lane r0".

    Raises:
        StoreUnavailable: trying again later can help.
        StoreRefused: it cannot; the message says what to change.
    """
    try:
        yield
    except redis.RedisError as error:
        raise explain(error, url, doing) from error
    except OSError as error:
        raise explain(redis.ConnectionError(str(error)), url, doing) from error


def explain(error: redis.RedisError, url: str, doing: str) -> StoreError:
    """The `StoreError` for one of redis-py's errors."""
    where = redact(url)
    said = redact(str(error)) or type(error).__name__
    if login_refused(error):
        return StoreRefused(
            f"{doing}: Redis at {where} refused the login ({said}); check user and password in the URL"
        )
    if isinstance(error, redis.exceptions.NoPermissionError) or said.startswith("NOPERM"):
        return StoreRefused(f"{doing}: the Redis user of {where} lacks a right ({said}); extend its ACL")
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return StoreRefused(
            f"{doing}: Redis at {where} is out of memory ({said}); raise maxmemory, with policy noeviction"
        )
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return StoreUnavailable(
            f"{doing}: Redis at {where} is a read-only replica ({said}); give the address of the primary"
        )
    if isinstance(error, redis.TimeoutError):
        return StoreUnavailable(
            f"{doing}: Redis at {where} did not answer within {SOCKET_TIMEOUT_S:.0f} s ({said}); "
            f"see whether it is overloaded or the network drops packets"
        )
    if isinstance(error, redis.ConnectionError):
        return StoreUnavailable(
            f"{doing}: Redis at {where} cannot be reached ({said}); see whether it runs and the URL is right"
        )
    if said.startswith(("LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN")):
        return StoreUnavailable(f"{doing}: Redis at {where} is not ready yet ({said}); try again shortly")
    if said.startswith("WRONGTYPE"):
        return StoreRefused(
            f"{doing}: a key in Redis at {where} is none of ours ({said}); find who writes there, "
            "and delete it"
        )
    return StoreRefused(
        f"{doing}: Redis at {where} refused the command ({said}); it must be Redis 7.0, Valkey 8 or newer"
    )
