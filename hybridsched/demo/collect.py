"""Everything that a run has left, read into its record; and the files of the report folder."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import Redis

from hybridsched.demo.options import Plan
from hybridsched.demo.stack import Stack
from hybridsched.report.html import render
from hybridsched.report.record import (
    Event,
    OnlineRow,
    PassRecord,
    PolicyStats,
    RunRecord,
    event_of,
    read_engine,
    read_online,
)
from hybridsched.report.summary import summarise
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
        engines=tuple(read_engine(stack.iteration_log(name), name) for name in stack.ports),
        events=tuple(await _events(client, stack)),
        restarts=restarts,
    )


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


def write_report(record: RunRecord, folder: Path) -> dict[str, Any]:
    """summary.json, report.html and requests.csv. Returns the summary."""
    summary = summarise(record)
    (folder / "summary.json").write_bytes(msgspec.json.format(_ENCODE.encode(summary), indent=2) + b"\n")
    (folder / "report.html").write_text(render(summary, record), encoding="utf-8")
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pass", *OnlineRow.__struct_fields__])
        for name, run in (("baseline", record.baseline), ("together", record.together)):
            for row in run.online if run is not None else ():
                writer.writerow([name, *msgspec.structs.astuple(row)])
    return summary
