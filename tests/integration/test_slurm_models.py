"""Two models on two nodes of a real Slurm: every batch runs where its model is."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import msgspec
import pytest
import redis

from hybridsched.store.events import EventLog
from tests.helpers import wait_until
from tests.integration.online_rig import MODEL, POOL
from tests.integration.test_slurm_replicas import BIN, ROOT, SLURM, WANTED, Pool, pool
from tests.slurm import Testbed

LINES = 6
OTHER = "big"
# A node each: a replica takes all GPUs of one.
MODELS = tuple(
    msgspec.structs.replace(WANTED, model=name, count=1, gres="gpu:a100:4") for name in (MODEL, OTHER)
)


def write_lines(path: Path, model: str) -> Path:
    with path.open("w") as file:
        for i in range(LINES):
            body = {"model": model, "prompt": [1, 2, 3 + i], "max_tokens": 4, "ignore_eos": True}
            line = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


def environment(url: str) -> tuple[str, ...]:
    return ("env", f"HYBRIDSCHED_BIN={BIN}", f"HYBRIDSCHED_REDIS_URL={url}", f"HYBRIDSCHED_POOL={POOL}")


def by_hand(slurm: Testbed, url: str, source: Path) -> int:
    """`sbatch workers/offline.sbatch FILE`: nobody knows its model before it runs."""
    said = slurm.run(
        *environment(url),
        *("sbatch", "--parsable", f"--output={source}.log", str(ROOT / "workers" / "offline.sbatch")),
        str(source),
    )
    return int(said.strip())


def by_program(slurm: Testbed, url: str, source: Path) -> int:
    """`batch submit --sbatch FILE`: the job's comment names the model."""
    words = ("--directory", str(source.parent), str(BIN), "batch", "submit", "--sbatch", str(source))
    said = slurm.run(*environment(url)[:1], "-C", words[1], *environment(url)[1:], *words[2:])
    return int(said.strip().splitlines()[-1])


async def ends_complete(slurm: Testbed, made: Pool, job: int, source: Path) -> dict[str, str]:
    try:
        shown = await asyncio.to_thread(slurm.wait_job, job, "COMPLETED", "FAILED", timeout_s=90)
        assert shown["JobState"] == "COMPLETED"
    except AssertionError as error:
        logs = "\n".join(path.read_text() for path in source.parent.glob("*.log"))
        queue = slurm.run("squeue", "-o", "%i %P %T %r %N %x %k")
        raise AssertionError(f"{error}\n{queue}\n{logs}\n{made.log.read_text()[-6000:]}") from None
    lines = source.with_name(f"{source.name.removesuffix('.jsonl')}.output.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [f"c{i}" for i in range(LINES)]
    return shown


@pytest.mark.timeout(240)
async def test_batches_of_two_models_complete_each_on_its_node(
    clean_slurm: Testbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """The pool stood still for ever: a job of one model on the node of the other, whose lanes were open."""
    slurm = clean_slurm
    given = msgspec.structs.replace(SLURM, replicas=MODELS, wrong_node_ms=3000.0)
    async with pool(slurm, valkey_url, tmp_path, given) as made:
        await made.until(lambda jobs: len(jobs) == 2, "two replicas")
        nodes = {record.model: record.node for record in (await made.serving()).values()}
        assert len(set(nodes.values())) == 2
        folder = slurm.state / "batches"
        folder.mkdir(exist_ok=True)
        # Slurm takes the first node that has a place: that is where this one does not belong.
        last = max(nodes, key=lambda model: nodes[model])
        astray = write_lines(folder / "astray.jsonl", last)
        first = by_hand(slurm, valkey_url, astray)
        await asyncio.to_thread(
            wait_until,
            lambda: slurm.job(first).get("JobState") in ("RUNNING", "COMPLETED"),
            timeout_s=40,
            what="the job of an unknown model",
        )
        known = {model: write_lines(folder / f"{model}.jsonl", model) for model in nodes}
        jobs = {model: by_program(slurm, valkey_url, source) for model, source in known.items()}
        for model, job in jobs.items():
            said = slurm.run("squeue", "-h", "--states=all", "-j", str(job), "-o", "%k")
            assert re.match(rf"hybridsched \S+ model={model}( |$)", said), said
        shown = await ends_complete(slurm, made, first, astray)
        assert shown["NodeList"] == nodes[last]
        for model, job in jobs.items():
            shown = await ends_complete(slurm, made, job, known[model])
            assert shown["NodeList"] == nodes[model]
        acts = await EventLog(made.client, POOL).read_all(kinds=["slurm"])
        told = [(act["job"], act["why"]) for act in acts if act["act"] == "signal_job"]
        assert all(why == "wrong_node" for _, why in told), told
        assert [act for act in acts if act["act"] == "keep_away" and act["outcome"] == "ok"]
