"""Questions put to an engine over plain HTTP, whose answers are compared between the simulated vLLM and the
real one.

A probe returns what it saw as one short line, without anything that may differ from run to run.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tests.helpers import await_until
from tests.vllm.engine_rigs import CHAT, COMPLETIONS, EMBEDDINGS, LONG, QUEUE, SEQS, chat, completion, ids

Observe = Callable[["Client"], Awaitable[str]]
PROBES: dict[str, Observe] = {}
"""By title, in the order of the table."""


def probe(title: str) -> Callable[[Observe], Observe]:
    def add(function: Observe) -> Observe:
        PROBES[title] = function
        return function

    return add


class Client:
    """An engine's HTTP interface, without our own adapter between."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, _body(await response.text())

    async def post(self, path: str, body: Any = None, *, request_id: str | None = None) -> tuple[int, Any]:
        headers = {"X-Request-Id": request_id} if request_id else {}
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, _body(await response.text())

    async def events(self, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
        """Content type and payloads of a streamed answer."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            text = await response.text()
            return response.content_type, [line[6:] for line in text.split("\n") if line.startswith("data: ")]

    def begin(self, path: str, body: dict[str, Any], request_id: str) -> asyncio.Task[tuple[int, Any]]:
        return asyncio.create_task(self.post(path, body, request_id=request_id))

    async def metrics(self) -> str:
        async with self.session.get(self.url + "/metrics") as response:
            return await response.text()

    async def metric(self, name: str, **labels: str) -> float:
        return metric(await self.metrics(), name, **labels)

    async def running(self, count: int) -> None:
        async def look() -> bool:
            return await self.metric("vllm:num_requests_running") == count

        await await_until(look, timeout_s=60, what=f"{count} running")


def _body(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of the samples with this name and these labels."""
    total = 0.0
    for line in text.splitlines():
        found = re.match(r"([a-zA-Z0-9_:]+)(?:\{(.*)\})? (\S+)$", line)
        if found and found[1] == name and all(f'{k}="{v}"' in (found[2] or "") for k, v in labels.items()):
            total += float(found[3])
    return total


def keys(value: Any) -> str:
    return " ".join(sorted(value)) if isinstance(value, dict) else repr(value)


def error(answer: tuple[int, Any]) -> str:
    """Status, type and parameter of a refusal; its words are each engine's own."""
    status, body = answer
    told = body.get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict):
        return f"{status} {keys(body)}"
    return f"{status} {told.get('type')} param={told.get('param')} code={told.get('code')}"


async def end(client: Client, *tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.running(0)


# -- what it says of itself


@probe("GET /health, /ping")
async def _health(client: Client) -> str:
    return f"{await client.get('/health')} {await client.get('/ping')}"


@probe("GET /v1/models: keys, length")
async def _models(client: Client) -> str:
    _, body = await client.get("/v1/models")
    return f"{keys(body)}; max_model_len {body['data'][0]['max_model_len']}; id {body['data'][0]['id']}"


@probe("GET /version: has a version")
async def _version(client: Client) -> str:
    status, body = await client.get("/version")
    return f"{status} {'version' in body}"


@probe("GET /load without tracking")
async def _load(client: Client) -> str:
    return str(await client.get("/load"))


@probe("unknown path; wrong method")
async def _unknown(client: Client) -> str:
    return f"{await client.get('/v1/nothing')} {await client.get(COMPLETIONS)}"


# -- answers


@probe("completion: keys of the answer")
async def _completion_keys(client: Client) -> str:
    _, body = await client.post(COMPLETIONS, completion("x", 2))
    return keys(body)


@probe("completion: keys of a choice")
async def _completion_choice(client: Client) -> str:
    _, body = await client.post(COMPLETIONS, completion("x", 2))
    return keys(body["choices"][0])


@probe("chat: keys of the answer")
async def _chat_keys(client: Client) -> str:
    _, body = await client.post(CHAT, chat("x", 2))
    return keys(body)


@probe("chat: keys of a choice, of its message")
async def _chat_choice(client: Client) -> str:
    _, body = await client.post(CHAT, chat("x", 2))
    return f"{keys(body['choices'][0])}; {keys(body['choices'][0]['message'])}"


@probe("usage: keys")
async def _usage_keys(client: Client) -> str:
    _, body = await client.post(COMPLETIONS, completion("x", 2))
    return f"{keys(body['usage'])}; {keys(body['usage']['prompt_tokens_details'])}"


@probe("ids of answers follow X-Request-Id")
async def _answer_ids(client: Client) -> str:
    _, plain = await client.post(COMPLETIONS, completion("x", 1), request_id="mine")
    _, chatted = await client.post(CHAT, chat("x", 1), request_id="mine")
    return f"{plain['id']} {chatted['id']}"


@probe("completion stream: type, keys of first event and choice")
async def _stream_first(client: Client) -> str:
    kind, events = await client.events(COMPLETIONS, completion("x", 3))
    first = json.loads(events[0])
    return f"{kind}; {keys(first)}; {keys(first['choices'][0])}"


@probe("completion stream: its end")
async def _stream_end(client: Client) -> str:
    _, events = await client.events(COMPLETIONS, completion("x", 3, stream_options={"include_usage": True}))
    usage = json.loads(events[-2])
    return f"{events[-1]}; choices {usage['choices']}; usage {keys(usage['usage'])}"


@probe("chat stream: first delta, last choice")
async def _chat_stream(client: Client) -> str:
    _, events = await client.events(CHAT, chat("x", 3))
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    return f"{chunks[0]['delta']}; {keys(chunks[-1])}; {chunks[-1]['finish_reason']}"


@probe("stream_options without stream")
async def _stray_options(client: Client) -> str:
    return error(await client.post(COMPLETIONS, completion("x", 2, stream_options={"include_usage": True})))


@probe("default of max_tokens for a completion")
async def _default_tokens(client: Client) -> str:
    body = completion("x", 1)
    del body["max_tokens"]
    _, answer = await client.post(COMPLETIONS, body)
    return str(answer["usage"]["completion_tokens"])


@probe("prompt and output fill the context exactly")
async def _exact_fit(client: Client) -> str:
    status, answer = await client.post(COMPLETIONS, completion(ids(4093), 3))
    return f"{status} {answer['usage']['completion_tokens']} {answer['choices'][0]['finish_reason']}"


@probe("POST /tokenize, /detokenize: keys")
async def _tokenize(client: Client) -> str:
    _, given = await client.post("/tokenize", {"model": "m", "prompt": "the gate"})
    _, back = await client.post("/detokenize", {"model": "m", "tokens": given["tokens"][1:]})
    return f"{keys(given)}; {keys(back)} {back['prompt']!r}"


# -- refusals

_REFUSED: dict[str, dict[str, Any]] = {
    "unknown model": {"model": "other"},
    "prompt as long as the context": {"prompt": ids(4096)},
    "prompt longer than the context": {"prompt": ids(4097)},
    "max_tokens beyond the context": {"max_tokens": 5000},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens a word": {"max_tokens": "many"},
    "temperature -1": {"temperature": -1},
    "top_p 0": {"top_p": 0},
    "n 0": {"n": 0},
    "empty prompt list": {"prompt": []},
    "no prompt": {"prompt": None},
    "mixed prompt": {"prompt": [1, "mixed"]},
    "negative token id": {"prompt": [-4]},
    "token id beyond the vocabulary": {"prompt": [10_000_000]},
    "min_tokens above max_tokens": {"min_tokens": 50},
    "min_tokens -1": {"min_tokens": -1},
}


def _refusal(change: dict[str, Any]) -> Observe:
    async def observe(client: Client) -> str:
        return error(await client.post(COMPLETIONS, completion(ids(3), 4) | change))

    return observe


for _title, _change in _REFUSED.items():
    PROBES[f"refused: {_title}"] = _refusal(_change)


@probe("refused: no JSON")
async def _no_json(client: Client) -> str:
    return error(await client.post(COMPLETIONS, b"{not json"))


@probe("refused: chat without messages")
async def _no_messages(client: Client) -> str:
    return error(await client.post(CHAT, {"model": "m", "messages": [], "max_tokens": 1}))


@probe("refused: embeddings of a model that generates")
async def _no_embeddings(client: Client) -> str:
    return error(await client.post(EMBEDDINGS, {"model": "m", "input": "x"}))


# -- aborts and limits


@probe("abort: answer; what the caller gets")
async def _abort(client: Client) -> str:
    task = client.begin(COMPLETIONS, completion(ids(3), LONG), "one")
    await client.running(1)
    told = await client.post("/abort_requests", {"request_ids": ["cmpl-one-0"]})
    status, answer = await task
    return f"{told}; {status} {answer['choices'][0]['finish_reason']}"


@probe("abort: unknown id; id without its index; a chat's")
async def _abort_ids(client: Client) -> str:
    task = client.begin(CHAT, chat("x", LONG), "two")
    await client.running(1)
    seen = [
        (await client.post("/abort_requests", {"request_ids": [name]}))[1]["aborted"]
        for name in ("cmpl-two-0", "chatcmpl-two-0", "chatcmpl-two", "chatcmpl-two")
    ]
    status, answer = await task
    return f"{seen}; {status} {answer['choices'][0]['finish_reason']}"


@probe("abort: a completion of two prompts, by each index")
async def _abort_list(client: Client) -> str:
    task = client.begin(COMPLETIONS, completion([ids(3), ids(4)], LONG), "both")
    await client.running(2)
    first = await client.post("/abort_requests", {"request_ids": ["cmpl-both-0"]})
    await client.running(1)
    second = await client.post("/abort_requests", {"request_ids": ["cmpl-both-1"]})
    _, answer = await task
    return f"{first[1]['aborted']} {second[1]['aborted']}; {[c['finish_reason'] for c in answer['choices']]}"


@probe("abort: no ids ends all")
async def _abort_all(client: Client) -> str:
    tasks = [client.begin(COMPLETIONS, completion(ids(3, seed=i), LONG), f"all{i}") for i in range(2)]
    await client.running(2)
    told = await client.post("/abort_requests", {"request_ids": []})
    reasons = [(await task)[1]["choices"][0]["finish_reason"] for task in tasks]
    return f"{told[0]} {told[1]['aborted']}; {reasons}"


@probe("abort counts as success with reason abort; a disconnect does not")
async def _abort_counted(client: Client) -> str:
    async def count() -> float:
        return await client.metric("vllm:request_success_total", finished_reason="abort")

    before = await count()
    task = client.begin(COMPLETIONS, completion(ids(3), LONG), "counted")
    await client.running(1)
    await client.post("/abort_requests", {"request_ids": ["cmpl-counted-0"]})
    await task
    await client.running(0)
    aborted = await count()
    task = client.begin(COMPLETIONS, completion(ids(3), LONG), "left")
    await client.running(1)
    await end(client, task)
    return f"{aborted - before:g} {await count() - aborted:g}"


@probe("full queue: answer, counted rejection")
async def _full_queue(client: Client) -> str:
    before = await client.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs")
    tasks = [client.begin(COMPLETIONS, completion(ids(2, seed=i), LONG), f"b{i}") for i in range(QUEUE)]

    async def full() -> bool:
        text = await client.metrics()
        return metric(text, "vllm:num_requests_running") + metric(text, "vllm:num_requests_waiting") == QUEUE

    await await_until(full, timeout_s=60, what="a full queue")
    refused = error(await client.post(COMPLETIONS, completion(ids(3), 2)))
    after = await client.metric("vllm:admission_rejections_total", reason="max_num_queued_reqs")
    waiting = await client.metric("vllm:num_requests_waiting")
    await end(client, *tasks)
    return f"{refused}; rejected {after - before:g}; waiting {waiting:g} of {QUEUE - SEQS}"


# -- pause and sleep


@probe("pause keep: answers, /is_paused, a second pause")
async def _pause_keep(client: Client) -> str:
    first = await client.post("/pause?mode=keep")
    state = await client.get("/is_paused")
    second = await client.post("/pause?mode=keep")
    back = await client.post("/resume")
    after = await client.get("/is_paused")
    return f"{first} {state} {second} {back} {after}"


@probe("pause keep: preemptions after resume")
async def _pause_preempts(client: Client) -> str:
    before = await client.metric("vllm:num_preemptions_total")
    task = client.begin(COMPLETIONS, completion(ids(3), LONG), "keep")
    await client.running(1)
    await client.post("/pause?mode=keep")
    await client.post("/resume")
    made = await client.metric("vllm:generation_tokens_total")

    async def on() -> bool:
        return await client.metric("vllm:generation_tokens_total") > made

    await await_until(on, timeout_s=60, what="more tokens")
    after = await client.metric("vllm:num_preemptions_total")
    await end(client, task)
    return f"{after - before:g}"


@probe("pause wait: what ran ends first")
async def _pause_wait(client: Client) -> str:
    task = client.begin(COMPLETIONS, completion(ids(3), 60), "waited")
    await client.running(1)
    told = await client.post("/pause?mode=wait")
    done = task.done() or bool(await asyncio.wait_for(task, 30))
    await client.post("/resume")
    return f"{told} {done} {(await task)[1]['choices'][0]['finish_reason']}"


@probe("pause abort: what ran ends; a later request waits for resume")
async def _pause_abort(client: Client) -> str:
    task = client.begin(COMPLETIONS, completion(ids(3), LONG), "cut")
    await client.running(1)
    told = await client.post("/pause?mode=abort")
    reason = (await task)[1]["choices"][0]["finish_reason"]
    late = client.begin(COMPLETIONS, completion(ids(3), 2), "later")
    done, _ = await asyncio.wait((late,), timeout=0.5)
    await client.post("/resume")
    return f"{told} {reason} {bool(done)} {(await late)[0]}"


@probe("pause with an unknown mode")
async def _pause_unknown(client: Client) -> str:
    return error(await client.post("/pause?mode=never"))


def _sleep(level: int) -> Observe:
    async def observe(client: Client) -> str:
        asleep = await client.post(f"/sleep?level={level}&mode=keep")
        state = await client.get("/is_sleeping")
        text = await client.metrics()
        gauges = [
            f"{metric(text, 'vllm:engine_sleep_state', sleep_state=name):g}"
            for name in ("awake", "weights_offloaded", "discard_all")
        ]
        health = (await client.get("/health"))[0]
        awake = await client.post("/wake_up")
        after = (await client.get("/is_sleeping"))[1]
        status, _ = await client.post(COMPLETIONS, completion(ids(3), 2))
        return f"{asleep} {state} {' '.join(gauges)} {health} {awake} {after} {status}"

    return observe


for _level in (0, 1):
    PROBES[f"sleep level {_level}, gauges (awake, offloaded, discarded), health, wake, an answer"] = _sleep(
        _level
    )


@probe("sleep with an unknown level, mode")
async def _sleep_unknown(client: Client) -> str:
    level, mode = await client.post("/sleep?level=7"), await client.post("/sleep?mode=never")
    await client.post("/wake_up")
    return f"{error(level)}; {error(mode)}"


@probe("wake without sleep")
async def _wake(client: Client) -> str:
    return str(await client.post("/wake_up"))


@probe("is sleep mode on, by GET /server_info")
async def _server_info(client: Client) -> str:
    status, body = await client.get("/server_info?config_format=json")
    found = re.findall(r'"enable_sleep_mode": (\w+)', json.dumps(body))
    return f"{status} {found}"


# -- metrics


async def families(client: Client) -> dict[str, str]:
    """Type and label names of each family of vLLM's metrics."""
    text = await client.metrics()
    kinds = dict(re.findall(r"^# TYPE (vllm:\S+) (\w+)$", text, re.MULTILINE))
    out = {}
    for name, kind in kinds.items():
        if name.endswith("_created"):
            continue
        sample = re.search(rf"^{re.escape(name)}(?:_bucket|_total)?\{{(.*)\}} ", text, re.MULTILINE)
        labels = sorted(re.findall(r'(\w+)="', sample[1])) if sample else []
        out[name] = kind if name == "vllm:cache_config_info" else f"{kind} {' '.join(labels)}"
    return out


@probe("counters of a prompt of 333 tokens and 12 output tokens")
async def _counters(client: Client) -> str:
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:iteration_tokens_total_count",
        "vllm:iteration_tokens_total_sum",
        "vllm:prefix_cache_queries_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_inference_time_seconds_count",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_generation_tokens_sum",
        "vllm:request_max_num_generation_tokens_sum",
        "vllm:request_params_max_tokens_sum",
        "vllm:request_prefill_kv_computed_tokens_sum",
    )
    before = await client.metrics()
    await client.post(COMPLETIONS, completion(ids(333, seed=40), 12))
    after = await client.metrics()
    return " ".join(f"{metric(after, n) - metric(before, n):g}" for n in names)


@probe("what an aborted request counts in the histograms")
async def _aborted_counts(client: Client) -> str:
    names = (
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_decode_time_seconds_count",
    )
    before = await client.metrics()
    made = metric(before, "vllm:generation_tokens_total")
    task = client.begin(COMPLETIONS, completion(ids(30, seed=41), LONG), "hist")

    async def some() -> bool:
        return await client.metric("vllm:generation_tokens_total") > made + 5

    await await_until(some, timeout_s=60, what="tokens")
    await client.post("/abort_requests", {"request_ids": ["cmpl-hist-0"]})
    await task
    await client.running(0)
    after = await client.metrics()
    return " ".join(f"{metric(after, n) - metric(before, n):g}" for n in names)


@probe("cache_config_info: labels that are read")
async def _cache_info(client: Client) -> str:
    text = await client.metrics()
    found = re.search(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1])) if found else {}
    return f"block_size {labels.get('block_size')} x num_gpu_blocks {labels.get('num_gpu_blocks')}"
