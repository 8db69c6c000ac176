"""One request under way: handed in with patience, waited for until its deadline, left when its caller goes.

A client asks for each answer with a call of its own, also where several ask for the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import msgspec
import redis

from hybridsched.client.errors import (
    ClientClosed,
    Conflict,
    Failed,
    QueueFull,
    RetryBudgetExhausted,
)
from hybridsched.client.inbox import Inbox
from hybridsched.client.models import ModelWatch
from hybridsched.client.outage import Outages
from hybridsched.client.waiting import stream_gap
from hybridsched.store.connection import explain, redact
from hybridsched.store.errors import StoreError, StoreUnavailable
from hybridsched.store.online import OnlineQueue
from hybridsched.store.online_values import Acceptance, Accepted, End, EndStatus, Request
from hybridsched.store.patience import TROUBLE, passes, pauses

LAST_LOOK_S = 0.5
"""At its deadline a client looks once whether the answer was lost on its way, for this long at most."""

UNKNOWN_LIVE = -1
"""How many replicas live, where a request was found to have been taken earlier."""


class Link:
    """What all calls of one client share."""

    def __init__(
        self,
        queue: OnlineQueue,
        inbox: Inbox,
        models: ModelWatch,
        outages: Outages,
        *,
        url: str,
        patience_s: float,
    ) -> None:
        self.queue = queue
        self.inbox = inbox
        self.models = models
        self.outages = outages
        self.url = url
        self.patience_s = patience_s
        self.closed = False
        self._closing: asyncio.Event | None = None
        self._background: set[asyncio.Task[Any]] = set()

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do it beside the caller, who does not wait for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def leave_quietly(self, request_id: str) -> None:
        """Best effort, for a caller that has gone: without it the request runs to its end for nobody."""
        with contextlib.suppress(redis.RedisError, OSError):
            await self.queue.leave(request_id, self.inbox.key)

    async def pause(self, seconds: float) -> None:
        """Wait, unless the client is closed meanwhile."""
        if self._closing is None:
            self._closing = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def explained(self, error: redis.RedisError | OSError, doing: str) -> StoreError:
        """The error as a caller sees it."""
        known = error if isinstance(error, redis.RedisError) else redis.ConnectionError(str(error))
        return explain(known, self.url, doing)

    def close(self) -> set[asyncio.Task[Any]]:
        """Everyone who waits is told; nothing is begun any more. Returns the tasks still to be ended."""
        self.closed = True
        if self._closing is not None:
            self._closing.set()
        self.inbox.fail_all(closed_error)
        sending = self.queue.abandon(redis.ConnectionError("the client was closed"))
        return {*self._background, *self.inbox.stop(), *self.models.stop(), *sending}


def closed_error(request_id: str) -> ClientClosed:
    """What a caller of a closed client is told."""
    return ClientClosed(
        request_id, "the client was closed before its answer came; what was sent is left to its deadline"
    )


class Call:
    """One request of one caller. Its deadline counts from here."""

    __slots__ = (
        *("_accepted", "_begun", "_deadline", "_link", "_open", "_refused", "_served", "_watched"),
        *("request", "waiter"),
    )

    def __init__(self, link: Link, request: Request, *, stream: bool) -> None:
        if link.closed:
            raise closed_error(request.id)
        self.request = request
        self._link = link
        self._watched = False
        self._deadline = asyncio.get_running_loop().time() + request.timeout_ms / 1000.0
        self._begun = False
        self._accepted = False
        self._refused = False
        self._served = False
        self._open = True
        self.waiter = link.inbox.register(request.id, stream=stream)

    async def more(self) -> None:
        """Hand it in, if it is not yet, and wait until something comes, or its end.

        Raises:
            RequestError: it was refused, or waiting makes no sense any more.
            StoreError: Redis cannot be reached or refuses.
        """
        waiter = self.waiter
        try:
            async with asyncio.timeout_at(self._deadline):
                if not self._begun:
                    self._begun = True
                    await self._accept()
                if waiter.end is None:
                    await waiter.wait()
        except TimeoutError:
            await self._too_late()

    def close(self) -> asyncio.Task[None] | None:
        """The caller goes. Without an end its request is left, which is a task of the background."""
        if not self._open:
            return None
        self._open = False
        link, request = self._link, self.request
        link.inbox.unregister(request.id, self.waiter)
        if self._watched:
            link.models.forget(request.model, self.waiter)
        if self.waiter.end is not None or self._refused or not self._begun or link.closed:
            return None
        if link.inbox.waiting(request.id):  # on the same reply stream: it is left when the last of them goes
            return None
        return link.in_background(link.leave_quietly(request.id))

    async def _accept(self) -> None:
        request, link = self.request, self._link
        try:
            accepted = await link.queue.accept(request)
        except TROUBLE as error:
            accepted = await self._accept_patiently(error)
        except redis.RedisError as error:
            raise link.explained(error, f"sending request {request.id}") from error
        except ValueError:
            self._refused = True  # it cannot stand in a key: nothing was sent, so there is nothing to leave
            raise
        self._accepted = True
        self._served = accepted.live > 0
        outcome = accepted.outcome
        if outcome in (Acceptance.ACCEPTED, Acceptance.ATTACHED):
            if accepted.live == 0:
                self._watched = True
                link.models.watch(request.model, request.id, self.waiter)
        elif outcome is Acceptance.STREAM_GAP:
            self.waiter.finish(stream_gap())
        elif outcome is not Acceptance.DONE:
            self._refused = True
            raise self._refusal(accepted)

    def _refusal(self, accepted: Accepted) -> Exception:
        request = self.request
        if accepted.outcome is Acceptance.QUEUE_FULL:
            return QueueFull(request.id, f"{request.max_waiting} requests of {request.model} wait already")
        if accepted.outcome is Acceptance.CONFLICT:
            return Conflict(
                request.id,
                "its id is that of another request (other model, priority, path or body), which was left "
                "alone; use a new id",
            )
        if accepted.outcome is Acceptance.RETRY_BUDGET_EXHAUSTED:
            budget = self._link.queue.limits.retry_budget
            return RetryBudgetExhausted(request.id, f"it was sent again more than {budget} times")
        return Failed(request.id, "refused", f"it cannot be queued: {accepted.entry}", None)

    async def _accept_patiently(self, error: redis.RedisError | OSError) -> Accepted:
        """Try again with pauses. The id makes it safe: whatever was accepted before is attached to.

        It is looked for first, so that what this caller has sent already neither gains time nor counts as a
        repeat.
        """
        link, request, loop = self._link, self.request, asyncio.get_running_loop()
        give_up_at = min(loop.time() + link.patience_s, self._deadline)
        for pause in pauses():
            if link.closed:
                raise closed_error(request.id)
            if not passes(error) or loop.time() + pause > give_up_at:
                raise link.explained(error, f"sending request {request.id}") from error
            link.outages.begins(error)
            await link.pause(pause)
            try:
                alone = link.inbox.waiting(request.id) == 1
                if alone and await link.queue.awaited(request.id, request.reply):
                    accepted = Accepted(request.id, Acceptance.ATTACHED, "", live=UNKNOWN_LIVE)
                else:
                    left_ms = max(0.0, (self._deadline - loop.time()) * 1000.0)
                    accepted = await link.queue.accept(msgspec.structs.replace(request, timeout_ms=left_ms))
            except (redis.RedisError, OSError) as again:
                error = again
            else:
                link.outages.over()
                return accepted
        raise AssertionError("the pauses never end")

    async def _too_late(self) -> None:
        """The deadline has passed. The answer may have been lost on its way, so look for the kept one.

        Raises:
            StoreUnavailable: Redis has not even said that it took the request.
        """
        request, link = self.request, self._link
        seconds = request.timeout_ms / 1000.0
        if not self._accepted:
            raise StoreUnavailable(
                f"sending request {request.id}: Redis at {redact(link.url)} did not answer within the "
                f"request's {seconds:g} s; see whether it is overloaded or the network drops packets"
            )
        with contextlib.suppress(redis.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(LAST_LOOK_S):
                kept = await link.queue.kept(request.id)
                if kept is not None:
                    self.waiter.take(kept)
                    return
        self.close()
        if self._served or self.waiter.number:
            hint = (
                f", though model {request.model} is served: that was too short for it and for what was ahead "
                "of it; give it a longer timeout_s"
            )
        else:
            hint = f"; see whether an online worker of model {request.model} runs (hybridsched pool status)"
        self.waiter.finish(
            End(status=EndStatus.EXPIRED, message=f"no answer came within its {seconds:g} s{hint}")
        )
