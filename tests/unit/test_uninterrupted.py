"""Interrupted lines against a run without a pause: which are compared, and that a difference is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridsched.batches.layout import BatchFiles
from hybridsched.demo import uninterrupted
from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.request_log import RequestRow
from hybridsched.report.record import Interrupted


def row(name: str, end: str, output: int, *, offline: bool = True) -> RequestRow:
    return RequestRow(s=0.0, e=1.0, offline=offline, id=name, end=end, output=output)


def test_lines_count_that_a_pause_ended_with_tokens() -> None:
    rows = [
        row("b", "abort", 3),
        row("a", "abort", 1),
        row("b", "abort", 2),
        row("none-yet", "abort", 0),
        row("cut", "closed", 0),
        row("whole", "ok", 9),
        row("online", "abort", 5, offline=False),
    ]
    assert uninterrupted.interrupted_ids(rows) == ["b", "a"]


def line(name: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "fake", "prompt": [5, 6, len(name)], "max_tokens": 4, "ignore_eos": True} | body,
    }


async def test_a_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(uninterrupted, "VllmHttpEngine", lambda url: engine)
    lines = [
        line("same", temperature=0),
        line("other", temperature=0),
        line("hot"),
        line("late", temperature=0),
    ]
    done = []
    for one in lines[:3]:
        answer = (await engine.complete(one["url"], one["body"], request_id="x", timeout_s=9)).body
        if one["custom_id"] == "other":
            answer["choices"][0]["text"] += "!"
        done.append({"custom_id": one["custom_id"], "response": {"status_code": 200, "body": answer}})
    for name, rows in (("in", lines), ("out", done)):
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (tmp_path / name).write_text(text + ("{broken\n" if name == "in" else ""))
    files = BatchFiles(
        "id", str(tmp_path / "in"), str(tmp_path / "out"), str(tmp_path / "err"), str(tmp_path)
    )
    found = await uninterrupted.compare(files, ["same", "other", "hot", "late"], ["http://one"])
    assert found == Interrupted(lines=4, compared=2, identical=1, different=("other",))
