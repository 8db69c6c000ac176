"""Beside the engine: ends the offline requests of a lane whose worker has frozen (see `core.orphans`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from hybridsched.core.orphans import AHEAD, TRIES, OrphanState, left_behind, orphan_ids, step
from hybridsched.core.values import GateState
from hybridsched.engines.protocol import Engine, EngineError
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.log import get_logger
from hybridsched.store.gates import decode_gate
from hybridsched.store.keys import Keys
from hybridsched.store.telemetry import RECORD_LIFE_MS, LaneRecord, decode_lane

if TYPE_CHECKING:
    from redis.asyncio import Redis

LOOK_S = 0.4
"""Between two looks at the lane's gate and at its worker's record."""

_BACK_OFF_S = 2.0
_PATHS = ("/v1/completions", "/v1/chat/completions")
_SILENT = (
    "The lane is closed and its offline worker says nothing: its requests were ended at the engine. "
    "Start it where it has died; see whether it is stopped or starved where it has not: it goes on from here "
    "when it wakes."
)
_REPLACED = (
    "Another offline worker has the lane, and the one before left requests in the engine: they were ended. "
    "See whether that worker is stopped or starved; it goes on from here when it wakes."
)
_log = get_logger("online")


class OrphanWatch:
    """Watches one lane on one engine, or beside it in an engine of its own."""

    def __init__(self, engine: Engine, client: Redis, pool: str, lane: str) -> None:
        self._engine = engine
        self._client: Any = client
        self._lane = lane
        keys = Keys(pool)
        self._gate_key, self._record_key = keys.gate(lane), keys.lane_telemetry(lane)
        self._state = OrphanState()
        self._last: LaneRecord | None = None
        """What the lane's worker said last; it outlives the record in Redis."""
        self._before: LaneRecord | None = None
        """What the worker before it said last, until its requests have been ended."""
        self._tries = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            wait_s = LOOK_S
            try:
                await self.look()
            except (RedisError, OSError):
                wait_s = _BACK_OFF_S  # the other loops say so; without Redis no gate is open either
            except Exception as error:  # noqa: BLE001 - the outer edge: serving must not end for this
                _log.error(
                    "Looking after offline requests failed; it goes on. Report this as a defect.",
                    key="orphans_failed",
                    error=repr(error)[:300],
                )
                wait_s = _BACK_OFF_S
            await asyncio.sleep(wait_s)

    async def look(self) -> bool:
        """Look once; whether requests were ended. Raises what the Redis client raises."""
        pipe = self._client.pipeline(transaction=True)
        pipe.time()
        pipe.get(self._gate_key)
        pipe.get(self._record_key)
        (seconds, micros), raw_gate, raw_record = await pipe.execute()
        now_ms = seconds * 1000.0 + micros / 1000.0
        gate = decode_gate(raw_gate)
        self._heard(decode_lane(raw_record), now_ms)
        if self._before is not None:
            self._tries += 1
            if await self._end(self._before, _REPLACED) or self._tries >= TRIES:
                self._before = None
        last = self._last
        self._state, due = step(
            self._state,
            now_ms=now_ms,
            gate_open=gate is not None and gate.state is GateState.OPEN,
            grace_ms=gate.grace_ms if gate is not None else 0.0,
            heard_ms=None if last is None else last.at_ms,
        )
        if due and last is not None:
            await self._end(last, _SILENT)
        return due

    def _heard(self, record: LaneRecord | None, now_ms: float) -> None:
        if record is not None and record.at_ms is not None and record.tag:
            if self._last is not None and left_behind(self._last.tag, record.tag):
                self._before, self._tries, self._state = self._last, 0, OrphanState()
            self._last = record
        elif self._last is not None and now_ms - (self._last.at_ms or 0.0) < RECORD_LIFE_MS * 0.9:
            self._last = None  # it has not run out: its worker has left and taken it away

    async def _end(self, last: LaneRecord, why: str) -> bool:
        """End what the worker may have in the engine; whether the engine could be told."""
        if last.engine and not last.engine.startswith(("http://", "https://")):
            return True  # that is no address, so nothing can be ended there
        engine = VllmHttpEngine(last.engine) if last.engine else self._engine
        ids = orphan_ids(last.tag, last.numbers[:AHEAD], last.next_number)
        held, told = 0.0, True
        try:
            stats = await engine.stats()
            held = (stats.running or 0.0) + (stats.waiting or 0.0)
            for path in _PATHS:
                await engine.abort(path, ids)
        except EngineError as error:
            told = False
            _log.warning(
                "Offline requests of a silent worker could not be ended; it is tried again.",
                key="orphans_stay",
                lane=self._lane,
                error=str(error),
            )
        finally:
            if last.engine:
                await engine.close()
        # A worker that died has taken its requests with it: then there is nothing to end and nothing to say.
        if held and told:
            _log.warning(why, key="orphans_ended", lane=self._lane, worker=last.worker, held=held)
        return told
