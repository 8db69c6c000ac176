"""Long prompts by slices on the simulated engine, and a batch file without a store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.work import WorkFolder
from hybridsched.core.policy import OfflinePolicy, PolicyKind, PoolPolicy
from hybridsched.workers.offline_file import RunState, run_file
from tests.integration.offline_rig import MODEL, answers, simulated_engine, write_batch

SLICE = 256


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    with simulated_engine(tmp_path, speed=5.0) as url:
        yield url


def policy(slice_tokens: int) -> PoolPolicy:
    offline = OfflinePolicy(slots_for_online=0, slice_tokens=slice_tokens, max_inflight=16)
    return PoolPolicy(name="t", kind=PolicyKind.UNPROTECTED, offline=offline)


def iterations(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines() if text]


async def test_an_iteration_holds_about_one_slice_and_the_engine_does_not_wait(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    with source.open("w") as file:
        for i in range(12):
            body = {"model": MODEL, "prompt": [i * 1000 + k for k in range(1500)], "max_tokens": 60}
            line = {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    output = tmp_path / "out.jsonl"
    with simulated_engine(tmp_path, speed=5.0) as url:
        work = WorkFolder.create(plan_files(source, local_batch_id(output), output=output))
        assert (await run_file(work, [url], policy=policy(SLICE))).at_end
        work.remove()
        await asyncio.sleep(0.5)  # the log is flushed every 0.2 s
    steps = [step for step in iterations(tmp_path / "iterations.jsonl") if step["off"]]
    prefills = [step["poff"] for step in steps if step["poff"]]
    # The first requests find out how long an iteration is; two slices that meet are 2 x 256.
    assert max(prefills) <= 2 * SLICE
    assert sum(tokens <= SLICE for tokens in prefills) >= 0.7 * len(prefills)
    assert sum(prefills) < 12 * 1500 * 1.05, "slices find the ones before them in the prefix cache"
    assert len(prefills) >= 12 * 1500 / SLICE / 2


async def test_a_run_that_was_stopped_goes_on_and_gives_the_same_answers(tmp_path: Path, engine: str) -> None:
    source = tmp_path / "in.jsonl"
    write_batch(source, 60, seed=9)
    plain, output = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    work = WorkFolder.create(plan_files(source, local_batch_id(plain), output=plain))
    assert (await run_file(work, [engine], policy=policy(0))).at_end
    work.remove()

    stops = 0
    while True:
        stop, first = asyncio.Event(), None

        def progress(state: RunState, stop: asyncio.Event = stop, more: bool = stops < 3) -> None:
            nonlocal first
            first = state.done if first is None else first
            if more and state.done > first + 5:
                stop.set()

        work = WorkFolder.create(plan_files(source, local_batch_id(output), output=output))
        ended = await run_file(work, [engine], policy=policy(SLICE), stop=stop, on_progress=progress)
        if ended.at_end:
            work.remove()
            break
        stops += 1
        work.close()
    assert stops > 0
    assert (ended.done, ended.failed) == (59, 1)
    assert answers(output, tmp_path / "out.errors.jsonl") == answers(plain, tmp_path / "plain.errors.jsonl")
