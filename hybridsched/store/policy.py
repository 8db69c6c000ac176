"""The pool's policy in Redis: versioned, with its history, taken up by running workers."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

import msgspec

from hybridsched.core.policy import PoolPolicy
from hybridsched.store.channels import entries, messages
from hybridsched.store.connection import StoreError
from hybridsched.store.found import name_bad
from hybridsched.store.keys import Keys
from hybridsched.store.scripts import Arg, Scripts
from hybridsched.store.telemetry import open_object

if TYPE_CHECKING:
    from redis.asyncio import Redis

MAX_VERSIONS = 1000
"""Versions that the history keeps."""

_POLICY = msgspec.json.Decoder(PoolPolicy)


class PolicyError(StoreError):
    """What stands in Redis is no policy, or the version that was asked for is not there."""


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the history."""

    version: int
    at_ms: float
    """Server time at which it was set."""
    by: str
    note: str
    policy: PoolPolicy | None
    """None: this version of the package cannot read it."""


class PolicyStore:
    """The policy of one pool. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client = client
        self._keys = Keys(pool)
        self._scripts = Scripts(client)

    async def set(self, policy: PoolPolicy, *, by: str = "", note: str = "") -> int:
        """Publish a policy; returns the version that it was given, one higher than any before."""
        keys = [self._keys.policy_current, self._keys.policy_version, self._keys.policy_history]
        args: list[Arg] = [open_object(policy, "version"), by, note, MAX_VERSIONS, self._keys.policy_channel]
        return int(await self._scripts.call("policy_set", keys, args))

    async def current(self) -> PoolPolicy | None:
        """The policy in force; None when none was ever set.

        Raises:
            PolicyError: what stands there is no policy.
        """
        return decode_policy(cast("bytes | None", await self._client.get(self._keys.policy_current)))

    async def history(self, *, limit: int = MAX_VERSIONS) -> list[PolicyVersion]:
        """The versions that were set, newest first."""
        answer = await self._client.xrevrange(self._keys.policy_history, count=limit)
        return [_version(fields) for _, fields in entries(answer)]

    async def rollback(self, version: int, *, by: str = "") -> int:
        """Set an earlier version again, as a new one; returns the new version.

        Raises:
            PolicyError: the history does not have it, or this version of the package cannot read it.
        """
        known = await self.history()
        for entry in known:
            if entry.version == version:
                if entry.policy is None:
                    raise PolicyError(f"version {version} of the policy cannot be read by this release")
                return await self.set(entry.policy, by=by, note=f"rollback to {version}")
        range_ = f"{known[-1].version} to {known[0].version}" if known else "nothing yet"
        raise PolicyError(
            f"version {version} is not in the policy history, which has {range_}; "
            f"see `hybridsched pool policy history`"
        )

    async def watch(self) -> AsyncIterator[PoolPolicy | None]:
        """The policy now and after every change. Ends with an error on an outage.

        Raises:
            PolicyError: what stands there is no policy.
        """
        async for _ in messages(self._client, self._keys.policy_channel):
            yield await self.current()


def decode_policy(raw: bytes | None) -> PoolPolicy | None:
    """A stored policy; None when there is none.

    Raises:
        PolicyError: it is not one; the message says where.
    """
    if raw is None:
        return None
    try:
        return _POLICY.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PolicyError(
            f"the policy in Redis cannot be read ({error}); "
            f"publish one with `hybridsched pool policy set FILE`"
        ) from error


def _version(fields: dict[bytes, bytes]) -> PolicyVersion:
    try:
        policy = decode_policy(fields.get(b"policy"))
    except PolicyError:
        policy = None
    try:
        version, at_ms = int(fields.get(b"version", b"0")), float(fields.get(b"at_ms", b"0"))
    except ValueError:
        name_bad("an entry of the policy history", str(fields)[:200])
        version, at_ms, policy = 0, 0.0, None
    return PolicyVersion(
        version=version,
        at_ms=at_ms if math.isfinite(at_ms) else 0.0,
        by=fields.get(b"by", b"").decode("utf-8", "replace"),
        note=fields.get(b"note", b"").decode("utf-8", "replace"),
        policy=policy,
    )
