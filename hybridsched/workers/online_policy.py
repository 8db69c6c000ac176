"""The policy that a worker goes by: taken up when it is published, looked up again now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from redis.exceptions import RedisError

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.log import get_logger
from hybridsched.store.connection import StoreError
from hybridsched.store.policy import PolicyStore
from hybridsched.workers.online_tasks import run_together
from hybridsched.workers.policy_checked import PolicyGuard

POLL_S = 2.0
"""A publication can be missed (pub/sub delivers at most once): the policy is read again this often."""

BACK_OFF_S = 0.5

_log = get_logger("online")


class PolicyFollower:
    """Keeps the pool's policy, as it holds at `speed`. Until one is published the defaults hold."""

    def __init__(
        self, store: PolicyStore, *, speed: float, changed: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._speed = speed
        self._changed = changed
        self._version = -1
        self._broken = False
        self._guard = PolicyGuard()
        self.policy = PoolPolicy(name="default", kind=PolicyKind.IDLE_WINDOW).at_speed(speed)

    @property
    def closes_gates(self) -> bool:
        """Whether a claim closes the lane's gate. Only the unprotected baseline leaves it open."""
        return self.policy.kind is not PolicyKind.UNPROTECTED

    async def load(self) -> None:
        """Read it once; one that is out of range is left. Raises redis errors, and StoreError when what
        stands there is no policy."""
        self._take(await self._store.current())

    async def run(self) -> None:
        """Until cancelled; an outage or an unreadable policy leaves the last one in force."""
        await run_together(follow=self._follow(), poll=self._poll())

    async def _follow(self) -> None:
        while True:
            try:
                async for policy in self._store.watch():
                    self._take(policy)
            except (RedisError, OSError, StoreError) as error:
                self._kept(error)
            except Exception:  # noqa: BLE001 - the loop's edge; said in the log, the last policy stays
                self._broke()
            await asyncio.sleep(BACK_OFF_S)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.load()
            except (RedisError, OSError, StoreError) as error:
                self._kept(error)
            except Exception:  # noqa: BLE001 - the loop's edge; said in the log, the last policy stays
                self._broke()
            else:
                self._broken = False

    def _kept(self, error: Exception) -> None:
        _log.debug(
            "The policy cannot be read; the last one stays in force.", key="policy_unread", error=str(error)
        )

    def _broke(self) -> None:
        if not self._broken:
            _log.exception(
                "What stands as the policy broke its reading; the last one stays in force.",
                key="policy_broke",
            )
        self._broken = True

    def _take(self, policy: PoolPolicy | None) -> None:
        if policy is None or policy.version == self._version or not self._guard.passes(policy):
            return
        taken = policy.at_speed(self._speed)
        self._version, self.policy = policy.version, taken
        _log.info(
            "A policy was taken up.",
            key="policy_taken",
            name=policy.name,
            version=policy.version,
            kind=policy.kind.value,
        )
        self._changed()
