"""Step 1 of the policy worker's cycle: all that a decision needs, in two round trips, however many lanes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from redis.exceptions import NoScriptError, RedisError, ResponseError

from hybridsched.core.values import (
    UNKNOWN,
    GateState,
    LaneView,
    Pack,
    QueueView,
    ReplicaView,
    Signal,
    Snapshot,
)
from hybridsched.store.found import answer_or, read_epoch
from hybridsched.store.gates import MANY, decode_gate
from hybridsched.store.holds import POOL as WHOLE_POOL
from hybridsched.store.holds import read_holds
from hybridsched.store.keys import GROUP, PRIORITIES, Keys
from hybridsched.store.packs import decode_pack
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


MOVES_MS = 5000.0
"""A gate closed for this long is no burst: its job looks for another lane soon (`--give-back-after`)."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the pool."""

    snapshot: Snapshot
    mono_s: float
    """`time.monotonic()` when the snapshot's `now_ms` had come in: never earlier than it was read."""
    policy: bytes | None
    """The policy as it stands in Redis, unread."""
    claimed: dict[str, dict[str, tuple[float, float]]] = {}
    """By model and replica: requests that its worker has claimed since its start, and their prompt tokens."""
    look_again: bool
    """Something was seen for the first time, or two sources disagree for a moment: look again soon."""


class WaitingJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm jobs that want a lane, as last seen."""

    seen_s: float
    """`time.monotonic()` when that look began."""
    pending: Mapping[str | None, int]
    """Jobs that wait for a place on any node, by model; None: of those whose model is not known."""
    running: Mapping[str, Mapping[str | None, int]]
    """Jobs that have one, by node and model: those that have no lane yet are about to take one."""

    @property
    def total(self) -> int:
        """Jobs that wait for a place."""
        return sum(self.pending.values())


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
        *index_answers, holds, policy = await pipe.execute(raise_on_error=False)
        index = read_index(index_answers)
        # An order to keep closed must not get lost: holds that cannot be read hold the pool.
        holds = answer_or(holds, {WHOLE_POOL.encode(): b""}, self._keys.holds)
        policy = answer_or(policy, b"", self._keys.policy_current)
        # A shared lane has its replica's name: so a lane is known before its replica's record was read.
        lanes = sorted({*index.lanes, *index.replicas, *self._lanes})
        answers = await self._read(index, lanes)
        mono_s = time.monotonic()
        telemetry = read_records(index, answers[2:4], server_ms(answers[-1]))
        places = telemetry.places()
        gates = dict(zip(lanes, zip(answers[0], answers[1], strict=False), strict=False))
        queues, claimed, packs = self._queues(answers[4:-1])
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
            packs=packs,
        )
        return Observation(
            snapshot=snapshot,
            mono_s=mono_s,
            policy=policy,
            claimed=_claims(telemetry),
            look_again=unread or disagree,
        )

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
            pipe.get(self._keys.pack(model))
        pipe.time()
        return list(await pipe.execute(raise_on_error=False))

    def _queues(self, answers: Sequence[Any]) -> tuple[tuple[QueueView, ...], Counter[str], tuple[Pack, ...]]:
        """The queue of each model, how many requests each replica has claimed and not yet ended, and the pack
        orders that stand."""
        step = 2 + len(PRIORITIES)
        claimed: Counter[str] = Counter()
        queues = []
        packs = []
        for i, model in enumerate(self._models):
            depth, *pending, order = answers[i * step : (i + 1) * step]
            pack = decode_pack(answer_or(order, None, self._keys.pack(model)), model)
            if pack is not None:
                packs.append(pack)
            queues.append(_queue(model, depth))
            for answer in pending:
                # No stream or no group yet: nothing was ever claimed there.
                if not isinstance(answer, ResponseError):
                    for consumer in answer["consumers"]:
                        claimed[consumer["name"].decode().rpartition(":")[0]] += int(consumer["pending"])
        return tuple(queues), claimed, tuple(packs)

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


def _claims(telemetry: Telemetry) -> dict[str, dict[str, tuple[float, float]]]:
    """What the replicas of each model say that they have claimed; who says nothing is left out."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for record in telemetry.replicas.values():
        if record is not None and record.claimed is not None and record.claimed_tokens is not None:
            told = float(record.claimed), float(record.claimed_tokens)
            found.setdefault(record.model, {})[record.replica] = told
    return found


def _lane(lane: str, replica: str, telemetry: Telemetry, gate: tuple[bytes | None, bytes | None]) -> LaneView:
    epoch, raw = gate
    return lane_view(
        lane,
        replica,
        telemetry.lanes.get(lane),
        telemetry.now_ms,
        gate=decode_gate(raw),
        epoch=read_epoch(epoch, lane),
    )


def with_jobs(
    views: list[LaneView], telemetry: Telemetry, waiting: WaitingJobs, mono_s: float
) -> list[LaneView]:
    """The lanes, with the jobs that could take those of a Slurm node at which no worker stands.

    A lane is for jobs of its model, and for those whose model is not known.
    Where none stands none of our work is in the engine, so what is there counts as somebody else's. A job
    whose own lane stays closed changes it for another of the node that is open, so it is coming too.
    """
    places = {
        record.replica: (record.node, record.model)
        for record in telemetry.replicas.values()
        if record is not None
    }
    taken = Counter(
        places.get(view.replica, ("", ""))
        for view in views
        if telemetry.lanes.get(view.lane) is not None and not _stays_closed(view, telemetry.now_ms)
    )
    age_ms = (mono_s - waiting.seen_s) * 1000.0
    out = []
    for view in views:
        node, model = places.get(view.replica, ("", ""))
        if node and telemetry.lanes.get(view.lane) is None:
            pending = waiting.pending.get(model, 0) + waiting.pending.get(None, 0)
            coming = _coming(waiting.running.get(node, {}), node, model, taken)
            jobs = Signal(value=float(pending + coming), age_ms=age_ms)
            none = Signal(value=0.0, age_ms=0.0)
            view = msgspec.structs.replace(view, waiting_jobs=jobs, offline_inflight=none)
        out.append(view)
    return out


def _coming(
    running: Mapping[str | None, int], node: str, model: str, taken: Mapping[tuple[str, str], int]
) -> int:
    """Jobs of a node that have no lane and could take one of a model.

    Lanes that more jobs have than are known to need their model are those of jobs whose model is not known.
    """
    own = max(0, running.get(model, 0) - taken.get((node, model), 0))
    others = sum(
        max(0, many - running.get(what, 0)) for (where, what), many in taken.items() if where == node
    )
    return own + max(0, running.get(None, 0) - others)


def _stays_closed(view: LaneView, now_ms: float) -> bool:
    gate = view.gate
    return gate is None or (gate.state is GateState.CLOSED and now_ms - gate.since_ms >= MOVES_MS)


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
