"""The pack order of the twin's replicas: what it is decided on, and how it is published."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hybridsched.core.arrivals import Arrivals
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.routing import Turn
from hybridsched.core.values import UNKNOWN, Pack, QueueView, ReplicaView, Signal, Snapshot
from hybridsched.twin.online import Board
from hybridsched.twin.replica import Replica


class PackOrder:
    """The order of one pool's replicas, as it stands published."""

    def __init__(self, board: Board, policy: PoolPolicy) -> None:
        self._board = board
        self._policy = policy
        self._arrivals = Arrivals()
        self._turns: list[tuple[int, Turn]] = []
        self.packs: tuple[Pack, ...] = ()
        """As `Snapshot.packs` shows them."""

    def snapshot(
        self, replicas: Sequence[Replica], views: Sequence[ReplicaView], queue: QueueView, now_s: float
    ) -> Snapshot:
        """What the next order is decided on: the replicas' views (`measured`), and the bursts."""
        self._arrivals.observe(
            now_s * 1e3,
            {one.engine.meter.lane: (float(one.claimed), float(one.claimed_tokens)) for one in replicas},
        )
        burst = self._arrivals.burst(self._policy.pack.burst_quantile)
        if burst is not None:
            queue = msgspec.structs.replace(
                queue,
                burst_requests=Signal(value=burst[0], age_ms=0.0),
                burst_tokens=Signal(value=burst[1], age_ms=0.0),
            )
        return Snapshot(
            pool="twin",
            now_ms=now_s * 1e3,
            replicas=tuple(views),
            queues=(queue,),
            packs=self.packs,
        )

    def publish(self, pack: Pack, now_s: float) -> bool:
        """Publish or renew the order. Whether it says anything new of what lanes may do."""
        old = self.packs[0] if self.packs else None
        self.packs = (msgspec.structs.replace(pack, at_ms=now_s * 1e3),)
        ordered = old is not None and old.ranks == pack.ranks
        if not ordered:
            self._turns = [
                (
                    int(rank.replica[1:]),
                    Turn(rank=rank.rank, max_inflight=rank.max_inflight, max_load=rank.max_load),
                )
                for rank in pack.ranks
            ]
        self._board.put_in_order(self._turns, now_s + self._policy.cycle.lease_ms / 1e3)
        return not ordered or old is None or old.reach != pack.reach


def measured(replica: Replica, view: ReplicaView, now_s: float, *, fitted: bool) -> ReplicaView:
    """A replica's view with what only a pack order and headroom ask for; with `fitted` what only the latter
    does, which takes longer than all the rest."""
    age_ms = replica.record_age_s(now_s) * 1e3
    fit, fit_age_ms = replica.fit(now_s) if fitted else (view.latency, view.latency_age_ms)
    ttft_ms, tpot_ms = replica.ttft_ms(now_s), replica.tpot_ms(now_s)
    return msgspec.structs.replace(
        view,
        online_load=Signal(value=replica.load, age_ms=age_ms),
        online_ttft_ms=UNKNOWN if ttft_ms is None else Signal(value=ttft_ms, age_ms=age_ms),
        online_tpot_ms=UNKNOWN if tpot_ms is None else Signal(value=tpot_ms, age_ms=age_ms),
        latency=fit,
        latency_age_ms=fit_age_ms,
    )
