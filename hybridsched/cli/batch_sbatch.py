"""`hybridsched batch submit --sbatch`: one Slurm job for a batch file, an array for several."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import Duration

if TYPE_CHECKING:
    from hybridsched.cluster.values import JobSpec
    from hybridsched.workers.offline_submit import Submitted

_MOST_WORDS = 60_000
"""Bytes of file names on sbatch's command line; more go into a list file."""


_EARLY_S = 60
"""Slurm may send the notice this much earlier than it says (sbatch(1), --signal)."""

_LEAST_WORK_S = 60

_SHOWN = 10
_GRES = re.compile(r"[A-Za-z][\w.-]*(:[\w.-]+)?:[1-9]\d{0,3}(,[A-Za-z][\w.-]*(:[\w.-]+)?:[1-9]\d{0,3})*")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asks of Slurm; None leaves it to the batch script."""

    time_limit_min: int | None = None
    partition: str | None = None
    gres: str | None = None
    """As sbatch's --gres takes it: what the site calls an open lane."""
    account: str | None = None
    qos: str | None = None
    at_once: int | None = None
    """Tasks of an array that may run side by side."""


def sbatch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options; their values come as `sbatch` and `wishes` (see `take_wishes`)."""
    options = [
        click.option("--sbatch", is_flag=True, help="Run it by Slurm jobs of your own; prints the job's id."),
        click.option("--time", "time_limit", type=Duration(), help="With --sbatch: time limit of one run."),
        click.option("--partition", help="With --sbatch: default: that of the pool's policy, or offline."),
        click.option(
            "--gres",
            metavar="NAME:1,...",
            help="With --sbatch: one open lane; default: as the pool's policy names it.",
        ),
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
        gres=given["gres"],
        account=given["account"],
        qos=given["qos"],
        at_once=given["at_once"],
    )


def short_limit(wishes: Wishes, script: str) -> str | None:
    """Why the time limit leaves a run next to no time to work, or None. `script`: the batch script's text."""
    found = re.search(r"^#SBATCH --signal=B:\w+@(\d+)", script, re.MULTILINE)
    if wishes.time_limit_min is None or found is None:
        return None
    notice = int(found[1])
    least_min = math.ceil((notice + _EARLY_S + _LEAST_WORK_S) / 60)
    if wishes.time_limit_min >= least_min:
        return None
    return (
        f"--time is {wishes.time_limit_min} min, and a run is told to leave {notice} s before its end, by "
        f"Slurm up to {_EARLY_S} s earlier: it starts, does little or nothing, and waits in the queue again. "
        f"Give {least_min}m or more, better several times that"
    )


def expand(words: Sequence[str]) -> list[str]:
    """The files that are meant: `@LIST` stands for those that LIST names, one a line.

    Raises:
        click.UsageError: a list cannot be read.
    """
    files: list[str] = []
    for word in words:
        if not word.startswith("@"):
            files.append(word)
            continue
        try:
            text = Path(word[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"the list of files {word[1:]} cannot be read: {error}") from error
        files += [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not files:
        raise click.UsageError(f"{' '.join(words)} names no file")
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
    from hybridsched.cluster.parse_words import parse_gres
    from hybridsched.cluster.values import JobSpec

    if wishes.gres is not None and not _GRES.fullmatch(wishes.gres):
        raise click.UsageError(
            f"--gres was given {wishes.gres!r}; it takes NAME:COUNT, with commas in between"
        )
    if wishes.gres is not None and any(re.split("[:/]", one)[0] == "gpu" for one in wishes.gres.split(",")):
        raise click.UsageError(
            f"--gres was given {wishes.gres!r}, but a batch takes no GPU of its own: the job would hold it "
            "and not use it, since it runs on a lane, a place on an engine of online's; leave --gres out, or "
            "name the open lane as the site calls it (hsfill:1,hslane:1)"
        )
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
        gres=parse_gres(wishes.gres),
        time_limit_min=wishes.time_limit_min,
        account=wishes.account,
        qos=wishes.qos,
        array=array,
        comment=comment,
        chdir=folder or str(Path.cwd()),
        environment=dict(environment),
    )


def assumed(wishes: Wishes, pool: str) -> str:
    """A line on what to look at when Slurm refuses names that nobody gave and no policy has; else empty.
    `wishes`: those that `named_by_pool` has completed as far as it could."""
    if wishes.gres and wishes.partition:
        return ""
    return (
        f"Pool {pool} has no policy that steers Slurm, so the names of workers/offline.sbatch were taken "
        "(--gres=hsfill:1,hslane:1, --partition=offline): if the site has others, name the right pool in "
        "HYBRIDSCHED_POOL, or give --gres and --partition\n"
    )


def named_by_pool(wishes: Wishes, redis_option: str | None, pool: str) -> Wishes:
    """The wishes, with the pool's own names of partition and lane where the user gave none."""
    from hybridsched.cli.access import with_redis
    from hybridsched.store.policy import PolicyStore

    doing = f"reading the policy of pool {pool}"
    policy = with_redis(redis_option, doing, lambda client: PolicyStore(client, pool).current())
    if policy is None or not policy.slurm.enabled:
        return wishes
    slurm = policy.slurm
    return replace(
        wishes,
        partition=wishes.partition or slurm.partition_offline,
        gres=wishes.gres or f"{slurm.fill_gres}:1,{slurm.place_gres}:1",
    )


def submit_job(spec: JobSpec, made: Sequence[Submitted], hint: str = "") -> int:
    """Hand the job to sbatch; its id.

    Raises:
        click.ClickException: Slurm did not take it. The batches are registered, and named: it can be tried
            again, or they can be cancelled.
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
        names = " ".join(one.batch.id for one in made[:_SHOWN])
        more = f" and {len(made) - _SHOWN} more (hybridsched batch list)" if len(made) > _SHOWN else ""
        raise click.ClickException(
            f"{error}\n{hint}Nothing runs yet. Registered for Slurm jobs: {names}{more}. Give the same "
            "command again to go on with what is there, or end it: hybridsched batch cancel "
            f"{made[0].batch.id}"
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
    from hybridsched.store.job_models import job_comment

    files = expand(words)
    wishes = named_by_pool(wishes, redis_option, pool)
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

    if why := short_limit(wishes, script_path("offline.sbatch").read_text(encoding="utf-8")):
        click.echo(f"Warning: {why}.", err=True)
    described(None)  # what does not fit together is said before anything is registered
    made = [register(file) for file in files]
    models = {model for one in made for model in one.batch.models or (None,)}
    comment = job_comment(
        made[0].batch.id if len(made) == 1 else None, models.pop() if len(models) == 1 else None
    )
    return submit_job(described(comment), made, assumed(wishes, pool)), made


def show_job(job: int, made: Sequence[Submitted], *, json_: bool) -> None:
    """The job's id on stdout, what it runs on stderr with the lines that cannot; or all of it as JSON."""
    from hybridsched.cli.batch_view import describe_input

    if json_:
        batches = [
            {
                "batch": one.batch.id,
                "input": one.batch.input,
                "lines": one.index.lines,
                "invalid": one.index.invalid,
            }
            for one in made
        ]
        click.echo(json.dumps({"job": job, "batches": batches}, indent=2))
        return
    for one in made[:_SHOWN]:
        how = ", goes on from where it was" if one.known or one.resumed else ""
        first, *more = describe_input(one.index)
        click.echo(f"{one.batch.id}: {one.batch.input}, {first}{how}", err=True)
        for line in more:
            click.echo(f"  {line}", err=True)
    if len(made) > _SHOWN:
        bad = sum(one.index.invalid for one in made[_SHOWN:])
        cannot = f", {bad:,} of their lines cannot run" if bad else ""
        click.echo(f"and {len(made) - _SHOWN} more{cannot}", err=True)
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
