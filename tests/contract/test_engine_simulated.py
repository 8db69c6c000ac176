"""The simulated vLLM as a process: its ways of dying, its controls, its logs. All of it seen on vLLM 0.32."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hybridsched.engines.protocol import EngineError, StreamChunk
from hybridsched.engines.vllm_http import VllmHttpEngine
from tests.contract.engine_servers import MODEL, Servers, SimulatedServer, log_lines
from tests.helpers import await_until, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = 4000


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.stop()


@pytest.fixture
async def engine(servers: Servers) -> AsyncIterator[VllmHttpEngine]:
    engine = VllmHttpEngine(servers.get().url)
    yield engine
    await engine.close()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[SimulatedServer]:
    """A server that the test may kill; flags by indirect parametrization."""
    server = SimulatedServer(*getattr(request, "param", ()))
    yield server
    server.stop()


def completion(prompt: object, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True} | more


async def running_stream(engine: VllmHttpEngine, tokens: int = LONG) -> AsyncIterator[StreamChunk]:
    """A stream of which one event has come."""
    stream = engine.stream(
        COMPLETIONS, completion([1, 2], tokens, stream=True), request_id="open", idle_timeout_s=0.5
    )
    await anext(stream)
    return stream


async def drain(stream: AsyncIterator[StreamChunk]) -> list[dict[str, Any]]:
    return [json.loads(chunk.data) async for chunk in stream]


@pytest.mark.parametrize("own_server", [("--shutdown-timeout", "0.2")], indirect=True)
async def test_a_drain_that_takes_too_long_cuts_the_rest(own_server: SimulatedServer) -> None:
    engine = VllmHttpEngine(own_server.url)
    stream = await running_stream(engine)
    own_server.signal(signal.SIGTERM)
    with pytest.raises(EngineError) as cut:
        await drain(stream)
    assert cut.value.code == "engine_died"
    wait_until(lambda: own_server.process.poll() is not None, what="the server's exit")
    await engine.close()


async def test_an_idle_server_exits_at_sigterm(own_server: SimulatedServer) -> None:
    own_server.signal(signal.SIGTERM)
    wait_until(lambda: own_server.process.poll() is not None, what="the server's exit")
    assert own_server.process.returncode == 0
    assert own_server.stop() == b""


async def test_sleep_and_wake(engine: VllmHttpEngine, http: aiohttp.ClientSession) -> None:
    before = (await engine.stats()).preemptions_total or 0
    task = asyncio.create_task(
        engine.complete(COMPLETIONS, completion([4, 4], LONG), request_id="dream", timeout_s=30)
    )

    async def running() -> bool:
        return (await engine.stats()).running == 1

    await await_until(running, what="one running")
    async with http.post(f"{engine.url}/sleep?level=1&mode=keep") as response:
        assert await response.json() == {"status": "sleeping", "level": 1}
    async with http.get(f"{engine.url}/is_sleeping") as response:
        assert (await response.json())["is_sleeping"] is True
    async with http.get(f"{engine.url}/metrics") as response:
        assert re.search(r'engine_sleep_state\{.*"weights_offloaded"\} 1.0', await response.text())
    assert await engine.healthy()
    assert not task.done()
    async with http.post(f"{engine.url}/wake_up") as response:
        assert await response.json() == {"status": "awake", "tags": None}
    await engine.abort(COMPLETIONS, ["dream"])
    assert (await task).aborted
    assert (await engine.stats()).preemptions_total == before + 1


@pytest.mark.parametrize(("level", "preempted"), [(0, 0), (1, 1)])
async def test_only_a_deep_sleep_preempts(
    engine: VllmHttpEngine, http: aiohttp.ClientSession, level: int, preempted: int
) -> None:
    before = (await engine.stats()).preemptions_total or 0
    stream = await running_stream(engine)
    async with http.post(f"{engine.url}/sleep?level={level}&mode=keep") as response:
        assert response.status == 200
    async with http.post(f"{engine.url}/wake_up") as response:
        assert response.status == 200
    assert (await engine.stats()).preemptions_total == before + preempted
    await stream.aclose()  # type: ignore[attr-defined]


async def test_pause_modes_abort_and_wait(engine: VllmHttpEngine, http: aiohttp.ClientSession) -> None:
    task = asyncio.create_task(
        engine.complete(COMPLETIONS, completion([6], 60), request_id="ends", timeout_s=30)
    )
    await asyncio.sleep(0)

    async def running() -> bool:
        return (await engine.stats()).running == 1

    await await_until(running, what="one running")
    async with http.post(f"{engine.url}/pause?mode=wait") as response:
        assert await response.json() == {"status": "paused"}
    assert (await task).body["choices"][0]["finish_reason"] == "length"
    await engine.resume()
    task = asyncio.create_task(
        engine.complete(COMPLETIONS, completion([6], LONG), request_id="cut", timeout_s=30)
    )
    await await_until(running, what="one running")
    async with http.post(f"{engine.url}/pause?mode=abort") as response:
        assert response.status == 200
    assert (await task).aborted
    async with http.get(f"{engine.url}/is_paused") as response:
        assert (await response.json())["is_paused"] is True
    await engine.resume()
    async with http.post(f"{engine.url}/pause?mode=never") as response:
        assert response.status == 400
        assert "keep" in (await response.json())["error"]["message"]


async def test_what_a_pause_ends_is_counted_but_an_abort_and_a_disconnect_are_not(
    engine: VllmHttpEngine, http: aiohttp.ClientSession
) -> None:
    async def aborted() -> float:
        async with http.get(f"{engine.url}/metrics") as response:
            text = await response.text()
        found = re.search(r'request_success_total\{[^}]*finished_reason="abort"[^}]*\} (\S+)', text)
        assert found is not None
        return float(found.group(1))

    async def idle() -> bool:
        return (await engine.stats()).running == 0

    async def two() -> bool:
        return (await engine.stats()).running == 2

    before = await aborted()
    tasks = [
        asyncio.create_task(
            engine.complete(COMPLETIONS, completion([i], LONG), request_id=f"all{i}", timeout_s=30)
        )
        for i in (1, 2)
    ]
    await await_until(two, what="two running")
    async with http.post(f"{engine.url}/abort_requests") as response:
        assert await response.json() == {"status": "aborted", "aborted": 2}
    assert all(a.aborted for a in await asyncio.gather(*tasks))
    assert await aborted() == before
    stream = await running_stream(engine)
    await stream.aclose()  # type: ignore[attr-defined]
    await await_until(idle, what="an idle engine")
    assert await aborted() == before
    stream = await running_stream(engine)
    async with http.post(f"{engine.url}/pause?mode=abort") as response:
        assert response.status == 200
    await drain(stream)
    await engine.resume()
    assert await aborted() == before + 1


async def test_everything_is_labelled_as_simulated(
    engine: VllmHttpEngine, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{engine.url}/version") as response:
        assert (await response.json())["simulated"] is True
        assert "simulated" in response.headers["server"]
    async with http.get(f"{engine.url}/v1/models") as response:
        assert "simulated" in (await response.json())["data"][0]["owned_by"]
    async with http.post(f"{engine.url}{COMPLETIONS}", json=completion([1], 1)) as response:
        assert response.headers["x-hybridsched-simulated"] == "1"
    async with http.get(f"{engine.url}/metrics") as response:
        assert "hybridsched_simulated_engine{" in await response.text()


async def test_metrics_are_valid_and_bear_vllms_names(
    engine: VllmHttpEngine, http: aiohttp.ClientSession
) -> None:
    await engine.complete(COMPLETIONS, completion([1, 2, 3], 3), request_id="one", timeout_s=10)
    async with http.get(f"{engine.url}/metrics") as response:
        families = {f.name: f for f in text_string_to_metric_families(await response.text())}
    for name, kind, labels in [
        ("vllm:num_requests_running", "gauge", {"engine", "model_name"}),
        ("vllm:num_requests_waiting", "gauge", {"engine", "model_name"}),
        ("vllm:kv_cache_usage_perc", "gauge", {"engine", "model_name"}),
        ("vllm:num_preemptions", "counter", {"engine", "model_name"}),
        ("vllm:prompt_tokens", "counter", {"engine", "model_name"}),
        ("vllm:generation_tokens", "counter", {"engine", "model_name"}),
        ("vllm:request_success", "counter", {"engine", "model_name", "finished_reason"}),
        ("vllm:iteration_tokens_total", "histogram", {"engine", "model_name", "le"}),
        ("vllm:time_to_first_token_seconds", "histogram", {"engine", "model_name", "le"}),
        ("vllm:inter_token_latency_seconds", "histogram", {"engine", "model_name", "le"}),
        ("vllm:request_time_per_output_token_seconds", "histogram", {"engine", "model_name", "le"}),
    ]:
        assert families[name].type == kind, name
        assert set(families[name].samples[0].labels) == labels, name
    config = families["vllm:cache_config_info"].samples[0].labels
    assert config["num_gpu_blocks"] == "25000"
    assert config["block_size"] == "16"


async def test_detokenize_gives_the_text_back(engine: VllmHttpEngine, http: aiohttp.ClientSession) -> None:
    text = "Grüße, 世界! plain words bakodi and more"
    ids = await engine.tokenize(COMPLETIONS, {"model": MODEL, "prompt": text})
    async with http.post(f"{engine.url}/detokenize", json={"model": MODEL, "tokens": ids}) as response:
        assert (await response.json())["prompt"] == text


async def test_an_empty_model_name_is_none(engine: VllmHttpEngine) -> None:
    """As vLLM takes it (`if not model_name`)."""
    body = {"model": "", "prompt": [5], "max_tokens": 2}
    answer = await engine.complete("/v1/completions", body, request_id="empty", timeout_s=20)
    assert answer.status == 200
    assert answer.body["model"]


async def test_embeddings_need_the_pooling_runner(servers: Servers, engine: VllmHttpEngine) -> None:
    body = {"model": MODEL, "input": ["one text", "another"]}
    refused = await engine.complete("/v1/embeddings", body, request_id="e", timeout_s=10)
    assert refused.status == 404
    pooling = VllmHttpEngine(servers.get("--runner", "pooling").url)
    answer = await pooling.complete("/v1/embeddings", body, request_id="e", timeout_s=10)
    assert answer.status == 200
    assert [d["index"] for d in answer.body["data"]] == [0, 1]
    one, other = (d["embedding"] for d in answer.body["data"])
    assert one != other
    assert sum(v * v for v in one) == pytest.approx(1.0)
    assert (
        await pooling.complete(COMPLETIONS, completion([1], 1), request_id="c", timeout_s=10)
    ).status == 404
    await pooling.close()


async def test_iteration_log_is_chained_and_tells_whose_work_it_was(tmp_path: Path) -> None:
    path = tmp_path / "it.jsonl"
    server = SimulatedServer("--iteration-log", str(path))
    engine = VllmHttpEngine(server.url)
    await asyncio.gather(
        engine.complete(COMPLETIONS, completion([1] * 40, 20), request_id="user", timeout_s=30),
        engine.complete(COMPLETIONS, completion([2] * 50, 30), request_id="hsoff-b-1-0", timeout_s=30),
    )
    await engine.close()
    server.signal(signal.SIGTERM)
    wait_until(lambda: server.process.poll() is not None, what="the server's exit")
    server.stop()
    lines = log_lines(path)
    assert set(lines[0]) == {"s", "e", "on", "off", "pon", "poff", "won", "woff", "gon", "goff", "kv", "late"}
    assert sum(i["gon"] for i in lines) == 20
    assert sum(i["goff"] for i in lines) == 30
    assert sum(i["pon"] for i in lines) == 40
    assert sum(i["poff"] for i in lines) == 50
    assert all(b["s"] == a["e"] for a, b in itertools.pairwise(lines))


async def test_a_stream_among_many_carries_every_token(servers: Servers) -> None:
    engine = VllmHttpEngine(servers.get("--max-num-seqs", "257").url)
    others = [
        asyncio.create_task(
            engine.complete(COMPLETIONS, completion([i, 1], 200), request_id=f"o{i}", timeout_s=60)
        )
        for i in range(1, 200)
    ]
    body = completion([3], 200, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    stream = engine.stream(COMPLETIONS, body, request_id="slow", idle_timeout_s=30)
    chunks = await drain(stream)
    await asyncio.gather(*others)
    tokens = [t for c in chunks if c["choices"] for t in c["choices"][0]["token_ids"]]
    assert len(tokens) == chunks[-1]["usage"]["completion_tokens"] == 200
    await engine.close()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--speed", "0"], "speed"),
        (["--speed", "nan"], "speed"),
        (["--profile", "none"], "a100-llama3-8b"),
        (["--kv-tokens", "100"], "kv_tokens"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--port", "99999"], "port"),
        (["--max-num-queued-reqs", "0"], "queued"),
        (["--shutdown-timeout", "-1"], "shutdown"),
        (["--scheduling-policy", "sjf"], "fcfs"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_wrong_flags_are_refused_in_one_sentence(flags: list[str], word: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridsched.engines.simulated", *flags], capture_output=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stdout == b""
    message = done.stderr.decode()
    assert message.count("\n") == 1
    assert word in message
