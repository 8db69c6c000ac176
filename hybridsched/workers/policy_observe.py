"""Step 1 of the policy worker's cycle: all that a decision needs, in two round trips, however many lanes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import NoScriptError, RedisError, ResponseError

from hybridsched.core.values import (
    UNKNOWN,
    LaneView,
    QueueView,
    ReplicaView,
    Signal,
    Snapshot,
)
from hybridsched.store.gates import MANY, decode_gate
from hybridsched.store.holds import read_holds
from hybridsched.store.keys import GROUP, PRIORITIES, Keys
from hybridsched.store.scripts import digest, load
from hybridsched.store.telemetry import (
    Index,
    Telemetry,
    TelemetryStore,
    lane_view,
    read_index,
    read_records,
    replica_view,
    server_ms,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the pool."""

    snapshot: Snapshot
    mono_s: float
    """`time.monotonic()` when the snapshot's `now_ms` had come in: never earlier than it was read."""
    policy: bytes | None
    """The policy as it stands in Redis, unread."""
    look_again: bool
    """Something was seen for the first time, or two sources disagree for a moment: look again soon."""


class WaitingJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm jobs that want a lane, as last seen."""

    seen_s: float
    """`time.monotonic()` when that look began."""
    pending: int
    """Jobs that wait for a place on any node."""
    running: dict[str, int]
    """Jobs that have one, by node: those of them that have no lane yet are about to take one."""


class Observer:
    """Reads a pool. Remembers its models and lanes, so that one look needs no third round trip."""

    def __init__(
        self, client: Redis, pool: str, *, waiting: Callable[[], WaitingJobs | None] = lambda: None
    ) -> None:
        self._waiting = waiting
        self._client = client
        self._pool = pool
        self._keys = Keys(pool)
        self._telemetry = TelemetryStore(client, pool)
        keys = self._keys
        self._epoch_key = lru_cache(MANY)(lambda lane: keys.gate_epoch(lane).encode())
        self._gate_key = lru_cache(MANY)(lambda lane: keys.gate(lane).encode())
        self._models: tuple[str, ...] = ()
        self._lanes: frozenset[str] = frozenset()

    async def look(self) -> Observation:
        """One snapshot. Raises what the Redis client raises.

        The order of the reads is what makes opening safe. A lane's epoch is read before its replica's
        requests: a claim in between shows in the requests, a later one moves the epoch and the opening is
        refused. The server's time is read last, so that no record is newer than it.
        """
        pipe = self._client.pipeline(transaction=False)
        self._telemetry.queue_index(pipe)
        pipe.hgetall(self._keys.holds)
        pipe.get(self._keys.policy_current)
        *index_answers, holds, policy = await pipe.execute()
        index = read_index(index_answers)
        # A shared lane has its replica's name: so a lane is known before its replica's record was read.
        lanes = sorted({*index.lanes, *index.replicas, *self._lanes})
        answers = await self._read(index, lanes)
        mono_s = time.monotonic()
        telemetry = read_records(index, answers[2:4], server_ms(answers[-1]))
        places = telemetry.places()
        gates = dict(zip(lanes, zip(answers[0], answers[1], strict=False), strict=False))
        queues, claimed = self._queues(answers[4:-1])
        replicas, disagree = _replicas(telemetry, claimed)
        unread = self._remember(telemetry, places)
        views = [
            _lane(lane, replica, telemetry, gates[lane]) for lane, replica in places.items() if lane in gates
        ]
        waiting = self._waiting()
        if waiting is not None:
            views = with_jobs(views, telemetry, waiting, mono_s)
        snapshot = Snapshot(
            pool=self._pool,
            now_ms=telemetry.now_ms,
            replicas=replicas,
            lanes=tuple(views),
            queues=queues,
            holds=read_holds(holds),
        )
        return Observation(snapshot=snapshot, mono_s=mono_s, policy=policy, look_again=unread or disagree)

    async def _read(self, index: Index, lanes: Sequence[str]) -> list[Any]:
        answers = await self._send(index, lanes)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            await self._client.script_load(load("depth"))
            answers = await self._send(index, lanes)
        for answer in (*answers[:4], answers[-1]):
            if isinstance(answer, RedisError):
                raise answer
        return answers

    async def _send(self, index: Index, lanes: Sequence[str]) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        # MGET wants a key: an index is none of its type and answers as absent.
        pipe.mget([self._epoch_key(lane) for lane in lanes] or [self._keys.replica_index])
        pipe.mget([self._gate_key(lane) for lane in lanes] or [self._keys.replica_index])
        self._telemetry.queue_records(pipe, index)
        for model in self._models:
            streams = self._keys.online_all(model)
            pipe.execute_command("EVALSHA", digest("depth"), len(streams), *streams)
            for stream in streams:
                pipe.xpending(stream, GROUP)
        pipe.time()
        return list(await pipe.execute(raise_on_error=False))

    def _queues(self, answers: Sequence[Any]) -> tuple[tuple[QueueView, ...], Counter[str]]:
        """The queue of each model, and how many requests each replica has claimed and not yet ended."""
        step = 1 + len(PRIORITIES)
        claimed: Counter[str] = Counter()
        queues = []
        for i, model in enumerate(self._models):
            depth, *pending = answers[i * step : (i + 1) * step]
            queues.append(_queue(model, depth))
            for answer in pending:
                # No stream or no group yet: nothing was ever claimed there.
                if not isinstance(answer, ResponseError):
                    for consumer in answer["consumers"]:
                        claimed[consumer["name"].decode().rpartition(":")[0]] += int(consumer["pending"])
        return tuple(queues), claimed

    def _remember(self, telemetry: Telemetry, places: dict[str, str]) -> bool:
        """Note models and lanes for the next look; whether this look could not read some of them yet."""
        models = {record.model for record in telemetry.replicas.values() if record is not None}
        # A model whose replicas are all silent for the moment keeps being read: they may come back any time.
        merged = tuple(sorted({*self._models, *models}))
        lanes = frozenset(places)
        known = lanes <= {*telemetry.lanes, *telemetry.replicas, *self._lanes}
        unread = merged != self._models or not known
        self._models, self._lanes = merged, lanes
        return unread


def _replicas(telemetry: Telemetry, claimed: Counter[str]) -> tuple[tuple[ReplicaView, ...], bool]:
    """Replicas, with what the server knows of their claims; whether a record is behind that.

    A claim stands in the stream's pending list from the moment it is granted: that is newer than any record.
    """
    views = []
    behind = False
    for record in telemetry.replicas.values():
        if record is None:
            continue
        view = replica_view(record, telemetry.now_ms)
        held = claimed.get(record.replica, 0)
        own = view.online_inflight
        if own.value is not None and held > own.value:
            behind = behind or own.value == 0
            view = msgspec.structs.replace(view, online_inflight=Signal(value=float(held), age_ms=own.age_ms))
        views.append(view)
    return tuple(views), behind


def _lane(lane: str, replica: str, telemetry: Telemetry, gate: tuple[bytes | None, bytes | None]) -> LaneView:
    epoch, raw = gate
    return lane_view(
        lane,
        replica,
        telemetry.lanes.get(lane),
        telemetry.now_ms,
        gate=decode_gate(raw),
        epoch=int(epoch or 0),
    )


def with_jobs(
    views: list[LaneView], telemetry: Telemetry, waiting: WaitingJobs, mono_s: float
) -> list[LaneView]:
    """The lanes, with the jobs that could take those of a Slurm node at which no worker stands.

    Where none stands none of our work is in the engine, so what is there counts as somebody else's.
    """
    nodes = {record.replica: record.node for record in telemetry.replicas.values() if record is not None}
    taken = Counter(
        nodes.get(view.replica, "") for view in views if telemetry.lanes.get(view.lane) is not None
    )
    age_ms = (mono_s - waiting.seen_s) * 1000.0
    out = []
    for view in views:
        node = nodes.get(view.replica, "")
        if node and telemetry.lanes.get(view.lane) is None:
            coming = max(0, waiting.running.get(node, 0) - taken[node])
            jobs = Signal(value=float(waiting.pending + coming), age_ms=age_ms)
            none = Signal(value=0.0, age_ms=0.0)
            view = msgspec.structs.replace(view, waiting_jobs=jobs, offline_inflight=none)
        out.append(view)
    return out


def _queue(model: str, answer: Any) -> QueueView:
    """The answer of depth.lua; anything else is unknown."""
    if isinstance(answer, Exception) or len(answer) < 2 + 2 * len(PRIORITIES):
        return QueueView(model=model)
    depth = sum(int(n) for n in answer[2::2])
    wait = float(answer[1])
    return QueueView(
        model=model,
        depth=Signal(value=float(depth), age_ms=0.0),
        oldest_wait_ms=Signal(value=wait, age_ms=0.0) if wait >= 0 else UNKNOWN,
    )
