"""The online queue against a model of it, on a real server: nothing lost, nothing answered twice.

Leases end without waiting: `reclaim` with a lease of 0 treats every claimed request as given up, also those
of workers that live on and then hold a stale fence.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState
from hybridsched.store.connection import async_client
from hybridsched.store.online import OnlineQueue, new_consumer
from hybridsched.store.online_values import Claimed, End, EndStatus, QueueLimits, Request

MODEL, LANE, CAP, SLACK = "m", "L", 4, 100.0
REPLICAS = ("r0", "r1", "r2")
FOREVER = 3_600_000


@dataclass
class Known:
    """What the model knows of one request."""

    id: str
    priority: int
    place: int
    load: float
    late: bool
    """Its entry's deadline has passed."""
    until: dict[str, bool]
    """Reply streams of all that wait for it; whether for ever (else their time is over)."""
    state: str = "queued"
    attempt: int = 1
    retries: int = 0
    emitted: bool = False
    cancelled: bool = False


class OnlineMachine(RuleBasedStateMachine):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = async_client(url)
        self.queue = OnlineQueue(
            self.client,
            "prop",
            QueueLimits(record_ttl_ms=FOREVER, slack_tokens=SLACK, patience_ms=1e12, gate_ttl_ms=FOREVER),
        )
        self.known: dict[str, Known] = {}
        self.ends: Counter[tuple[str, str]] = Counter()
        self.places = 0
        self.epoch = 0
        self.consumers = {replica: new_consumer(replica) for replica in REPLICAS}
        self.held: dict[str, list[Claimed]] = {replica: [] for replica in REPLICAS}
        self.stale: list[Claimed] = []
        self.records = dict.fromkeys(REPLICAS, (0.0, 0))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize()
    def start(self) -> None:
        self.run(self.client.flushall())
        for replica in REPLICAS:
            self.run(self.queue.register_replica(MODEL, replica, load=0, inflight=0, cap=CAP))

    # rules

    @rule(priority=st.integers(0, 2), tokens=st.sampled_from([10, 120, 400]), late=st.booleans())
    def accept(self, priority: int, tokens: int, late: bool) -> None:
        request_id = f"q{len(self.known)}"
        known = Known(
            request_id, priority, self.place(), float(tokens), late, {self.reply_key("a"): not late}
        )
        assert self.send(known, self.reply_key("a"), late=late) == "accepted"
        self.known[request_id] = known

    @precondition(lambda self: self.known)
    @rule(data=st.data(), stream=st.sampled_from("abc"), late=st.booleans())
    def attach(self, data: st.DataObject, stream: str, late: bool) -> None:
        known = self.pick(data, list(self.known.values()))
        reply = self.reply_key(stream)
        outcome = self.send(known, reply, late=late)
        known.retries += 1
        if known.retries > 2:
            assert outcome == "retry_budget_exhausted"
        elif known.emitted and reply not in known.until:
            assert outcome == "stream_gap"
        elif known.state == "done":
            assert outcome == "done"
            self.ends[reply, known.id] += 1
        else:
            assert outcome == "attached"
            known.until[reply] = known.until.get(reply, False) or not late

    @precondition(lambda self: self.known)
    @rule(data=st.data(), stream=st.sampled_from("abc"))
    def send_another_under_a_used_id(self, data: st.DataObject, stream: str) -> None:
        known = self.pick(data, list(self.known.values()))
        assert self.send(known, self.reply_key(stream), late=False, body=b'{"n":2}') == "conflict"

    @precondition(lambda self: self.known)
    @rule(data=st.data(), stream=st.sampled_from("abc"))
    def leave(self, data: st.DataObject, stream: str) -> None:
        known = self.pick(data, list(self.known.values()))
        reply = self.reply_key(stream)
        word = self.run(self.queue.leave(known.id, reply))
        if known.state != "done" and (reply not in known.until or len(known.until) > 1):
            assert word == "left"
            known.until.pop(reply, None)
        else:
            self.is_cancelled(known, word)

    @rule(replica=st.sampled_from(REPLICAS), limit=st.integers(1, 3))
    def claim(self, replica: str, limit: int) -> None:
        was_open = self.gate_is_open()
        load = sum(request.load for request in self.held[replica])
        inflight = len(self.held[replica])
        got = self.run(
            self.queue.claim(
                *(MODEL, replica, self.consumers[replica]),
                load=load,
                inflight=inflight,
                cap=CAP,
                limit=limit,
                lane=LANE,
            )
        )
        self.run(self.queue.drain())
        room = min(limit, CAP - inflight)
        others = [self.records[r] for r in REPLICAS if r != replica and self.records[r][1] < CAP]
        least = min(others, default=None)
        expected: list[Known] = []
        share = math.ceil(len(self.in_order("queued")) / (len(others) + 1))
        for known in self.in_order("queued"):
            even = len(expected) < share and (least is None or load <= least[0] + SLACK)
            if room == 0 or not (even or least is None or (load, inflight) <= least):
                break
            if known.late:
                self.expire(known)
            else:
                expected.append(known)
                known.state = "running"
                room, inflight, load = room - 1, inflight + 1, load + known.load
        assert [r.id for r in got] == [k.id for k in expected], "priority, then order, then least loaded"
        assert [r.attempt for r in got] == [k.attempt for k in expected]
        self.records[replica] = (load, inflight)
        self.held[replica] += got
        if got:
            self.epoch += 1
            assert not self.gate_is_open(), "a granted claim leaves no open gate"
            assert {r.closed_gate for r in got} == {was_open}
        else:
            assert self.gate_is_open() == was_open
        assert int(self.run(self.client.get(self.queue.keys.gate_epoch(LANE))) or 0) == self.epoch

    @rule()
    def open_gate(self) -> None:
        gate = Gate(
            lane=LANE,
            state=GateState.OPEN,
            reason=Reason.IDLE,
            budget=Budget(max_inflight=4, chunk_tokens=100, slice_tokens=0),
            epoch=self.epoch,
        )
        self.run(self.client.set(self.queue.keys.gate(LANE), msgspec.json.encode(gate)))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.drop_held(data)
        known = self.known[request.id]
        status = EndStatus.CANCELLED if known.cancelled else EndStatus.OK
        assert self.run(self.queue.finish(request, End(status=status))) is True
        self.end(known)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def emit(self, data: st.DataObject) -> None:
        request = self.pick(data, [r for held in self.held.values() for r in held])
        assert self.run(self.queue.emit(request, 1, [b"{}"])) is True
        self.known[request.id].emitted = True

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def stale_worker_wakes_up(self, data: st.DataObject) -> None:
        request = self.pick(data, self.stale)
        assert self.run(self.queue.heartbeat(request.consumer, [request])) == [request]
        assert self.run(self.queue.emit(request, 1, [b"{}"])) is False
        assert self.run(self.queue.finish(request, End(status=EndStatus.OK))) is False
        assert self.run(self.queue.release(request)) == "lost"

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.drop_held(data)
        known = self.known[request.id]
        word = self.run(self.queue.release(request))
        if known.cancelled or known.emitted:
            assert word == ("cancelled" if known.cancelled else "failed")
            self.end(known)
        else:
            assert word == "released"
            known.state, known.place = "queued", self.place()
        self.stale.append(request)

    @rule(replica=st.sampled_from(REPLICAS))
    def crash(self, replica: str) -> None:
        """The worker is gone; its successor has another consumer name. Its requests wait for `reclaim`."""
        self.consumers[replica] = new_consumer(replica)
        self.held[replica] = []

    @rule()
    def reclaim(self) -> None:
        expected: Counter[str] = Counter()
        for known in self.in_order("running"):
            if known.cancelled:
                expected["cancelled"] += 1
                self.end(known)
            elif known.emitted or known.attempt >= 3:
                expected["failed"] += 1
                self.end(known)
            else:
                expected["requeued"] += 1
                known.state, known.place, known.attempt = "queued", self.place(), known.attempt + 1
        assert self.run(self.queue.reclaim(MODEL, 0)) == expected
        for replica in REPLICAS:
            self.stale += self.held[replica]
            self.held[replica] = []

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        known = self.pick(data, list(self.known.values()))
        self.is_cancelled(known, self.run(self.queue.cancel(known.id)))

    def is_cancelled(self, known: Known, word: str) -> None:
        if known.state == "queued":
            assert word == "cancelled"
            self.end(known)
        elif known.state == "running":
            assert word == "aborting"
            known.cancelled = True
        else:
            assert word == "done"

    @rule()
    def heartbeat(self) -> None:
        for replica in REPLICAS:
            assert self.run(self.queue.heartbeat(self.consumers[replica], self.held[replica])) == []

    # what must always hold

    @invariant()
    def each_is_answered_once(self) -> None:
        found: Counter[tuple[str, str]] = Counter()
        for stream in "abc":
            for _, fields in self.run(self.client.xrange(self.reply_key(stream))):
                if b"end" in fields:
                    found[self.reply_key(stream), fields[b"id"].decode()] += 1
        assert found == self.ends

    @invariant()
    def none_is_lost(self) -> None:
        depth = self.run(self.queue.depth(MODEL))
        for priority in (0, 1, 2):
            mine = [known.state for known in self.known.values() if known.priority == priority]
            assert depth.waiting[priority] == mine.count("queued")
            assert depth.claimed[priority] == mine.count("running")

    def teardown(self) -> None:
        """Whatever the story was: one healthy worker can answer all that is left, each once."""
        self.run(self.queue.reclaim(MODEL, 0))
        lost = [*self.stale, *(request for held in self.held.values() for request in held)]
        late = self.run(self.queue.finish_many([(r, End(status=EndStatus.OK)) for r in lost]))
        assert not any(late), "whoever lost its lease can end nothing"
        for replica in REPLICAS:
            self.run(self.queue.unregister(MODEL, replica, self.consumers[replica]))
        while self.run(self.queue.depth(MODEL)).depth:
            got = self.run(self.queue.claim(MODEL, "last", "last:1", load=0, inflight=0, cap=8))
            assert all(self.run(self.queue.finish_many([(r, End(status=EndStatus.OK)) for r in got])))
            self.run(self.queue.drain())
        assert self.run(self.queue.depth(MODEL)).depth == 0
        for known in self.known.values():
            assert self.run(self.queue.result(known.id)) is not None
        self.run(self.client.aclose())
        self.loop.close()

    # helpers

    def reply_key(self, stream: str) -> str:
        return self.queue.keys.reply(stream)

    def place(self) -> int:
        self.places += 1
        return self.places

    def send(self, known: Known, reply: str, *, late: bool, body: bytes = b"{}") -> str:
        request = Request(
            id=known.id,
            model=MODEL,
            body=body,
            reply=reply,
            timeout_ms=0 if late else FOREVER,
            priority=known.priority,
            prompt_tokens=int(known.load),
            cost=int(known.load),
        )
        return self.run(self.queue.accept(request)).outcome.value

    def in_order(self, state: str) -> list[Known]:
        mine = [known for known in self.known.values() if known.state == state]
        return sorted(mine, key=lambda known: (known.priority, known.place))

    def end(self, known: Known) -> None:
        known.state = "done"
        self.ends.update((reply, known.id) for reply in known.until)

    def expire(self, known: Known) -> None:
        """Its entry's time is over. Who waits longer keeps it alive; the others are told."""
        if any(known.until.values()):
            self.ends.update((reply, known.id) for reply, longer in known.until.items() if not longer)
            known.until = {reply: True for reply, longer in known.until.items() if longer}
            known.late, known.place = False, self.place()
        else:
            self.end(known)

    def pick(self, data: st.DataObject, choices: list[Any]) -> Any:
        return choices[data.draw(st.integers(0, len(choices) - 1))]

    def drop_held(self, data: st.DataObject) -> Claimed:
        replica = self.pick(data, [r for r in REPLICAS if self.held[r]])
        return self.held[replica].pop(data.draw(st.integers(0, len(self.held[replica]) - 1)))

    def gate_is_open(self) -> bool:
        raw = self.run(self.client.get(self.queue.keys.gate(LANE)))
        return raw is not None and msgspec.json.decode(raw, type=Gate).state is GateState.OPEN


def test_online_queue_machine(valkey_url: str) -> None:
    run_state_machine_as_test(
        lambda: OnlineMachine(valkey_url),
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
