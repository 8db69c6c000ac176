"""Answers on their way to clients: token groups and ends, many in one round trip, none overtaking another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridsched.store.coalesce import Coalescer
from hybridsched.store.keys import Keys
from hybridsched.store.online_values import END_ENCODER, Claimed, End, QueueLimits
from hybridsched.store.scripts import Call, WireScripts, raise_first

AT_ONCE = 64
"""Requests in one call of a script: enough to make its cost per request small, little enough (about a
millisecond) not to hold up other callers."""


class Answers:
    """Sends what workers have for clients; futures say whether the worker still held the request."""

    def __init__(self, scripts: WireScripts, keys: Keys, limits: QueueLimits) -> None:
        self._scripts = scripts
        self._prefix = keys.prefix
        self._limits = limits
        self._queue: Coalescer[_Answer, bool] = Coalescer(self._send)

    def group(self, request: Claimed, number: int, chunks: Sequence[bytes]) -> asyncio.Future[bool]:
        """A group of chunks, each one JSON object; groups count from 1."""
        return self._queue.post(_Answer(request, number, b"[" + b",".join(chunks) + b"]"))

    def end(self, request: Claimed, end: End) -> asyncio.Future[bool]:
        """The end."""
        return self._queue.post(_Answer(request, None, END_ENCODER.encode(end)))

    async def drain(self) -> None:
        """Wait until everything posted has been sent."""
        await self._queue.drain()

    async def _send(self, answers: Sequence[_Answer]) -> list[bool]:
        outcome: dict[int, bool] = {}
        waiting = list(range(len(answers)))
        while waiting:
            parts = _parts(answers, waiting)
            results = await call_all(
                self._scripts,
                [self._answer_call(consumer, [answers[i] for i in part]) for consumer, part in parts],
            )
            waiting = []
            order = [i for _, part in parts for i in part]
            for i, result in zip(order, [r for rs in results for r in rs], strict=True):
                if isinstance(result, bytes):  # a retry of the client named another reply stream
                    answers[i].request.reply = result.decode()
                    waiting.append(i)
                else:
                    outcome[i] = result == 1
        return [outcome[i] for i in range(len(answers))]

    def _answer_call(self, consumer: str, answers: Sequence[_Answer]) -> Call:
        limits, prefix = self._limits, self._prefix
        keys: list[str] = []
        for request, _, _ in answers:
            keys += (
                f"{prefix}req:{request.id}",
                f"{prefix}online:{request.model}:{request.priority}",
                request.reply,
            )
        if answers[0].number is None:
            args: list[str | bytes | int] = [
                *(consumer, limits.keep_ms, limits.reply_ttl_ms, limits.reply_maxlen)
            ]
            for request, _, content in answers:
                args += (request.entry, request.id, request.attempt, content)
            return Call("finish", keys, args)
        args = [consumer, limits.reply_ttl_ms, limits.reply_maxlen]
        for request, number, content in answers:
            args += (request.entry, request.id, request.attempt, number or 0, content)
        return Call("emit", keys, args)


async def call_all(scripts: WireScripts, calls: Sequence[Call]) -> list[Any]:
    """Run the calls in one round trip.

    Raises:
        redis.exceptions.RedisError: the first that failed; the others may have run.
    """
    if len(calls) == 1:
        return [await scripts.call(*calls[0])]
    results = await scripts.call_many(calls)
    raise_first(results)
    return results


def claimed_from(
    model: str, priority: int, entry: bytes, consumer: str, flat: list[bytes], now_ms: float
) -> Claimed:
    """The `Claimed` of a stream entry as the scripts return it: a flat list of names and values."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    deadline_ms, accepted_ms = float(fields[b"deadline_ms"]), float(fields[b"accepted_ms"])
    return Claimed(
        id=fields[b"id"].decode(),
        model=model,
        priority=priority,
        entry=entry.decode(),
        consumer=consumer,
        attempt=int(fields[b"attempt"]),
        path=fields[b"path"].decode(),
        body=fields[b"body"],
        stream=fields[b"stream"] == b"1",
        reply=fields[b"reply"].decode(),
        deadline_ms=deadline_ms,
        accepted_ms=accepted_ms,
        cost=int(float(fields[b"cost"])),
        prompt_tokens=int(float(fields[b"prompt_tokens"])),
        age_ms=now_ms - accepted_ms,
        left_ms=deadline_ms - now_ms,
    )


class _Answer(NamedTuple):
    """Something for a client: a group of chunks, or with `number` None the end."""

    request: Claimed
    number: int | None
    content: bytes


def _parts(answers: Sequence[_Answer], waiting: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Divide answers into calls: by consumer, emits before ends (so no end overtakes its own tokens)."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for i in waiting:
        groups.setdefault((answers[i].number is None, answers[i].request.consumer), []).append(i)
    return [
        (consumer, part[i : i + AT_ONCE])
        for (_, consumer), part in sorted(groups.items())
        for i in range(0, len(part), AT_ONCE)
    ]
