"""Lanes whose workers are Slurm jobs: they come some time after a gate has opened, and go back to the queue
after it has been closed for long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hybridsched.core.values import Gate, GateState, Value
from hybridsched.twin.clock import Loop
from hybridsched.twin.lane import TwinLane

LOOK_AGAIN_S = 1.0
"""A job whose lane is not quiet yet is looked at again after this."""


class SlurmDelays(Value, frozen=True, kw_only=True):
    """Milliseconds of the wall clock."""

    start_ms: float = 2000.0
    """From a gate's opening until the job's worker stands at the lane. From gate to running job Slurm takes
    0.7 s (real daemons of 22.05), the rest is the worker's own start."""
    requeue_wait_ms: float = 120_000.0
    """A requeued job may not start again before this: the life of a munge credential."""


class LaneJobs:
    """The jobs of one pool: as many as lanes, all of which may run anywhere."""

    def __init__(
        self, loop: Loop, lanes: Sequence[TwinLane], delays: SlurmDelays, *, requeue_after_s: float
    ) -> None:
        self._loop = loop
        self._lanes = lanes
        self._start_s = delays.start_ms / 1e3
        self._wait_s = delays.requeue_wait_ms / 1e3
        self._requeue_after_s = requeue_after_s
        self._gates: list[Gate | None] = [None] * len(lanes)
        self._closed_since: list[float | None] = [0.0] * len(lanes)
        self._taken: set[int] = set()
        """Lanes that a job has been given."""
        self._standing: set[int] = set()
        """Those of them whose worker is there."""
        self._waiting = len(lanes)
        """Jobs that could start."""
        self.starts = 0
        self.requeues = 0

    def gate_seen(self, lane: int, gate: Gate) -> None:
        """The gate as a worker at the lane sees it now."""
        self._gates[lane] = gate
        if lane in self._standing:
            self._lanes[lane].gate_seen(gate)
        if gate.state is GateState.OPEN:
            self._closed_since[lane] = None
            self._start(lane)
        elif self._closed_since[lane] is None:
            now_s = self._closed_since[lane] = self._loop.now_s
            self._loop.after(self._requeue_after_s, partial(self._look, lane, now_s))

    def lease_over(self, lane: int) -> None:
        """Nobody has renewed the gate."""
        self._gates[lane] = None
        self._lanes[lane].lease_over()

    def _start(self, lane: int) -> None:
        if lane not in self._taken and self._waiting:
            self._waiting -= 1
            self._taken.add(lane)
            self._loop.after(self._start_s, partial(self._stand, lane))

    def _stand(self, lane: int) -> None:
        self.starts += 1
        self._standing.add(lane)
        gate = self._gates[lane]
        if gate is not None:
            self._lanes[lane].gate_seen(gate)
        since = self._closed_since[lane]
        if since is not None:  # it closed while the job came
            self._loop.after(self._requeue_after_s, partial(self._look, lane, since))

    def _look(self, lane: int, closed_since: float) -> None:
        if self._closed_since[lane] != closed_since or lane not in self._standing:
            return
        if not self._lanes[lane].leave():
            self._loop.after(LOOK_AGAIN_S, partial(self._look, lane, closed_since))
            return
        self._standing.discard(lane)
        self._taken.discard(lane)
        self.requeues += 1
        self._loop.after(self._wait_s, self._may_start)

    def _may_start(self) -> None:
        self._waiting += 1
        for lane, gate in enumerate(self._gates):
            if gate is not None and gate.state is GateState.OPEN:
                self._start(lane)
