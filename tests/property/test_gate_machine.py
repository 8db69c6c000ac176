"""The gate as its holder sees it, over random histories; and decisions over random snapshots."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hybridsched.core.codec import DecisionRecord, decode_record, encode, replay
from hybridsched.core.decide import decide
from hybridsched.core.gate import (
    Event,
    Gone,
    Opened,
    Published,
    Refused,
    Seat,
    SeatState,
    Shut,
    TimePassed,
    handle,
)
from hybridsched.core.policy import Autonomy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import (
    Budget,
    Gate,
    GateState,
    Hold,
    LaneView,
    QueueView,
    ReplicaView,
    Signal,
    Snapshot,
)

AFTER = st.floats(0, 500, allow_nan=False)
LEASE = st.floats(1, 400, allow_nan=False)
STEP = st.integers(-2, 2)
SERVER = st.sampled_from([-300.0, -1.0, 0.0, 1.0, 300.0])
"""Of a publication's server time, against the latest one seen."""


class Holder(RuleBasedStateMachine):
    """Tracks by itself how long the gate may at most be open, and what openings may be believed."""

    @initialize()
    def start(self) -> None:
        self.seat = Seat(lane="l")
        self.now = 0.0
        self.lease_end = 0.0
        self.epoch = 0
        self.seen_server_ms = 0.0
        self.believed: Gate | None = None
        self.running = False

    def publication(self, state: GateState, step: int, server: float, size: int = 0) -> Gate:
        return Gate(
            lane="l",
            state=state,
            reason=Reason.IDLE if state is GateState.OPEN else Reason.ONLINE_ARRIVED,
            budget=Budget(max_inflight=size, chunk_tokens=1, slice_tokens=0),
            epoch=max(0, self.epoch + step),
            at_ms=max(0.0, self.seen_server_ms + server),
        )

    def note(self, gate: Gate) -> None:
        """The epochs begin anew with a lower one that was published after all that was seen."""
        if gate.epoch > self.epoch or gate.at_ms > self.seen_server_ms:
            self.epoch = gate.epoch
        self.seen_server_ms = max(self.seen_server_ms, gate.at_ms)

    def feed(self, event: Event) -> None:
        before = self.seat
        self.seat, out = handle(before, event)
        assert handle(before, event) == (self.seat, out), "not deterministic"
        for instruction in out:
            match instruction:
                case Opened(epoch=epoch):
                    assert isinstance(event, Published)
                    later = event.gate.at_ms > before.seen_at_ms
                    assert epoch >= before.epoch or later, "an older epoch opened the gate"
                    self.running = True
                case Shut():
                    assert self.running, "shut twice"
                    self.running = False
                case Refused():
                    assert isinstance(event, Published)

    def open(self, gate: Gate, lease: float, *, pushed: bool) -> None:
        alive = self.running and self.now < self.lease_end
        known = self.believed
        self.feed(Published(gate=gate, lease_ms=lease, at_ms=self.now, pushed=pushed))
        old_epoch = gate.epoch < self.epoch and gate.at_ms <= self.seen_server_ms
        late = pushed and known is not None and gate.at_ms < known.at_ms
        if old_epoch or late:
            assert self.running == alive, "a refused opening opened the gate, or closed it"
            assert self.seat.gate == known
            self.seen_server_ms = max(self.seen_server_ms, gate.at_ms)
        else:
            self.note(gate)
            self.believed, self.lease_end = gate, self.now + lease
            assert self.seat.is_open(self.now)

    @rule(after=AFTER, lease=LEASE, step=STEP, server=SERVER, size=st.integers(1, 3), pushed=st.booleans())
    def opens(self, after: float, lease: float, step: int, server: float, size: int, pushed: bool) -> None:
        self.now += after
        self.open(self.publication(GateState.OPEN, step, server, size), lease, pushed=pushed)

    @rule(after=AFTER, lease=LEASE)
    def renews(self, after: float, lease: float) -> None:
        """The store holds the same gate with a new lease."""
        if self.believed is not None and self.believed.state is GateState.OPEN:
            self.now += after
            self.open(self.believed, lease, pushed=False)

    @rule(after=AFTER, step=STEP, server=SERVER, pushed=st.booleans())
    def closes(self, after: float, step: int, server: float, pushed: bool) -> None:
        self.now += after
        gate = self.publication(GateState.CLOSED, step, server)
        self.feed(Published(gate=gate, lease_ms=0.0, at_ms=self.now, pushed=pushed))
        self.note(gate)
        self.believed, self.lease_end = gate, 0.0
        assert self.seat.state is SeatState.CLOSED
        assert self.seat.gate_at(self.now) == gate

    @rule(after=AFTER)
    def is_gone(self, after: float) -> None:
        self.now += after
        self.feed(Gone(at_ms=self.now))
        self.lease_end = 0.0
        assert not self.running

    @rule(after=AFTER)
    def time_passes(self, after: float) -> None:
        self.now += after
        self.feed(TimePassed(at_ms=self.now))

    @invariant()
    def never_open_after_the_lease(self) -> None:
        assert self.running == (self.seat.state is SeatState.OPEN)
        assert self.seat.epoch == self.epoch
        assert self.seat.gate == self.believed
        if self.running:
            assert self.now < self.lease_end
            assert self.seat.until_ms == self.lease_end
        assert not self.seat.is_open(self.lease_end)
        assert self.seat.gate_at(self.lease_end).state is GateState.CLOSED

    def teardown(self) -> None:
        if hasattr(self, "seat"):
            assert msgspec.json.decode(msgspec.json.encode(self.seat), type=Seat) == self.seat


TestHolder = Holder.TestCase
TestHolder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# --- decisions over random snapshots --------------------------------------------------------------------

NUMBER = st.none() | st.sampled_from([0.0, 1.0, 2.0, 40.0, 149.0, 151.0, 5000.0, float("nan"), float("inf")])
AGE = st.none() | st.sampled_from([-5.0, 0.0, 30.0, 400.0, 1500.0, 1501.0, 2001.0, float("nan")])
SIGNAL = st.builds(Signal, value=NUMBER, age_ms=AGE) | st.builds(
    Signal, value=st.sampled_from([0.0, 1.0, 500.0]), age_ms=st.just(10.0)
)
NAME = st.sampled_from(["r0", "r1", "r2"])
GATE = st.none() | st.builds(
    Gate,
    lane=NAME,
    state=st.sampled_from(GateState),
    reason=st.sampled_from(Reason),
    at_ms=st.sampled_from([0.0, 999.0, 1000.0]),
    budget=st.builds(
        Budget, max_inflight=st.integers(0, 64), chunk_tokens=st.just(1), slice_tokens=st.just(0)
    ),
)
SIGNAL_FIELDS = {
    kind: {f.name: SIGNAL for f in msgspec.structs.fields(kind) if f.type is Signal}
    for kind in (ReplicaView, LaneView, QueueView)
}
SNAPSHOT = st.builds(
    Snapshot,
    pool=st.just("p"),
    now_ms=st.just(1000.0),
    replicas=st.lists(
        st.builds(ReplicaView, replica=NAME, model=st.just("m"), **SIGNAL_FIELDS[ReplicaView]), max_size=3
    ).map(tuple),
    lanes=st.lists(
        st.builds(
            LaneView, lane=NAME, replica=NAME, gate=GATE, epoch=st.integers(0, 9), **SIGNAL_FIELDS[LaneView]
        ),
        max_size=4,
    ).map(tuple),
    queues=st.lists(st.builds(QueueView, model=st.just("m"), **SIGNAL_FIELDS[QueueView]), max_size=1).map(
        tuple
    ),
    holds=st.lists(
        st.builds(
            Hold,
            lane=st.sampled_from(["", "*", "r0", "r9"]),
            by=st.just("ops"),
            why=st.just("test"),
            until_ms=st.sampled_from([None, 999.0, 1001.0]),
        ),
        max_size=2,
    ).map(tuple),
)
POLICY = st.builds(
    PoolPolicy,
    name=st.just("p"),
    kind=st.sampled_from(PolicyKind),
    floor_gpus=st.integers(0, 3),
    autonomy=st.sampled_from(Autonomy),
)


@settings(max_examples=150, deadline=None)
@given(snapshot=SNAPSHOT, policy=POLICY)
def test_decisions_are_one_per_lane_in_order_and_replay_from_their_record(
    snapshot: Snapshot, policy: PoolPolicy
) -> None:
    decisions = decide(snapshot, policy)
    assert [d.lane for d in decisions] == [view.lane for view in snapshot.lanes]
    assert [d.epoch for d in decisions] == [view.epoch for view in snapshot.lanes]
    for decision in decisions:
        assert (decision.state is GateState.OPEN) == (decision.budget.max_inflight > 0)
    record = DecisionRecord(cycle=1, snapshot=snapshot, policy=policy, decisions=decisions)
    assert replay(decode_record(encode(record))) == ()


@settings(max_examples=150, deadline=None)
@given(snapshot=SNAPSHOT)
def test_no_gate_opens_on_data_that_cannot_be_believed(snapshot: Snapshot) -> None:
    policy = PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW)
    replicas = {view.replica: view for view in snapshot.replicas}
    queues = {view.model: view for view in snapshot.queues}
    for view, decision in zip(snapshot.lanes, decide(snapshot, policy), strict=True):
        if decision.state is GateState.CLOSED:
            continue
        replica = replicas[view.replica]
        own = (replica.online_inflight, replica.online_idle_ms, view.offline_inflight, view.work)
        assert all(signal.known(policy.idle.max_telemetry_age_ms) for signal in own)
        engine = (replica.engine_healthy, replica.engine_running, replica.engine_waiting, replica.frozen_ms)
        assert all(signal.known(policy.idle.max_metric_age_ms) for signal in engine)
        assert queues["m"].depth.known(policy.idle.max_telemetry_age_ms)
        assert replica.online_inflight.value == 0
