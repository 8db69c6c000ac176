"""Deadlines in the ledger: who is fed first, and what `batch status` says of it."""

from __future__ import annotations

import json

import msgspec
import pytest
import redis

from hybridsched.store.batches import BatchStore
from tests.contract.batch_command import hs
from tests.contract.test_store_batches_ledger import new


@pytest.fixture
def store(valkey: redis.Redis) -> BatchStore:
    return BatchStore(valkey, "p")


def submitted(store: BatchStore, name: str, tokens: int, due_s: float | None = None) -> None:
    due_ms = None if due_s is None else due_s * 1000.0
    store.submit(msgspec.structs.replace(new(name), tokens=tokens, deadline_in_ms=due_ms))


def fed(store: BatchStore, pace: float | None) -> list[str]:
    found = store.to_feed("m", 4, now_ms=store.now_ms(), tokens_per_s=pace)
    return [batch.id for batch in found]


def test_a_batch_at_risk_is_fed_first_and_alone(store: BatchStore) -> None:
    submitted(store, "batch_calm", 50_000)
    submitted(store, "batch_due", 600_000, 1000.0)
    submitted(store, "batch_lost", 900_000, 1000.0)
    assert fed(store, None) == ["batch_calm", "batch_due", "batch_lost"], "nothing is known of the pace"
    assert fed(store, 1000.0) == ["batch_due"], "600 s of 1,000; the third cannot be met"
    assert fed(store, 10_000.0) == ["batch_calm", "batch_due", "batch_lost"], "time to spare"


def planned(store: BatchStore, name: str, hurry: tuple[str, ...], chunks: int) -> None:
    for _ in range(chunks):
        batch = store.get(name)
        number = store.plan_chunk(
            batch,
            end=batch.cursor + 10,
            first_line=batch.cursor_line,
            lines=1,
            tokens=10,
            next_line=batch.cursor_line + 1,
            at_end=False,
            ahead=8,
            hurry=hurry,
        )
        assert number is not None


def test_chunks_of_a_batch_at_risk_wait_for_none_of_a_calm_one(store: BatchStore) -> None:
    submitted(store, "batch_calm", 50_000)
    submitted(store, "batch_due", 600_000, 1000.0)
    submitted(store, "batch_sooner", 100_000, 500.0)
    now_ms = store.now_ms()
    assert store.urgent("m", now_ms=now_ms, tokens_per_s=None) == ()
    hurry = store.urgent("m", now_ms=now_ms, tokens_per_s=1000.0)
    assert hurry == ("batch_due",), "the sooner one has time enough"
    hurry = ("batch_sooner", *hurry)
    planned(store, "batch_calm", hurry, 2)
    planned(store, "batch_due", hurry, 2)
    planned(store, "batch_sooner", hurry, 2)
    planned(store, "batch_due", hurry, 1)
    planned(store, "batch_calm", hurry, 1)
    taken: list[tuple[str, int]] = []
    worker = store.worker("m", lambda batch, number: taken.append((batch, number)), name="w")
    while worker.take():
        pass
    assert taken == [
        *(("batch_sooner", number) for number in (0, 1)),
        *(("batch_due", number) for number in (0, 1, 2)),
        *(("batch_calm", number) for number in (0, 1, 2)),
    ]


def status(url: str, batch: str, *options: str) -> str:
    done = hs("status", batch, "--pool", "p", *options, url=url)
    assert done.code == 0, done.err
    return str(done.out)


def test_status_says_early_whether_a_deadline_can_be_met_and_what_would_do(
    store: BatchStore, valkey_url: str
) -> None:
    submitted(store, "batch_due", 60_000_000, 100_000.0)
    assert "not known yet" in status(valkey_url, "batch_due")
    store.note_pace("m", 1000.0)
    assert "at 1,000 tokens/s it ends in about 16 h 40 min" in status(valkey_url, "batch_due")
    assert "it goes before other batches" in status(valkey_url, "batch_due")
    store.note_pace("m", 100.0)
    said = status(valkey_url, "batch_due")
    assert "it cannot be met: at 100 tokens/s it ends in about 6 d 22 h even if it goes first" in said
    assert "6.0 times as much" in said
    assert "a deadline from 20" in said
    outlook = json.loads(status(valkey_url, "batch_due", "--json"))["outlook"]
    assert (outlook["feasible"], outlook["urgent"], outlook["tokens_per_s"]) == (False, False, 100.0)
    assert outlook["needs_tokens_per_s"] == pytest.approx(600.0, rel=0.05)
    store.note_pace("m", 0.0)
    assert "no offline work has run of late" in status(valkey_url, "batch_due")


def test_without_a_deadline_nothing_is_said_and_a_forged_pace_is_none(
    store: BatchStore, valkey: redis.Redis, valkey_url: str
) -> None:
    submitted(store, "batch_calm", 600_000)
    assert "deadline" not in status(valkey_url, "batch_calm")
    assert json.loads(status(valkey_url, "batch_calm", "--json"))["outlook"] is None
    submitted(store, "batch_due", 600_000, 1000.0)
    for forged in (b"soon", b"nan", b"-5", b"\xff"):
        valkey.set(store.keys.batch_pace("m"), forged)
        assert store.pace("m") is None
    valkey.delete(store.keys.batch_pace("m"))
    valkey.hset(store.keys.batch_pace("m"), "a", "b")
    assert store.pace("m") is None
    assert "not known yet" in status(valkey_url, "batch_due")
