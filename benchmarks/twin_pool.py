"""Online requests that the twin of a whole pool simulates in a second of process time, with offline work
beside.

    python benchmarks/twin_pool.py [--engines 4,16,64] [--requests N] [--rate R] [--policy NAME|FILE]
    [--alone] [--profile] [--json]

The requests of the shipped trace, over and over at R per second and engine, on a pool with the policy (by
default idle-window) and a batch that outlasts them (`--alone`: without it). "us_per_request" is all of it:
queue, claims, lanes, policy worker and engines, without reading and without the report. "us_per_engine_s" is
the same by the seconds that the engines lived: with offline work it hardly depends on the number of
requests, as an engine goes through an iteration with a slice of a prompt about 19 times a second.

"loop_ns" is what one turn of an empty loop of Python takes in the same run, to compare machines by.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import time

from twin_engine import load_of

from hybridsched.engines.simulated.perf import DEFAULT_PROFILE, load_profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.policyfile import load_policy
from hybridsched.traces import SHIPPED_LENGTHS, SHIPPED_TRACE, TraceRow, read_trace, shipped
from hybridsched.twin.clock import Loop
from hybridsched.twin.lengths import read_lengths, repeated
from hybridsched.twin.pool import Pool, PoolSpec

LINES_PER_ENGINE_S = 4.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", default="4,16,64")
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second and engine")
    parser.add_argument("--policy", default="idle-window")
    parser.add_argument("--alone", action="store_true", help="without offline work")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = read_trace(shipped(SHIPPED_TRACE))
    lengths = read_lengths(shipped(SHIPPED_LENGTHS))
    found = []
    for engines in (int(one) for one in args.engines.split(",")):
        load = [
            TraceRow(arrival_s=at, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)
            for at, row in load_of(rows, args.requests, args.rate * engines)
        ]
        duration_s = load[-1].arrival_s + 1.0
        lines = 0 if args.alone else int(LINES_PER_ENGINE_S * engines * duration_s) + 1
        batch = list(repeated(lengths, lines))
        spec = PoolSpec(
            engines=engines,
            policy=load_policy(args.policy).policy,
            limits=Limits(),
            profile=load_profile(DEFAULT_PROFILE),
            offline=not args.alone,
            bin_s=max(1.0, duration_s / 600),
        )
        pool = Pool(Loop(), spec, load, batch)
        gc.collect()
        gc.disable()
        profile = cProfile.Profile() if args.profile else None
        begin = time.process_time()
        if profile is not None:
            profile.enable()
        pool.run(duration_s)
        if profile is not None:
            profile.disable()
        took_s = time.process_time() - begin
        gc.enable()
        online_s = sum(meter.online_s for meter in pool.meters)
        engine_s = engines * pool.end_s
        found.append(
            {
                "engines": engines,
                "policy": args.policy,
                "requests": args.requests,
                "requests_per_s": round(args.requests / took_s),
                "us_per_request": round(took_s / args.requests * 1e6, 1),
                "engine_s": round(engine_s),
                "us_per_engine_s": round(took_s / engine_s * 1e6, 1),
                "online_share": round(online_s / engine_s, 3),
                "lines": pool.feed.finished,
                "decisions": pool.worker.decided,
                "cycles": pool.worker.cycles,
                "took_s": round(took_s, 2),
                "loop_ns": round(loop_ns(), 1),
            }
        )
        if not args.json:
            print(json.dumps(found[-1]))
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if args.json:
        print(json.dumps(found, indent=2))
    return 0


def loop_ns() -> float:
    begin = time.process_time()
    for _ in range(1_000_000):
        pass
    return (time.process_time() - begin) * 1e3


if __name__ == "__main__":
    raise SystemExit(main())
