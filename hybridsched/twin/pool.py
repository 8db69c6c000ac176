"""A pool on the twin's clock: replicas of one model, their lanes, one batch, one policy worker.

One `Pool` is one group of engines of one model; several of them may share a loop. Engines serve from the
start, but for their absences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from hybridsched.core.admission import Capacity, OfflineAdmission
from hybridsched.core.codec import DecisionRecord
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.routing import Terms
from hybridsched.core.values import (
    Gate,
    GateState,
    LaneView,
    Pack,
    ReplicaView,
    Snapshot,
)
from hybridsched.engines.simulated.perf import Profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.traces import TraceRow
from hybridsched.twin.absence import Absence
from hybridsched.twin.baselines import Baseline, BaselineLoop, limits_of
from hybridsched.twin.clock import Loop
from hybridsched.twin.executor import Executor
from hybridsched.twin.feed import Feed
from hybridsched.twin.jobs import LaneJobs, SlurmDelays
from hybridsched.twin.lane import PauseCounts, TwinLane
from hybridsched.twin.latencies import Latencies, Way, Ways
from hybridsched.twin.lengths import Length
from hybridsched.twin.meter import Meter, MeteredEngine
from hybridsched.twin.online import Board, OnlineRequest
from hybridsched.twin.order import PackOrder, measured
from hybridsched.twin.policy import PolicyLoop
from hybridsched.twin.queue import OnlineQueue
from hybridsched.twin.replica import Replica
from hybridsched.twin.views import lane_view, replica_view

FEEDER_S = 0.5
"""A lane learns within this that there is something to take again (`workers.offline_feed.CYCLE_S`)."""

LANE_PUBLISH_S = 0.25
"""Between two records of a lane (`workers.offline.PUBLISH_S`)."""

_QUIET_S = 120.0
"""The run's end waits at most so long for what is in flight to be ended."""


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool is made of."""

    engines: int
    policy: PoolPolicy
    limits: Limits
    profile: Profile
    latencies: Latencies = Latencies()
    terms: Terms = Terms()
    model: str = "twin"
    offline: bool = True
    """False: no lane has a worker, whatever the batch."""
    bin_s: float = 1.0
    """Width of the bins that engines are measured in."""
    absences: tuple[Absence, ...] = ()
    slurm: SlurmDelays | None = None
    """The lanes' workers are Slurm jobs; None: one stands at each lane from the start."""
    baseline: Baseline | None = None
    """What decides in the place of the policy, or how the engines are run."""
    exhaustive: bool = False
    """Decide on every lane in every cycle; see `twin.policy`."""


class Pool:
    """All of it. Give `run` to a loop's end, then read what has become of requests, lines and engines."""

    def __init__(
        self,
        loop: Loop,
        spec: PoolSpec,
        rows: Sequence[TraceRow],
        batch: Sequence[Length],
        *,
        log: Callable[[DecisionRecord], None] | None = None,
    ) -> None:
        self.spec = spec
        self._loop = loop
        self.requests = [
            OnlineRequest(number, row.arrival_s, row.prompt_tokens, row.output_tokens)
            for number, row in enumerate(rows)
        ]
        self._live = 0
        self._leaving: Counter[int] = Counter()
        self._policy = policy = spec.policy
        self._ways = Ways(spec.latencies.spread, loop.random("ways"))
        self._gate_s = spec.latencies.gate_ms / 1e3
        self._closes = policy.kind is not PolicyKind.UNPROTECTED
        self._fitted = policy.kind is PolicyKind.HEADROOM
        lanes = spec.engines if spec.offline else 0
        self.feed = Feed(batch if spec.offline else (), max(1, lanes), on_change=self._feed_changed)
        self.pauses = PauseCounts()
        self.meters = [Meter(f"r{number}", spec.bin_s) for number in range(spec.engines)]
        board = Board(spec.engines, spec.latencies.record_pause_ms / 1e3)
        self._queue = OnlineQueue(
            loop,
            board,
            timeout_s=policy.online.default_timeout_ms / 1e3,
            wake=lambda replica: self.replicas[replica].wake(),
            claim_all=self._claim_all,
            expire=self._expire,
        )
        self._order = PackOrder(board, policy)
        self.lanes: list[TwinLane] = []
        self.replicas = [self._replica(number) for number in range(spec.engines)]
        for number in range(lanes):
            self.lanes.append(self._lane(number))
        self.jobs: LaneJobs | None = None
        if spec.slurm is not None:
            requeue_after_s = policy.slurm.requeue_after_ms / 1e3
            self.jobs = LaneJobs(loop, self.lanes, spec.slurm, requeue_after_s=requeue_after_s)
        self._gates: list[Gate | None] = [None] * spec.engines
        self._epochs = [0] * spec.engines
        self._lane_changed_s = [0.0] * spec.engines
        self.worker = self._worker(lanes, log)
        self.work_end_s: float | None = None
        """When the last line of the batch had ended; None: some remained."""
        self.online_at_work_end: list[float] = []
        """Seconds online of each engine by then."""
        self.end_s = 0.0

    def _worker(self, lanes: int, log: Callable[[DecisionRecord], None] | None) -> PolicyLoop | BaselineLoop:
        spec = self.spec
        if spec.baseline is not None and spec.baseline.decides:
            return BaselineLoop(
                self._loop,
                spec.baseline,
                spec.policy,
                self.replicas,
                self.lanes,
                self,
                waiting=lambda: len(self._queue.waiting),
            )
        return PolicyLoop(
            self._loop, lanes, spec.policy, self, spec.latencies, exhaustive=spec.exhaustive, log=log
        )

    def _replica(self, number: int) -> Replica:
        spec = self.spec
        engine = MeteredEngine(limits_of(spec.limits, spec.baseline), spec.profile, self.meters[number])
        return Replica(
            number,
            self._loop,
            engine,
            self._queue,
            self,
            spec.latencies,
            self._ways,
            spec.policy,
            spec.terms,
            offline_ended=lambda requests: self.lanes[number].executor.ended(requests),
        )

    def _lane(self, number: int) -> TwinLane:
        spec, replica = self.spec, self.replicas[number]
        limits = spec.limits
        lane = TwinLane(
            f"r{number}",
            self._loop,
            self.feed,
            replica.engine,
            spec.latencies,
            spec.policy,
            self.pauses,
            kv_tokens=limits.kv_tokens,
            changed=partial(self._lane_changed, number),
        )
        admission = OfflineAdmission(
            policy=spec.policy.offline,
            capacity=Capacity(kv_tokens=limits.kv_tokens, max_model_len=limits.max_model_len).or_policy(
                spec.policy.engine
            ),
        )
        executor = Executor(
            self._loop,
            replica.clock,
            spec.latencies,
            self._ways,
            admission=admission,
            online_inflight=lambda: replica.inflight,
            on_change=lane.executor_changed,
            on_finish=lane.finished,
            priority=0 if spec.baseline is None else spec.baseline.offline_priority,
        )
        lane.attach(executor)
        return lane

    @property
    def now_s(self) -> float:
        return self._loop.now_s

    # -- a run -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the trace begin now."""
        accept_s = self.spec.latencies.accept_ms / 1e3
        self._live = len(self.requests)
        accepts = [
            (one.arrival_s + accept_s * self._ways.of(one.index, Way.ACCEPT), one) for one in self.requests
        ]
        accepts.sort(key=lambda accept: accept[0])
        self._loop.feed(accepts, self._queue.accept)
        for one in self.spec.absences:
            self._loop.at(one.from_s, self.replicas[one.replica].leave)
            self._loop.at(one.to_s, self.replicas[one.replica].come_back)
        if self.lanes or self._policy.pack.enabled:
            self.worker.start()

    def run(self, duration_s: float, *, progress: Callable[[float], None] | None = None) -> None:
        """Replay the trace, and end as the demo does: when the last online request has ended, and not before
        `duration_s`. What is in flight for the batch then is ended, its tokens kept.

        `progress` is called with the loop's time, once for each hundredth of the duration.
        """
        loop = self._loop
        self.start()
        for step in range(1, 101):
            loop.run(duration_s * step / 100)
            if progress is not None:
                progress(loop.now_s)
        if self._live:
            loop.run()  # stops with the last of them
        if self._live:
            raise RuntimeError(f"the twin has a defect: {self._live} online requests never ended")
        loop.run(max(duration_s, max((one.end_s or 0.0 for one in self.requests), default=0.0)))
        self._finish()

    def _finish(self) -> None:
        loop = self._loop
        for replica in self.replicas:
            replica.engine.finish(loop.now_s)
        self.end_s = loop.now_s
        self.worker.stop()
        for lane in self.lanes:
            lane.stop()
        until_s = loop.now_s + _QUIET_S
        while loop.now_s < until_s and not (
            all(lane.quiet for lane in self.lanes)
            and all(replica.engine.online == 0 for replica in self.replicas)
        ):
            loop.run(loop.now_s + 0.1)

    def unfinished(self) -> set[int]:
        """Numbers of the lines without a result that somebody has: a lane, the queue, or the rest of the
        batch.

        Whoever is in none of these and has no result is lost.
        """
        held = self.feed.waiting()
        for lane in self.lanes:
            held.update(lane.executor.held())
        return held

    def lose_policy_worker(self) -> None:
        """The policy worker dies now: nobody renews the gates, and the lanes close by their leases."""
        self.worker.stop()
        lease_s = self._policy.cycle.lease_ms / 1e3
        for number, lane in enumerate(self.lanes):
            self._loop.at(
                max(self._loop.now_s, self.worker.last_s + lease_s), partial(self._lease_over, number, lane)
            )

    def _lease_over(self, number: int, lane: TwinLane) -> None:
        gate = self._gates[number]
        if gate is not None and gate.state is GateState.OPEN:
            self._gates[number] = None
            self.meters[number].gate(self._loop.now_s, Reason.LEASE_EXPIRED.value)
        if self.jobs is None:
            lane.lease_over()
        else:
            self.jobs.lease_over(number)

    # -- what the queue and the replicas say -------------------------------------------------------------

    def _claim_all(self) -> None:
        for replica in self.replicas:
            replica.wake()

    def _expire(self, request: OnlineRequest) -> None:
        request.status = "expired"
        reply_s = self.spec.latencies.reply_ms / 1e3 * self._ways.of(request.index, Way.REPLY)
        request.end_s = self._loop.now_s + reply_s
        if request.replica >= 0:
            self.replicas[request.replica].expire(request)
        else:
            self.ended(request)

    def ended(self, request: OnlineRequest) -> None:
        self._live -= 1
        if not self._live:
            self._loop.stop()

    def edge(self, replica: int, at_s: float) -> None:
        if self.lanes:
            if self.replicas[replica].inflight:
                # What is claimed can be read at once; the record that follows brings the next cycle forward.
                self.worker.changed(replica, self._loop.now_s, nudge=False)
            self.worker.changed(replica, at_s, nudge=True)

    def leaving(self, replica: int) -> None:
        self._leaving[replica] += 1

    def left(self, replica: int) -> None:
        self._leaving[replica] -= 1
        if not self._leaving[replica]:
            del self._leaving[replica]
        if self.lanes:
            self.worker.changed(replica, self._loop.now_s, nudge=False)

    def restless(self) -> Iterable[int]:
        return self._leaving if self.lanes else ()

    def claimed(self, replica: int, accepted_s: float, load: float) -> None:
        """The claim closes the lane's gate in the same step, and raises its epoch."""
        if not self._closes or not self.lanes:
            return
        self._epochs[replica] += 1
        gate = self._gates[replica]
        if gate is None or gate.state is GateState.CLOSED or 0.0 < load <= gate.budget.beside_tokens:
            return
        now_s = self._loop.now_s
        closed = Gate(
            lane=gate.lane,
            state=GateState.CLOSED,
            reason=Reason.ONLINE_ARRIVED,
            epoch=self._epochs[replica],
            grace_ms=gate.grace_ms,
            policy_version=gate.policy_version,
            by=gate.lane,
            at_ms=now_s * 1e3,
            since_ms=now_s * 1e3,
        )
        self._gates[replica] = closed
        self.meters[replica].gate(now_s, closed.reason.value)
        self.meters[replica].signal(accepted_s)
        self._tell(replica, closed)

    def _tell(self, lane: int, gate: Gate) -> None:
        """Whoever stands at the lane learns of its gate."""
        if self.jobs is None:
            self._loop.after(self._gate_s, partial(self.lanes[lane].gate_seen, gate))
        else:
            self._loop.after(self._gate_s, partial(self.jobs.gate_seen, lane, gate))

    # -- what the policy worker sees and does (`twin.policy.View`) ---------------------------------------

    def gate(self, lane: int) -> Gate | None:
        return self._gates[lane]

    def publish(self, lane: int, gate: Gate) -> bool:
        epoch, old = self._epochs[lane], self._gates[lane]
        opening = gate.state is GateState.OPEN
        if opening and gate.epoch != epoch:
            return False
        arrived = Reason.ONLINE_ARRIVED
        if not opening and gate.reason is arrived and old is not None and old.reason is arrived:
            return True  # the fast path's own close is renewed as it stands
        same = old is not None and old.state is gate.state
        published = msgspec.structs.replace(
            gate, epoch=epoch, since_ms=old.since_ms if same and old is not None else gate.at_ms
        )
        self._gates[lane] = published
        self.meters[lane].gate(self._loop.now_s, "open" if opening else gate.reason.value)
        if opening or not self.lanes[lane].quiet or self.jobs is not None:
            self._tell(lane, published)
        return True

    def publish_packs(self, packs: tuple[Pack, ...]) -> bool:
        return self._order.publish(packs[0], self._loop.now_s)

    def queue_waits(self) -> bool:
        wait_s = self._queue.oldest_wait_s()
        return wait_s is not None and wait_s * 1e3 >= self._policy.idle.queue_wait_ms

    def crowded(self, lane: int) -> bool:
        return self.replicas[lane].engine.blocks.use > self._policy.offline.kv_share

    def snapshot(self, lanes: list[int]) -> Snapshot:
        now_s = self._loop.now_s
        return Snapshot(
            pool="twin",
            now_ms=now_s * 1e3,
            replicas=tuple([self._replica_view(self.replicas[lane], now_s) for lane in lanes]),
            lanes=tuple([self._lane_view(lane, now_s) for lane in lanes]),
            queues=(self._queue.view(self.spec.model),),
            packs=self._order.packs,
        )

    def whole(self) -> Snapshot:
        now_s = self._loop.now_s
        views = [
            measured(one, replica_view(one, self.spec.model, now_s), now_s, fitted=self._fitted)
            for one in self.replicas
        ]
        return self._order.snapshot(self.replicas, views, self._queue.view(self.spec.model), now_s)

    def _replica_view(self, replica: Replica, now_s: float) -> ReplicaView:
        view = replica_view(replica, self.spec.model, now_s)
        return measured(replica, view, now_s, fitted=True) if self._fitted else view

    def _lane_view(self, number: int, now_s: float) -> LaneView:
        age_s = (now_s - self._lane_changed_s[number]) % LANE_PUBLISH_S
        return lane_view(self.lanes[number], self._gates[number], self._epochs[number], age_s)

    def _lane_changed(self, number: int) -> None:
        now_s = self._loop.now_s
        self._lane_changed_s[number] = now_s
        self.worker.changed(number, now_s, nudge=not self.lanes[number].has_work)
        if self.work_end_s is None and self.feed.remaining == 0:
            self.work_end_s = now_s
            self.online_at_work_end = [meter.online_until(now_s) for meter in self.meters]

    def _feed_changed(self) -> None:
        """Work for any lane has come up, or run out: the lanes' feeders learn it with their next look."""
        self._loop.after(FEEDER_S, self._feed_seen)

    def _feed_seen(self) -> None:
        self.feed.seen_empty = self.feed.empty
        for number in range(len(self.lanes)):
            self.worker.changed(number, self._loop.now_s, nudge=True)
