"""A submitted file whose lines name two models: each model's workers run their own. Kills, jobs."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.work import WorkFolder
from hybridsched.core.values import GateState
from hybridsched.store.batch_values import BatchStatus
from hybridsched.store.batches import BatchStore
from hybridsched.workers.offline import OfflineWorker
from hybridsched.workers.offline_file import run_file
from hybridsched.workers.offline_job import JobOptions, Outcome
from hybridsched.workers.offline_submit import submit_file
from tests.helpers import await_until
from tests.integration.offline_rig import (
    MODEL,
    POOL,
    answers,
    door,
    publish_policy,
    results,
    simulated_engine,
    worker_process,
    write_batch,
)
from tests.integration.test_offline_job import holder, job, lanes_of

OTHER = "small/other"
LANES = {MODEL: "r0", OTHER: "r1"}


class Engines(NamedTuple):
    quick: dict[str, str]
    """URLs by model."""
    slow: dict[str, str]


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Each serves one model and refuses every other."""
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    with (
        simulated_engine(tmp_path / "a") as first,
        simulated_engine(tmp_path / "b", model=OTHER) as second,
        simulated_engine(tmp_path / "c", speed=2.0) as slow,
        simulated_engine(tmp_path / "d", speed=2.0, model=OTHER) as also_slow,
    ):
        yield Engines({MODEL: first, OTHER: second}, {MODEL: slow, OTHER: also_slow})


def write_mixed(path: Path, lines: int, *, seed: int = 1) -> None:
    """A batch as the others, a third of whose lines name the other model."""
    write_batch(path, lines, seed=seed)
    rng = random.Random(seed)
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    for row in rows[2:]:
        if rng.random() < 0.35:
            row["body"]["model"] = OTHER
    rows[9]["url"] = "/v1/nothing"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_order(source: Path) -> None:
    """Both files are in the order of the input, and each answer is of the model that its line names."""
    rows = [json.loads(text) for text in source.read_text().splitlines()]
    named = {row["custom_id"]: (place, row["body"]["model"]) for place, row in enumerate(rows)}
    stem = source.name.removesuffix(".jsonl")
    for name in (f"{stem}.output.jsonl", f"{stem}.errors.jsonl"):
        found = [json.loads(text) for text in source.with_name(name).read_text().splitlines()]
        places = [named[row["custom_id"]][0] for row in found]
        assert places == sorted(places)
        for row in found:
            if row["error"] is None:
                assert row["response"]["body"]["model"] == named[row["custom_id"]][1]


async def undisturbed(folder: Path, source: Path, engines: Engines) -> dict[str, Any]:
    output = folder / "plain.jsonl"
    work = WorkFolder.create(plan_files(source, local_batch_id(output), output=output))
    assert (await run_file(work, list(engines.quick.values()))).at_end
    work.remove()
    return answers(output, folder / "plain.errors.jsonl")


def ended(store: BatchStore, batch_id: str) -> bool:
    return store.get(batch_id).status.ended


@asynccontextmanager
async def open_doors(url: str) -> AsyncIterator[None]:
    async with door(url, lane=LANES[MODEL]) as first, door(url, lane=LANES[OTHER]) as second:
        await first.set(GateState.OPEN)
        await second.set(GateState.OPEN)
        yield


def start(url: str, engines: dict[str, str], model: str, log: Path) -> subprocess.Popen[bytes]:
    return worker_process(url, engines[model], log, lane=LANES[model], model=model)


async def test_kill_9_of_either_models_workers_at_any_time(
    tmp_path: Path, engines: Engines, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_mixed(source, 90)
    expected = await undisturbed(tmp_path, source, engines)
    await publish_policy(valkey_url)
    store = BatchStore(valkey, POOL)
    batch = submit_file(store, source).batch
    assert [part.model for part in batch.parts] == [MODEL, OTHER]
    rng, kills = random.Random(7), 0
    log = tmp_path / "worker.log"
    async with open_doors(valkey_url):
        workers = {model: start(valkey_url, engines.slow, model, log) for model in LANES}
        try:
            until = time.monotonic() + 100
            while not await asyncio.to_thread(ended, store, batch.id):
                assert time.monotonic() < until, (store.progress(batch.id), log.read_text()[-3000:])
                before = store.progress(batch.id)

                def moved(floor: int = before.done) -> bool:
                    return store.progress(batch.id).done > floor or ended(store, batch.id)

                await await_until(moved, timeout_s=40, what="further lines")
                if kills < 3:
                    kills += 1
                    await asyncio.sleep(rng.uniform(0.0, 0.4))
                    victim = rng.choice(list(LANES))
                    workers[victim].kill()
                    await asyncio.to_thread(workers[victim].wait, 10)
                    workers[victim] = start(valkey_url, engines.slow, victim, log)
            # The folder of the work goes after the batch's end is on record.
            await await_until(
                lambda: not list(tmp_path.glob(".*hybridsched*")), timeout_s=20, what="a tidy folder"
            )
        finally:
            for process in workers.values():
                process.kill()
                process.wait(10)
    info = store.get(batch.id)
    assert info.status is BatchStatus.COMPLETED, log.read_text()[-3000:]
    assert (info.done, info.failed) == (88, 2)
    assert kills >= 2, "it was over too soon"
    assert results(source) == expected
    check_order(source)


def hs(*words: str, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridsched", "batch", *words, "--redis", url, "--pool", POOL],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def worker_of(url: str, engines: dict[str, str], model: str) -> OfflineWorker:
    lane = LANES[model]
    return OfflineWorker(
        redis_url=url, pool=POOL, lane=lane, replica=lane, model=model, engine_url=engines[model], speed=20
    )


async def test_a_model_without_workers_is_told_and_comes_later(
    tmp_path: Path, engines: Engines, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_mixed(source, 60, seed=2)
    expected = await undisturbed(tmp_path, source, engines)
    await publish_policy(valkey_url)
    sent = await asyncio.to_thread(hs, "submit", str(source), url=valkey_url)
    batch_id = sent.stdout.strip()
    assert sent.returncode == 0, sent.stderr
    assert "none goes on" in sent.stderr
    assert f"models: {MODEL} (" in sent.stderr
    assert f", {OTHER} (" in sent.stderr
    store, stop = BatchStore(valkey, POOL), asyncio.Event()
    lines = {part.model: part.lines for part in store.get(batch_id).parts}
    async with open_doors(valkey_url):
        running = [asyncio.create_task(worker_of(valkey_url, engines.quick, MODEL).run(stop))]
        await await_until(
            lambda: store.get(batch_id).parts[0].over, timeout_s=40, what="the end of the first model's lines"
        )
        info = store.get(batch_id)
        assert (info.parts[0].ended, info.parts[1].ended) == (lines[MODEL], 0)
        shown = await asyncio.to_thread(hs, "status", batch_id, url=valkey_url)
        assert f"no_worker: {lines[OTHER]} lines of {OTHER} wait" in shown.stdout
        assert f"no offline worker serves model {OTHER}" in shown.stdout
        assert f"{lines[MODEL]} of 60 answered" in shown.stdout
        waited = await asyncio.to_thread(hs, "wait", batch_id, "--timeout", "1s", url=valkey_url)
        assert waited.returncode == 1

        valkey.flushall()  # all that the store knew: the file is submitted again, and goes on from the disk
        await publish_policy(valkey_url)
        sent = await asyncio.to_thread(hs, "submit", str(source), url=valkey_url)
        assert sent.stdout.strip() == batch_id, sent.stderr
        assert "goes on from there" in sent.stderr
        running.append(asyncio.create_task(worker_of(valkey_url, engines.quick, OTHER).run(stop)))
        waited = await asyncio.to_thread(hs, "wait", batch_id, "--timeout", "50s", url=valkey_url)
        assert waited.returncode == 0, waited.stderr
        stop.set()
        await asyncio.gather(*running)
    assert results(source) == expected
    check_order(source)


async def test_a_cancelled_one_keeps_what_one_model_has_finished(
    tmp_path: Path, engines: Engines, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_mixed(source, 60, seed=3)
    await publish_policy(valkey_url)
    store, stop = BatchStore(valkey, POOL), asyncio.Event()
    batch = submit_file(store, source).batch
    async with open_doors(valkey_url):
        running = asyncio.create_task(worker_of(valkey_url, engines.quick, MODEL).run(stop))
        await await_until(lambda: store.get(batch.id).parts[0].over, timeout_s=40, what="one model's lines")
        told = await asyncio.to_thread(hs, "cancel", batch.id, url=valkey_url)
        assert told.returncode == 0, told.stderr
        await await_until(lambda: ended(store, batch.id), timeout_s=20, what="the end, by the worker")
        stop.set()
        await running
    info = store.get(batch.id)
    assert info.status is BatchStatus.CANCELLED
    assert info.cut == batch.parts[1].lines
    found = results(source)
    assert list(found.values()).count("batch_cancelled") == info.cut
    assert len(found) == 60
    check_order(source)


async def test_a_job_runs_both_models_where_its_node_serves_both(
    tmp_path: Path, engines: Engines, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_mixed(source, 40, seed=4)
    expected = await undisturbed(tmp_path, source, engines)
    quick = engines.quick
    async with (
        lanes_of(valkey_url, quick[MODEL], "r0") as first,
        lanes_of(valkey_url, quick[OTHER], "r1", model=OTHER) as second,
    ):
        first.open, second.open = {"r0"}, {"r1"}
        async with asyncio.timeout(60):
            assert await job(valkey_url, source).run(asyncio.Event()) is Outcome.COMPLETE
    assert (holder(valkey, "r0"), holder(valkey, "r1")) == ("", "")
    assert results(source) == expected
    check_order(source)


async def test_a_job_leaves_what_its_node_does_not_serve_to_a_run_elsewhere(
    tmp_path: Path, engines: Engines, valkey: redis.Redis, valkey_url: str
) -> None:
    source = tmp_path / "batch.jsonl"
    write_mixed(source, 40, seed=5)
    expected = await undisturbed(tmp_path, source, engines)
    short = JobOptions(leave_after_s=5.0)
    quick, store = engines.quick, BatchStore(valkey, POOL)
    async with asyncio.timeout(90):
        async with lanes_of(valkey_url, quick[MODEL], "r0") as lanes:
            lanes.open = {"r0"}
            assert await job(valkey_url, source, options=short).run(asyncio.Event()) is Outcome.LEFT
        (info,) = store.all()
        assert info.parts[0].over
        assert info.models == (OTHER,)
        assert valkey.get(store.keys.lane_job_model("1")) == OTHER.encode(), "where it has to go next"
        async with lanes_of(valkey_url, quick[OTHER], "r1", model=OTHER) as lanes:
            lanes.open = {"r1"}
            assert await job(valkey_url, source, options=short).run(asyncio.Event()) is Outcome.COMPLETE
    assert results(source) == expected
    check_order(source)
