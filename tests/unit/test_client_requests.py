"""What a body is estimated to cost, what stands in a request, and which error an end becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hybridsched.client import (
    Cancelled,
    Expired,
    Failed,
    RequestError,
    estimate_max_tokens,
    estimate_prompt_tokens,
)
from hybridsched.client.requests import ASSUMED_MAX_TOKENS, build_request, to_reply
from hybridsched.store.online_values import End, EndStatus, Request


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [5, 6, 7]}, 3),
        ({"prompt": [[5, 6], [7]]}, 3),
        ({"prompt": "12345678"}, 2),
        ({"prompt": "123456789"}, 3),
        ({"prompt": ["1234", "1234"]}, 2),
        ({"prompt": "ä" * 4}, 2),
        ({"messages": [{"role": "user", "content": "12345678"}, {"role": "user", "content": "1234"}]}, 3),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "12345678"}]}]}, 2),
        ({"messages": [{"role": "user", "content": None}]}, 1),
        ({"prompt": ""}, 1),
        ({}, 1),
    ],
)
def test_prompt_estimate(body: dict[str, Any], tokens: int) -> None:
    assert estimate_prompt_tokens(body) == tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, 9),
        ({}, ASSUMED_MAX_TOKENS),
        ({"max_tokens": "many"}, ASSUMED_MAX_TOKENS),
        ({"max_tokens": -1}, ASSUMED_MAX_TOKENS),
    ],
)
def test_output_estimate(body: dict[str, Any], tokens: int) -> None:
    assert estimate_max_tokens(body) == tokens


def build(body: dict[str, Any], **options: Any) -> Request:
    values: dict[str, Any] = {
        "model": None,
        "path": "/v1/completions",
        "timeout_s": 5.0,
        "priority": 1,
        "request_id": "x",
        "stream": False,
        "reply": "k",
        "max_waiting": 0,
    }
    return build_request(body, **(values | options))


def test_a_request_carries_its_model_deadline_and_cost() -> None:
    request = build({"model": "m", "prompt": [1, 2], "max_tokens": 5, "stream": True})
    assert (request.model, request.timeout_ms, request.prompt_tokens, request.cost) == ("m", 5000.0, 2, 7)
    assert msgspec.json.decode(request.body) == {"model": "m", "prompt": [1, 2], "max_tokens": 5}


def test_a_stream_asks_the_engine_for_its_usage() -> None:
    body = msgspec.json.decode(build({"prompt": [1]}, model="m", stream=True).body)
    assert body == {
        "model": "m",
        "prompt": [1],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_request_without_a_model_or_time_is_refused() -> None:
    with pytest.raises(ValueError, match="names no model"):
        build({"prompt": [1]})


@pytest.mark.parametrize(
    "timeout_s", [0, 0.0, -1.0, float("nan"), float("inf"), 1e300, 10**400, "20", None, True, [5], 604_801]
)
def test_a_timeout_that_cannot_be_waited_for_is_refused_with_what_is_allowed(timeout_s: Any) -> None:
    with pytest.raises(
        ValueError, match=r"timeout_s is .*; give seconds as a number above 0 and at most 604800"
    ):
        build({"prompt": [1]}, model="m", timeout_s=timeout_s)


@pytest.mark.parametrize("path", [None, 5, "", "v1/completions", "/v1/\ud800", "/a\nb", b"/v1"])
def test_a_path_that_cannot_be_sent_is_refused(path: Any) -> None:
    with pytest.raises(ValueError, match=r"path is .*; give one like"):
        build({"prompt": [1]}, model="m", path=path)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": "\ud800"}, "surrogates"),
        ({"prompt": [1], "extra": object()}, "object is unsupported"),
        ({"prompt": [1], b"a": 1.5, ("b",): 2}, "written as JSON"),
    ],
)
def test_a_body_that_is_no_json_is_refused(body: dict[Any, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build(body, model="m")


def test_a_body_that_is_nested_without_end_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for name in ("prompt", "messages", "extra"):
        with pytest.raises(ValueError, match="nested too deep"):
            build({name: nested}, model="m")


def test_an_answer_that_is_no_json_is_the_engines_fault() -> None:
    with pytest.raises(Failed, match="no JSON") as caught:
        to_reply("x", End(status=EndStatus.OK, body=msgspec.Raw(b"[" * 100_000)))
    assert caught.value.code == "engine_bad_answer"


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (End.expired(), Expired),
        (End.cancelled(), Cancelled),
        (End.failed("engine_lost", "it died"), Failed),
    ],
)
def test_ends_become_errors(end: End, kind: type[RequestError]) -> None:
    with pytest.raises(kind, match="request x: ") as caught:
        to_reply("x", end)
    assert caught.value.request_id == "x"


def test_a_failure_keeps_code_and_status() -> None:
    with pytest.raises(Failed) as caught:
        to_reply("x", End.failed("bad_request", "too long", http_status=400))
    assert (caught.value.code, caught.value.message, caught.value.http_status) == (
        "bad_request",
        "too long",
        400,
    )


def test_a_good_end_becomes_a_reply() -> None:
    end = End(status=EndStatus.OK, body=msgspec.Raw(b'{"a":1}'), usage={"n": 2}, replica="r0")
    reply = to_reply("x", end)
    assert (reply.body, reply.usage, reply.replica) == ({"a": 1}, {"n": 2}, "r0")
