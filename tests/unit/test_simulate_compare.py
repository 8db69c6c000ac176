"""The picture of several policies: every policy is in it, and what was not measured is left out."""

from __future__ import annotations

from typing import Any

from hybridsched.simulate import compare_page
from hybridsched.simulate.repeats import FIGURES


def row(policy: str, **figures: float | None) -> dict[str, Any]:
    return {"policy": policy} | dict.fromkeys(FIGURES) | figures


def test_each_policy_has_its_points_and_its_bar() -> None:
    part = compare_page.picture(
        [
            row("a", harvested_ratio=0.97, ttft_p99_ratio=1.01, tpot_p99_ratio=1.0, ceiling_share=0.81),
            row("b", harvested_ratio=0.99, ttft_p99_ratio=6.5, tpot_p99_ratio=3.0, ceiling_share=None),
        ]
    )
    points = [one for one in part.data if one["type"] == "scatter"]
    assert [(one["name"], one["x"], one["y"]) for one in points] == [
        ("a", [1.01], [0.97]),
        ("a", [1.0], [0.97]),
        ("b", [6.5], [0.99]),
        ("b", [3.0], [0.99]),
    ]
    assert points[0]["text"] == ["a (81% of ceiling)"]
    assert points[2]["text"] == ["b"], "unknown is no number"
    bars = [one for one in part.data if one["type"] == "bar"]
    assert [(one["y"], one["x"]) for one in bars] == [(["a"], [0.81]), (["b"], [None])]


def test_without_online_alone_there_are_bars_and_no_points() -> None:
    part = compare_page.picture([row("a", harvested_ratio=0.97, ceiling_share=0.81)])
    assert [one["x"] for one in part.data if one["type"] == "scatter"] == [[], []]
    assert [one["x"] for one in part.data if one["type"] == "bar"] == [[0.81]]
