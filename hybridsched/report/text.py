"""The summary for people at a terminal."""

from __future__ import annotations

from typing import Any

from hybridsched.report.html import LABELS, against, busy, headline, number, setting


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
    lines += _interrupted(summary)
    lines += _ceiling(summary)
    lines += _repeats(summary)
    lines += _slurm(summary)
    if not summary["run"].get("simulated"):
        lines += _trust(summary)
    if summary["restarts"]:
        names = ", ".join(f"{name} ×{count}" for name, count in summary["restarts"].items())
        lines.append(f"restarts  {names}: figures of a disturbed run")
    return "\n".join(lines)


def _interrupted(summary: dict[str, Any]) -> list[str]:
    found = summary.get("interrupted")
    if found is None:
        return []
    said = f"          {found['lines']} lines were interrupted by them"
    if not found["compared"]:
        return [f"{said}; none of those that are finished and greedy could be compared"]
    wrong = f"; DIFFERENT: {', '.join(found['different'])}" if found["different"] else ""
    same = f"{found['identical']} of {found['compared']} wrote the same"
    return [f"{said}; run again without a pause, {same}{wrong}"]


def _ceiling(summary: dict[str, Any]) -> list[str]:
    ceiling = summary.get("ceiling")
    if ceiling is None:
        return []
    share = "–" if ceiling["share"] is None else f"{ceiling['share']:.1%}"
    own = "–" if ceiling["share_by_policy"] is None else f"{ceiling['share_by_policy']:.1%}"
    return [
        f"ceiling   {number(ceiling['tokens'])} tokens in {number(ceiling['engine_seconds_left'])} engine "
        f"seconds that online needs not; {number(ceiling['tokens_done'])} done: {share}",
        f"          ({own} of what this policy's own slices and budgets could do in them)",
    ]


def _repeats(summary: dict[str, Any]) -> list[str]:
    repeats = summary.get("repeats")
    if repeats is None:
        return []
    parts = []
    for name, label in (
        ("ttft_p99_ratio", "p99 TTFT against alone"),
        ("tpot_p99_ratio", "TPOT"),
        ("harvested_ratio", "harvested"),
    ):
        one = repeats[name]
        if one is not None:
            parts.append(f"{label} {one['median']:.3f} ({one['min']:.3f} to {one['max']:.3f})")
    return [f"repeats   {repeats['runs']} runs, middle and range: {', '.join(parts)}"]


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


def _trust(summary: dict[str, Any]) -> list[str]:
    late, requests = summary["lateness"], summary["online"]["requests"]
    engines = late["engine_clock_ms"]["p99"]
    clock = ""
    if engines is not None:
        clock = f"engines' processes p99 {number(engines, 1)} ms behind their clock; "
    lines = [f"fidelity  {clock}{late['late_sends']} of {requests} requests sent over 20 ms late"]
    if said := busy(summary):
        lines.append(f"          {said}")
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
            f"  {name:<{width}}  {against(bar['value'], bar, digits, unit):>10}  {sign} {bound:<7} {verdict}"
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
