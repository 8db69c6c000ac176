"""The modes of a pool in Redis: the journal of the switch, what it took, operators' orders and approvals.

Only the leading policy worker writes journal and durations: the server refuses them from any other, so a
worker that was frozen and comes back cannot undo what its successor wrote.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import ResponseError

from hybridsched.core.calendar import Durations
from hybridsched.core.mode_plan import Order
from hybridsched.core.switch_values import SwitchState
from hybridsched.store.found import answer_or, read_json
from hybridsched.store.keys import Keys
from hybridsched.store.scripts import Scripts
from hybridsched.store.telemetry import server_ms

if TYPE_CHECKING:
    from redis.asyncio import Redis

_STATE = msgspec.json.Decoder(SwitchState)
_DURATIONS = msgspec.json.Decoder(Durations)
_ORDER = msgspec.json.Decoder(Order)

MOST = 1000
"""Orders and approvals that are read; more stand there only by a mistake."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What operators want."""

    orders: tuple[Order, ...] = ()
    approvals: frozenset[str] = frozenset()


class ModeStore:
    """The modes of one pool. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client: Any = client
        self._keys = Keys(pool)
        self._scripts = Scripts(client)

    # -- the leader's

    async def journal(self) -> SwitchState | None:
        """Where every host stands, as last written; None: nothing was written, or it cannot be read."""
        state = read_json(_STATE, await self._read(self._keys.mode_journal), "the journal of the modes")
        if state is None:
            return None
        # An entry under another host's name would have acts of the one done on the other.
        hosts = {name: host for name, host in state.hosts.items() if name == host.host}
        return msgspec.structs.replace(state, hosts=hosts)

    async def write_journal(self, state: SwitchState, *, token: str) -> bool:
        """Write it; False: the caller does not lead, and must not act."""
        return await self._write(self._keys.mode_journal, state, token)

    async def durations(self) -> Durations:
        """What was measured."""
        raw = await self._read(self._keys.mode_durations)
        return read_json(_DURATIONS, raw, "the durations of the modes") or Durations()

    async def write_durations(self, durations: Durations, *, token: str) -> bool:
        """Write them; False: the caller does not lead."""
        return await self._write(self._keys.mode_durations, durations, token)

    async def _read(self, key: str) -> bytes | None:
        """A string; none where somebody put something else there."""
        try:
            raw: bytes | None = await self._client.get(key)
        except ResponseError as error:
            return answer_or(error, None, key)
        return raw

    async def _write(self, key: str, value: msgspec.Struct, token: str) -> bool:
        text = msgspec.json.encode(value)
        return bool(await self._scripts.call("mode_write", [self._keys.leader, key], [token, text]))

    # -- operators'

    async def wishes(self) -> Wishes:
        """The orders, oldest first, and the approvals."""
        pipe = self._client.pipeline(transaction=False)
        pipe.hgetall(self._keys.mode_orders)
        pipe.hkeys(self._keys.mode_approvals)
        answers = await pipe.execute(raise_on_error=False)
        orders: dict[bytes, bytes] = answer_or(answers[0], {}, self._keys.mode_orders)
        approvals: list[bytes] = answer_or(answers[1], [], self._keys.mode_approvals)
        found = [read_json(_ORDER, raw, "an order of the modes") for raw in list(orders.values())[:MOST]]
        known = sorted((order for order in found if order is not None), key=lambda o: (o.at_ms, o.id))
        return Wishes(
            orders=tuple(known),
            approvals=frozenset(name.decode("utf-8", "replace") for name in approvals[:MOST]),
        )

    async def order(
        self, mode: str, hosts: Collection[str], *, by: str, until_ms: float | None = None
    ) -> Order:
        """Order a mode for hosts (none: for all). Earlier orders for the same hosts are withdrawn."""
        now_ms = server_ms(await self._client.time())
        order = Order(
            id=f"order-{secrets.token_hex(3)}",
            mode=mode,
            hosts=tuple(hosts),
            by=by,
            at_ms=now_ms,
            until_ms=until_ms,
        )
        await self._client.hset(self._keys.mode_orders, order.id, msgspec.json.encode(order))
        wishes = await self.wishes()
        old = [
            other.id
            for other in wishes.orders
            if other.id != order.id
            and (not order.hosts or (other.hosts and set(other.hosts) <= set(order.hosts)))
        ]
        ended = [o.id for o in wishes.orders if o.until_ms is not None and o.until_ms <= now_ms]
        await self._remove([*old, *ended])
        return order

    async def withdraw(self, hosts: Collection[str] = ()) -> tuple[Order, ...]:
        """Withdraw the orders that concern these hosts only (none given: all orders); those withdrawn."""
        gone = [
            order
            for order in (await self.wishes()).orders
            if not hosts or (order.hosts and set(order.hosts) <= set(hosts))
        ]
        await self._remove([order.id for order in gone])
        return tuple(gone)

    async def approve(self, change: str, *, by: str) -> None:
        """Approve one change of the calendar."""
        await self._client.hset(self._keys.mode_approvals, change, by)

    async def forget_approvals(self, changes: Collection[str]) -> None:
        """Remove approvals of changes that are over."""
        if changes:
            await self._client.hdel(self._keys.mode_approvals, *changes)

    async def _remove(self, ids: Collection[str]) -> None:
        if ids:
            await self._client.hdel(self._keys.mode_orders, *ids)
