"""`hybridsched engine launch` with the simulated engine: flags, profile, signals, failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.ports import KeptPorts
from hybridsched.workers.engine_launch import NOT_STARTED
from tests.helpers import wait_until
from tests.model_kit import LLAMA_8B, write_model

PLANNED = ("--gpu", "3g.20gb@a100-40gb", "--max-model-len", "4096", "--served-model-name", "llama")


class Launched:
    """The command in a process of its own."""

    def __init__(self, folder: Path, model: Path, *options: str) -> None:
        self.kept = KeptPorts([0])
        (self.port,) = self.kept.numbers
        self._log = folder / f"launch-{self.port}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hybridsched", "engine", "launch", "--model", str(model)),
                    *("--port", str(self.port), *PLANNED, *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("HYBRIDSCHED_")},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def healthy(self) -> bool:
        assert self.process.poll() is None, self.log
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def engine(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "llama-3-8b", LLAMA_8B)


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    started: list[Launched] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()
        each.kept.close()


def simulated(
    launched: list[Launched], folder: Path, model: Path, *options: str, speed: str = "50"
) -> Launched:
    launched.append(Launched(folder, model, "--program", "simulated", *options, "--", "--speed", speed))
    return launched[-1]


def profiles(url: str, *options: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hybridsched", "engine", "profile", "--redis", url, "--pool", "p"),
            *("--json", *options),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return list(json.loads(done.stdout))


def test_the_engine_has_the_plans_flags_and_leaves_a_profile(
    launched: list[Launched], valkey: redis.Redis, valkey_url: str, tmp_path: Path, model: Path
) -> None:
    one = simulated(launched, tmp_path, model, "--redis", valkey_url, "--pool", "p")
    wait_until(lambda: "profile_kept" in one.log, timeout_s=60, what="the profile")

    async def info() -> tuple[int | None, int | None]:
        engine = VllmHttpEngine(f"http://127.0.0.1:{one.port}")
        try:
            found = await engine.info()
            return found.max_model_len, found.kv_tokens
        finally:
            await engine.close()

    length, tokens = asyncio.run(info())
    (profile,) = profiles(valkey_url)
    assert length == 4096 == profile["max_model_len"]
    assert tokens == profile["kv_tokens"] == profile["kv_tokens_planned"]
    assert (profile["model"], profile["device"], profile["tensor_parallel"]) == ("llama", "simulated", 1)
    assert profile["kv_bytes_per_token"] == 128 * 1024
    assert profile["load_s"] > 0  # type: ignore[operator]
    throughput = profile["throughput"]
    assert isinstance(throughput, dict)
    assert (throughput["requests"], throughput["output_tokens"]) == (32, 64)
    assert throughput["output_tokens_per_s"] == pytest.approx(32 * 64 / throughput["seconds"])
    assert "kv_as_planned" in one.log
    engine = one.engine()
    one.process.send_signal(signal.SIGTERM)
    out, _ = one.process.communicate(timeout=40)
    assert one.process.returncode == 0, one.log
    assert out == b""
    assert not engine.is_running()


def test_a_flag_of_ones_own_that_changes_the_kv_cache_is_named(
    launched: list[Launched], tmp_path: Path, model: Path
) -> None:
    launched.append(
        Launched(
            *(tmp_path, model, "--program", "simulated"),
            *("--", "--speed", "50", "--kv-tokens", "8192"),
        )
    )
    wait_until(lambda: "kv_not_as_planned" in launched[0].log, timeout_s=60, what="the comparison")
    assert "as --kv-tokens stood behind `--`" in launched[0].log


def test_the_throughput_is_measured_once(
    launched: list[Launched], valkey: redis.Redis, valkey_url: str, tmp_path: Path, model: Path
) -> None:
    options = ("--redis", valkey_url, "--pool", "p")
    first = simulated(launched, tmp_path, model, *options)
    wait_until(lambda: "profile_kept" in first.log, timeout_s=60, what="the profile")
    (before,) = profiles(valkey_url)
    first.process.terminate()
    first.process.wait(40)
    second = simulated(launched, tmp_path, model, *options)
    wait_until(lambda: "profile_kept" in second.log, timeout_s=60, what="the second profile")
    (after,) = profiles(valkey_url)
    assert after["throughput"] == before["throughput"]
    assert after["at_ms"] != before["at_ms"]
    assert profiles(valkey_url, "--model", "other") == []


def test_without_redis_it_runs_and_keeps_nothing(
    launched: list[Launched], tmp_path: Path, model: Path
) -> None:
    one = simulated(launched, tmp_path, model)
    wait_until(one.healthy, timeout_s=60, what="a healthy engine")
    wait_until(lambda: "kv_as_planned" in one.log, what="the comparison")
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(40) == 0
    assert "profile_" not in one.log


def test_a_redis_that_cannot_be_reached_does_not_end_the_engine(
    launched: list[Launched], tmp_path: Path, model: Path
) -> None:
    one = simulated(launched, tmp_path, model, "--redis", "redis://127.0.0.1:1", "--no-measure")
    wait_until(lambda: "profile_lost" in one.log, timeout_s=60, what="the warning")
    assert one.healthy()
    one.process.terminate()
    assert one.process.wait(40) == 0


def test_the_engine_dies_with_its_launcher(launched: list[Launched], tmp_path: Path, model: Path) -> None:
    one = simulated(launched, tmp_path, model)
    wait_until(one.healthy, timeout_s=60, what="a healthy engine")
    engine = one.engine()
    one.process.kill()
    one.process.wait()
    wait_until(lambda: not engine.is_running() or engine.status() == "zombie", what="the engine's end")


def test_a_dead_engine_is_the_commands_end(launched: list[Launched], tmp_path: Path, model: Path) -> None:
    one = simulated(launched, tmp_path, model)
    wait_until(one.healthy, timeout_s=60, what="a healthy engine")
    wait_until(lambda: "engine_healthy" in one.log, what="its own look")
    one.engine().kill()
    assert one.process.wait(40) == 128 + signal.SIGKILL
    assert "engine_died" in one.log


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--program", "/no/such/vllm"), "engine_not_started"),
        (("--program", "false"), "engine_start_failed"),
    ],
)
def test_an_engine_that_does_not_start(
    launched: list[Launched], tmp_path: Path, model: Path, options: tuple[str, ...], says: str
) -> None:
    launched.append(Launched(tmp_path, model, *options))
    assert launched[0].process.wait(40) == NOT_STARTED
    assert says in launched[0].log


def test_nothing_of_an_engine_is_left_when_the_command_ends(
    launched: list[Launched], tmp_path: Path, model: Path
) -> None:
    """vLLM's core has the GPU's memory, and lives on when the server before it is killed."""
    program, part = tmp_path / "program", tmp_path / "part"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {part}\nexec sleep 600\n")
    program.chmod(0o755)
    launched.append(Launched(tmp_path, model, "--program", str(program)))
    wait_until(lambda: part.exists() and part.read_text().strip(), timeout_s=60, what="the engine's parts")
    core = psutil.Process(int(part.read_text()))
    launched[0].engine().kill()
    assert launched[0].process.wait(60) == NOT_STARTED
    assert not core.is_running() or core.status() == "zombie"
    assert "engine_parts_killed" in launched[0].log


def test_a_port_in_use_is_not_taken_for_the_engine(
    launched: list[Launched], valkey: redis.Redis, valkey_url: str, tmp_path: Path, model: Path
) -> None:
    """A real vLLM needs seconds to find out, and whoever listens there answers meanwhile."""
    first = simulated(launched, tmp_path, model)
    wait_until(first.healthy, timeout_s=60, what="a healthy engine")
    options = ("--redis", valkey_url, "--pool", "p", "--port", str(first.port), "--program", "sleep")
    launched.append(Launched(tmp_path, model, *options))
    assert launched[1].process.wait(40) == NOT_STARTED
    assert "engine_port_taken" in launched[1].log
    assert "engine_healthy" not in launched[1].log
    assert profiles(valkey_url) == []
    assert first.healthy()


def test_an_engine_that_is_not_healthy_in_time(launched: list[Launched], tmp_path: Path, model: Path) -> None:
    program = tmp_path / "sleeper"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    launched.append(Launched(tmp_path, model, "--program", str(program), "--start-timeout", "1"))
    assert launched[0].process.wait(40) == NOT_STARTED
    assert "engine_start_timeout" in launched[0].log


def test_a_replica_starts_its_engine_by_launch(valkey: redis.Redis, valkey_url: str, model: Path) -> None:
    """`worker replica -- hybridsched engine launch ...`: they start, serve and end together."""
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "hybridsched", "worker", "replica", "--redis", valkey_url, "--pool", "p"),
            *("--model", "llama", "--replica", "r0", "--", sys.executable, "-m", "hybridsched"),
            *("engine", "launch", "--model", str(model), *PLANNED, "--program", "simulated"),
            *("--port", "{port}", "--redis", valkey_url, "--pool", "p", "--", "--speed", "50"),
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as replica:
        try:
            wait_until(lambda: valkey.exists("hs:{p}:telemetry:r0"), timeout_s=60, what="a serving replica")
            wait_until(lambda: profiles(valkey_url), timeout_s=60, what="the profile")
            family = psutil.Process(replica.pid).children(recursive=True)
            assert len(family) == 2
            replica.send_signal(signal.SIGTERM)
            assert replica.wait(60) == 0
            assert not [one for one in family if one.is_running()]
        finally:
            replica.kill()
