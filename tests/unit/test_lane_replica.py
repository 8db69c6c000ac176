"""What a lane's worker says of the replica that it goes by."""

from __future__ import annotations

import asyncio

import pytest

from hybridsched.store.connection import async_client
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import ReplicaRecord, Telemetry, TelemetryStore
from hybridsched.workers import lane_replica
from hybridsched.workers.lane_replica import trouble
from tests.helpers import await_until

URL = "http://127.0.0.1:8000"


def seen(*names: str, url: str = URL, silent: str = "old") -> Telemetry:
    records = {name: ReplicaRecord(replica=name, model="m", lane=name, url=url) for name in names}
    return Telemetry(now_ms=1.0, replicas={**records, silent: None}, lanes={})


def test_a_replica_with_this_engine_is_no_trouble() -> None:
    assert trouble(seen("r0", "r1"), replica="r0", url=URL) == ""
    assert trouble(seen("r0", url="http://gpu7:8000"), replica="r0", url=URL) == "", "a host has many names"


def test_a_replica_that_says_nothing_is_named_with_those_that_do() -> None:
    for name in ("r7", "old"):
        said = trouble(seen("r1", "r0"), replica=name, url=URL)
        assert f"replica {name} says nothing (those that do: r0, r1)" in said
        assert f"--replica {name}" in said
    assert "no replica of this pool does" in trouble(seen(), replica="r0", url=URL)


def test_another_engine_than_the_replicas_is_told() -> None:
    said = trouble(seen("r0"), replica="r0", url="http://127.0.0.1:8001")
    assert (
        "the engine of replica r0 is http://127.0.0.1:8000, and this lane's is http://127.0.0.1:8001" in said
    )


async def test_the_log_says_it_once_and_that_it_is_over(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = async_client(valkey_url)
    store = TelemetryStore(client, "p")
    said: list[str] = []
    for level in ("warning", "info"):
        monkeypatch.setattr(
            lane_replica._log, level, lambda text, **more: said.append(more.get("why") or text)
        )
    monkeypatch.setattr(lane_replica, "FIRST_S", 0.0)
    monkeypatch.setattr(lane_replica, "LOOK_S", 0.01)
    task = asyncio.create_task(lane_replica.watch_replica(client, "p", replica="r0", url=URL))
    try:
        await await_until(lambda: said, what="the trouble")
        await asyncio.sleep(0.1)
        await store.publish(ReplicaRecord(replica="r0", model="m", lane="r0", url=URL))
        await await_until(lambda: len(said) > 1, what="its end")
    finally:
        await end_tasks(task)
        await client.aclose()
    assert said[0].startswith("replica r0 says nothing (no replica of this pool does)")
    assert said[1:] == ["The lane's replica is there."]
