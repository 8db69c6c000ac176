"""Decision records as JSON, and their replay.

A record holds everything one cycle decided on, so it can be judged again by itself, years later or by another
version of the code: `replay` says in which fields the answer would differ.

JSON has no NaN and no infinity; they are written as null, which reads as unknown. A decision treats them as
unknown too, so a record replays the same.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from hybridsched.core.decide import decide
from hybridsched.core.packing import packs
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import Gate, GateDecision, Pack, Snapshot, Value


class CodecError(Exception):
    """Bytes that are not what they should be."""


class DecisionRecord(Value, frozen=True, kw_only=True):
    """One cycle of the policy worker."""

    cycle: int
    snapshot: Snapshot
    policy: PoolPolicy
    """As decided on: converted by `at_speed` where the pool runs at another speed."""
    decisions: tuple[GateDecision, ...]
    outcomes: tuple[str, ...] = ()
    """What came of publishing each decision, in the same order; empty when nothing was published."""
    by: str = ""
    """Who decided: the leader's token."""
    packs: tuple[Pack, ...] | None = None
    """The pack orders decided on the same snapshot; None: not decided, or the snapshot holds only a part."""


class Difference(Value, frozen=True, kw_only=True):
    """A field in which a replayed decision is not the recorded one."""

    lane: str
    field: str
    """A field of `GateDecision`, "decision" when one side has none for the lane, or "pack": a pack order,
    whose lane is "model NAME"."""
    recorded: str
    replayed: str


V = TypeVar("V", bound=Value)


def encode(value: Value) -> bytes:
    """Any value of `core` as JSON."""
    return msgspec.json.encode(value)


def decode(data: bytes | str, kind: type[V]) -> V:
    """JSON as a value of `kind`. Raises `CodecError` for anything else, unknown fields included."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        start = data[:80]
        raise CodecError(
            f"not a {kind.__name__}: {error}; it begins with {start!r}. "
            "It was written by another version, or by something else."
        ) from error


def decode_record(data: bytes | str) -> DecisionRecord:
    """One entry of the decision log."""
    return decode(data, DecisionRecord)


def decode_gate(data: bytes | str) -> Gate:
    """A gate as it stands in Redis."""
    return decode(data, Gate)


def replay(record: DecisionRecord) -> tuple[Difference, ...]:
    """Decide again on the record's snapshot and policy; empty when every decision is the same."""
    found = differences(record.decisions, decide(record.snapshot, record.policy))
    if record.packs is None:
        return found
    return found + _packs_differ(record.packs, packs(record.snapshot, record.policy))


def _packs_differ(recorded: tuple[Pack, ...], replayed: tuple[Pack, ...]) -> tuple[Difference, ...]:
    """Models whose pack order would be another, each as a difference of its own."""
    before = {pack.model: pack for pack in recorded}
    after = {pack.model: pack for pack in replayed}
    return tuple(
        Difference(
            lane=f"model {model}",
            field="pack",
            recorded=_text(before.get(model)),
            replayed=_text(after.get(model)),
        )
        for model in sorted(before.keys() | after.keys())
        if _text(before.get(model)) != _text(after.get(model))
    )


def differences(
    recorded: tuple[GateDecision, ...], replayed: tuple[GateDecision, ...]
) -> tuple[Difference, ...]:
    """All fields that differ, lane by lane in the recorded order."""
    found: list[Difference] = []
    for index in range(max(len(recorded), len(replayed))):
        old = recorded[index] if index < len(recorded) else None
        new = replayed[index] if index < len(replayed) else None
        if old is None or new is None or old.lane != new.lane:
            lane = old.lane if old is not None else new.lane if new is not None else ""
            found.append(
                Difference(
                    lane=lane,
                    field="decision",
                    recorded="none" if old is None else _text(old),
                    replayed="none" if new is None else _text(new),
                )
            )
            continue
        before: dict[str, object] = msgspec.to_builtins(old)
        after: dict[str, object] = msgspec.to_builtins(new)
        found += [
            Difference(
                lane=old.lane, field=field, recorded=_text(before[field]), replayed=_text(after[field])
            )
            for field in before
            if _text(before[field]) != _text(after[field])
        ]
    return tuple(found)


def _text(value: object) -> str:
    """JSON with sorted keys: what is compared is what the log can hold."""
    return msgspec.json.encode(value, order="sorted").decode()
