"""Who has a lane in Slurm mode: one job at a time, as a lease with a fence.

The lanes of a node are those of the replicas that say in their telemetry that they run there. A job that
Slurm has started on the node takes one that is free. While a lane has a holder only the holder publishes the
lane's telemetry; a lane whose telemetry names a worker is not free, whether that worker is a job or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from hybridsched.core.values import GateState
from hybridsched.store.found import answer_or, read_json
from hybridsched.store.gates import decode_gate
from hybridsched.store.job_models import JobModels
from hybridsched.store.keys import Keys
from hybridsched.store.scripts import Scripts
from hybridsched.store.telemetry import Telemetry, TelemetryStore

if TYPE_CHECKING:
    from redis.asyncio import Redis

LEASE_MS = 10_000
"""Life of a holder without renewal: longer than any gate's lease, so that the gate of a holder that was cut
off has closed before another job can have its lane."""


Models = str | tuple[str, ...] | None
"""A model, or several of which any will do; None: all."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One lane and where it is."""

    lane: str
    replica: str
    model: str
    url: str
    """Of the replica's engine, as seen from its node."""
    node: str = ""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The job that has a lane."""

    lane: str
    owner: str
    """Name of the process, unique to it."""
    job: str
    """Slurm's id of the job; empty outside Slurm."""
    node: str
    fence: int
    """Higher than that of every earlier holder of any lane."""
    since_ms: float
    """Server time of the claim."""


class HeldLane(msgspec.Struct, frozen=True, kw_only=True):
    """A lane that the caller has."""

    place: Place
    token: bytes
    """What stands in the lane's key."""
    asked_s: float
    """`time.monotonic()` when the claim was sent: the lease began no earlier."""

    @property
    def fence(self) -> int:
        return _HOLDER.decode(self.token).fence


_HOLDER = msgspec.json.Decoder(Holder)


class LaneHolders:
    """The holders of one pool's lanes. Methods raise what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client: Any = client
        self._keys = Keys(pool)
        self._scripts = Scripts(client)
        self._telemetry = TelemetryStore(client, pool)
        self.models = JobModels(client, pool)

    async def places(
        self, *, node: str | None = None, lane: str | None = None, model: Models = None
    ) -> list[Place]:
        """Lanes of live replicas with no worker there: of a node, that name, a model or one of several, as
        far as given."""
        return find_places(await self._telemetry.read_all(), node=node, lane=lane, model=model)

    async def places_with_taken(
        self, *, node: str | None = None, lane: str | None = None, model: Models = None
    ) -> list[Place]:
        """The same with those where a worker stands."""
        telemetry = await self._telemetry.read_all()
        return find_places(msgspec.structs.replace(telemetry, lanes={}), node=node, lane=lane, model=model)

    async def claim(
        self,
        places: Sequence[Place],
        *,
        owner: str,
        job: str = "",
        node: str = "",
        open_only: bool,
        lease_ms: int = LEASE_MS,
    ) -> HeldLane | None:
        """Take the first of `places` that is free, with `open_only` the first whose gate is open as well.

        None: there is no such lane now. What stands in a lane's key and is no holder of ours counts as one
        for `lease_ms` and no longer. Gates are read by a command of their own: a script's keys must be
        writable for whoever calls it, and users' jobs may not write gates.
        """
        if open_only and places:
            found = await self._client.mget([self._keys.gate(place.lane) for place in places])
            places = [place for place, raw in zip(places, found, strict=True) if _is_open(raw)]
        if not places:
            return None
        keys = [self._keys.lane_holder_fence, *(self._keys.lane_holder(place.lane) for place in places)]
        args: list[str | int] = [owner, job, node, lease_ms, *(place.lane for place in places)]
        asked_s = time.monotonic()
        index, token = await self._scripts.call("lane_claim", keys, args)
        return None if index < 0 else HeldLane(place=places[index], token=token, asked_s=asked_s)

    async def renew(self, held: HeldLane, *, lease_ms: int = LEASE_MS) -> bool:
        """Keep a lane for `lease_ms` from now. False: it is lost; another may have it."""
        return bool(await self._hold(held, lease_ms))

    async def release(self, held: HeldLane) -> bool:
        """Give a lane back. False: it was lost before."""
        return bool(await self._hold(held, 0))

    async def read_token(self, lane: str) -> tuple[bytes, Holder | None, float] | None:
        """What stands in a lane's key (b"": another type), who that is (None: none of ours), and how many
        seconds it lives on without a renewal. None: the lane is free."""
        pipe = self._client.pipeline(transaction=True)
        pipe.get(self._keys.lane_holder(lane))
        pipe.pttl(self._keys.lane_holder(lane))
        raw, left_ms = await pipe.execute(raise_on_error=False)
        token = answer_or(raw, b"", f"the holder of lane {lane}")
        if token is None:
            return None
        # Without a life it is not ours and would stay for ever; it counts as long as ours would.
        left_s = (left_ms if left_ms >= 0 else LEASE_MS) / 1000.0
        return bytes(token), decode_holder(token), left_s

    async def release_token(self, lane: str, token: bytes) -> bool:
        """Give back a lane for a holder that is known to be dead. False: another has it by now, or nobody."""
        return bool(await self._scripts.call("lane_hold", [self._keys.lane_holder(lane)], [token, 0]))

    async def read_many(self, lanes: Sequence[str]) -> dict[str, Holder | None]:
        """Who has each lane; None: nobody."""
        if not lanes:
            return {}
        found = await self._client.mget([self._keys.lane_holder(lane) for lane in lanes])
        return {lane: decode_holder(raw) for lane, raw in zip(lanes, found, strict=True)}

    async def _hold(self, held: HeldLane, lease_ms: int) -> Any:
        key = self._keys.lane_holder(held.place.lane)
        return await self._scripts.call("lane_hold", [key], [held.token, lease_ms])


def _is_open(raw: bytes | None) -> bool:
    gate = decode_gate(raw)
    return gate is not None and gate.state is GateState.OPEN


def decode_holder(raw: bytes | None) -> Holder | None:
    """What stands in a lane's key; None when nobody has the lane, or it is none of ours."""
    return read_json(_HOLDER, raw, "the holder of a lane")


def find_places(
    telemetry: Telemetry, *, node: str | None = None, lane: str | None = None, model: Models = None
) -> list[Place]:
    """Lanes of live replicas where no worker stands, in the order of their names."""
    wanted: list[Callable[[Place], bool]] = []
    if node is not None:
        wanted.append(lambda place: place.node == node)
    if lane is not None:
        wanted.append(lambda place: place.lane == lane)
    if model is not None:
        models = (model,) if isinstance(model, str) else model
        wanted.append(lambda place: place.model in models)
    found = []
    for record in telemetry.replicas.values():
        if record is None or not record.lane:
            continue
        there = telemetry.lanes.get(record.lane)
        if there is not None and there.worker:
            continue
        place = Place(
            lane=record.lane,
            replica=record.replica,
            model=record.model,
            url=record.url,
            node=record.node,
        )
        if all(test(place) for test in wanted):
            found.append(place)
    return sorted(found, key=lambda place: place.lane)
