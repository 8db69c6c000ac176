"""The twin against the live demo on the same slice of a trace: is what it says true?

    python benchmarks/twin_fidelity.py [--start S] [--duration S] [--gpus N] [--live DIR] [--latencies]
    [--seeds N] [--json]

Runs `hybridsched demo` at speed 1 (online alone, then with the batch, so twice the duration), or takes a
report folder that a demo at speed 1 has left (`--live`, with the same slice and engines), and the twin on
the same load. The machine should have nothing else to do: the live figures contain whatever it does besides.

Prints one row for each figure: live, the middle of N runs of the twin with different seeds, the least and
the greatest of them, and twin / live. "within" is the aim of 10 % of the middle one; "in range": a live run
like this one is among what the twin says can happen. Percentiles of few events are uncertain by themselves:
the p99 of 140 pauses is the second longest of them.

With `--latencies` the ways between the parts are measured in the live run's files first, and used in the
place of the twin's own (`hybridsched.twin.latencies`).
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from bisect import bisect_left, bisect_right
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from hybridsched.report import harvest
from hybridsched.report.percentiles import percentile
from hybridsched.report.record import EngineLog, PassRecord, event_of, read_engine
from hybridsched.report.summary import summarise
from hybridsched.simulate.options import SimulateOptions, make_plan
from hybridsched.simulate.run import run_record
from hybridsched.twin.latencies import Latencies

AIM = 0.10

FIGURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harvested ratio", ("harvest", "harvested_ratio")),
    ("idle s", ("harvest", "idle_s")),
    ("TTFT p50 ms", ("online", "ttft_ms", "p50")),
    ("TTFT p99 ms", ("online", "ttft_ms", "p99")),
    ("TPOT p50 ms", ("online", "tpot_ms", "p50")),
    ("TPOT p99 ms", ("online", "tpot_ms", "p99")),
    ("TTFT p50 ms, online alone", ("online_only", "ttft_ms", "p50")),
    ("TTFT p99 ms, online alone", ("online_only", "ttft_ms", "p99")),
    ("TPOT p50 ms, online alone", ("online_only", "tpot_ms", "p50")),
    ("TPOT p99 ms, online alone", ("online_only", "tpot_ms", "p99")),
    ("signals", ("pauses", "signals")),
    ("pauses", ("pauses", "count")),
    ("signal to quiet p50 ms", ("pauses", "signal_to_quiet_ms", "p50")),
    ("signal to quiet p99 ms", ("pauses", "signal_to_quiet_ms", "p99")),
    ("iterations with offline p50 ms", ("iterations", "with_offline_ms", "p50")),
    ("offline lines completed", ("offline", "completed")),
    ("offline tokens computed", ("offline", "tokens_computed")),
    ("offline output tokens", ("offline", "output_tokens")),
    ("tokens computed again", ("offline", "tokens_recomputed")),
    ("requests ended by pauses", ("pauses", "requests_ended")),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--start", type=float, default=0.0)
    parser.add_argument("--duration", type=float, default=100.0)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--live", type=Path, help="report folder of a demo at speed 1")
    parser.add_argument("--latencies", action="store_true")
    parser.add_argument("--seeds", type=int, default=9, help="runs of the twin")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hs-fidelity-") as folder:
        report = args.live or run_demo(Path(folder) / "report", args.start, args.duration, args.gpus)
        live = json.loads((report / "summary.json").read_bytes())
        found = latencies_of(report) if args.latencies else Latencies()
    if live["run"]["speed"] != 1.0:
        parser.error(f"{report} is of a run at speed {live['run']['speed']:g}; only speed 1 can be compared")
    twins = []
    for seed in range(max(1, args.seeds)):
        options = SimulateOptions(
            start_s=args.start, duration_s=args.duration, gpus=args.gpus, latencies=found, seed=seed
        )
        plan = make_plan(options)
        twins.append(summarise(run_record(plan, plan.policies[0])))
    rows = [row(name, value(live, path), [value(twin, path) for twin in twins]) for name, path in FIGURES]
    if args.json:
        out = {"latencies_ms": msgspec.to_builtins(found), "lateness": live["lateness"], "figures": rows}
        print(json.dumps(out, indent=2))
        return 0
    late = live["lateness"]["engine_clock_ms"]["p99"]
    print(f"live engines woke p99 {late} ms after their clock: live figures contain that too")
    print(f"{'':<34}{'live':>12}{'twin':>12}{'from':>12}{'to':>12}{'twin/live':>11}")
    for one in rows:
        ratio = one["ratio"]
        print(
            f"{one['figure']:<34}{shown(one['live']):>12}{shown(one['twin']):>12}{shown(one['min']):>12}"
            f"{shown(one['max']):>12}{'–' if ratio is None else f'{ratio:.3f}':>11}  {one['mark']}"
        )
    if args.latencies:
        print(json.dumps(msgspec.to_builtins(found)))
    return 0


def run_demo(report: Path, start_s: float, duration_s: float, gpus: int) -> Path:
    """A demo at speed 1; its report folder."""
    command = [
        *(sys.executable, "-m", "hybridsched", "demo", "--speed", "1", "--json"),
        *("--start", str(start_s), "--duration", str(duration_s), "--gpus", str(gpus)),
        *("--report", str(report)),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return report


def value(summary: dict[str, Any], path: tuple[str, ...]) -> float | None:
    found: Any = summary
    for key in path:
        found = None if found is None else found.get(key)
    return found


def row(figure: str, live: float | None, twins: list[float | None]) -> dict[str, Any]:
    known = [one for one in twins if one is not None]
    if not known:
        return (
            {"figure": figure, "live": live} | dict.fromkeys(("twin", "min", "max", "ratio")) | {"mark": ""}
        )
    twin = median(known)
    ratio = None if not live else round(twin / live, 4)
    mark = "" if ratio is None else "within" if abs(ratio - 1) <= AIM else "off"
    if mark == "off" and min(known) <= (live or 0.0) <= max(known):
        mark = "in range"
    return {
        "figure": figure,
        "live": live,
        "twin": twin,
        "min": min(known),
        "max": max(known),
        "ratio": ratio,
        "mark": mark,
    }


def shown(number: float | None) -> str:
    if number is None:
        return "–"
    return (
        f"{number:,.3f}" if abs(number) < 10 else f"{number:,.1f}" if abs(number) < 1000 else f"{number:,.0f}"
    )


# -- latencies from the files of a live run, which share one monotonic clock ---------------------------------


def latencies_of(report: Path) -> Latencies:
    """Medians of the ways between the parts, as far as the files show them. The others stay as they are."""
    begin_s = float((report / "load" / "together.begin").read_text())
    with (report / "events.jsonl").open() as file:
        events = [event for line in file if (event := event_of(json.loads(line))) is not None]
    logs = {
        path.stem.removeprefix("together-"): read_engine(path, path.stem.removeprefix("together-"))
        for path in sorted((report / "engines").glob("together-*.jsonl"))
    }
    with (report / "requests.csv").open() as file:
        rows = [one for one in csv.DictReader(file) if one["pass"] == "together"]
    signals = [event for event in events if event.t == "signal"]
    accept = [float(one["sent_s"]) - float(one["scheduled_s"]) for one in rows]
    claim = [float(event.data["claimed_mono_s"]) - event.mono_s for event in signals]
    send = [
        started - float(event.data["claimed_mono_s"])
        for event in signals
        if (started := first_after(idle_starts(logs[event.lane]), float(event.data["claimed_mono_s"])))
    ]
    prompts = sorted(it.e for log in logs.values() for it in log.iterations if it.pon > 0)
    reply = [
        float(one["first_s"]) + begin_s - ended
        for one in rows
        if one["first_s"] and (ended := last_before(prompts, float(one["first_s"]) + begin_s))
    ]
    opened = [event for event in events if event.t == "gate" and event.data.get("state") == "open"]
    first = [
        started - event.mono_s
        for event in events
        if event.t == "resume"
        and (started := first_after([it.s for it in logs[event.lane].iterations if it.off > 0], event.mono_s))
    ]
    own = Latencies()
    wake_ms = _ms(claim, 0.5, own.wake_ms)
    record = PassRecord(start_s=0.0, end_s=inf, engines=tuple(logs.values()), events=tuple(events))
    path_ms = signal_path_ms(record)
    return Latencies(
        accept_ms=_ms(accept, 0.5, own.accept_ms),
        wake_ms=wake_ms,
        abort_ms=own.abort_ms if path_ms is None else max(0.1, round(path_ms - wake_ms - own.gate_ms, 3)),
        # An iteration that is going on hides the arrival: only the quickest tell of the way alone.
        send_ms=_ms(send, 0.1, own.send_ms),
        reply_ms=_ms(reply, 0.5, own.reply_ms),
        offline_send_ms=_ms(first, 0.1, own.offline_send_ms) if opened else own.offline_send_ms,
    )


def signal_path_ms(record: PassRecord) -> float | None:
    """From the accept of an online request until the engine has been told to end the lane's requests.

    No clock stands there. But a signal meets an iteration at a random point, so the number of iterations with
    offline work that still begin after it, times their length, is the time that it takes, on average.
    """
    began = lengths = count = 0.0
    for pause in harvest.pauses(record):
        if not pause.found_work:
            continue
        log = next(one for one in record.engines if one.replica == pause.lane)
        until_s = pause.at_s + pause.quiet_s
        met = [it for it in log.iterations if it.off > 0 and pause.at_s < it.e and it.s < until_s]
        count += 1
        began += sum(1 for it in met if it.s > pause.at_s)
        lengths += met[0].e - met[0].s
    return began / count * lengths / count * 1e3 if count else None


def idle_starts(log: EngineLog) -> list[float]:
    return [it.s for it in log.iterations if it.on > 0]


def first_after(times: list[float], at: float) -> float | None:
    place = bisect_left(times, at)
    return times[place] if place < len(times) else None


def last_before(times: list[float], at: float) -> float | None:
    place = bisect_right(times, at) - 1
    return times[place] if place >= 0 else None


def _ms(seconds: list[float], share: float, otherwise: float) -> float:
    found = percentile(seconds, share)
    return otherwise if found is None else round(max(0.0, found) * 1e3, 3)


if __name__ == "__main__":
    raise SystemExit(main())
