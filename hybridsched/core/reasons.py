"""The closed set of reason codes. Every decision carries exactly one."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a gate is open or closed. Values are stable: they stand in logs, in Redis and in reports."""

    # open
    IDLE = "idle"
    """Every online signal has shown idle over the whole window."""
    HEADROOM = "headroom"
    """Online runs there, and the engine's iterations have room for offline within the objectives."""
    UNPROTECTED = "unprotected"
    """The policy forces the gate open. Only a baseline does this."""

    # closed, measured
    ONLINE_ACTIVE = "online_active"
    """Online requests run or wait on the replica."""
    ONLINE_ARRIVED = "online_arrived"
    """The replica's own worker closed the gate when it took an online request (fast path)."""
    ONLINE_QUEUED = "online_queued"
    """Online requests of the model wait in the queue."""
    IDLE_WINDOW = "idle_window"
    """Idle, but not yet for the whole window."""
    FOREIGN_LOAD = "foreign_load"
    """The engine runs requests that neither online nor our own offline work accounts for."""
    GPU_ACTIVE = "gpu_active"
    """The GPU computes although neither online nor our own offline work runs on it (only if asked for)."""
    NO_ROOM = "no_room"
    """The engine has no sequence slot or KV cache left that offline may use."""
    NO_HEADROOM = "no_headroom"
    """Beside online, offline would put an objective at risk: by the predicted iteration, by measured latency,
    or because online prompts wait."""
    FLOOR = "floor"
    """Opening would leave online fewer GPUs than the floor."""

    # closed, unknown
    TELEMETRY_MISSING = "telemetry_missing"
    """The replica has published nothing, or its record has expired."""
    TELEMETRY_STALE = "telemetry_stale"
    """The replica's record is older than its limit."""
    METRIC_MISSING = "metric_missing"
    """The engine does not report a metric that the policy needs."""
    METRIC_STALE = "metric_stale"
    """The engine's metrics could not be read within their age limit."""
    METRIC_FROZEN = "metric_frozen"
    """The engine holds requests but its counters do not move."""
    LATENCY_UNKNOWN = "latency_unknown"
    """Offline would run beside online, and how long the engine's iterations take is not known well enough."""
    ENGINE_UNHEALTHY = "engine_unhealthy"
    """The engine does not answer its health check, or has not passed its test since it came up."""
    ENGINE_WRONG_MODEL = "engine_wrong_model"
    """The engine answers, and does not serve the replica's model."""
    ENGINE_HUNG = "engine_hung"
    """The engine answers its health check and no request."""
    ENGINE_WRONG_ANSWER = "engine_wrong_answer"
    """The engine answers a small request of ours otherwise than it did before."""
    ENGINE_MEMORY = "engine_memory"
    """The engine's processes have grown beyond the policy's limit."""
    ENGINE_ASLEEP = "engine_asleep"
    """The engine was put to sleep."""
    QUEUE_UNKNOWN = "queue_unknown"
    """The depth of the online queue could not be read."""
    EPOCH_UNKNOWN = "epoch_unknown"
    """The lane's epoch in Redis is no number, so no opening could be fenced."""

    # closed, operators and lifecycle
    HELD = "held"
    """An operator holds the lane or the pool."""
    AUTONOMY = "autonomy"
    """The policy may only suggest, and nobody has approved."""
    POLICY_CLOSED = "policy_closed"
    """The policy never opens a gate (online alone)."""
    POLICY_MISSING = "policy_missing"
    """No policy is in force: none stands in Redis, or the first that stands there cannot be used."""
    NO_WORK = "no_work"
    """Nothing else closes the lane: no offline worker stands at it, or it has nothing to run."""
    LEASE_EXPIRED = "lease_expired"
    """Nobody renewed the gate: the policy worker is dead or cut off."""
    STOPPING = "stopping"
    """The lane's own worker is being stopped."""
