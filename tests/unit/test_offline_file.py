"""`batch run` at an engine that is there and cannot be used: it says so and keeps its place."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hybridsched.batches.assemble import Progress
from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.work import WorkFolder
from hybridsched.core.policy import OfflinePolicy, PolicyKind, PoolPolicy
from hybridsched.engines.protocol import Completion, EngineError
from hybridsched.workers.offline_engine import LaneEngine
from hybridsched.workers.offline_file import FileRun, Routes
from tests.unit.line_machine import FAST
from tests.unit.step_engine import StepEngine

POLICY = PoolPolicy(
    name="local", kind=PolicyKind.UNPROTECTED, offline=OfflinePolicy(slots_for_online=0, slice_tokens=0)
)
LINES = 12


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    with path.open("w") as file:
        for i in range(LINES):
            body = {"model": "m", "prompt": [i + 1, 2, 3], "max_tokens": 3}
            line = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return path


async def run(source: Path, engine: StepEngine) -> Progress:
    first = plan_files(source, "run")
    work = WorkFolder.create(plan_files(source, local_batch_id(first.output)))
    lane = LaneEngine(engine, engine, POLICY, likely="m", settings=FAST, check_s=0.01)
    tasks = [asyncio.create_task(lane.watch.run()), asyncio.create_task(engine.run())]
    try:
        routes = Routes([lane], [frozenset({"m"})])
        return await FileRun(work, routes, POLICY, asyncio.Event(), lambda state: None).run()
    finally:
        await lane.executor.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        work.close()


async def test_an_engine_that_answers_nonsense_ends_the_run_with_its_place_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridsched.workers.offline_file.ENGINE_PATIENCE_S", 0.0)
    engine, good = StepEngine(), 5
    calls = 0

    def fault(path: str, body: dict[str, object]) -> Completion | None:
        nonlocal calls
        calls += 1
        if calls > good:
            raise EngineError("it gave a page", code="engine_bad_answer", retryable=True, status=200)
        return None

    engine.fault = fault
    with pytest.raises(EngineError, match="the same command goes on from here") as ended:
        await run(source, engine)
    assert ended.value.code == "engine_bad_answer"

    whole = StepEngine()
    progress = await run(source, whole)
    assert (progress.done, progress.failed, progress.at_end) == (LINES, 0, True)
    lines_sent = {tuple(body["prompt"]) for _, _, body in whole.sent if len(body["prompt"]) == 3}
    assert len(lines_sent) == LINES - good, "finished lines are not run again"
