"""The online queue of a pool: accept, claim, emit, finish, and what happens when a worker dies.

Streams with a consumer group: a request is claimed under a lease that its worker renews (`heartbeat`), ended
behind a fence (`finish` does nothing for a worker that lost it), and taken from a dead worker by any other
(`reclaim`). Each operation is one Lua script; `lua/*.lua` say exactly what each does. Any Redis client can
take part: docs/online-requests.md.

A worker's loop:

    await queue.register_replica(model, replica, load=0, inflight=0, cap=64)       # and every second
    async for signal in queue.signals(replica):                                    # Wake or Cancel
        for request in await queue.claim(model, replica, consumer, ...):           # until it returns none
            ...
            await queue.emit(request, n, chunks)                                   # streams only
            await queue.finish(request, End(status=EndStatus.OK, ...))
    await queue.heartbeat(consumer, held)                                          # every third of the lease
    await queue.reclaim(model, lease_ms)                                           # now and then

All methods raise redis.exceptions.RedisError when the server cannot be reached or refuses.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Literal, cast

import msgspec
import redis.asyncio

from hybridsched.store.keys import Keys, check_name
from hybridsched.store.online_accept import Accepts
from hybridsched.store.online_answers import Answers, reply_keys, text_of
from hybridsched.store.online_foreign import Given, Rejects, Stale, sort_given
from hybridsched.store.online_signals import Cancel, Wake, signals
from hybridsched.store.online_values import (
    DECODE_WEIGHT,
    Accepted,
    Claimed,
    End,
    QueueDepth,
    QueueLimits,
    Request,
)
from hybridsched.store.replies import Ended, ended
from hybridsched.store.scripts import Call, WireScripts

_SCRIPTS = (
    *("accept", "cancel", "claim", "depth", "emit", "extend", "finish", "reclaim", "register", "reject"),
    *("release", "stale", "unregister"),
)
_FORGET_CONSUMER_MS = 600_000
_MOST_MOVES = 10
"""How often one reclaim reads a request's reply streams anew; the next one looks at it again."""

Reclaim = Literal["requeued", "cancelled", "expired", "failed", "lost"]


def new_consumer(replica: str) -> str:
    """A consumer name for one incarnation of a worker: a restarted worker is not taken for the old one."""
    return f"{replica}:{uuid.uuid4().hex[:12]}"


class OnlineQueue:
    """The online queue of one pool, on an asyncio client.

    `emit` and `finish` of one turn of the event loop travel together, in order, in one round trip.

    Raises:
        ValueError: the pool's name cannot stand in a key.
    """

    def __init__(self, client: redis.asyncio.Redis, pool: str, limits: QueueLimits | None = None) -> None:
        self.client = client
        self.keys = Keys(pool)
        self.limits = limits or QueueLimits()
        self._scripts = WireScripts(client, _SCRIPTS)
        self._accepts = Accepts(self._scripts, self.keys, self.limits)
        self._answers = Answers(self._scripts, self.keys, self.limits)
        self._rejects = Rejects(self._scripts, self.keys, self.limits)

    # the service's side

    async def accept(self, request: Request) -> Accepted:
        """Accept one request; those of one turn of the event loop share a round trip.

        Raises:
            ValueError: it is none that can be sent; see `online_accept.check`.
        """
        return await self._accepts.one(request)

    async def accept_many(self, requests: Sequence[Request]) -> list[Accepted]:
        """Accept requests in one round trip. Each is accepted, attached or refused on its own.

        Raises:
            ValueError: as `accept`, and then none of them was sent.
        """
        return await self._accepts.many(requests)

    def abandon(self, error: Exception) -> set[asyncio.Task[None]]:
        """The caller goes: whoever waits for an `accept` gets `error`.

        Returns what is still to be cancelled and awaited.
        """
        return self._accepts.abandon(error)

    async def cancel(self, request_id: str) -> Literal["cancelled", "aborting", "done", "unknown"]:
        """Cancel a request for all who wait for it.

        One in the queue is answered `cancelled` now; a running one by its worker, soon.

        Raises:
            ValueError: the id cannot stand in a key.
        """
        return cast("Literal['cancelled', 'aborting', 'done', 'unknown']", await self._cancel(request_id, ""))

    async def leave(
        self, request_id: str, reply: str
    ) -> Literal["cancelled", "aborting", "left", "done", "unknown"]:
        """The one who reads `reply` does not wait any more; the last to leave cancels the request.

        `left`: others wait still, or this one never did.

        Raises:
            ValueError: the id cannot stand in a key.
        """
        return cast(
            "Literal['cancelled', 'aborting', 'left', 'done', 'unknown']",
            await self._cancel(request_id, reply),
        )

    async def _cancel(self, request_id: str, leaves: str) -> str:
        key = self.keys.request(check_name("request id", request_id))
        limits = self.limits
        while True:
            stream, reply = await self._scripts.wire.call("HMGET", key, "stream", "reply")
            if stream is None or reply is None:
                return "unknown"
            word: bytes = await self._scripts.call(
                "cancel",
                [key, stream, *reply.split(b" ")],
                [
                    *(self.keys.prefix, request_id, limits.keep_ms, limits.reply_ttl_ms, limits.reply_maxlen),
                    leaves,
                ],
            )
            if word != b"moved":
                return word.decode()

    async def result(self, request_id: str) -> bytes | None:
        """The kept `end` (JSON) of an answered request, while it is kept; else None."""
        return cast("bytes | None", await self.client.hget(self.keys.request(request_id), "result"))

    async def awaited(self, request_id: str, reply: str) -> bool:
        """Whether the request is known, and its answer comes, or has come, to `reply`."""
        replies = await self._scripts.wire.call("HGET", self.keys.request(request_id), "reply")
        return replies is not None and reply.encode() in replies.split(b" ")

    async def kept(self, request_id: str) -> Ended | None:
        """The same as a reply stream would bring it."""
        result, attempt, groups = await self._scripts.wire.call(
            "HMGET", self.keys.request(request_id), "result", "attempt", "emitted"
        )
        if result is None:
            return None
        return ended(request_id, int(attempt or 0), groups or b"0", result)

    # the worker's side

    async def register_replica(
        self, model: str, replica: str, *, load: float, inflight: int, cap: int
    ) -> float:
        """Say that the replica lives and what it carries; claims and wakes go by it. Server time in ms.

        To be renewed well within `limits.record_ttl_ms`; a claim renews it as well. `load` is the sum of
        `Claimed.load` over what it holds, less the prompt tokens that the engine has worked off.
        """
        answer = await self._scripts.call(
            "register",
            [*self.keys.online_all(check_name("model", model)), self.keys.replicas(model)],
            [check_name("replica", replica), load, inflight, cap, self.limits.record_ttl_ms],
        )
        return float(answer)

    async def unregister(self, model: str, replica: str, consumer: str) -> int:
        """The replica leaves. Returns how many requests it still holds; release or finish them first."""
        left: int = await self._scripts.call(
            "unregister",
            [*self.keys.online_all(model), self.keys.replicas(model)],
            [self.keys.prefix, replica, consumer],
        )
        return left

    async def claim(
        self,
        model: str,
        replica: str,
        consumer: str,
        *,
        load: float,
        inflight: int,
        cap: int,
        limit: int = 64,
        lane: str | None = None,
    ) -> list[Claimed]:
        """Take requests, most urgent first, while the replica has room and is (nearly) the least loaded.

        With `lane`, a claim that grants anything also closes that lane's gate, in the same step; see
        `Claimed.closed_gate`. Requests past their deadline are answered `expired` here and not returned, and
        entries that accept.lua would not write are answered `failed`.
        An empty list means: wait for the next wake, and look again after a while all the same.
        """
        keys, limits = self.keys, self.limits
        gate = lane or replica
        sent_at = time.monotonic()
        reply = await self._scripts.call(
            "claim",
            [*keys.online_all(model), keys.replicas(model), keys.gate(gate), keys.gate_epoch(gate)],
            [
                *(keys.prefix, consumer, replica, limit, load, inflight, cap),
                *(limits.slack_tokens, limits.patience_ms, limits.record_ttl_ms, DECODE_WEIGHT),
                *(0 if lane is None else 1, gate, limits.gate_ttl_ms),
            ],
        )
        given: Given = sort_given(model, consumer, reply)
        # Counted from its sending: how much of the wait came after the script ran is not known.
        took_ms = (time.monotonic() - sent_at) * 1000.0
        for request in given.granted:
            request.left_ms -= took_ms
        granted = [request for request in given.granted if request.left_ms > 0]
        for request in [*given.late, *(r for r in given.granted if r.left_ms <= 0)]:
            self._answers.end(request, End.expired(replica)).add_done_callback(_leave_to_reclaim)
        self._rejects.post(given.foreign)
        return granted

    async def emit(self, request: Claimed, number: int, chunks: Sequence[bytes]) -> bool:
        """Send a group of an answer's chunks (each one JSON object). `number` counts groups from 1.

        False: the request is no longer this worker's (its lease ran out and another has it, or it was
        answered): stop working on it.
        """
        return await self._answers.group(request, number, chunks)

    async def finish(self, request: Claimed, end: End) -> bool:
        """Answer a request for good. False: no longer this worker's, and nothing was sent."""
        return await self._answers.end(request, end)

    async def finish_many(self, ends: Iterable[tuple[Claimed, End]]) -> list[bool]:
        """`finish` for several, in one round trip."""
        return list(await asyncio.gather(*[self._answers.end(request, end) for request, end in ends]))

    async def heartbeat(self, consumer: str, held: Sequence[Claimed]) -> list[Claimed]:
        """Renew the leases of all that the worker holds. Returns those it has lost: stop working on them."""
        lost: set[tuple[str, str]] = set()
        for model in dict.fromkeys(request.model for request in held):
            args: list[str | int] = [consumer]
            for request in held:
                if request.model == model:
                    args += (request.priority, request.entry)
            answer = await self._scripts.call("extend", self.keys.online_all(model), args)
            lost |= {(model, entry.decode()) for entry in answer}
        return [request for request in held if (request.model, request.entry) in lost]

    async def release(self, request: Claimed, *, count: bool = False) -> str:
        """Give a request back that sent nothing yet; it goes to the end of its queue.

        `count`: the attempt counts, because an engine was tried and failed. The caller looks at
        `limits.max_attempts` before; it is not checked here. Returns `released`, or how it ended instead:
        `cancelled`, `expired`, `failed` (its client has seen tokens already), `lost`.
        """
        limits, replica = self.limits, request.consumer.rpartition(":")[0]
        while True:
            word: bytes = await self._scripts.call(
                "release",
                self._request_keys(request),
                [
                    *(self.keys.prefix, request.consumer, request.entry, replica),
                    *(limits.keep_ms, limits.reply_ttl_ms, limits.reply_maxlen, int(count)),
                ],
            )
            if not word.startswith(b"="):
                return word.decode()
            request.reply = text_of(word[1:])

    async def reclaim(self, model: str, lease_ms: int, limit: int = 100) -> Counter[Reclaim]:
        """Take up to `limit` requests of each class from workers that have not renewed them for `lease_ms`.

        They go to the end of their queue for another attempt, or are answered when that makes no sense
        (see lua/reclaim.lua). Returns how many went which way.
        """
        stale = await self._scripts.call(
            "stale", self.keys.online_all(model), [lease_ms, limit, _FORGET_CONSUMER_MS]
        )
        waiting = [Stale.listed(model, row) for row in stale]
        outcome: Counter[Reclaim] = Counter()
        for _ in range(_MOST_MOVES):
            words = await self._scripts.call_many([self._reclaim_call(one, lease_ms) for one in waiting])
            again = []
            for one, word in zip(waiting, words, strict=True):
                if isinstance(word, Exception):
                    one.log(word)
                    outcome["lost"] += 1
                elif word.startswith(b"="):
                    again.append(msgspec.structs.replace(one, reply=word[1:]))
                else:
                    outcome[word.decode()] += 1
            waiting = again
            if not waiting:
                break
        return outcome

    def _reclaim_call(self, one: Stale, lease_ms: int) -> Call:
        limits = self.limits
        return Call(
            "reclaim",
            one.keys(self.keys),
            [
                *(self.keys.prefix, one.owner, one.entry, lease_ms, limits.max_attempts),
                *(limits.keep_ms, limits.reply_ttl_ms, limits.reply_maxlen),
            ],
        )

    async def depth(self, model: str) -> QueueDepth:
        """How much of the model waits, and for how long the oldest has."""
        answer = await self._scripts.call("depth", self.keys.online_all(model), [])
        oldest = float(answer[1])
        return QueueDepth(
            model=model,
            now_ms=float(answer[0]),
            waiting=(answer[2], answer[4], answer[6]),
            claimed=(answer[3], answer[5], answer[7]),
            oldest_wait_ms=oldest if oldest >= 0.0 else None,
        )

    def signals(self, replica: str) -> AsyncIterator[Wake | Cancel]:
        """Wakes and cancellations for this replica, for ever; see `online_signals.signals`."""
        return signals(self.client, self.keys.wake(replica))

    async def drain(self) -> None:
        """Wait until every emit, finish and accept that was begun has been sent."""
        await self._accepts.drain()
        await self._answers.drain()
        await self._rejects.drain()

    def _request_keys(self, request: Claimed) -> list[str | bytes]:
        first, *others = reply_keys(request.reply)
        return [
            self.keys.request(request.id),
            self.keys.online(request.model, request.priority),
            first,
            self.keys.replicas(request.model),
            *others,
        ]


def _leave_to_reclaim(future: asyncio.Future[bool]) -> None:
    """An expired request that could not be answered now is answered when its lease is over."""
    if not future.cancelled():
        future.exception()
