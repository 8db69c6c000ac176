"""Telemetry of replicas and lanes: records with a life, stamped with the server's time when they arrive.

A worker says how old its numbers were when it sent them; the server adds when that was. A reader adds the
time since. So the clocks of two machines are never compared, and who falls silent grows stale by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from hybridsched.core.values import UNKNOWN, Gate, LaneView, LatencyFit, ReplicaView, Signal
from hybridsched.store.channels import messages
from hybridsched.store.found import answer_or, name_bad, read_json
from hybridsched.store.keys import Keys
from hybridsched.store.scripts import Scripts

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.client import Pipeline

RECORD_LIFE_MS = 10_000
"""Life of a record in Redis: beyond the age limits of a policy, so that staleness shows as an age first."""

INDEX_LIFE_MS = 600_000
SIGNED_OFF_MS = 15_000
"""What is left of that to a name that has signed off: long enough for its lane's gate to be closed."""
"""A replica or lane that has been silent this long leaves the index, and with it every report."""


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica's worker knows of its engine. None is unknown; ages are ms at publication."""

    metrics_age_ms: float | None = None
    """Age of the metrics below, those of one reading of the engine's /metrics."""
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    frozen_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None
    healthy: float | None = None
    """1 healthy, 0 not."""
    fault: str = ""
    """The code of what is wrong with an engine that answers and is not healthy; empty when none is."""
    restarts: int = 0
    """How often its worker has found that it must be started again: whoever starts it does so at each."""
    health_age_ms: float | None = None
    latency: LatencyFit | None = None
    """How long its iterations take, as far as they have shown it."""
    latency_age_ms: float | None = None
    gpu_activity: float | None = None
    gpu_age_ms: float | None = None


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as its online worker publishes it."""

    replica: str
    model: str
    lane: str
    """Name of the shared lane on its engine; empty when it has none."""
    url: str = ""
    node: str = ""
    """The node it runs on, as Slurm names it; empty outside Slurm."""
    job: str = ""
    """Slurm's id of its job; empty outside Slurm."""
    online_inflight: int | None = None
    online_idle_ms: float | None = None
    """How long the worker has held no request at the time of publication; 0 while it holds any."""
    online_load: float | None = None
    """Tokens that its requests still cost, as routing counts them."""
    online_ttft_ms: float | None = None
    """Mean of the last half minute, and the same of the time per further token."""
    online_tpot_ms: float | None = None
    claimed: int | None = None
    """Online requests claimed since the worker began, and their prompt tokens."""
    claimed_tokens: int | None = None
    engine: EngineRecord = EngineRecord()
    at_ms: float | None = None
    """Server time of publication. Given by the server; what the caller says here is not sent."""


class LaneRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One lane, as its offline worker publishes it."""

    lane: str
    replica: str = ""
    """The replica whose engine it shares, or beside which its own engine stands."""
    engine: str = ""
    """Address of the lane's own engine; empty: it shares its replica's."""
    offline_inflight: int | None = None
    work: int | None = None
    """Lines that the worker could run."""
    offline_peak: int | None = None
    """Most offline requests in the engine at once over the last two seconds or so."""
    tokens_per_s: float | None = None
    """Measured offline tokens (prompt + output) per second."""
    worker: str = ""
    tag: str = ""
    """What the ids of its requests have in common (`core.orphans.request_id`)."""
    numbers: tuple[int, ...] = ()
    """Numbers of the requests that it has in the engine."""
    next_number: int = 0
    """The number of its next request."""
    model: str = ""
    """The model whose batches the worker runs."""
    problem: str = ""
    """Why its worker can run nothing though it has work: a code, a colon and a sentence. Empty: it can."""
    stands: str = ""
    """`paused` or `asleep` while the lane's own engine stands still; empty: it goes, or the lane has none."""
    refusal: str = ""
    """Which rung of the policy's ladder its engine does not have, in the same form. Empty: none."""
    at_ms: float | None = None


MANY = 65_536
"""Names whose keys are kept ready."""

_REPLICA = msgspec.json.Decoder(ReplicaRecord)
_LANE = msgspec.json.Decoder(LaneRecord)
_ENCODE = msgspec.json.Encoder()
_Record = TypeVar("_Record", ReplicaRecord, LaneRecord)


def decode_replica(raw: bytes | None) -> ReplicaRecord | None:
    """A stored record; None when it has expired or is not one."""
    return read_json(_REPLICA, raw, "a replica's record")


def decode_lane(raw: bytes | None) -> LaneRecord | None:
    """A stored record; None when it has expired or is not one."""
    return read_json(_LANE, raw, "a lane's record")


def replica_view(record: ReplicaRecord, now_ms: float) -> ReplicaView:
    """The record as a decision sees it at server time `now_ms`."""
    since = _since(record.at_ms, now_ms)
    engine = record.engine
    metrics = _add(engine.metrics_age_ms, since)
    return ReplicaView(
        replica=record.replica,
        model=record.model,
        node=record.node,
        online_inflight=_signal(record.online_inflight, since),
        online_idle_ms=_signal(record.online_idle_ms, since),
        online_load=_signal(record.online_load, since),
        online_ttft_ms=_signal(record.online_ttft_ms, since),
        online_tpot_ms=_signal(record.online_tpot_ms, since),
        engine_healthy=_signal(engine.healthy, _add(engine.health_age_ms, since)),
        engine_fault=engine.fault,
        engine_running=_signal(engine.running, metrics),
        engine_waiting=_signal(engine.waiting, metrics),
        kv_use=_signal(engine.kv_use, metrics),
        frozen_ms=_signal(engine.frozen_ms, metrics),
        ttft_p99_ms=_signal(engine.ttft_p99_ms, metrics),
        tpot_p99_ms=_signal(engine.tpot_p99_ms, metrics),
        latency=engine.latency,
        latency_age_ms=_add(engine.latency_age_ms, since),
        gpu_activity=_signal(engine.gpu_activity, _add(engine.gpu_age_ms, since)),
    )


def lane_view(
    lane: str,
    replica: str,
    record: LaneRecord | None,
    now_ms: float,
    *,
    gate: Gate | None = None,
    epoch: int | None = 0,
) -> LaneView:
    """A lane as a decision sees it at server time `now_ms`; without a record all its signals are unknown."""
    if record is None:
        return LaneView(lane=lane, replica=replica, gate=gate, epoch=epoch)
    since = _since(record.at_ms, now_ms)
    return LaneView(
        lane=lane,
        replica=replica,
        gate=gate,
        epoch=epoch,
        offline_inflight=_signal(record.offline_inflight, since),
        work=_signal(record.work, since),
        offline_peak=_signal(record.offline_peak, since),
        tokens_per_s=_signal(record.tokens_per_s, since),
        own=bool(record.engine),
    )


class TelemetryStore:
    """The telemetry of one pool."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client = client
        self._keys = Keys(pool)
        self._scripts = Scripts(client)
        keys = self._keys
        self._replica_key = lru_cache(MANY)(lambda name: keys.telemetry(name).encode())
        self._lane_key = lru_cache(MANY)(lambda name: keys.lane_telemetry(name).encode())

    async def publish(self, record: ReplicaRecord, *, nudge: bool = False) -> float:
        """Publish a replica's record; returns the server's stamp in ms.

        `nudge` wakes the policy worker at once: use it when the replica becomes busy or idle.
        Raises what the Redis client raises.
        """
        channel = self._keys.telemetry_channel if nudge else ""
        keys = [self._keys.telemetry(record.replica), self._keys.replica_index]
        return await self._publish(record, keys, record.replica, channel)

    async def publish_lane(self, record: LaneRecord, *, nudge: bool = False) -> float:
        """The same for a lane: nudge when it gets work or runs out of it."""
        channel = self._keys.telemetry_channel if nudge else ""
        keys = [self._keys.lane_telemetry(record.lane), self._keys.lane_index]
        return await self._publish(record, keys, record.lane, channel)

    async def _publish(
        self, record: ReplicaRecord | LaneRecord, keys: list[str], name: str, channel: str
    ) -> float:
        body = open_object(record, "at_ms")
        stamp = await self._scripts.call(
            "telemetry", keys, [body, RECORD_LIFE_MS, name, INDEX_LIFE_MS, channel]
        )
        return float(stamp)

    async def offline_inflight(self, lane: str, now_ms: float, max_age_ms: float) -> tuple[int, float]:
        """What the lane's worker has in the replica's engine, by its record, and the record's age in ms.

        0 and 0.0 where no record is younger than `max_age_ms`, or the lane has an engine of its own.

        `now_ms` is server time, such as `publish` returns. Raises what the Redis client raises.
        """
        raw = cast("bytes | None", await self._client.get(self._keys.lane_telemetry(lane)))
        record = decode_lane(raw)
        if record is None or record.at_ms is None or not now_ms - record.at_ms <= max_age_ms:
            return 0, 0.0
        if record.engine:
            return 0, 0.0  # the replica's counters tell nothing of what runs beside it
        return max(0, record.offline_inflight or 0), max(0.0, now_ms - record.at_ms)

    async def withdraw(self, replica: str) -> None:
        """Take a replica's record away at a clean stop, so that its lane closes at once as missing, and is
        forgotten soon."""
        seconds, _ = await self._client.time()
        pipe = self._client.pipeline(transaction=False)
        pipe.delete(self._keys.telemetry(replica))
        pipe.zadd(
            self._keys.replica_index, {replica: seconds * 1000.0 - INDEX_LIFE_MS + SIGNED_OFF_MS}, xx=True
        )
        pipe.zrem(self._keys.lane_index, replica)
        pipe.publish(self._keys.telemetry_channel, replica)
        await pipe.execute()

    async def withdraw_lane(self, lane: str) -> None:
        """The same for a lane: its work is unknown from here on."""
        await self._client.delete(self._keys.lane_telemetry(lane))
        await self._client.publish(self._keys.telemetry_channel, lane)

    async def read_all(self) -> Telemetry:
        """Every replica and lane known to the pool, in two round trips, with the server's time."""
        pipe = self._client.pipeline(transaction=False)
        self.queue_index(pipe)
        index = read_index(await pipe.execute(raise_on_error=False))
        pipe = self._client.pipeline(transaction=False)
        self.queue_records(pipe, index)
        # TIME last: read earlier, it could be older than a record's stamp, and a negative age is unknown.
        pipe.time()
        answers = await pipe.execute()
        return read_records(index, answers, server_ms(answers[2]))

    def queue_index(self, pipe: Pipeline) -> None:
        """Put the two commands whose answers `read_index` takes on a pipeline of the caller's own."""
        pipe.zrange(self._keys.replica_index, 0, -1)
        pipe.zrange(self._keys.lane_index, 0, -1)

    def queue_records(self, pipe: Pipeline, index: Index) -> None:
        """The same for the two commands whose answers `read_records` takes; TIME must come later."""
        # MGET wants a key: the indexes themselves are none of its type and answer as absent.
        pipe.mget([self._replica_key(name) for name in index.replicas] or [self._keys.replica_index])
        pipe.mget([self._lane_key(name) for name in index.lanes] or [self._keys.lane_index])

    async def nudges(self) -> AsyncIterator[str]:
        """Names of replicas and lanes as their workers ask for attention. Ends with an error on an outage."""
        async for message in messages(self._client, self._keys.telemetry_channel):
            if message is not None:
                yield message.decode("utf-8", "replace")


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Names known to the pool."""

    replicas: list[str]
    lanes: list[str]


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """One reading. A name whose record has expired maps to None."""

    now_ms: float
    replicas: dict[str, ReplicaRecord | None]
    lanes: dict[str, LaneRecord | None]

    def views(self) -> tuple[tuple[ReplicaView, ...], tuple[LaneView, ...]]:
        """Replicas and lanes as a decision sees them; gates and epochs are not part of telemetry."""
        replicas = tuple(replica_view(r, self.now_ms) for r in self.replicas.values() if r is not None)
        return replicas, tuple(
            lane_view(lane, replica, self.lanes.get(lane), self.now_ms)
            for lane, replica in self.places().items()
        )

    def places(self) -> dict[str, str]:
        """Every lane and the replica whose engine it shares, sorted by lane.

        A shared lane has its replica's name until a record says otherwise.
        """
        found = {lane: (record.replica if record else "") or lane for lane, record in self.lanes.items()}
        for replica, record in self.replicas.items():
            lane = replica if record is None else record.lane
            if lane:
                found[lane] = replica
        return dict(sorted(found.items()))


def open_object(value: msgspec.Struct, *last: str) -> bytes:
    """JSON of a struct without the fields `last` and without its closing brace, for a script to complete."""
    fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in last}
    return _ENCODE.encode(fields)[:-1]


def read_index(answers: Sequence[Any]) -> Index:
    """The answers of `TelemetryStore.queue_index`. An index that is none counts as empty."""
    nothing: list[bytes] = []
    return Index(
        replicas=names(answer_or(answers[0], nothing, "replica-index")),
        lanes=names(answer_or(answers[1], nothing, "lane-index")),
    )


def read_records(index: Index, answers: Sequence[Any], now_ms: float) -> Telemetry:
    """The answers of `TelemetryStore.queue_records`."""
    return Telemetry(
        now_ms=now_ms,
        replicas={
            name: _own(name, read_json(_REPLICA, raw, "the record of replica", name))
            for name, raw in zip(index.replicas, answers[0], strict=False)
        },
        lanes={
            name: _own(name, read_json(_LANE, raw, "the record of lane", name))
            for name, raw in zip(index.lanes, answers[1], strict=False)
        },
    )


def _own(name: str, record: _Record | None) -> _Record | None:
    """The record, if it speaks of the one under whose name it stands: else it would speak for another."""
    if record is None:
        return None
    said = record.replica if isinstance(record, ReplicaRecord) else record.lane
    if said != name:
        name_bad(f"the record of {name}", f"it speaks of {said[:80]!r}")
        return None
    return record


def names(raw: Sequence[bytes]) -> list[str]:
    """Names from Redis, as text."""
    return [name.decode("utf-8", "replace") for name in raw]


def server_ms(raw: tuple[int, int]) -> float:
    """The answer of TIME in milliseconds."""
    return raw[0] * 1000.0 + raw[1] / 1000.0


def _since(at_ms: float | None, now_ms: float) -> float | None:
    return None if at_ms is None else now_ms - at_ms


def _add(age: float | None, since: float | None) -> float | None:
    return None if age is None or since is None else age + since


def _signal(value: float | None, age: float | None) -> Signal:
    if value is None or age is None or age < 0:
        return UNKNOWN
    try:
        return Signal(value=float(value), age_ms=age)
    except OverflowError:
        return UNKNOWN
