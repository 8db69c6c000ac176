"""Chunks as RQ jobs on a real Valkey: delivery, loss, duplicates, and jobs that somebody else put there."""

from __future__ import annotations

import pickle
import threading
import zlib
from pathlib import Path

import pytest
import redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from hybridsched.store.batch_values import ClaimedChunk, ClaimRefused
from hybridsched.store.batches import BatchStore
from hybridsched.store.rq_chunks import FUNCTION, ChunkJob, ChunkWorker, RefusedJobError
from tests.contract.test_store_batches_ledger import LEASE, claim, new, plan, server_ms
from tests.helpers import wait_until

QUEUE = "hs:{p}:model:m"
FORGED = "batch_x-c0-0123abcd"
"""An id as ours have, so that the hash behind it is looked at."""


class Rig:
    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.store = BatchStore(client, "p")
        self.got: list[tuple[str, int]] = []
        self.worker: ChunkWorker = self.store.worker("m", lambda *job: self.got.append(job), name="w")

    def drain(self) -> list[tuple[str, int]]:
        self.got.clear()
        while self.worker.take():
            pass
        return self.got


@pytest.fixture
def rig(valkey: redis.Redis) -> Rig:
    return Rig(valkey)


def test_planned_chunks_come_in_order_and_leave_nothing_behind(rig: Rig) -> None:
    batch = rig.store.submit(new())
    for _ in range(3):
        plan(rig.store, batch)
        batch = rig.store.get("batch_a")
    assert rig.drain() == [("batch_a", 0), ("batch_a", 1), ("batch_a", 2)]
    rig.worker.close()
    left = [key for key in rig.client.scan_iter("rq:*") if key not in (b"rq:queues",)]
    left = [key for key in left if not key.startswith(b"rq:worker:")]
    assert left == []


def test_an_empty_queue(rig: Rig) -> None:
    assert rig.worker.take() is False
    assert rig.worker.take(1) is False
    with pytest.raises(ValueError, match="timeout_s"):
        rig.worker.take(0)


def test_a_waiting_worker_in_a_thread_of_its_own_is_woken(rig: Rig) -> None:
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(rig.worker.take(5)))
    thread.start()
    plan(rig.store, rig.store.submit(new()))
    thread.join()
    assert outcome == [True]
    assert rig.got == [("batch_a", 0)]


def test_both_queues_are_served_in_turn(rig: Rig) -> None:
    mine = rig.store.submit(new("batch_m"))
    anyones = rig.store.submit(new("batch_any", model=None))
    for _ in range(2):
        plan(rig.store, mine)
        plan(rig.store, anyones)
        mine, anyones = rig.store.get("batch_m"), rig.store.get("batch_any")
    plan(rig.store, rig.store.submit(new("batch_x", model="x")))
    assert sorted(rig.drain()[:2]) == [("batch_any", 0), ("batch_m", 0)]
    assert len(rig.got) == 4


def test_a_released_chunk_is_the_next_to_come(rig: Rig) -> None:
    batch = rig.store.submit(new())
    for _ in range(3):
        plan(rig.store, batch)
        batch = rig.store.get("batch_a")
    assert rig.worker.take()
    held = claim(rig.store, 0)
    assert rig.store.release_chunk("batch_a", 0, held.fence)
    assert rig.drain() == [("batch_a", 0), ("batch_a", 1), ("batch_a", 2)]


def test_a_released_chunk_of_a_cancelled_batch_does_not_come_again(rig: Rig) -> None:
    plan(rig.store, rig.store.submit(new()))
    rig.drain()
    held = claim(rig.store, 0)
    rig.store.cancel("batch_a")
    assert rig.store.release_chunk("batch_a", 0, held.fence)
    assert rig.drain() == []


def test_a_dead_workers_chunk_comes_again_in_front(rig: Rig) -> None:
    batch = rig.store.submit(new())
    plan(rig.store, batch)
    plan(rig.store, rig.store.get("batch_a"))
    assert rig.worker.take()
    held = claim(rig.store, 0, lease_ms=1)
    wait_until(lambda: server_ms(rig.store) > held.chunk.lease_ms)
    assert rig.store.sweep("m", now=True).reclaimed == (("batch_a", 0),)
    assert rig.store.sweep("m", now=True).reclaimed == ()
    assert rig.drain() == [("batch_a", 0), ("batch_a", 1)]


def test_a_flushed_queue_is_filled_again_from_the_ledger(rig: Rig) -> None:
    batch = rig.store.submit(new())
    for _ in range(3):
        plan(rig.store, batch)
        batch = rig.store.get("batch_a")
    assert rig.worker.take()
    claim(rig.store, 0)
    for key in list(rig.client.scan_iter("rq:*")):
        rig.client.delete(key)
    swept = rig.store.sweep("m", lost_after_ms=0, now=True)
    assert swept.requeued == (("batch_a", 1), ("batch_a", 2))
    assert rig.store.sweep("m", lost_after_ms=0, now=True).requeued == ()
    assert rig.drain() == [("batch_a", 1), ("batch_a", 2)]


def test_a_chunk_that_waits_in_the_queue_is_not_doubled(rig: Rig) -> None:
    plan(rig.store, rig.store.submit(new()))
    for _ in range(3):
        assert rig.store.sweep("m", lost_after_ms=0, now=True).requeued == ()
    assert rig.drain() == [("batch_a", 0)]


def test_a_duplicate_job_is_refused_by_the_lease(rig: Rig) -> None:
    batch = rig.store.submit(new())
    plan(rig.store, batch)
    rig.store._queue_of(batch, 0).put("batch_a", 0)
    assert rig.drain() == [("batch_a", 0), ("batch_a", 0)]
    taken = [rig.store.claim_chunk("batch_a", 0, owner="w", lease_ms=LEASE) for _ in range(2)]
    assert isinstance(taken[0], ClaimedChunk)
    assert isinstance(taken[1], ClaimRefused)


def test_sweeps_of_many_workers_are_few(rig: Rig) -> None:
    plan(rig.store, rig.store.submit(new()))
    for key in list(rig.client.scan_iter("rq:*")):
        rig.client.delete(key)
    assert len(rig.store.sweep("m", lost_after_ms=0).requeued) == 1
    for key in list(rig.client.scan_iter("rq:*")):
        rig.client.delete(key)
    assert rig.store.sweep("m", lost_after_ms=0).requeued == ()


def test_an_exception_in_the_function_does_not_stop_the_worker(rig: Rig) -> None:
    def fail(batch_id: str, number: int) -> None:
        raise RuntimeError("boom")

    worker = rig.store.worker("m", fail, name="bad")
    plan(rig.store, rig.store.submit(new()))
    assert worker.take()
    assert worker.take() is False


# jobs that are not ours


def evil(path: str) -> None:
    Path(path).write_text("run")


def put_raw(client: redis.Redis, job_id: str, fields: dict[str, bytes | str]) -> None:
    client.hset(f"rq:job:{job_id}", mapping=fields)  # type: ignore[arg-type]
    client.rpush(f"rq:queue:{QUEUE}", job_id)


def data(*parts: object) -> bytes:
    return zlib.compress(JSONSerializer.dumps(parts))


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (evil, (self.path,))


GOOD = (FUNCTION, None, ["batch_a", 0], {})


def forged(path: str) -> dict[str, dict[str, bytes | str]]:
    """Hashes that would run code, fetch a URL or break a plain RQ worker."""
    name = f"{evil.__module__}.evil"
    return {
        "function": {"data": data(name, None, [path], {})},
        "shell": {"data": data("os.system", None, [f"touch {path}"], {})},
        "instance": {"data": data(FUNCTION, "x", ["batch_a", 0], {})},
        "kwargs": {"data": data(FUNCTION, None, ["batch_a", 0], {"path": path})},
        "args": {"data": data(FUNCTION, None, [path], {})},
        "path": {"data": data(FUNCTION, None, ["../../etc", 0], {})},
        "negative": {"data": data(FUNCTION, None, ["batch_a", -1], {})},
        "pickle": {"data": zlib.compress(pickle.dumps((FUNCTION, None, (Bomb(path),), {})))},
        "result": {"data": data(*GOOD), "meta": pickle.dumps(Bomb(path)), "success_callback_name": "x.y"},
        "success": {"data": data(*GOOD), "success_callback_name": name},
        "failure": {"data": data(*GOOD), "failure_callback_name": name},
        "stopped": {"data": data(*GOOD), "stopped_callback_name": name},
        "webhook": {
            "data": data(*GOOD),
            "webhooks": '[{"url": "http://127.0.0.1:9/", "job_status": "finished"}]',
        },
        "repeat": {"data": data(*GOOD), "repeats_left": "3"},
        "dependency": {"data": data(*GOOD), "dependency_ids": '["x"]'},
        "no-data": {"origin": QUEUE},
        "no-json": {"data": b"\xff\xfe"},
        "bad-date": {"data": data(*GOOD), "created_at": "yesterday"},
        "bad-status": {"data": data(*GOOD), "status": "dancing"},
    }


@pytest.mark.parametrize("kind", sorted(forged("")))
def test_a_forged_job_is_dropped_and_the_next_one_runs(rig: Rig, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "evil"
    put_raw(rig.client, FORGED, forged(str(target))[kind])
    plan(rig.store, rig.store.submit(new()))
    assert rig.drain() == [("batch_a", 0)]
    assert not target.exists()


def test_a_job_whose_hash_is_of_another_type_is_dropped(rig: Rig) -> None:
    rig.client.set(f"rq:job:{FORGED}", "text")
    rig.client.rpush(f"rq:queue:{QUEUE}", FORGED)
    plan(rig.store, rig.store.submit(new()))
    assert rig.drain() == [("batch_a", 0)]


@pytest.mark.parametrize(
    "entry",
    ["bad id 1!", "", "x" * 5000, "batch_a-c0", "batch_a-c99999999999999999999-0123abcd", b"\xff\x00", "a:b"],
)
def test_an_entry_that_is_no_job_of_ours_is_dropped_and_the_next_one_runs(
    rig: Rig, entry: str | bytes
) -> None:
    plan(rig.store, rig.store.submit(new()))
    rig.client.lpush(f"rq:queue:{QUEUE}", *[entry] * 8)
    assert rig.drain() == [("batch_a", 0)]


def test_a_job_of_another_program_that_stands_in_our_queue_keeps_its_hash(rig: Rig) -> None:
    other = Queue("theirs", connection=rig.client, serializer=JSONSerializer).enqueue("their.function")
    rig.client.rpush(f"rq:queue:{QUEUE}", other.id)
    assert rig.drain() == []
    assert rig.client.exists(f"rq:job:{other.id}")


def test_jobs_made_with_plain_rq_are_dropped(rig: Rig, tmp_path: Path) -> None:
    target = tmp_path / "evil"
    Queue(QUEUE, connection=rig.client).enqueue(evil, str(target))
    Queue(QUEUE, connection=rig.client, serializer=JSONSerializer).enqueue(evil, str(target))
    assert rig.drain() == []
    assert not target.exists()


def test_the_same_job_would_have_run_under_plain_rq(rig: Rig, tmp_path: Path) -> None:
    target = tmp_path / "evil"
    put_raw(rig.client, "forged", forged(str(target))["function"])
    job = Job.fetch("forged", connection=rig.client, serializer=JSONSerializer)
    job.perform()
    assert target.read_text() == "run"


def test_a_process_without_a_runner_runs_nothing(rig: Rig) -> None:
    plan(rig.store, rig.store.submit(new()))
    (job_id,) = (key.decode().removeprefix("rq:job:") for key in rig.client.scan_iter("rq:job:*"))
    job = ChunkJob.fetch(job_id, connection=rig.client, serializer=JSONSerializer)
    with pytest.raises(RefusedJobError):
        job.perform()
