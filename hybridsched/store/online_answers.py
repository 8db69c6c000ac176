"""Answers on their way to clients: token groups and ends, many in one round trip, none overtaking another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from hybridsched.store.coalesce import Coalescer
from hybridsched.store.keys import Keys
from hybridsched.store.online_values import END_ENCODER, Claimed, End, EndStatus, QueueLimits
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
        return self._queue.post(_Answer(request, number, b"[" + b",".join(chunks) + b"]", False))

    def end(self, request: Claimed, end: End) -> asyncio.Future[bool]:
        """The end."""
        late = end.status is EndStatus.EXPIRED
        return self._queue.post(_Answer(request, None, END_ENCODER.encode(end), late))

    async def drain(self) -> None:
        """Wait until everything posted has been sent."""
        await self._queue.drain()

    async def _send(self, answers: Sequence[_Answer]) -> list[bool | Exception]:
        outcome: dict[int, bool | Exception] = {}
        waiting = list(range(len(answers)))
        at_once = AT_ONCE
        while waiting:
            parts = _parts(answers, waiting, at_once)
            results = await self._scripts.call_many(
                [self._answer_call(consumer, [answers[i] for i in part]) for consumer, part in parts]
            )
            waiting = []
            for (_, part), result in zip(parts, results, strict=True):
                if not isinstance(result, Exception):
                    for i, word in zip(part, result, strict=True):
                        if isinstance(word, bytes):  # others wait for it by now
                            answers[i].request.reply = text_of(word)
                            waiting.append(i)
                        else:
                            outcome[i] = word == 1
                elif len(part) > 1 and type(result) is ResponseError:
                    # One of them fails the script: each alone, so that the others arrive.
                    waiting += part
                    at_once = 1
                else:
                    outcome |= dict.fromkeys(part, result)
        return [outcome[i] for i in range(len(answers))]

    def _answer_call(self, consumer: str, answers: Sequence[_Answer]) -> Call:
        limits, prefix = self._limits, self._prefix
        keys: list[str | bytes] = []
        replies = [reply_keys(answer.request.reply) for answer in answers]
        for (request, *_), named in zip(answers, replies, strict=True):
            keys += (
                f"{prefix}req:{request.id}",
                f"{prefix}online:{request.model}:{request.priority}",
                *named,
            )
        if answers[0].number is None:
            args: list[str | bytes | int] = [
                *(consumer, limits.keep_ms, limits.reply_ttl_ms, limits.reply_maxlen)
            ]
            for (request, _, content, late), named in zip(answers, replies, strict=True):
                args += (request.entry, request.id, request.attempt, len(named), int(late), content)
            return Call("finish", keys, args)
        args = [consumer, limits.reply_ttl_ms, limits.reply_maxlen]
        for (request, number, content, _), named in zip(answers, replies, strict=True):
            args += (request.entry, request.id, request.attempt, len(named), number or 0, content)
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


def text_of(key: bytes) -> str:
    """A key that somebody else chose, which need not be UTF-8; `key_of` gives it back as it was."""
    return key.decode("utf-8", "surrogateescape")


def key_of(text: str) -> bytes:
    """The key that `text_of` made text of."""
    return text.encode("utf-8", "surrogateescape")


def reply_keys(reply: str) -> list[bytes]:
    """The reply streams in `Claimed.reply`: one for each that waits for the request."""
    return key_of(reply).split(b" ")


class EntryError(ValueError):
    """A stream entry is no request that can be run."""


def claimed_from(
    model: str, priority: int, entry: bytes, consumer: str, flat: list[bytes], now_ms: float
) -> Claimed:
    """The `Claimed` of a stream entry as the scripts return it: a flat list of names and values.

    Raises:
        EntryError: a field is missing, or is not what accept.lua writes.
    """
    try:
        return _claimed(model, priority, entry, consumer, flat, now_ms)
    except KeyError as error:
        raise EntryError(f"it has no {error.args[0].decode('ascii', 'replace')}") from None
    except (ValueError, OverflowError) as error:
        raise EntryError(f"a field cannot be read ({type(error).__name__})") from None


def _claimed(
    model: str, priority: int, entry: bytes, consumer: str, flat: list[bytes], now_ms: float
) -> Claimed:
    # Of a name that stands twice the first counts, as for claim.lua, which has looked at the values.
    fields = dict(zip(flat[-2::-2], flat[-1::-2], strict=True))
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
        reply=text_of(fields[b"reply"]),
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
    late: bool
    """An end that says that it expired: who waits longer than others keeps it alive."""


def _parts(answers: Sequence[_Answer], waiting: Sequence[int], at_once: int) -> list[tuple[str, list[int]]]:
    """Divide answers into calls: by consumer, emits before ends (so no end overtakes its own tokens)."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for i in waiting:
        groups.setdefault((answers[i].number is None, answers[i].request.consumer), []).append(i)
    return [
        (consumer, part[i : i + at_once])
        for (_, consumer), part in sorted(groups.items())
        for i in range(0, len(part), at_once)
    ]
