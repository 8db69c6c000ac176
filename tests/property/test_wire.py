"""The shared connection under callers that fail in every way: each answer reaches its own caller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridsched.store.connection import async_client
from hybridsched.store.wire import Wire

BAD: list[Any] = [None, "\ud800", True, {}, object()]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("good"), st.integers(1, 3)),
        st.tuples(st.just("bad"), st.sampled_from(range(len(BAD)))),
        st.tuples(st.just("bad among good"), st.sampled_from(range(len(BAD)))),
        st.tuples(st.sampled_from(["refused", "cancelled", "lost", "turn"]), st.just(0)),
    ),
    max_size=30,
)


async def story(url: str, steps: list[tuple[str, int]]) -> None:
    client = async_client(url)
    wire = Wire(client)
    asked: list[tuple[asyncio.Future[Any], bytes | None]] = []
    number = 0
    try:
        for what, detail in steps:
            await wire.connect()
            if what == "good":
                words = [b"%d" % (number + i) for i in range(detail)]
                number += detail
                asked += zip(wire.post_all([("ECHO", word) for word in words]), words, strict=True)
            elif what == "bad":
                with pytest.raises(redis.DataError):
                    await wire.call("ECHO", BAD[detail])
            elif what == "bad among good":
                with pytest.raises(redis.DataError):
                    wire.post_all([("ECHO", "before"), ("ECHO", BAD[detail]), ("ECHO", "after")])
            elif what == "refused":
                asked.append((wire.post(("NONSENSE",)), None))
            elif what == "cancelled":
                wire.post(("ECHO", "for nobody")).cancel()
            elif what == "lost":
                wire.abort(redis.ConnectionError("lost for the test"))
            else:
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await asyncio.wait([future for future, _ in asked] or [asyncio.ensure_future(wire.call("PING"))])
        for future, word in asked:
            error = future.exception()
            if error is None:
                assert future.result() == word
            else:
                assert isinstance(error, redis.ConnectionError if word else redis.RedisError)
        assert await wire.call("ECHO", "last") == b"last"
    finally:
        await client.aclose()


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_each_answer_reaches_its_own_caller(valkey_url: str, steps: list[tuple[str, int]]) -> None:
    asyncio.run(story(valkey_url, steps))
