"""Arithmetic on spans of time: sorted, disjoint (start, end) pairs. Pure."""

from __future__ import annotations

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The spans merged: sorted, disjoint, none empty."""
    merged: Spans = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(spans: Spans, start: float, end: float) -> Spans:
    """The part of `spans` within [start, end]."""
    return [(max(s, start), min(e, end)) for s, e in spans if min(e, end) > max(s, start)]


def intersect(left: Spans, right: Spans) -> Spans:
    """What is in both."""
    common: Spans = []
    i = j = 0
    while i < len(left) and j < len(right):
        start = max(left[i][0], right[j][0])
        end = min(left[i][1], right[j][1])
        if end > start:
            common.append((start, end))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return common


def complement(spans: Spans, start: float, end: float) -> Spans:
    """What of [start, end] is not in `spans`."""
    gaps: Spans = []
    at = start
    for s, e in clip(spans, start, end):
        if s > at:
            gaps.append((at, s))
        at = e
    if end > at:
        gaps.append((at, end))
    return gaps


def total(spans: Spans) -> float:
    """Summed length."""
    return sum(end - start for start, end in spans)
