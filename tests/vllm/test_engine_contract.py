"""What every engine must do, whoever it is: a fake in memory, vLLM's HTTP API simulated and real, and the
real vLLM in a process of ours. Requests and their answers; what controls an engine is in
test_engine_contract_control.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from hybridsched.engines.checks import answer_problem, check_serves, model_missing
from hybridsched.engines.protocol import Engine, EngineError
from tests.vllm.engine_rigs import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    EMBEDDINGS,
    KV_TOKENS,
    MODEL,
    Host,
    chat,
    collect,
    completion,
    finish,
    ids,
    token_ids,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


async def test_info_says_models_context_and_cache(engine_host: Host, engine: Engine) -> None:
    info = await engine.info()
    assert info.models == (MODEL,)
    assert info.max_model_len == CONTEXT
    assert info.kv_tokens == KV_TOKENS
    assert info.block_size == engine_host.block
    assert await engine.healthy()


async def test_an_engine_of_another_model_is_told_from_one_of_ours(engine: Engine) -> None:
    info = await engine.info()
    check_serves(info, MODEL, engine.url)
    with pytest.raises(EngineError, match=f"serves {MODEL}, not another") as wrong:
        check_serves(info, "another", engine.url)
    assert wrong.value.code == "engine_wrong_model"
    assert wrong.value.retryable
    for path, body in ((COMPLETIONS, completion("x", 2)), (CHAT, chat("x", 2))):
        answer = await finish(engine, body | {"model": "another"}, f"other-{path[-4:]}", path)
        assert answer.status == 404
        assert model_missing(answer.status, answer.body)
    bad = await finish(engine, completion("x", -1), "bad")
    assert bad.status == 400
    assert not model_missing(bad.status, bad.body)


async def test_whole_answers_have_the_shape_that_is_asked_for(engine: Engine) -> None:
    plain = await finish(engine, completion("x", 2), "shape-1")
    chatted = await finish(engine, chat("x", 2), "shape-2", CHAT)
    assert answer_problem(COMPLETIONS, plain.body) == ""
    assert answer_problem(CHAT, chatted.body) == ""
    assert answer_problem(CHAT, plain.body) == "a choice has no message"
    assert answer_problem(COMPLETIONS, chatted.body) == "a choice has no text"


async def test_completion_of_token_ids_returns_ids_and_usage(engine: Engine) -> None:
    prompt = ids(50)
    answer = await finish(engine, completion(prompt, 7, return_token_ids=True), "ids")
    assert answer.status == 200
    assert not answer.aborted
    choice = answer.body["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert len(choice["token_ids"]) == 7
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    assert answer.body["usage"]["prompt_tokens"] == 50
    assert answer.body["usage"]["completion_tokens"] == 7
    assert answer.body["usage"]["total_tokens"] == 57
    assert answer.body["id"] == "cmpl-ids"


async def test_text_and_token_ids_are_the_same_prompt(engine: Engine) -> None:
    body = completion("The quick brown fox", 5, return_token_ids=True)
    by_text = await finish(engine, body, "t")
    prompt = await engine.tokenize(COMPLETIONS, body)
    by_ids = await finish(engine, completion(prompt, 5, return_token_ids=True), "i")
    assert token_ids(by_text) == token_ids(by_ids)
    assert by_text.body["choices"][0]["text"] == by_ids.body["choices"][0]["text"]


async def test_token_ids_are_returned_only_where_they_are_asked_for(engine: Engine) -> None:
    choice = (await finish(engine, completion("x", 3), "plain")).body["choices"][0]
    assert choice.get("token_ids") is None
    assert choice.get("prompt_token_ids") is None


async def test_chat_answers_and_tokenizes_with_its_template(engine: Engine) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 6,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = await finish(engine, body, "c", CHAT)
    assert answer.status == 200
    choice = answer.body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert len(choice["token_ids"]) == 6
    assert answer.body["prompt_token_ids"] == await engine.tokenize(CHAT, body)
    assert answer.body["id"] == "chatcmpl-c"


async def test_a_list_of_prompts_gives_a_choice_each(engine: Engine) -> None:
    answer = await finish(engine, completion(["a", "b", "c"], 3), "l")
    assert [c["index"] for c in answer.body["choices"]] == [0, 1, 2]
    assert answer.body["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_carries_all_tokens_and_usage_last(engine: Engine, path: str) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    body = completion("hello", 40, **more) if path == COMPLETIONS else chat("hello", 40, **more)
    chunks = await collect(engine, path, body, "s")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    with_choice = [c["choices"][0] for c in chunks if c["choices"]]
    assert [c["finish_reason"] for c in with_choice if c["finish_reason"]] == ["length"]
    streamed = [t for c in with_choice for t in c.get("token_ids") or []]
    whole = await finish(engine, {**body, "stream": False, "stream_options": None}, "w", path)
    assert streamed == token_ids(whole)
    assert chunks[-1]["usage"]["prompt_tokens"] == whole.body["usage"]["prompt_tokens"]
    if path == CHAT:
        assert with_choice[0]["delta"]["role"] == "assistant"
        text = "".join(c["delta"].get("content") or "" for c in with_choice)
        assert text == whole.body["choices"][0]["message"]["content"]
    else:
        assert "".join(c["text"] for c in with_choice) == whole.body["choices"][0]["text"]


async def test_unknown_model_is_not_found(engine: Engine) -> None:
    body = completion([21], 2) | {"model": "other"}
    answer = await finish(engine, body, "x")
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
        {"prompt": ids(CONTEXT)},
        {"max_tokens": CONTEXT + 100},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"temperature": -1},
        {"prompt": []},
        {"prompt": None},
        {"prompt": [1, "mixed"]},
        {"prompt": [-4]},
        {"prompt": [10_000_000]},
        {"n": 0},
        {"top_p": 0},
        {"min_tokens": 50},
    ],
    ids=lambda change: "-".join(f"{k}={str(v)[:12]}" for k, v in change.items()),
)
async def test_what_cannot_be_is_a_bad_request(engine: Engine, change: dict[str, Any]) -> None:
    answer = await finish(engine, completion([21, 22, 23], 4) | change, "bad")
    assert answer.status == 400
    assert answer.body["error"]["code"] == 400
    assert answer.body["error"]["message"]


async def test_without_ignore_eos_an_answer_ends_by_itself(engine: Engine) -> None:
    body = completion([58, 32], 2000, return_token_ids=True) | {"ignore_eos": False}
    one = await finish(engine, body, "e1")
    two = await finish(engine, body, "e2")
    assert one.body["choices"][0]["finish_reason"] == "stop"
    assert token_ids(one) == token_ids(two)
    on = await finish(engine, {**body, "ignore_eos": True, "max_tokens": len(token_ids(one)) + 3}, "e3")
    assert token_ids(on)[: len(token_ids(one))] == token_ids(one)
    assert on.body["choices"][0]["finish_reason"] == "length"


async def test_stop_token_ids_end_an_answer_with_the_token(engine: Engine) -> None:
    free = token_ids(await finish(engine, completion("story", 30, return_token_ids=True), "f"))
    stop = free[9]
    cut = await finish(engine, completion("story", 30, return_token_ids=True, stop_token_ids=[stop]), "g")
    assert token_ids(cut) == free[: free.index(stop) + 1]
    assert cut.body["choices"][0]["finish_reason"] == "stop"
    assert cut.body["choices"][0]["stop_reason"] == stop


async def test_stop_strings_cut_the_text(engine: Engine) -> None:
    text = (await finish(engine, completion("story", 30), "f")).body["choices"][0]["text"]
    at = len(text) // 2
    stop = text[at : at + 3]
    cut = await finish(engine, completion("story", 30, stop=[stop]), "g")
    assert cut.body["choices"][0]["text"] == text[: text.index(stop)]
    assert cut.body["choices"][0]["finish_reason"] == "stop"
    assert cut.body["choices"][0]["stop_reason"] == stop
    chunks = await collect(engine, COMPLETIONS, completion("story", 30, stop=[stop], stream=True), "h")
    assert "".join(c["choices"][0]["text"] for c in chunks) == text[: text.index(stop)]


async def test_a_model_that_generates_refuses_embeddings(engine: Engine) -> None:
    body = {"model": MODEL, "input": ["one text", "another"]}
    answer = await finish(engine, body, "e", EMBEDDINGS)
    assert answer.status in (400, 404)
    assert answer.body


async def test_metrics_count_what_was_done(engine_host: Host, engine: Engine) -> None:
    before = await engine.stats()
    prompt = ids(333, seed=5)
    await finish(engine, completion(prompt, 12), "count")
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
    repeated = await finish(engine, completion(prompt, 1), "again")
    again = await engine.stats()
    shared = (333 - 1) // engine_host.block * engine_host.block
    assert (again.prefix_hits_total or 0) - (after.prefix_hits_total or 0) == shared
    assert repeated.body["usage"]["prompt_tokens_details"]["cached_tokens"] == shared
