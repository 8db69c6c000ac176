"""The KV cache that a plan foresees, against what the real vLLM says: within 5 % on each shape."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridsched.core.engine_plan import EnginePlan, Wish, plan_engine
from hybridsched.core.gpus import GIB
from hybridsched.engines.model_files import read_model
from hybridsched.engines.protocol import EngineInfo
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.workers.engine_launch import CAPACITY_TOLERANCE
from tests.helpers import wait_until
from tests.integration.pool import free_port
from tests.vllm.engines import SHAPES, RealServers, environment

LENGTH = 2048


def planned(model: Path) -> EnginePlan:
    wish = Wish(device=None, kv_space_bytes=GIB, max_model_len=LENGTH)
    found = plan_engine(read_model(model, dtype="float32"), wish)
    assert isinstance(found, EnginePlan)
    return found


def info(url: str) -> EngineInfo:
    async def ask() -> EngineInfo:
        engine = VllmHttpEngine(url)
        try:
            return await engine.info()
        finally:
            await engine.close()

    return asyncio.run(ask())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_planned_kv_cache_is_the_one_that_vllm_has(
    shape: str, real_servers: RealServers, vllm_models: dict[str, Path]
) -> None:
    plan = planned(vllm_models[shape])
    engine = real_servers.get("--max-model-len", str(LENGTH), shape=shape)
    said = info(engine.url)
    logged = re.search(r"KV cache size: ([0-9,]+) tokens", engine.log.read_text())
    assert logged is not None
    assert said.kv_tokens == int(logged[1].replace(",", ""))
    assert said.kv_tokens == pytest.approx(plan.kv_tokens, rel=CAPACITY_TOLERANCE)
    assert said.block_size == plan.block_tokens
    assert said.max_model_len == LENGTH


@pytest.mark.timeout(600)
def test_launch_starts_the_real_vllm_as_planned(
    vllm_venv_python: Path,
    vllm_models: dict[str, Path],
    real_servers: RealServers,
    valkey_url: str,
    tmp_path: Path,
) -> None:
    real_servers.stop()
    port = free_port()
    log = tmp_path / "log"
    own = {name: value for name, value in os.environ.items() if name.startswith("HYBRIDSCHED_")}
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "hybridsched", "engine", "launch"),
                *(
                    "--model",
                    str(vllm_models["grouped-query"]),
                    "--served-model-name",
                    "m",
                    "--port",
                    str(port),
                ),
                *("--gpu", "cpu", "--kv-gib", "1", "--dtype", "float32", "--max-model-len", str(LENGTH)),
                *(
                    "--program",
                    str(vllm_venv_python.parent / "vllm"),
                    "--redis",
                    valkey_url,
                    "--pool",
                    "real",
                ),
                *("--", "--enforce-eager", "--distributed-executor-backend", "uni"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(tmp_path) | dict.fromkeys(own, ""),
        ) as launched,
    ):
        try:
            wait_until(
                lambda: "profile_kept" in log.read_text() or launched.poll() is not None,
                timeout_s=400,
                what="the profile",
            )
            assert "kv_as_planned" in log.read_text(), log.read_text()[-4000:]
            command = [sys.executable, "-m", "hybridsched", "engine", "profile", "--json"]
            shown = subprocess.run(
                [*command, "--redis", valkey_url, "--pool", "real"], capture_output=True, check=True
            )
            (profile,) = json.loads(shown.stdout)
            assert profile["device"] == "cpu"
            assert profile["kv_tokens"] == profile["kv_tokens_planned"]
            assert profile["throughput"]["output_tokens_per_s"] > 0
            assert profile["load_s"] > 1
            launched.terminate()
            assert launched.wait(60) == 0
        finally:
            launched.kill()
