"""`batch run`: on a full disk it waits where it is; of several engines each line goes to its model's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hybridsched.batches.errors import DiskFullError
from hybridsched.batches.files import Disk
from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.verify import check_files
from hybridsched.batches.work import WorkFolder
from hybridsched.workers.offline_file import run_file
from tests.helpers import await_until
from tests.integration.offline_rig import simulated_engine, write_batch

LINES = 40


class FillingDisk(Disk):
    """Full for files whose name begins so, after half of a write; until it is freed."""

    def __init__(self) -> None:
        self.full_for = ""
        self.refused = 0

    def write(self, fd: int, data: bytes, path: Path) -> None:
        if self.full_for and path.name.startswith(self.full_for):
            super().write(fd, data[: len(data) // 2], path)
            self.refused += 1
            raise DiskFullError(f"cannot write {path}: No space left on device")
        super().write(fd, data, path)


@pytest.mark.parametrize("where", ["chunk-", "state.json", "in.output", "recovered"])
async def test_a_full_disk_is_waited_for(
    tmp_path: Path, engine: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "in.jsonl"
    write_batch(source, LINES)
    disk = FillingDisk()
    output = tmp_path / "in.output.jsonl"
    work = WorkFolder.create(plan_files(source, local_batch_id(output)), disk=disk)
    if where == "recovered":  # a run that was stopped in the middle, and is started again on a full disk
        stop = asyncio.Event()
        stopped = asyncio.create_task(
            run_file(work, [engine], stop=stop, on_progress=lambda state: stop.set() if state.done else None)
        )
        await stopped
        work.close()
        work = WorkFolder.create(plan_files(source, local_batch_id(output)), disk=disk)
    disk.full_for = where
    running = asyncio.create_task(run_file(work, [engine]))
    await await_until(lambda: asyncio.sleep(0, disk.refused > 1), timeout_s=30, what="two refusals")
    assert not running.done()
    disk.full_for = ""
    async with asyncio.timeout(60):
        progress = await running
    assert progress.at_end
    work.remove()
    found = check_files(source, output, tmp_path / "in.errors.jsonl")
    assert found.exact
    assert found.lines == LINES


async def test_lines_of_two_models_go_to_the_engines_that_serve_them(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    source = tmp_path / "in.jsonl"
    names = [("tiny", "other", "nobody")[i % 3] for i in range(30)]
    with source.open("w") as file:
        for number, model in enumerate(names):
            body = {"model": model, "prompt": [5] * (10 + number), "max_tokens": 8, "ignore_eos": True}
            file.write(
                json.dumps(
                    {"custom_id": f"l{number}", "method": "POST", "url": "/v1/completions", "body": body}
                )
                + "\n"
            )
    output = tmp_path / "in.output.jsonl"
    with (
        simulated_engine(tmp_path) as tiny,
        simulated_engine(tmp_path / "b", model="other") as other,
        simulated_engine(tmp_path, model="other") as third,
    ):
        work = WorkFolder.create(plan_files(source, local_batch_id(output)))
        assert (await run_file(work, [tiny, other, third])).at_end
        work.close()
    done = [json.loads(text) for text in output.read_text().splitlines()]
    assert [row["custom_id"] for row in done] == [f"l{i}" for i, name in enumerate(names) if name != "nobody"]
    assert {row["response"]["body"]["model"] for row in done} == {"tiny", "other"}
    failed = [json.loads(text) for text in (tmp_path / "in.errors.jsonl").read_text().splitlines()]
    assert {row["error"]["code"] for row in failed} == {"NotFoundError"}
    assert len(failed) == 10
