"""From the record of a run to `summary.json`: pure, and every definition in one place (docs/report.md).

Times in the result are those of the engines' clock: measured wall durations times `speed`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hybridsched.core.policy import SloPolicy
from hybridsched.report import harvest
from hybridsched.report.percentiles import spread
from hybridsched.report.record import OnlineRow, PassRecord, RunRecord
from hybridsched.report.slurm import slurm_summary

SCHEMA = 1
LATE_SEND_S = 0.020
"""A request sent later than this after its time (wall) is reported: the load generator itself was late."""

BARS: dict[str, float] = {
    "harvested_ratio": 0.95,
    "ttft_p99_ratio": 1.05,
    "tpot_p99_ratio": 1.02,
    "signal_path_ms": 10.0,
}
"""The figures to reach: design figures of the project, see docs/report.md."""


def ttft_ms(row: OnlineRow, speed: float) -> float | None:
    """From the scheduled arrival to the first token; None if there was none."""
    return None if row.first_s is None else (row.first_s - row.scheduled_s) * 1000 * speed


def tpot_ms(row: OnlineRow, speed: float) -> float | None:
    """Time per output token after the first; None for answers of fewer than two tokens."""
    if row.first_s is None or row.last_s is None or row.tokens < 2:
        return None
    return (row.last_s - row.first_s) / (row.tokens - 1) * 1000 * speed


def attained(row: OnlineRow, slo: SloPolicy, speed: float) -> bool:
    """Whether the request was answered within both objectives."""
    ttft, tpot = ttft_ms(row, speed), tpot_ms(row, speed)
    if row.status != "ok" or ttft is None:
        return False
    return ttft <= slo.ttft_ms and (tpot is None or tpot <= slo.tpot_ms)


def online_summary(rows: Sequence[OnlineRow], slo: SloPolicy, speed: float) -> dict[str, Any]:
    """The `online` part: counts, latency of the answered requests, share within the objectives."""
    ok = [row for row in rows if row.status == "ok"]
    by_status = Counter(row.status for row in rows)
    ttfts = [value for row in ok if (value := ttft_ms(row, speed)) is not None]
    tpots = [value for row in ok if (value := tpot_ms(row, speed)) is not None]
    kept = sum(attained(row, slo, speed) for row in rows)
    return {
        "requests": len(rows),
        "ok": len(ok),
        "expired": by_status["expired"],
        "failed": len(rows) - len(ok) - by_status["expired"],
        "ttft_ms": spread(ttfts, "p50", "p95", "p99"),
        "tpot_ms": spread(tpots, "p50", "p95", "p99"),
        "slo_attainment": round(kept / len(rows), 6) if rows else None,
        "output_tokens": sum(row.tokens for row in rows),
        "codes": dict(sorted(Counter(row.code or row.status for row in rows if row.status != "ok").items())),
    }


def harvest_summary(record: RunRecord) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The `harvest` part and the table by engine."""
    run, speed = record.together, record.speed
    until = harvest.work_end(run, record.batch.remaining)
    uses = [harvest.engine_use(log, run, until) for log in run.engines]
    idle = sum(use.idle_s for use in uses)
    harvested = sum(use.harvested_s for use in uses)
    table = [
        {
            "replica": use.replica,
            "online_busy_s": round(use.online_s * speed, 3),
            "idle_s": round(use.idle_s * speed, 3),
            "harvested_s": round(use.harvested_s * speed, 3),
            "mixed_s": round(use.mixed_s * speed, 3),
            "mixed_iterations": use.mixed_iterations,
            "offline_output_tokens": harvest.offline_tokens(log)[1],
            "offline_prompt_tokens": harvest.offline_tokens(log)[0],
            "torn_lines": log.torn_lines,
        }
        for use, log in zip(uses, run.engines, strict=True)
    ]
    return {
        "engine_seconds": round(sum(use.span_s for use in uses) * speed, 3),
        "online_busy_s": round(sum(use.online_s for use in uses) * speed, 3),
        "idle_s": round(idle * speed, 3),
        "harvested_s": round(harvested * speed, 3),
        "harvested_ratio": round(harvested / idle, 6) if idle > 0 else None,
        "mixed_s": round(sum(use.mixed_s for use in uses) * speed, 3),
        "work_remained_s": round((until - run.start_s) * speed, 3),
    }, table


def offline_summary(record: RunRecord) -> dict[str, Any]:
    """The `offline` part: lines as the files show them, tokens as the engines logged them.

    Every token of a finished line must be computed once: its prompt and its output. What the engines
    computed beyond that, and beyond what is kept of unfinished lines, was computed again or was the price of
    feeding prompts by slices (one token a slice).
    """
    batch = record.batch
    computed = sum(sum(harvest.offline_tokens(log)) for log in record.together.engines)
    needed = batch.prompt_tokens + batch.output_tokens + batch.kept_prompt_tokens + batch.kept_tokens
    return {
        "lines": batch.lines,
        "completed": batch.completed,
        "failed": batch.failed,
        "remaining": batch.remaining,
        "duplicates": batch.duplicates,
        "missing": batch.missing,
        "output_tokens": batch.output_tokens,
        "tokens_recomputed": max(0, computed - needed),
        "tokens_recomputed_by_workers": batch.worker_recomputed,
        "tokens_computed": computed,
        "prompt_tokens": batch.prompt_tokens,
        "kept_tokens": batch.kept_tokens,
        "wrong_length": batch.wrong_length,
    }


def pause_summary(run: PassRecord, speed: float) -> dict[str, Any]:
    """The `pauses` part. `count` is of pauses: signals that found offline work on the lane."""
    every = harvest.pauses(run)
    found = [pause for pause in every if pause.found_work]
    if run.pauses is not None:
        rungs: dict[str, int] = run.pauses.by_rung
        ended, kept = run.pauses.ended, run.pauses.kept_tokens
    else:
        quiets = [event for event in run.events if event.t == "quiet"]
        rungs = Counter(str(event.data.get("rung", "unknown")) for event in quiets)
        if asleep := sum(event.t == "asleep" for event in run.events):
            rungs["sleep"] = asleep
        ended = sum(int(event.data.get("ended", 0)) for event in quiets)
        kept = sum(int(event.data.get("kept_tokens", 0)) for event in quiets)
    return {
        "count": len(found),
        "signals": len(every),
        "signal_to_quiet_ms": spread([p.quiet_s * 1000 * speed for p in found], "p50", "p99", "max"),
        "signal_path_ms": spread(
            [] if run.by_requests else [p.path_s * 1000 * speed for p in found], "p50", "p99", "max"
        ),
        "by_rung": {"boundary": 0, "iteration": 0, **dict(sorted(rungs.items()))},
        "requests_ended": ended,
        "tokens_kept": kept,
    }


def fidelity_summary(run: PassRecord, speed: float) -> dict[str, Any]:
    """How true the run itself was: lateness of the load generator and of the engines' clocks."""
    late = [row.sent_s - row.scheduled_s for row in run.online]
    engine_late = [] if run.by_requests else [it.late for log in run.engines for it in log.iterations]
    return {
        "load_ms": spread([value * 1000 * speed for value in late], "p50", "p99", "max"),
        "late_sends": sum(value > LATE_SEND_S for value in late),
        "engine_clock_ms": spread([value * 1000 * speed for value in engine_late], "p50", "p99", "max"),
    }


def iteration_summary(run: PassRecord, speed: float) -> dict[str, Any]:
    """Lengths of engine iterations: with offline work, and of online work alone."""
    if any(log.counts is not None for log in run.engines):
        found = [log.counts for log in run.engines if log.counts is not None]
        return {
            "with_offline_ms": spread_counts([one.lengths_offline for one in found], speed),
            "online_alone_ms": spread_counts([one.lengths_online for one in found], speed),
        }
    offline: list[float] = []
    online: list[float] = []
    for log in () if run.by_requests else run.engines:
        for it in log.iterations:
            (offline if it.off > 0 else online).append((it.e - it.s) * 1000 * speed)
    return {
        "with_offline_ms": spread(offline, "p50", "p99", "max"),
        "online_alone_ms": spread(online, "p50", "p99", "max"),
    }


def spread_counts(counts: Sequence[dict[float, int]], factor: float) -> dict[str, float | None]:
    """Percentiles of values (times `factor`) of which it is known how often each came."""
    merged: Counter[float] = Counter()
    for one in counts:
        merged.update(one)
    ordered = sorted(merged.items())
    total = sum(count for _, count in ordered)
    out: dict[str, float | None] = {}
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        rank, seen = max(1, math.ceil(share * total)), 0
        out[name] = None
        for value, count in ordered:
            seen += count
            if seen >= rank:
                out[name] = round(value * factor, 3)
                break
    return out


def ceiling_summary(record: RunRecord, engine_seconds: float) -> dict[str, Any] | None:
    """The `ceiling` part: what a clairvoyant could have got out of the engine seconds, and our share of
    it."""
    ceiling, batch = record.ceiling, record.batch
    if ceiling is None:
        return None
    done = batch.prompt_tokens + batch.output_tokens + batch.kept_prompt_tokens + batch.kept_tokens
    left_s = max(0.0, engine_seconds - ceiling.online_needs_s)
    most = ceiling.alone_tokens_per_s * left_s
    own = ceiling.policy_tokens_per_s * left_s
    return {
        "offline_alone_tokens_per_s": round(ceiling.alone_tokens_per_s, 3),
        "offline_alone_by_policy_tokens_per_s": round(ceiling.policy_tokens_per_s, 3),
        "online_needs_s": round(ceiling.online_needs_s, 3),
        "engine_seconds_left": round(left_s, 3),
        "tokens": round(most),
        "tokens_done": done,
        "share": round(done / most, 6) if most > 0 else None,
        "share_by_policy": round(done / own, 6) if own > 0 else None,
    }


def _ratio(together: float | None, alone: float | None) -> float | None:
    if together is None or alone is None or alone <= 0:
        return None
    return round(together / alone, 4)


def co_location(online: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any] | None:
    """What co-location costs online: percentiles together over those of online alone."""
    if alone is None:
        return None
    return {
        f"{figure}_{rank}_ratio": _ratio(online[f"{figure}_ms"][rank], alone[f"{figure}_ms"][rank])
        for figure in ("ttft", "tpot")
        for rank in ("p50", "p95", "p99")
    }


def verdicts(summary: dict[str, Any]) -> dict[str, Any]:
    """Each figure with its bar: value, bar, and whether it is reached (None: not measured in this run)."""

    def line(value: float | None, bar: float, *, at_least: bool = False) -> dict[str, Any]:
        reached = None if value is None else (value >= bar if at_least else value <= bar)
        return {"value": value, "bar": bar, "at_least": at_least, "reached": reached}

    cost = summary["co_location"] or {}
    offline = summary["offline"]
    return {
        "harvested_ratio": line(
            summary["harvest"]["harvested_ratio"], BARS["harvested_ratio"], at_least=True
        ),
        "ttft_p99_ratio": line(cost.get("ttft_p99_ratio"), BARS["ttft_p99_ratio"]),
        "tpot_p99_ratio": line(cost.get("tpot_p99_ratio"), BARS["tpot_p99_ratio"]),
        "signal_path_p99_ms": line(summary["pauses"]["signal_path_ms"]["p99"], BARS["signal_path_ms"]),
        "lines_missing_or_twice": line(float(offline["missing"] + offline["duplicates"]), 0.0),
        **_of_interrupted(summary.get("interrupted"), line),
    }


def _of_interrupted(found: dict[str, Any] | None, line: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The line of interrupted outputs, where they were compared."""
    if found is None:
        return {}
    value = float(found["compared"] - found["identical"]) if found["compared"] else None
    return {"interrupted_differ": line(value, 0.0)}


def summarise(record: RunRecord) -> dict[str, Any]:
    """`summary.json` of a run."""
    slo, speed, run = record.policy.slo, record.speed, record.together
    online = online_summary(run.online, slo, speed)
    alone = online_summary(record.baseline.online, slo, speed) if record.baseline else None
    harvested, table = harvest_summary(record)
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "online": online,
        "online_only": alone,
        "offline": offline_summary(record),
        "harvest": harvested,
        "pauses": pause_summary(run, speed),
        "policy": {
            "name": record.policy.name,
            "version": record.policy.version,
            "cycles": record.policy.cycles,
            "cycle_ms": {"p50": None, "p99": None} | record.policy.cycle_ms,
            "slo_ms": {"ttft": slo.ttft_ms, "tpot": slo.tpot_ms},
        },
        "wall_s": round(record.wall_s, 3),
        "co_location": co_location(online, alone),
        "iterations": iteration_summary(run, speed),
        "lateness": fidelity_summary(run, speed),
        "lateness_online_only": fidelity_summary(record.baseline, speed) if record.baseline else None,
        "engines": table,
        "restarts": dict(run.restarts),
        "run": {
            "trace": record.trace,
            "gpus": record.gpus,
            "speed": record.speed,
            "duration_s": record.duration_s,
        },
    }
    if record.simulated:
        summary["run"]["simulated"] = True
    if record.engine:
        summary["run"] |= {"engine": record.engine, "engines_start_s": record.engines_start_s}
    if record.interrupted is not None:
        summary["interrupted"] = msgspec.to_builtins(record.interrupted)
    ceiling = ceiling_summary(record, harvested["engine_seconds"])
    if ceiling is not None:
        summary["ceiling"] = ceiling
    if record.slurm is not None:
        summary["slurm"] = slurm_summary(record.slurm, run)
    summary["bars"] = verdicts(summary)
    return summary
