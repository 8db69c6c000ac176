"""Batches for people and for programs: tables, lines, JSON."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridsched.cli.batch_waits import Waits
from hybridsched.cli.words import span

if TYPE_CHECKING:
    from rich.table import Table

    from hybridsched.batches.scan import InputIndex
    from hybridsched.store.batch_values import BatchInfo, BatchProgress


def as_json(progress: BatchProgress, waits: Waits | None = None) -> dict[str, Any]:
    """A batch as plain values. `done` and `failed` count the lines of running chunks too.

    `waits`: why it waits, where that is not in its record.
    """
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(progress.batch)
    fields |= {
        "done": progress.done,
        "failed": progress.failed,
        "remaining": progress.batch.lines - progress.done - progress.failed,
        "running_chunks": progress.running_chunks,
        "queued_chunks": progress.queued_chunks,
    }
    why = why_it_waits(progress.batch, waits)
    fields["waits"] = None if why is None else {"code": why.code, "message": why.message}
    return fields


def describe(
    progress: BatchProgress, waits: Waits | None = None, outlook: dict[str, Any] | None = None
) -> str:
    """One batch in a few lines; `waits` as for `as_json`, `outlook` of its deadline (`batch_deadline`)."""
    batch = progress.batch
    rows = [
        ("batch", batch.id),
        ("status", _status(batch)),
        *_waits(batch, waits),
        *_models(batch),
        ("lines", lines_answered(progress)),
        ("chunks", f"{progress.running_chunks} running, {progress.queued_chunks} queued"),
        ("submitted", f"{_when(batch.submitted_ms)} by {batch.user}"),
    ]
    if batch.deadline_ms is not None:
        said = "" if outlook is None else f": {outlook['message']}"
        rows.append(("deadline", _when(batch.deadline_ms) + said))
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
            _model_names(batch),
            _lines(progress),
            _when(batch.submitted_ms),
            "" if batch.deadline_ms is None else _when(batch.deadline_ms),
            Path(batch.input).name,
        )
    return made


def describe_input(index: InputIndex, limit: int = 5) -> list[str]:
    """What was found in the input, in a few lines."""
    said = [f"{index.lines:,} lines, about {index.tokens:,} tokens"]
    if len(index.models) > 1:
        named = sorted(index.models.items(), key=lambda one: -one[1])
        more = f" and {len(named) - limit} more" if len(named) > limit else ""
        said.append(f"models: {', '.join(f'{name} ({lines:,})' for name, lines in named[:limit])}{more}")
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


def _model_names(batch: BatchInfo) -> str:
    return ", ".join(part.model for part in batch.parts) or batch.model or "any"


def _models(batch: BatchInfo) -> list[tuple[str, str]]:
    """A row; of a batch with parts one for each."""
    if not batch.parts or batch.status.ended:
        return [("model", _model_names(batch))]
    found = []
    for part in batch.parts:
        ended = min(part.ended, part.lines)
        found.append(("model", f"{part.model}: of {part.lines:,} lines {ended:,} in finished chunks"))
    return found


def _status(batch: BatchInfo) -> str:
    if batch.message:
        return f"{batch.status}: {batch.message}"
    if batch.status == "validating":
        return "validating (no worker has taken it up yet)"
    return f"{batch.status} ({batch.stop})" if batch.stop and not batch.status.ended else str(batch.status)


def why_it_waits(batch: BatchInfo, other: Waits | None) -> Waits | None:
    """What stands in the record of a batch, before `other`, which was found from outside."""
    return _noted(batch) or other


def _noted(batch: BatchInfo) -> Waits | None:
    if not batch.wait_code or batch.status.ended:
        return None
    return Waits(batch.wait_code, batch.wait_message, batch.wait_ms)


def _waits(batch: BatchInfo, other: Waits | None) -> list[tuple[str, str]]:
    why = why_it_waits(batch, other)
    if why is None:
        return []
    since = "" if why.since_ms is None else f", since {_when(why.since_ms)}"
    return [("waits", f"{why.code}: {why.message}{since}")]


def lines_answered(progress: BatchProgress) -> str:
    """How many lines have an answer, and where those of a batch that has not ended stand."""
    batch = progress.batch
    where = "" if batch.status.ended else "; in the files as soon as all lines before them are"
    return _lines(progress) + where


def _lines(progress: BatchProgress) -> str:
    total, cut = progress.batch.lines, progress.batch.cut
    if cut:
        why = "past the deadline" if progress.batch.stop == "batch_expired" else "cancelled"
        ran = progress.done + progress.failed - cut
        share = f"{100 * progress.done // total} %"
        return (
            f"{progress.done:,} of {total:,} completed ({share}), {ran - progress.done:,} failed, "
            f"{cut:,} {why} before they had run"
        )
    done = progress.done + progress.failed
    share = f"{100 * done // total} %" if total else "-"
    return f"{done:,} of {total:,} answered ({share}), {progress.failed:,} of them failed"


def _when(ms: float) -> str:
    moment = datetime.fromtimestamp(ms / 1000).astimezone()
    away = ms / 1000 - time.time()
    distance = f"in {span(away * 1000)}" if away > 0 else f"{span(-away * 1000)} ago"
    return f"{moment:%Y-%m-%d %H:%M:%S} ({distance})"
