"""The batch ledger on a real Valkey: statuses, chunks, leases, fences, races, ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import redis

from hybridsched.batches.progress import Progress
from hybridsched.store.batch_values import (
    TRANSITIONS,
    BatchInfo,
    BatchStateError,
    BatchStatus,
    BatchUnknownError,
    ClaimedChunk,
    ClaimRefused,
    NewBatch,
)
from hybridsched.store.batches import BatchStore, new_batch_id
from tests.helpers import wait_until

SIZE = 1000
LEASE = 60_000.0


def new(batch_id: str = "batch_a", **fields: object) -> NewBatch:
    given: dict[str, object] = {
        "id": batch_id,
        "user": "ada",
        "uid": 1000,
        "model": "m",
        "input": "/i",
        "output": "/o",
        "errors": "/e",
        "work": "/w",
        "bytes": SIZE,
        "lines": 10,
    }
    return NewBatch(**(given | fields))  # type: ignore[arg-type]


def plan(store: BatchStore, batch: BatchInfo, *, upto: int = 0, ahead: int = 4) -> int | None:
    end = upto or batch.cursor + 100
    return store.plan_chunk(
        batch,
        end=end,
        first_line=batch.cursor_line,
        lines=1,
        tokens=7,
        next_line=batch.cursor_line + 1,
        at_end=end >= SIZE,
        ahead=ahead,
    )


def claim(store: BatchStore, number: int, batch_id: str = "batch_a", lease_ms: float = LEASE) -> ClaimedChunk:
    claimed = store.claim_chunk(batch_id, number, owner="w", lease_ms=lease_ms)
    assert isinstance(claimed, ClaimedChunk), claimed
    return claimed


def refusal(store: BatchStore, number: int, batch_id: str = "batch_a") -> str:
    refused = store.claim_chunk(batch_id, number, owner="other", lease_ms=LEASE)
    assert isinstance(refused, ClaimRefused), refused
    return refused.reason


@pytest.fixture
def store(valkey: redis.Redis) -> BatchStore:
    return BatchStore(valkey, "p")


def test_lines_of_a_chunk_that_was_given_back_still_count(store: BatchStore) -> None:
    """`batch status` went back to 0 at each pause of a short batch, as if its lines were lost."""
    batch = store.submit(new())
    plan(store, batch)

    def counts() -> tuple[int, int, int]:
        seen = store.progress("batch_a")
        return seen.done, seen.failed, seen.running_chunks

    first = claim(store, 0)
    assert store.heartbeat_chunk("batch_a", 0, first.fence, lease_ms=LEASE, done=3, failed=1).ok
    store.release_chunk("batch_a", 0, first.fence, done=4, failed=1)
    assert counts() == (4, 1, 0)
    second = claim(store, 0)
    assert counts() == (4, 1, 1), "its journal has them, whoever holds it"
    store.release_chunk("batch_a", 0, second.fence)
    assert counts() == (4, 1, 0), "it never read the journal"
    third = claim(store, 0)
    assert store.complete_chunk("batch_a", 0, third.fence, done=5, failed=1)
    assert counts() == (5, 1, 0)


def test_a_batch_from_submission_to_its_end(store: BatchStore) -> None:
    batch = store.submit(new())
    assert batch.status is BatchStatus.VALIDATING
    assert batch.started_ms is None
    assert plan(store, batch) == 0
    batch = store.get("batch_a")
    assert (batch.status, batch.cursor, batch.cursor_line) == (BatchStatus.IN_PROGRESS, 100, 2)
    assert batch.started_ms is not None
    assert plan(store, batch, upto=SIZE) == 1
    assert store.get("batch_a").at_end
    first = claim(store, 0)
    assert (first.chunk.start, first.chunk.end, first.chunk.first_line) == (0, 100, 1)
    assert refusal(store, 0) == "taken"
    assert store.heartbeat_chunk("batch_a", 0, first.fence, lease_ms=LEASE, done=3, failed=1).ok
    progress = store.progress("batch_a")
    assert (progress.done, progress.failed) == (3, 1)
    assert (progress.running_chunks, progress.queued_chunks) == (1, 1)
    assert store.complete_chunk("batch_a", 0, first.fence, done=5, failed=1, output_tokens=40)
    assert not store.complete_chunk("batch_a", 0, first.fence, done=5, failed=1)
    assert refusal(store, 0) == "done"
    assert store.claim_finalize("batch_a", lease_ms=LEASE) is None
    second = claim(store, 1)
    assert store.complete_chunk("batch_a", 1, second.fence, done=4, failed=0)
    store.mark_assembled("batch_a", Progress(next_chunk=2).holds)
    assert refusal(store, 1) == "unknown"
    assert [one.id for one in store.to_finalize("m")] == ["batch_a"]
    fence = store.claim_finalize("batch_a", lease_ms=LEASE)
    assert fence is not None
    assert store.claim_finalize("batch_a", lease_ms=LEASE) is None
    assert store.get("batch_a").status is BatchStatus.FINALIZING
    assert not store.finalized("batch_a", fence + 1, BatchStatus.COMPLETED, done=9, failed=1)
    assert store.finalized("batch_a", fence, BatchStatus.COMPLETED, done=9, failed=1)
    ended = store.get("batch_a")
    assert (ended.status, ended.done, ended.failed, ended.output_tokens) == (BatchStatus.COMPLETED, 9, 1, 40)
    assert ended.finished_ms is not None
    assert store.active("m") == []
    assert [one.id for one in store.all()] == ["batch_a"]


def test_submitting_a_running_batch_again_changes_nothing(store: BatchStore) -> None:
    plan(store, store.submit(new()))
    again = store.submit(new(lines=99))
    assert (again.lines, again.next_chunk) == (10, 1)


def test_an_ended_batch_can_begin_anew_where_it_stopped(store: BatchStore) -> None:
    plan(store, store.submit(new()))
    store.set_status("batch_a", BatchStatus.FAILED, "input changed")
    assert store.get("batch_a").message == "input changed"
    again = store.submit(new(cursor=100, cursor_line=2, next_chunk=1, done=1))
    assert (again.status, again.cursor, again.next_chunk) == (BatchStatus.VALIDATING, 100, 1)
    assert refusal(store, 0) == "unknown"


def test_unknown_ids_name_near_ones(store: BatchStore) -> None:
    store.submit(new("batch_0123456789"))
    with pytest.raises(BatchUnknownError, match="did you mean batch_0123456789"):
        store.get("batch_012345678")
    with pytest.raises(BatchUnknownError, match="batch list"):
        store.get("zzz")
    with pytest.raises(BatchUnknownError):
        store.cancel("batch_012345678")


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "../x", "ü", "a" * 81, "a\n"])
def test_ids_that_could_leave_the_folder_are_refused(store: BatchStore, bad: str) -> None:
    with pytest.raises(ValueError, match="batch id"):
        store.submit(new(bad))


@pytest.mark.parametrize("before", list(BatchStatus))
@pytest.mark.parametrize("after", list(BatchStatus))
def test_only_the_transitions_of_the_table_happen(
    store: BatchStore, valkey: redis.Redis, before: BatchStatus, after: BatchStatus
) -> None:
    store.submit(new())
    valkey.hset(store.keys.batch("batch_a"), "status", before)
    if after in TRANSITIONS[before]:
        assert store.set_status("batch_a", after).status is after
    else:
        with pytest.raises(BatchStateError, match=f"is {before} and cannot become {after}"):
            store.set_status("batch_a", after)
        assert store.get("batch_a").status is before


def test_look_ahead_is_bounded_and_shared_in_turn(store: BatchStore) -> None:
    for name in ("batch_a", "batch_b", "batch_c"):
        store.submit(new(name))
        wait_until(lambda name=name: store.get(name).submitted_ms < server_ms(store))  # type: ignore[misc]
    order = []
    while waiting := store.to_feed("m", 2):
        number = plan(store, waiting[0], ahead=2)
        order.append((waiting[0].id, number))
    assert order == [
        ("batch_a", 0),
        ("batch_b", 0),
        ("batch_c", 0),
        ("batch_a", 1),
        ("batch_b", 1),
        ("batch_c", 1),
    ]
    assert plan(store, store.get("batch_a"), ahead=2) is None
    chunk = claim(store, 0, "batch_b")
    store.complete_chunk("batch_b", 0, chunk.fence, done=1, failed=0)
    assert [one.id for one in store.to_feed("m", 2)] == ["batch_b"]


def server_ms(store: BatchStore) -> float:
    seconds, micros = store._client.time()  # type: ignore[misc]
    return seconds * 1000 + micros / 1000


def test_workers_see_batches_of_their_model_and_of_none(store: BatchStore) -> None:
    store.submit(new("batch_m"))
    store.submit(new("batch_any", model=None))
    store.submit(new("batch_x", model="x"))
    assert {one.id for one in store.to_feed("m", 4)} == {"batch_m", "batch_any"}
    assert {one.id for one in store.active(any_model=True)} == {"batch_m", "batch_any", "batch_x"}


def together(count: int, act: Callable[[int], object]) -> list[object]:
    barrier = threading.Barrier(count)
    results: list[object] = [None] * count

    def run(place: int) -> None:
        barrier.wait()
        results[place] = act(place)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_feeders_in_a_race_never_plan_the_same_lines(store: BatchStore) -> None:
    store.submit(new())

    def feed(_: int) -> list[int]:
        made = []
        while not (batch := store.get("batch_a")).at_end:
            number = plan(store, batch, ahead=100)
            if number is not None:
                made.append(number)
        return made

    made = together(6, feed)
    assert sorted(n for numbers in made for n in numbers) == list(range(10))  # type: ignore[attr-defined]
    spans = [claim(store, number).chunk for number in range(10)]
    assert [(chunk.start, chunk.end) for chunk in spans] == [(i * 100, i * 100 + 100) for i in range(10)]


def test_of_many_claims_one_wins(store: BatchStore) -> None:
    batch = store.submit(new())
    plan(store, batch)
    won = together(8, lambda i: store.claim_chunk("batch_a", 0, owner=f"w{i}", lease_ms=LEASE))
    assert sum(isinstance(one, ClaimedChunk) for one in won) == 1
    assert {one.reason for one in won if isinstance(one, ClaimRefused)} == {"taken"}


def test_a_lost_lease_cannot_acknowledge_renew_or_release(store: BatchStore) -> None:
    plan(store, store.submit(new()))
    stale = claim(store, 0, lease_ms=1)
    wait_until(lambda: server_ms(store) > stale.chunk.lease_ms)
    fresh = claim(store, 0)
    assert fresh.fence > stale.fence
    assert fresh.chunk.attempts == 1
    assert not store.heartbeat_chunk("batch_a", 0, stale.fence, lease_ms=LEASE).ok
    assert not store.complete_chunk("batch_a", 0, stale.fence, done=1, failed=0)
    assert not store.release_chunk("batch_a", 0, stale.fence)
    assert store.get("batch_a").done == 0
    assert store.complete_chunk("batch_a", 0, fresh.fence, done=1, failed=0)


def test_an_expired_lease_that_nobody_took_still_counts(store: BatchStore) -> None:
    plan(store, store.submit(new()))
    held = claim(store, 0, lease_ms=1)
    wait_until(lambda: server_ms(store) > held.chunk.lease_ms)
    assert store.complete_chunk("batch_a", 0, held.fence, done=1, failed=0)


def test_a_chunk_that_is_in_the_output_but_not_acknowledged_is_not_forgotten(store: BatchStore) -> None:
    plan(store, store.submit(new()))
    plan(store, store.get("batch_a"))
    first, second = claim(store, 0), claim(store, 1)
    assert store.complete_chunk("batch_a", 0, first.fence, done=1, failed=0)
    store.mark_assembled("batch_a", Progress(next_chunk=2).holds)  # by another worker: both were sealed
    assert refusal(store, 0) == "unknown"
    assert store.complete_chunk("batch_a", 1, second.fence, done=1, failed=0)
    assert store.get("batch_a").outstanding == 0


def test_workers_on_a_batch_that_fails_learn_to_stop(store: BatchStore) -> None:
    plan(store, store.submit(new()))
    held = claim(store, 0)
    store.set_status("batch_a", BatchStatus.FAILED, "input changed")
    beat = store.heartbeat_chunk("batch_a", 0, held.fence, lease_ms=LEASE)
    assert (beat.ok, beat.stop) == (True, "batch_failed")
    assert store.release_chunk("batch_a", 0, held.fence)
    assert refusal(store, 0) == "stopped"
    assert store.claim_finalize("batch_a", lease_ms=LEASE) is None
    assert store.to_finalize("m") == []


def test_cancel_keeps_what_is_finished(store: BatchStore) -> None:
    batch = store.submit(new())
    plan(store, batch)
    plan(store, store.get("batch_a"))
    held = claim(store, 0)
    assert store.cancel("batch_a").status is BatchStatus.CANCELLING
    assert store.cancel("batch_a").status is BatchStatus.CANCELLING
    assert refusal(store, 1) == "stopped"
    assert plan(store, store.get("batch_a")) is None
    assert store.to_feed("m", 9) == []
    assert store.claim_finalize("batch_a", lease_ms=LEASE) is None, "a worker still holds a chunk"
    beat = store.heartbeat_chunk("batch_a", 0, held.fence, lease_ms=LEASE)
    assert (beat.ok, beat.stop) == (True, "batch_cancelled")
    assert store.complete_chunk("batch_a", 0, held.fence, done=1, failed=0)
    fence = store.claim_finalize("batch_a", lease_ms=LEASE)
    assert fence is not None
    assert store.finalized("batch_a", fence, BatchStatus.CANCELLED, done=1, failed=9)
    with pytest.raises(BatchStateError, match="is cancelled"):
        store.cancel("batch_a")


def test_a_deadline_that_has_passed_ends_the_batch(store: BatchStore) -> None:
    batch = store.submit(new(deadline_in_ms=1))
    assert batch.deadline_ms is not None
    wait_until(lambda: server_ms(store) > (batch.deadline_ms or 0))
    assert store.sweep("m", now=True).expired == ("batch_a",)
    assert store.sweep("m", now=True).expired == ()
    ended = store.get("batch_a")
    assert (ended.status, ended.stop) == (BatchStatus.FINALIZING, "batch_expired")
    assert plan(store, ended) is None
    with pytest.raises(BatchStateError):
        store.cancel("batch_a")
    fence = store.claim_finalize("batch_a", lease_ms=LEASE)
    assert fence is not None
    assert store.finalized("batch_a", fence, BatchStatus.EXPIRED, done=0, failed=10)


def test_the_duty_to_finalize_passes_on_when_its_holder_dies(store: BatchStore) -> None:
    store.submit(new(at_end=True))
    stale = store.claim_finalize("batch_a", lease_ms=1)
    assert stale is not None
    wait_until(lambda: store.claim_finalize("batch_a", lease_ms=LEASE) is not None)
    assert not store.finalized("batch_a", stale, BatchStatus.COMPLETED, done=0, failed=0)


def test_a_pool_and_a_batch_that_are_gone(store: BatchStore, valkey: redis.Redis) -> None:
    plan(store, store.submit(new()))
    held = claim(store, 0)
    valkey.flushall()
    beat = store.heartbeat_chunk("batch_a", 0, held.fence, lease_ms=LEASE)
    assert (beat.ok, beat.stop) == (False, "batch_unknown")
    assert refusal(store, 0) == "unknown"
    assert store.all() == []


def test_ids_are_fresh() -> None:
    assert len({new_batch_id() for _ in range(100)}) == 100
