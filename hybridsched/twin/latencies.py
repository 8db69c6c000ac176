"""How long the parts of the live pool take between each other, where the twin has no model of its own."""

from __future__ import annotations

import math
import random
from enum import IntEnum

from hybridsched.core.values import Value


class Latencies(Value, frozen=True, kw_only=True):
    """Milliseconds of the wall clock.

    From `hybridsched demo` with 4 simulated engines and all processes on two cores. The load's rows, the
    workers' events and the engines' iteration logs stamp one monotonic clock: `accept_ms`, `wake_ms`,
    `send_ms`, `reply_ms` and `offline_send_ms` are differences between them, in runs with little else on the
    machine, and `abort_ms` is what remains of the signal's path (see `signal_path_ms` in
    `benchmarks/twin_fidelity.py`). The others stand in no file: a round trip to Redis, or two, and what the
    worker does besides. `benchmarks/twin_fidelity.py --latencies` measures the first ones on another run.
    On a busy machine they are several times longer.

    Each is a median. How far a way's length lies from it this time is `spread`; see `Ways`.
    """

    accept_ms: float = 1.0
    """From a request's time in the trace until it stands in the queue (`sent_s` - `scheduled_s`, and a
    script)."""
    wake_ms: float = 1.5
    """From a wake until the woken worker's claim runs in Redis (`claimed_mono_s` - `mono_s` of a signal)."""
    send_ms: float = 3.5
    """From the claim until the request is in the engine (claim to the first online iteration, at best)."""
    reply_ms: float = 2.5
    """From the end of an iteration until its token is at the client."""
    record_ms: float = 1.5
    """From a change at a worker until the policy worker could read it."""
    cycle_ms: float = 2.0
    """From a cycle's look at the pool until its gates are published."""
    gate_ms: float = 1.0
    """From a gate's publication (by a claim, too) until the lane's worker acts on it."""
    abort_ms: float = 2.5
    """From there until the engine has been told to end the lane's requests."""
    offline_send_ms: float = 2.5
    """From leave to send an offline request until it is in the engine."""
    offline_answer_ms: float = 3.0
    """From the end of its last iteration until the lane's worker has the answer."""
    chunk_ms: float = 20.0
    """From the lane's wish for another chunk until its lines are in hand."""
    record_pause_ms: float = 10.0
    """Least time between two records of a replica's load (`record_pause_s` of the online worker)."""
    spread: float = 0.45
    """Standard deviation of the natural logarithm of a way's length. 781 requests of a live run: p90 over p50
    is 1.7 for the accept and 1.9 for the reply, p99 over p50 3.1 and 3.2; a log-normal with 0.45 has 1.8 and
    2.8. 0: always the same."""


class Way(IntEnum):
    """The ways of an online request."""

    ACCEPT = 0
    WAKE = 1
    SEND = 2
    REPLY = 3


_FACTORS, _WAYS = 4096, len(Way)


class Ways:
    """How long the ways take each time, as a factor of their median.

    Without it the same part would win every race. What a request that overtakes an abort costs (an iteration
    of both, hundreds of milliseconds) would never be seen, and it is what the slowest pauses are made of.

    The ways of an online request have the same factors in every run with one seed, whatever else happens, so
    that runs can be compared.
    """

    def __init__(self, spread: float, source: random.Random) -> None:
        self._factors = [math.exp(source.gauss(0.0, spread)) for _ in range(_FACTORS)]
        self._at = 0

    def of(self, request: int, way: Way) -> float:
        """For a way of the online request with that number."""
        return self._factors[(request * _WAYS + way) % _FACTORS]

    def next(self) -> float:
        """For a way of offline work."""
        self._at = at = (self._at + 1) % _FACTORS
        return self._factors[at]
