"""Batches for people and for programs: tables, lines, JSON."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridsched.cli.words import span

if TYPE_CHECKING:
    from rich.table import Table

    from hybridsched.batches.scan import InputIndex
    from hybridsched.store.batch_values import BatchInfo, BatchProgress


def as_json(progress: BatchProgress) -> dict[str, Any]:
    """A batch as plain values. `done` and `failed` count the lines of running chunks too."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(progress.batch)
    fields |= {
        "done": progress.done,
        "failed": progress.failed,
        "remaining": progress.batch.lines - progress.done - progress.failed,
        "running_chunks": progress.running_chunks,
        "queued_chunks": progress.queued_chunks,
    }
    return fields


def describe(progress: BatchProgress) -> str:
    """One batch in a few lines."""
    batch = progress.batch
    rows = [
        ("batch", batch.id),
        ("status", _status(batch)),
        ("model", batch.model or "any"),
        ("lines", _lines(progress)),
        ("chunks", f"{progress.running_chunks} running, {progress.queued_chunks} queued"),
        ("submitted", f"{_when(batch.submitted_ms)} by {batch.user}"),
    ]
    if batch.deadline_ms is not None:
        rows.append(("deadline", _when(batch.deadline_ms)))
    if batch.finished_ms is not None:
        rows.append(("finished", _when(batch.finished_ms)))
    rows += [("input", batch.input), ("output", batch.output), ("errors", batch.errors)]
    return "\n".join(f"{name:<10}{value}" for name, value in rows)


def table(found: list[BatchProgress]) -> Table:
    """Batches as a table, newest last."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for name in ("batch", "status", "model", "lines", "submitted", "deadline", "input"):
        made.add_column(name, no_wrap=name in ("batch", "status"))
    for progress in found:
        batch = progress.batch
        made.add_row(
            batch.id,
            str(batch.status),
            batch.model or "any",
            _lines(progress),
            _when(batch.submitted_ms),
            "" if batch.deadline_ms is None else _when(batch.deadline_ms),
            Path(batch.input).name,
        )
    return made


def describe_input(index: InputIndex, limit: int = 5) -> list[str]:
    """What was found in the input, in a few lines."""
    said = [f"{index.lines:,} lines, about {index.tokens:,} tokens"]
    if index.stripped:
        said.append(
            f"{index.stripped:,} lines set scheduling fields such as priority; they run without these fields"
        )
    if index.invalid:
        said.append(f"{index.invalid:,} lines cannot run and go to the error file:")
        said += [f"  {sample.message}" for sample in index.samples[:limit]]
        if index.invalid > limit:
            said.append(f"  ... and {index.invalid - limit:,} more")
    return said


def _status(batch: BatchInfo) -> str:
    if batch.message:
        return f"{batch.status}: {batch.message}"
    if batch.status == "validating":
        return "validating (no worker has taken it up yet)"
    return f"{batch.status} ({batch.stop})" if batch.stop and not batch.status.ended else str(batch.status)


def _lines(progress: BatchProgress) -> str:
    total = progress.batch.lines
    done = progress.done + progress.failed
    share = f"{100 * done // total} %" if total else "-"
    return f"{done:,} of {total:,} ({share}), {progress.failed:,} failed"


def _when(ms: float) -> str:
    moment = datetime.fromtimestamp(ms / 1000).astimezone()
    away = ms / 1000 - time.time()
    distance = f"in {span(away * 1000)}" if away > 0 else f"{span(-away * 1000)} ago"
    return f"{moment:%Y-%m-%d %H:%M:%S} ({distance})"
