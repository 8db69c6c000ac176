"""claim.lua and core.routing are one rule: the same queue and the same records give the same claim."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from hybridsched.core.reasons import Reason
from hybridsched.core.routing import Asker, Others, Terms, Turn, claim
from hybridsched.core.values import Budget, Gate, GateState, Pack, Rank, Value
from hybridsched.store.gates import GateStore, Outcome
from hybridsched.store.leader import LeaderLease
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import DECODE_WEIGHT, QueueLimits, Request
from hybridsched.store.packs import PackStore

MINUTE = 60_000.0
NEVER = 1e12


class Waiting(Value, frozen=True, kw_only=True):
    """What core.routing asks of a request."""

    name: str
    accepted_ms: float
    deadline_ms: float
    prompt_tokens: int
    cost: int


def test_the_terms_of_both_are_the_same() -> None:
    limits, terms = QueueLimits(), Terms()
    assert (limits.slack_tokens, limits.patience_ms, DECODE_WEIGHT) == (
        terms.slack_tokens,
        terms.patience_ms,
        terms.decode_weight,
    )


@pytest.mark.parametrize("seed", range(160))
async def test_both_grant_the_same(client: Redis, seed: int) -> None:
    source = random.Random(seed)
    impatient = source.random() < 0.2
    terms = Terms(slack_tokens=source.choice([0.0, 256.0, 5000.0]), patience_ms=0.0 if impatient else NEVER)
    queue = OnlineQueue(
        client, "p", QueueLimits(slack_tokens=terms.slack_tokens, patience_ms=terms.patience_ms)
    )
    cap = source.randint(1, 12)
    inflight, load = source.randint(0, cap), float(source.choice([0, 1, 300, 2000, 9000]))
    peers = [_peer(source) for _ in range(source.randint(0, 4))]
    for number, (peer_load, peer_inflight, peer_cap) in enumerate(peers):
        await queue.register_replica("m", f"p{number}", load=peer_load, inflight=peer_inflight, cap=peer_cap)
    ranks = await _put_in_order(client, queue, source, len(peers))
    classes: list[list[Waiting]] = [[], [], []]
    for number in range(source.randint(0, 10)):
        priority = source.randrange(3)
        request = _request(queue, source, number, priority)
        await queue.accept(request)
        classes[priority].append(_waiting(request))
    limit = source.randint(0, 12)
    got = await queue.claim("m", "me", "me:1", load=load, inflight=inflight, cap=cap, limit=limit, lane=None)
    await queue.drain()

    roomy = [(one[0], one[1]) for one in peers if one[1] < one[2]]
    best = min(roomy) if roomy else None
    below = [
        turn.rank
        for number, one in enumerate(peers)
        if one[1] < one[2] and (turn := ranks.get(f"p{number}")) is not None and turn.below(one[0], one[1])
    ]
    first = min(below, default=None)
    others = None if best is None else Others(load=best[0], inflight=best[1], count=len(roomy), first=first)
    asker = Asker(load=load, inflight=inflight, room=min(limit, cap - inflight), turn=ranks.get("me"))
    grant = claim(classes, asker, others, terms, now_ms=0.0)
    taken = [one for queued, count in zip(classes, grant.taken, strict=True) for one in queued[:count]]
    live = [one.name for one in taken if one.deadline_ms > 0]
    assert [one.id for one in got] == live
    assert grant.live == len(live)
    depth = await queue.depth("m")
    assert sum(depth.waiting) == sum(map(len, classes)) - len(taken), "the expired ones, too"
    record: Any = await client.hget(queue.keys.replicas("m"), "me")
    if min(limit, cap - inflight) > 0:
        said = record.split()
        assert [int(said[1]), int(said[2])] == [pytest.approx(grant.load, abs=0.51), grant.inflight]


async def _put_in_order(
    client: Redis, queue: OnlineQueue, source: random.Random, peers: int
) -> dict[str, Turn]:
    """Publish a pack order over some of the replicas, in half of the cases; returns each one's turn."""
    if source.random() < 0.5:
        return {}
    await queue.register_replica("m", "me", load=0.0, inflight=0, cap=1)
    names = [name for name in ["me", *(f"p{number}" for number in range(peers))] if source.random() < 0.8]
    source.shuffle(names)
    ranks = tuple(
        Rank(
            replica=name,
            rank=rank,
            max_inflight=source.choice([1, 2, 4, 20]),
            max_load=source.choice([1.0, 500.0, 4000.0, 1e6]),
        )
        for rank, name in enumerate(names)
    )
    lease = LeaderLease(client, "p")
    assert await lease.acquire()
    pack = Pack(model="m", ranks=ranks)
    assert await PackStore(client, "p").publish(pack, leader_token=lease.token, lease_ms=MINUTE)
    return {
        one.replica: Turn(rank=one.rank, max_inflight=one.max_inflight, max_load=one.max_load)
        for one in ranks
    }


def _peer(source: random.Random) -> tuple[float, int, int]:
    cap = source.randint(1, 6)
    return float(source.choice([0, 0, 250, 300, 2000, 9000])), source.randint(0, cap), cap


def _request(queue: OnlineQueue, source: random.Random, number: int, priority: int) -> Request:
    prompt = source.choice([1, 100, 1000, 4000])
    return Request(
        id=f"q{number}",
        model="m",
        body=b'{"prompt":[1]}',
        reply=queue.keys.reply("c"),
        timeout_ms=0.0 if source.random() < 0.15 else MINUTE,
        prompt_tokens=prompt,
        cost=prompt + source.choice([0, 10, 500]),
        priority=priority,
    )


def _waiting(request: Request) -> Waiting:
    # Now is 0 here: what lives is due later, what has expired is due now.
    return Waiting(
        name=request.id,
        accepted_ms=-1.0,
        deadline_ms=request.timeout_ms,
        prompt_tokens=request.prompt_tokens,
        cost=request.cost,
    )


@pytest.mark.parametrize(
    ("beside", "load", "stays"), [(0.0, 0.0, False), (500.0, 0.0, True), (500.0, 450.0, False)]
)
async def test_a_claim_leaves_a_gate_open_only_within_what_its_budget_says(
    client: Redis, beside: float, load: float, stays: bool
) -> None:
    """The request adds 100 tokens; whatever becomes of the gate, the epoch moves."""
    queue = OnlineQueue(client, "p")
    gates = GateStore(client, "p")
    lease = LeaderLease(client, "p")
    assert await lease.acquire()
    budget = Budget(max_inflight=4, chunk_tokens=10, slice_tokens=64, beside_tokens=beside)
    gate = Gate(lane="me", state=GateState.OPEN, reason=Reason.HEADROOM, budget=budget)
    await gates.publish(gate, leader_token=lease.token, expected_epoch=0, lease_ms=MINUTE)
    await queue.accept(
        msgspec.structs.replace(
            _request(queue, random.Random(1), 0, 1), timeout_ms=MINUTE, prompt_tokens=100, cost=100
        )
    )
    (got,) = await queue.claim("m", "me", "me:1", load=load, inflight=1, cap=9, lane="me")
    assert got.closed_gate is not stays
    seen = await gates.read("me")
    assert seen.gate is not None
    assert (seen.gate.state is GateState.OPEN) is stays
    assert seen.epoch == 1
    old = await gates.publish(gate, leader_token=lease.token, expected_epoch=0, lease_ms=MINUTE)
    assert old is Outcome.EPOCH_MOVED
