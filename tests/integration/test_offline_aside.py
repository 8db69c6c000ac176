"""One batch whose files cannot be used, or whose disk is full, waits alone: the others of its model go on."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from hybridsched.batches.errors import BatchFileError, DiskFullError
from hybridsched.batches.files import Disk
from hybridsched.batches.work import WorkFolder
from hybridsched.cli.main import cli
from hybridsched.core.values import GateState
from hybridsched.store.batch_values import BatchInfo, BatchStatus
from hybridsched.store.batches import BatchStore
from hybridsched.workers import offline_folders
from hybridsched.workers.offline import PIPELINE, OfflineWorker
from hybridsched.workers.offline_submit import submit_file
from tests.helpers import await_until
from tests.integration.offline_rig import LANE, MODEL, POOL, answers, door, publish_policy, simulated_engine

LINES = 30


class Trouble:
    """What keeps the bad batches from their files."""

    on = True


class FullDisk(Disk):
    """Files can be made, and nothing can be written to them: a disk whose last blocks are gone."""

    def write(self, fd: int, data: bytes, path: Path) -> None:
        if Trouble.on:
            raise DiskFullError(f"cannot write {path}: No space left on device")
        super().write(fd, data, path)


class FullAtTheEnd(Disk):
    """Only flushing fails, as a quota that is found exceeded late."""

    def fsync(self, fd: int, path: Path) -> None:
        if Trouble.on:
            raise DiskFullError(f"cannot flush {path}: Disk quota exceeded")
        super().fsync(fd, path)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    with simulated_engine(tmp_path, speed=50.0) as url:
        yield url


def write(path: Path) -> None:
    with path.open("w") as file:
        for i in range(LINES):
            body = {"model": MODEL, "prompt": [i + 1, 2, 3], "max_tokens": 5, "ignore_eos": True}
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def submit_in(store: BatchStore, folder: Path) -> str:
    folder.mkdir()
    write(folder / "in.jsonl")
    return submit_file(store, folder / "in.jsonl", model=MODEL).batch.id


def complete(folder: Path) -> bool:
    found = answers(folder / "in.output.jsonl", folder / "in.errors.jsonl")
    return len(found) == LINES and all(isinstance(value, tuple) for value in found.values())


@pytest.mark.parametrize(
    ("kind", "code", "named"),
    [
        ("gone", "files_unusable", "Stale file handle"),
        ("full", "disk_full", "No space left on device"),
        ("late", "disk_full", "Disk quota exceeded"),
    ],
)
async def test_bad_batches_wait_alone_and_complete_once_they_can(
    tmp_path: Path,
    engine: str,
    valkey: redis.Redis,
    valkey_url: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    code: str,
    named: str,
) -> None:
    monkeypatch.setattr(Trouble, "on", True)
    real = offline_folders._open

    def opened(batch: BatchInfo) -> WorkFolder:
        bad = "/bad-" in batch.work
        if bad and kind == "gone" and Trouble.on:
            raise BatchFileError(f"{batch.work}: Stale file handle")
        work = real(batch)
        if bad and kind != "gone":
            work.disk = FullDisk() if kind == "full" else FullAtTheEnd()
        return work

    monkeypatch.setattr(offline_folders, "_open", opened)
    monkeypatch.setattr("hybridsched.workers.offline_aside.BACK_OFF_S", (0.5, 2.0))
    await publish_policy(valkey_url)
    store = BatchStore(valkey, POOL)
    # More bad batches than a lane takes at once, each submitted before the good one.
    bad = {f"bad-{i}": submit_in(store, tmp_path / f"bad-{i}") for i in range(PIPELINE + 2)}
    stop = asyncio.Event()
    worker = OfflineWorker(
        redis_url=valkey_url, pool=POOL, lane=LANE, replica=LANE, model=MODEL, engine_url=engine, speed=50
    )

    def status(batch_id: str) -> BatchStatus:
        return store.get(batch_id).status

    def is_complete(batch_id: str) -> bool:
        return status(batch_id) is BatchStatus.COMPLETED

    async with door(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        running = asyncio.create_task(worker.run(stop))
        await await_until(
            lambda: asyncio.to_thread(lambda: all(store.get(b).wait_code == code for b in bad.values())),
            timeout_s=60,
            what="the reason in the store",
        )
        for round_ in range(2):
            good = submit_in(store, tmp_path / f"good-{round_}")
            await await_until(
                functools.partial(asyncio.to_thread, is_complete, good),
                timeout_s=60,
                what="the end of a good batch beside bad ones",
            )
            assert complete(tmp_path / f"good-{round_}")
        assert not any(status(batch_id).ended for batch_id in bad.values())
        first = bad["bad-0"]
        shown = await asyncio.to_thread(
            CliRunner().invoke, cli, ["batch", "status", first, "--redis", valkey_url, "--pool", POOL]
        )
        assert f"waits     {code}: " in shown.output
        assert named in shown.output
        assert str(tmp_path / "bad-0") in shown.output

        Trouble.on = False
        await await_until(
            lambda: asyncio.to_thread(
                lambda: all(status(batch_id) is BatchStatus.COMPLETED for batch_id in bad.values())
            ),
            timeout_s=90,
            what="the end of the bad batches once they can be written",
        )
        stop.set()
        await running
    for name in bad:
        assert complete(tmp_path / name)
    assert store.get(first).wait_code == ""
