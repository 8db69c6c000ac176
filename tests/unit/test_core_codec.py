"""Decision records: round trip and replay."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.codec import (
    CodecError,
    DecisionRecord,
    Difference,
    decode,
    decode_gate,
    decode_record,
    differences,
    encode,
    replay,
)
from hybridsched.core.decide import decide
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Gate, GateState, LaneView, ReplicaView, Signal, Snapshot

POLICY = PoolPolicy(name="p", kind=PolicyKind.IDLE_WINDOW)
SNAPSHOT = Snapshot(
    pool="p",
    now_ms=5.5,
    replicas=(ReplicaView(replica="r0", model="m", online_inflight=Signal(value=2.0, age_ms=1.0)),),
    lanes=(
        LaneView(lane="r0", replica="r0", work=Signal(value=1.0, age_ms=1.0), epoch=4),
        LaneView(lane='ü\n"', replica="none"),
    ),
)


def record(snapshot: Snapshot = SNAPSHOT) -> DecisionRecord:
    return DecisionRecord(
        cycle=7,
        snapshot=snapshot,
        policy=POLICY,
        decisions=decide(snapshot, POLICY),
        outcomes=("published", "refused"),
        by="worker-1",
    )


def test_a_record_round_trips_and_replays() -> None:
    again = decode_record(encode(record()))
    assert again == record()
    assert replay(again) == ()


def test_not_a_number_becomes_unknown_and_replays() -> None:
    work = Signal(value=1.0, age_ms=1.0)
    view = LaneView(
        lane="r0", replica="r0", work=work, offline_inflight=Signal(value=float("nan"), age_ms=1.0)
    )
    again = decode_record(encode(record(msgspec.structs.replace(SNAPSHOT, lanes=(view,)))))
    assert again.snapshot.lanes[0].offline_inflight.value is None
    assert replay(again) == ()


def test_replay_names_what_differs() -> None:
    kept = record()
    first, second = kept.decisions
    changed = msgspec.structs.replace(first, reason=Reason.IDLE, epoch=9)
    found = replay(msgspec.structs.replace(kept, decisions=(changed, second)))
    assert found == (
        Difference(lane="r0", field="reason", recorded='"idle"', replayed=f'"{first.reason}"'),
        Difference(lane="r0", field="epoch", recorded="9", replayed="4"),
    )


def test_missing_and_additional_decisions_are_differences() -> None:
    first, second = record().decisions
    assert [(d.lane, d.field, d.replayed) for d in differences((first, second), (first,))] == [
        (second.lane, "decision", "none")
    ]
    assert [(d.lane, d.recorded) for d in differences((), (first,))] == [("r0", "none")]
    assert [d.field for d in differences((first, second), (second, first))] == ["decision", "decision"]


@pytest.mark.parametrize("data", [b"", b"[]", b'{"cycle": 1}', b"\x00\xff", "nonsense"])
def test_anything_else_is_an_error_that_shows_it(data: bytes | str) -> None:
    with pytest.raises(CodecError, match="not a DecisionRecord"):
        decode_record(data)


def test_unknown_fields_are_refused() -> None:
    gate = Gate(lane="l", state=GateState.OPEN, reason=Reason.IDLE)
    assert decode_gate(encode(gate)) == gate
    with pytest.raises(CodecError, match="unknown field"):
        decode_gate(encode(gate).replace(b'"lane"', b'"x":1,"lane"'))
    with pytest.raises(CodecError, match="not a PoolPolicy"):
        decode(b'{"name":"p","kind":"nope"}', PoolPolicy)
