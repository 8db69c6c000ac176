"""`hybridsched batch submit --sbatch`: one Slurm job for a batch file, an array for several."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import Duration

if TYPE_CHECKING:
    from hybridsched.cluster.values import JobSpec
    from hybridsched.workers.offline_submit import Submitted

_MOST_WORDS = 60_000
"""Bytes of file names on sbatch's command line; more go into a list file."""


_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asks of Slurm; None leaves it to the batch script."""

    time_limit_min: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    at_once: int | None = None
    """Tasks of an array that may run side by side."""


def sbatch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options; their values come as `sbatch` and `wishes` (see `take_wishes`)."""
    options = [
        click.option("--sbatch", is_flag=True, help="Run it by Slurm jobs of your own; prints the job's id."),
        click.option("--time", "time_limit", type=Duration(), help="With --sbatch: time limit of one run."),
        click.option("--partition", help="With --sbatch: default: offline."),
        click.option("--account", help="With --sbatch: account to be charged."),
        click.option("--qos", help="With --sbatch: quality of service."),
        click.option(
            "--at-once", type=click.IntRange(1), help="With --sbatch and several files: jobs side by side."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def take_wishes(sbatch: bool, given: Mapping[str, Any]) -> Wishes | None:
    """The options of `sbatch_options`; None without --sbatch.

    Raises:
        click.UsageError: one of them was given without --sbatch.
    """
    if not sbatch:
        for name, value in given.items():
            if value is not None:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --sbatch")
        return None
    limit = given["time"]
    return Wishes(
        time_limit_min=None if limit is None else max(1, round(limit / 60_000)),
        partition=given["partition"],
        account=given["account"],
        qos=given["qos"],
        at_once=given["at_once"],
    )


def expand(words: Sequence[str]) -> list[str]:
    """The files that are meant: `@LIST` stands for those that LIST names, one a line.

    Raises:
        click.ClickException: a list cannot be read.
    """
    files: list[str] = []
    for word in words:
        if not word.startswith("@"):
            files.append(word)
            continue
        try:
            text = Path(word[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.ClickException(f"the list of files {word[1:]} cannot be read: {error}") from error
        files += [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not files:
        raise click.ClickException(f"{' '.join(words)} names no file")
    return files


def job_spec(
    words: Sequence[str],
    files: Sequence[str],
    *,
    wishes: Wishes,
    output: str | None,
    errors: str | None,
    model: str | None,
    environment: Mapping[str, str],
    comment: str | None,
    folder: str | None = None,
) -> JobSpec:
    """The job: for one file, or an array with one task for each of several.

    Raises:
        click.UsageError: the options do not fit several files, or the names are too many for a command line.
    """
    from hybridsched.cluster.values import JobSpec

    many = len(files) > 1
    if many and (output is not None or errors is not None):
        raise click.UsageError("--output and --errors are for one file; several get theirs from their names")
    if not many and wishes.at_once is not None:
        raise click.UsageError("--at-once is for several files")
    if sum(len(os.fsencode(word)) for word in words) > _MOST_WORDS:
        raise click.UsageError(
            "the names are too long for a command line: put them into a list and give @LIST"
        )
    array = None
    if many:
        array = f"0-{len(files) - 1}" + (f"%{wishes.at_once}" if wishes.at_once else "")
    options = (("--output", output), ("--errors", errors), ("--model", model))
    arguments = [_absolute(word) for word in words]
    for name, value in options:
        if value is not None:
            arguments += [name, value if name == "--model" else str(Path(value).absolute())]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(files[0]).name.removesuffix(".jsonl"))
    return JobSpec(
        name=f"hs-{stem[:40]}",
        script_path=str(script_path("offline.sbatch")),
        arguments=tuple(arguments),
        partition=wishes.partition,
        time_limit_min=wishes.time_limit_min,
        account=wishes.account,
        qos=wishes.qos,
        array=array,
        comment=comment,
        chdir=folder or str(Path.cwd()),
        environment=dict(environment),
    )


def submit_job(spec: JobSpec) -> int:
    """Hand the job to sbatch; its id.

    Raises:
        click.ClickException: Slurm did not take it. The batches are registered; it can be tried again.
    """
    from hybridsched.cluster.commands import CommandCluster
    from hybridsched.cluster.values import ClusterError

    async def session() -> int:
        cluster = CommandCluster(timeout_s=60.0)
        try:
            return await cluster.submit(spec)
        finally:
            await cluster.close()

    try:
        return asyncio.run(session())
    except ClusterError as error:
        raise click.ClickException(
            f"{error}\nNothing runs yet; the same command can be given again"
        ) from error


def submit_by_sbatch(
    words: Sequence[str],
    *,
    wishes: Wishes,
    redis_option: str | None,
    pool: str,
    output: str | None,
    errors: str | None,
    model: str | None,
    register: Callable[[str], Submitted],
) -> tuple[int, list[Submitted]]:
    """Check and register every file, then submit the job. `register` does one file."""
    from hybridsched.store.connection import resolve_url

    files = expand(words)
    environment = {
        "HYBRIDSCHED_REDIS_URL": resolve_url(redis_option) or "",
        "HYBRIDSCHED_POOL": pool,
        "HYBRIDSCHED_BIN": program(),
    }

    def described(comment: str | None) -> JobSpec:
        return job_spec(
            words,
            files,
            wishes=wishes,
            output=output,
            errors=errors,
            model=model,
            environment=environment,
            comment=comment,
        )

    described(None)  # what does not fit together is said before anything is registered
    made = [register(file) for file in files]
    comment = f"hybridsched {made[0].batch.id}" if len(made) == 1 else None
    return submit_job(described(comment)), made


def show_job(job: int, made: Sequence[Submitted], *, json_: bool) -> None:
    """The job's id on stdout, what it runs on stderr; or all of it as JSON."""
    if json_:
        batches = [
            {"batch": one.batch.id, "input": one.batch.input, "lines": one.index.lines} for one in made
        ]
        click.echo(json.dumps({"job": job, "batches": batches}, indent=2))
        return
    for one in made[:_SHOWN]:
        how = ", goes on from where it was" if one.known or one.resumed else ""
        click.echo(f"{one.batch.id}: {one.batch.input}, {one.index.lines:,} lines{how}", err=True)
    if len(made) > _SHOWN:
        click.echo(f"and {len(made) - _SHOWN} more", err=True)
    click.echo(job)


def script_path(name: str) -> Path:
    """A batch script: in the installed package, or at the top of a source checkout.

    Raises:
        click.ClickException: it is in neither.
    """
    here = Path(__file__).resolve().parent.parent
    for folder in (here / "slurmfiles" / "workers", here.parent / "workers"):
        path = folder / name
        if path.is_file():
            return path
    raise click.ClickException(f"workers/{name} is not installed; submit it by hand with sbatch")


def program() -> str:
    """The `hybridsched` that this is, for the node to run: the file system is taken to be shared."""
    beside = Path(sys.executable).with_name("hybridsched")
    return str(beside) if beside.is_file() else (shutil.which("hybridsched") or "hybridsched")


def _absolute(word: str) -> str:
    at, name = ("@", word[1:]) if word.startswith("@") else ("", word)
    return at + str(Path(name).absolute())
