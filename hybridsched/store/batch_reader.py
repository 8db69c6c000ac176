"""Batches as the store holds them, for whoever looks at them. Errors of redis-py pass."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import redis

from hybridsched.core.deadlines import Outlook, Work, outlooks
from hybridsched.store.batch_values import (
    BatchInfo,
    BatchProgress,
    BatchUnknownError,
    Chunk,
    part_info,
    read_info,
    seen_by,
    work_of,
)
from hybridsched.store.keys import Keys
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord, decode_lane, decode_replica
from hybridsched.store.write_probe import sync_write_problem

WRONG_TYPE = "WRONGTYPE"
"""How the server's error begins when a key holds another type than ours."""

WORKER_ALIVE_MS = 10_000.0
"""A worker that has said nothing for this long counts as gone."""

_chunk = msgspec.json.Decoder(Chunk)


class BatchReader:
    """The batches of one pool, to look at."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self.keys = Keys(pool)
        self._client = client

    def get(self, batch_id: str) -> BatchInfo:
        """What is known of a batch.

        Raises:
            BatchUnknownError: naming ids that look alike.
        """
        info = self._find(batch_id)
        if info is None:
            if self._client.exists(self.keys.batch(batch_id)):
                raise BatchUnknownError(
                    f"what stands in Redis at {self.keys.batch(batch_id)} is no batch that can be read; its "
                    f"files are untouched: delete that key and submit the file again to take it up"
                )
            raise BatchUnknownError(self._unknown(batch_id))
        return info

    def all(self) -> list[BatchInfo]:
        """Every batch that can be looked up, oldest first."""
        return self._read_all(self.keys.batches)

    def active(
        self, model: str | None = None, *, any_model: bool = False, only: str | None = None
    ) -> list[BatchInfo]:
        """Batches that have not ended and that a worker of `model` may run, oldest first. One with parts is
        as that worker sees it (`PartInfo`).

        With `only` that batch, whatever its model; batches of Slurm jobs are found in no other way, except
        that `any_model` means all.
        """
        found = self._open_to(model, any_model=any_model, only=only)
        if any_model:
            return found
        return [seen for batch in found if (seen := seen_by(batch, model) if batch.parts else batch)]

    def _open_to(
        self, model: str | None, *, any_model: bool = False, only: str | None = None
    ) -> list[BatchInfo]:
        """The same, each as a whole."""
        if only is not None:
            batch = self._find(only)
            return [] if batch is None or batch.status.ended else [batch]
        found = self._read_all(self.keys.batches_active)
        if any_model:
            return found
        return [batch for batch in found if not batch.jobs_only and seen_by(batch, model) is not None]

    def progress(self, batch_id: str) -> BatchProgress:
        """A batch with what its chunks that have not ended have reported so far.

        One that was given back, at a pause or a requeue, keeps its lines in its journal: they count too.

        Raises:
            BatchUnknownError: there is no such batch.
        """
        batch = self.get(batch_id)
        chunks = [chunk for _, chunk in self._readable_chunks(batch_id)]
        begun = [chunk for chunk in chunks if chunk.state in ("leased", "queued")]
        return BatchProgress(
            batch=batch,
            done=batch.done + sum(chunk.done for chunk in begun),
            failed=batch.failed + sum(chunk.failed for chunk in begun),
            running_chunks=sum(chunk.state == "leased" for chunk in chunks),
            queued_chunks=sum(chunk.state == "queued" for chunk in chunks),
        )

    def pace(self, model: str | None) -> float | None:
        """Tokens a second that the batches of a model have been done at of late; None: nobody knows.

        For a batch of no model that of all models together.
        """
        pattern = [self.keys.batch_pace(model)] if model else self._paces()
        found: list[Any] = self._client.mget(pattern) if pattern else []
        paces = [_number(text) for text in found if text is not None]
        known = [pace for pace in paces if pace is not None]
        return sum(known) if known else None

    def _paces(self) -> list[str]:
        """The keys of every model that live workers run."""
        return [self.keys.batch_pace(model) for model in sorted({lane.model for lane in self.lanes()})]

    def now_ms(self) -> float:
        """The server's time."""
        seconds, micros = self._client.time()
        return float(seconds) * 1000.0 + float(micros) / 1000.0

    def outlook(self, progress: BatchProgress) -> tuple[Outlook, float | None, float] | None:
        """How a batch stands towards its deadline among the others of its model, the pace that this goes by
        (tokens/s), and the server's time then. None: it has no deadline, or has ended. Raises as `lanes`.

        One with parts is in time when all of them are: it stands as the one that stands worst.
        """
        batch = progress.batch
        if batch.deadline_ms is None or batch.status.ended:
            return None
        if not batch.parts:
            return self._outlook(batch, work_of(batch, ended=progress.done + progress.failed))
        parts = [part_info(batch, place) for place, part in enumerate(batch.parts) if not part.over]
        found = [self._outlook(part, work_of(part)) for part in parts or [part_info(batch, 0)]]
        return max(found, key=lambda one: _badness(one[0]))

    def _outlook(self, batch: BatchInfo, work: Work) -> tuple[Outlook, float | None, float]:
        works = [work_of(other) for other in self.active(batch.model) if other.id != batch.id]
        pace, now_ms = self.pace(batch.model), self.now_ms()
        return outlooks([*works, work], now_ms, pace)[batch.id], pace, now_ms

    def workers(self, *models: str | None) -> int:
        """How many live offline workers run one of these models; None: any. Raises as `lanes`."""
        return sum(None in models or record.model in models for record in self.lanes())

    def write_problem(self) -> str:
        """Why Redis refuses every write, which stops all work of the pool; empty when it does not."""
        return sync_write_problem(self._client, self.keys)

    def replicas(self) -> list[ReplicaRecord]:
        """What the pool's live online workers say of themselves. Raises as `lanes`."""
        with self._naming(self.keys.replica_index):
            names: Any = self._client.zrange(self.keys.replica_index, 0, -1)
        if not names:
            return []
        keys = [self.keys.telemetry(name.decode("utf-8", "replace")) for name in names]
        found: Any = self._client.mget(keys)
        return [record for record in map(decode_replica, found) if record is not None]

    def lanes(self) -> list[LaneRecord]:
        """What the pool's live offline workers say of themselves.

        Raises:
            redis.ResponseError: that cannot be seen, as the index is none; it names the key.
        """
        seconds, micros = self._client.time()
        since = seconds * 1000.0 + micros / 1000.0 - WORKER_ALIVE_MS
        with self._naming(self.keys.lane_index):
            lanes: Any = self._client.zrangebyscore(self.keys.lane_index, since, "+inf")
        if not lanes:
            return []
        found: Any = self._client.mget(
            [self.keys.lane_telemetry(lane.decode("utf-8", "replace")) for lane in lanes]
        )
        return [record for record in map(decode_lane, found) if record is not None and record.worker]

    # inside

    @contextmanager
    def _naming(self, index: str) -> Iterator[None]:
        """Errors about the type of a key say which key, and what it is."""
        try:
            yield
        except redis.ResponseError as error:
            if not str(error).startswith(WRONG_TYPE):
                raise
            found: Any = self._client.type(index)
            raise redis.ResponseError(f"{WRONG_TYPE} {index} is a {found.decode()}, not a zset") from error

    def _readable_chunks(self, batch_id: str) -> list[tuple[int, Chunk]]:
        """Numbers and chunks. What is no chunk is passed over here; `sweep` sees to it."""
        found: Any = self._client.hgetall(self.keys.batch_chunks(batch_id))
        chunks = []
        for number, text in found.items():
            with suppress(ValueError, RecursionError):
                chunks.append((int(number), _chunk.decode(text)))
        return chunks

    def _find(self, batch_id: str) -> BatchInfo | None:
        (answer,) = self._read_hashes([batch_id])
        return read_info(batch_id, answer)

    def _read_all(self, index: str) -> list[BatchInfo]:
        with self._naming(index):
            members: Any = self._client.zrange(index, 0, -1)
        ids = [member.decode("utf-8", "replace") for member in members]
        hashes = self._read_hashes(ids)
        if gone := [member for member, fields in zip(members, hashes, strict=True) if fields == {}]:
            self._client.zrem(index, *gone)
        found = [read_info(batch_id, fields) for batch_id, fields in zip(ids, hashes, strict=True)]
        return [info for info in found if info is not None]

    def _read_hashes(self, ids: Sequence[str]) -> list[Any]:
        """The records of batches; an error in the place of one that is no hash."""
        pipe = self._client.pipeline(transaction=False)
        for batch_id in ids:
            pipe.hgetall(self.keys.batch(batch_id))
        return list(pipe.execute(raise_on_error=False)) if ids else []

    def _unknown(self, batch_id: str) -> str:
        known = [batch.id for batch in self.all()]
        near = difflib.get_close_matches(batch_id, known, n=3, cutoff=0.5)
        near = near or [other for other in known if batch_id and batch_id in other][:3]
        hint = f"did you mean {', '.join(near)}?" if near else "see `hybridsched batch list`"
        return f"no batch {batch_id!r} in pool {self.keys.pool!r}; {hint}"


def _number(text: bytes) -> float | None:
    """A pace as a worker writes it; None: somebody else wrote there."""
    try:
        pace = float(text)
    except ValueError:
        return None
    return pace if 0.0 <= pace < 1e12 else None


def _badness(outlook: Outlook) -> tuple[int, float]:
    """Puts one that cannot be in time above one of which nothing is known, and that above the others."""
    if outlook.feasible is None:
        return 1, 0.0
    return (0 if outlook.feasible else 2), outlook.risk or 0.0
