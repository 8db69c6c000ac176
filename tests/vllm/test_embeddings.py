"""Embeddings, where the model has them: the simulated vLLM, the real one over HTTP and in process."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hybridsched.engines.checks import answer_problem
from hybridsched.engines.protocol import Engine
from hybridsched.engines.vllm_http import VllmHttpEngine
from tests.contract.engine_servers import SimulatedServer
from tests.vllm.engine_rigs import COMPLETIONS, EMBEDDINGS, MODEL, completion, finish, ids, process_engine
from tests.vllm.engines import RealServers

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

KINDS = ("simulated", "vllm-http", "vllm-process")
FLAGS = ("--runner", "pooling", "--convert", "embed", "--max-model-len", "512")


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=KINDS)
async def pooling(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    """An engine whose model embeds."""
    if request.param == "simulated":
        server = SimulatedServer("--runner", "pooling", "--max-model-len", "512")
        simulated = VllmHttpEngine(server.url)
        yield simulated
        await simulated.close()
        server.stop()
        return
    servers: RealServers = request.getfixturevalue("real_servers")
    if request.param == "vllm-http":
        engine = VllmHttpEngine(servers.get(*FLAGS).url)
        yield engine
        await engine.close()
        return
    servers.stop()
    child = process_engine(
        servers,
        tmp_path_factory.mktemp("vllm-pooling"),
        runner="pooling",
        convert="embed",
        max_model_len=512,
    )
    await child.start()
    yield child
    await child.close()


async def test_texts_and_token_ids_are_embedded_in_order(pooling: Engine) -> None:
    body = {"model": MODEL, "input": ["one text", "another", "one text"]}
    answer = await finish(pooling, body, "e1", EMBEDDINGS)
    assert answer.status == 200
    assert answer_problem(EMBEDDINGS, answer.body) == ""
    assert [d["index"] for d in answer.body["data"]] == [0, 1, 2]
    one, other, again = (d["embedding"] for d in answer.body["data"])
    assert len(one) == len(other) > 1
    assert math.fsum(v * v for v in one) == pytest.approx(1.0, abs=1e-3)
    assert one == pytest.approx(again, abs=1e-5)
    assert one != pytest.approx(other, abs=1e-2)
    prompt = await pooling.tokenize(EMBEDDINGS, {"model": MODEL, "input": "one text"})
    by_ids = await finish(pooling, {"model": MODEL, "input": prompt}, "e2", EMBEDDINGS)
    assert by_ids.body["data"][0]["embedding"] == pytest.approx(one, abs=1e-5)
    assert by_ids.body["usage"]["prompt_tokens"] == len(prompt)
    assert by_ids.body["usage"]["completion_tokens"] == 0


async def test_base64_holds_the_same_numbers(pooling: Engine) -> None:
    body = {"model": MODEL, "input": ids(7)}
    plain = await finish(pooling, body, "f1", EMBEDDINGS)
    packed = await finish(pooling, {**body, "encoding_format": "base64"}, "f2", EMBEDDINGS)
    numbers = plain.body["data"][0]["embedding"]
    raw = base64.b64decode(packed.body["data"][0]["embedding"])
    assert struct.unpack(f"<{len(numbers)}f", raw) == pytest.approx(numbers, abs=1e-5)


async def test_what_cannot_be_embedded_is_refused(pooling: Engine) -> None:
    for name, change in (("long", {"input": ids(600)}), ("empty", {"input": []}), ("none", {"input": None})):
        answer = await finish(pooling, {"model": MODEL, "input": "x"} | change, name, EMBEDDINGS)
        assert answer.status == 400, name
    other = await finish(pooling, {"model": "other", "input": "x"}, "other", EMBEDDINGS)
    assert other.status == 404
    generation = await finish(pooling, completion("x", 2), "g", COMPLETIONS)
    assert generation.status in (400, 404)
