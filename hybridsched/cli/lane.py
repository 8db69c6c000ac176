"""`hybridsched lane`: programs of one's own on a lane."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import Duration, job_problem, pool_options

if TYPE_CHECKING:
    _SignalParam = click.ParamType[signal.Signals]
else:
    # Generic only from click 8.5 on.
    _SignalParam = click.ParamType


class _Signal(_SignalParam):
    """USR2, SIGUSR2 or the like."""

    name = "signal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> signal.Signals:
        if isinstance(value, signal.Signals):
            return value
        name = "SIG" + str(value).upper().removeprefix("SIG")
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            self.fail(f"{value!r} is no signal to take; give USR1, USR2, TERM or INT", param, ctx)
        return signal.Signals[name]


@click.group()
def lane() -> None:
    """Run programs of your own while a lane is open."""


@lane.command(context_settings={"ignore_unknown_options": True})
@pool_options
@click.option("--lane", "lane_name", metavar="NAME", help="This lane; default: a free one of the job's node.")
@click.option("--model", help="Only on a lane of this model's engine.")
@click.option(
    "--signal", "told", type=_Signal(), default="USR2", show_default=True, help="What CMD is told with."
)
@click.option(
    "--grace",
    type=Duration(),
    default="30s",
    show_default=True,
    help="How long CMD may take to save and exit.",
)
@click.option(
    "--pauses-itself",
    is_flag=True,
    help="CMD calls lane.checkpoint(): tell it nothing when the lane closes, only when the job must leave.",
)
@click.option(
    "--leave-after",
    type=Duration(),
    default="30m",
    show_default=True,
    help="Back to Slurm's queue when no lane has been open for this long.",
)
@click.argument("command", nargs=-1, required=True, metavar="-- CMD...", type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    command: tuple[str, ...],
    redis_option: str | None,
    pool: str,
    lane_name: str | None,
    model: str | None,
    told: signal.Signals,
    grace: float,
    pauses_itself: bool,
    leave_after: float,
) -> None:
    """Run CMD while a lane is open.

    CMD starts when the lane opens. When it closes, or the job has to leave, CMD gets the signal: it saves its
    state and exits, with any status but 0, and is started again when the lane opens, in this job or in its
    next run. Status 0 means that its work is done. `sbatch workers/own.sbatch CMD...` runs this as a job.
    In a batch script of your own `exec` it, so that Slurm's signal reaches it, and put `trap '' USR2` above
    everything else: by default the signal ends a script that does not listen yet.

    Exit status: 0 CMD is done, 75 another run goes on, 2 Redis refuses the login, else that of CMD.
    """
    import asyncio

    from hybridsched import log
    from hybridsched.store.connection import StoreError, resolve_url
    from hybridsched.workers.lane_run import LaneRun, LaneRunOptions, run_on_lane
    from hybridsched.workers.slurm_env import job_place, own_gpus

    log.configure(level=ctx.meta.get("hybridsched.log_level", "info"))
    url = resolve_url(redis_option)
    if url is None:
        raise click.UsageError("the pool's Redis is not known: give --redis URL or set HYBRIDSCHED_REDIS_URL")
    place = job_place()
    if place is None and lane_name is None:
        raise click.UsageError(
            "this is no Slurm job: name the lane with --lane, or submit a job that runs this"
        )
    if lane_name is None and (gpus := own_gpus()):
        raise click.UsageError(
            f"this job has GPUs of its own ({gpus}), and a lane is a place on an engine of online's: submit "
            "it with --gres=hsfill:1,hslane:1 and no GPU, or run CMD without `hybridsched lane run`"
        )
    options = LaneRunOptions(
        lane=lane_name,
        model=model,
        signal=told,
        grace_s=grace / 1000.0,
        pauses_itself=pauses_itself,
        leave_after_s=leave_after / 1000.0,
    )

    async def start() -> int:
        return await run_on_lane(
            LaneRun(list(command), redis_url=url, pool=pool, place=place, options=options)
        )

    try:
        status = asyncio.run(start())
    except StoreError as error:
        raise job_problem(error) from error
    except FileNotFoundError as error:
        raise click.ClickException(f"{command[0]} cannot be started: {error.strerror}") from error
    except PermissionError as error:
        raise click.ClickException(f"{command[0]} may not be started: {error.strerror}") from error
    ctx.exit(status)
