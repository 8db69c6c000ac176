"""Gates in Redis: the permission of each lane, as a lease that dies unless it is renewed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from redis.exceptions import ResponseError

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState
from hybridsched.store.found import answer_or, read_epoch, read_json
from hybridsched.store.gate_watch import GateWatch
from hybridsched.store.keys import Keys
from hybridsched.store.scripts import Arg, Call, Scripts, raise_first

if TYPE_CHECKING:
    from redis.asyncio import Redis

LANES_PER_CALL = 64
"""Lanes that one run of the script publishes: enough to make its cost per lane small, few enough that the
server is never held for more than about half a millisecond."""

MANY = 65_536
"""Lanes whose keys are kept ready."""

_ENCODE = msgspec.json.Encoder()
_GATE = msgspec.json.Decoder(Gate)


class Outcome(IntEnum):
    """What became of one publication."""

    NOT_LEADER = -1
    """The caller's token is not that of the leader: nothing was written."""
    EPOCH_MOVED = 0
    """An online request was taken since the decision: the opening was refused."""
    CHANGED = 1
    """Written and announced."""
    RENEWED = 2
    """The gate stood so already: its lease was extended."""


class GateReading(msgspec.Struct, frozen=True, kw_only=True):
    """One lane as it stands in Redis."""

    gate: Gate | None
    """None: no gate, or its lease is over; that is closed."""
    epoch: int
    """0 also when what stands there is no count."""
    lease_ms: float
    """What remains of the lease; 0 with no gate."""


class _GateBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a `Gate` that the caller gives; the script adds epoch, at_ms and since_ms."""

    lane: str
    state: GateState
    reason: Reason
    budget: Budget
    grace_ms: float
    policy_version: int
    by: str


class GateStore:
    """The gates of one pool."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client = client
        self._keys = Keys(pool)
        self._scripts = Scripts(client)
        self._lane_keys = lru_cache(MANY)(self._encoded_keys)

    async def publish(
        self, gate: Gate, *, leader_token: str, expected_epoch: int | None = None, lease_ms: float
    ) -> Outcome:
        """Publish or renew one gate. See `publish_many`."""
        if expected_epoch is not None:
            gate = msgspec.structs.replace(gate, epoch=expected_epoch)
        return (await self.publish_many([gate], leader_token=leader_token, lease_ms=lease_ms))[0]

    async def publish_many(
        self, gates: Sequence[Gate], *, leader_token: str, lease_ms: float
    ) -> list[Outcome]:
        """Publish or renew gates in one round trip.

        `gate.epoch` is the epoch that the decision was made on: an opening is refused once it has moved, a
        close never is. The stored gate carries the epoch and the server's time of its last change.
        Raises what the Redis client raises.
        """
        calls: list[Call] = []
        lease = max(1, round(lease_ms))
        for start in range(0, len(gates), LANES_PER_CALL):
            keys: list[str | bytes] = [self._keys.leader]
            args: list[Arg] = [leader_token, self._keys.gates, lease]
            for gate in gates[start : start + LANES_PER_CALL]:
                keys += self._lane_keys(gate.lane)
                args += (gate.epoch if gate.state is GateState.OPEN else b"", _body(gate))
            calls.append(Call("gate_publish", keys, args))
        answers = await self._scripts.call_many(calls)
        raise_first(answers)
        return [Outcome(code) for answer in answers for code in answer]

    async def close_now(self, lane: str, *, reason: Reason, by: str, lease_ms: float = 1000.0) -> None:
        """Close a lane without leading: an operator's or a worker's own act. The leader may open it again.

        Opening decisions already under way are refused, because the epoch is raised first.
        """
        try:
            await self._client.incr(self._keys.gate_epoch(lane))
        except ResponseError:
            # No count: nothing opens on it, and the leader writes it anew.
            read_epoch(b"", lane)
        gate = Gate(lane=lane, state=GateState.CLOSED, reason=reason, by=by)
        await self.publish_many([gate], leader_token="", lease_ms=lease_ms)

    def _encoded_keys(self, lane: str) -> tuple[bytes, bytes]:
        return self._keys.gate(lane).encode(), self._keys.gate_epoch(lane).encode()

    async def read(self, lane: str) -> GateReading:
        """The gate, its epoch and what remains of its lease, in one round trip."""
        return (await self.read_many([lane]))[lane]

    async def read_many(self, lanes: Sequence[str]) -> dict[str, GateReading]:
        """The same for many lanes, also in one round trip. A gate that cannot be read counts as none."""
        if not lanes:
            return {}
        pipe = self._client.pipeline(transaction=False)
        pipe.mget([self._keys.gate_epoch(lane) for lane in lanes])
        for lane in lanes:
            pipe.get(self._keys.gate(lane))
            pipe.pttl(self._keys.gate(lane))
        epochs, *rest = await pipe.execute(raise_on_error=False)
        epochs = answer_or(epochs, [None] * len(lanes), self._keys.gates)
        found = {}
        for i, lane in enumerate(lanes):
            where = self._keys.gate(lane)
            gate = read_json(_GATE, answer_or(rest[2 * i], None, where), where)
            lease = float(max(answer_or(rest[2 * i + 1], 0, where), 0)) if gate is not None else 0.0
            epoch = read_epoch(epochs[i], lane)
            if epoch is None and gate is not None and gate.state is GateState.OPEN:
                gate, lease = None, 0.0
            found[lane] = GateReading(gate=gate, epoch=epoch or 0, lease_ms=lease)
        return found

    def watch(
        self,
        lane: str,
        on_change: Callable[[Gate], None] | None = None,
        *,
        poll_ms: float = 200.0,
        provisional_ms: float = 250.0,
    ) -> GateWatch:
        """Follow one lane: `async with store.watch("r0") as watch: async for gate in watch: ...`.

        Changes are pushed, and polled every `poll_ms` because a push can be lost. When the lease runs out by
        this process's own clock, a closed gate with reason `lease_expired` comes, also while Redis is away.
        An opening that was pushed is trusted for `provisional_ms` until a poll has read its real lease.
        `on_change` is called at once for every change, before the iterator yields it; it must not block.
        """
        return GateWatch(
            client=self._client,
            lane=lane,
            channel=self._keys.gates,
            read=lambda: self.read(lane),
            on_change=on_change,
            poll_ms=poll_ms,
            provisional_ms=provisional_ms,
        )


def decode_gate(raw: bytes | None) -> Gate | None:
    """A stored or pushed gate; None when there is none or it is not one."""
    return read_json(_GATE, raw, "a gate")


def _body(gate: Gate) -> bytes:
    body = _GateBody(
        lane=gate.lane,
        state=gate.state,
        reason=gate.reason,
        budget=gate.budget,
        grace_ms=gate.grace_ms,
        policy_version=gate.policy_version,
        by=gate.by,
    )
    return _ENCODE.encode(body)[:-1]
