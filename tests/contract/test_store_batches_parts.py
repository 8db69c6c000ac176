"""A batch of several models in the ledger on a real Valkey: each model's workers have their part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from hybridsched.cli.batch_view import as_json, describe
from hybridsched.cli.batch_waits import able, missing_worker
from hybridsched.store.batch_values import (
    BatchInfo,
    BatchPart,
    BatchStatus,
    ClaimedChunk,
    ClaimRefused,
    PartInfo,
)
from hybridsched.store.batches import BatchStore
from hybridsched.store.telemetry import LaneRecord
from hybridsched.workers.offline_submit import submit_file
from tests.contract.test_store_batches_ledger import LEASE, SIZE, new, plan, server_ms

MODELS = ("m", "n/x y", "ü")


def part(place: int, **fields: Any) -> BatchPart:
    given = {"model": MODELS[place], "lines": 10, "tokens": 100, "cursor": 0, "cursor_line": 1}
    return BatchPart(**given | {"next_chunk": place, "at_end": False} | fields)


PARTS = tuple(part(place) for place in range(3))


@pytest.fixture
def store(valkey: redis.Redis) -> BatchStore:
    return BatchStore(valkey, "p")


def mine(store: BatchStore, model: str) -> BatchInfo:
    (found,) = store.active(model)
    assert isinstance(found, PartInfo)
    return found


def took(store: BatchStore, model: str) -> list[tuple[str, int]]:
    """The jobs that workers of this model find."""
    got: list[tuple[str, int]] = []
    worker = store.worker(model, lambda *job: got.append(job), name="w")
    while worker.take():
        pass
    worker.close()
    return got


def run(store: BatchStore, number: int, model: str, *, done: int = 1) -> None:
    claimed = store.claim_chunk("batch_a", number, owner="w", lease_ms=LEASE, model=model)
    assert isinstance(claimed, ClaimedChunk), claimed
    assert store.complete_chunk("batch_a", number, claimed.fence, done=done, failed=0)


def test_each_model_plans_takes_and_ends_its_own_part(store: BatchStore) -> None:
    whole = store.submit(new(parts=PARTS))
    assert [one.id for one in store.all()] == ["batch_a"]
    assert whole.models == MODELS
    assert (whole.lines, mine(store, "m").lines) == (10, 10)
    numbers = {}
    for model in MODELS:
        numbers[model] = [plan(store, mine(store, model), ahead=2) for _ in range(3)]
    assert list(numbers.values()) == [[0, 3, None], [1, 4, None], [2, 5, None]]
    assert store.get("batch_a").outstanding == 6
    for place, model in enumerate(MODELS):
        assert took(store, model) == [("batch_a", place), ("batch_a", place + 3)]
    for number in range(6):
        other = MODELS[(number + 1) % 3]
        refused = store.claim_chunk("batch_a", number, owner="w", lease_ms=LEASE, model=other)
        assert refused == ClaimRefused("other")
    run(store, 3, "m", done=4)
    assert (mine(store, "m").done, mine(store, "m").outstanding, mine(store, "ü").outstanding) == (4, 1, 2)
    assert store.progress("batch_a").done == 4

    run(store, 0, "m")
    plan(store, mine(store, "m"), upto=SIZE)
    run(store, 6, "m")
    seen = mine(store, "m")
    assert isinstance(seen, PartInfo)
    assert seen.over
    assert plan(store, seen) is None
    assert store.to_feed("m", 9) == []
    assert store.get("batch_a").models == MODELS[1:]
    assert store.to_finalize("m") == []
    assert store.claim_finalize("batch_a", lease_ms=LEASE) is None, "parts of others are left"

    for place in (1, 2):
        model = MODELS[place]
        run(store, place, model)
        run(store, place + 3, model)
        assert plan(store, mine(store, model), upto=SIZE) == place + 6
        run(store, place + 6, model)
    whole = store.get("batch_a")
    assert (whole.at_end, whole.outstanding) == (True, 0)
    seen = mine(store, "m")
    assert isinstance(seen, PartInfo)
    assert not seen.over, "the batch is to be ended, by whoever comes"
    for model in MODELS:
        assert [one.id for one in store.to_finalize(model)] == ["batch_a"]
    fence = store.claim_finalize("batch_a", lease_ms=LEASE)
    assert fence
    assert store.finalized("batch_a", fence, BatchStatus.COMPLETED, done=10, failed=0)
    assert store.active("m") == store.active(any_model=True) == []


def test_workers_of_other_models_have_nothing_of_it(store: BatchStore) -> None:
    store.submit(new(parts=PARTS))
    assert store.active("other") == store.to_feed("other", 4) == store.active() == []
    assert [one.id for one in store.active(any_model=True)] == ["batch_a"]
    assert [one.id for one in store.active(only="batch_a")] == []
    assert [one.id for one in store.active("m", only="batch_a")] == ["batch_a"]


def test_a_lost_or_released_chunk_comes_back_to_its_own_model(store: BatchStore) -> None:
    store.submit(new(parts=PARTS))
    for model in MODELS:
        plan(store, mine(store, model))
        took(store, model)
    swept = store.sweep(now=True, lost_after_ms=0)
    assert swept.requeued == (("batch_a", 0), ("batch_a", 1), ("batch_a", 2))
    for place, model in enumerate(MODELS):
        assert took(store, model) == [("batch_a", place)]
    for place, model in enumerate(MODELS):
        claimed = store.claim_chunk("batch_a", place, owner="w", lease_ms=1, model=model)
        assert isinstance(claimed, ClaimedChunk)
        if place == 1:
            assert store.release_chunk("batch_a", place, claimed.fence)
    until = server_ms(store) + 5
    while server_ms(store) < until:
        pass
    assert store.sweep(now=True).reclaimed == (("batch_a", 0), ("batch_a", 2))
    for place, model in enumerate(MODELS):
        assert took(store, model) == [("batch_a", place)]


def test_jobs_on_lanes_of_one_model_find_the_chunks_of_that_model(store: BatchStore) -> None:
    store.submit(new(parts=PARTS, jobs_only=True))
    assert store.active("m") == []
    for model in MODELS:
        (seen,) = store.to_feed(model, 4, only="batch_a")
        plan(store, seen)
    got: list[tuple[str, int]] = []
    worker = store.worker("ü", lambda *job: got.append(job), name="w", only="batch_a")
    while worker.take():
        pass
    worker.close()
    assert got == [("batch_a", 2)]


def test_feeders_of_one_part_in_a_race_plan_its_lines_once(store: BatchStore) -> None:
    store.submit(new(parts=PARTS))
    before = mine(store, "m")
    assert plan(store, before) == 0
    assert plan(store, before) is None, "the cursor has moved"
    assert plan(store, mine(store, "ü")) == 2


def test_it_is_in_time_when_all_its_parts_are(store: BatchStore) -> None:
    lines = {"lines": 10, "tokens": 1000}
    store.submit(new(parts=(part(0, **lines), part(1, **lines)), deadline_in_ms=100_000, tokens=2000))

    def outlook() -> tuple[bool | None, float | None]:
        found = store.outlook(store.progress("batch_a"))
        assert found is not None
        return found[0].feasible, found[1]

    store.note_pace("m", 1000.0)
    assert outlook() == (None, None), "of one part nothing is known"
    store.note_pace(MODELS[1], 100.0)
    assert outlook() == (True, 100.0), "the slower one decides"
    store.note_pace(MODELS[1], 1.0)
    assert outlook() == (False, 1.0)
    store.note_pace(MODELS[1], 0.0)
    store.note_pace("m", 1.0)
    assert outlook() == (False, 1.0), "that one part cannot be in time is known, whatever the other does"


def test_urgent_parts_go_first_among_the_work_of_their_model(store: BatchStore) -> None:
    lines = {"lines": 10, "tokens": 1000}
    store.submit(new("batch_calm", model="m"))
    store.submit(new("batch_calm_x", model=MODELS[1]))
    slow = part(1, **lines)
    store.submit(new(parts=(part(0, lines=1, tokens=1), slow), deadline_in_ms=100_000, tokens=1001))
    now_ms = store.now_ms()
    assert store.urgent("m", now_ms=now_ms, tokens_per_s=12.0) == ()
    assert store.urgent(MODELS[1], now_ms=now_ms, tokens_per_s=12.0) == ("batch_a",)
    assert len(store.to_feed("m", 4, now_ms=now_ms, tokens_per_s=12.0)) == 2
    assert len(store.to_feed(MODELS[1], 4, now_ms=now_ms, tokens_per_s=12.0)) == 1


def lane(model: str) -> LaneRecord:
    return LaneRecord(lane=f"lane-{model}", model=model, worker="w")


def test_a_model_that_nobody_serves_is_told_while_the_rest_goes_on(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (part(0, lines=4), part(1, lines=6), part(2, lines=1, at_end=True))
    batch = store.submit(new(parts=parts, lines=11))
    up: list[LaneRecord] = []
    monkeypatch.setattr(store, "lanes", lambda: up)
    why = missing_worker(store, batch)
    assert why is not None
    assert why.code == "no_worker"
    assert "4 lines of m wait, none goes on: no offline worker serves model m" in why.message
    assert "nor of n/x y (6 lines)" in why.message
    assert "ü" not in why.message, "that part is over"
    up.append(lane("m"))
    assert [one.model for one in able(batch, up)] == ["m"]
    why = missing_worker(store, batch)
    assert why is not None
    assert "6 lines of n/x y wait, the other lines go on" in why.message
    assert "no offline worker serves model n/x y (those that are up serve m)" in why.message
    up.append(lane(MODELS[1]))
    assert missing_worker(store, batch) is None
    shown = describe(store.progress("batch_a"))
    assert "n/x y: of 6 lines 0 in finished chunks" in shown
    told = as_json(store.progress("batch_a"))
    assert [one["model"] for one in told["parts"]] == list(MODELS)


@pytest.mark.parametrize("garbage", ["{", "[]", "[1]", '[{"model":"m"}]', '{"model":"m"}', "null"])
def test_parts_that_somebody_else_wrote_stop_that_batch_alone(
    store: BatchStore, valkey: redis.Redis, garbage: str
) -> None:
    store.submit(new(parts=PARTS))
    seen = mine(store, "m")
    plan(store, seen)
    store.submit(new("batch_b"))
    valkey.hset(store.keys.batch("batch_a"), "parts", garbage)
    assert plan(store, seen) is None
    refused = store.claim_chunk("batch_a", 0, owner="w", lease_ms=LEASE, model="m")
    assert isinstance(refused, ClaimRefused)
    store.sweep(now=True, lost_after_ms=0)
    assert "batch_b" in [one.id for one in store.active("m")]
    assert plan(store, store.get("batch_b")) == 0


def write(path: Path, *models: str | None) -> Path:
    lines = []
    for number, model in enumerate(models):
        body: dict[str, Any] = {"prompt": [1] * 10, "max_tokens": 6} | ({"model": model} if model else {})
        one = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(msgspec.json.encode(one) + b"\n")
    path.write_bytes(b"".join(lines))
    return path


def test_what_is_submitted(store: BatchStore, tmp_path: Path) -> None:
    mixed = submit_file(store, write(tmp_path / "a.jsonl", "n", "m", None, "n", "m", "n")).batch
    assert [(one.model, one.lines, one.tokens) for one in mixed.parts] == [("n", 4, 64), ("m", 2, 32)]
    assert (mixed.model, mixed.lines, mixed.tokens) == ("n", 6, 96)
    one = submit_file(store, write(tmp_path / "b.jsonl", "m", "m", None)).batch
    assert (one.model, one.parts) == ("m", ())
    forced = submit_file(store, write(tmp_path / "c.jsonl", "m", "n"), model="x").batch
    assert (forced.model, forced.parts) == ("x", ())


def test_lines_of_a_name_that_no_worker_can_have_wait_for_none(store: BatchStore, tmp_path: Path) -> None:
    """They were a part of their own, which nobody could ever serve."""
    lines = write(tmp_path / "a.jsonl", "m", "n", "", "", "", "a b", "{x}", "m")
    mixed = submit_file(store, lines).batch
    assert [(one.model, one.lines) for one in mixed.parts] == [("m", 7), ("n", 1)]
    assert mixed.lines == 8
    one = submit_file(store, write(tmp_path / "b.jsonl", "a b", "a b", "m")).batch
    assert (one.model, one.parts) == ("m", ())
    none = submit_file(store, write(tmp_path / "c.jsonl", "a b")).batch
    assert (none.model, none.parts) == (None, ())


def test_a_batch_of_one_model_has_the_records_that_it_always_had(
    store: BatchStore, valkey: redis.Redis, tmp_path: Path
) -> None:
    """Workers of an earlier version read them, and what those have written is read here."""
    batch = submit_file(store, write(tmp_path / "a.jsonl", "m", "m")).batch
    assert b"parts" not in valkey.hgetall(store.keys.batch(batch.id))
    plan(store, batch, upto=batch.bytes)
    valkey.hset(  # as an earlier version has planned it
        store.keys.batch_chunks(batch.id),
        "0",
        b'{"start":0,"end":250,"first_line":1,"lines":2,"tokens":32,"next_line":3,"at_end":true,'
        b'"state":"queued","owner":"","lease_ms":0,"fence":0,"done":0,"failed":0,"attempts":0,"queued_ms":1}',
    )
    claimed = store.claim_chunk(batch.id, 0, owner="w", lease_ms=LEASE, model="m")
    assert isinstance(claimed, ClaimedChunk)
    assert claimed.chunk.skip == 0
    assert store.complete_chunk(batch.id, 0, claimed.fence, done=2, failed=0)
