"""workers/online.sbatch: which engine it starts, by HYBRIDSCHED_ENGINE."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "workers" / "online.sbatch"


def started(folder: Path, engine: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a `hybridsched` that only prints its arguments, one a line."""
    program = folder / "hybridsched"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDSCHED_")}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean
        | {"SLURM_JOB_ID": "7", "HYBRIDSCHED_BIN": str(program), "HYBRIDSCHED_ENGINE": engine}
        | env,
    )


def command(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The engine's command: what follows the replica's own options."""
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["worker", "replica"]
    return lines[lines.index("--") + 1 :]


def test_vllm(tmp_path: Path) -> None:
    assert command(started(tmp_path, "vllm", "llama", "--dtype", "float16")) == [
        *("vllm", "serve", "llama", "--host", "127.0.0.1", "--served-model-name", "llama"),
        *("--port", "{port}", "--dtype", "float16"),
    ]


def test_planned(tmp_path: Path) -> None:
    done = started(
        tmp_path,
        "planned",
        "/models/llama",
        "--trace",
        "t.csv",
        "--",
        "--enforce-eager",
        HYBRIDSCHED_MODEL="llama",
    )
    assert command(done) == [
        *(str(tmp_path / "hybridsched"), "engine", "launch", "--model", "/models/llama"),
        *("--served-model-name", "llama", "--port", "{port}", "--trace", "t.csv", "--", "--enforce-eager"),
    ]


def test_simulated(tmp_path: Path) -> None:
    done = started(tmp_path, "simulated", "llama", HYBRIDSCHED_SPEED="2")
    assert command(done)[:5] == ["simulated", "--speed", "2", "--host", "127.0.0.1"]


@pytest.mark.parametrize("engine", ["other", "Planned"])
def test_anything_else_is_refused(tmp_path: Path, engine: str) -> None:
    done = started(tmp_path, engine, "llama")
    assert done.returncode == 2
    assert "vllm, planned or simulated" in done.stderr
