"""Every policy over several traces at three load levels each, in the twin: the whole table, with one command.

    python benchmarks/twin_policies.py [--out DIR] [--traces DIR] [--only NAME,NAME] [--policies P,P]
    [--needs 0.15,0.3,0.5] [--duration S] [--jobs N] [--markdown]

Without options: the traces that come with the package, waves of bursts and valleys, and every preset. With
`--traces` the files of `TRACES` that lie in that folder.

A load level says which share of the engine seconds online needs at least at its objective (`twin.ceiling`);
the trace's own requests are left out or copied (`simulate --load`) until it needs that. So the levels of
different traces can be compared. The waves run at shares of their own rate.

Each run is a process of its own, `hybridsched simulate --json`, and its result a file in DIR. A run whose
file says that it was made by the same command is not made again: after a stop, or with a further policy, the
same command goes on. Remove DIR after a change of the code. `table.json` holds the rows.

Aims: co-location costs at most 5 % of p99 TTFT and 2 % of p99 TPOT, objectives are kept by 99 % of the
requests or as many as with online alone, 95 % of the idle engine seconds are harvested, and 90 % of the
ceiling is reached. "missed" names those that are not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridsched.engines.simulated.perf import DEFAULT_PROFILE, load_profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.policyfile import PRESETS
from hybridsched.simulate.compare import aligned
from hybridsched.traces import SHIPPED_TRACE, shipped
from hybridsched.twin.ceiling import online_needs_s
from hybridsched.twin.trace import load_trace

TPOT_MS = 50.0
"""The objective that load levels are reckoned with, as in the presets."""


@dataclass(frozen=True)
class Slice:
    """A part of a trace, and the engines that it is given."""

    name: str
    file: str
    start_s: float
    duration_s: float
    engines: int


TRACES = (
    Slice("azure_code", "azure_code_2023.csv", 1140.0, 600.0, 4),
    Slice("azure_conv", "azure_conv_2023.csv", 600.0, 600.0, 8),
    Slice("mooncake", "mooncake_conversation_0_40min_dithered.csv", 300.0, 600.0, 8),
    # From the busiest hours of the day on.
    Slice("servegen_mlarge", "servegen_mlarge_48h_1rps.csv.gz", 14_400.0, 900.0, 4),
    Slice("servegen_r1", "servegen_r1_24h_1rps.csv.gz", 7_200.0, 900.0, 8),
)
WAVES = "waves"
WAVES_GIVEN, WAVES_DURATION_S, WAVES_LOADS = "15,1,90", 900.0, (0.5, 0.75, 1.0)
WAVES_LINES = "prompt_tokens,output_tokens,arrival_s\n512,128,0\n"
"""In the published measurement the batch's lines are as long as the online requests."""
AIMS = {"harvested": 0.95, "ttft": 1.05, "tpot": 1.02, "objectives": 0.99, "ceiling": 0.90}
COLUMNS = (
    *("trace", "engines", "load", "requests", "policy", "harvested", "of ceiling", "TTFT p99 ms", "x alone"),
    *(
        "p50 x",
        "p95 x",
        "TPOT p99 ms",
        "x alone",
        "in objectives",
        "alone",
        "pauses",
        "computed again",
        "missed",
    ),
)


@dataclass(frozen=True)
class Run:
    """One process."""

    trace: str
    engines: int
    load: str
    policy: str
    command: tuple[str, ...]

    @property
    def file(self) -> str:
        return f"{self.trace}-{self.load}-{Path(self.policy).stem}.json".replace(" ", "").replace("%", "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("report-policies"))
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with further traces")
    parser.add_argument("--only", default="", help="names of traces")
    parser.add_argument("--policies", default=",".join(PRESETS))
    parser.add_argument("--needs", default="0.15,0.3,0.5", help="shares of the engine seconds")
    parser.add_argument("--duration", type=float, help="seconds of each trace, in the place of its own")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    needs = [float(one) for one in args.needs.split(",")]
    only = {name.strip() for name in args.only.split(",") if name.strip()}
    unknown = only - {one.name for one in TRACES} - {WAVES}
    if unknown:
        known = ", ".join([*(one.name for one in TRACES), WAVES])
        parser.error(f"--only names {min(unknown)!r}; there are {known}")
    runs = runs_of(args.traces, only, needs, policies, args.duration, args.out)
    if not runs:
        parser.error("none of the traces is there; give their folder with --traces")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "waves.csv").write_text(WAVES_LINES)
    failed = carry_out(runs, args.out, args.jobs)
    rows = [row for run in runs if (row := row_of(run, args.out)) is not None]
    (args.out / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    print(markdown(rows) if args.markdown else aligned([COLUMNS, *map(cells, rows)]))
    for run, why in failed:
        print(f"failed: {' '.join(run.command)}\n{why}", file=sys.stderr)
    return 1 if failed else 0


def runs_of(
    folder: Path | None,
    only: set[str],
    needs: list[float],
    policies: list[str],
    duration_s: float | None,
    out: Path,
) -> list[Run]:
    """All of them, in the order of the table."""
    profile, runs = load_profile(DEFAULT_PROFILE), []
    for part in TRACES:
        path = path_of(part, folder)
        if path is None or (only and part.name not in only):
            continue
        span_s = duration_s or part.duration_s
        rows = load_trace(path, start_s=part.start_s, duration_s=span_s)
        own_s = online_needs_s(rows, profile, Limits(max_model_len=200_000), tpot_ms=TPOT_MS)
        common = ("--trace", str(path), "--start", f"{part.start_s:g}", "--duration", f"{span_s:g}")
        for need in needs:
            load = round(need * part.engines * span_s / own_s, 4)
            for policy in policies:
                command = (*common, "--gpus", str(part.engines), "--load", f"{load:g}", "--policy", policy)
                runs.append(Run(part.name, part.engines, f"{need:.0%}", policy, command))
    if not only or WAVES in only:
        span_s = duration_s or WAVES_DURATION_S
        for load in WAVES_LOADS:
            for policy in policies:
                command = (
                    *("--waves", WAVES_GIVEN, "--duration", f"{span_s:g}", "--gpus", "1"),
                    *("--batch", str(out / "waves.csv"), "--load", f"{load:g}", "--policy", policy),
                )
                runs.append(Run(WAVES, 1, f"x{load:g}", policy, command))
    return runs


def path_of(part: Slice, folder: Path | None) -> Path | None:
    """The file in the folder, or the package's own; None: it is in neither."""
    if folder is not None and (folder / part.file).is_file():
        return folder / part.file
    own = shipped(part.file.removesuffix(".gz") + ".gz")
    return own if own.is_file() and own.name == SHIPPED_TRACE else None


def carry_out(runs: list[Run], out: Path, jobs: int) -> list[tuple[Run, str]]:
    """Make the runs that are not there yet. Returns those that failed, with what they said."""
    wanted = [run for run in runs if read(run, out) is None]
    failed: list[tuple[Run, str]] = []
    done = 0

    def one(run: Run) -> None:
        nonlocal done
        command = [sys.executable, "-m", "hybridsched", "simulate", *run.command, "--json"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        done += 1
        if result.returncode != 0:
            failed.append((run, result.stderr.strip()))
            return
        summary = json.loads(result.stdout)
        unfinished = out / f".{run.file}.{os.getpid()}"
        unfinished.write_text(json.dumps({"command": list(run.command), "summary": summary}) + "\n")
        unfinished.replace(out / run.file)
        if sys.stderr.isatty():
            said = (
                f"{done} of {len(wanted)}: {run.trace} {run.load} {run.policy} in {summary['wall_s']:.0f} s"
            )
            print(f"\r\x1b[K{said}", end="", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        list(pool.map(one, wanted))
    if wanted and sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return failed


def read(run: Run, out: Path) -> dict[str, Any] | None:
    """The summary of a run that was made before by the same command."""
    try:
        found = json.loads((out / run.file).read_text())
    except (OSError, ValueError):
        return None
    return found["summary"] if found.get("command") == list(run.command) else None


def row_of(run: Run, out: Path) -> dict[str, Any] | None:
    """What the table says of a run."""
    summary = read(run, out)
    if summary is None:
        return None
    online, alone, cost = summary["online"], summary["online_only"], summary["co_location"]
    row = {
        "trace": run.trace,
        "engines": run.engines,
        "load": run.load,
        "requests": online["requests"],
        "policy": run.policy,
        "harvested_ratio": summary["harvest"]["harvested_ratio"],
        "ceiling_share": summary["ceiling"]["share"],
        "ceiling_tokens": summary["ceiling"]["tokens"],
        "offline_tokens_done": summary["ceiling"]["tokens_done"],
        "ttft_ms": online["ttft_ms"],
        "tpot_ms": online["tpot_ms"],
        "ttft_p50_ratio": cost["ttft_p50_ratio"],
        "ttft_p95_ratio": cost["ttft_p95_ratio"],
        "ttft_p99_ratio": cost["ttft_p99_ratio"],
        "tpot_p99_ratio": cost["tpot_p99_ratio"],
        "slo_attainment": online["slo_attainment"],
        "slo_attainment_alone": alone["slo_attainment"],
        "pauses": summary["pauses"]["count"],
        "tokens_recomputed": summary["offline"]["tokens_recomputed"],
    }
    return row | {"missed": missed(row)}


def missed(row: dict[str, Any]) -> list[str]:
    """The aims that the run does not reach."""
    kept = min(AIMS["objectives"], row["slo_attainment_alone"])
    found = {
        "harvest": (row["harvested_ratio"] or 0.0) >= AIMS["harvested"],
        "ceiling": (row["ceiling_share"] or 0.0) >= AIMS["ceiling"],
        "TTFT": (row["ttft_p99_ratio"] or 1.0) <= AIMS["ttft"],
        "TPOT": (row["tpot_p99_ratio"] or 1.0) <= AIMS["tpot"],
        "objectives": row["slo_attainment"] >= kept,
    }
    return [name for name, reached in found.items() if not reached]


def cells(row: dict[str, Any]) -> list[str]:
    """A row for people."""
    return [
        row["trace"],
        str(row["engines"]),
        row["load"],
        f"{row['requests']:,}",
        row["policy"],
        share(row["harvested_ratio"]),
        share(row["ceiling_share"]),
        figure(row["ttft_ms"]["p99"], 0),
        figure(row["ttft_p99_ratio"], 3),
        figure(row["ttft_p50_ratio"], 2),
        figure(row["ttft_p95_ratio"], 2),
        figure(row["tpot_ms"]["p99"], 1),
        figure(row["tpot_p99_ratio"], 3),
        share(row["slo_attainment"]),
        share(row["slo_attainment_alone"]),
        f"{row['pauses']:,}",
        f"{row['tokens_recomputed']:,}",
        " ".join(row["missed"]) or "-",
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def figure(value: float | None, digits: int) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


if __name__ == "__main__":
    raise SystemExit(main())
