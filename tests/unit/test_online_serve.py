"""One request against a scripted engine: there is always exactly one ending, and the engine is let go."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from hybridsched.engines.protocol import Completion, EngineError, EngineInfo, EngineStats, StreamChunk
from hybridsched.workers.online_serve import Ending, Request, Running, Stop
from tests.helpers import await_until


def chunk(text: str = "", finish: str | None = None, **extra: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **extra}).encode()


USAGE = b'{"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}'
GOOD = (chunk("a"), chunk("b"), chunk("c", "length"), USAGE)


class Scripted:
    """An engine that plays a script: bytes are events, an exception is raised, `...` waits for ever."""

    url = "scripted"

    def __init__(self, *script: Any) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.open = 0
        self.timeouts: list[float] = []

    def _note(self, body: dict[str, Any] | bytes, request_id: str) -> None:
        self.bodies.append(json.loads(body) if isinstance(body, bytes) else body)
        self.ids.append(request_id)

    async def stream(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, idle_timeout_s: float
    ) -> AsyncIterator[StreamChunk]:
        self._note(body, request_id)
        self.open += 1
        try:
            for step in self.script:
                if step is ...:
                    await asyncio.Event().wait()
                if isinstance(step, Exception):
                    raise step
                yield StreamChunk(data=step)
        finally:
            self.open -= 1

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        self._note(body, request_id)
        self.timeouts.append(timeout_s)
        self.open += 1
        try:
            step = self.script[0]
            if step is ...:
                await asyncio.Event().wait()
            if isinstance(step, Exception):
                raise step
            assert isinstance(step, Completion)
            return step
        finally:
            self.open -= 1

    async def info(self) -> EngineInfo:
        raise NotImplementedError

    async def healthy(self) -> bool:
        return True

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def abort(self, path: str, request_ids: Sequence[str]) -> int:
        return 0

    async def tokenize(self, path: str, body: dict[str, Any]) -> list[int]:
        return []

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


class Case:
    """A running request and what came of it."""

    def __init__(
        self, *, stream: bool = True, left_s: float = 30.0, body: Any = None, path: str = ""
    ) -> None:
        now = time.monotonic()
        self.events: list[bytes] = []
        self.first: list[float] = []
        self.widened: list[int] = []
        self.running = Running(
            Request(
                id="q1",
                attempt=2,
                path=path or "/v1/completions",
                body=json.dumps({"prompt": [1, 2]} if body is None else body).encode(),
                stream=stream,
                priority=1,
                deadline_at=now + left_s,
                accepted_at=now,
            ),
            tokens=self.events.append,
            first=self.first.append,
            widened=self.widened.append,
        )

    async def run(self, engine: Scripted, *, priority: bool = False) -> Ending:
        return await self.running.run(engine, idle_timeout_s=5.0, engine_priority=priority)


def engine_error(code: str, *, retryable: bool = True, status: int | None = None) -> EngineError:
    return EngineError(f"said {code}", code=code, retryable=retryable, status=status)


async def test_a_stream_is_passed_on_without_the_usage_nobody_asked_for() -> None:
    case, engine = Case(), Scripted(*GOOD)
    end = await case.run(engine)
    assert case.events == list(GOOD[:3])
    assert (end.status, end.finish_reason, end.http_status) == ("ok", "length", 200)
    assert end.usage == {"prompt_tokens": 2, "completion_tokens": 3}
    assert len(case.first) == 1
    assert case.running.tpot_ms is not None
    assert engine.bodies[0]["stream_options"] == {"include_usage": True}
    assert engine.ids == ["hson-q1-2"]


async def test_usage_goes_to_a_client_that_asked() -> None:
    case = Case(body={"stream_options": {"include_usage": True}})
    await case.run(Scripted(*GOOD))
    assert case.events == list(GOOD)


async def test_a_whole_answer_is_passed_on() -> None:
    body = {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 1}}
    case, engine = Case(stream=False), Scripted(Completion(status=200, body=body))
    end = await case.run(engine)
    assert (end.status, end.body, end.finish_reason) == ("ok", body, "stop")
    assert engine.timeouts[0] <= 30.0
    assert "stream" not in engine.bodies[0]


async def test_priority_reaches_only_an_engine_that_schedules_by_it() -> None:
    for allowed in (True, False):
        engine = Scripted(*GOOD)
        await Case(body={"priority": -5}).run(engine, priority=allowed)
        assert engine.bodies[0].get("priority") == (1 if allowed else None)


async def test_n_takes_as_many_sequences() -> None:
    case = Case(body={"n": 4})
    await case.run(Scripted(*GOOD))
    assert (case.widened, case.running.sequences) == ([4], 4)


async def test_an_expired_request_never_reaches_the_engine() -> None:
    engine = Scripted(*GOOD)
    end = await Case(left_s=-0.001).run(engine)
    assert (end.status, end.code, engine.ids) == ("expired", "deadline_exceeded", [])


@pytest.mark.parametrize("stream", [True, False])
async def test_at_the_deadline_the_engine_is_let_go(stream: bool) -> None:
    engine = Scripted(...)
    end = await Case(stream=stream, left_s=0.03).run(engine)
    assert (end.status, engine.open, end.give_back) == ("expired", 0, False)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("why", "status"), [(Stop.CANCELLED, "cancelled"), (Stop.ENGINE_HUNG, "failed")])
async def test_stopping_lets_the_engine_go(stream: bool, why: Stop, status: str) -> None:
    case, engine = Case(stream=stream), Scripted(...)
    task = asyncio.create_task(case.run(engine))
    await await_until(lambda: engine.open == 1, what="the request in the engine")
    case.running.stop(why)
    case.running.stop(Stop.STOPPING)
    end = await task
    assert (end.status, engine.open) == (status, 0)
    assert task.cancelling() == 0


async def test_stopped_before_it_began() -> None:
    case, engine = Case(), Scripted(*GOOD)
    case.running.stop(Stop.CANCELLED)
    assert (await case.run(engine)).status == "cancelled"
    assert engine.ids == []


async def test_a_cancellation_from_elsewhere_is_not_swallowed() -> None:
    engine = Scripted(...)
    task = asyncio.create_task(Case().run(engine))
    await await_until(lambda: engine.open == 1, what="the request in the engine")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.open == 0


@pytest.mark.parametrize("code", ["engine_unreachable", "engine_died", "engine_timeout", "engine_busy"])
@pytest.mark.parametrize("stream", [True, False])
async def test_before_any_token_another_replica_may_try(code: str, stream: bool) -> None:
    end = await Case(stream=stream).run(Scripted(engine_error(code)))
    assert (end.status, end.code, end.give_back) == ("failed", code, True)
    assert end.suspect is (code != "engine_busy")
    assert end.http_status == {"engine_busy": 503, "engine_timeout": 504}.get(code, 502)


async def test_after_tokens_it_fails_and_says_how_far_it_came() -> None:
    case = Case()
    end = await case.run(Scripted(chunk("a"), chunk("b"), engine_error("engine_died")))
    assert (end.status, end.code, end.give_back) == ("failed", "engine_failed", False)
    assert "2 events" in str(end.message)
    assert len(case.events) == 2


@pytest.mark.parametrize("sent", [0, 1])
async def test_an_error_inside_the_stream_is_the_engines_death(sent: int) -> None:
    error = b'{"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}'
    case = Case()
    end = await case.run(Scripted(*[chunk("a")] * sent, error))
    assert (end.status, end.give_back) == ("failed", not sent)
    assert "EngineCore" in str(end.message)
    assert len(case.events) == sent


async def test_a_stream_that_just_ends_is_no_success() -> None:
    end = await Case().run(Scripted(chunk("a")))
    assert (end.status, end.code) == ("failed", "engine_failed")


async def test_an_abort_by_somebody_else_is_no_success() -> None:
    end = await Case().run(Scripted(chunk("", "abort"), USAGE))
    assert (end.status, end.code) == ("failed", "engine_aborted")
    whole = Completion(status=200, body={"choices": [{"finish_reason": "abort"}]})
    assert (await Case(stream=False).run(Scripted(whole))).give_back


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_refusals_pass_with_the_engines_words(status: int) -> None:
    body = {"error": {"message": "too long", "code": status}}
    end = await Case(stream=False).run(Scripted(Completion(status=status, body=body)))
    assert (end.status, end.http_status, end.body, end.message) == ("failed", status, body, "too long")
    assert (end.give_back, end.suspect) == (False, False)
    streamed = engine_error("bad_request", retryable=False, status=status)
    end = await Case().run(Scripted(streamed))
    assert (end.status, end.http_status, end.give_back) == ("failed", status, False)


async def test_bad_bodies_and_paths_never_reach_the_engine() -> None:
    engine = Scripted(*GOOD)
    assert (await Case(body=[1]).run(engine)).http_status == 400
    assert (await Case(path="/metrics").run(engine)).http_status == 404
    assert engine.ids == []


async def test_a_lost_lease_may_not_be_answered_as_success() -> None:
    case, engine = Case(), Scripted(chunk("a"), ...)
    task = asyncio.create_task(case.run(engine))
    await await_until(lambda: case.events, what="a token")
    case.running.stop(Stop.LEASE_LOST)
    end = await task
    assert (end.status, end.code, engine.open) == ("failed", "lease_lost", 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("odd"), ValueError("Newline in header"), RecursionError()])
async def test_whatever_is_raised_is_an_ending(stream: bool, error: Exception) -> None:
    case = Case(stream=stream)
    end = await case.run(Scripted(error))
    assert (end.status, end.code, end.http_status) == ("failed", "internal_error", 500)
    assert type(error).__name__ in str(end.message)


@pytest.mark.parametrize("opened", ["[", '{"a":'])
async def test_a_body_nested_without_end_is_refused(opened: str) -> None:
    case, engine = Case(), Scripted(*GOOD)
    deep = ('{"prompt":[1],"messages":' + opened * 100_000).encode()
    case.running.request = msgspec.structs.replace(case.running.request, body=deep)
    end = await case.run(engine)
    assert (end.status, end.code, end.http_status, engine.ids) == ("failed", "bad_request", 400, [])


@pytest.mark.parametrize("garbage", [b"not json", b"{}", b"[]", b'{"choices":[7]}', b"[" * 100_000])
async def test_garbage_in_a_stream_is_the_engines_fault(garbage: bytes) -> None:
    before = await Case().run(Scripted(garbage, *GOOD))
    assert (before.status, before.code) == ("failed", "engine_bad_answer")
    assert (before.give_back, before.again, before.suspect) == (True, True, True)
    case = Case()
    after = await case.run(Scripted(chunk("a"), garbage, *GOOD))
    assert (after.status, after.code, after.give_back) == ("failed", "engine_failed", False)
    assert case.events == [chunk("a")], "what was sent cannot be taken back, and no more is sent"


@pytest.mark.parametrize("stream", [True, False])
async def test_only_the_engines_own_404_leaves_its_model_in_doubt(stream: bool) -> None:
    body = {"error": {"message": "The model `m` does not exist.", "code": 404}}
    said: Any = (
        engine_error("not_found", retryable=False, status=404)
        if stream
        else Completion(status=404, body=body)
    )
    assert (await Case(stream=stream).run(Scripted(said))).not_there
    assert not (await Case(stream=stream, path="/metrics").run(Scripted(said))).not_there


@pytest.mark.parametrize("count", [0, -1, 10**400, 1.5, "many", None, [], True])
async def test_usage_that_cannot_be_leaves_the_answer_good(count: Any) -> None:
    case = Case()
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": count}}).encode()
    end = await case.run(Scripted(*GOOD[:3], usage))
    assert (end.status, case.running.tpot_ms) == ("ok", None) or end.code == "engine_failed"
    assert end.code != "internal_error"


async def test_events_without_end_and_without_a_token_are_the_engines_fault() -> None:
    case = Case()
    role = b'{"choices":[{"delta":{"role":"assistant"}}]}'
    end = await case.run(Scripted(*[role] * 1100, *GOOD))
    assert (end.code, end.give_back, case.events) == ("engine_bad_answer", True, [])
