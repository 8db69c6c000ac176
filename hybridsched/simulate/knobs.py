"""What `policy tune` may turn: keys of a policy file, each with its range, and a point in all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.values import Value
from hybridsched.policyfile import keys


class KnobError(ValueError):
    """A knob cannot be turned; the message says what is allowed."""


class Knob(Value, frozen=True, kw_only=True):
    """One key and the values that are tried for it."""

    key: str
    """Dotted, as in docs/policy.md."""
    low: float
    high: float
    log: bool = False
    """The same ratio is the same distance: for spans and sizes over several powers of ten."""
    step: float | None = None
    """Values are multiples of it; 1 for a count."""

    def at(self, place: float) -> float | int:
        """The value at a place from 0 (`low`) to 1 (`high`)."""
        place = min(1.0, max(0.0, place))
        if self.log:
            value = self.low * (self.high / self.low) ** place
        else:
            value = self.low + (self.high - self.low) * place
        if self.step is None:
            return float(f"{value:.3g}")
        value = min(self.high, max(self.low, round(value / self.step) * self.step))
        return int(value) if float(self.step).is_integer() else value

    def place_of(self, value: float) -> float:
        """The place of a value, the nearest one within the range."""
        value = min(self.high, max(self.low, value))
        if self.high == self.low:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


_OFFLINE = (
    Knob(key="offline.max_inflight", low=8, high=192, log=True, step=1),
    Knob(key="offline.slice_tokens", low=64, high=2048, log=True, step=16),
    Knob(key="offline.kv_share", low=0.3, high=0.95),
)
_PACK = (
    Knob(key="pack.max_inflight", low=2, high=64, log=True, step=1),
    Knob(key="pack.max_wait_tokens", low=256, high=32_768, log=True),
    Knob(key="pack.spare", low=0, high=3, step=1),
    Knob(key="pack.gap_window_ms", low=5, high=1000, log=True),
    Knob(key="pack.far_slice_tokens", low=256, high=4096, log=True, step=16),
)
DEFAULT_KNOBS: dict[PolicyKind, tuple[Knob, ...]] = {
    PolicyKind.IDLE_WINDOW: (
        Knob(key="idle.window_ms", low=5, high=1000, log=True),
        Knob(key="pause.grace_ms", low=0, high=200),
        *_OFFLINE,
    ),
    PolicyKind.CONSOLIDATE: (*_PACK, *_OFFLINE),
    PolicyKind.HEADROOM: (
        Knob(key="headroom.tpot_share", low=0.2, high=1.0),
        Knob(key="headroom.peer_share", low=0.0, high=1.0),
        Knob(key="headroom.max_backlog_tokens", low=128, high=16_384, log=True),
        *_PACK,
        *_OFFLINE,
    ),
    PolicyKind.UNPROTECTED: _OFFLINE,
}
"""Of the kinds that have any. For others, and for other keys, knobs are named."""


def parse_knob(given: str) -> Knob:
    """A knob as `KEY=LOW:HIGH` or `KEY=LOW:HIGH:log`; a key whose values are counts takes whole numbers only.

    Raises:
        KnobError: it is none.
    """
    key, _, span = given.partition("=")
    parts = span.split(":")
    allowed = "give KEY=LOW:HIGH or KEY=LOW:HIGH:log, such as idle.window_ms=20:500:log"
    known = _numbers()
    if key not in known:
        raise KnobError(
            f"knob {given!r}: {key!r} is no key with a number; there are {', '.join(sorted(known))}"
        )
    try:
        low, high = map(float, parts[:2])
    except ValueError:
        raise KnobError(f"knob {given!r}: no two numbers; {allowed}") from None
    log = parts[2:] == ["log"]
    if parts[2:] and not log:
        raise KnobError(f"knob {given!r}: {':'.join(parts[2:])!r} is not understood; {allowed}")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise KnobError(f"knob {given!r}: the range goes from {low:g} to {high:g}; {allowed}")
    if log and low <= 0:
        raise KnobError(f"knob {given!r}: with log the range begins above 0")
    return Knob(key=key, low=low, high=high, log=log, step=1 if known[key] is int else None)


def _numbers() -> dict[str, type]:
    """Keys whose values are numbers, and of which type."""
    values: dict[str, Any] = msgspec.to_builtins(PoolPolicy(name="x", kind=PolicyKind.IDLE_WINDOW))
    found: dict[str, type] = {}
    for key in keys():
        table, _, name = key.rpartition(".")
        value = values[table][name] if table else values[name]
        if isinstance(value, int | float) and not isinstance(value, bool) and not key.startswith("slurm."):
            found[key] = type(value)
    return found


def value_of(policy: PoolPolicy, key: str) -> float:
    """The value that a policy has for a key with a number."""
    table, _, name = key.rpartition(".")
    return float(getattr(getattr(policy, table) if table else policy, name))


def turned(policy: PoolPolicy, knobs: Sequence[Knob], places: Sequence[float]) -> PoolPolicy:
    """The policy with each knob at its place."""
    for knob, place in zip(knobs, places, strict=True):
        table, _, name = knob.key.rpartition(".")
        value = knob.at(place)
        if table:
            inner = msgspec.structs.replace(getattr(policy, table), **{name: value})
            policy = msgspec.structs.replace(policy, **{table: inner})
        else:
            policy = msgspec.structs.replace(policy, **{name: value})
    return policy
