"""`hybridsched demo`: the main job on this machine, with a report."""

from __future__ import annotations

from pathlib import Path

import click


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
    default=100.0,
    show_default=True,
    help="Seconds of the trace to replay.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0.1, max=20),
    default=2.0,
    show_default=True,
    help="How many times faster than the wall clock trace and engines run.",
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
    default=4,
    show_default=True,
    help="Simulated engines, one a GPU.",
)
@click.option(
    "--policy",
    default="idle-window",
    show_default=True,
    metavar="NAME|FILE",
    help="A preset (idle-window, unprotected, online-only) or a TOML file.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    default=Path("report"),
    show_default=True,
    metavar="DIR",
    help="Folder for summary.json, report.html, results and logs.",
)
@click.option("--baseline/--no-baseline", default=True, help="First replay the trace with online alone.")
@click.option("--finish", is_flag=True, help="Go on after the trace until the batch is complete.")
@click.option(
    "--redis",
    "redis_option",
    metavar="URL",
    help="Use this Redis or Valkey. Default: an embedded Valkey.",
)
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
@click.option("--json", "as_json", is_flag=True, help="Print summary.json instead of text.")
@click.pass_context
def demo(
    ctx: click.Context,
    trace: Path | None,
    start_s: float | None,
    duration_s: float,
    speed: float,
    batch: Path | None,
    gpus: int,
    policy: str,
    report: Path,
    baseline: bool,
    finish: bool,
    redis_option: str | None,
    slurm: bool,
    slurm_state: Path | None,
    as_json: bool,
) -> None:
    """Replay an online trace on simulated engines, run a batch in its gaps, and report both.

    First the trace alone, as the baseline; then the same trace with offline work in the gaps that
    are measured. Everything runs in processes of its own on this machine. Exit status 1 when a
    line of the batch is missing or was done twice.

    With --slurm the same runs as jobs of a private Slurm, which starts the offline jobs as gates open
    and takes a GPU back from one of them on the way.
    """
    if slurm_state is not None and not slurm:
        raise click.UsageError("--slurm-state goes with --slurm")
    import asyncio

    from hybridsched import log
    from hybridsched.batches.files import BatchFileError
    from hybridsched.demo.options import DemoOptions, DemoUsageError
    from hybridsched.demo.run import run_demo
    from hybridsched.demo.supervisor import ChildError
    from hybridsched.report.record import RecordError
    from hybridsched.report.text import text
    from hybridsched.store.connection import StoreError

    log.configure(level=ctx.meta.get("hybridsched.log_level", "info"))
    options = DemoOptions(
        trace=trace,
        start_s=start_s,
        duration_s=duration_s,
        speed=speed,
        batch=batch,
        gpus=gpus,
        policy=policy,
        report=report,
        baseline=baseline,
        finish=finish,
        redis_url=redis_option or None,
        slurm=slurm,
        slurm_state=slurm_state,
    )
    try:
        summary = asyncio.run(run_demo(options, live=not as_json))
    except DemoUsageError as error:
        raise click.UsageError(str(error)) from error
    except (StoreError, ChildError, BatchFileError, RecordError) as error:
        raise click.ClickException(str(error)) from error
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise click.ClickException("stopped; the logs so far are in the report folder") from None
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
