"""kill -9 of the real engine at random moments of a batch: nothing is lost, nothing comes twice.

HYBRIDSCHED_KILLS says how often (CI: 2, since each start of the engine takes half a minute of two cores);
HYBRIDSCHED_SEED chooses other moments.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from pathlib import Path

import pytest

from hybridsched.batches.layout import plan_files
from hybridsched.batches.work import WorkFolder
from hybridsched.demo.uninterrupted import compare
from hybridsched.workers.offline_file import RunState, run_file
from tests.helpers import await_until
from tests.vllm.engines import MODEL, RealServers, RealVllm

KILLS = int(os.environ.get("HYBRIDSCHED_KILLS", "2"))
SEED = int(os.environ.get("HYBRIDSCHED_SEED", "11"))
LINES_A_KILL = 60
FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "16")


def write_batch(path: Path, source: random.Random) -> list[str]:
    """Greedy completions, long enough that a kill finds many under way."""
    ids = []
    with path.open("w") as file:
        for number in range(LINES_A_KILL * KILLS):
            ids.append(f"line-{number}")
            body = {
                "model": MODEL,
                "prompt": [source.randrange(20, 500) for _ in range(source.randint(10, 200))],
                "max_tokens": source.randint(60, 200),
                "ignore_eos": True,
                "temperature": 0,
            }
            line = {"custom_id": ids[-1], "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return ids


@pytest.mark.timeout(300 * (KILLS + 2))
async def test_kill_at_random_moments(real_servers: RealServers, tmp_path: Path) -> None:
    source = random.Random(SEED)
    ids = write_batch(tmp_path / "batch.jsonl", source)
    real_servers.stop()
    model = real_servers.models["grouped-query"]

    def start(port: int = 0) -> RealVllm:
        return RealVllm(real_servers.python, model, *FLAGS, port=port)

    engine = await asyncio.to_thread(start)
    files = plan_files(tmp_path / "batch.jsonl", "kill")
    work = WorkFolder.create(files)
    seen = RunState(lines=len(ids))

    def progress(state: RunState) -> None:
        nonlocal seen
        seen = state

    running = asyncio.create_task(run_file(work, [engine.url], on_progress=progress))
    moments = []
    try:
        for _ in range(KILLS):
            await await_until(lambda: seen.inflight > 0, timeout_s=240, what="requests at work")
            await asyncio.sleep(source.uniform(0.0, 2.0))
            moments.append((time.monotonic(), seen.done, seen.inflight))
            assert not running.done(), "the batch is over before the last kill"
            port = engine.port
            await asyncio.to_thread(engine.stop)
            await await_until(lambda: seen.inflight == 0, timeout_s=60, what="the end of what was at work")
            engine = await asyncio.to_thread(start, port)
        ended = await running
        assert ended.at_end
        assert (ended.done, ended.failed, ended.cut) == (len(ids), 0, 0)
        # Bytes: what a model writes may hold characters that Python takes for the end of a line.
        output = [json.loads(text) for text in Path(files.output).read_bytes().splitlines()]
        assert Path(files.errors).read_bytes() == b""
        assert [row["custom_id"] for row in output] == ids, "each line once, in the order of the input"
        for row, text in zip(output, (tmp_path / "batch.jsonl").read_bytes().splitlines(), strict=True):
            asked = json.loads(text)["body"]["max_tokens"]
            assert row["response"]["body"]["usage"]["completion_tokens"] == asked
        assert sum(inflight > 0 for _, _, inflight in moments) >= KILLS - 1, moments
        same = await compare(files, ids, [engine.url])
        assert (same.compared, same.identical) == (len(ids), len(ids)), same.different
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        work.close()
        await asyncio.to_thread(engine.stop)
