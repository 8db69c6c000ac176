"""Is a lane's engine idle? Each signal with its reason, the window, foreign load, GPU activity, no work."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.reasons import Reason
from hybridsched.core.values import UNKNOWN, GateState, LaneView, QueueView, ReplicaView, Signal
from tests.unit.decide_views import (
    NOW,
    POLICY,
    change,
    idle_policy,
    lane,
    one,
    open_gate,
    queue,
    replica,
    sig,
    snap,
)

REPLICA_SIGNALS = {
    "online_inflight": (Reason.TELEMETRY_MISSING, Reason.TELEMETRY_STALE),
    "online_idle_ms": (Reason.TELEMETRY_MISSING, Reason.TELEMETRY_STALE),
    "engine_healthy": (Reason.METRIC_MISSING, Reason.METRIC_STALE),
    "engine_running": (Reason.METRIC_MISSING, Reason.METRIC_STALE),
    "engine_waiting": (Reason.METRIC_MISSING, Reason.METRIC_STALE),
    "kv_use": (Reason.METRIC_MISSING, Reason.METRIC_STALE),
    "frozen_ms": (Reason.METRIC_MISSING, Reason.METRIC_STALE),
}
OPTIONAL_REPLICA_SIGNALS = {
    *("ttft_p99_ms", "tpot_p99_ms", "gpu_activity"),
    *("online_load", "online_ttft_ms", "online_tpot_ms"),
}
LANE_SIGNALS = {
    "offline_inflight": (Reason.TELEMETRY_MISSING, Reason.TELEMETRY_STALE),
    "work": (Reason.NO_WORK, Reason.NO_WORK),
}
OPTIONAL_LANE_SIGNALS = {"offline_peak", "tokens_per_s", "waiting_jobs"}
QUEUE_SIGNALS = {"depth": (Reason.QUEUE_UNKNOWN, Reason.QUEUE_UNKNOWN)}
OPTIONAL_QUEUE_SIGNALS = {"oldest_wait_ms", "burst_requests", "burst_tokens"}

UNUSABLE = {
    "missing": (UNKNOWN, 0),
    "no value": (Signal(value=None, age_ms=1.0), 0),
    "not a number": (Signal(value=float("nan"), age_ms=1.0), 0),
    "infinite": (Signal(value=float("inf"), age_ms=1.0), 0),
    "no age": (Signal(value=0.0, age_ms=None), 0),
    "stale": (Signal(value=1.0, age_ms=60_000.0), 1),
    "from the future": (Signal(value=1.0, age_ms=-1.0), 1),
}


def signals_of(kind: type) -> set[str]:
    return {f.name for f in msgspec.structs.fields(kind) if f.type is Signal}


def test_every_signal_is_either_required_or_named_as_optional() -> None:
    assert signals_of(ReplicaView) == set(REPLICA_SIGNALS) | OPTIONAL_REPLICA_SIGNALS
    assert signals_of(LaneView) == set(LANE_SIGNALS) | OPTIONAL_LANE_SIGNALS
    assert signals_of(QueueView) == set(QUEUE_SIGNALS) | OPTIONAL_QUEUE_SIGNALS


@pytest.mark.parametrize("how", UNUSABLE)
@pytest.mark.parametrize("name", REPLICA_SIGNALS)
def test_a_required_signal_of_the_replica_that_is_unusable_closes(name: str, how: str) -> None:
    bad, which = UNUSABLE[how]
    decision = one(snap(replicas=(replica(**{name: bad}),)))
    assert (decision.state, decision.reason) == (GateState.CLOSED, REPLICA_SIGNALS[name][which])
    assert decision.numbers["signal"] == name
    assert decision.budget.max_inflight == 0


@pytest.mark.parametrize("how", UNUSABLE)
@pytest.mark.parametrize("name", LANE_SIGNALS)
def test_a_required_signal_of_the_lane_that_is_unusable_closes(name: str, how: str) -> None:
    bad, which = UNUSABLE[how]
    decision = one(snap(lanes=(lane(**{name: bad}),)))
    assert (decision.state, decision.reason) == (GateState.CLOSED, LANE_SIGNALS[name][which])


@pytest.mark.parametrize("how", UNUSABLE)
@pytest.mark.parametrize("name", QUEUE_SIGNALS)
def test_an_unusable_queue_depth_closes(name: str, how: str) -> None:
    bad, _ = UNUSABLE[how]
    assert one(snap(queues=(queue(**{name: bad}),))).reason is Reason.QUEUE_UNKNOWN


@pytest.mark.parametrize("how", UNUSABLE)
def test_optional_signals_that_are_unusable_leave_the_gate_open(how: str) -> None:
    bad, _ = UNUSABLE[how]
    snapshot = snap(
        replicas=(replica(**dict.fromkeys(OPTIONAL_REPLICA_SIGNALS, bad)),),
        lanes=(lane(**dict.fromkeys(OPTIONAL_LANE_SIGNALS, bad)),),
    )
    decision = one(snapshot)
    assert decision.state is GateState.OPEN
    assert decision.budget.chunk_tokens == POLICY.offline.chunk_first_tokens


@pytest.mark.parametrize(
    ("jobs", "state", "reason"),
    [
        (sig(1), GateState.OPEN, Reason.IDLE),
        (sig(1, POLICY.slurm.max_age_ms), GateState.OPEN, Reason.IDLE),
        (sig(1, POLICY.slurm.max_age_ms + 1), GateState.CLOSED, Reason.NO_WORK),
        (sig(0), GateState.CLOSED, Reason.NO_WORK),
        (UNKNOWN, GateState.CLOSED, Reason.NO_WORK),
    ],
)
def test_slurm_jobs_that_wait_are_work_where_no_worker_stands(
    jobs: Signal, state: GateState, reason: Reason
) -> None:
    decision = one(snap(lanes=(lane(work=UNKNOWN, waiting_jobs=jobs),)))
    assert (decision.state, decision.reason) == (state, reason)
    assert one(snap(lanes=(lane(work=sig(0), waiting_jobs=jobs),))).reason is Reason.NO_WORK


def test_a_replica_or_queue_that_is_not_there_closes() -> None:
    assert one(snap(replicas=())).reason is Reason.TELEMETRY_MISSING
    assert one(snap(queues=())).reason is Reason.QUEUE_UNKNOWN
    assert one(snap(queues=(change(queue(), model="other"),))).reason is Reason.QUEUE_UNKNOWN


def test_an_engine_that_fails_its_health_check_closes() -> None:
    assert one(snap(replicas=(replica(engine_healthy=sig(0)),))).reason is Reason.ENGINE_UNHEALTHY
    wrong = replica(engine_healthy=sig(0), engine_fault="engine_wrong_model")
    assert one(snap(replicas=(wrong,))).reason is Reason.ENGINE_WRONG_MODEL
    odd = replica(engine_healthy=sig(0), engine_fault="idle")
    assert one(snap(replicas=(odd,))).reason is Reason.ENGINE_UNHEALTHY


def test_counters_that_stand_still_close_whatever_the_gauges_show() -> None:
    still = {"frozen_ms": sig(3000)}
    held = replica(engine_running=sig(4), **still)
    assert one(snap(replicas=(held,), lanes=(lane(offline_inflight=sig(4)),))).reason is Reason.METRIC_FROZEN
    assert one(snap(replicas=(replica(**still),))).reason is Reason.METRIC_FROZEN, (
        "in doubt after the work left"
    )
    hidden = lane(offline_inflight=sig(4))
    assert one(snap(replicas=(replica(**still),), lanes=(hidden,))).reason is Reason.METRIC_FROZEN
    moving = replica(engine_running=sig(4), frozen_ms=sig(2999))
    assert one(snap(replicas=(moving,), lanes=(lane(offline_inflight=sig(4)),))).state is GateState.OPEN


def test_online_requests_close() -> None:
    busy = replica(online_inflight=sig(1), online_idle_ms=sig(0), engine_running=sig(1))
    assert one(snap(replicas=(busy,))).reason is Reason.ONLINE_ACTIVE


def test_the_window_counts_the_age_of_the_record_and_says_when_to_look_again() -> None:
    waiting = one(snap(replicas=(replica(online_idle_ms=sig(100, 20)),)))
    assert (waiting.reason, waiting.check_in_ms) == (Reason.IDLE_WINDOW, 30)
    assert one(snap(replicas=(replica(online_idle_ms=sig(100, 50)),))).state is GateState.OPEN


def test_a_record_from_before_the_fast_path_close_is_not_believed() -> None:
    arrived = open_gate(state=GateState.CLOSED, reason=Reason.ONLINE_ARRIVED, at_ms=NOW - 20)
    old = one(snap(lanes=(lane(gate=arrived),)))
    assert (old.state, old.reason) == (GateState.CLOSED, Reason.ONLINE_ARRIVED)
    newer = replica(online_inflight=sig(0, 19))
    assert one(snap(replicas=(newer,), lanes=(lane(gate=arrived),))).state is GateState.OPEN


def test_a_waiting_online_request_closes_unless_it_is_about_to_be_pulled() -> None:
    assert one(snap(queues=(queue(depth=sig(1), oldest_wait_ms=UNKNOWN),))).reason is Reason.ONLINE_QUEUED
    assert one(snap(queues=(queue(depth=sig(1), oldest_wait_ms=sig(40, 10)),))).reason is Reason.ONLINE_QUEUED
    assert one(snap(queues=(queue(depth=sig(1), oldest_wait_ms=sig(5, 10)),))).state is GateState.OPEN
    assert one(snap(queues=(queue(depth=sig(0), oldest_wait_ms=UNKNOWN),))).state is GateState.OPEN
    strict = idle_policy(queue_wait_ms=0.0)
    assert one(snap(queues=(queue(depth=sig(1)),)), strict).reason is Reason.ONLINE_QUEUED


class TestForeignLoad:
    def test_requests_that_are_not_ours_close(self) -> None:
        decision = one(snap(replicas=(replica(engine_running=sig(2), engine_waiting=sig(1)),)))
        assert (decision.reason, decision.numbers["foreign"]) == (Reason.FOREIGN_LOAD, 3)

    def test_a_tolerance_may_be_set(self) -> None:
        view = replica(engine_running=sig(2))
        assert one(snap(replicas=(view,)), idle_policy(foreign_tolerance=2)).state is GateState.OPEN

    def test_a_scrape_older_than_the_idle_span_cannot_tell(self) -> None:
        before = replica(engine_running=sig(6, 600), online_idle_ms=sig(500, 0))
        assert one(snap(replicas=(before,))).state is GateState.OPEN
        lagging = replica(engine_running=sig(6, 450), online_idle_ms=sig(500, 0))
        assert one(snap(replicas=(lagging,))).state is GateState.OPEN
        after = replica(engine_running=sig(6, 400), online_idle_ms=sig(500, 0))
        assert one(snap(replicas=(after,))).reason is Reason.FOREIGN_LOAD

    def test_own_requests_that_just_ended_are_not_foreign(self) -> None:
        view = replica(engine_running=sig(40))
        peak = lane(offline_inflight=sig(3), offline_peak=sig(40), gate=open_gate())
        assert one(snap(replicas=(view,), lanes=(peak,))).state is GateState.OPEN
        open_lane = lane(offline_inflight=sig(3), gate=open_gate())
        assert one(snap(replicas=(view,), lanes=(open_lane,))).state is GateState.OPEN

    def test_a_scrape_newer_than_the_lanes_record_may_show_requests_sent_since(self) -> None:
        view = replica(engine_running=sig(30, 10), engine_waiting=sig(0, 10))
        record = {"offline_inflight": sig(0, 200), "offline_peak": sig(5, 200), "work": sig(9, 200)}
        started = lane(gate=open_gate(), **record)
        assert one(snap(replicas=(view,), lanes=(started,))).state is GateState.OPEN
        assert one(snap(replicas=(view,), lanes=(lane(**record),))).reason is Reason.FOREIGN_LOAD
        half_new = replica(engine_running=sig(30, 300), engine_waiting=sig(0, 10))
        assert one(snap(replicas=(half_new,), lanes=(started,))).state is GateState.OPEN

    def test_requests_just_sent_do_not_show_yet(self) -> None:
        sent = lane(offline_inflight=sig(64), gate=open_gate())
        assert one(snap(lanes=(sent,))).state is GateState.OPEN

    def test_more_than_an_open_lane_can_hold_is_foreign(self) -> None:
        view = replica(engine_running=sig(65))
        full = lane(offline_inflight=sig(64), gate=open_gate())
        assert one(snap(replicas=(view,), lanes=(full,))).reason is Reason.FOREIGN_LOAD
        peak = lane(offline_inflight=sig(3), offline_peak=sig(8), gate=open_gate())
        decision = one(snap(replicas=(replica(engine_running=sig(9)),), lanes=(peak,)))
        assert decision.reason is Reason.FOREIGN_LOAD


class TestGpuActivity:
    def test_it_is_not_looked_at_unless_asked_for(self) -> None:
        assert one(snap(replicas=(replica(gpu_activity=sig(1.0)),))).state is GateState.OPEN

    def test_asked_for_it_must_be_known_and_low(self) -> None:
        policy = idle_policy(max_gpu_activity=0.1)
        assert one(snap(), policy).reason is Reason.METRIC_MISSING
        stale = replica(gpu_activity=sig(0.0, 9_000))
        assert one(snap(replicas=(stale,)), policy).reason is Reason.METRIC_STALE
        assert one(snap(replicas=(replica(gpu_activity=sig(0.2)),)), policy).reason is Reason.GPU_ACTIVE
        assert one(snap(replicas=(replica(gpu_activity=sig(0.1)),)), policy).state is GateState.OPEN

    def test_with_own_work_it_says_nothing(self) -> None:
        policy = idle_policy(max_gpu_activity=0.1)
        own = lane(offline_inflight=sig(5), gate=open_gate())
        view = replica(gpu_activity=sig(1.0), engine_running=sig(5))
        assert one(snap(replicas=(view,), lanes=(own,)), policy).state is GateState.OPEN


class TestWork:
    def test_no_worker_or_nothing_to_run_closes(self) -> None:
        assert one(snap(lanes=(lane(work=UNKNOWN),))).reason is Reason.NO_WORK
        assert one(snap(lanes=(lane(work=sig(0)),))).reason is Reason.NO_WORK

    def test_the_last_lines_in_flight_keep_the_gate_open(self) -> None:
        last = lane(work=sig(0), offline_inflight=sig(2), gate=open_gate())
        assert one(snap(replicas=(replica(engine_running=sig(2)),), lanes=(last,))).state is GateState.OPEN


NOTHING_TO_RUN = lane(work=sig(0))
NO_WORKER = LaneView(lane="r0", replica="r0")


@pytest.mark.parametrize("idle_lane", [NOTHING_TO_RUN, NO_WORKER], ids=["nothing to run", "no worker"])
@pytest.mark.parametrize(
    ("replicas", "reason"),
    [
        ((), Reason.TELEMETRY_MISSING),
        ((replica(online_inflight=sig(0, 60_000)),), Reason.TELEMETRY_STALE),
        ((replica(engine_healthy=sig(0)),), Reason.ENGINE_UNHEALTHY),
        ((replica(kv_use=UNKNOWN),), Reason.METRIC_MISSING),
        ((replica(engine_running=sig(2), frozen_ms=sig(60_000)),), Reason.METRIC_FROZEN),
        ((replica(engine_running=sig(2)),), Reason.FOREIGN_LOAD),
        ((replica(online_inflight=sig(1)),), Reason.ONLINE_ACTIVE),
        ((replica(),), Reason.NO_WORK),
    ],
)
def test_want_of_work_hides_nothing_that_an_operator_must_act_on(
    idle_lane: LaneView, replicas: tuple[ReplicaView, ...], reason: Reason
) -> None:
    decision = one(snap(replicas=replicas, lanes=(idle_lane,)))
    assert (decision.state, decision.reason) == (GateState.CLOSED, reason)


def test_without_work_the_end_of_the_window_brings_no_cycle_forward() -> None:
    busy_just_now = (replica(online_idle_ms=sig(10)),)
    waiting = one(snap(replicas=busy_just_now))
    assert (waiting.reason, waiting.check_in_ms) == (Reason.IDLE_WINDOW, 120)
    workless = one(snap(replicas=busy_just_now, lanes=(NOTHING_TO_RUN,)))
    assert (workless.reason, workless.check_in_ms) == (Reason.IDLE_WINDOW, None)


def test_what_runs_in_an_engine_of_the_lanes_own_is_not_in_the_replicas() -> None:
    """The engine's gauges show online and foreign requests alone, whatever the lane has in flight."""
    busy = {"offline_inflight": sig(5), "offline_peak": sig(5), "gate": open_gate()}
    foreign = replica(engine_running=sig(2))
    shared = one(snap(replicas=(foreign,), lanes=(lane(**busy),)))
    assert shared.state is GateState.OPEN
    own = one(snap(replicas=(foreign,), lanes=(lane(own=True, **busy),)))
    assert (own.state, own.reason) == (GateState.CLOSED, Reason.FOREIGN_LOAD)
    alone = one(snap(lanes=(lane(own=True, **busy),)))
    assert alone.state is GateState.OPEN
