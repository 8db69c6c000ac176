"""Batches whose files are taken away while they run end with the reason, and the same command goes on."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import ChunkSpan
from hybridsched.batches.errors import OutputChangedError
from hybridsched.batches.verify import check_files
from hybridsched.cli.batch_view import describe
from hybridsched.store.batch_values import BatchInfo, BatchStatus, ClaimedChunk
from hybridsched.store.batches import BatchStore
from hybridsched.workers.offline_aside import Aside
from hybridsched.workers.offline_feed import ChunkSize, Feeder
from hybridsched.workers.offline_folders import Folders
from hybridsched.workers.offline_submit import submit_file
from tests.batch_kit import read_ids, run_chunk, write_input

LINES = 9
CHUNK = 3


class Pool:
    """A store, a feeder, and a pretend worker that runs chunks when told."""

    def __init__(self, client: redis.Redis, source: Path) -> None:
        self.store = BatchStore(client, "p")
        self.folders = Folders()
        self.source = source
        link: Any = SimpleNamespace(stopping=threading.Event(), fed=threading.Event())
        size = ChunkSize(max_tokens=10**9, max_lines=CHUNK, min_lines=1, ahead=10)
        self.feeder = Feeder(
            self.store,
            client,
            link,
            self.folders,
            Aside(self.store.note_wait),
            model="m",
            size=lambda _: size,
            name="feeder",
        )

    def submit(self) -> BatchInfo:
        return submit_file(self.store, self.source).batch

    def run(self, batch: BatchInfo, number: int, *, assemble: bool = True) -> None:
        """Run a chunk if it is there to be taken."""
        claimed = self.store.claim_chunk(batch.id, number, owner="w", lease_ms=10_000)
        if not isinstance(claimed, ClaimedChunk):
            return
        one = claimed.chunk
        span = ChunkSpan(one.start, one.end, one.first_line, one.lines, one.tokens, one.next_line, one.at_end)
        work = self.folders.get(batch)
        run_chunk(work, number, claimed.fence, span)
        if assemble:
            Assembler(work).advance()
        self.store.complete_chunk(batch.id, number, claimed.fence, done=one.lines, failed=0)

    def run_all(self, batch: BatchInfo, *, assemble: bool = True) -> None:
        for number in range(self.store.get(batch.id).next_chunk):
            self.run(batch, number, assemble=assemble)

    def failed(self, batch: BatchInfo) -> str:
        """Why it has failed."""
        found = self.store.get(batch.id)
        assert found.status is BatchStatus.FAILED
        assert found.message in describe(self.store.progress(batch.id))
        return found.message

    def finish(self) -> BatchInfo:
        """Submit again, run all, end."""
        batch = self.submit()
        self.feeder.cycle()
        self.run_all(batch)
        self.feeder.cycle()
        assert self.store.get(batch.id).status is BatchStatus.COMPLETED
        found = check_files(self.source, batch.output, batch.errors)
        assert found.exact
        assert found.done == LINES
        return batch


@pytest.fixture
def pool(valkey: redis.Redis, tmp_path: Path) -> Pool:
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "neighbour").touch()  # so that the folder around is seen to be more than a mount point
    write_input(folder / "in.jsonl", LINES)
    return Pool(valkey, folder / "in.jsonl")


def test_a_batch_whose_state_is_removed_ends_and_goes_on_from_its_output(pool: Pool) -> None:
    batch = pool.submit()
    pool.feeder.cycle()
    pool.run(batch, 0)
    before = Path(batch.output).read_bytes()
    (Path(batch.work) / "state.json").unlink()
    with pytest.raises(OutputChangedError):
        pool.run(batch, 1)
    pool.store.cancel(batch.id)  # anything that makes a worker look
    pool.store.release_chunk(batch.id, 1, 2)
    pool.feeder.cycle()
    assert "state.json is gone" in pool.failed(batch)
    assert Path(batch.output).read_bytes() == before
    assert pool.finish().id == batch.id
    assert Path(batch.output).read_bytes().startswith(before)


def test_a_batch_whose_finished_journal_is_cut_ends_and_only_what_is_lost_runs_again(pool: Pool) -> None:
    batch = pool.submit()
    pool.feeder.cycle()
    pool.run_all(batch, assemble=False)
    journals = sorted(Path(batch.work).glob("chunk-*.jsonl"))
    data = journals[1].read_bytes()
    journals[1].write_bytes(data[: len(data) // 2])
    kept = {text for path in journals for text in path.read_bytes().splitlines() if text.endswith(b"}")}
    pool.feeder.cycle()
    assert "journal of line" in pool.failed(batch)
    assert len(read_ids(batch.output)) == CHUNK
    again = pool.submit()
    recovered = set((Path(again.work) / "recovered.jsonl").read_bytes().splitlines())
    assert len(recovered & kept) >= CHUNK + 1
    pool.finish()


@pytest.mark.parametrize(
    ("remove", "text"),
    [
        (lambda batch: shutil.rmtree(batch.work), "is gone"),
        (lambda batch: shutil.rmtree(Path(batch.work).parent), "is gone"),
        (lambda batch: Path(batch.output).unlink(), "is gone"),
        (lambda batch: (Path(batch.work) / "manifest.json").unlink(), "manifest is gone"),
        (lambda batch: (Path(batch.work) / "manifest.json").write_text("{"), "is damaged"),
        (lambda batch: (Path(batch.work) / "state.json").write_text("{"), "is damaged"),
        (lambda batch: os.truncate(batch.output, 5), "somebody has changed it"),
    ],
)
@pytest.mark.parametrize("known", [False, True], ids=["a new worker", "the worker that had it open"])
def test_what_is_taken_away_ends_the_batch_with_the_reason(
    pool: Pool, remove: Callable[[BatchInfo], object], text: str, known: bool
) -> None:
    batch = pool.submit()
    pool.feeder.cycle()
    pool.run(batch, 0)
    pool.run(batch, 1, assemble=False)
    pool.run(batch, 2, assemble=False)
    if not known:
        pool.folders.forget(batch.id)
    remove(batch)
    pool.feeder.cycle()
    found = pool.store.get(batch.id)
    if known and found.status is BatchStatus.COMPLETED:
        assert check_files(pool.source, batch.output, batch.errors).exact  # the manifest was read before
    else:
        assert text in pool.failed(batch)


@pytest.mark.skipif(os.geteuid() != 0, reason="a folder of a user's own is no mount point")
def test_a_folder_that_this_machine_may_not_see_is_only_noted(pool: Pool, tmp_path: Path) -> None:
    batch = pool.submit()
    pool.folders.forget(batch.id)
    (tmp_path / "neighbour").unlink()
    pool.source.parent.rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")  # an empty mount point is left
    pool.feeder.cycle()
    found = pool.store.get(batch.id)
    assert found.status is BatchStatus.VALIDATING
    assert found.wait_code == "files_unusable"
    assert "no batch is there" in found.wait_message
    assert "waits     files_unusable: " in describe(pool.store.progress(batch.id))


def test_a_touched_input_goes_on_and_a_changed_one_ends_the_batch(pool: Pool) -> None:
    batch = pool.submit()
    pool.feeder.cycle()
    pool.run(batch, 0)
    os.utime(pool.source, ns=(1, 1))
    pool.run(batch, 1)
    data = pool.source.read_bytes()
    pool.source.write_bytes(data.replace(b'"id-8"', b'"id-X"'))
    pool.folders.forget(batch.id)
    pool.store.cancel(batch.id)
    pool.feeder.cycle()
    assert "content is another" in pool.failed(batch)
    assert len(read_ids(batch.output)) == 2 * CHUNK
    pool.source.write_bytes(data)
    pool.finish()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for others")
def test_a_worker_of_root_runs_another_users_batch_with_that_users_rights(pool: Pool) -> None:
    batch = pool.submit()
    pool.folders.forget(batch.id)
    folder = pool.source.parent
    for one in (folder, *folder.parents):
        if one.stat().st_uid == 0 and one not in (Path("/"), Path("/tmp")):
            one.chmod(one.stat().st_mode | 0o055)
    manifest = Path(batch.work) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"uid":0', b'"uid":1001'))
    for one in (folder, *folder.rglob("*")):
        os.chown(one, 1001, 1001, follow_symlinks=False)
    pool.feeder.cycle()
    pool.run_all(batch)
    pool.feeder.cycle()
    assert pool.store.get(batch.id).status is BatchStatus.COMPLETED
    assert check_files(pool.source, batch.output, batch.errors).exact
    assert {path.stat().st_uid for path in folder.iterdir()} == {1001}
    assert not list(folder.glob(".hybridsched-*"))
