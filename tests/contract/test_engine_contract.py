"""What every engine must do, whoever it is: the fake in memory, and vLLM's HTTP API (here simulated).

A real vLLM joins by a third entry in `KINDS` and a branch in `make_engine`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.protocol import Completion, Engine, EngineError
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.engines.vllm_http import VllmHttpEngine
from tests.contract.engine_servers import MODEL, Servers
from tests.helpers import await_until

KINDS = ("fake", "simulated")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = 4000
"""Tokens of an answer that is still running whenever a test looks."""

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture(params=KINDS)
async def make_engine(request: pytest.FixtureRequest, servers: Servers) -> AsyncIterator[Make]:
    """Engines with the limits a test asks for, closed at its end."""
    made: list[Engine] = []

    def make(
        *,
        max_num_seqs: int = 64,
        policy: str = "fcfs",
        max_queued: int | None = None,
        kv_tokens: int = 400_000,
        max_model_len: int = 8192,
    ) -> Engine:
        engine: Engine
        if request.param == "fake":
            limits = Limits(
                max_num_seqs=max_num_seqs,
                scheduling_policy=policy,
                kv_tokens=kv_tokens,
                max_model_len=max_model_len,
            )
            engine = FakeEngine(model=MODEL, limits=limits, max_queued=max_queued)
        else:
            flags = [
                "--max-num-seqs", str(max_num_seqs), "--scheduling-policy", policy,
                "--kv-tokens", str(kv_tokens), "--max-model-len", str(max_model_len),
            ]  # fmt: skip
            if max_queued is not None:
                flags += ["--max-num-queued-reqs", str(max_queued)]
            engine = VllmHttpEngine(servers.get(*flags).url)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        await engine.close()


@pytest.fixture
def engine(make_engine: Make) -> Engine:
    return make_engine()


def completion(prompt: object, tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    } | more


def start(
    engine: Engine, body: dict[str, Any], request_id: str, path: str = COMPLETIONS
) -> asyncio.Task[Completion]:
    return asyncio.create_task(engine.complete(path, body, request_id=request_id, timeout_s=60))


async def until(engine: Engine, check: Callable[[float, float], bool], what: str) -> None:
    """Wait for (running, waiting) of the engine's gauges."""

    async def look() -> bool:
        stats = await engine.stats()
        assert stats.running is not None
        assert stats.waiting is not None
        return check(stats.running, stats.waiting)

    await await_until(look, what=what)


async def quiet(engine: Engine) -> None:
    await until(engine, lambda running, waiting: running == 0 and waiting == 0, "an idle engine")


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def collect(engine: Engine, path: str, body: dict[str, Any], request_id: str) -> list[dict[str, Any]]:
    stream = engine.stream(path, body, request_id=request_id, idle_timeout_s=30)
    return [json.loads(chunk.data) async for chunk in stream]


async def test_info_says_models_context_and_cache(engine: Engine) -> None:
    info = await engine.info()
    assert info.models == (MODEL,)
    assert info.max_model_len == 8192
    assert info.kv_tokens == 400_000
    assert info.block_size == 16
    assert await engine.healthy()


async def test_completion_of_token_ids_returns_ids_and_usage(engine: Engine) -> None:
    prompt = list(range(100, 150))
    answer = await engine.complete(
        COMPLETIONS, completion(prompt, 7, return_token_ids=True), request_id="ids", timeout_s=30
    )
    assert answer.status == 200
    assert not answer.aborted
    choice = answer.body["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 7
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    assert answer.body["usage"]["prompt_tokens"] == 50
    assert answer.body["usage"]["completion_tokens"] == 7
    assert answer.body["id"] == "cmpl-ids"


async def test_text_and_token_ids_are_the_same_prompt(engine: Engine) -> None:
    body = completion("The quick brown fox", 5, return_token_ids=True)
    ids = await engine.tokenize(COMPLETIONS, body)
    by_text = await engine.complete(COMPLETIONS, body, request_id="t", timeout_s=30)
    by_ids = await engine.complete(
        COMPLETIONS, completion(ids, 5, return_token_ids=True), request_id="i", timeout_s=30
    )
    assert by_text.body["choices"][0]["token_ids"] == by_ids.body["choices"][0]["token_ids"]


async def test_chat_answers_and_tokenizes_with_its_template(engine: Engine) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 6,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = await engine.complete(CHAT, body, request_id="c", timeout_s=30)
    assert answer.status == 200
    choice = answer.body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert len(choice["token_ids"]) == 6
    assert answer.body["prompt_token_ids"] == await engine.tokenize(CHAT, body)
    assert answer.body["id"] == "chatcmpl-c"


async def test_a_list_of_prompts_gives_a_choice_each(engine: Engine) -> None:
    answer = await engine.complete(COMPLETIONS, completion(["a", "b", "c"], 3), request_id="l", timeout_s=30)
    assert [c["index"] for c in answer.body["choices"]] == [0, 1, 2]
    assert answer.body["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_carries_all_tokens_and_usage_last(engine: Engine, path: str) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 40,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    body |= (
        {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    )
    chunks = await collect(engine, path, body, "s")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    with_choice = [c["choices"][0] for c in chunks if c["choices"]]
    assert [c["finish_reason"] for c in with_choice if c["finish_reason"]] == ["length"]
    streamed = [t for c in with_choice for t in c.get("token_ids") or []]
    whole = await engine.complete(
        path, {**body, "stream": False, "stream_options": None}, request_id="w", timeout_s=30
    )
    assert streamed == whole.body["choices"][0]["token_ids"]
    if path == CHAT:
        assert with_choice[0]["delta"]["role"] == "assistant"
        text = "".join(c["delta"].get("content") or "" for c in with_choice)
        assert text == whole.body["choices"][0]["message"]["content"]
    else:
        assert "".join(c["text"] for c in with_choice) == whole.body["choices"][0]["text"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_abort_keeps_the_tokens_and_the_rest_continues_them(engine: Engine, path: str) -> None:
    prompt = list(range(500, 900))
    body: dict[str, Any] = {
        "model": MODEL, "max_tokens": LONG, "ignore_eos": True, "return_token_ids": True, "temperature": 0,
    }  # fmt: skip
    body |= {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "tell"}]}
    before = (await engine.stats()).generation_tokens_total or 0
    task = start(engine, body, "cut", path)

    async def some_tokens() -> bool:
        return ((await engine.stats()).generation_tokens_total or 0) >= before + 20

    await await_until(some_tokens, what="twenty tokens")
    assert await engine.abort(path, ["cut"]) == 1
    cut = await task
    assert cut.status == 200
    assert cut.aborted
    choice = cut.body["choices"][0]
    kept = choice["token_ids"]
    assert 20 <= len(kept) < LONG
    assert cut.body["usage"]["completion_tokens"] == len(kept)
    seen = choice["prompt_token_ids"] if path == COMPLETIONS else cut.body["prompt_token_ids"]

    more = len(kept) + 25
    rest = await engine.complete(
        COMPLETIONS, completion(seen + kept, 25, return_token_ids=True), request_id="rest", timeout_s=30
    )
    whole = await engine.complete(path, {**body, "max_tokens": more}, request_id="whole", timeout_s=30)
    assert kept + rest.body["choices"][0]["token_ids"] == whole.body["choices"][0]["token_ids"]
    cached = rest.body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.8 * (len(seen) + len(kept)) - 32
    assert cached < len(seen) + len(kept)


async def test_an_abort_ends_a_waiting_request_with_nothing(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=1)
    first = start(engine, completion([1, 2, 3], LONG), "first")
    await until(engine, lambda running, waiting: running == 1, "one running")
    second = start(engine, completion([4, 5, 6], 5, return_token_ids=True), "second")
    await until(engine, lambda running, waiting: waiting == 1, "one waiting")
    assert await engine.abort(COMPLETIONS, ["second"]) == 1
    ended = await second
    assert ended.aborted
    assert ended.body["choices"][0]["token_ids"] == []
    assert not first.done()
    await cancel(first)
    await quiet(engine)


async def test_aborting_nothing_or_a_stranger_ends_nothing(engine: Engine) -> None:
    task = start(engine, completion([7, 8, 9], LONG), "stays")
    await until(engine, lambda running, waiting: running == 1, "one running")
    assert await engine.abort(COMPLETIONS, []) == 0
    assert await engine.abort(COMPLETIONS, ["stranger"]) == 0
    assert await engine.abort("/v1/embeddings", ["stays"]) == 0
    await until(engine, lambda running, waiting: running == 1, "one running")
    await cancel(task)
    await quiet(engine)


async def test_many_aborts_at_once(engine: Engine) -> None:
    tasks = [start(engine, completion([i, i + 1], LONG, return_token_ids=True), f"m{i}") for i in range(150)]
    await until(engine, lambda running, waiting: running + waiting == 150, "all accepted")
    assert await engine.abort(COMPLETIONS, [f"m{i}" for i in range(150)]) == 150
    answers = await asyncio.gather(*tasks)
    assert all(a.aborted for a in answers)
    await quiet(engine)


async def test_a_client_that_leaves_ends_its_request(engine: Engine) -> None:
    task = start(engine, completion([1, 1, 1], LONG), "gone")
    stream = engine.stream(
        COMPLETIONS, completion([2, 2], LONG, stream=True), request_id="gone2", idle_timeout_s=30
    )
    await anext(stream)
    await until(engine, lambda running, waiting: running == 2, "two running")
    await stream.aclose()  # type: ignore[attr-defined]
    await until(engine, lambda running, waiting: running == 1, "one left")
    await cancel(task)
    await quiet(engine)


async def test_max_num_seqs_bounds_what_runs(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=2)
    tasks = [start(engine, completion([i], LONG), f"q{i}") for i in range(1, 5)]
    await until(engine, lambda running, waiting: (running, waiting) == (2, 2), "two and two")
    await cancel(*tasks)
    await quiet(engine)


async def test_a_full_queue_is_engine_busy(make_engine: Make) -> None:
    engine = make_engine(max_queued=2)
    tasks = [start(engine, completion([i], LONG), f"b{i}") for i in range(1, 3)]
    await until(engine, lambda running, waiting: running == 2, "two running")
    with pytest.raises(EngineError) as refused:
        await engine.complete(COMPLETIONS, completion([3], 2), request_id="b3", timeout_s=10)
    assert refused.value.code == "engine_busy"
    assert refused.value.retryable
    assert refused.value.status == 503
    await cancel(*tasks)
    await quiet(engine)


async def test_priority_orders_waiting_and_preempts_nobody(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=1, policy="priority")
    order: list[str] = []

    async def run(name: str, priority: int, tokens: int) -> None:
        body = completion([len(name)], tokens, priority=priority)
        await engine.complete(COMPLETIONS, body, request_id=name, timeout_s=60)
        order.append(name)

    before = (await engine.stats()).preemptions_total
    tasks = [asyncio.create_task(run("holder", 10, LONG))]
    await until(engine, lambda running, waiting: running == 1, "the holder running")
    tasks.append(asyncio.create_task(run("late", 5, 3)))
    await until(engine, lambda running, waiting: waiting == 1, "one waiting")
    tasks.append(asyncio.create_task(run("urgent", -5, 3)))
    await until(engine, lambda running, waiting: (running, waiting) == (1, 2), "two waiting")
    await engine.abort(COMPLETIONS, ["holder"])
    await asyncio.gather(*tasks)
    assert order == ["holder", "urgent", "late"]
    assert (await engine.stats()).preemptions_total == before


async def test_kv_pressure_preempts_by_recomputation(make_engine: Make) -> None:
    engine = make_engine(kv_tokens=1024, max_model_len=1024)
    before = (await engine.stats()).preemptions_total or 0
    prompts = [list(range(at, at + 200)) for at in (1000, 2000, 3000, 4000)]
    answers = await asyncio.gather(
        *(
            engine.complete(
                COMPLETIONS, completion(p, 150, return_token_ids=True), request_id=f"k{p[0]}", timeout_s=60
            )
            for p in prompts
        )
    )
    assert ((await engine.stats()).preemptions_total or 0) > before
    alone = await engine.complete(
        COMPLETIONS, completion(prompts[-1], 150, return_token_ids=True), request_id="alone", timeout_s=60
    )
    assert answers[-1].body["choices"][0]["token_ids"] == alone.body["choices"][0]["token_ids"]


async def test_metrics_count_what_was_done(engine: Engine) -> None:
    before = await engine.stats()
    prompt = list(range(9000, 9333))
    await engine.complete(COMPLETIONS, completion(prompt, 12), request_id="count", timeout_s=30)
    after = await engine.stats()

    def grew(name: str) -> float:
        return float(getattr(after, name)) - float(getattr(before, name))

    assert grew("prompt_tokens_total") == 333
    assert grew("generation_tokens_total") == 12
    assert grew("iterations_total") == 12
    assert grew("prefix_queries_total") == 333
    assert after.ttft_buckets[-1][0] == float("inf")
    assert after.ttft_buckets[-1][1] - before.ttft_buckets[-1][1] == 1
    assert after.tpot_buckets[-1][1] - before.tpot_buckets[-1][1] == 1
    assert after.running == 0
    assert after.kv_use == 0
    repeated = await engine.complete(COMPLETIONS, completion(prompt, 1), request_id="again", timeout_s=30)
    again = await engine.stats()
    assert (again.prefix_hits_total or 0) - (after.prefix_hits_total or 0) == 320
    assert repeated.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 320


async def test_a_pause_freezes_the_engine_and_its_gauges(engine: Engine) -> None:
    before = await engine.stats()
    body = completion([5, 6], LONG, return_token_ids=True)
    task = start(engine, body, "frozen")
    await until(engine, lambda running, waiting: running == 1, "one running")
    await engine.pause()
    stopped = await engine.stats()
    late = start(engine, completion([6, 7], 2), "late")
    for _ in range(20):
        now = await engine.stats()
        assert now.generation_tokens_total == stopped.generation_tokens_total
        assert now.running == 1
        assert now.waiting == 0
    assert not task.done()
    assert not late.done()
    await engine.resume()
    assert (await late).status == 200
    await engine.abort(COMPLETIONS, ["frozen"])
    kept = (await task).body["choices"][0]["token_ids"]
    assert len(kept) > (stopped.generation_tokens_total or 0) - (before.generation_tokens_total or 0)
    whole = await engine.complete(
        COMPLETIONS, body | {"max_tokens": len(kept)}, request_id="unfrozen", timeout_s=60
    )
    assert kept == whole.body["choices"][0]["token_ids"]
    await quiet(engine)


async def test_unknown_model_is_not_found(engine: Engine) -> None:
    body = completion([1], 2) | {"model": "other"}
    answer = await engine.complete(COMPLETIONS, body, request_id="x", timeout_s=10)
    assert answer.status == 404
    assert answer.body["error"]["type"] == "NotFoundError"
    assert "other" in answer.body["error"]["message"]
    with pytest.raises(EngineError) as refused:
        await collect(engine, COMPLETIONS, body | {"stream": True}, "y")
    assert refused.value.code == "not_found"
    assert not refused.value.retryable


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": list(range(1, 8193))},
        {"max_tokens": 9000},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"temperature": -1},
        {"prompt": []},
        {"prompt": None},
        {"prompt": [1, "mixed"]},
        {"prompt": [-4]},
        {"n": 0},
        {"top_p": 0},
        {"min_tokens": 50},
    ],
)
async def test_what_cannot_be_is_a_bad_request(engine: Engine, change: dict[str, Any]) -> None:
    answer = await engine.complete(
        COMPLETIONS, completion([1, 2, 3], 4) | change, request_id="bad", timeout_s=10
    )
    assert answer.status == 400
    assert answer.body["error"]["code"] == 400
    assert answer.body["error"]["message"]


async def test_without_ignore_eos_an_answer_ends_by_itself(engine: Engine) -> None:
    body = completion([11, 12], LONG, return_token_ids=True) | {"ignore_eos": False}
    one = await engine.complete(COMPLETIONS, body, request_id="e1", timeout_s=60)
    two = await engine.complete(COMPLETIONS, body, request_id="e2", timeout_s=60)
    assert one.body["choices"][0]["finish_reason"] == "stop"
    assert one.body["choices"][0]["token_ids"] == two.body["choices"][0]["token_ids"]


async def test_stop_strings_cut_the_text(engine: Engine) -> None:
    free = await engine.complete(COMPLETIONS, completion("story", 30), request_id="f", timeout_s=30)
    text = free.body["choices"][0]["text"]
    stop = text.split()[10]
    cut = await engine.complete(
        COMPLETIONS, completion("story", 30, stop=[stop]), request_id="g", timeout_s=30
    )
    assert cut.body["choices"][0]["text"] == text[: text.index(stop)]
    assert cut.body["choices"][0]["finish_reason"] == "stop"
    chunks = await collect(engine, COMPLETIONS, completion("story", 30, stop=[stop], stream=True), "h")
    assert "".join(c["choices"][0]["text"] for c in chunks) == text[: text.index(stop)]


async def test_silence_beyond_the_limit_is_a_timeout(engine: Engine) -> None:
    await engine.pause()
    try:
        with pytest.raises(EngineError) as silent:
            await engine.complete(COMPLETIONS, completion([1], 2), request_id="z", timeout_s=0.2)
        assert silent.value.code == "engine_timeout"
        assert silent.value.retryable
    finally:
        await engine.resume()
    await quiet(engine)
