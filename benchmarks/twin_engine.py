"""Online requests that the twin simulates in a second of process time, by the number of engines.

    python benchmarks/twin_engine.py [--trace FILE] [--engines 1,4,16,64] [--requests N] [--rate R] [--json]

The requests of a trace, over and over at R per second and engine, to the engine with the fewest requests; no
offline work. "us_per_request" is all of it: loop, router and engines; "engine_us_per_request" is one
engine alone, called directly.

The peer of the same run is the simulated vLLM's scheduler, iteration by iteration on the same clock, under
the first of the requests (`--peer-requests`) and on the smallest number of engines. Its sequences carry token
ids, which are made before the measurement. Process time, of one core.

Ratios: "ratio" is the twin's rate over the scheduler's on the peer's load; "linear" is the rate over that of
the fewest engines (1: an engine more costs nothing). "loop_ns" is what one turn of an empty loop of Python
takes in the same run, to compare machines by.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import deque
from pathlib import Path

from hybridsched.engines.simulated.perf import DEFAULT_PROFILE, Profile, load_profile
from hybridsched.engines.simulated.scheduler import Limits, Scheduler
from hybridsched.engines.simulated.sequence import Seq
from hybridsched.traces import SHIPPED_TRACE, TraceRow, read_trace, shipped
from hybridsched.twin.clock import EngineClock, Loop
from hybridsched.twin.engine import TwinEngine
from hybridsched.twin.request import Event, EventKind, TwinRequest

FIRST_TOKEN = EventKind.FIRST_TOKEN
LIMITS = Limits(max_model_len=32_768)
Load = list[tuple[float, TraceRow]]


def load_of(rows: list[TraceRow], requests: int, rate_rps: float) -> Load:
    """The trace's own gaps, stretched to the mean rate, repeated until there are enough requests."""
    first_s, last_s = rows[0].arrival_s, rows[-1].arrival_s
    mean_gap_s = (last_s - first_s) / (len(rows) - 1)
    stretch = 1.0 / rate_rps / mean_gap_s
    period_s = last_s - first_s + mean_gap_s
    load = []
    for number in range(requests):
        turn, at = divmod(number, len(rows))
        row = rows[at]
        load.append(((turn * period_s + row.arrival_s - first_s) * stretch, row))
    return load


class Pool:
    """Twin engines behind a router that takes the engine with the fewest requests."""

    def __init__(self, engines: int, profile: Profile) -> None:
        self.loop = Loop()
        self.engines = [TwinEngine(LIMITS, profile) for _ in range(engines)]
        self.clocks = [EngineClock(self.loop, engine, self._on_events) for engine in self.engines]
        self.loads = [0] * engines
        self.ended = 0
        self.ttft_s = 0.0

    def _arrive(self, row: TraceRow) -> None:
        loads = self.loads
        at = loads.index(min(loads))
        loads[at] += 1
        self.engines[at].add(TwinRequest(row.prompt_tokens, row.output_tokens, owner=at), self.loop.now_s)
        self.clocks[at].changed()

    def _on_events(self, events: list[Event]) -> None:
        for kind, request in events:
            if kind is FIRST_TOKEN:
                assert request.first_token_s is not None
                self.ttft_s += request.first_token_s - request.arrival
            else:
                assert isinstance(request.owner, int)
                self.loads[request.owner] -= 1
                self.ended += 1

    def run(self, load: Load) -> None:
        self.loop.feed(load, self._arrive)
        self.loop.run()
        for engine in self.engines:
            engine.settle(self.loop.now_s)


class PeerEngine:
    """The scheduler under a chained virtual clock."""

    def __init__(self, profile: Profile) -> None:
        self.scheduler = Scheduler(LIMITS)
        self.profile = profile
        self.current = None
        self.end_s = float("inf")
        self.ttft_s = 0.0
        self.ended = 0

    def begin(self, start_s: float) -> None:
        it = self.current = self.scheduler.plan(start_s)
        self.end_s = float("inf")
        if it is not None:
            ms = self.profile.iteration_ms(
                prefill_tokens=it.prefill_tokens,
                batch_decode=it.decodes,
                total_context=it.context,
                prefill_pairs=it.prefill_pairs,
            )
            self.end_s = start_s + ms / 1e3

    def step(self) -> None:
        assert self.current is not None
        end_s = self.end_s
        out = self.scheduler.commit(self.current, end_s)
        for seq in out.first:
            self.ttft_s += end_s - seq.arrival
        self.ended += len(out.finished)
        self.begin(end_s)


def run_peer(engines: int, profile: Profile, load: Load) -> tuple[float, int, float]:
    """Process seconds, requests ended and the sum of TTFT in seconds."""
    waiting = deque(
        (
            at,
            Seq(
                str(n),
                range(n << 20, (n << 20) + row.prompt_tokens),
                max_tokens=row.output_tokens,
                ignore_eos=True,
            ),
        )
        for n, (at, row) in enumerate(load)
    )
    pool = [PeerEngine(profile) for _ in range(engines)]
    gc.collect()
    begun = time.process_time()
    while True:
        engine = min(pool, key=lambda e: e.end_s)
        arrival_s = waiting[0][0] if waiting else float("inf")
        if arrival_s <= engine.end_s:
            if arrival_s == float("inf"):
                break
            _, seq = waiting.popleft()
            target = min(pool, key=lambda e: e.scheduler.unfinished)
            seq.arrival = arrival_s
            target.scheduler.add(seq)
            if target.current is None:
                target.begin(arrival_s)
        else:
            engine.step()
    spent_s = time.process_time() - begun
    return spent_s, sum(e.ended for e in pool), sum(e.ttft_s for e in pool)


def run_twin(engines: int, profile: Profile, load: Load) -> tuple[float, Pool]:
    pool = Pool(engines, profile)
    gc.collect()
    begun = time.process_time()
    pool.run(load)
    return time.process_time() - begun, pool


def engine_alone_us(profile: Profile, load: Load) -> float:
    """Microseconds a request, of one engine without loop and router; the least of three runs."""
    spent = []
    for _ in range(3):
        engine = TwinEngine(LIMITS, profile)
        gc.collect()
        begun = time.process_time()
        for at_s, row in load:
            if engine.next_s() < at_s:
                engine.advance(at_s)
            engine.add(TwinRequest(row.prompt_tokens, row.output_tokens), at_s)
        engine.advance(float("inf"))
        spent.append(time.process_time() - begun)
    return min(spent) / len(load) * 1e6


def loop_ns() -> float:
    """Nanoseconds of one turn of a loop that does nothing; the least of three runs."""
    spent = []
    for _ in range(3):
        begun = time.process_time()
        for _turn in range(1_000_000):
            pass
        spent.append(time.process_time() - begun)
    return min(spent) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=shipped(SHIPPED_TRACE))
    parser.add_argument("--engines", default="1,4,16,64")
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--peer-requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=0.7, help="requests per second and engine")
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = read_trace(args.trace)
    profile = load_profile(args.profile)
    sizes = [int(size) for size in args.engines.split(",")]
    smallest = min(sizes)

    short = load_of(rows, args.peer_requests, args.rate * smallest)
    peer_s, peer_ended, peer_ttft_s = run_peer(smallest, profile, short)
    twin_s, twin = run_twin(smallest, profile, short)
    if (twin.ended, peer_ended) != (len(short), len(short)):
        raise SystemExit(f"of {len(short)} requests the twin ended {twin.ended} and its peer {peer_ended}")
    result = {
        "peer": {
            "engines": smallest,
            "requests": len(short),
            "scheduler_requests_per_s": round(len(short) / peer_s),
            "twin_requests_per_s": round(len(short) / twin_s),
            "ratio": round(peer_s / twin_s, 1),
            "scheduler_mean_ttft_ms": round(peer_ttft_s / len(short) * 1e3, 3),
            "twin_mean_ttft_ms": round(twin.ttft_s / len(short) * 1e3, 3),
        },
        "engine_us_per_request": round(engine_alone_us(profile, load_of(rows, 20_000, args.rate)), 2),
        "loop_ns": round(loop_ns(), 1),
        "twin": [],
    }
    base = None
    for size in sizes:
        spent_s, pool = run_twin(size, profile, load_of(rows, args.requests, args.rate * size))
        rate = pool.ended / spent_s
        base = base or rate
        result["twin"].append(
            {
                "engines": size,
                "requests": pool.ended,
                "requests_per_s": round(rate),
                "us_per_request": round(1e6 / rate, 2),
                "linear": round(rate / base, 2),
                "mean_ttft_ms": round(pool.ttft_s / pool.ended * 1e3, 2),
                "iterations_per_request": round(
                    sum(e.totals.iterations for e in pool.engines) / pool.ended, 1
                ),
            }
        )
    if args.json:
        print(json.dumps(result))
        return
    print(json.dumps({name: value for name, value in result.items() if name != "twin"}, indent=1))
    for row in result["twin"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
