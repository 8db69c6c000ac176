"""Bodies to the engine and events from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridsched.workers.online_body import BodyError, error_message, finish_of, group, prepare, read_event


def sent(body: dict[str, Any], *, stream: bool, priority: int | None = None) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(
        prepare(json.dumps(body).encode(), stream=stream, priority=priority).body
    )
    return out


def test_scheduling_members_of_the_client_never_reach_the_engine() -> None:
    body = {
        "model": "m",
        "prompt": [1, 2],
        "priority": -100,
        "request_id": "mine",
        "hs_lane": "r0",
        "hybridsched": {"priority": 1},
    }
    assert sent(body, stream=False) == {"model": "m", "prompt": [1, 2]}


def test_our_priority_is_set_only_when_given() -> None:
    assert sent({"priority": 9}, stream=False, priority=1)["priority"] == 1
    assert "priority" not in sent({"priority": 9}, stream=False)


def test_the_accept_decides_about_streaming_and_usage_is_always_asked_for() -> None:
    assert sent({"stream": True, "stream_options": {"include_usage": True}}, stream=False) == {}
    assert sent({"stream": False}, stream=True) == {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("options", "hide"),
    [
        (None, True),
        ({}, True),
        ({"include_usage": False}, True),
        ({"include_usage": True}, False),
        ({"include_usage": True, "continuous_usage_stats": True}, False),
    ],
)
def test_usage_is_hidden_unless_the_client_asked(options: dict[str, Any] | None, hide: bool) -> None:
    prepared = prepare(json.dumps({"stream_options": options}).encode(), stream=True)
    assert prepared.hide_usage is hide
    out = json.loads(prepared.body)["stream_options"]
    assert out == (options or {}) | {"include_usage": True}


def test_members_keep_their_bytes() -> None:
    raw = b'{"a": 1.50, "prompt": [1,  2], "n": 3, "t": "\\u00e9"}'
    prepared = prepare(raw, stream=False)
    assert b'"prompt":[1,  2]' in prepared.body
    assert b"1.50" in prepared.body
    assert prepared.sequences == 3


@pytest.mark.parametrize(
    "raw", [b"", b"[1]", b"nonsense", b'{"n": 0}', b'{"n": "x"}', b'{"stream_options": [1]}', b'{"a":']
)
def test_a_bad_body_says_what_is_allowed(raw: bytes) -> None:
    with pytest.raises(BodyError, match=r"JSON object|whole number|must be an object"):
        prepare(raw, stream=True)


@pytest.mark.parametrize(
    ("event", "has_output"),
    [
        ({"choices": [{"text": "a", "finish_reason": None}]}, True),
        ({"choices": [{"text": "", "finish_reason": None}]}, False),
        ({"choices": [{"text": "", "token_ids": [5]}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"content": "x"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "x"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, False),
        ({"choices": [], "usage": {"total_tokens": 3}}, False),
    ],
)
def test_which_events_carry_output(event: dict[str, Any], has_output: bool) -> None:
    assert read_event(json.dumps(event).encode()).has_output is has_output


def test_finish_usage_and_errors_are_read() -> None:
    end = read_event(b'{"choices":[{"text":"z","finish_reason":"length"}],"usage":null}')
    assert (end.finish_reason, end.usage, end.usage_only) == ("length", None, False)
    usage = read_event(b'{"choices":[],"usage":{"completion_tokens":2}}')
    assert (usage.usage_only, usage.usage) == (True, {"completion_tokens": 2})
    both = read_event(b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":2}}')
    assert (both.usage_only, both.usage) == (False, {"completion_tokens": 2})
    assert read_event(b'{"error":{"message":"died"}}').error == {"message": "died"}
    assert read_event(b'{"error":"died"}').error == {"message": "died"}
    for garbage in (b"not json", b"[]", b"7", b"{}", b'{"choices":7}', b'{"choices":[7]}', b'{"a":' * 99_999):
        odd = read_event(garbage)
        assert (bool(odd.problem), odd.has_output, odd.finish_reason) == (True, False, None)
    assert end.problem == usage.problem == both.problem == ""


def test_groups_are_json_arrays() -> None:
    assert json.loads(group([b'{"a":1}', b'{"b":2}'])) == [{"a": 1}, {"b": 2}]


def test_whole_answers() -> None:
    assert finish_of({"choices": [{"finish_reason": "stop"}], "usage": {"a": 1}}) == ("stop", {"a": 1})
    assert finish_of({}) == (None, None)
    assert finish_of({"choices": "x", "usage": 3}) == (None, None)


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "bad"}},
        {"error": {"error": {"message": "bad"}}},
        {"error": "bad"},
        {"message": "bad"},
    ],
)
def test_error_bodies_in_every_nesting(body: dict[str, Any]) -> None:
    assert error_message(body) == "bad"
