"""Decision records made readable: the answer of `why`, the lines of `decisions`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from hybridsched.cli.words import because, numbers, sentence, span
from hybridsched.core.codec import DecisionRecord
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateDecision, GateState
from hybridsched.store.decisions import DecisionLog
from hybridsched.store.gates import GateReading, GateStore
from hybridsched.store.telemetry import TelemetryStore

if TYPE_CHECKING:
    from redis.asyncio import Redis

LOOK_BACK = 5000
"""Records that `why` reads at most to find since when a lane has stood so."""


class Answer(NamedTuple):
    """What `why` says."""

    sentence: str
    data: dict[str, Any]


class _Past(NamedTuple):
    """What the log knows of a lane."""

    decision: GateDecision
    """The newest."""
    at_ms: float
    since_ms: float
    """Server time from which state and reason have been so without a break."""


async def explain(client: Redis, pool: str, lane: str) -> Answer:
    """Why the lane stands as it does now. Raises click's exception when there is no such lane."""
    telemetry = await TelemetryStore(client, pool).read_all()
    reading = await GateStore(client, pool).read(lane)
    past = await _past(DecisionLog(client, pool), lane)
    known = telemetry.places()
    if past is None and reading.gate is None and lane not in known:
        names = ", ".join(sorted(known)) or "none has published anything yet"
        raise click.ClickException(f"pool {pool} knows no lane {lane!r}; its lanes: {names}")
    now = telemetry.now_ms
    text, decision, since = _now(lane, reading, past, now)
    return Answer(
        sentence=text,
        data={
            "lane": lane,
            "state": decision.state.value,
            "reason": decision.reason.value,
            "since_ms": since,
            "numbers": decision.numbers,
            "budget": msgspec.to_builtins(decision.budget),
            "sentence": text,
        },
    )


def _now(
    lane: str, reading: GateReading, past: _Past | None, now: float
) -> tuple[str, GateDecision, float | None]:
    """The gate in Redis counts; the log explains it where it speaks of the same state and reason."""
    gate = reading.gate
    if gate is None:
        decision = GateDecision(lane=lane, state=GateState.CLOSED, reason=Reason.LEASE_EXPIRED)
        text = sentence(decision, since_ms=None)
        if past is not None:
            then = f"{past.decision.state.value} ({because(past.decision)})"
            text += f" The last decision, {span(now - past.at_ms)} ago, was {then}."
        return text, decision, None
    if past is not None and (past.decision.state, past.decision.reason) == (gate.state, gate.reason):
        since = max(0.0, now - past.since_ms)
        return sentence(past.decision, since_ms=since), past.decision, since
    decision = _bare(gate)
    since = max(0.0, now - gate.at_ms)
    return sentence(decision, since_ms=since), decision, since


def _bare(gate: Gate) -> GateDecision:
    """A gate that no record explains (the fast path's close): without numbers."""
    return GateDecision(
        lane=gate.lane, state=gate.state, reason=gate.reason, budget=gate.budget, epoch=gate.epoch
    )


async def _past(log: DecisionLog, lane: str) -> _Past | None:
    newest: _Past | None = None
    read = 0
    async for record in log.backwards():
        read += 1
        for decision in record.decisions:
            if decision.lane != lane:
                continue
            at = record.snapshot.now_ms
            if newest is None:
                newest = _Past(decision=decision, at_ms=at, since_ms=at)
            elif (decision.state, decision.reason) == (newest.decision.state, newest.decision.reason):
                newest = newest._replace(since_ms=at)
            else:
                return newest
        if read >= LOOK_BACK:
            break
    return newest


class Changes:
    """Turns records into lines, one for each change of a lane; heartbeats say nothing new and give none."""

    def __init__(self, lane: str | None = None) -> None:
        self._lane = lane
        self._last: dict[str, tuple[GateState, Reason]] = {}

    def lines(self, record: DecisionRecord) -> list[str]:
        """The lines of one record, which follows those given before."""
        at = datetime.fromtimestamp(record.snapshot.now_ms / 1000.0, UTC).astimezone()
        clock = at.strftime("%H:%M:%S.") + f"{at.microsecond // 1000:03d}"
        found = []
        for i, decision in enumerate(record.decisions):
            if self._lane not in (None, decision.lane):
                continue
            now = (decision.state, decision.reason)
            if self._last.get(decision.lane) == now:
                continue
            self._last[decision.lane] = now
            outcome = record.outcomes[i] if i < len(record.outcomes) else ""
            refused = f" [{outcome}]" if outcome in ("epoch_moved", "not_leader") else ""
            found.append(
                f"{clock} cycle {record.cycle} policy {record.policy.version} lane {decision.lane} "
                f"{decision.state.value} {decision.reason.value}{refused} {numbers(decision)}".rstrip()
            )
        return found
