"""`hybridsched batch`: submit, run and follow offline batch files."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import Duration, pool_options
from hybridsched.cli.batch_sbatch import sbatch_options, show_job, submit_by_sbatch, take_wishes

if TYPE_CHECKING:
    from hybridsched.batches.work import WorkFolder
    from hybridsched.store.batch_values import BatchProgress
    from hybridsched.store.batches import BatchStore

POLL_S = 0.5
"""How often a waiting command looks."""

_json_option = click.option("--json", "json_", is_flag=True, help="Print JSON for programs.")


def _engine_url(_ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+/?", value):
        raise click.BadParameter(
            f"{value!r} is not an engine's address: give http://HOST:PORT, without a path", param=param
        )
    return value.rstrip("/")


class _Deadline(Duration):
    """A span from now, or a moment, as milliseconds from now."""

    name = "deadline"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from datetime import datetime

        try:
            moment = datetime.fromisoformat(str(value))
        except ValueError:
            try:
                return super().convert(value, param, ctx)
            except click.BadParameter:
                self.fail(
                    f"{value!r} is neither a span (90m, 2h, 1d) nor a moment (2026-11-30T07:00, local time "
                    "unless it has an offset)",
                    param,
                    ctx,
                )
        ahead = moment.timestamp() - time.time()
        if ahead <= 0:
            self.fail(f"{value!r} is in the past; give a deadline ahead", param, ctx)
        return ahead * 1000.0


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Errors that a user can meet become one sentence and exit status 1."""
    from hybridsched.batches.files import BatchFileError
    from hybridsched.engines.protocol import EngineError
    from hybridsched.store.errors import StoreError

    try:
        yield
    except (BatchFileError, EngineError, StoreError) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _store(redis_option: str | None, pool: str, doing: str) -> Iterator[BatchStore]:
    from hybridsched.store.batches import BatchStore
    from hybridsched.store.connection import resolve_url, store_errors, sync_client

    url = resolve_url(redis_option)
    if url is None:
        raise click.UsageError("the pool's Redis is not known: give --redis URL or set HYBRIDSCHED_REDIS_URL")
    with _one_sentence():
        client = sync_client(url, name="hybridsched-cli")
        try:
            with store_errors(url, doing):
                yield BatchStore(client, pool)
        finally:
            client.close()


@click.group()
def batch() -> None:
    """Submit, run and follow offline batch files (OpenAI Batch format)."""


@batch.command()
@click.argument("words", nargs=-1, required=True, metavar="FILE...")
@click.option("--output", "-o", metavar="FILE", help="Default: FILE's name with .output.jsonl.")
@click.option("--errors", metavar="FILE", help="Default: the output's name with .errors.jsonl.")
@click.option("--model", help="Whose workers run it. Default: the model that most lines name.")
@click.option("--deadline", type=_Deadline(), help="2h, 1d, or 2026-11-30T07:00. Later lines are not run.")
@pool_options
@click.option("--wait", "wait_", is_flag=True, help="Wait for the end, as `batch wait` does.")
@sbatch_options
@_json_option
@click.pass_context
def submit(
    ctx: click.Context,
    words: tuple[str, ...],
    output: str | None,
    errors: str | None,
    model: str | None,
    deadline: float | None,
    redis_option: str | None,
    pool: str,
    wait_: bool,
    json_: bool,
    sbatch: bool,
    time_limit: float | None,
    partition: str | None,
    account: str | None,
    qos: str | None,
    at_once: int | None,
) -> None:
    """Check FILE and queue it in a pool.

    A line that cannot run goes to the error file with its line number; the others run. Submitting the same
    file with the same output again takes the batch up where it is.

    With --sbatch it is run by a Slurm job of your own, whose id is printed; several files, or @LIST with one
    name a line, become a job array.
    """
    from hybridsched.cli.batch_view import as_json, describe_input
    from hybridsched.workers.offline_submit import Submitted, submit_file

    asked = {"time": time_limit, "partition": partition, "account": account, "qos": qos, "at_once": at_once}
    wishes = take_wishes(sbatch, asked)
    if wishes is None and len(words) > 1:
        raise click.UsageError("one FILE at a time is queued in a pool; several go with --sbatch")

    def register(file: str) -> Submitted:
        with _reading(file) as progress:
            return submit_file(
                store,
                file,
                output=output,
                errors=errors,
                model=model,
                deadline_in_ms=deadline,
                jobs_only=sbatch,
                progress=progress,
            )

    with _store(redis_option, pool, f"submitting {' '.join(words[:3])} to pool {pool}") as store:
        job, every = None, []
        try:
            if wishes is None:
                every = [register(words[0])]
            else:
                job, every = submit_by_sbatch(
                    words,
                    wishes=wishes,
                    redis_option=redis_option,
                    pool=pool,
                    output=output,
                    errors=errors,
                    model=model,
                    register=register,
                )
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        made = every[0]
        if job is not None:
            show_job(job, every, json_=json_)
            if wait_:
                ctx.exit(max(_wait(store, one.batch.id, None, json_=False) for one in every))
            return
        known = store.progress(made.batch.id)
        if json_ and not wait_:
            _print_json(as_json(known) | {"known": made.known, "invalid": made.index.invalid})
        elif not json_:
            for line in describe_input(made.index):
                click.echo(line, err=True)
            if made.known:
                click.echo("It runs already; nothing was changed.", err=True)
            elif made.resumed:
                click.echo("It had been started before and goes on from there.", err=True)
            click.echo(made.batch.id)
        if wait_:
            ctx.exit(_wait(store, made.batch.id, None, json_=json_))


@batch.command()
@click.argument("batch_id", metavar="ID")
@pool_options
@_json_option
def status(batch_id: str, redis_option: str | None, pool: str, json_: bool) -> None:
    """Show one batch."""
    from hybridsched.cli.batch_view import as_json, describe

    with _store(redis_option, pool, f"reading batch {batch_id}") as store:
        found = store.progress(batch_id)
    if json_:
        _print_json(as_json(found))
    else:
        click.echo(describe(found))


@batch.command("list")
@pool_options
@click.option("--active", is_flag=True, help="Only batches that have not ended.")
@_json_option
def list_(redis_option: str | None, pool: str, active: bool, json_: bool) -> None:
    """List the pool's batches, oldest first. Ended ones can be looked up for 30 days."""
    from hybridsched.cli.batch_view import as_json, table

    with _store(redis_option, pool, f"listing the batches of pool {pool}") as store:
        batches = store.active(any_model=True) if active else store.all()
        found = [store.progress(one.id) for one in batches]
    if json_:
        _print_json([as_json(one) for one in found])
        return
    if not found:
        click.echo(f"Pool {pool} has no batches.", err=True)
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 200).print(table(found))


@batch.command()
@click.argument("batch_id", metavar="ID")
@pool_options
@click.option("--timeout", type=Duration(), help="Give up after this long, such as 30m (exit status 1).")
@_json_option
@click.pass_context
def wait(
    ctx: click.Context,
    batch_id: str,
    redis_option: str | None,
    pool: str,
    timeout: float | None,
    json_: bool,
) -> None:
    """Wait until a batch has ended. Exit status 0 when it completed, 1 when not."""
    with _store(redis_option, pool, f"waiting for batch {batch_id}") as store:
        ctx.exit(_wait(store, batch_id, timeout, json_=json_))


@batch.command()
@click.argument("batch_id", metavar="ID")
@pool_options
@_json_option
def cancel(batch_id: str, redis_option: str | None, pool: str, json_: bool) -> None:
    """End a batch: finished lines are kept, the rest goes to the error file as batch_cancelled."""
    from hybridsched.cli.batch_view import as_json

    with _store(redis_option, pool, f"cancelling batch {batch_id}") as store:
        store.cancel(batch_id)
        found = store.progress(batch_id)
    if json_:
        _print_json(as_json(found))
    else:
        click.echo(f"{batch_id} is {found.batch.status}; {found.done + found.failed:,} lines are finished.")


@batch.command()
@click.argument("file")
@click.option(
    "--engine", "engine_url", required=True, callback=_engine_url, help="http://HOST:PORT of a vLLM."
)
@click.option("--output", "-o", metavar="FILE", help="Default: FILE's name with .output.jsonl.")
@click.option("--errors", metavar="FILE", help="Default: the output's name with .errors.jsonl.")
@click.option("--api-key", envvar="HYBRIDSCHED_ENGINE_API_KEY", help="Bearer token of the engine.")
@_json_option
@click.pass_context
def run(
    ctx: click.Context,
    file: str,
    engine_url: str,
    output: str | None,
    errors: str | None,
    api_key: str | None,
    json_: bool,
) -> None:
    """Run FILE here and now on one engine, without a pool.

    Stopped or killed at any point, the same command goes on where it was.
    """
    from hybridsched import log
    from hybridsched.batches.files import OutputBusyError, OutputExistsError
    from hybridsched.batches.layout import local_batch_id, plan_files
    from hybridsched.batches.verify import check_files
    from hybridsched.batches.work import WorkFolder
    from hybridsched.cli.batch_view import describe_input

    log.configure(level=ctx.meta.get("hybridsched.log_level", "info"))
    with _one_sentence():
        first = plan_files(file, "run", output=output, errors=errors)
        files = plan_files(file, local_batch_id(first.output), output=first.output, errors=first.errors)
        try:
            with _reading(file) as progress:
                work = WorkFolder.create(files, progress=progress)
        except OutputExistsError:
            found = check_files(files.input, files.output, files.errors)
            if not found.exact:
                raise
            click.echo(f"{files.output} is complete already; nothing to do.", err=True)
            ctx.exit(_report(files.output, files.errors, found.lines, found.done, found.failed, json_))
        if work.files.batch_id != files.batch_id:
            work.close()
            raise OutputBusyError(
                f"{files.output} is the output of batch {work.files.batch_id} of a pool; wait for it or "
                "cancel it, or choose another --output"
            )
        if not work.resumed:
            for line in describe_input(work.index):
                click.echo(line, err=True)
        try:
            done, failed, at_end = _run_here(work, engine_url, api_key)
        except click.ClickException:
            if not work.resumed:
                work.discard()
            raise
        lines = work.index.lines
        if at_end:
            work.remove()
        else:
            click.echo("Stopped; the same command goes on from here.", err=True)
        ctx.exit(_report(files.output, files.errors, lines, done, failed, json_))


def _run_here(work: WorkFolder, engine_url: str, api_key: str | None) -> tuple[int, int, bool]:
    """Run until the end, or until a signal. Returns lines done, lines failed, whether all are."""
    import asyncio
    import signal

    from hybridsched.engines.vllm_http import VllmHttpEngine
    from hybridsched.workers.offline_file import RunState, run_file

    async def session() -> tuple[int, int, bool]:
        engine = VllmHttpEngine(engine_url, api_key=api_key)
        healthy = await engine.healthy()
        await engine.close()
        if not healthy:
            raise click.ClickException(
                f"no engine answers at {engine_url}/health; start it, or give its address with --engine"
            )
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        with _bar(work.index.lines) as show:

            def on_progress(state: RunState) -> None:
                show(state.done, state.failed)

            progress = await run_file(work, engine_url, api_key=api_key, stop=stop, on_progress=on_progress)
        return progress.done, progress.failed, progress.at_end

    try:
        return asyncio.run(session())
    finally:
        work.close()


def _report(output: str, errors: str, lines: int, done: int, failed: int, json_: bool) -> int:
    """Say how a local run ended. Returns the exit status."""
    whole = done + failed == lines
    if json_:
        status = "completed" if whole else "in_progress"
        counts = {"lines": lines, "done": done, "failed": failed, "remaining": lines - done - failed}
        _print_json({"status": status, **counts, "output": output, "errors": errors})
    else:
        click.echo(f"{done:,} of {lines:,} lines in {output}, {failed:,} in {errors}")
    return 0 if whole else 1


def _wait(store: BatchStore, batch_id: str, timeout_ms: float | None, *, json_: bool) -> int:
    """Follow a batch to its end, through outages of the store. Returns the exit status."""
    import redis

    from hybridsched.cli.batch_view import as_json

    until = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000.0
    found: BatchProgress = store.progress(batch_id)
    with _bar(found.batch.lines) as show:
        while not found.batch.status.ended and (until is None or time.monotonic() < until):
            show(found.done + found.failed, found.failed)
            time.sleep(POLL_S)
            with suppress(redis.ConnectionError, redis.TimeoutError):  # the batch goes on; look again
                found = store.progress(batch_id)
        show(found.done + found.failed, found.failed)
    if json_:
        _print_json(as_json(found))
    else:
        text = f"{batch_id} {found.batch.status}: {found.done:,} lines in {found.batch.output}"
        click.echo(f"{text}, {found.failed:,} in {found.batch.errors}")
        if found.batch.message:
            click.echo(found.batch.message, err=True)
        if not found.batch.status.ended:
            click.echo("Gave up waiting; the batch goes on.", err=True)
    return 0 if found.batch.status == "completed" else 1


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, int], None]]:
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
def _reading(file: str) -> Iterator[Callable[[int], None] | None]:
    """A note on a terminal while a large input is read."""
    if not sys.stderr.isatty():
        yield None
        return
    yield lambda read: click.echo(f"\rreading {file}: {read / 1e6:,.0f} MB", nl=False, err=True)
    click.echo("\r\x1b[K", nl=False, err=True)


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
