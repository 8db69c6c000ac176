"""The policy worker on the twin's clock: observe, decide with `core.decide`, publish, and when to do so
again.

A cycle decides on the lanes whose facts may have changed since their last decision; the others would get the
same one. Ages of records never reach their limits here, an idle span only grows, and what else a decision
asks for is told when it changes: requests, work, throughput, gates, the end of a window. What may change
without is the use of the KV cache, which is looked at, and whatever closes a gate for a reason that is not
among the usual ones. A run with `exhaustive` decides on every lane in every cycle, and must give the same
result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import Protocol

import msgspec

from hybridsched.core.codec import DecisionRecord
from hybridsched.core.cycles import MARGIN_MS, coalesce_ms, wait_ms
from hybridsched.core.decide import decide
from hybridsched.core.packing import packs
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.publishing import gate_of, stands
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateDecision, GateState, Pack, Rank, Snapshot
from hybridsched.twin.clock import Loop
from hybridsched.twin.latencies import Latencies

_STEADY = frozenset(
    {
        *(Reason.IDLE, Reason.UNPROTECTED, Reason.ONLINE_ACTIVE, Reason.IDLE_WINDOW),
        *(Reason.NO_WORK, Reason.POLICY_CLOSED),
    }
)
"""Reasons that hold until something happens that the twin tells of (or the window's end, which is known)."""


PACK_S = 0.2
"""Pack orders are decided and renewed this often, with a cycle."""


class View(Protocol):
    """What the policy worker sees of a pool and does to it."""

    def snapshot(self, lanes: list[int]) -> Snapshot:
        """The pool as Redis would show it now, with these lanes and their replicas alone."""

    def whole(self) -> Snapshot:
        """The pool with all its replicas and no lane: what a pack order is decided on."""

    def publish_packs(self, packs: tuple[Pack, ...]) -> bool:
        """Publish or renew pack orders; whether they say anything new of what lanes may do."""

    def queue_waits(self) -> bool:
        """Whether an online request has waited for longer than a pull takes."""

    def restless(self) -> Iterable[int]:
        """Lanes whose engine holds requests that no worker counts, for a moment."""

    def crowded(self, lane: int) -> bool:
        """Whether the KV cache of the lane's engine is fuller than offline may fill it."""

    def gate(self, lane: int) -> Gate | None:
        """The gate as it is published."""

    def publish(self, lane: int, gate: Gate) -> bool:
        """Publish a gate; False when the lane's epoch has moved since the decision to open it."""


class PolicyLoop:
    """Cycles of one pool."""

    def __init__(
        self,
        loop: Loop,
        lanes: int,
        policy: PoolPolicy,
        view: View,
        latencies: Latencies,
        *,
        exhaustive: bool = False,
        log: Callable[[DecisionRecord], None] | None = None,
    ) -> None:
        self._loop = loop
        self._policy = policy
        self._view = view
        self._cycle_s = latencies.cycle_ms / 1e3
        self._coalesce_s = coalesce_ms(policy) / 1e3
        # Under headroom what is measured of an engine decides, and that is another with every cycle.
        self._exhaustive = exhaustive or policy.kind is PolicyKind.HEADROOM
        self._log = log
        self._all = list(range(lanes))
        self._dirty: dict[int, float] = dict.fromkeys(self._all, 0.0)
        """Lanes to decide on, and from when on what has changed can be read."""
        self._later: dict[int, float] = {}
        """The last change of those that have several."""
        self._checks: dict[int, float] = {}
        """When the idle window of a lane will be over."""
        self._reasons: list[tuple[GateState, Reason] | None] = [None] * lanes
        self._unsteady = set(self._all)
        """Lanes whose last decision says nothing of the next one."""
        self._open: set[int] = set()
        self._crowded: set[int] = set()
        self._waits = False
        self._due_s = inf
        self._next_s = inf
        self._stopped = False
        self._pack_due_s = 0.0
        self._packs_said: list[tuple[tuple[Rank, ...], int]] = []
        self.last_s = 0.0
        """When the last cycle looked."""
        self.cycles = 0
        self.decided = 0
        """Decisions made: lanes times cycles, less those that were seen to be the same."""

    def start(self) -> None:
        """The pool is released now: the first cycle comes as after a nudge."""
        self._due_s = inf
        self._schedule(self._loop.now_s + self._coalesce_s)

    def stop(self) -> None:
        """No further cycle: the gates' leases run out."""
        self._stopped = True

    # -- what has changed --------------------------------------------------------------------------------

    def changed(self, lane: int, at_s: float, *, nudge: bool) -> None:
        """Facts of a lane are others from `at_s` on. With `nudge` the next cycle comes soon after that."""
        first = self._dirty.get(lane)
        if first is None or at_s < first:
            self._dirty[lane] = at_s
        if first is not None and max(first, at_s) > self._later.get(lane, -inf):
            self._later[lane] = max(first, at_s)
        if nudge:
            self._schedule(min(self._due_s, at_s + self._coalesce_s))

    def _schedule(self, at_s: float) -> None:
        if at_s < self._next_s and not self._stopped:
            self._next_s = at_s
            self._loop.at(max(at_s, self._loop.now_s), partial(self._wake, at_s))

    def _wake(self, at_s: float) -> None:
        if at_s == self._next_s and not self._stopped:
            self._next_s = inf
            self._cycle()

    # -- a cycle -----------------------------------------------------------------------------------------

    def _cycle(self) -> None:
        now_s = self.last_s = self._loop.now_s
        self.cycles += 1
        if self._policy.pack.enabled and now_s >= self._pack_due_s:
            self._decide_packs(now_s)
        lanes = self._to_decide(now_s)
        decisions: tuple[GateDecision, ...] = ()
        if lanes:
            snapshot = self._view.snapshot(lanes)
            decisions = decide(snapshot, self._policy)
            self.decided += len(lanes)
            self._note(lanes, decisions, now_s, snapshot)
        self._due_s = now_s + wait_ms(self._policy, decisions) / 1e3
        if self._checks:
            self._due_s = min(self._due_s, max(now_s, min(self._checks.values())) + MARGIN_MS / 1e3)
        self._schedule(self._due_s)
        if self._later or self._dirty:
            self._after_nudge(now_s)

    def _after_nudge(self, now_s: float) -> None:
        """A nudge that comes after this cycle's look still brings the next one forward."""
        soon = min((at for at in self._dirty.values() if at > now_s), default=inf)
        if soon != inf:
            self._schedule(min(self._due_s, soon + self._coalesce_s))

    def _to_decide(self, now_s: float) -> list[int]:
        waits = self._view.queue_waits()
        everything = self._exhaustive or waits or waits is not self._waits
        self._waits = waits
        due = [lane for lane, at_s in self._dirty.items() if at_s <= now_s]
        for lane in due:
            later = self._later.pop(lane, -inf)
            if later > now_s:
                self._dirty[lane] = later
            else:
                del self._dirty[lane]
        if everything:
            return self._all
        wanted = set(due)
        for lane, at_s in list(self._checks.items()):
            if at_s <= now_s:
                wanted.add(lane)
        wanted |= self._unsteady
        wanted.update(self._view.restless())
        for lane in self._open:
            if lane in self._crowded or self._view.crowded(lane):
                wanted.add(lane)
        # Under a floor the decisions on lanes depend on each other.
        return self._all if wanted and self._policy.floor_gpus > 0 else sorted(wanted)

    def _note(
        self, lanes: list[int], decisions: tuple[GateDecision, ...], now_s: float, snapshot: Snapshot
    ) -> None:
        to_publish: list[tuple[int, Gate]] = []
        changed = False
        for lane, decision in zip(lanes, decisions, strict=True):
            said = (decision.state, decision.reason)
            changed = changed or said != self._reasons[lane]
            self._reasons[lane] = said
            # An idle window whose end nobody waits for is over without a check.
            unsteady = decision.reason is Reason.IDLE_WINDOW and decision.check_in_ms is None
            _put(self._unsteady, lane, unsteady or decision.reason not in _STEADY)
            _put(self._open, lane, decision.state is GateState.OPEN)
            _put(self._crowded, lane, decision.state is GateState.OPEN and self._view.crowded(lane))
            self._checks.pop(lane, None)
            if decision.check_in_ms is not None:
                self._checks[lane] = now_s + decision.check_in_ms / 1e3
            gate = gate_of(decision, 1, "twin")
            if not stands(self._view.gate(lane), gate):
                to_publish.append((lane, gate))
        if to_publish:
            self._loop.after(self._cycle_s, partial(self._publish, to_publish))
        if changed and self._log is not None:
            self._log(
                DecisionRecord(
                    cycle=self.cycles, snapshot=snapshot, policy=self._policy, decisions=decisions, by="twin"
                )
            )

    def _decide_packs(self, now_s: float) -> None:
        self._pack_due_s = now_s + PACK_S
        snapshot = self._view.whole()
        found = packs(snapshot, self._policy)
        self._loop.after(self._cycle_s, partial(self._publish_packs, found))
        said = [(pack.ranks, pack.reach) for pack in found]
        if self._log is not None and said != self._packs_said:
            self._log(
                DecisionRecord(
                    cycle=self.cycles,
                    snapshot=snapshot,
                    policy=self._policy,
                    decisions=(),
                    by="twin",
                    packs=found,
                )
            )
        self._packs_said = said

    def _publish_packs(self, found: tuple[Pack, ...]) -> None:
        if self._view.publish_packs(found):
            self._dirty.update(dict.fromkeys(self._all, self._loop.now_s))

    def _publish(self, gates: list[tuple[int, Gate]]) -> None:
        now_s = self._loop.now_s
        for lane, gate in gates:
            if not self._view.publish(lane, msgspec.structs.replace(gate, at_ms=now_s * 1e3)):
                self.changed(lane, now_s, nudge=False)


def _put(lanes: set[int], lane: int, member: bool) -> None:
    if member:
        lanes.add(lane)
    else:
        lanes.discard(lane)
