"""Why a batch stands still: nobody runs its model, or every lane that could run it is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hybridsched.store.gates import decode_gate
from hybridsched.store.keys import Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from hybridsched.core.values import Gate
    from hybridsched.store.batch_reader import BatchReader
    from hybridsched.store.batch_values import BatchInfo
    from hybridsched.store.telemetry import LaneRecord, ReplicaRecord

T = TypeVar("T")

_EXPLAINED = 3
"""Reasons that are spelled out; each is that of one lane or more."""

_RECENT = 100
"""Decisions that are read to explain a lane: heartbeats name every lane each two seconds."""


class Waits(NamedTuple):
    """Why a batch does not go on."""

    code: str
    message: str
    since_ms: float | None = None


def live_lanes(store: BatchReader) -> tuple[list[LaneRecord], Waits | None]:
    """The pool's live offline workers; or none, and why that cannot be seen."""
    return _seen(store.lanes)


def stopped(store: BatchReader) -> Waits | None:
    """That Redis takes no writes, so that nothing in the pool goes on; None when it does."""
    from hybridsched.store.write_probe import CODE

    problem = store.write_problem()
    return Waits(CODE, f"nothing in this pool goes on, because {problem}") if problem else None


def missing_worker(store: BatchReader, batch: BatchInfo) -> Waits | None:
    """That a batch waits for a worker, or that this cannot be seen; None when it does not."""
    lanes, unseen = _seen(store.lanes)
    replicas, unseen_too = _seen(store.replicas)
    return unseen or unseen_too or no_worker(batch, lanes, replicas)


def _seen(read: Callable[[], list[T]]) -> tuple[list[T], Waits | None]:
    import redis

    from hybridsched.store.batch_reader import WRONG_TYPE

    try:
        return read(), None
    except redis.ResponseError as error:
        if not str(error).startswith(WRONG_TYPE):
            raise
        why = f"whether a worker is there cannot be seen: {error}; delete that key, it comes back by itself"
        return [], Waits("workers_unknown", why)


def no_worker(
    batch: BatchInfo, lanes: Sequence[LaneRecord], replicas: Sequence[ReplicaRecord]
) -> Waits | None:
    """That a batch waits for a worker, when none of `lanes` could run it; None when that is not so.

    `lanes` are the live workers of the pool, `replicas` what it serves online. Of a batch with parts each
    waits for itself, and those that nobody runs are told.
    """
    if batch.status.ended:
        return None
    if batch.jobs_only:
        if able(batch, lanes):
            return None
        return Waits("no_worker", "no Slurm job of the batch has a lane now; see squeue")
    parts = parts_left(batch)
    lacking = [part for part in parts if not able(part, lanes)]
    if not lacking:
        return None
    why = _no_worker_of(lacking[0], lanes, replicas)
    if not batch.parts:
        return Waits("no_worker", why)
    others = [f"{part.model} ({_lines_left(part):,} lines)" for part in lacking[1:]]
    more = f"; nor of {', '.join(others)}" if others else ""
    rest = "the other lines go on" if len(lacking) < len(parts) else "none goes on"
    return Waits(
        "no_worker", f"{_lines_left(lacking[0]):,} lines of {lacking[0].model} wait, {rest}: {why}{more}"
    )


def parts_left(batch: BatchInfo) -> list[BatchInfo]:
    """What each model's workers still have of a batch; the batch itself where it has no parts."""
    from hybridsched.store.batch_values import part_info

    if not batch.parts:
        return [batch]
    return [part_info(batch, place) for place, part in enumerate(batch.parts) if not part.over]


def _lines_left(part: BatchInfo) -> int:
    return max(0, part.lines - part.done - part.failed)


def _no_worker_of(batch: BatchInfo, lanes: Sequence[LaneRecord], replicas: Sequence[ReplicaRecord]) -> str:
    place = next((one for one in replicas if batch.model in (None, one.model)), None)
    model = batch.model or (place.model if place else "MODEL")
    serves = f"serves model {batch.model}" if batch.model else "is up"
    if place is None:
        start = f"--replica NAME --model {model} --engine http://HOST:PORT"
    else:
        start = f"--replica {place.replica} --model {model} --engine {place.url or 'http://HOST:PORT'}"
    others = sorted({lane.model for lane in lanes if lane.model})
    known = f" (those that are up serve {', '.join(others)})" if others else ""
    return f"no offline worker {serves}{known}; start one: hybridsched worker offline {start}"


def able(batch: BatchInfo, lanes: Sequence[LaneRecord]) -> list[LaneRecord]:
    """Those of the pool's live workers that could run the batch; of one with parts any that is left."""
    from hybridsched.store.batch_values import PartInfo

    if isinstance(batch, PartInfo) or not batch.parts:
        return [lane for lane in lanes if batch.model in (None, lane.model)]
    return [lane for lane in lanes if lane.model in batch.models]


async def closed_lanes(
    client: Redis, pool: str, batch: BatchInfo, lanes: Sequence[LaneRecord]
) -> Waits | None:
    """That all of `lanes` that could run a batch, or a part of it, are closed, and why; else None."""
    for part in parts_left(batch):
        why = await all_closed(client, pool, able(part, lanes))
        if why is not None:
            whose = f"{_lines_left(part):,} lines of {part.model} wait: " if batch.parts else ""
            return why._replace(message=f"{whose}{why.message}")
    return None


async def all_closed(client: Redis, pool: str, lanes: Sequence[LaneRecord]) -> Waits | None:
    """That none of `lanes`, which could run a batch, is open with an engine that can be used, and why.

    None: one is, or there is none.
    """
    import click

    from hybridsched.cli.decision_view import explain

    if not lanes:
        return None
    keys = Keys(pool)
    raw: Any = await client.mget([keys.gate(lane.lane) for lane in lanes])
    gates = [decode_gate(one) for one in raw]
    states = [None if gate is None else gate.state for gate in gates]
    open_ = [lane for lane, state in zip(lanes, states, strict=True) if state == "open"]
    if open_:
        return _open_and_idle(open_)
    first: dict[str, str] = {}
    for lane, gate in zip(lanes, gates, strict=True):
        first.setdefault(_reason(gate), lane.lane)
    said = []
    for name in list(first.values())[:_EXPLAINED]:
        try:
            said.append((await explain(client, pool, name, look_back=_RECENT)).sentence)
        except click.ClickException:
            continue  # it has left this moment
    code = next(iter(first)) if len(first) == 1 else "lanes_closed"
    every = f"all {len(lanes)} lanes that could run it are closed. " if len(lanes) > 1 else ""
    left = len(first) - len(said)
    more = f" {left} more reasons: hybridsched pool status." if left else ""
    return Waits(code, f"{every}{' '.join(said)}{more}")


def _open_and_idle(lanes: Sequence[LaneRecord]) -> Waits | None:
    """That the workers of open lanes cannot use their engines, and why; None: one of them can."""
    if not all(lane.problem for lane in lanes):
        return None
    code, _, why = lanes[0].problem.partition(": ")
    more = f" (and {len(lanes) - 1} more: hybridsched pool status)" if len(lanes) > 1 else ""
    return Waits(code, f"lane {lanes[0].lane} is open, and its offline worker waits: {why or code}{more}")


def _reason(gate: Gate | None) -> str:
    return "lease_expired" if gate is None else gate.reason.value
