"""Garbage in the batch ledger: whoever can write to Redis can spoil one batch, and none of the others."""

from __future__ import annotations

import itertools
import json

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.batches.progress import Progress
from hybridsched.store.batch_values import BatchStatus, ClaimRefused
from hybridsched.store.batches import BatchStore
from hybridsched.store.keys import Keys
from tests.contract.test_store_batches_ledger import claim, new, plan

GARBAGE = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"null",
    b"{}",
    b"\xff\xfe",
    b'{"state": "queued"}',
    b"[" * 5000 + b"]" * 5000,
]


@pytest.fixture
def store(valkey: redis.Redis) -> BatchStore:
    return BatchStore(valkey, "p")


def healthy(store: BatchStore) -> None:
    """Another batch of the model is planned, claimed and swept as ever."""
    plan(store, store.submit(new(id="batch_good")))
    assert store.sweep(now=True).damaged == ()
    assert claim(store, 0, "batch_good").batch.id == "batch_good"
    assert store.get("batch_good").status is BatchStatus.IN_PROGRESS


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_chunk_that_cannot_be_read_fails_its_batch_alone(
    store: BatchStore, valkey: redis.Redis, garbage: bytes
) -> None:
    plan(store, store.submit(new()))
    valkey.hset(store.keys.batch_chunks("batch_a"), "0", garbage)
    assert store.claim_chunk("batch_a", 0, owner="w", lease_ms=1000) == ClaimRefused("damaged")
    assert not store.heartbeat_chunk("batch_a", 0, 1, lease_ms=1000).ok
    assert store.progress("batch_a").queued_chunks == 0
    store.mark_assembled("batch_a", Progress(next_chunk=1).holds)
    assert store.sweep(now=True).damaged == ("batch_a",)
    found = store.get("batch_a")
    assert found.status is BatchStatus.FAILED
    assert "submit the same file" in found.message
    healthy(store)


def test_a_chunk_with_a_number_that_is_none_fails_its_batch_alone(
    store: BatchStore, valkey: redis.Redis
) -> None:
    plan(store, store.submit(new()))
    key = store.keys.batch_chunks("batch_a")
    raw = valkey.hget(key, "0")
    assert isinstance(raw, bytes)
    for name, value in (("lease_ms", "soon"), ("start", 1.5), ("state", 3), ("at_end", 1), ("end", None)):
        valkey.hset(key, "0", json.dumps(json.loads(raw) | {name: value}))
        assert store.claim_chunk("batch_a", 0, owner="w", lease_ms=1000) == ClaimRefused("damaged")
    valkey.hset(key, "0", raw)
    claim(store, 0)


@pytest.mark.parametrize("field", ["x", "-1", "1", "1e3", "", "99999999999999999999"])
def test_a_chunk_that_was_never_planned_is_removed(
    store: BatchStore, valkey: redis.Redis, field: str
) -> None:
    plan(store, store.submit(new()))
    key = store.keys.batch_chunks("batch_a")
    valkey.hset(key, field, "{")
    assert store.sweep(now=True).damaged == ()
    assert valkey.hkeys(key) == [b"0"]
    claim(store, 0)


def test_a_ledger_of_another_type_fails_its_batch_alone(store: BatchStore, valkey: redis.Redis) -> None:
    store.submit(new())
    valkey.set(store.keys.batch_chunks("batch_a"), "text")
    assert store.sweep(now=True).damaged == ("batch_a",)
    healthy(store)


# names of queues

POOLS = st.text("ab1._-", max_size=6).map(lambda rest: "p" + rest)
MODELS = (
    st.none()
    | st.text(max_size=12)
    | st.sampled_from(["default", "any", "m", "x-m", "model:m", "a*", "a%2A"])
)


@settings(max_examples=200)
@given(pools=st.lists(POOLS, min_size=2, max_size=2), models=st.lists(MODELS, min_size=2, max_size=2))
def test_no_two_queues_have_the_same_name(pools: list[str], models: list[str | None]) -> None:
    names = [Keys(pool).rq_queue(model) for pool, model in zip(pools, models, strict=True)]
    assert (names[0] == names[1]) == (pools[0] == pools[1] and models[0] == models[1])
    assert not set("*?[]^\\ ") & set("".join(names))


def test_queues_that_once_had_the_same_name_are_apart() -> None:
    names = [
        Keys("t").rq_queue("x-m"),
        Keys("t-x").rq_queue("m"),
        Keys("t").rq_queue(None),
        Keys("t").rq_queue("default"),
        Keys("t").rq_queue("any"),
        Keys("t").rq_queue_of_batch("any"),
        Keys("t").rq_queue("batch:any"),
        Keys("t").rq_queue_of_batch("x-m"),
    ]
    assert all(one != other for one, other in itertools.combinations(names, 2))
    assert Keys("prod").rq_queue("meta-llama/Llama-3.1-8B") == "hs:{prod}:model:meta-llama/Llama-3.1-8B"
