"""Is a lane's engine idle, as far as online is concerned? Measured, net of our own offline work.

What is unknown is never 0: a signal that is missing, older than its limit, dated in the future or not a
finite number closes the gate with a reason of its own.

**Whose word counts.** The replica's worker counts its own online requests exactly and publishes each change
at once. The engine's gauges are scraped, so they are old by up to a scrape interval, and they speak of the
engine's last finished iteration. They are therefore not asked *whether online is idle*, only whether somebody
else uses the engine (foreign load), and with an allowance for their lag:

- a scrape that may still show online requests which ended since (it is older than the replica's idle span,
  less `metric_lag_ms`) says nothing about foreign load; the next scrape will. A foreign user is thus seen
  one scrape later, but no idle stretch is lost to waiting for a scrape;
- own offline requests that ended since the scrape still show in it, and those sent since the lane's own
  record may show already. If the record is newer than the scrape, the lane's recent peak (`offline_peak`)
  covers both. If not, or without a peak, an open lane may have filled its budget meanwhile. Only what exceeds
  that bound is foreign. An open lane does fill its budget while it has work, so a foreign request shows as
  soon as the lane is full, and at once when it is closed;
- requests sent since the scrape make the difference negative, which is never foreign.

**The idle span grows with the age of the record.** A record that says "idle for 40 ms" and is 100 ms old
means 140 ms now: had a request arrived since, its claim would have closed the gate and raised the lane's
epoch in the same step, and an opening decided on the older epoch is refused. If the snapshot already holds
the new epoch but still the old record, the gate of the fast path is in the snapshot too, and its time is
newer than the record: then the record is not believed (ONLINE_ARRIVED).

**Frozen.** Gauges stand still while an engine is paused or hung; `frozen_ms` grows only while the engine
holds requests, by its gauges or by the counts of our own workers, and for a while after the last of them has
left without any counter moving. So an engine that was never given anything is never frozen.
"""

from __future__ import annotations

import msgspec

from hybridsched.core.policy import IdlePolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState, LaneView, QueueView, ReplicaView, Signal, Value

Numbers = dict[str, float | str | None]


class Verdict(Value, frozen=True, kw_only=True):
    """Whether the lane's engine is idle, why (not), and on which numbers."""

    idle: bool
    reason: Reason
    check_in_ms: float | None = None
    """Not idle only because of the window: how long until it is over."""
    numbers: Numbers = msgspec.field(default_factory=dict)


def assess(
    replica: ReplicaView | None,
    lane: LaneView,
    queue: QueueView | None,
    policy: IdlePolicy,
    *,
    now_ms: float,
) -> Verdict:
    """Judge one lane. `now_ms` is the snapshot's server time, on which the ages are based.

    The order is: can the data be believed, is online there, is somebody else there, has it lasted.
    """
    # 1. and 2. The replica's own counts, the engine's metrics.
    if replica is None:
        return _no(Reason.TELEMETRY_MISSING, {"replica": lane.replica})
    record, scrape = policy.max_telemetry_age_ms, policy.max_metric_age_ms
    # Each signal is asked once; nearly every lane of nearly every cycle needs no search for what is wrong.
    online = replica.online_inflight.within(record)
    idle_then = replica.online_idle_ms.within(record)
    own = lane.offline_inflight.within(record)
    healthy = replica.engine_healthy.within(scrape)
    running = replica.engine_running.within(scrape)
    waiting = replica.engine_waiting.within(scrape)
    kv_use = replica.kv_use.within(scrape)
    frozen = replica.frozen_ms.within(scrape)
    if (
        online is None
        or idle_then is None
        or own is None
        or healthy is None
        or healthy < 1.0
        or running is None
        or waiting is None
        or kv_use is None
        or frozen is None
    ):
        return _unusable(replica, lane, record, scrape)
    held = running + waiting
    if frozen >= policy.frozen_after_ms:
        return _no(
            Reason.METRIC_FROZEN,
            {"frozen_ms": frozen, "frozen_after_ms": policy.frozen_after_ms, "engine_requests": held},
        )
    # 3. Online: here, just arrived, or waiting for some replica of the model.
    if online > 0:
        return _no(Reason.ONLINE_ACTIVE, {"online_inflight": online})
    gate = lane.gate
    if gate is not None and gate.state is not GateState.OPEN:
        arrived = _just_arrived(replica, gate, now_ms)
        if arrived is not None:
            return arrived
    waits = queued(queue, replica.model, policy)
    if waits is not None:
        return waits
    # 4. Somebody else.
    idle_for = idle_then + (replica.online_idle_ms.age_ms or 0.0)
    foreign = _foreign(replica, lane, held, idle_for, policy)
    if foreign is not None and foreign > policy.foreign_tolerance:
        return _no(
            Reason.FOREIGN_LOAD,
            {
                "foreign": foreign,
                "engine_requests": held,
                "offline_inflight": lane.offline_inflight.value,
                "offline_bound": _offline_bound(replica, lane, policy),
            },
        )
    busy = None if policy.max_gpu_activity is None else _gpu_active(replica, lane, policy)
    if busy is not None:
        return busy
    # 5. Long enough?
    numbers: Numbers = {
        "online_idle_ms": idle_for,
        "window_ms": policy.window_ms,
        "engine_requests": held,
        "offline_inflight": own,
        "foreign": foreign,
        "kv_use": kv_use,
    }
    if idle_for < policy.window_ms:
        return _no(Reason.IDLE_WINDOW, numbers, check_in_ms=policy.window_ms - idle_for)
    return Verdict(idle=True, reason=Reason.IDLE, numbers=numbers)


_TELEMETRY = (Reason.TELEMETRY_MISSING, Reason.TELEMETRY_STALE)
_METRIC = (Reason.METRIC_MISSING, Reason.METRIC_STALE)


_FAULTS = {
    reason.value: reason
    for reason in (
        Reason.ENGINE_WRONG_MODEL,
        Reason.ENGINE_HUNG,
        Reason.ENGINE_WRONG_ANSWER,
        Reason.ENGINE_MEMORY,
        Reason.ENGINE_ASLEEP,
        Reason.METRIC_FROZEN,
    )
}
"""Codes of an engine that is there and cannot be used, as its replica's worker tells them."""


def _unhealthy(replica: ReplicaView) -> Numbers:
    return {"engine_healthy": replica.engine_healthy.value}


def _no(reason: Reason, numbers: Numbers, *, check_in_ms: float | None = None) -> Verdict:
    return Verdict(idle=False, reason=reason, check_in_ms=check_in_ms, numbers=numbers)


def _unusable(replica: ReplicaView, lane: LaneView, record: float, scrape: float) -> Verdict:
    """The first signal that cannot be used; the replica's counts before the engine's metrics."""
    bad = (
        _unread("online_inflight", replica.online_inflight, record, *_TELEMETRY)
        or _unread("online_idle_ms", replica.online_idle_ms, record, *_TELEMETRY)
        or _unread("offline_inflight", lane.offline_inflight, record, *_TELEMETRY)
        or _unread("engine_healthy", replica.engine_healthy, scrape, *_METRIC)
    )
    if bad is not None:
        return bad
    if _value(replica.engine_healthy) < 1.0:
        return _no(_FAULTS.get(replica.engine_fault, Reason.ENGINE_UNHEALTHY), _unhealthy(replica))
    return (
        _unread("engine_running", replica.engine_running, scrape, *_METRIC)
        or _unread("engine_waiting", replica.engine_waiting, scrape, *_METRIC)
        or _unread("kv_use", replica.kv_use, scrape, *_METRIC)
        or _unread("frozen_ms", replica.frozen_ms, scrape, *_METRIC)
        # Only if a signal is asked for and not named here: unknown all the same.
        or _no(Reason.METRIC_MISSING, {})
    )


def _value(signal: Signal) -> float:
    """The value of a signal that has been found known."""
    return 0.0 if signal.value is None else signal.value


def _age(signal: Signal) -> float:
    return 0.0 if signal.age_ms is None else signal.age_ms


def _unread(name: str, signal: Signal, limit_ms: float, missing: Reason, stale: Reason) -> Verdict | None:
    """A verdict when the signal cannot be used: `missing` without a number, `stale` without a good age."""
    if signal.known(limit_ms):
        return None
    numbers: Numbers = {name: signal.value, "age_ms": signal.age_ms, "max_age_ms": limit_ms}
    # An age that is no finite number is written as null in a record: it is missing, there as here.
    dated = signal.age_ms is not None and signal.age_ms - signal.age_ms == 0.0
    measured = dated and Signal(value=signal.value, age_ms=0.0).known(0.0)
    return _no(stale if measured else missing, numbers | {"signal": name})


def _just_arrived(replica: ReplicaView, gate: Gate, now_ms: float) -> Verdict | None:
    """The fast path closed this gate after the replica's record was made: the record is out of date."""
    if gate.reason is not Reason.ONLINE_ARRIVED:
        return None
    recorded_ms = now_ms - _age(replica.online_inflight)
    if recorded_ms > gate.at_ms:
        return None
    return _no(Reason.ONLINE_ARRIVED, {"gate_at_ms": gate.at_ms, "recorded_ms": recorded_ms})


def queued(queue: QueueView | None, model: str, policy: IdlePolicy) -> Verdict | None:
    """Unknown depth closes; so does a request that has waited longer than a pull takes, or for how long
    nobody knows."""
    if queue is None:
        return _no(Reason.QUEUE_UNKNOWN, {"queue_depth": None, "model": model})
    depth = queue.depth.within(policy.max_telemetry_age_ms)
    if depth is None:
        return _unread(
            "queue_depth",
            queue.depth,
            policy.max_telemetry_age_ms,
            Reason.QUEUE_UNKNOWN,
            Reason.QUEUE_UNKNOWN,
        )
    if depth <= 0:
        return None
    wait = queue.oldest_wait_ms
    if wait.known(policy.max_telemetry_age_ms) and _value(wait) + _age(wait) < policy.queue_wait_ms:
        return None
    return _no(Reason.ONLINE_QUEUED, {"queue_depth": depth, "oldest_wait_ms": wait.value})


def _offline_bound(replica: ReplicaView, lane: LaneView, policy: IdlePolicy) -> float:
    """The most own offline requests that the replica's last scrape can show."""
    return 0.0 if lane.own else _work_bound(replica, lane, policy)


def _work_bound(replica: ReplicaView, lane: LaneView, policy: IdlePolicy) -> float:
    """The most of them that may have run, wherever they run, since that scrape."""
    bound = _value(lane.offline_inflight)
    peak = lane.offline_peak.within(policy.max_telemetry_age_ms)
    if peak is not None:
        bound = max(bound, peak)
    covered = peak is not None and _age(lane.offline_peak) <= _scraped_ms(replica)
    if not covered and lane.gate is not None and lane.gate.state is GateState.OPEN:
        bound = max(bound, float(lane.gate.budget.max_inflight))
    return bound


def _scraped_ms(replica: ReplicaView) -> float:
    """Age of the request gauges; of the younger one, should they differ."""
    return min(_age(replica.engine_running), _age(replica.engine_waiting))


def _foreign(
    replica: ReplicaView, lane: LaneView, held: float, idle_for: float, policy: IdlePolicy
) -> float | None:
    """Of the `held` requests in the engine those that are certainly not ours; None when this scrape cannot
    tell."""
    running_ms, waiting_ms = replica.engine_running.age_ms or 0.0, replica.engine_waiting.age_ms or 0.0
    scraped_ms = running_ms if running_ms > waiting_ms else waiting_ms
    if scraped_ms + policy.metric_lag_ms > idle_for:
        return None
    if held <= 0.0:
        return 0.0
    return max(0.0, held - _offline_bound(replica, lane, policy))


def _gpu_active(replica: ReplicaView, lane: LaneView, policy: IdlePolicy) -> Verdict | None:
    """Only if the policy asks: a GPU that computes with none of our work on it is used by somebody else.

    With own offline work the GPU shows full activity, which then says nothing.
    """
    if policy.max_gpu_activity is None or _work_bound(replica, lane, policy) > 0:
        return None
    bad = _unread("gpu_activity", replica.gpu_activity, policy.max_metric_age_ms, *_METRIC)
    if bad is not None:
        return bad
    activity = _value(replica.gpu_activity)
    if activity <= policy.max_gpu_activity:
        return None
    return _no(Reason.GPU_ACTIVE, {"gpu_activity": activity, "max_gpu_activity": policy.max_gpu_activity})
