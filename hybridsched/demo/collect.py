"""Everything that a run has left, read into its record."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from hybridsched.demo.options import Plan
from hybridsched.demo.stack import Stack
from hybridsched.engines.request_log import RequestRow, read_requests
from hybridsched.report.record import (
    EngineLog,
    Event,
    PassRecord,
    PolicyStats,
    RecordError,
    event_of,
    read_engine,
    read_online,
)
from hybridsched.report.request_spans import engine_log
from hybridsched.store.decisions import DecisionLog
from hybridsched.store.events import EventLog
from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyStore
from hybridsched.workers.policy_stats import WorkerStatus

_ENCODE = msgspec.json.Encoder()


async def policy_stats(client: Redis, pool: str, plan: Plan) -> PolicyStats:
    """What the policy worker says of itself. Read it before the worker is stopped: the key goes with it."""
    raw = await client.get(Keys(pool).policy_worker)
    status = None if raw is None else msgspec.json.decode(raw, type=WorkerStatus)
    policy = await PolicyStore(client, pool).current()
    return PolicyStats(
        name=plan.policy.name,
        version=policy.version if policy else 0,
        slo=plan.policy.slo,
        cycles=status.cycles if status else 0,
        cycle_ms={"p50": status.cycle_ms["p50"], "p99": status.cycle_ms["p99"]} if status else {},
    )


async def read_pass(
    client: Redis, stack: Stack, *, start_s: float, end_s: float, restarts: dict[str, int]
) -> PassRecord:
    """The record of a pass, when its processes have stopped.

    Raises:
        RecordError: a log holds what is no part of it.
    """
    return PassRecord(
        start_s=start_s,
        end_s=end_s,
        online=read_online(stack.online_log()),
        engines=tuple(_engine(stack, name) for name in stack.ports),
        events=tuple(await _events(client, stack)),
        restarts=restarts,
        by_requests=stack.real,
    )


def _engine(stack: Stack, replica: str) -> EngineLog:
    if not stack.real:
        return read_engine(stack.iteration_log(replica), replica)
    rows, torn = requests_of(stack, replica)
    return engine_log(rows, replica, torn=torn)


def requests_of(stack: Stack, replica: str) -> tuple[list[RequestRow], int]:
    """What a real engine was sent in a pass, and how many lines of that log are torn.

    Raises:
        RecordError: the log holds what is no part of it.
    """
    path = stack.request_log(replica)
    try:
        return read_requests(path)
    except msgspec.ValidationError as error:
        raise RecordError(f"{path}: {error}") from None


async def _events(client: Redis, stack: Stack) -> list[Event]:
    raw = await EventLog(client, stack.pool).read_all()
    return [event for fields in raw if (event := event_of(fields)) is not None]


def recomputed(record: PassRecord) -> int:
    """Tokens that the offline workers say they computed again, summed over their chunks."""
    return sum(int(event.data.get("recomputed", 0)) for event in record.events if event.t == "chunk")


async def write_logs(client: Redis, stack: Stack) -> None:
    """Decision log and events of a pool as JSON lines."""
    with (stack.folder / "decisions.jsonl").open("wb") as file:
        async for line in DecisionLog(client, stack.pool).raw():
            file.write(line + b"\n")
    with (stack.folder / "events.jsonl").open("wb") as file:
        for fields in await EventLog(client, stack.pool).read_all():
            file.write(_ENCODE.encode(fields) + b"\n")
