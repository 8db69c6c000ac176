"""The summary for people at a terminal."""

from __future__ import annotations

from typing import Any

from hybridsched.report.html import LABELS, headline, number, setting


def text(summary: dict[str, Any]) -> str:
    """The result, the figures against their bars, and online latency with and without offline work."""
    lines = [headline(summary), "", setting(summary), ""]
    lines += _bars(summary)
    lines += ["", *_online(summary), ""]
    offline, pauses = summary["offline"], summary["pauses"]
    lines.append(
        f"offline   {number(offline['lines'])} lines: {number(offline['completed'])} completed, "
        f"{number(offline['failed'])} failed, {number(offline['remaining'])} remain, {offline['missing']} "
        f"missing, {offline['duplicates']} twice; {number(offline['output_tokens'])} output tokens, "
        f"{number(offline['tokens_recomputed'])} tokens computed again"
    )
    quiet = pauses["signal_to_quiet_ms"]
    lines.append(
        f"pauses    {pauses['count']}; signal to quiet p50 {number(quiet['p50'], 1)} ms, "
        f"p99 {number(quiet['p99'], 1)} ms"
    )
    lines += _slurm(summary)
    lines += _trust(summary)
    if summary["restarts"]:
        names = ", ".join(f"{name} ×{count}" for name, count in summary["restarts"].items())
        lines.append(f"restarts  {names}: figures of a disturbed run")
    return "\n".join(lines)


def _slurm(summary: dict[str, Any]) -> list[str]:
    slurm = summary.get("slurm")
    if slurm is None:
        return []
    admission = slurm["gate_open_to_job_running_ms"]
    jobs = {job["id"] for job in slurm["jobs"]}
    lines = [
        f"slurm     {slurm['version']}, {slurm['nodes']} nodes, {len(jobs)} jobs; gate open to job running: "
        f"p50 {number(admission['p50'])} ms, at most {number(admission['max'])} ms (seen every "
        f"{slurm['look_ms']:g} ms)"
    ]
    for one in slurm["reclaims"]:
        requeued = "was requeued" if one["offline_requeued"] else "was NOT requeued"
        lines.append(
            f"          online job {one['online_job']} had its GPU {number(one['submit_to_gpu_ms'])} ms "
            f"after it was submitted; offline job {one['offline_job']} {requeued} "
            f"with {number(one['tokens_kept'])} tokens of {number(one['requests_put_down'])} requests kept"
        )
    return lines


BUSY_MS = 20.0
"""Lateness of the engines' processes (p99, engines' clock) from which latencies show the machine's load too:
two short iterations."""


def _trust(summary: dict[str, Any]) -> list[str]:
    late, requests = summary["lateness"], summary["online"]["requests"]
    engines = late["engine_clock_ms"]["p99"] or 0.0
    lines = [
        f"fidelity  engines' processes p99 {number(engines, 1)} ms behind their clock; "
        f"{late['late_sends']} of {requests} requests sent over 20 ms late"
    ]
    if engines > BUSY_MS or late["late_sends"] > requests / 100:
        lines.append(
            "          this machine was too busy for this speed: latencies and pauses are partly its own; "
            "run again when it is quiet, or with a lower --speed"
        )
    return lines


def _bars(summary: dict[str, Any]) -> list[str]:
    width = max(len(LABELS[key][0]) for key in summary["bars"])
    lines = []
    for key, bar in summary["bars"].items():
        name, digits, unit = LABELS[key]
        verdict = {True: "reached", False: "MISSED", None: "not measured"}[bar["reached"]]
        sign = "≥" if bar["at_least"] else "≤"
        bound = number(bar["bar"], 2 if digits > 1 else 0, unit)
        lines.append(
            f"  {name:<{width}}  {number(bar['value'], digits, unit):>10}  {sign} {bound:<7} {verdict}"
        )
    return lines


def _online(summary: dict[str, Any]) -> list[str]:
    head = (
        f"  {'online':<18}{'requests':>9}{'ok':>7}{'TTFT p50':>10}{'p99 ms':>9}{'TPOT p50':>10}{'p99 ms':>8}"
    )
    lines = [head + f"{'in objectives':>15}"]
    for name, part in (("with offline work", summary["online"]), ("online alone", summary["online_only"])):
        if part is None:
            continue
        kept = "–" if part["slo_attainment"] is None else f"{part['slo_attainment']:.2%}"
        lines.append(
            f"  {name:<18}{part['requests']:>9}{part['ok']:>7}{number(part['ttft_ms']['p50']):>10}"
            f"{number(part['ttft_ms']['p99']):>9}{number(part['tpot_ms']['p50'], 1):>10}"
            f"{number(part['tpot_ms']['p99'], 1):>8}{kept:>15}"
        )
    return lines
