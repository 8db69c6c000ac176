"""In which order replicas take online requests, and up to what: online packed onto the fewest of them.

Decode is bound by memory bandwidth, so one more request on a replica that serves some costs little, and one
on an idle replica costs all that offline could have done there. The order says who is asked first; the caps
say when the next one is. A request that finds all of them at their caps goes to the least loaded: caps move
requests, they never make one wait.

Caps come from the policy and shrink while measured latency comes near the objectives (`fill`); without a
measurement they stay. What is published is a lease and holds its own past (`fill`, `adjusted_ms`), so a
decision depends on its snapshot alone.
"""

from __future__ import annotations

from math import ceil, isfinite

import msgspec

from hybridsched.core.policy import PackPolicy, PoolPolicy
from hybridsched.core.values import Hold, Pack, QueueView, Rank, ReplicaView, Snapshot

SHRINK, GROW = 0.7, 1.05
"""Most that one look takes from the caps, and what it gives back: back off fast, come again slowly."""

_CALM = 0.9
"""Caps grow again only below this share of the level at which they shrink."""


def packs(snapshot: Snapshot, policy: PoolPolicy) -> tuple[Pack, ...]:
    """The pack order of every model that has replicas, sorted by model; none unless the policy packs."""
    if not policy.pack.enabled:
        return ()
    before = {pack.model: pack for pack in snapshot.packs}
    queues = {view.model: view for view in snapshot.queues}
    models: dict[str, list[ReplicaView]] = {}
    for view in snapshot.replicas:
        models.setdefault(view.model, []).append(view)
    return tuple(
        _pack(model, views, before.get(model), queues.get(model), snapshot, policy)
        for model, views in sorted(models.items())
    )


def same(stored: Pack | None, wanted: Pack) -> bool:
    """Whether what is published says what is wanted, so that only its lease matters."""
    if stored is None:
        return False
    return msgspec.structs.replace(stored, at_ms=0.0, by="") == msgspec.structs.replace(
        wanted, at_ms=0.0, by=""
    )


def caps(pack: PackPolicy, fill: float) -> tuple[int, float]:
    """Requests and load (tokens) of one replica before the next is used; at least one request."""
    return max(1, int(pack.max_inflight * fill)), max(1.0, pack.max_wait_tokens * fill)


def _pack(
    model: str,
    views: list[ReplicaView],
    before: Pack | None,
    queue: QueueView | None,
    snapshot: Snapshot,
    policy: PoolPolicy,
) -> Pack:
    fill, adjusted_ms = _fill(views, before, snapshot.now_ms, policy)
    max_inflight, max_load = caps(policy.pack, fill)
    ordered = _order(views, before, snapshot, policy)
    return Pack(
        model=model,
        ranks=tuple(
            Rank(replica=view.replica, rank=rank, max_inflight=max_inflight, max_load=max_load)
            for rank, view in enumerate(ordered)
        ),
        reach=_reach(views, queue, max_inflight, max_load, policy),
        fill=fill,
        first_tpot_ms=_first_tpot_ms(ordered, policy),
        adjusted_ms=adjusted_ms,
        policy_version=policy.version,
    )


def _order(
    views: list[ReplicaView], before: Pack | None, snapshot: Snapshot, policy: PoolPolicy
) -> list[ReplicaView]:
    """Healthy ones first; of them those whose lane is held anyway, then as they stood, then by name.

    A replica whose health is not known keeps no place in front: what it is given would wait for it.
    """
    age = policy.idle.max_metric_age_ms
    stood = {} if before is None else {rank.replica: rank.rank for rank in before.ranks}
    held = {hold.lane for hold in snapshot.holds if _holds_one(hold, snapshot.now_ms)}
    shut = {lane.replica for lane in snapshot.lanes if lane.lane in held}
    return sorted(
        views,
        key=lambda view: (
            (view.engine_healthy.within(age) or 0.0) < 1.0,
            view.replica not in shut,
            stood.get(view.replica, len(stood)),
            view.replica,
        ),
    )


def _first_tpot_ms(ordered: list[ReplicaView], policy: PoolPolicy) -> float | None:
    """Whole milliseconds, so that an order is not published anew for less."""
    measured = ordered[0].online_tpot_ms.within(policy.idle.max_telemetry_age_ms) if ordered else None
    return None if measured is None else float(round(measured))


def _holds_one(hold: Hold, now_ms: float) -> bool:
    return hold.lane not in ("", "*") and hold.stands(now_ms)


def _fill(
    views: list[ReplicaView], before: Pack | None, now_ms: float, policy: PoolPolicy
) -> tuple[float, float]:
    """The share of the caps in use, and when it was last looked at."""
    pack = policy.pack
    if before is None or before.adjusted_ms > now_ms:
        return 1.0, now_ms
    fill = min(1.0, max(pack.least_fill, before.fill))
    if now_ms - before.adjusted_ms < pack.adjust_ms:
        return fill, before.adjusted_ms
    level = latency_level(views, policy)
    if level is None:
        return fill, now_ms
    if level > 1.0:
        return max(pack.least_fill, fill * max(SHRINK, 1.0 / level)), now_ms
    if level < _CALM:
        return min(1.0, fill * GROW), now_ms
    return fill, now_ms


def latency_level(views: list[ReplicaView], policy: PoolPolicy) -> float | None:
    """Mean latency of the worst replica against its objective's share: 1 is as much as there may be.

    None: no replica has a measurement that can be believed.
    """
    age = policy.idle.max_telemetry_age_ms
    share = policy.pack.objective_share
    levels = [
        value / (objective * share)
        for view in views
        for signal, objective in (
            (view.online_ttft_ms, policy.slo.ttft_ms),
            (view.online_tpot_ms, policy.slo.tpot_ms),
        )
        if (value := signal.within(age)) is not None
    ]
    return max(levels, default=None)


def _reach(
    views: list[ReplicaView],
    queue: QueueView | None,
    max_inflight: int,
    max_load: float,
    policy: PoolPolicy,
) -> int:
    """Ranks that what is here and the largest burst to expect fill, and the spare ones. All: unknown."""
    age = policy.idle.max_telemetry_age_ms
    if queue is None:
        return len(views)
    requests, tokens = queue.burst_requests.within(age), queue.burst_tokens.within(age)
    if requests is None or tokens is None:
        return len(views)
    for view in views:
        inflight, load = view.online_inflight.within(age), view.online_load.within(age)
        if inflight is None or load is None:
            return len(views)
        requests += inflight
        tokens += load
    if not (isfinite(requests) and isfinite(tokens)):
        return len(views)
    needed = max(ceil(requests / max_inflight), ceil(tokens / max_load))
    return min(len(views), max(1, needed) + policy.pack.spare)
