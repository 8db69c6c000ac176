"""Which lines can go on from an abort, and how their parts become one answer."""

from __future__ import annotations

from typing import Any

import pytest

from hybridsched.workers import offline_plan as plan

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
IDS = {"prompt": [1, 2, 3]}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        (plan.COMPLETIONS, {**IDS, "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "stop": ["a"]}, ""),
        (plan.COMPLETIONS, {**IDS, "seed": 1, "temperature": 0}, ""),
        (plan.COMPLETIONS, {**IDS, "seed": 1}, "seed"),
        (plan.COMPLETIONS, {**IDS, "logprobs": 0}, "logprobs"),
        (plan.COMPLETIONS, {**IDS, "logprobs": None, "echo": False, "n": 1, "presence_penalty": 0.0}, ""),
        (plan.COMPLETIONS, {**IDS, "echo": True}, "echo"),
        (plan.COMPLETIONS, {**IDS, "frequency_penalty": 0.1}, "frequency_penalty"),
        (plan.COMPLETIONS, {**IDS, "guided_json": {}}, "guided_json"),
        (plan.COMPLETIONS, {**IDS, "stop": 5}, "stop"),
        (plan.COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (plan.COMPLETIONS, {"prompt": [True]}, "prompt"),
        (plan.COMPLETIONS, {**IDS, "max_tokens": "7"}, "max_tokens"),
        (plan.CHAT, {**CHAT, "max_completion_tokens": 5, "tools": [], "tool_choice": "none"}, ""),
        (plan.CHAT, {**CHAT, "logprobs": False, "response_format": {"type": "text"}}, ""),
        (plan.CHAT, {**CHAT, "tools": [{}]}, "tools"),
        (plan.CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (plan.CHAT, {"messages": "hi"}, "messages"),
        (plan.CHAT, {**CHAT, "unheard_of": 1}, "unheard_of"),
        ("/v1/embeddings", {"input": "x"}, "/v1/embeddings"),
    ],
)
def test_only_what_is_known_to_survive_the_seam_is_continued(
    path: str, body: dict[str, Any], why: str
) -> None:
    shape = plan.shape_of(path, body)
    assert (shape.continuable, shape.why_not) == (not why, why)


def test_several_answers_or_prompts_cannot_be_ended_by_an_abort() -> None:
    assert not plan.shape_of(plan.CHAT, {**CHAT, "n": 2}).abortable
    assert not plan.shape_of(plan.COMPLETIONS, {"prompt": [[1], [2]]}).abortable
    assert plan.shape_of(plan.CHAT, {**CHAT, "tools": [{}]}).abortable


def abort_answer(text: str, ids: list[int], **message: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": "abort", "token_ids": ids}
    if message:
        choice["message"] = {"content": text, **message}
    else:
        choice["text"] = text
    return {"id": "x", "object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": 3}}


@pytest.mark.parametrize(
    ("answer", "stop"),
    [
        (abort_answer("ab\ufffd", [1]), None),
        (abort_answer("abc E", [1]), " END"),
        (abort_answer("", [1]), None),
        (abort_answer("abc", []), None),
        (abort_answer("abc", [1], role="assistant", reasoning_content="hm"), None),
        (abort_answer("abc", [1], role="assistant", tool_calls=[{}]), None),
    ],
)
def test_tokens_at_an_unsafe_seam_are_given_up(answer: dict[str, Any], stop: str | None) -> None:
    shape = plan.shape_of(plan.COMPLETIONS, {**IDS, "stop": stop})
    assert plan.keep(shape, answer, None, [1, 2, 3]) is None
    before = plan.Kept(prompt_ids=[1, 2, 3], token_ids=[9], text="z", body={})
    assert plan.keep(shape, answer, before, [1, 2, 3]) is before


def test_the_final_answer_has_the_whole_text_and_the_usage_in_all() -> None:
    shape = plan.shape_of(plan.COMPLETIONS, {**IDS, "max_tokens": 10})
    first = plan.keep(shape, abort_answer("one", [7, 8]), None, shape.prompt_ids)
    second = plan.keep(shape, abort_answer(" two", [9]), first, shape.prompt_ids)
    assert second is not None
    assert plan.remaining_tokens(shape, second, 100) == 7
    assert plan.remaining_tokens(shape, second, 8) == 2
    request = plan.continuation_request({**IDS, "temperature": 0.5, "min_tokens": 5}, second, 7)
    assert request["prompt"] == [1, 2, 3, 7, 8, 9]
    assert (request["max_tokens"], request["min_tokens"], request["temperature"]) == (7, 2, 0.5)
    last = {
        "choices": [{"text": " three", "token_ids": [4], "finish_reason": "stop", "stop_reason": 4}],
        "usage": {"prompt_tokens": 6, "completion_tokens": 1},
    }
    body = plan.final_body(IDS, second, last)
    assert body["choices"] == [
        {"text": "one two three", "finish_reason": "stop", "stop_reason": 4, "token_ids": None}
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    asked = plan.final_body({**IDS, "return_token_ids": True}, second, last)
    assert asked["choices"][0]["token_ids"] == [7, 8, 9, 4]
    assert asked["choices"][0]["prompt_token_ids"] == [1, 2, 3]


def test_a_chat_without_a_limit_goes_on_up_to_the_models_length() -> None:
    shape = plan.shape_of(plan.CHAT, CHAT)
    kept = plan.Kept(prompt_ids=[1] * 10, token_ids=[2] * 5, text="t", body={})
    assert plan.remaining_tokens(shape, kept, 100) == 85
    assert plan.remaining_tokens(shape, kept, None) is None
