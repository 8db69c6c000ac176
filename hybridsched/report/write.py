"""The files of a report folder that are made of the record alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.report.html import render
from hybridsched.report.record import OnlineRow, RunRecord
from hybridsched.report.summary import summarise

_ENCODE = msgspec.json.Encoder()


def write_report(record: RunRecord, folder: Path, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """summary.json, report.html and requests.csv. Returns the summary, to which `extra` is added."""
    summary = summarise(record) | (extra or {})
    (folder / "summary.json").write_bytes(msgspec.json.format(_ENCODE.encode(summary), indent=2) + b"\n")
    (folder / "report.html").write_text(render(summary, record), encoding="utf-8")
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["pass", *OnlineRow.__struct_fields__])
        for name, run in (("baseline", record.baseline), ("together", record.together)):
            for row in run.online if run is not None else ():
                writer.writerow([name, *msgspec.structs.astuple(row)])
    return summary
