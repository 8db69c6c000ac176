"""What a cycle of the policy worker costs, for 10 to 10,000 lanes, against physical floors of the same run.

    python benchmarks/policy_cycle.py [--lanes 10,100,1000,3000,10000] [--repeats N] [--json]

Measured alone on a Valkey of its own (unix socket), median of the repeats; what is pure in CPU time, the
cycle in wall time and in CPU time:

- decide: `core.decide` on a snapshot in memory;
- encode: the JSON of the gates that it decided;
- cycle: observe, decide, act, record of the real worker; every gate is renewed and the record written, which
  is the worst case (between renewals a quiet cycle publishes nothing); once with gates that stand as decided
  ("renew"), once with all gates gone ("change": written and announced);
- floors: a loop that only builds one result object a lane; as many plain pipelined SETs of the same bytes;
  and as many MGET values as a snapshot reads.

Ratios: "linear" is the time per lane over that of the smallest pool (1: exactly linear, below: better).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hybridsched.core.decide import decide
from hybridsched.core.policy import EnginePolicy, IdlePolicy, PolicyKind, PoolPolicy
from hybridsched.core.publishing import gate_of
from hybridsched.core.values import GateDecision, GateState, Snapshot
from hybridsched.log import configure
from hybridsched.store.connection import async_client
from hybridsched.store.embedded import EmbeddedValkey
from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyStore
from hybridsched.store.scripts import Call, Scripts, raise_first
from hybridsched.store.telemetry import (
    INDEX_LIFE_MS,
    RECORD_LIFE_MS,
    EngineRecord,
    LaneRecord,
    ReplicaRecord,
    open_object,
)
from hybridsched.workers.policy import PolicyWorker
from hybridsched.workers.policy_run import calm_collector

POOL = "bench"
KEYS = Keys(POOL)


async def publish(scripts: Scripts, lanes: int) -> None:
    """Every replica idle with work beside it: the longest path through a decision."""
    engine = EngineRecord(
        metrics_age_ms=1.0,
        running=0.0,
        waiting=0.0,
        kv_use=0.1,
        frozen_ms=0.0,
        healthy=1.0,
        health_age_ms=1.0,
    )
    calls = []
    for i in range(lanes):
        replica = ReplicaRecord(
            replica=f"r{i}",
            model="m",
            lane=f"r{i}",
            online_inflight=0,
            online_idle_ms=10_000.0,
            engine=engine,
        )
        lane = LaneRecord(lane=f"r{i}", replica=f"r{i}", offline_inflight=0, work=5)
        for record, key, index in (
            (replica, KEYS.telemetry(f"r{i}"), KEYS.replica_index),
            (lane, KEYS.lane_telemetry(f"r{i}"), KEYS.lane_index),
        ):
            body = open_object(record, "at_ms")
            calls.append(Call("telemetry", [key, index], [body, RECORD_LIFE_MS, f"r{i}", INDEX_LIFE_MS, ""]))
    for start in range(0, len(calls), 1000):
        raise_first(await scripts.call_many(calls[start : start + 1000]))


def timed(work: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of CPU time: what is pure does not wait for anything."""
    spans = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        spans.append((time.thread_time() - start) * 1000.0)
    return statistics.median(spans)


async def timed_async(
    work: Callable[[], Awaitable[object]], repeats: int, before: Callable[[], Awaitable[object]] | None = None
) -> tuple[float, float]:
    """Median milliseconds of wall time and of this thread's CPU time."""
    walls, cpus = [], []
    for _ in range(repeats):
        if before is not None:
            await before()
        wall, cpu = time.perf_counter(), time.thread_time()
        await work()
        walls.append((time.perf_counter() - wall) * 1000.0)
        cpus.append((time.thread_time() - cpu) * 1000.0)
    return statistics.median(walls), statistics.median(cpus)


def build_only(snapshot: Snapshot) -> list[GateDecision]:
    """The floor of `decide`: one result object for each lane and nothing else."""
    return [
        GateDecision(lane=lane.lane, state=GateState.CLOSED, reason="idle")  # type: ignore[arg-type]
        for lane in snapshot.lanes
    ]


async def measure(url: str, lanes: int, repeats: int) -> dict[str, Any]:
    client = async_client(url)
    await client.flushall()
    policy = PoolPolicy(
        name="bench",
        kind=PolicyKind.IDLE_WINDOW,
        engine=EnginePolicy(kv_tokens=400_000),
        # The records are published once for several measurements.
        idle=IdlePolicy(max_telemetry_age_ms=60_000.0, max_metric_age_ms=60_000.0),
    )
    await PolicyStore(client, POOL).set(policy)
    scripts = Scripts(client)
    await publish(scripts, lanes)
    worker = PolicyWorker(client, POOL)
    worker.lease.lease_ms = 600_000
    assert await worker.lease.acquire()
    await worker.cycle()
    await worker.cycle()
    await publish(scripts, lanes)
    seen = await worker._observer.look()
    decisions = decide(seen.snapshot, policy)
    if len(decisions) != lanes or any(d.state is not GateState.OPEN for d in decisions):
        raise SystemExit(f"the set-up is wrong: {len(decisions)} decisions, not all open")
    encoder = msgspec.json.Encoder()

    def encode() -> list[bytes]:
        return [encoder.encode(gate_of(d, 1, worker.lease.token)) for d in decide(seen.snapshot, policy)]

    bodies = encode()
    calm_collector()
    decide_ms = timed(lambda: decide(seen.snapshot, policy), repeats)
    both_ms = timed(encode, repeats)
    floor_ms = timed(lambda: build_only(seen.snapshot), repeats)

    async def refresh() -> None:
        # Records live 10 s: keep them young without counting it, and make the next cycle do all its work.
        await publish(scripts, lanes)
        worker._renewed.clear()
        worker._record_due = worker._status_due = 0.0
        await worker.events.flush()

    async def without_gates() -> None:
        await refresh()
        await client.delete(*[KEYS.gate(f"r{i}") for i in range(lanes)])

    async def plain_set() -> None:
        pipe = client.pipeline(transaction=False)
        for i, body in enumerate(bodies):
            pipe.set(f"floor:{i}", body, px=1000)
        await pipe.execute()

    async def plain_get() -> None:
        pipe = client.pipeline(transaction=False)
        for prefix in ("telemetry:", "lane-telemetry:", "gate:", "gate-epoch:"):
            pipe.mget([f"{KEYS.prefix}{prefix}r{i}" for i in range(lanes)])
        await pipe.execute()

    renew = await timed_async(worker.cycle, repeats, refresh)
    change = await timed_async(worker.cycle, repeats, without_gates)
    quiet = await timed_async(worker.cycle, repeats)
    sets, _ = await timed_async(plain_set, repeats)
    gets, _ = await timed_async(plain_get, repeats)
    await worker.events.close()
    await client.aclose()
    return {
        "lanes": lanes,
        "decide_ms": decide_ms,
        "decide_encode_ms": both_ms,
        "cycle_renew_ms": renew[0],
        "cycle_renew_cpu_ms": renew[1],
        "cycle_change_ms": change[0],
        "cycle_change_cpu_ms": change[1],
        "cycle_quiet_ms": quiet[0],
        "cycle_quiet_cpu_ms": quiet[1],
        "floor_build_ms": floor_ms,
        "floor_set_ms": sets,
        "floor_get_ms": gets,
        "decide_over_floor": decide_ms / floor_ms,
        "cycle_over_floor": renew[0] / (sets + gets),
    }


async def run(sizes: list[int], repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, EmbeddedValkey(folder, appendonly=False) as server:
        rows = [await measure(server.url, n, max(3, min(repeats, 20_000 // n + 3))) for n in sizes]
    base = rows[0]
    for row in rows:
        for name in ("decide_ms", "decide_encode_ms", "cycle_renew_ms"):
            per_lane = row[name] / row["lanes"]
            row[f"{name.removesuffix('_ms')}_linear"] = per_lane / (base[name] / base["lanes"])
    return {"benchmark": "policy_cycle", "cores": os.cpu_count(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lanes", default="10,100,1000,3000,10000", help="sizes, comma separated")
    parser.add_argument("--repeats", type=int, default=50, help="most repeats of each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    configure(level="error")
    result = asyncio.run(run([int(n) for n in given.lanes.split(",")], given.repeats))
    if given.json:
        print(json.dumps(result, indent=2))
        return
    columns = [
        ("lanes", "lanes", "{:.0f}"),
        ("decide", "decide_ms", "{:.2f}"),
        ("+encode", "decide_encode_ms", "{:.2f}"),
        ("linear", "decide_encode_linear", "{:.2f}"),
        ("x floor", "decide_over_floor", "{:.1f}"),
        ("quiet", "cycle_quiet_ms", "{:.2f}"),
        ("(cpu)", "cycle_quiet_cpu_ms", "{:.2f}"),
        ("renew", "cycle_renew_ms", "{:.2f}"),
        ("(cpu)", "cycle_renew_cpu_ms", "{:.2f}"),
        ("change", "cycle_change_ms", "{:.2f}"),
        ("linear", "cycle_renew_linear", "{:.2f}"),
        ("SETs", "floor_set_ms", "{:.2f}"),
        ("MGETs", "floor_get_ms", "{:.2f}"),
        ("x floor", "cycle_over_floor", "{:.1f}"),
    ]
    print("milliseconds, medians; decide and encode in CPU time, cycles and floors in wall time (and CPU)")
    print(" ".join(f"{title:>9}" for title, _, _ in columns))
    for row in result["rows"]:
        print(" ".join(f"{form.format(row[key]):>9}" for _, key, form in columns))


if __name__ == "__main__":
    main()
