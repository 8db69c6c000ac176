"""What an engine could still take before an online objective is at risk: sequences, and tokens of prompts.

An iteration is what every online request on the engine waits for, token by token. So offline gets what keeps
the iteration below a limit: part of the objective for time per token, and less of it as measured latency
comes near an objective. How long the iteration would be is predicted from the engine's own (`core.latency`).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor, isfinite

from hybridsched.core.latency import predict
from hybridsched.core.policy import HeadroomPolicy, SloPolicy
from hybridsched.core.values import LatencyFit, Value

_BLOCK = 16
"""Prompt slices are whole KV blocks."""

_MOST = 1_000_000
"""More sequences, or tokens of a prompt in an iteration, than any engine has."""


class Room(Value, frozen=True, kw_only=True):
    """What offline may have in the engine."""

    sequences: int
    slice_tokens: int
    iteration_ms: float
    """Predicted, as the engine stands: what runs there goes on and no prompt comes in."""


def longest_ms(policy: HeadroomPolicy, slo: SloPolicy, levels: Iterable[float]) -> float:
    """The longest iteration that offline may be part of. 0: none.

    `levels` are measured latencies as shares of their objectives. Up to `calm_share` all is well; from there
    on the limit falls, and at the objective nothing is left.
    """
    worst = max(levels, default=0.0)
    left = min(1.0, max(0.0, (1.0 - worst) / (1.0 - policy.calm_share)))
    return slo.tpot_ms * policy.tpot_share * left


def room(
    fit: LatencyFit,
    policy: HeadroomPolicy,
    *,
    limit_ms: float,
    online: float,
    offline: float,
    kv_use: float,
    most_slice_tokens: int,
) -> Room:
    """How much offline fits beside `online` requests, where `offline` run already."""
    running = online + offline
    now_ms = predict(fit, running, kv_use)
    if not isfinite(now_ms):
        return Room(sequences=0, slice_tokens=policy.least_slice_tokens, iteration_ms=now_ms)
    # A further sequence decodes one token an iteration and holds as much of the cache as the others do.
    each_ms = fit.token_ms if running >= fit.free_tokens else 0.0
    if running > 0:
        each_ms += fit.cache_ms * kv_use / running
    left_ms = limit_ms * policy.decode_share - now_ms
    sequences = 0 if left_ms < 0.0 else _MOST
    if each_ms > 0.0:
        sequences = _whole(offline + left_ms / each_ms)
    tokens = 0.0
    if limit_ms > now_ms:
        tokens = max(0.0, fit.free_tokens - running) + (limit_ms - now_ms) / fit.token_ms
    slice_tokens = _whole(tokens) // _BLOCK * _BLOCK
    if most_slice_tokens > 0:
        slice_tokens = min(slice_tokens, most_slice_tokens)
    if slice_tokens < policy.least_slice_tokens:
        # What decodes may go on; nothing new begins.
        sequences = min(sequences, _whole(offline))
    return Room(
        sequences=sequences,
        slice_tokens=max(slice_tokens, policy.least_slice_tokens),
        iteration_ms=now_ms,
    )


def _whole(value: float) -> int:
    """Rounded down, from 0 to `_MOST`; what is no number is no room."""
    return floor(min(max(value, 0.0), float(_MOST))) if value == value else 0
