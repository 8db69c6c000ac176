"""`batch submit --sbatch` as far as it is seen without Slurm: what is asked of sbatch, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import redis

from hybridsched.core.policy import PolicyKind, PoolPolicy, SlurmPolicy
from hybridsched.store.batches import BatchStore
from hybridsched.store.connection import async_client
from hybridsched.store.policy import PolicyStore
from tests.integration.offline_rig import POOL, write_batch


def submit(
    folder: Path, url: str, *words: str, answer: str = "echo 41"
) -> tuple[subprocess.CompletedProcess[str], str]:
    """The command with an sbatch that writes down what it was given, and says `answer`."""
    asked, sbatch = folder / "asked", folder / "bin" / "sbatch"
    sbatch.parent.mkdir(exist_ok=True)
    sbatch.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {asked}\n{answer}\n')
    sbatch.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "hybridsched", "batch", "submit", "--sbatch", *words],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "PATH": f"{sbatch.parent}:{os.environ['PATH']}",
            "HYBRIDSCHED_REDIS_URL": url,
            "HYBRIDSCHED_POOL": POOL,
        },
        cwd=folder,
        timeout=60,
        check=False,
    )
    return done, asked.read_text() if asked.exists() else ""


async def test_lines_that_cannot_run_are_listed(tmp_path: Path, valkey: redis.Redis, valkey_url: str) -> None:
    valkey.flushall()
    source = tmp_path / "b.jsonl"
    write_batch(source, 3)
    source.write_text(source.read_text() + "no json\n{}\n")
    done, _ = submit(tmp_path, valkey_url, "b.jsonl")
    assert (done.returncode, done.stdout) == (0, "41\n"), done.stderr
    assert "2 lines cannot run and go to the error file" in done.stderr
    assert "line 4" in done.stderr
    done, _ = submit(tmp_path, valkey_url, "--json", "b.jsonl")
    assert json.loads(done.stdout)["batches"][0]["invalid"] == 2


async def test_the_jobs_comment_names_the_model_unless_there_are_several(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    valkey.flushall()
    write_batch(tmp_path / "one.jsonl", 4)
    done, asked = submit(tmp_path, valkey_url, "one.jsonl")
    assert done.returncode == 0, done.stderr
    assert "model=tiny" in asked
    rows = [json.loads(text) for text in (tmp_path / "one.jsonl").read_text().splitlines()]
    rows[1]["body"]["model"] = "another"
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done, asked = submit(tmp_path, valkey_url, "two.jsonl")
    assert done.returncode == 0, done.stderr
    batch = BatchStore(valkey, POOL).all()[-1]
    assert batch.models == ("tiny", "another")
    assert f"hybridsched {batch.id}\n" in asked.replace("--comment=", "")
    assert "model=" not in asked


async def test_what_sbatch_refuses_is_named_and_can_be_cancelled(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    valkey.flushall()
    write_batch(tmp_path / "b.jsonl", 3)
    refusal = "echo 'sbatch: error: invalid account or partition' >&2; exit 1"
    done, _ = submit(tmp_path, valkey_url, "b.jsonl", answer=refusal)
    assert done.returncode == 1
    batches = BatchStore(valkey, POOL).all()
    assert f"hybridsched batch cancel {batches[0].id}" in done.stderr
    assert (
        f"Pool {POOL} has no policy that steers Slurm, so the names of workers/offline.sbatch" in done.stderr
    )
    named, _ = submit(
        tmp_path, valkey_url, "--gres", "a:1,b:1", "--partition", "x", "b.jsonl", answer=refusal
    )
    assert "has no policy" not in named.stderr
    again, _ = submit(tmp_path, valkey_url, "b.jsonl")
    assert again.returncode == 0, again.stderr
    assert [one.id for one in BatchStore(valkey, POOL).all()] == [batches[0].id]


async def test_partition_and_lane_have_the_names_of_the_pools_policy(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    valkey.flushall()
    write_batch(tmp_path / "b.jsonl", 3)
    slurm = SlurmPolicy(enabled=True, partition_offline="scavenge", fill_gres="openlane", place_gres="place")
    client = async_client(valkey_url)
    policy = PoolPolicy(name="x", kind=PolicyKind.IDLE_WINDOW, slurm=slurm)
    await PolicyStore(client, POOL).set(policy, by="me")
    await client.aclose()
    done, asked = submit(tmp_path, valkey_url, "b.jsonl")
    assert done.returncode == 0, done.stderr
    assert "--partition=scavenge\n--gres=openlane:1,place:1\n" in asked
    done, asked = submit(tmp_path, valkey_url, "--partition", "mine", "--gres", "other:1", "b.jsonl")
    assert "--partition=mine\n--gres=other:1\n" in asked


async def test_a_time_limit_hardly_above_the_notice_is_told(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    valkey.flushall()
    write_batch(tmp_path / "b.jsonl", 3)
    done, asked = submit(tmp_path, valkey_url, "--time", "1m", "b.jsonl")
    assert (done.returncode, done.stdout) == (0, "41\n"), done.stderr
    assert "--time=1\n" in asked
    assert "Warning: --time is 1 min" in done.stderr
    done, _ = submit(tmp_path, valkey_url, "--time", "10m", "b.jsonl")
    assert done.returncode == 0
    assert "Warning" not in done.stderr
