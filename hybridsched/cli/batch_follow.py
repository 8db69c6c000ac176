"""Following a batch: a bar on a terminal, the wait for its end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from hybridsched.cli.batch_waits import Waits
    from hybridsched.store.batch_values import BatchProgress
    from hybridsched.store.batches import BatchStore

POLL_S = 0.5
"""How often a waiting command looks."""
STANDS_S = 30.0
"""A batch without a new answer for this long stands still, and is asked why."""

Why = Callable[["BatchProgress"], "Waits | None"]


class _Standstill:
    """Says why a batch stands still, once for each reason."""

    def __init__(self, why: Why) -> None:
        self._why = why
        self._answered = -1
        self._since_s = time.monotonic()
        self._said = ""

    def look(self, found: BatchProgress, *, now: bool = False) -> Waits | None:
        """Why it stands still, where that was found out. `now`: without waiting until it does."""
        import redis

        from hybridsched.cli.batch_view import why_it_waits

        answered = found.done + found.failed
        if answered != self._answered:
            self._answered, self._since_s = answered, time.monotonic()
        if not now and time.monotonic() - self._since_s < STANDS_S:
            return None
        self._since_s = time.monotonic()
        # The pool that cannot be read is no news of the batch, which goes on; it is asked again.
        waits: Waits | None = None
        with suppress(redis.ConnectionError, redis.TimeoutError, click.ClickException):
            waits = why_it_waits(found.batch, self._why(found))
        if waits is not None and (now or waits.code != self._said):
            self._said = waits.code
            click.echo(f"{found.batch.id} waits: {waits.message}", err=True)
        return waits


def wait_for_end(
    store: BatchStore, batch_id: str, timeout_ms: float | None, *, json_: bool, why: Why = lambda found: None
) -> int:
    """Follow a batch to its end, through outages of the store. Returns the exit status.

    `why` says why a batch that stands still does.
    """
    import redis

    from hybridsched.cli.batch_view import as_json, lines_answered

    standstill = _Standstill(why)

    until = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000.0
    interrupted = False
    found: BatchProgress = store.progress(batch_id)
    with bar(found.batch.lines) as show:
        try:
            while not found.batch.status.ended and (until is None or time.monotonic() < until):
                show(found.done + found.failed, found.failed)
                standstill.look(found)
                time.sleep(POLL_S)
                with suppress(redis.ConnectionError, redis.TimeoutError):  # the batch goes on; look again
                    found = store.progress(batch_id)
        except KeyboardInterrupt:
            interrupted = True
        show(found.done + found.failed, found.failed)
    waits = None if found.batch.status.ended or interrupted else standstill.look(found, now=True)
    if json_:
        print_json(as_json(found, waits))
    else:
        if found.batch.status.ended:
            text = f"{batch_id} {found.batch.status}: {found.done:,} lines in {found.batch.output}"
            click.echo(f"{text}, {found.failed:,} in {found.batch.errors}")
        else:
            click.echo(f"{batch_id} {found.batch.status}: {lines_answered(found)}")
        if found.batch.message:
            click.echo(found.batch.message, err=True)
        if not found.batch.status.ended:
            how = "You end only this wait" if interrupted else "Gave up waiting"
            click.echo(f"{how}; the batch goes on. `hybridsched batch cancel {batch_id}` ends it.", err=True)
    return 0 if found.batch.status == "completed" else 1


@contextmanager
def bar(total: int) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _done, _failed: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(done: int, failed: int) -> None:
            progress.update(task, completed=done, description=f"{failed:,} failed" if failed else "")

        yield show


@contextmanager
def reading(file: str) -> Iterator[Callable[[int], None] | None]:
    """A note on a terminal while a large input is read."""
    if not sys.stderr.isatty():
        yield None
        return
    yield lambda read: click.echo(f"\rreading {file}: {read / 1e6:,.0f} MB", nl=False, err=True)
    click.echo("\r\x1b[K", nl=False, err=True)


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
