"""Decision records made readable: the answer of `why`, the lines of `decisions`."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import click
import msgspec

from hybridsched.cli.advice import Around, advice
from hybridsched.cli.slurm_view import no_lane_but
from hybridsched.cli.words import because, natural, numbers, own_engine_stands, sentence, span
from hybridsched.core.codec import DecisionRecord
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateDecision, GateState
from hybridsched.store.decisions import DecisionLog
from hybridsched.store.gates import GateReading, GateStore
from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyError, PolicyStore
from hybridsched.store.telemetry import Telemetry, TelemetryStore
from hybridsched.store.write_probe import write_problem
from hybridsched.workers.policy_stats import read_status

if TYPE_CHECKING:
    from redis.asyncio import Redis

LOOK_BACK = 5000
"""Records that `why` reads at most to find since when a lane has stood so."""


_RUN_OUT = (Reason.LEASE_EXPIRED, Reason.TELEMETRY_MISSING, Reason.TELEMETRY_STALE)
"""What a gate or a record says that nobody renews, be it that Redis takes no writes."""

SHOWN = 20
"""Names of lanes that an error lists."""


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


async def explain(client: Redis, pool: str, lane: str, *, look_back: int = LOOK_BACK) -> Answer:
    """Why the lane stands as it does now, and what to do. `look_back`: records that are read at most.

    Raises click's exception when there is no such lane.
    """
    telemetry = await TelemetryStore(client, pool).read_all()
    reading = await GateStore(client, pool).read(lane)
    past = await _past(DecisionLog(client, pool), lane, look_back)
    known = telemetry.places()
    if past is None and reading.gate is None and lane not in known:
        said = await no_lane_but(client, pool, lane, sorted(known))
        if said is not None:
            return Answer(sentence=said, data={"name": lane, "sentence": said})
        raise click.ClickException(no_such_lane(pool, lane, _living(telemetry)))
    now = telemetry.now_ms
    text, decision, since = _now(lane, reading, past, now)
    there = telemetry.lanes.get(lane)
    replica = telemetry.replicas.get(known.get(lane, lane))
    problem = ""
    if decision.reason is Reason.POLICY_MISSING:
        status = read_status(cast("bytes | None", await client.get(Keys(pool).policy_worker)))
        problem = "" if status is None else status.problem.partition(";")[0]
    refused = await write_problem(client, pool) if decision.reason in _RUN_OUT else ""
    if refused:
        text = f"Lane {lane} is closed: nobody can renew a gate or say how it is, because {refused}."
    else:
        around = Around(now, replica, there, problem)
        if there is None and await _on_slurm(client, pool):
            kin = [name for name, one in telemetry.replicas.items() if one is not None]
            around = around._replace(slurm=True, replicas=tuple(sorted(kin, key=natural)))
        text += advice(decision, around)
    problem = "" if there is None else there.problem
    if problem:
        text += f" Its offline worker waits: {problem}."
    if there is not None and there.stands:
        said = own_engine_stands(there.stands, there.offline_inflight)
        text += f" {said[0].upper()}{said[1:]}."
    refusal = "" if there is None else there.refusal
    if refusal:
        text += f" A rung of its pause ladder is missing: {refusal}."
    return Answer(
        sentence=text,
        data={
            "lane": lane,
            "state": decision.state.value,
            "reason": decision.reason.value,
            "since_ms": since,
            "numbers": decision.numbers,
            "budget": msgspec.to_builtins(decision.budget),
            "worker_problem": problem,
            "engine_stands": "" if there is None else there.stands,
            "rung_refused": refusal,
            "redis_problem": refused,
            "sentence": text,
        },
    )


async def _on_slurm(client: Redis, pool: str) -> bool:
    """Whether the pool's policy steers Slurm; not, when there is none that can be read."""
    try:
        policy = await PolicyStore(client, pool).current()
    except PolicyError:
        return False
    return policy is not None and policy.slurm.enabled


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


async def _past(log: DecisionLog, lane: str, look_back: int) -> _Past | None:
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
        if read >= look_back:
            break
    return newest


class Change(NamedTuple):
    """A lane's state or reason became another."""

    at_ms: float
    lane: str
    line: str


class Changes:
    """Turns records into lines, one for each change of a lane; heartbeats say nothing new and give none."""

    def __init__(self, lane: str | None = None) -> None:
        self._lane = lane
        self._last: dict[str, tuple[GateState, Reason]] = {}

    def lines(self, record: DecisionRecord) -> list[str]:
        """The lines of one record, which follows those given before."""
        found = []
        for i, decision in enumerate(record.decisions):
            if self._lane not in (None, decision.lane):
                continue
            now = (decision.state, decision.reason)
            if self._last.get(decision.lane) != now:
                self._last[decision.lane] = now
                found.append(_line(record, i))
        return found

    async def newest(self, records: AsyncIterator[DecisionRecord], limit: int) -> list[Change]:
        """The newest `limit` changes among `records`, which come newest first; the oldest change first.

        A lane's change is known once an older record shows it otherwise, so the log is read back that far and
        no farther; at its beginning what stood then counts as a change.
        """
        since: dict[str, tuple[tuple[GateState, Reason], DecisionRecord, int]] = {}
        found: list[Change] = []
        async for record in records:
            for i, decision in enumerate(record.decisions):
                lane, then = decision.lane, (decision.state, decision.reason)
                if self._lane not in (None, lane):
                    continue
                self._last.setdefault(lane, then)
                if lane in since and since[lane][0] != then:
                    found.append(_change(lane, *since[lane][1:]))
                since[lane] = (then, record, i)
            if len(found) >= limit:
                break
        else:
            found += [_change(lane, record, i) for lane, (_, record, i) in since.items()]
        return sorted(found, key=lambda change: change.at_ms)[-limit:]


def _change(lane: str, record: DecisionRecord, index: int) -> Change:
    return Change(record.snapshot.now_ms, lane, _line(record, index))


def _line(record: DecisionRecord, index: int) -> str:
    """One decision on one line, with the date: the log reaches back for days."""
    decision = record.decisions[index]
    at = datetime.fromtimestamp(record.snapshot.now_ms / 1000.0, UTC).astimezone()
    outcome = record.outcomes[index] if index < len(record.outcomes) else ""
    refused = f" [{outcome}]" if outcome in ("epoch_moved", "not_leader") else ""
    return (
        f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d} cycle {record.cycle} policy "
        f"{record.policy.version} lane {decision.lane} {decision.state.value} {decision.reason.value}"
        f"{refused} {numbers(decision)}"
    ).rstrip()


async def known_lanes(client: Redis, pool: str) -> list[str]:
    """The lanes that the pool knows now, sorted; also those of replicas that have gone of late."""
    return sorted((await TelemetryStore(client, pool).read_all()).places(), key=natural)


async def living_lanes(client: Redis, pool: str) -> list[str]:
    """Those of `known_lanes` whose replica or own worker speaks."""
    return _living(await TelemetryStore(client, pool).read_all())


def _living(telemetry: Telemetry) -> list[str]:
    places = telemetry.places().items()
    there = (lane for lane, replica in places if telemetry.replicas.get(replica) or telemetry.lanes.get(lane))
    return sorted(there, key=natural)


def no_such_lane(pool: str, lane: str, known: Sequence[str]) -> str:
    """A sentence: `lane` is none of `known`."""
    if not known:
        return f"pool {pool} knows no lane {lane!r}; none has published anything yet"
    near = difflib.get_close_matches(lane, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    names = ", ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")
    return f"pool {pool} knows no lane {lane!r}{hint} its lanes: {names}"
