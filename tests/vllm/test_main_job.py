"""`hybridsched demo --engine vllm`, short: the main job on a real engine, its report, interrupted lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridsched.demo.options import REAL_MODEL
from hybridsched.demo.trace import write_mixed_batch
from tests.vllm.engines import ROOT, RealServers, environment


@pytest.mark.timeout(600)
def test_the_main_job_on_a_real_engine(real_servers: RealServers, tmp_path: Path) -> None:
    real_servers.stop()
    model = tmp_path / "model"
    subprocess.run(
        [
            str(real_servers.python),
            str(ROOT / "tests/vllm/tiny_model.py"),
            str(model),
            "grouped-query",
            "--text",
        ],
        check=True,
        timeout=120,
        capture_output=True,
    )
    trace = tmp_path / "bursts.csv"
    # Of several distances: on a slow machine the near ones are one. On a fast one the batch outlasts several.
    batch = tmp_path / "batch.jsonl"
    write_mixed_batch(batch, lines=400, model=REAL_MODEL, salt="offline")
    bursts = (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 13.0, 16.0, 20.0, 25.0)
    arrivals = [burst + 0.05 * number for burst in bursts for number in range(4)]
    trace.write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at:.2f},40,20\n" for at in arrivals)
    )
    report = tmp_path / "report"
    kept = {name: os.environ[name] for name in os.environ if name.startswith("PYTHON")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hybridsched", "demo", "--engine", "vllm", "--model", str(model)),
            *("--vllm", str(real_servers.python.with_name("vllm")), "--gpus", "1", "--no-baseline"),
            *("--trace", str(trace), "--duration", "27", "--batch", str(batch), "--finish"),
            *("--report", str(report), "--json"),
            *("--", "--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni"),
        ],
        env=environment(tmp_path) | kept,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert "starting 1 vLLM engine," in done.stderr
    assert "running the interrupted lines once more" in done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((report / "summary.json").read_text())
    assert summary["run"]["engine"].startswith("vLLM 0.")
    offline, online = summary["offline"], summary["online"]
    assert (offline["completed"], offline["failed"], offline["remaining"]) == (offline["lines"], 0, 0)
    assert (offline["missing"], offline["duplicates"], offline["wrong_length"]) == (0, 0, 0)
    assert offline["output_tokens"] > 0
    assert online["ok"] == online["requests"] == len(arrivals)
    assert summary["pauses"]["count"] > 0, done.stdout
    assert summary["pauses"]["signal_to_quiet_ms"]["p50"] > 0
    interrupted = summary["interrupted"]
    assert interrupted["compared"] == interrupted["identical"] > 0
    assert summary["restarts"] == {}
    assert "vLLM" in (report / "report.html").read_text()


def test_wrong_use_is_one_sentence(tmp_path: Path) -> None:
    def refused(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hybridsched", "demo", *options, "--report", str(tmp_path / "r")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert not (tmp_path / "r").exists()
        return done.stderr.splitlines()[-1]

    (tmp_path / "empty").mkdir()
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text('{"max_position_embeddings": 512}')
    assert "needs --model DIR" in refused("--engine", "vllm")
    assert "goes with --engine vllm" in refused("--model", str(small))
    assert "holds no model" in refused("--engine", "vllm", "--model", str(tmp_path / "empty"))
    assert "takes 512 tokens" in refused("--engine", "vllm", "--model", str(small))
    assert "--speed 1" in refused("--engine", "vllm", "--model", str(small), "--speed", "2")
    assert "--slurm" in refused("--engine", "vllm", "--model", str(small), "--slurm")
    assert "unexpected argument" in refused("--", "--enforce-eager")
