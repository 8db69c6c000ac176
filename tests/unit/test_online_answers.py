"""Answers that travel together: one that the server refuses holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import OutOfMemoryError, ResponseError

from hybridsched.store.keys import Keys
from hybridsched.store.online_answers import Answers
from hybridsched.store.online_values import End, EndStatus, QueueLimits
from hybridsched.store.scripts import Call, WireScripts
from tests.unit.online_claims import claimed


class Server:
    """Refuses every call in which one of `bad` stands; else each request of a call is answered with 1."""

    def __init__(self, bad: dict[str, Exception]) -> None:
        self.bad = bad
        self.calls = 0
        self.ended: list[str] = []

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        return [self._one(call) for call in calls]

    def _one(self, call: Call) -> Any:
        self.calls += 1
        ids = [str(key).rpartition("req:")[2] for key in call.keys if "req:" in str(key)]
        for one in ids:
            if one in self.bad:
                return self.bad[one]
        self.ended += ids
        return [1] * len(ids)


async def finish(server: Server, names: Sequence[str]) -> dict[str, Any]:
    answers = Answers(cast("WireScripts", server), Keys("p"), QueueLimits())
    sent = [answers.end(claimed(name), End(status=EndStatus.OK)) for name in names]
    return dict(zip(names, await asyncio.gather(*sent, return_exceptions=True), strict=True))


async def test_an_answer_that_fails_its_script_fails_alone() -> None:
    refused = ResponseError("ERR something about one of them")
    server = Server({"q5": refused})
    names = [f"q{i}" for i in range(100)]
    outcome = await finish(server, names)
    assert outcome.pop("q5") is refused
    assert set(outcome.values()) == {True}
    assert sorted(server.ended) == sorted(outcome), "each of the others once"


@pytest.mark.parametrize("error", [OutOfMemoryError("OOM command not allowed")])
async def test_a_server_that_takes_nothing_is_not_asked_for_each(error: Exception) -> None:
    names = [f"q{i}" for i in range(60)]
    server = Server(dict.fromkeys(names, error))
    assert set((await finish(server, names)).values()) == {error}
    assert server.calls == 1
