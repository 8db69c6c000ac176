"""The report as one HTML file that opens without a network: headline figures, then the pictures."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec
from plotly.offline import get_plotlyjs

from hybridsched.report.figure import Figure
from hybridsched.report.figures import figures
from hybridsched.report.job_figure import job_figures
from hybridsched.report.record import RunRecord

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d9dee5; --page: #ffffff;
        --good: #1d7a46; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #a3adba; --line: #343c47; --page: #14181e;
          --good: #5cc98c; --bad: #ff8a80; } }
body { background: var(--page); color: var(--ink); max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem;
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .1rem; }
p { margin: .2rem 0 .5rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--soft); }
.yes { color: var(--good); } .no { color: var(--bad); font-weight: 600; }
.chip { display: inline-block; margin-right: 1rem; color: var(--soft); font-size: .85rem; }
.chip i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
.scroll { overflow-x: auto; }
"""

_SCRIPT = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function themed(layout) {
  const ink = dark.matches ? "#c9d0da" : "#3a4350", line = dark.matches ? "#303844" : "#e3e7ec";
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line};
  const out = {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: ink, family: "system-ui, sans-serif", size: 12},
    margin: {l: 60, r: 60, t: 10, b: 40, ...(layout.margin || {})},
    legend: {orientation: "h", y: 1.02, yanchor: "bottom", x: 0}};
  for (const name of Object.keys(out)) if (/^[xy]axis/.test(name)) out[name] = {...axis, ...out[name]};
  return out;
}
const drawn = JSON.parse(document.getElementById("figures").textContent);
function draw() {
  for (const figure of drawn)
    Plotly.react(figure.key, figure.data, themed(figure.layout), {responsive: true, displayModeBar: false});
}
draw();
dark.addEventListener("change", draw);
"""


def render(summary: dict[str, Any], record: RunRecord) -> str:
    """The page for a summary and the record it was made from."""
    pool_parts, slurm_parts = figures(record), job_figures(record)
    parts = pool_parts + slurm_parts
    title = "hybridsched: online first, offline in the measured gaps"
    if record.simulated:
        title = "hybridsched simulate: online first, offline in the gaps"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(headline(summary))}</p>",
        f'<p class="soft">{html.escape(setting(summary))}</p>',
        _figures_table(summary),
        _online_table(summary),
        *(section(part) for part in pool_parts),
        _engine_table(summary),
        *_slurm_part(summary, [section(part, within=True) for part in slurm_parts]),
        f'<p class="soft">{html.escape(fidelity(summary))}</p>',
    ]
    return page(title, body, parts)


def page(title: str, body: Sequence[str], parts: Sequence[Figure]) -> str:
    """A page with everything in it that it needs: no file and no network beside it.

    Args:
        body: its parts as HTML; each figure stands in one of them, as `section` makes it.
    """
    payload = msgspec.json.encode(
        [{"key": part.key, "data": part.data, "layout": part.layout} for part in parts]
    )
    # "</" would end the script element early wherever it stands in the data
    data = payload.decode().replace("</", "<\\/")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + f'\n<script type="application/json" id="figures">{data}</script>\n'
        + f"<script>{get_plotlyjs()}</script>\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def number(value: Any, digits: int = 0, unit: str = "") -> str:
    """A number for people; a dash where nothing was measured."""
    if value is None:
        return "–"
    return f"{value:,.{digits}f}{unit}"


def headline(summary: dict[str, Any]) -> str:
    """The result in one or two sentences."""
    harvest, offline, online = summary["harvest"], summary["offline"], summary["online"]
    ratio, idle_s = harvest["harvested_ratio"], harvest["idle_s"]
    done = f"{number(offline['completed'])} lines done, {number(offline['output_tokens'])} tokens."
    if ratio is None:
        first = f"No engine second was idle: {done}"
    else:
        digits = 0 if idle_s >= 10.0 else 1
        spans = f"{number(harvest['harvested_s'], digits)} of {number(idle_s, digits)} s"
        first = f"{ratio:.1%} of the idle engine seconds ({spans}) ran offline work: {done}"
    if online["ttft_ms"]["p99"] is None:
        return f"{first} No online request had a first token."
    cost = summary["co_location"]
    if cost is None or cost["ttft_p99_ratio"] is None:
        return f"{first} p99 time to first token was {number(online['ttft_ms']['p99'])} ms."
    alone = summary["online_only"]
    return (
        f"{first} Online, p99 time to first token: {number(alone['ttft_ms']['p99'])} ms alone, "
        f"{number(online['ttft_ms']['p99'])} ms with offline work (×{cost['ttft_p99_ratio']:.3f})."
    )


def setting(summary: dict[str, Any]) -> str:
    """What was run."""
    run, policy = summary["run"], summary["policy"]
    requests, lines = summary["online"]["requests"], summary["offline"]["lines"]
    how = "in the twin" if run.get("simulated") else f"at speed {run['speed']:g}"
    kind = f" ({run['engine']})" if run.get("engine") else ""
    return (
        f"{run['gpus']} engines{kind}, {run['duration_s']:g} s of trace {run['trace']} {how}, "
        f"{requests:,} online requests, a batch of {lines:,} lines, "
        f"policy {policy['name']} (version {policy['version']}). Times are those of the engines' clock."
    )


def against(value: Any, bar: dict[str, Any], digits: int, unit: str = "") -> str:
    """A figure beside its bar, with digits enough that the numbers that are seen give the verdict."""
    if value is None:
        return number(value)
    bound, sign = bar["bar"], 1 if bar["at_least"] else -1
    while digits < MOST_DIGITS and (sign * round(value, digits) >= sign * bound) is not bool(bar["reached"]):
        digits += 1
    return number(value, digits, unit)


MOST_DIGITS = 9
REAL = (
    "the engines are real and log no iterations: what they did is taken from their requests, and a pause "
    "lasts until the last offline answer was back; on a CPU they share its cores with the workers"
)
"""How the figures of real engines are to be read."""
BUSY_MS = 20.0
"""Lateness of the engines' processes (p99, engines' clock) from which latencies show the machine's load too:
two short iterations."""


def busy(summary: dict[str, Any]) -> str:
    """What a run is worth on a machine that was too busy for it, with the figure; empty: it was not."""
    late, requests = summary["lateness"], summary["online"]["requests"]
    engines = late["engine_clock_ms"]["p99"] or 0.0
    if summary["run"].get("engine"):
        return REAL
    if engines <= BUSY_MS and late["late_sends"] <= requests / 100:
        return ""
    missed = any(bar["reached"] is False for bar in summary["bars"].values())
    return (
        f"this machine was too busy for speed {summary['run']['speed']:g} (engines {number(engines, 1)} ms "
        f"behind their clock, {late['late_sends']} of {requests} requests sent late): latencies and pauses"
        f"{', and with them the bars that were missed,' if missed else ''} are partly its own; run again "
        "when it is quiet, or with a lower --speed"
    )


def fidelity(summary: dict[str, Any]) -> str:
    """How far the run itself can be trusted."""
    if summary["run"].get("simulated"):
        return (
            "Nothing here was measured: it is the scheduler's own code on a virtual clock, with the "
            f"simulated engine's model; {summary['policy']['cycles']:,} policy cycles; see docs/simulate.md. "
            f"It took {number(summary['wall_s'], 1)} s."
        )
    late = summary["lateness"]
    said = busy(summary)
    warning = f" {said[0].upper()}{said[1:]}." if said else ""
    behind = late["engine_clock_ms"]["p99"]
    clock = (
        ""
        if behind is None
        else f"the engines' processes were p99 {number(behind, 1)} ms behind their clock; "
    )
    return (
        f"Fidelity: {clock}the load generator sent {late['late_sends']} of {summary['online']['requests']} "
        f"requests more than 20 ms late (p99 {number(late['load_ms']['p99'], 1)} ms on the engines' clock); "
        f"policy cycles: {summary['policy']['cycles']:,}, p99 "
        f"{number(summary['policy']['cycle_ms']['p99'], 1)} ms; the whole took {number(summary['wall_s'])} s."
        f"{warning}"
    )


LABELS: dict[str, tuple[str, int, str]] = {
    "harvested_ratio": ("idle engine seconds harvested", 3, ""),
    "ttft_p99_ratio": ("p99 time to first token, against online alone", 3, "×"),
    "tpot_p99_ratio": ("p99 time per output token, against online alone", 3, "×"),
    "signal_path_p99_ms": ("pause: p99 beyond one engine iteration", 1, " ms"),
    "lines_missing_or_twice": ("offline lines missing or done twice", 0, ""),
    "interrupted_differ": ("interrupted lines that differ from a run without a pause", 0, ""),
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the head is text, the cells of the rows are HTML."""
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def _figures_table(summary: dict[str, Any]) -> str:
    rows = []
    for key, bar in summary["bars"].items():
        name, digits, unit = LABELS[key]
        verdict = {None: '<span class="soft">not measured</span>', True: '<span class="yes">✓ reached</span>'}
        rows.append(
            [
                html.escape(name),
                against(bar["value"], bar, digits, unit),
                ("≥ " if bar["at_least"] else "≤ ") + number(bar["bar"], 2 if digits > 1 else 0, unit),
                verdict.get(bar["reached"], '<span class="no">✗ missed</span>'),
            ]
        )
    return table(["figure", "this run", "bar", ""], rows)


def _online_table(summary: dict[str, Any]) -> str:
    runs = [("with offline work", summary["online"]), ("online alone", summary["online_only"])]
    rows = [
        [
            html.escape(name),
            number(part["requests"]),
            number(part["ok"]),
            number(part["expired"] + part["failed"]),
            *(number(part["ttft_ms"][rank]) for rank in ("p50", "p95", "p99")),
            *(number(part["tpot_ms"][rank], 1) for rank in ("p50", "p95", "p99")),
            "–" if part["slo_attainment"] is None else f"{part['slo_attainment']:.2%}",
        ]
        for name, part in runs
        if part is not None
    ]
    head = ["online", "requests", "ok", "not ok", "TTFT p50", "p95", "p99 ms", "TPOT p50", "p95", "p99 ms"]
    return table([*head, "in objectives"], rows)


def _engine_table(summary: dict[str, Any]) -> str:
    rows = [
        [
            html.escape(str(engine["replica"])),
            number(engine["online_busy_s"], 1),
            number(engine["idle_s"], 1),
            number(engine["harvested_s"], 1),
            number(engine["mixed_s"], 2),
            number(engine["offline_output_tokens"]),
        ]
        for engine in summary["engines"]
    ]
    return "<h2>Engines</h2>" + table(
        ["engine", "online s", "idle s", "harvested s", "both at once s", "offline tokens"], rows
    )


def _slurm_part(summary: dict[str, Any], figures_of_it: list[str]) -> list[str]:
    slurm = summary.get("slurm")
    if slurm is None:
        return []
    rows = [
        [
            str(job["id"]),
            html.escape(job["name"]),
            html.escape(job["partition"]),
            html.escape(job["node"] or "–"),
            number(job["run"]),
            *(number(job[part], 1) for part in ("submit_s", "start_s", "end_s")),
            html.escape(job["state"]),
        ]
        for job in slurm["jobs"]
    ]
    admission = slurm["gate_open_to_job_running_ms"]
    said = (
        f"Slurm {slurm['version']}. Seconds of the wall clock from the start of the trace. From a gate's "
        f"opening to its job running: p50 {number(admission['p50'])} ms, at most "
        f"{number(admission['max'])} ms."
    )
    head = ["job", "name", "partition", "node", "run", "submitted", "started", "ended", "state"]
    return [
        f'<h2>Slurm jobs</h2><p class="soft">{html.escape(said)}</p>',
        *figures_of_it,
        table(head, rows),
    ]


def section(part: Figure, *, within: bool = False) -> str:
    """A figure's place on the page, with its title and caption."""
    level = "h3" if within else "h2"
    chips = "".join(
        f'<span class="chip"><i style="background:{colour}"></i>{html.escape(name)}</span>'
        for colour, name in part.legend
    )
    return (
        f'<{level}>{html.escape(part.title)}</{level}><p class="soft">{html.escape(part.caption)}</p>'
        + (f"<p>{chips}</p>" if chips else "")
        + f'<div id="{html.escape(part.key)}" style="height:{part.height}px"></div>'
    )
