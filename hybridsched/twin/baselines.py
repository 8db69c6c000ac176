"""What sites do today instead, to be compared with: schedulers of the twin that are no policies of a pool.

- *offline alone*: no online at all.
- *static split*: some engines serve online, the others run offline, always.
- *engine priority*: one engine for both, vLLM's own `--scheduling-policy priority` with offline behind
  online; no gate, no pause.
- *Slurm requeue*: each GPU is a job, of an online replica or of offline work. A scaler asks for replicas by
  the requests in flight; a replica more takes its GPU from an offline job by preemption, and whoever comes
  loads its engine anew. More generous than the real thing: Slurm itself takes no time, and what a preempted
  job had generated is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from math import ceil
from typing import Protocol

import msgspec

from hybridsched.core.policies._budget import lane_budget
from hybridsched.core.policies._proposal import LaneFacts
from hybridsched.core.policy import OfflinePolicy, PausePolicy, PolicyKind, PoolPolicy, Rung
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState, LaneView, Value
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.twin.clock import Loop
from hybridsched.twin.lane import TwinLane
from hybridsched.twin.replica import Replica


class BaselineKind(StrEnum):
    OFFLINE_ALONE = "offline-alone"
    STATIC_SPLIT = "static-split"
    ENGINE_PRIORITY = "engine-priority"
    SLURM_REQUEUE = "slurm-requeue"


class Baseline(Value, frozen=True, kw_only=True):
    """One of them, with its settings."""

    kind: BaselineKind
    online_engines: int | None = None
    """Static split: engines that serve online; None: half of them, rounded up."""
    load_s: float = 47.4
    """Slurm requeue: until a fresh engine serves. 47.3 to 47.5 s were measured for Qwen3-Coder-30B-A3B on one
    A100 (vLLM 0.11.0; data of vllm-project.github.io, 2025-vllm-sleep-mode, plotly-switching-comparison.js
    at 93ea815c)."""
    requests_per_replica: float = 8.0
    """Slurm requeue: a replica more is asked for above so many online requests for each one that serves."""
    calm_s: float = 60.0
    """Slurm requeue: a replica less after the load has been low for this long."""
    look_s: float = 5.0
    """Slurm requeue: between two looks of the scaler."""

    @property
    def decides(self) -> bool:
        """Whether it takes the place of the policy worker."""
        return self.kind in (BaselineKind.STATIC_SPLIT, BaselineKind.SLURM_REQUEUE)

    @property
    def offline_priority(self) -> int:
        """Priority of offline requests in the engine; online has 0, and lower goes first."""
        return 1 if self.kind is BaselineKind.ENGINE_PRIORITY else 0

    def policy(self, name: str, like: PoolPolicy) -> PoolPolicy:
        """How it runs its engines: objectives and limits of online as `like`, gates that are never looked at.

        Engines that are offline's alone run at their best: prompts whole, every slot, all of the KV cache.
        """
        shared = self.kind is BaselineKind.ENGINE_PRIORITY
        return PoolPolicy(
            name=name,
            kind=PolicyKind.UNPROTECTED,
            online=like.online,
            slo=like.slo,
            engine=like.engine,
            pause=PausePolicy(ladder=(Rung.BOUNDARY, Rung.ITERATION)),
            offline=OfflinePolicy(
                max_inflight=64 if shared else like.engine.max_num_seqs,
                slots_for_online=0,
                kv_share=0.85 if shared else 1.0,
                slice_tokens=0,
            ),
        )

    def serving(self, engines: int) -> int:
        """Of the engines, how many serve online at the start."""
        if self.kind is BaselineKind.SLURM_REQUEUE:
            return 1
        return min(engines, ceil(engines / 2) if self.online_engines is None else self.online_engines)


def limits_of(limits: Limits, baseline: Baseline | None) -> Limits:
    """The engines' limits, as the baseline starts them."""
    if baseline is not None and baseline.kind is BaselineKind.ENGINE_PRIORITY:
        return msgspec.structs.replace(limits, scheduling_policy="priority")
    return limits


BASELINES = tuple(kind.value for kind in BaselineKind)
"""Their names. A static split may say how many engines serve online: `static-split:2`."""


def baseline_named(name: str) -> Baseline | None:
    """The baseline of that name; None: there is none.

    Raises:
        ValueError: the number of a static split is none.
    """
    plain, colon, count = name.partition(":")
    if plain not in BASELINES or (colon and plain != BaselineKind.STATIC_SPLIT):
        return None
    if not colon:
        return Baseline(kind=BaselineKind(plain))
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise ValueError(
            f"{name!r}: give the engines that serve online as a number from 1, as static-split:2"
        )
    return Baseline(kind=BaselineKind.STATIC_SPLIT, online_engines=int(count))


class Hands(Protocol):
    """What a baseline does to a pool."""

    def publish(self, lane: int, gate: Gate) -> bool:
        """Publish a gate."""

    def gate(self, lane: int) -> Gate | None:
        """The gate as it stands."""


class BaselineLoop:
    """In the place of `twin.policy.PolicyLoop`."""

    def __init__(
        self,
        loop: Loop,
        baseline: Baseline,
        policy: PoolPolicy,
        replicas: Sequence[Replica],
        lanes: Sequence[TwinLane],
        hands: Hands,
        waiting: Callable[[], int],
    ) -> None:
        """`waiting`: online requests that nobody has claimed."""
        self._loop = loop
        self._baseline = baseline
        self._policy = policy
        self._replicas = replicas
        self._lanes = lanes
        self._hands = hands
        self._waiting = waiting
        self._stopped = False
        self._serving = len(replicas)
        """Replicas that serve or are about to."""
        self._for_offline: set[int] = set()
        """Whose engine is loaded, or being loaded, for offline work."""
        self._calm_since_s = 0.0
        self.last_s = 0.0
        self.cycles = 0
        self.decided = 0

    def start(self) -> None:
        """The pool is released now. Engines that begin with offline work have been loaded for it."""
        self._serving = self._baseline.serving(len(self._replicas))
        for number in range(self._serving, len(self._replicas)):
            self._replicas[number].serving = False
            self._replicas[number].announce()
            self._for_offline.add(number)
            self._open(number)
        if self._baseline.kind is BaselineKind.SLURM_REQUEUE:
            self._loop.after(self._baseline.look_s, self._look)

    def stop(self) -> None:
        """Nothing changes any more."""
        self._stopped = True

    def changed(self, lane: int, at_s: float, *, nudge: bool) -> None:
        """Facts that it does not look at have changed."""

    # -- gates -------------------------------------------------------------------------------------------

    def _open(self, number: int) -> None:
        if self._stopped or number >= len(self._lanes):
            return
        now_ms = self._loop.now_s * 1e3
        lane = self._lanes[number].name
        facts = LaneFacts(now_ms=now_ms, lane=LaneView(lane=lane, replica=lane), replica=None, queue=None)
        gate = Gate(
            lane=lane,
            state=GateState.OPEN,
            reason=Reason.UNPROTECTED,
            budget=lane_budget(facts, self._policy),
            at_ms=now_ms,
        )
        self._hands.publish(number, gate)

    def _close(self, number: int) -> None:
        gate = Gate(
            lane=self._lanes[number].name,
            state=GateState.CLOSED,
            reason=Reason.POLICY_CLOSED,
            at_ms=self._loop.now_s * 1e3,
        )
        self._hands.publish(number, gate)

    # -- the scaler of Slurm requeue ---------------------------------------------------------------------

    def _look(self) -> None:
        if self._stopped:
            return
        now_s = self.last_s = self._loop.now_s
        self.cycles += 1
        requests = self._waiting() + sum(replica.inflight for replica in self._replicas)
        most = self._baseline.requests_per_replica
        wanted = min(len(self._replicas), max(1, ceil(requests / most)))
        if wanted > self._serving:
            for number in range(self._serving, wanted):
                self._take_for_online(number)
            self._serving = wanted
            self._calm_since_s = now_s
        elif wanted == self._serving:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s >= self._baseline.calm_s:
            self._serving -= 1
            self._calm_since_s = now_s
            self._give_to_offline(self._serving)
        self._loop.after(self._baseline.look_s, self._look)

    def _take_for_online(self, number: int) -> None:
        """Preempt the offline job, then load the replica's engine; one that has not gone yet stays."""
        if number not in self._for_offline:
            self._serve(number)
            return
        self._for_offline.discard(number)
        self._close_and(
            number, partial(self._loop.after, self._baseline.load_s, partial(self._serve, number))
        )

    def _close_and(self, number: int, then: Callable[[], object]) -> None:
        if number < len(self._lanes):
            self._close(number)
            if not self._lanes[number].leave():
                self._loop.after(0.1, partial(self._close_and, number, then))
                return
        self._replicas[number].engine.blocks.reset_cache()
        then()

    def _serve(self, number: int) -> None:
        if number < self._serving and not self._stopped:
            replica = self._replicas[number]
            replica.serving = True
            replica.announce()
            replica.wake(after_s=0.0)

    def _give_to_offline(self, number: int) -> None:
        """The replica claims no more; when it holds nothing its engine goes and the offline job loads one."""
        replica = self._replicas[number]
        replica.serving = False
        replica.announce()
        self._when_empty(number)

    def _when_empty(self, number: int) -> None:
        replica = self._replicas[number]
        if number < self._serving or self._stopped:
            return  # wanted back meanwhile
        if replica.inflight or replica.engine.online:
            self._loop.after(0.5, partial(self._when_empty, number))
            return
        replica.engine.blocks.reset_cache()
        self._for_offline.add(number)
        self._loop.after(self._baseline.load_s, partial(self._offline_loaded, number))

    def _offline_loaded(self, number: int) -> None:
        if number >= self._serving and number in self._for_offline:
            self._open(number)
