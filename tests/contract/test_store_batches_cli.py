"""`hybridsched batch` as a user runs it, against a real Valkey: submit, status, list, wait, cancel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import redis

from hybridsched.batches.verify import check_files
from hybridsched.store.batch_values import BatchStatus, ClaimedChunk
from hybridsched.store.batches import BatchStore
from hybridsched.store.keys import Keys
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord
from hybridsched.workers.offline_folders import Folders
from tests.batch_kit import run_local
from tests.contract.batch_command import HS, hs
from tests.helpers import wait_until


def test_submit_status_list_cancel_wait(valkey: redis.Redis, valkey_url: str, source: Path) -> None:
    made = hs("submit", source, "--pool", "p", "--deadline", "2h", url=valkey_url)
    assert made.code == 0, made.err
    batch_id = made.out.strip()
    assert batch_id.startswith("batch_")
    assert "5 lines" in made.err
    assert "1 lines cannot run" in made.err
    store = BatchStore(valkey, "p")
    batch = store.get(batch_id)
    assert (batch.lines, batch.model, batch.uid) == (5, "m", os.geteuid())
    assert batch.deadline_ms is not None
    assert abs(batch.deadline_ms - batch.submitted_ms - 7_200_000) < 1000

    again = hs("submit", source, "--pool", "p", "--json", url=valkey_url)
    assert again.json["id"] == batch_id  # type: ignore[index]
    assert again.json["known"] is True  # type: ignore[index]

    shown = hs("status", batch_id, "--pool", "p", url=valkey_url)
    assert shown.code == 0
    assert "validating" in shown.out
    nobody = (
        "no offline worker serves model m; start one: hybridsched worker offline --replica NAME --model m "
        "--engine http://HOST:PORT"
    )
    assert f"It waits: {nobody}" in made.err
    assert f"waits     no_worker: {nobody}" in shown.out
    assert str(source) in shown.out
    as_json = hs("status", batch_id, "--pool", "p", "--json", url=valkey_url).json
    assert as_json["remaining"] == 5  # type: ignore[index]
    assert as_json["waits"] == {"code": "no_worker", "message": nobody}  # type: ignore[index]
    listed = hs("list", "--pool", "p", "--json", url=valkey_url).json
    assert [one["id"] for one in listed] == [batch_id]  # type: ignore[attr-defined]
    assert batch_id in hs("list", "--pool", "p", url=valkey_url).out
    assert "no batches" in hs("list", "--pool", "other", url=valkey_url).err

    waited = hs("wait", batch_id, "--pool", "p", "--timeout", "100ms", url=valkey_url)
    assert waited.code == 1
    assert "Gave up" in waited.err
    assert f"{batch_id} waits: {nobody}" in waited.err
    cancelled = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert cancelled.code == 0
    assert cancelled.err == "", "what it logs on the way is no news for its user"
    assert "is cancelled: 0 of 5 completed (0 %), 1 failed, 4 cancelled before they had run" in cancelled.out
    assert check_files(source, batch.output, batch.errors).exact
    assert not Path(batch.work).exists()
    ended = hs("status", batch_id, "--pool", "p", url=valkey_url).out
    assert "0 of 5 completed (0 %), 1 failed, 4 cancelled before they had run" in ended
    assert "waits" not in ended
    assert hs("wait", batch_id, "--pool", "p", url=valkey_url).code == 1
    late = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert late.code == 1
    assert f"{batch_id} is cancelled already, and nothing was changed" in late.err
    assert batch.output in late.err
    assert hs("list", "--pool", "p", "--active", "--json", url=valkey_url).json == []


def worker_of(client: redis.Redis, model: str, *, at: float | None = None, problem: str = "") -> None:
    """The record of an offline worker that has just spoken, or did at server second `at`."""
    keys = Keys("p")
    record = LaneRecord(lane="r0", replica="r0", worker="w", model=model, problem=problem)
    client.set(keys.lane_telemetry("r0"), msgspec.json.encode(record))
    seconds = at if at is not None else float(client.time()[0])
    client.zadd(keys.lane_index, {"r0": seconds * 1000.0})


def test_with_a_worker_of_the_model_nothing_is_said_and_it_ends_what_is_cancelled(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    worker_of(valkey, "other")
    replica = ReplicaRecord(replica="r7", model="m", lane="r7", url="http://127.0.0.1:8007")
    valkey.set(Keys("p").telemetry("r7"), msgspec.json.encode(replica))
    valkey.zadd(Keys("p").replica_index, {"r7": 1.0})
    store = BatchStore(valkey, "p")
    assert (store.workers("m"), store.workers("other"), store.workers(None)) == (0, 1, 1)
    lonely = hs("submit", source, "--pool", "p", "--output", source.parent / "x", url=valkey_url)
    assert "(those that are up serve other); start one: " in lonely.err
    assert "offline --replica r7 --model m --engine http://127.0.0.1:8007" in lonely.err
    worker_of(valkey, "m")
    assert store.workers("m") == 1
    made = hs("submit", source, "--pool", "p", url=valkey_url)
    assert "waits" not in made.err
    batch_id = made.out.strip()
    assert "no_worker" not in hs("status", batch_id, "--pool", "p", url=valkey_url).out
    assert "is cancelling" in hs("cancel", batch_id, "--pool", "p", url=valkey_url).out
    assert store.get(batch_id).status is BatchStatus.CANCELLING
    worker_of(valkey, "m", at=1.0)
    assert store.workers("m") == 0
    assert "is cancelled" in hs("cancel", batch_id, "--pool", "p", url=valkey_url).out


def gate_of(client: redis.Redis, **fields: object) -> None:
    gate = {"lane": "r0", "state": "closed", "reason": "held"} | fields
    client.set(Keys("p").gate("r0"), json.dumps(gate))


def test_a_batch_that_stands_still_says_why_its_lanes_are_closed(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    worker_of(valkey, "m", at=float(valkey.time()[0]) + 3600.0)  # lives for as many commands as follow
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()

    def waits() -> dict[str, str] | None:
        return hs("status", batch_id, "--pool", "p", "--json", url=valkey_url).json["waits"]  # type: ignore[index,no-any-return]

    dead = waits()
    assert dead is not None
    assert dead["code"] == "lease_expired"
    assert "the policy worker is dead" in dead["message"]
    assert "worker policy" in dead["message"]
    gate_of(valkey)
    held = waits()
    assert held is not None
    assert held["code"] == "held"
    assert "waits     held: " in hs("status", batch_id, "--pool", "p", url=valkey_url).out
    gate_of(valkey, state="open", reason="idle")
    assert waits() is None
    later = float(valkey.time()[0]) + 3600.0
    worker_of(valkey, "m", at=later, problem="engine_unhealthy: engine X does not answer")
    assert waits() == {
        "code": "engine_unhealthy",
        "message": "lane r0 is open, and its offline worker waits: engine X does not answer",
    }


def test_ctrl_c_ends_the_wait_and_not_the_batch(valkey: redis.Redis, valkey_url: str, source: Path) -> None:
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()
    with subprocess.Popen(
        [*HS, "batch", "wait", batch_id, "--pool", "p", "--redis", valkey_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ignored in a test run that a shell has put in the background, and inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        seen = int(valkey.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0))

        def looks() -> bool:
            calls = valkey.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0)
            return int(calls) >= seen + 4

        wait_until(looks, timeout_s=30, what="the wait")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the batch goes on" in said
    assert f"batch cancel {batch_id}" in said
    assert "Abort" not in said
    assert BatchStore(valkey, "p").get(batch_id).status is BatchStatus.VALIDATING


def test_a_chunk_that_somebody_has_is_not_taken_from_him_by_a_cancel(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()
    store = BatchStore(valkey, "p")
    store.plan_chunk(
        store.get(batch_id), end=10, first_line=1, lines=1, tokens=1, next_line=2, at_end=False, ahead=9
    )
    claimed = store.claim_chunk(batch_id, 0, owner="w", lease_ms=1500)
    assert isinstance(claimed, ClaimedChunk)
    until_ms = claimed.chunk.lease_ms
    assert "is cancelled" in hs("cancel", batch_id, "--pool", "p", url=valkey_url).out
    finished_ms = store.get(batch_id).finished_ms
    assert finished_ms is not None
    assert finished_ms >= until_ms, "not before the lease was over"


def test_a_batch_whose_files_are_elsewhere_stays_cancelling_and_says_why(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, "--pool", "p", url=valkey_url).out.strip()
    store = BatchStore(valkey, "p")
    work = Path(store.get(batch_id).work)
    work.rename(work.with_name("moved"))
    done = hs("cancel", batch_id, "--pool", "p", url=valkey_url)
    assert done.code == 0
    assert "its files cannot be used from here" in done.err
    assert store.get(batch_id).status is BatchStatus.CANCELLING


def test_a_completed_batch_ends_a_wait_with_success(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    store = BatchStore(valkey, "default")
    valkey.hset(store.keys.batch(batch_id), mapping={"at_end": 1})
    fence = store.claim_finalize(batch_id, lease_ms=1000)
    assert fence is not None
    store.finalized(batch_id, fence, BatchStatus.COMPLETED, done=4, failed=1)
    waited = hs("wait", batch_id, "--json", url=valkey_url)
    assert waited.code == 0
    assert waited.json["done"] == 4  # type: ignore[index]


def test_a_finished_batch_that_is_submitted_again_is_named(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    store = BatchStore(valkey, "default")
    folders = Folders()
    work = folders.get(store.get(batch_id))
    run_local(work)
    work.remove()
    folders.close()
    valkey.hset(store.keys.batch(batch_id), mapping={"at_end": 1})
    fence = store.claim_finalize(batch_id, lease_ms=1000)
    assert fence is not None
    store.finalized(batch_id, fence, BatchStatus.COMPLETED, done=4, failed=1)
    again = hs("submit", source, url=valkey_url)
    assert again.code == 1
    assert f"Batch {batch_id}, which is completed, has written it" in again.err
    assert "--output" in again.err


def test_progress_tells_answered_lines_from_lines_in_the_output(
    valkey: redis.Redis, valkey_url: str, source: Path
) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    shown = hs("status", batch_id, url=valkey_url).out
    assert (
        "0 of 5 answered (0 %), 0 of them failed; in the files as soon as all lines before them are" in shown
    )
    waited = hs("wait", batch_id, "--timeout", "100ms", url=valkey_url)
    assert "0 of 5 answered" in waited.out
    assert "output" not in waited.out


def test_a_batch_that_the_store_has_lost_goes_on(valkey: redis.Redis, valkey_url: str, source: Path) -> None:
    batch_id = hs("submit", source, url=valkey_url).out.strip()
    valkey.flushall()
    again = hs("submit", source, url=valkey_url)
    assert again.out.strip() == batch_id
    assert "goes on from there" in again.err
    assert BatchStore(valkey, "default").get(batch_id).lines == 5
