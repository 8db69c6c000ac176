"""What the policy worker has learned of each model's bursts, put into what it sees."""

from __future__ import annotations

import msgspec

from hybridsched.core.arrivals import BIN_MS, Arrivals
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import QueueView, Signal
from hybridsched.workers.policy_observe import Observation


class Bursts:
    """The arrivals of every model, by what its replicas say that they have claimed."""

    def __init__(self, speed: float) -> None:
        self._bin_ms = BIN_MS / speed
        self._models: dict[str, Arrivals] = {}

    def with_bursts(self, seen: Observation, policy: PoolPolicy) -> Observation:
        """The observation with the burst to expect in each model's queue; unknown until enough was seen."""
        now_ms = seen.snapshot.now_ms
        for model, claimed in seen.claimed.items():
            self._models.setdefault(model, Arrivals(self._bin_ms)).observe(now_ms, claimed)
        queues = tuple(self._with_burst(queue, policy) for queue in seen.snapshot.queues)
        return msgspec.structs.replace(seen, snapshot=msgspec.structs.replace(seen.snapshot, queues=queues))

    def _with_burst(self, queue: QueueView, policy: PoolPolicy) -> QueueView:
        arrivals = self._models.get(queue.model)
        burst = None if arrivals is None else arrivals.burst(policy.pack.burst_quantile)
        if burst is None:
            return queue
        return msgspec.structs.replace(
            queue,
            burst_requests=Signal(value=burst[0], age_ms=0.0),
            burst_tokens=Signal(value=burst[1], age_ms=0.0),
        )
