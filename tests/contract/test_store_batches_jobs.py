"""Batches that only Slurm jobs of their user run: no pool worker plans, takes or ends them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import redis

from hybridsched.store.batch_values import BatchUnknownError
from hybridsched.store.batches import BatchStore
from tests.contract.test_store_batches_ledger import claim, new, plan


@dataclass
class Takes:
    store: BatchStore
    only: str | None

    def all(self) -> list[tuple[str, int]]:
        got: list[tuple[str, int]] = []
        worker = self.store.worker("m", lambda *job: got.append(job), name="w", only=self.only)
        while worker.take():
            pass
        worker.close()
        return got


@pytest.fixture
def store(valkey: redis.Redis) -> BatchStore:
    return BatchStore(valkey, "p")


def test_the_pool_leaves_it_alone_and_its_job_finds_nothing_else(store: BatchStore) -> None:
    store.submit(new(jobs_only=True))
    store.submit(new("batch_b"))
    assert [batch.id for batch in store.active("m")] == ["batch_b"]
    assert [batch.id for batch in store.to_feed("m", 4)] == ["batch_b"]
    assert [batch.id for batch in store.to_feed("other", 4, only="batch_a")] == ["batch_a"]
    assert [batch.id for batch in store.active(only="batch_a")] == ["batch_a"]
    assert {batch.id for batch in store.active(any_model=True)} == {"batch_a", "batch_b"}
    plan(store, store.get("batch_a"))
    plan(store, store.get("batch_b"))
    assert Takes(store, None).all() == [("batch_b", 0)]
    assert Takes(store, "batch_a").all() == [("batch_a", 0)]


def test_a_released_or_lost_chunk_comes_back_in_its_own_queue(store: BatchStore) -> None:
    plan(store, store.submit(new(jobs_only=True)), upto=1000)
    assert Takes(store, "batch_a").all() == [("batch_a", 0)]
    store.release_chunk("batch_a", 0, claim(store, 0).fence)
    assert Takes(store, None).all() == []
    assert Takes(store, "batch_a").all() == [("batch_a", 0)]
    assert store.sweep("m", lost_after_ms=0, now=True).requeued == (("batch_a", 0),)
    assert Takes(store, "batch_a").all() == [("batch_a", 0)]


def test_it_is_ended_by_its_job_alone(store: BatchStore) -> None:
    store.submit(new(jobs_only=True))
    store.cancel("batch_a")
    assert store.to_finalize("m") == []
    assert [batch.id for batch in store.to_finalize("m", only="batch_a")] == ["batch_a"]


def test_a_batch_of_the_pool_is_taken_over_with_its_queued_chunks(store: BatchStore) -> None:
    plan(store, store.submit(new()))
    assert store.leave_to_jobs("batch_a").jobs_only
    store.sweep("m", lost_after_ms=0, now=True)
    assert ("batch_a", 0) in Takes(store, "batch_a").all()
    with pytest.raises(BatchUnknownError):
        store.leave_to_jobs("batch_x")
