"""Slots and KV cache: what may go to an engine."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.admission import (
    Capacity,
    Denial,
    KvModel,
    OfflineAdmission,
    OnlineAdmission,
    kv_bytes_per_token,
    kv_capacity_tokens,
    offline_slots,
)
from hybridsched.core.policy import EnginePolicy, OfflinePolicy, OnlinePolicy
from hybridsched.core.values import Budget

OPT_13B = KvModel(layers=40, kv_heads=40, head_dim=128)
LLAMA3_8B = KvModel(layers=32, kv_heads=8, head_dim=128)
BUDGET = Budget(max_inflight=1000, chunk_tokens=1, slice_tokens=0)
CAPACITY = Capacity(max_num_seqs=100, kv_tokens=10_000, max_model_len=4_000)
OFFLINE = OfflineAdmission(
    policy=OfflinePolicy(max_inflight=64, slots_for_online=32, kv_share=0.85), capacity=CAPACITY
)


def test_bytes_per_token_are_those_of_the_literature() -> None:
    assert kv_bytes_per_token(OPT_13B) == 800 * 1024
    assert kv_bytes_per_token(LLAMA3_8B) == 128 * 1024


def test_query_heads_do_not_count_and_fp8_halves() -> None:
    multi_head = msgspec.structs.replace(LLAMA3_8B, kv_heads=32)
    assert kv_bytes_per_token(multi_head) == 4 * kv_bytes_per_token(LLAMA3_8B)
    assert kv_bytes_per_token(msgspec.structs.replace(LLAMA3_8B, kv_bytes=1)) == 64 * 1024


def test_capacity_is_in_whole_tokens() -> None:
    assert kv_capacity_tokens(LLAMA3_8B, 128 * 1024 * 10 - 1) == 9
    assert kv_capacity_tokens(LLAMA3_8B, -5) == 0


def test_a_shape_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"kv_heads is 0; it must be above 0"):
        KvModel(layers=1, kv_heads=0, head_dim=1)


def offline(**changes: object) -> object:
    asked: dict[str, object] = {
        "tokens": 100,
        "offline_inflight": 0,
        "offline_tokens": 0,
        "online_inflight": 0,
        "budget": BUDGET,
    }
    return asked | changes


@pytest.mark.parametrize(
    ("asked", "reason", "left"),
    [
        ({}, None, 64),
        ({"offline_inflight": 63}, None, 1),
        ({"offline_inflight": 64}, Denial.BUDGET, 0),
        ({"online_inflight": 30, "offline_inflight": 37}, None, 1),
        ({"online_inflight": 30, "offline_inflight": 38}, Denial.NO_SLOT, 0),
        ({"online_inflight": 90}, Denial.NO_SLOT, 0),
        (
            {"budget": msgspec.structs.replace(BUDGET, max_inflight=2), "offline_inflight": 2},
            Denial.BUDGET,
            0,
        ),
        ({"offline_inflight": 1, "offline_tokens": 8_400}, None, 63),
        ({"offline_inflight": 1, "offline_tokens": 8_401}, Denial.NO_KV, 63),
    ],
)
def test_offline_gets_what_online_and_the_budget_leave(
    asked: dict[str, object], reason: Denial | None, left: int
) -> None:
    admission = OFFLINE.may_admit(**offline(**asked))
    assert (admission.ok, admission.reason, admission.slots_left) == (reason is None, reason, left)
    assert not admission.never


@pytest.mark.parametrize("tokens", [4_001, 8_501])
def test_what_can_never_fit_is_told_apart_from_what_must_wait(tokens: int) -> None:
    admission = OFFLINE.may_admit(**offline(tokens=tokens))
    assert (admission.reason, admission.never) == (Denial.TOO_LONG, True)


def test_what_just_fits_is_admitted() -> None:
    assert OFFLINE.may_admit(**offline(tokens=4_000)).ok
    long_context = msgspec.structs.replace(
        OFFLINE, capacity=msgspec.structs.replace(CAPACITY, max_model_len=None)
    )
    assert long_context.may_admit(**offline(tokens=8_500)).ok
    assert long_context.may_admit(**offline(tokens=8_501)).never
    online = OnlineAdmission(policy=OnlinePolicy(), capacity=CAPACITY)
    assert online.may_admit(tokens=4_000, online_inflight=0).ok


@pytest.mark.parametrize("unknown", ["max_num_seqs", "kv_tokens"])
def test_unknown_capacity_is_no_room(unknown: str) -> None:
    capacity = msgspec.structs.replace(CAPACITY, **{unknown: None})
    asked = msgspec.structs.replace(OFFLINE, capacity=capacity)
    assert asked.may_admit(**offline()).reason is Denial.CAPACITY_UNKNOWN


def test_the_policy_speaks_where_the_engine_is_silent() -> None:
    policy = EnginePolicy(max_num_seqs=64, kv_tokens=5_000)
    assert Capacity().or_policy(policy) == Capacity(max_num_seqs=64, kv_tokens=5_000)
    assert CAPACITY.or_policy(policy) == CAPACITY
    assert Capacity().or_policy(EnginePolicy()).kv_tokens is None


def test_slots_are_never_negative() -> None:
    assert offline_slots(max_num_seqs=10, slots_for_online=4, online_inflight=20) == 0


def test_online_is_bounded_by_the_policy_and_by_the_slots() -> None:
    online = OnlineAdmission(policy=OnlinePolicy(max_inflight=4), capacity=CAPACITY)
    assert online.may_admit(tokens=10, online_inflight=3).ok
    assert online.may_admit(tokens=10, online_inflight=4).reason is Denial.BUDGET
    small = msgspec.structs.replace(online, capacity=Capacity(max_num_seqs=2))
    assert small.may_admit(tokens=10, online_inflight=2).reason is Denial.NO_SLOT
    too_long = online.may_admit(tokens=4_001, online_inflight=0)
    assert (too_long.reason, too_long.never) == (Denial.TOO_LONG, True)
    assert online.room(online_inflight=9) == 0
