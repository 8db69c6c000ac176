"""The values that decisions are made of: signals, views, the snapshot, gates and budgets.

All are immutable and round-trip through JSON (`msgspec.json`), so a decision log replays.
Times are milliseconds on one clock that the caller chooses; ages are milliseconds before `now_ms`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.reasons import Reason


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Base of every immutable value.

    Values are built of values, so they form no cycles, and the garbage collector need not walk them
    (`gc=False`): a snapshot of 10,000 lanes has 150,000 of them.
    """


def is_model_name(name: str) -> bool:
    """Whether a worker can be of the model of this name: it is not empty, and without blanks and braces."""
    return bool(name) and not any(sign in name for sign in "{}\n\r\0 ")


class Signal(Value, frozen=True, kw_only=True):
    """One measured number with its age. `value` None means unknown, which is never the same as 0."""

    value: float | None
    age_ms: float | None = None

    def known(self, max_age_ms: float) -> bool:
        """Whether the number was measured, and within `max_age_ms`.

        A negative age is not trusted, and neither is a value that is no finite number: a NaN would pass
        every comparison that is meant to close a gate.
        """
        value, age = self.value, self.age_ms
        # NaN and infinity are the floats whose difference with themselves is not 0. Written out because this
        # is asked fifteen times a lane and cycle.
        return value is not None and age is not None and 0.0 <= age <= max_age_ms and value - value == 0.0

    def within(self, max_age_ms: float) -> float | None:
        """The value if it is known within `max_age_ms`, else None."""
        value, age = self.value, self.age_ms
        if value is None or age is None or not 0.0 <= age <= max_age_ms or value - value != 0.0:
            return None
        return value


UNKNOWN = Signal(value=None, age_ms=None)


class GateState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"


class Budget(Value, frozen=True, kw_only=True):
    """What an open gate permits on one lane."""

    max_inflight: int
    """Offline requests in flight at once (sequences)."""
    chunk_tokens: int
    """Tokens (prompt + output) that one chunk should hold, so that its boundary comes in time."""
    slice_tokens: int
    """Offline prompt tokens that may enter one engine iteration; 0 means a prompt goes in whole."""
    beside_tokens: float = 0.0
    """The budget holds beside online work: a claim leaves the gate open while its replica's load (tokens, as
    routing counts) is at most this. 0: every claim closes the gate."""


NO_BUDGET = Budget(max_inflight=0, chunk_tokens=0, slice_tokens=0)


class Gate(Value, frozen=True, kw_only=True):
    """The permission of one lane, as published. It is a lease: it dies unless renewed."""

    lane: str
    state: GateState
    reason: Reason
    budget: Budget = NO_BUDGET
    epoch: int = 0
    """Raised by every fast-path close. An opening decided on an older epoch is refused."""
    grace_ms: float = 0.0
    """After a close: how long work in flight may still run before it is ended."""
    policy_version: int = 0
    by: str = ""
    at_ms: float = 0.0
    """Server time of the publication."""
    since_ms: float = 0.0
    """Server time since which the state has been so without a break; a new reason or budget leaves it."""


class LatencyFit(Value, frozen=True, kw_only=True):
    """How long an engine's iterations take, as fitted to them; see `core.latency` for the formula."""

    fixed_ms: float
    free_tokens: float
    token_ms: float
    cache_ms: float = 0.0
    """Milliseconds with all of the KV cache in use."""
    error: float = 0.0
    """Mean relative error over the samples it was fitted to."""
    samples: int = 0


class ReplicaView(Value, frozen=True, kw_only=True):
    """What is known of one replica: its worker's own counts and its engine's metrics."""

    replica: str
    model: str
    node: str = ""
    """The node it runs on, as Slurm names it; empty outside Slurm."""
    online_inflight: Signal = UNKNOWN
    """Online requests that the replica's worker holds (sent to the engine or about to be)."""
    online_idle_ms: Signal = UNKNOWN
    """How long the worker has held none; 0 while it holds any."""
    online_load: Signal = UNKNOWN
    """Tokens that its online requests still cost, as routing counts them (`core.routing.load_of`)."""
    online_ttft_ms: Signal = UNKNOWN
    """Mean time to first token of its online requests over the last half minute or so."""
    online_tpot_ms: Signal = UNKNOWN
    """The same of the time per further token."""
    engine_healthy: Signal = UNKNOWN
    """1 healthy, 0 not."""
    engine_fault: str = ""
    """The code of what is wrong with an engine that answers and is not healthy; empty when none is."""
    engine_running: Signal = UNKNOWN
    """`vllm:num_requests_running`: online, offline and foreign together."""
    engine_waiting: Signal = UNKNOWN
    """`vllm:num_requests_waiting`, the same."""
    kv_use: Signal = UNKNOWN
    """`vllm:kv_cache_usage_perc`, 0..1."""
    frozen_ms: Signal = UNKNOWN
    """How long the engine has held requests with no token counter moving; 0 when one moves or it is empty."""
    ttft_p99_ms: Signal = UNKNOWN
    tpot_p99_ms: Signal = UNKNOWN
    latency: LatencyFit | None = None
    """How long its iterations take; None: not known."""
    latency_age_ms: float | None = None
    """Since the last iterations that it was fitted to."""
    gpu_activity: Signal = UNKNOWN
    """Share of the sample time in which a kernel ran, 0..1; unknown under MIG without GPM."""


class LaneView(Value, frozen=True, kw_only=True):
    """One lane: where offline work may run, and what it runs now."""

    lane: str
    replica: str
    """The replica whose engine it shares, or beside which its own engine stands."""
    own: bool = False
    """It has an engine of its own: nothing of it is in the replica's."""
    gate: Gate | None = None
    """The gate as it stands in Redis; None when its lease has expired."""
    epoch: int | None = 0
    """The lane's current epoch (it outlives the gate); None: what stands there is no number."""
    offline_inflight: Signal = UNKNOWN
    """Offline requests that the lane's worker has in the engine, counted as the engine does: by sequences."""
    work: Signal = UNKNOWN
    """Lines that the lane's worker could run (queued or held back); unknown when no worker stands there."""
    offline_peak: Signal = UNKNOWN
    """Most offline requests the lane's worker had in the engine at once over the last two seconds or so.

    Optional: engine gauges lag, so a request that just ended still shows in them. With the peak known, the
    foreign-load check knows how many those can be; without it, the open gate's budget is taken instead. The
    span must not be shorter than engine metrics may be old (`idle.max_metric_age_ms`).
    """
    waiting_jobs: Signal = UNKNOWN
    """Slurm jobs that could take the lane: work where no worker stands. Unknown outside Slurm."""
    tokens_per_s: Signal = UNKNOWN
    """Measured offline tokens (prompt + output) per second of the lane; optional, it sizes the chunks."""


class QueueView(Value, frozen=True, kw_only=True):
    """Online requests of one model that no replica has claimed yet."""

    model: str
    depth: Signal = UNKNOWN
    oldest_wait_ms: Signal = UNKNOWN
    burst_requests: Signal = UNKNOWN
    """Requests of the largest burst to expect, learned from arrivals (`core.arrivals`)."""
    burst_tokens: Signal = UNKNOWN
    """The same in prompt tokens."""


class Hold(Value, frozen=True, kw_only=True):
    """An operator's order to keep gates closed: of one lane, or of the pool (`lane` empty)."""

    lane: str
    by: str
    why: str
    until_ms: float | None = None
    """Server time at which the hold ends by itself; None: until released."""
    id: str = ""
    """What it is released by. Several may hold one place: it is held while any of them stands."""

    def stands(self, now_ms: float) -> bool:
        """Whether its time is not over at `now_ms`."""
        return self.until_ms is None or self.until_ms > now_ms


class Rank(Value, frozen=True, kw_only=True):
    """One replica's place in its model's pack order: lower ranks take requests first, up to their caps."""

    replica: str
    rank: int
    max_inflight: int
    """It is passed over while it holds this many online requests."""
    max_load: float
    """It is passed over while it carries this much load (tokens, as routing counts)."""


class Pack(Value, frozen=True, kw_only=True):
    """The pack order of one model, as published. It is a lease: without renewal, routing is least loaded."""

    model: str
    ranks: tuple[Rank, ...] = ()
    """By rank."""
    reach: int = 0
    """Ranks that online needs now and in the largest burst to expect, a spare included."""
    fill: float = 1.0
    """What is left of the policy's caps after feedback on measured latency, 0..1."""
    first_tpot_ms: float | None = None
    """Mean time per token on the replica of the first rank, in whole milliseconds; None: not known."""
    adjusted_ms: float = 0.0
    """Server time at which `fill` was last looked at."""
    policy_version: int = 0
    by: str = ""
    at_ms: float = 0.0
    """Server time of the publication or its last renewal."""

    def stands(self, now_ms: float, lease_ms: float) -> bool:
        """Whether its lease holds at `now_ms`."""
        return 0.0 <= now_ms - self.at_ms <= lease_ms


class Snapshot(Value, frozen=True, kw_only=True):
    """Everything one cycle of the policy worker decides on."""

    pool: str
    now_ms: float
    """Server time."""
    replicas: tuple[ReplicaView, ...] = ()
    lanes: tuple[LaneView, ...] = ()
    queues: tuple[QueueView, ...] = ()
    holds: tuple[Hold, ...] = ()
    packs: tuple[Pack, ...] = ()
    """The pack orders as they stand published."""


class GateDecision(Value, frozen=True, kw_only=True):
    """What one cycle wants of one lane, why, and on which numbers."""

    lane: str
    state: GateState
    reason: Reason
    budget: Budget = NO_BUDGET
    grace_ms: float = 0.0
    epoch: int = 0
    """The epoch the decision was made on; it is published only while that still holds."""
    check_in_ms: float | None = None
    """When a closed gate could open by the mere passing of time (the rest of its idle window)."""
    numbers: dict[str, float | str | None] = {}
    """The inputs that decided, by signal name; None where unknown."""
