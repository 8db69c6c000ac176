"""What `policy tune` found: the trade-off as a picture, and the policy as a file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from hybridsched.core.policy import PoolPolicy
from hybridsched.policyfile import dump_toml
from hybridsched.report.figure import ONLINE, Figure
from hybridsched.report.html import number, page, section, table
from hybridsched.simulate.compare import aligned
from hybridsched.simulate.options import SimulatePlan
from hybridsched.simulate.tune import CHECKS, Trial, Tuned

_GOOD, _SOFT = "#66aa77", "rgba(128,128,128,0.55)"


def render(tuned: Tuned, plan: SimulatePlan) -> str:
    """The page."""
    part = picture(tuned)
    title = "hybridsched policy tune: offline work against what online pays"
    return page(
        title,
        [
            f"<h1>{html.escape(title)}</h1>",
            f"<p>{html.escape(headline(tuned))}</p>",
            f'<p class="soft">{html.escape(setting(tuned, plan))}</p>',
            section(part),
            table(_columns(tuned), [[html.escape(cell) for cell in row] for row in _rows(tuned)]),
        ],
        [part],
    )


def picture(tuned: Tuned) -> Figure:
    """Every policy that was tried, those that nothing beats joined by a line."""
    chosen = tuned.best
    kept = [one for one in tuned.trials if one.kept and one is not chosen]
    not_kept = [one for one in tuned.trials if not one.kept]
    front = tuned.front
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best for its cost",
            "x": [one.cost for one in front],
            "y": [one.ceiling_share for one in front],
            "line": {"color": ONLINE, "width": 1.5, "shape": "hv"},
            "hoverinfo": "skip",
        },
        _points("tried, breaks a bound", not_kept, {"color": _SOFT, "size": 7, "symbol": "circle-open"}),
        _points("tried, keeps the bounds", kept, {"color": _GOOD, "size": 7}),
        _points("as given", tuned.trials[:1], {"color": ONLINE, "size": 12, "symbol": "x"}),
    ]
    if chosen is not None:
        data.append(_points("chosen", [chosen], {"color": _GOOD, "size": 15, "symbol": "star"}))
    bound = max(tuned.bounds.ttft_ratio, tuned.bounds.tpot_ratio)
    return Figure(
        key="tune",
        title="Offline work against what online pays for it",
        caption="Each point is a policy. Height: offline tokens done, of the ceiling. Axis: the worse of p99 "
        "time to first token and p99 time per output token, over that of online alone (logarithmic; dotted: "
        "the laxer of the bounds). Best is up and left.",
        data=data,
        layout={
            "xaxis": {
                "type": "log",
                "title": {"text": "p99 latency, × online alone"},
                "tickvals": [0.8, 0.9, 1, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100],
            },
            "yaxis": {"tickformat": ".0%", "title": {"text": "share of the ceiling"}},
            "shapes": [
                {
                    "type": "line",
                    "yref": "paper",
                    "x0": bound,
                    "x1": bound,
                    "y0": 0,
                    "y1": 1,
                    "line": {"color": "#999999", "width": 1, "dash": "dot"},
                }
            ],
        },
        height=420,
    )


def _points(name: str, trials: Sequence[Trial], marker: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [one.cost for one in trials],
        "y": [one.ceiling_share for one in trials],
        "text": [
            f"trial {one.number}<br>" + "<br>".join(f"{key} = {value:g}" for key, value in one.values.items())
            for one in trials
        ],
        "hovertemplate": "%{text}<br>×%{x:.3f}, %{y:.1%} of the ceiling<extra></extra>",
        "marker": marker,
    }


def headline(tuned: Tuned) -> str:
    """The result in a sentence."""
    first, best = tuned.trials[0], tuned.best
    if best is None:
        return f"None of {len(tuned.trials)} policies keeps the bounds."
    again = f" In {CHECKS} other draws it keeps the bounds too, with {_figures(tuned.checks[-1])}."
    given = f"the given one reaches {first.ceiling_share:.1%}"
    if not first.kept:
        given += " and breaks a bound"
    if best is first:
        return f"Of {len(tuned.trials)} policies none is better than the given one: {_figures(best)}.{again}"
    return f"Of {len(tuned.trials)} policies the best reaches {_figures(best)}; {given}.{again}"


def _figures(trial: Trial) -> str:
    return (
        f"{trial.ceiling_share:.1%} of the ceiling at ×{trial.ttft_p99_ratio or 1:.3f} of p99 TTFT and "
        f"×{trial.tpot_p99_ratio or 1:.3f} of p99 TPOT, {trial.slo_attainment:.2%} in objectives"
    )


def setting(tuned: Tuned, plan: SimulatePlan) -> str:
    """What was searched, and on what."""
    options, bounds, policy = plan.options, tuned.bounds, plan.policies[0]
    ranges = ", ".join(f"{knob.key} {knob.low:g} to {knob.high:g}" for knob in tuned.knobs)
    runs = f", each the middle of {options.repeat} runs" if options.repeat > 1 else ""
    slo = policy.slo
    return (
        f"{options.gpus} engines, {options.duration_s:g} s of {plan.trace}, {len(plan.rows):,} online "
        f"requests, seed {options.seed}{runs}; policy {policy.name}. Bounds: p99 TTFT "
        f"×{bounds.ttft_ratio:g} and p99 TPOT ×{bounds.tpot_ratio:g} of online alone, "
        f"{bounds.attainment:.1%} of the requests within {slo.ttft_ms:g} and {slo.tpot_ms:g} ms (or as many "
        f"as with online alone). Searched: {ranges}."
    )


def _columns(tuned: Tuned) -> list[str]:
    return [
        *("", "of ceiling", "harvested", "TTFT x alone", "TPOT x alone", "in objectives"),
        *(knob.key for knob in tuned.knobs),
    ]


def _rows(tuned: Tuned) -> list[list[str]]:
    first, best = tuned.trials[0], tuned.best
    shown = [first, *(one for one in tuned.front if one is not first and one is not best)]
    if best is not None and best is not first:
        shown.insert(1, best)
    rows = []
    for one in shown:
        name = "as given" if one is first else f"trial {one.number}"
        if one is best:
            name = "chosen" if one is not first else "as given, chosen"
        rows.append(
            [
                name,
                f"{one.ceiling_share:.1%}",
                "–" if one.harvested_ratio is None else f"{one.harvested_ratio:.1%}",
                number(one.ttft_p99_ratio, 3),
                number(one.tpot_p99_ratio, 3),
                f"{one.slo_attainment:.2%}",
                *(f"{one.values[knob.key]:g}" for knob in tuned.knobs),
            ]
        )
    return rows


def text(tuned: Tuned) -> str:
    """The result for people at a terminal: the given policy, the chosen one, and the trade-off around it."""
    return f"{headline(tuned)}\n\n{aligned([_columns(tuned), *_rows(tuned)])}"


def policy_text(tuned: Tuned, policy: PoolPolicy, plan: SimulatePlan) -> str:
    """The policy file, which says where it comes from."""
    lines = [headline(tuned), setting(tuned, plan), "Made by `hybridsched policy tune`."]
    return "".join(f"# {line}\n" for line in lines) + "\n" + dump_toml(policy)


def as_json(tuned: Tuned) -> dict[str, Any]:
    """All trials, in order, and which one was chosen."""
    return {
        "chosen": None if tuned.best is None else tuned.best.number,
        "front": [one.number for one in tuned.front],
        "bounds": {
            "ttft_p99_ratio": tuned.bounds.ttft_ratio,
            "tpot_p99_ratio": tuned.bounds.tpot_ratio,
            "slo_attainment": tuned.bounds.attainment,
        },
        "checks": [_trial_json(one) for one in tuned.checks],
        "trials": [_trial_json(one) for one in tuned.trials],
    }


def _trial_json(one: Trial) -> dict[str, Any]:
    return {
        "number": one.number,
        "values": one.values,
        "keeps_bounds": one.kept,
        "ceiling_share": one.ceiling_share,
        "harvested_ratio": one.harvested_ratio,
        "ttft_p99_ratio": one.ttft_p99_ratio,
        "tpot_p99_ratio": one.tpot_p99_ratio,
        "slo_attainment": one.slo_attainment,
        "slo_attainment_alone": one.slo_attainment_alone,
        "offline_tokens_done": one.offline_tokens_done,
    }
