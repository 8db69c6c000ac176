"""`hybridsched worker`: start one of the three loops in the foreground."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hybridsched.cli.access import Duration, job_problem, store_problem
from hybridsched.cli.worker_words import engine_address, model_name, worker_name

if TYPE_CHECKING:
    from hybridsched.engines.request_log import RequestLog

T = TypeVar("T")

_engine_option = click.option(
    "--engine",
    "engine_url",
    required=True,
    callback=engine_address,
    help="http://HOST:PORT of the replica's vLLM.",
)


_request_log_option = click.option(
    "--request-log",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Append one JSON line for each request to the engine, for a report.",
)


def _request_log(path: Path | None) -> RequestLog | None:
    from hybridsched.engines.request_log import RequestLog

    if path is None:
        return None
    try:
        return RequestLog(path)
    except OSError as error:
        raise click.ClickException(f"--request-log {path} cannot be written: {error.strerror}") from error


def _common(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option(
            "--redis",
            "redis_option",
            envvar="HYBRIDSCHED_REDIS_URL",
            metavar="URL",
            help="redis://, rediss://, unix:// or sentinel:// address of the pool's Redis or Valkey.",
        ),
        click.option(
            "--pool",
            default="default",
            show_default=True,
            envvar="HYBRIDSCHED_POOL",
            callback=worker_name,
            help="The pool's name.",
        ),
        click.option(
            "--speed",
            default=1.0,
            show_default=True,
            type=click.FloatRange(min=0.01, max=100),
            help="How many times faster than the wall clock the simulated engines run.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _run(start: Callable[[str], Coroutine[Any, Any, T]], redis_option: str | None) -> T:
    """Resolve the Redis address and run a loop until it ends or is told to stop."""
    import asyncio

    from hybridsched import log
    from hybridsched.store.connection import StoreError, resolve_url

    log.configure(level=click.get_current_context().meta.get("hybridsched.log_level", "info"))
    try:
        url = resolve_url(redis_option)
        if url is None:
            raise click.UsageError(
                "a worker needs the pool's Redis: give --redis URL or set HYBRIDSCHED_REDIS_URL"
            )
        return asyncio.run(start(url))
    except StoreError as error:
        raise store_problem(error) from error


@click.group()
def worker() -> None:
    """Run one of the three loops: online, offline, policy."""


@worker.command()
@_common
@click.option("--replica", required=True, callback=worker_name, help="This replica's name in the pool.")
@click.option("--model", required=True, callback=model_name, help="The model it serves.")
@_engine_option
@_request_log_option
def online(
    redis_option: str | None,
    pool: str,
    speed: float,
    replica: str,
    model: str,
    engine_url: str,
    request_log: Path | None,
) -> None:
    """Serve online requests on one engine.

    The loop pulls requests while its engine has room, closes the engine's lane as it takes one,
    and answers each request even when the engine dies.
    """

    log = _request_log(request_log)

    async def start(url: str) -> None:
        from hybridsched.log import get_logger
        from hybridsched.workers.online import OnlineOptions, run_online
        from hybridsched.workers.online_jobs import JobOptions

        await run_online(
            redis_url=url,
            pool=pool,
            replica=replica,
            model=model,
            engine_url=engine_url,
            speed=speed,
            log=get_logger("online"),
            options=OnlineOptions(jobs=JobOptions(request_log=log)),
        )

    _run(start, redis_option)


@worker.command()
@_common
@click.option("--lane", callback=worker_name, help="The lane's name, which is its replica's.")
@click.option(
    "--replica",
    callback=worker_name,
    help="The replica whose engine the lane shares, or beside which its own engine stands.",
)
@click.option("--model", callback=model_name, help="The model that its batches ask for.")
@click.option("--engine", "engine_url", callback=engine_address, help="http://HOST:PORT of its vLLM.")
@_request_log_option
@click.option(
    "--own-engine",
    is_flag=True,
    help="The engine is the lane's alone, beside the replica's: a pause stops all of it and loses nothing.",
)
@click.option("--burst", is_flag=True, help="End when no batch has work left.")
@click.option(
    "--slurm-job",
    "source",
    metavar="FILE",
    help="Inside a Slurm job: run this batch file alone, on a free lane of the job's node.",
)
@click.option("--output", "-o", metavar="FILE", help="With --slurm-job: as of `batch submit`.")
@click.option("--errors", metavar="FILE", help="With --slurm-job: as of `batch submit`.")
@click.option("--deadline", type=Duration(), help="With --slurm-job: from its first run, such as 12h.")
@click.option(
    "--give-back-after",
    type=Duration(),
    default="10s",
    show_default=True,
    help="With --slurm-job: change a lane that stays closed for this long for an open one.",
)
@click.option(
    "--leave-after",
    type=Duration(),
    default="30m",
    show_default=True,
    help="With --slurm-job: back to Slurm's queue when no lane has been open for this long.",
)
@click.option(
    "--idle-gpus",
    is_flag=True,
    help="With --slurm-job: the job may hold GPUs of its own; they stand idle until online preempts it.",
)
@click.pass_context
def offline(
    ctx: click.Context,
    redis_option: str | None,
    pool: str,
    speed: float,
    lane: str | None,
    replica: str | None,
    model: str | None,
    engine_url: str | None,
    request_log: Path | None,
    own_engine: bool,
    burst: bool,
    source: str | None,
    output: str | None,
    errors: str | None,
    deadline: float | None,
    give_back_after: float,
    leave_after: float,
    idle_gpus: bool,
) -> None:
    """Run batches on one lane while its gate is open.

    A closed gate stops it at the next chunk, or at the engine's next iteration, as the policy
    says; nothing that is finished is lost. A lane has one worker: a second one ends with exit status 1.

    With --slurm-job FILE it runs that file alone, with the rights of the job's user. Exit status: 0 the batch
    is complete, 1 it ended otherwise, 2 it cannot begin (Redis refuses the login, or the job has GPUs of its
    own), 75 its place is kept and another run goes on from there.
    """
    if source is not None:
        for given, name in ((lane, "--lane"), (replica, "--replica"), (engine_url, "--engine")):
            if given is not None:
                raise click.UsageError(f"{name} cannot be chosen with --slurm-job: the job takes a free lane")
        if own_engine:
            raise click.UsageError("--slurm-job takes a lane on online's engine: --own-engine cannot be")
        job = _slurm_job(
            source=source,
            output=output,
            errors=errors,
            model=model,
            deadline_in_ms=deadline,
            pool=pool,
            speed=speed,
            give_back_s=give_back_after / 1000.0,
            leave_after_s=leave_after / 1000.0,
            idle_gpus=idle_gpus,
        )
        ctx.exit(_run(job, redis_option))
    for wish, name in ((output, "--output"), (errors, "--errors"), (deadline, "--deadline")):
        if wish is not None:
            raise click.UsageError(f"{name} goes with --slurm-job FILE; a lane's worker runs every batch")
    if replica is None or model is None or engine_url is None:
        raise click.UsageError("give --replica, --model and --engine, or --slurm-job FILE inside a Slurm job")
    if lane not in (None, replica):
        raise click.UsageError(
            f"--lane {lane}: a lane has the name of its replica, {replica}, as a claim of online requests "
            "closes the gate of that name in the same step; leave --lane out"
        )
    log = _request_log(request_log)

    async def start(url: str) -> None:
        from hybridsched.workers.offline_process import run_offline

        await run_offline(
            redis_url=url,
            pool=pool,
            lane=replica,
            replica=replica,
            model=model,
            engine_url=engine_url,
            speed=speed,
            burst=burst,
            request_log=log,
            own_engine=own_engine,
        )

    _run(start, redis_option)


def _slurm_job(
    *,
    source: str,
    output: str | None,
    errors: str | None,
    model: str | None,
    deadline_in_ms: float | None,
    pool: str,
    speed: float,
    give_back_s: float,
    leave_after_s: float,
    idle_gpus: bool,
) -> Callable[[str], Coroutine[Any, Any, int]]:
    """What runs a batch file inside a Slurm job. Returns the exit status."""
    from hybridsched.workers.slurm_env import job_place, own_gpus

    place = job_place()
    if place is None:
        raise click.UsageError(
            "--slurm-job works inside a Slurm job; submit one with `sbatch workers/offline.sbatch FILE` or "
            "`hybridsched batch submit --sbatch FILE`"
        )

    if not idle_gpus and (gpus := own_gpus()):
        raise click.UsageError(
            f"this job has GPUs of its own ({gpus}), which it would hold and not use while it waits: a "
            "batch runs on a lane, which is a place on an engine of online's. Submit it with the --gres of "
            "workers/offline.sbatch (hsfill:1,hslane:1, or as the site calls them) and no GPU, or give "
            "--idle-gpus to hold them all the same"
        )

    async def start(url: str) -> int:
        from hybridsched.batches.errors import BatchFileError
        from hybridsched.store.errors import StoreRefused
        from hybridsched.workers.offline_job import JobOptions, OfflineJob, run_offline_job

        job = OfflineJob(
            redis_url=url,
            pool=pool,
            place=place,
            source=source,
            output=output,
            errors=errors,
            model=model,
            deadline_in_ms=deadline_in_ms,
            speed=speed,
            options=JobOptions(give_back_s=give_back_s, leave_after_s=leave_after_s),
        )
        try:
            return await run_offline_job(job)
        except StoreRefused as error:
            raise job_problem(error) from error
        except (BatchFileError, ValueError) as error:
            raise click.ClickException(str(error)) from error

    return start


@worker.command()
@_common
@click.option("--standby/--no-standby", default=True, help="Wait for the lead when another worker holds it.")
@click.option(
    "--scripts",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    envvar="HYBRIDSCHED_SCRIPTS",
    help="Folder below which a policy's scripts of online replicas must lie; default: the working directory.",
)
@click.option(
    "--hand",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="HYBRIDSCHED_HAND",
    metavar="PROGRAM",
    help="What changes hosts for the policy's modes: called with HOST and what to do (docs/modes.md).",
)
def policy(
    redis_option: str | None,
    pool: str,
    speed: float,
    standby: bool,
    scripts: Path | None,
    hand: Path | None,
) -> None:
    """Measure the pool, decide which gates are open, and record why."""

    async def start(url: str) -> None:
        from hybridsched.workers.policy_run import run_policy

        await run_policy(redis_url=url, pool=pool, speed=speed, standby=standby, scripts=scripts, hand=hand)

    _run(start, redis_option)


@worker.command()
@_common
@click.option("--model", required=True, callback=model_name, help="The model it serves.")
@click.option("--replica", callback=worker_name, help="Its name in the pool; default: by its Slurm job.")
@click.option(
    "--port", default=0, type=click.IntRange(0, 65_535), help="The engine's port; 0 takes a free one."
)
@click.option(
    "--gpu-probe",
    default="nvidia-smi",
    show_default=True,
    envvar="HYBRIDSCHED_GPU_PROBE",
    metavar="PROGRAM",
    help="Asked when the engine dies. Any other gets the GPUs and ends with 1 when one is broken.",
)
@click.option(
    "--start-timeout",
    default=1800.0,
    show_default=True,
    envvar="HYBRIDSCHED_START_S",
    type=click.FloatRange(min=1),
    help="Seconds until the engine must be healthy.",
)
@click.option(
    "--drain",
    default=30.0,
    show_default=True,
    envvar="HYBRIDSCHED_DRAIN_S",
    type=click.FloatRange(min=0),
    help="Seconds that requests in flight get when the replica is told to stop.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def replica(
    ctx: click.Context,
    redis_option: str | None,
    pool: str,
    speed: float,
    model: str,
    replica: str | None,
    port: int,
    gpu_probe: str,
    start_timeout: float,
    drain: float,
    command: tuple[str, ...],
) -> None:
    """Run an engine and the online worker beside it, as one Slurm job.

    COMMAND, after `--`, starts the engine; {port} in it becomes the engine's port, {replica} the replica's
    name, and `simulated` as its first word is the simulated engine. SIGTERM and SIGUSR2: take no request any
    more, end those in flight, end the engine. Exit status: 0 told to stop, 69 the GPU is gone, 70 the engine
    died, 78 it did not start.
    """
    from hybridsched.cli.replica import replica_job

    job = replica_job(
        pool=pool,
        model=model,
        replica=replica,
        command=command,
        port=port,
        speed=speed,
        gpu_probe=gpu_probe,
        start_s=start_timeout,
        drain_s=drain,
    )
    ctx.exit(_run(job, redis_option))
