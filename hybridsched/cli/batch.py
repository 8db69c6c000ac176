"""`hybridsched batch`: submit, run and follow offline batch files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from hybridsched.cli.access import (
    Deadline,
    Duration,
    log_to_stderr,
    pool_options,
    store_problem,
    with_redis,
)
from hybridsched.cli.batch_follow import print_json, reading, wait_for_end
from hybridsched.cli.batch_run import report_run, run_here
from hybridsched.cli.batch_sbatch import sbatch_options, show_job, submit_by_sbatch, take_wishes

if TYPE_CHECKING:
    from hybridsched.cli.batch_waits import Waits
    from hybridsched.store.batch_values import BatchProgress
    from hybridsched.store.batches import BatchStore


_json_option = click.option("--json", "json_", is_flag=True, help="Print JSON for programs.")


def _engine_urls(_ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not re.fullmatch(r"https?://[^\s/]+/?", value):
            raise click.BadParameter(
                f"{value!r} is not an engine's address: give http://HOST:PORT, without a path", param=param
            )
    return tuple(dict.fromkeys(value.rstrip("/") for value in values))


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Errors that a user can meet become one sentence; exit status 2 where the command was given wrongly."""
    from hybridsched.batches.errors import BatchFileError, WrongPathError
    from hybridsched.engines.protocol import EngineError
    from hybridsched.store.errors import StoreError

    try:
        yield
    except StoreError as error:
        raise store_problem(error) from error
    except WrongPathError as error:
        raise click.UsageError(str(error)) from error
    except (BatchFileError, EngineError) as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _store(
    redis_option: str | None, pool: str, doing: str, *, level: str | None = None
) -> Iterator[BatchStore]:
    from hybridsched.batches.errors import BatchFileError
    from hybridsched.store.batches import BatchStore
    from hybridsched.store.connection import resolve_url, store_errors, sync_client

    url = resolve_url(redis_option)
    if url is None:
        raise click.UsageError("the pool's Redis is not known: give --redis URL or set HYBRIDSCHED_REDIS_URL")
    log_to_stderr(level)
    with _one_sentence():
        client = sync_client(url, name="hybridsched-cli")
        other: OSError | None = None
        try:
            with store_errors(url, doing):
                try:
                    yield BatchStore(client, pool)
                except OSError as error:  # of a file, or of our own output: redis-py wraps its sockets' own
                    other = error
        finally:
            client.close()
        if isinstance(other, BrokenPipeError):
            raise other
        if other is not None:
            where = f" {other.filename}" if other.filename else ""
            raise BatchFileError(f"{doing}:{where} {other.strerror or other}") from other


@click.group()
def batch() -> None:
    """Submit, run and follow offline batch files (OpenAI Batch format)."""


@batch.command()
@click.argument("words", nargs=-1, required=True, metavar="FILE...")
@click.option("--output", "-o", metavar="FILE", help="Default: FILE's name with .output.jsonl.")
@click.option("--errors", metavar="FILE", help="Default: the output's name with .errors.jsonl.")
@click.option("--model", help="Whose workers run all of it. Default: each line those of its model.")
@click.option("--deadline", type=Deadline(), help="2h, 1d, or 2026-11-30T07:00. Later lines are not run.")
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
    gres: str | None,
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
    from hybridsched.cli.batch_waits import missing_worker
    from hybridsched.workers.offline_submit import Submitted, submit_file

    asked = {
        "time": time_limit,
        "partition": partition,
        "gres": gres,
        "account": account,
        "qos": qos,
        "at_once": at_once,
    }
    wishes = take_wishes(sbatch, asked)
    if wishes is None and len(words) > 1:
        raise click.UsageError("one FILE at a time is queued in a pool; several go with --sbatch")

    def register(file: str) -> Submitted:
        with reading(file) as progress:
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
        why = partial(_waits, store, redis_option, pool)
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
                ctx.exit(max(wait_for_end(store, one.batch.id, None, json_=False, why=why) for one in every))
            return
        known = store.progress(made.batch.id)
        if json_ and not wait_:
            print_json(as_json(known) | {"known": made.known, "invalid": made.index.invalid})
        elif not json_:
            for line in describe_input(made.index):
                click.echo(line, err=True)
            missing = missing_worker(store, made.batch)
            if missing is not None:
                click.echo(f"It waits: {missing.message}", err=True)
            if made.known:
                click.echo("It runs already; nothing was changed.", err=True)
            elif made.resumed:
                click.echo("It had been started before and goes on from there.", err=True)
            click.echo(made.batch.id)
        if wait_:
            ctx.exit(wait_for_end(store, made.batch.id, None, json_=json_, why=why))


@batch.command()
@click.argument("batch_id", metavar="ID")
@pool_options
@_json_option
def status(batch_id: str, redis_option: str | None, pool: str, json_: bool) -> None:
    """Show one batch: how far it is, and why it waits."""
    from hybridsched.cli.batch_deadline import outlook_of
    from hybridsched.cli.batch_view import as_json, describe

    waits, due = None, None
    with _store(redis_option, pool, f"reading batch {batch_id}") as store:
        found = store.progress(batch_id)
        if not found.batch.status.ended:
            due = outlook_of(store, found)
            waits = _waits(store, redis_option, pool, found)
    if json_:
        print_json(as_json(found, waits) | {"outlook": due})
    else:
        click.echo(describe(found, waits, due))


def _waits(store: BatchStore, redis_option: str | None, pool: str, found: BatchProgress) -> Waits | None:
    """Why a batch that has not ended does not go on, as far as that does not stand in its record."""
    from hybridsched.cli.batch_waits import able, closed_lanes, live_lanes, missing_worker, stopped

    waits = stopped(store)
    if waits is not None:
        return waits
    up, waits = live_lanes(store)
    if waits is None and (found.batch.parts or not found.running_chunks):
        waits = missing_worker(store, found.batch)
    lanes = [] if found.batch.jobs_only else able(found.batch, up)
    if waits is not None or not lanes:
        return waits
    doing, batch = f"reading the lanes of pool {pool}", found.batch
    return with_redis(redis_option, doing, lambda client: closed_lanes(client, pool, batch, lanes))


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
        print_json([as_json(one) for one in found])
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
    """Wait until a batch has ended. Exit status 0 when it completed, 1 when not.

    Where it stands still meanwhile, stderr says why.
    """
    with _store(redis_option, pool, f"waiting for batch {batch_id}") as store:
        why = partial(_waits, store, redis_option, pool)
        ctx.exit(wait_for_end(store, batch_id, timeout, json_=json_, why=why))


@batch.command()
@click.argument("batch_id", metavar="ID")
@pool_options
@_json_option
def cancel(batch_id: str, redis_option: str | None, pool: str, json_: bool) -> None:
    """End a batch: finished lines are kept, the rest goes to the error file as batch_cancelled.

    Where no worker is there to do that, this command does it.
    """
    from hybridsched.cli.batch_cancel import end_here
    from hybridsched.cli.batch_view import as_json, lines_answered

    # What the end of a batch logs as news is what this command answers.
    with _store(redis_option, pool, f"cancelling batch {batch_id}", level="warning") as store:
        before = store.progress(batch_id)
        if before.batch.status.ended:
            raise click.ClickException(
                f"{batch_id} is {before.batch.status} already, and nothing was changed: "
                f"{lines_answered(before)}; they are in {before.batch.output} and {before.batch.errors}"
            )
        if before.batch.status == "finalizing":
            raise click.ClickException(
                f"{batch_id} has run all its lines and is being ended; `hybridsched batch wait {batch_id}` "
                "waits for that"
            )
        problem = end_here(store, store.cancel(batch_id))
        found = store.progress(batch_id)
    if problem:
        click.echo(problem, err=True)
    if json_:
        print_json(as_json(found))
    elif found.batch.status.ended:
        click.echo(f"{batch_id} is {found.batch.status}: {lines_answered(found)}")
    else:
        click.echo(f"{batch_id} is {found.batch.status}; {found.done + found.failed:,} lines are answered.")


@batch.command()
@click.argument("file")
@click.option(
    "--engine",
    "engine_urls",
    required=True,
    multiple=True,
    callback=_engine_urls,
    help="http://HOST:PORT of a vLLM; of several, each line goes to one that serves its model.",
)
@click.option("--output", "-o", metavar="FILE", help="Default: FILE's name with .output.jsonl.")
@click.option("--errors", metavar="FILE", help="Default: the output's name with .errors.jsonl.")
@click.option("--api-key", envvar="HYBRIDSCHED_ENGINE_API_KEY", help="Bearer token of the engine.")
@_json_option
@click.pass_context
def run(
    ctx: click.Context,
    file: str,
    engine_urls: tuple[str, ...],
    output: str | None,
    errors: str | None,
    api_key: str | None,
    json_: bool,
) -> None:
    """Run FILE here and now on an engine, or several, without a pool.

    Stopped or killed at any point, the same command goes on where it was.
    """
    from hybridsched import log
    from hybridsched.batches.errors import OutputBusyError, OutputExistsError
    from hybridsched.batches.layout import local_batch_id, plan_files
    from hybridsched.batches.verify import check_files
    from hybridsched.batches.work import WorkFolder
    from hybridsched.cli.batch_view import describe_input

    log.configure(level=ctx.meta.get("hybridsched.log_level", "info"))
    with _one_sentence():
        first = plan_files(file, "run", output=output, errors=errors)
        files = plan_files(file, local_batch_id(first.output), output=first.output, errors=first.errors)
        try:
            with reading(file) as progress:
                work = WorkFolder.create(files, progress=progress)
        except OutputExistsError:
            found = check_files(files.input, files.output, files.errors)
            if not found.exact:
                raise
            click.echo(f"{files.output} is complete already; nothing to do.", err=True)
            ctx.exit(report_run(files, found.lines, found.done, found.failed, found.lines, json_))
        if work.files.batch_id != local_batch_id(work.files.output):
            work.close()
            raise OutputBusyError(
                f"{files.output} is the output of batch {work.files.batch_id} of a pool; wait for it or "
                "cancel it, or choose another --output"
            )
        if work.resumed:
            click.echo(f"An earlier run of {file} was not at its end: it goes on from there.", err=True)
        else:
            for line in describe_input(work.index):
                click.echo(line, err=True)
        try:
            done, failed, answered = run_here(work, engine_urls, api_key)
        except click.ClickException:
            if not work.resumed:
                work.discard()
            raise
        lines = work.index.lines
        if done + failed == lines:
            work.remove()
        ctx.exit(report_run(work.files, lines, done, failed, answered, json_))
