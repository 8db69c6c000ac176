"""Whatever bytes come from a client or an engine: they are read or refused, and nothing else is raised."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.engines.metrics_text import engine_info, engine_stats
from hybridsched.store.online_answers import EntryError, claimed_from
from hybridsched.telemetry.engine_metrics import EngineTracker
from hybridsched.workers.online_body import BodyError, error_message, finish_of, prepare, read_event

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
NAMES = st.sampled_from(
    [
        "n",
        "stream",
        "stream_options",
        "include_usage",
        "priority",
        "choices",
        "usage",
        "error",
        "message",
        "finish_reason",
        "text",
        "delta",
        "content",
        "token_ids",
        "code",
        "completion_tokens",
        "data",
        "id",
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12
)
DEEP = st.sampled_from([b"[", b'{"a":', b'{"choices":[', b'{"n":[']).map(lambda part: part * 50_000)
JSON = st.one_of(
    st.binary(max_size=40), VALUES.map(lambda value: json.dumps(value).encode()), DEEP, st.just(b"")
)
LABELS = st.sampled_from(
    [
        b"",
        b'{le="abc"}',
        b'{le="0.5"}',
        b'{le="nan"}',
        b'{le="-inf"}',
        b'{le="',
        b"{",
        b"}{",
        b'{le=""}',
        b'{num_gpu_blocks="9",block_size="16"}',
        b'{num_gpu_blocks="\xc2\xb2",block_size="x"}',
    ]
)
METRICS = st.sampled_from(
    [
        b"num_requests_running",
        b"num_requests_waiting",
        b"kv_cache_usage_perc",
        b"iteration_tokens_total_count",
        b"time_to_first_token_seconds_bucket",
        b"cache_config_info",
        b"generation_tokens_total",
    ]
)
NUMBERS = st.sampled_from([b" 1", b" -1", b" nan", b" inf", b" -inf", b" 1e400", b" x", b"", b" ", b" 1 2"])
PAGES = st.lists(st.tuples(METRICS, LABELS, NUMBERS), max_size=12).map(
    lambda rows: b"\n".join(b"vllm:" + name + labels + number for name, labels, number in rows)
)


@given(body=JSON, stream=st.booleans())
def test_a_body_is_made_ready_or_refused(body: bytes, stream: bool) -> None:
    try:
        ready = prepare(body, stream=stream, priority=1)
    except BodyError:
        return
    assert msgspec.json.decode(ready.body, type=dict[str, msgspec.Raw])["priority"] == msgspec.Raw(b"1")
    assert ready.sequences >= 1


@given(data=JSON)
def test_an_event_is_read_or_has_a_problem(data: bytes) -> None:
    event = read_event(data)
    assert not event.problem or not (event.has_output or event.finish_reason or event.usage or event.error)
    if event.error is not None:
        assert isinstance(error_message(event.error), str)


@given(body=st.dictionaries(NAMES, VALUES, max_size=6))
def test_an_answer_is_looked_into_whatever_it_holds(body: dict[str, Any]) -> None:
    reason, usage = finish_of(body)
    assert reason is None or isinstance(reason, str)
    assert usage is None or isinstance(usage, dict)
    assert isinstance(error_message(body), str)


@given(pages=st.lists(st.one_of(st.binary(max_size=80), PAGES), max_size=5))
def test_metrics_are_numbers_that_can_be_or_unknown(pages: list[bytes]) -> None:
    tracker = EngineTracker()
    for at, page in enumerate(pages):
        seen = tracker.observe(engine_stats(page), at * 1000.0, held=at % 2)
        for value in (seen.running, seen.waiting, seen.kv_use, seen.frozen_ms):
            assert value is None or 0.0 <= value < float("inf")


@given(models=st.dictionaries(NAMES, VALUES, max_size=3), page=st.one_of(st.binary(max_size=80), PAGES))
def test_what_an_engine_says_of_itself_is_read_with_gaps(models: dict[str, Any], page: bytes) -> None:
    assert all(isinstance(name, str) for name in engine_info(models, page).models)


@settings(max_examples=200)
@given(
    fields=st.dictionaries(st.binary(max_size=5) | NAMES.map(str.encode), st.binary(max_size=9), max_size=12)
)
def test_an_entry_is_a_request_or_an_entry_error(fields: dict[bytes, bytes]) -> None:
    flat = [part for pair in fields.items() for part in pair]
    try:
        claimed = claimed_from("m", 1, b"1-1", "r0:1", flat, 0.0)
    except EntryError:
        return
    assert claimed.id.encode() == fields[b"id"]
