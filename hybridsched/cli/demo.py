"""`hybridsched demo`: the main job on this machine, with a report."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

T = TypeVar("T")

DEFAULT_REPORT = Path("report")


@click.command()
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="Online load: arrival_s,prompt_tokens,output_tokens (.gz too). Default: a code service of 2023.",
)
@click.option(
    "--start",
    "start_s",
    type=click.FloatRange(min=0),
    default=None,
    help="Second of the trace to begin at. Default: 0; 1140, a lively part, of the shipped trace.",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=1),
    default=None,
    help="Seconds of the trace to replay. Default: 100; 30 with --engine vllm.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0.1, max=20),
    default=None,
    help="How many times faster than the wall clock trace and engines run. Default: 2; with vllm 1.",
)
@click.option(
    "--batch",
    type=click.Path(path_type=Path),
    metavar="JSONL",
    help="Offline work, in the OpenAI batch format. Default: made from summarisation lengths.",
)
@click.option(
    "--gpus",
    type=click.IntRange(min=1, max=64),
    default=None,
    help="Engines, one a GPU. Default: 4; 2 with --engine vllm.",
)
@click.option(
    "--policy",
    default="idle-window",
    show_default=True,
    metavar="NAME|FILE",
    help="A preset (idle-window, consolidate, ...) or a TOML file.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for summary.json, report.html, results and logs. Default: report, or report-2 and so on "
    "where that holds results of a batch of yours.",
)
@click.option("--baseline/--no-baseline", default=True, help="First replay the trace with online alone.")
@click.option("--finish", is_flag=True, help="Go on after the trace until the batch is complete.")
@click.option(
    "--redis",
    "redis_option",
    metavar="URL",
    help="Use this Redis or Valkey. Default: an embedded Valkey.",
)
@click.option("--keep-keys", is_flag=True, help="With --redis: leave the keys of the run in it.")
@click.option(
    "--slurm",
    is_flag=True,
    help="On a private Slurm: engines are online jobs, the batch comes by sbatch. Needs Slurm's daemons.",
)
@click.option(
    "--slurm-state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="With --slurm: folder of its daemons, new or empty. Default: a temporary one.",
)
@click.option(
    "--engine",
    "engine",
    type=click.Choice(["simulated", "vllm"]),
    default="simulated",
    show_default=True,
    help="vllm: real engines, started with `vllm serve` and the ARGUMENTS after `--`.",
)
@click.option(
    "--model",
    "model_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="With --engine vllm: the model's folder.",
)
@click.option(
    "--vllm",
    "program",
    metavar="PROGRAM",
    help="With --engine vllm: its program. Default: vllm.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of text.")
@click.pass_context
def demo(
    ctx: click.Context,
    trace: Path | None,
    start_s: float | None,
    duration_s: float | None,
    speed: float | None,
    batch: Path | None,
    gpus: int | None,
    policy: str,
    report: Path | None,
    baseline: bool,
    finish: bool,
    redis_option: str | None,
    keep_keys: bool,
    slurm: bool,
    slurm_state: Path | None,
    engine: str,
    model_folder: Path | None,
    program: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Replay an online trace, run a batch in its gaps, and report both.

    First the trace alone, as the baseline; then the same trace with offline work in the gaps that
    are measured. Everything runs in processes of its own on this machine. Exit status 1 when a
    line of the batch is missing or was done twice.

    With --engine vllm the engines are real ones (docs/report.md); lines that a pause interrupted are then
    run again without one, and exit status 1 says also that one wrote something else.

    With --slurm the same runs as jobs of a private Slurm, which starts the offline jobs as gates open
    and takes a GPU back from one of them on the way.
    """
    real = engine == "vllm"
    _check_engine(real, slurm, speed, model_folder, program, arguments)
    if slurm_state is not None and not slurm:
        raise click.UsageError("--slurm-state goes with --slurm")
    if keep_keys and not redis_option:
        raise click.UsageError("--keep-keys goes with --redis: the embedded Valkey ends with the run")
    import asyncio
    from functools import partial

    from hybridsched import log
    from hybridsched.batches.errors import BatchFileError
    from hybridsched.demo.errors import DemoUsageError
    from hybridsched.demo.options import DemoOptions, RealEngines
    from hybridsched.demo.report_folder import free_folder
    from hybridsched.demo.run import run_demo
    from hybridsched.demo.supervisor import ChildError
    from hybridsched.report.record import RecordError
    from hybridsched.report.text import text
    from hybridsched.store.connection import StoreError

    log.configure(level=ctx.meta.get("hybridsched.log_level", "info"))
    if report is None:
        report = free_folder(DEFAULT_REPORT)
        if report != DEFAULT_REPORT:
            click.echo(f"{DEFAULT_REPORT} holds results of your own batch and is left alone.", err=True)
    options = DemoOptions(
        trace=trace,
        start_s=start_s,
        duration_s=duration_s or (30.0 if real else 100.0),
        speed=speed or (1.0 if real else 2.0),
        batch=batch,
        gpus=gpus or (2 if real else 4),
        policy=policy,
        report=report,
        baseline=baseline,
        finish=finish,
        redis_url=redis_option or None,
        keep_keys=keep_keys,
        slurm=slurm,
        slurm_state=slurm_state,
        real=RealEngines(program=program or "vllm", model=model_folder, arguments=arguments)
        if model_folder is not None
        else None,
    )
    try:
        summary = asyncio.run(
            _until_told(run_demo(options, live=not as_json, tell=partial(click.echo, err=True)))
        )
    except DemoUsageError as error:
        raise click.UsageError(str(error)) from error
    except (StoreError, ChildError, BatchFileError, RecordError) as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise click.ClickException(f"stopped; the logs so far are in {report}") from None
    if as_json:
        import json

        click.echo(json.dumps(summary, indent=2))
    else:
        click.echo(text(summary))
        click.echo(f"report    {report / 'report.html'} (figures), {report / 'summary.json'} (data)")
    offline = summary["offline"]
    if offline["missing"] or offline["duplicates"]:
        raise click.ClickException(
            f"{offline['missing']} lines are missing and {offline['duplicates']} were done twice; "
            f"see {report / 'logs'}"
        )
    interrupted = summary.get("interrupted")
    if interrupted and interrupted["identical"] < interrupted["compared"]:
        raise click.ClickException(
            f"{interrupted['compared'] - interrupted['identical']} interrupted lines wrote something else "
            f"than a run without a pause: {', '.join(interrupted['different'])}"
        )


def _check_engine(
    real: bool,
    slurm: bool,
    speed: float | None,
    model: Path | None,
    program: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Options that go together.

    Raises:
        click.UsageError: which do not.
    """
    if not real:
        for given, name in ((model, "--model"), (program, "--vllm")):
            if given is not None:
                raise click.UsageError(f"{name} goes with --engine vllm")
        if arguments:
            raise click.UsageError(f"unexpected argument {arguments[0]!r}; arguments go with --engine vllm")
        return
    if model is None:
        raise click.UsageError("--engine vllm needs --model DIR, a folder with config.json and weights")
    if slurm:
        raise click.UsageError("--slurm goes with simulated engines, not with --engine vllm")
    if speed not in (None, 1.0):
        raise click.UsageError(f"real engines run at --speed 1, and {speed:g} was given")


async def _until_told(work: Coroutine[Any, Any, T]) -> T:
    """`work`, which SIGTERM and SIGHUP cancel as Ctrl-C does: it takes its processes and folders with it."""
    import asyncio
    import signal

    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    return await task
