"""One cycle's decisions: from a snapshot and a policy to one gate decision per lane.

Pure and linear in the number of lanes: replicas, queues and holds are indexed once. The same snapshot and
policy always give the same decisions, which is what makes the decision log replayable.
"""

from __future__ import annotations

import msgspec

from hybridsched.core.idle import Numbers
from hybridsched.core.policies import REGISTRY, LaneFacts, Proposal
from hybridsched.core.policy import Autonomy, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import NO_BUDGET, GateDecision, GateState, Hold, Pack, Rank, Snapshot

WHOLE_POOL = ("", "*")
"""`Hold.lane` values that mean the pool: the empty string is the one to write, Redis names it with a star."""


def decide(snapshot: Snapshot, policy: PoolPolicy) -> tuple[GateDecision, ...]:
    """What each lane's gate should be, in the order of `snapshot.lanes`. Raises nothing for any snapshot."""
    # 1. Index the snapshot.
    replicas = {view.replica: view for view in snapshot.replicas}
    queues = {view.model: view for view in snapshot.queues}
    pool_holds, lane_holds = _standing_holds(snapshot)
    places = _places(snapshot, policy)
    propose = REGISTRY[policy.kind]

    # 2. Per lane: an operator's hold first, else what the policy proposes.
    proposals: list[Proposal] = []
    for lane in snapshot.lanes:
        holds = pool_holds + lane_holds[lane.lane] if lane.lane in lane_holds else pool_holds
        if holds:
            proposals.append(_held(holds))
            continue
        if lane.epoch is None:
            proposals.append(Proposal(open=False, reason=Reason.EPOCH_UNKNOWN))
            continue
        replica = replicas.get(lane.replica)
        queue = None if replica is None else queues.get(replica.model)
        facts = LaneFacts(now_ms=snapshot.now_ms, lane=lane, replica=replica, queue=queue)
        place = places.get(lane.replica) if places else None
        if place is not None:
            rank, pack = place
            facts = msgspec.structs.replace(
                facts, rank=rank, reach=pack.reach, first_tpot_ms=pack.first_tpot_ms
            )
        proposals.append(propose(facts, policy))

    # 3. The floor: close the openings that would leave online too few GPUs.
    if policy.floor_gpus > 0:
        _apply_floor(snapshot, policy, proposals)

    # 4. Autonomy: a policy that may only suggest closes what it would open, and says so.
    if policy.autonomy is not Autonomy.AUTO:
        proposals = [_suggested(p, policy.autonomy) if p.open else p for p in proposals]

    # 5. Decisions, each on the epoch that the snapshot saw.
    grace_ms = policy.pause.grace_ms
    return tuple(
        [
            GateDecision(
                lane=lane.lane,
                state=GateState.OPEN if proposal.open else GateState.CLOSED,
                reason=proposal.reason,
                budget=proposal.budget if proposal.open else NO_BUDGET,
                grace_ms=grace_ms,
                epoch=lane.epoch or 0,
                check_in_ms=proposal.check_in_ms,
                numbers=proposal.numbers,
            )
            for lane, proposal in zip(snapshot.lanes, proposals, strict=True)
        ]
    )


def _places(snapshot: Snapshot, policy: PoolPolicy) -> dict[str, tuple[Rank, Pack]]:
    """Each replica's rank and its order, of the orders whose lease holds."""
    if not policy.pack.enabled:
        return {}
    return {
        rank.replica: (rank, pack)
        for pack in snapshot.packs
        if pack.stands(snapshot.now_ms, policy.cycle.lease_ms)
        for rank in pack.ranks
    }


def _standing_holds(snapshot: Snapshot) -> tuple[list[Hold], dict[str, list[Hold]]]:
    """The holds of the pool and those of lanes that have not ended by `now_ms`."""
    pool: list[Hold] = []
    lanes: dict[str, list[Hold]] = {}
    for hold in snapshot.holds:
        if hold.stands(snapshot.now_ms):
            of_place = pool if hold.lane in WHOLE_POOL else lanes.setdefault(hold.lane, [])
            of_place.append(hold)
    return pool, lanes


def _held(holds: list[Hold]) -> Proposal:
    """Closed while any of them stands. The one that stands longest is named: the others end before it."""
    last = max(holds, key=lambda hold: float("inf") if hold.until_ms is None else hold.until_ms)
    numbers: Numbers = {
        "held_lane": last.lane or "*",
        "held_by": last.by,
        "why": last.why,
        "until_ms": last.until_ms,
        "hold": last.id,
        "holds": float(len(holds)),
    }
    return Proposal(open=False, reason=Reason.HELD, numbers=numbers)


def _apply_floor(snapshot: Snapshot, policy: PoolPolicy, proposals: list[Proposal]) -> None:
    """Close proposals in place until online keeps `floor_gpus` working replicas to itself.

    One replica counts as one GPU. Only replicas known to be healthy count as left for online. Engines whose
    lane is open already keep it before others get one, so that the floor does not move work about; among
    equals the order of lanes decides.
    """
    age = policy.idle.max_metric_age_ms
    usable = {
        view.replica
        for view in snapshot.replicas
        if view.engine_healthy.known(age) and (view.engine_healthy.value or 0.0) >= 1.0
    }
    allowed = max(0, len(usable) - policy.floor_gpus)
    wanting = [i for i, proposal in enumerate(proposals) if proposal.open]
    running = [i for i in wanting if _is_open(snapshot, i)]
    others = [i for i in wanting if not _is_open(snapshot, i)]
    taken: set[str] = set()
    for i in (*running, *others):
        replica = snapshot.lanes[i].replica
        if replica in taken:
            continue
        if len(taken) < allowed:
            taken.add(replica)
            continue
        numbers: Numbers = {
            "floor_gpus": float(policy.floor_gpus),
            "healthy_replicas": float(len(usable)),
            "lanes_allowed": float(allowed),
        }
        proposals[i] = Proposal(open=False, reason=Reason.FLOOR, numbers=proposals[i].numbers | numbers)


def _is_open(snapshot: Snapshot, index: int) -> bool:
    gate = snapshot.lanes[index].gate
    return gate is not None and gate.state is GateState.OPEN


def _suggested(proposal: Proposal, autonomy: Autonomy) -> Proposal:
    would: Numbers = {
        "autonomy": autonomy.value,
        "would": "open",
        "would_reason": proposal.reason.value,
        "would_max_inflight": float(proposal.budget.max_inflight),
    }
    return msgspec.structs.replace(
        proposal, open=False, reason=Reason.AUTONOMY, budget=NO_BUDGET, numbers=proposal.numbers | would
    )
