"""`hybridsched engine`: plan how to start an engine, start it, show what was learnt of those that ran."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import log_to_stderr, pool_options, with_redis

if TYPE_CHECKING:
    from hybridsched.core.engine_values import EnginePlan, NoFit
    from hybridsched.core.model_shape import ModelShape
    from hybridsched.engines.devices import Choice


@click.group()
def engine() -> None:
    """Plan, start and know engines: flags and memory from the model itself."""


def _plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option(
            "--model",
            "folder",
            required=True,
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Folder with the model's config.json and *.safetensors.",
        ),
        click.option(
            "--gpu",
            default="auto",
            show_default=True,
            metavar="DEVICE",
            help="a100-80gb, a slice such as 3g.40gb@a100-80gb, cpu, or auto: what nvidia-smi lists here.",
        ),
        click.option(
            "--gpus",
            type=click.IntRange(min=1, max=8),
            help="GPUs that one engine may use. Default: 1; with auto all that are visible.",
        ),
        click.option(
            "--device",
            "wanted",
            envvar="CUDA_VISIBLE_DEVICES",
            metavar="N|UUID",
            help="With auto: which of the devices here, by numbers or UUIDs. Default: CUDA_VISIBLE_DEVICES.",
        ),
        click.option(
            "--nvidia-smi",
            default="nvidia-smi",
            show_default=True,
            envvar="HYBRIDSCHED_NVIDIA_SMI",
            metavar="PROGRAM",
            help="With auto: the program to ask.",
        ),
        click.option(
            "--trace",
            type=click.Path(path_type=Path),
            metavar="CSV",
            help="Requests to plan for: arrival_s, prompt_tokens, output_tokens; plain or .gz.",
        ),
        click.option("--max-model-len", type=click.IntRange(min=1), help="Tokens of the longest request."),
        click.option("--max-num-seqs", type=click.IntRange(min=1), help="Requests at once."),
        click.option(
            "--gpu-memory-utilization",
            "share",
            type=click.FloatRange(min=0, max=1, min_open=True),
            help="Share of the memory that the engine may take.",
        ),
        click.option(
            "--dtype",
            default="auto",
            show_default=True,
            type=click.Choice(["auto", "bfloat16", "float16", "float32"]),
            help="Type of weights and activations.",
        ),
        click.option(
            "--kv-cache-dtype",
            "kv_dtype",
            default="auto",
            show_default=True,
            type=click.Choice(["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]),
            help="Type of the KV cache.",
        ),
        click.option(
            "--kv-gib",
            type=click.IntRange(min=1),
            help="With --gpu cpu: GiB of KV cache. Default there: 4.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@engine.command()
@_plan_options
@click.option("--json", "as_json", is_flag=True, help="Print the plan, or why there is none, as JSON.")
@click.pass_context
def plan(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Work out how vLLM should be started for a model, line by line.

    Reads config.json and the headers of the weights, needs neither GPU nor torch. Exit status 1 when
    it cannot fit; then it says what would.
    """
    from hybridsched.cli import engine_view

    shape, found, _ = _planned(**options)
    if as_json:
        click.echo(engine_view.as_json(shape, found))
    else:
        click.echo(engine_view.as_text(shape, found))
    if engine_view.refused(found):
        ctx.exit(1)


@engine.command()
@_plan_options
@pool_options
@click.option("--served-model-name", "name", help="Name that it serves. Default: the folder's.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="The engine's port; 0 takes a free one.",
)
@click.option(
    "--program",
    default="vllm",
    show_default=True,
    envvar="HYBRIDSCHED_VLLM",
    help="The vllm command; `simulated` is the simulated engine, with the KV cache of the plan.",
)
@click.option(
    "--drain",
    "drain_s",
    default=30,
    show_default=True,
    type=click.IntRange(min=0),
    help="Seconds that requests in flight get at its end (--shutdown-timeout).",
)
@click.option(
    "--start-timeout",
    "start_s",
    default=1800.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Seconds until it must be healthy.",
)
@click.option(
    "--measure/--no-measure",
    default=None,
    help="Measure its throughput after the start. Default: when its profile has none yet.",
)
@click.option("--dry-run", is_flag=True, help="Print the command and its environment, start nothing.")
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    ctx: click.Context,
    /,
    redis_option: str | None,
    pool: str,
    name: str | None,
    port: int,
    program: str,
    drain_s: int,
    start_s: float,
    measure: bool | None,
    dry_run: bool,
    extra: tuple[str, ...],
    **options: Any,
) -> None:
    """Start vLLM as `engine plan` says, on the loopback, and stay with it.

    EXTRA, after `--`, are further flags of vLLM; they take the place of the plan's. With Redis given
    what was learnt is kept as the model's profile. Exit status: 0 told to stop, 1 the plan does not fit, 2
    wrong usage, 78 it did not start, else the engine's own.
    """
    from hybridsched.cli import engine_view
    from hybridsched.core.engine_values import EnginePlan
    from hybridsched.engines.vllm_command import CommandError, engine_command, shm_problem

    shape, found, choice = _planned(**options)
    if not isinstance(found, EnginePlan):
        raise click.ClickException(engine_view.refusal(found))
    served = name or options["folder"].resolve().name
    _check_name(served)
    if program != "simulated" and (problem := shm_problem(found)) is not None:
        raise click.ClickException(problem)
    if port == 0:
        from hybridsched.workers.replica_job import free_port

        port = free_port()
    try:
        command = engine_command(
            found,
            model=options["folder"],
            served_name=served,
            port=port,
            program=program,
            choice=choice,
            drain_s=drain_s,
            extra=extra,
        )
    except CommandError as error:
        raise click.UsageError(str(error)) from None
    if dry_run:
        click.echo(engine_view.command_text(command))
        return
    log_to_stderr()
    click.echo(engine_view.as_text(shape, found), err=True)
    for note in engine_view.launch_notes(command, choice):
        click.echo(note, err=True)
    ctx.exit(_run(found, command, served, port, program, redis_option, pool, measure, start_s, drain_s))


def _run(
    found: EnginePlan,
    command: Any,
    served: str,
    port: int,
    program: str,
    redis_option: str | None,
    pool: str,
    measure: bool | None,
    start_s: float,
    drain_s: int,
) -> int:
    import asyncio

    from hybridsched.cli.access import store_problem
    from hybridsched.store.connection import StoreError, resolve_url
    from hybridsched.workers.engine_launch import LaunchJob, run_launch

    try:
        url = resolve_url(redis_option)
    except StoreError as error:
        raise store_problem(error) from error
    job = LaunchJob(
        plan=found,
        command=command,
        model=served,
        port=port,
        program=program,
        redis_url=url,
        pool=pool,
        measure=measure,
        start_s=start_s,
        drain_s=float(drain_s),
    )
    return asyncio.run(run_launch(job))


@engine.command()
@pool_options
@click.option("--model", help="Only of this model.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of profiles as JSON.")
def profile(redis_option: str | None, pool: str, model: str | None, as_json: bool) -> None:
    """Show what is known of engines that were launched: load time, KV cache, throughput."""
    from hybridsched.cli import engine_view
    from hybridsched.store.engine_profiles import EngineProfile, EngineProfiles

    async def read(client: Any) -> tuple[EngineProfile, ...]:
        return await EngineProfiles(client, pool).list()

    found = [
        one
        for one in with_redis(redis_option, "reading the engine profiles", read)
        if model is None or one.model == model
    ]
    if as_json:
        click.echo(engine_view.profiles_json(found))
    elif found:
        click.echo(engine_view.profiles_text(found))
    else:
        which = "" if model is None else f" of {model}"
        click.echo(
            f"pool {pool} has no engine profile{which}; `hybridsched engine launch` makes one", err=True
        )


def _planned(
    *,
    folder: Path,
    gpu: str,
    gpus: int | None,
    wanted: str | None,
    nvidia_smi: str,
    trace: Path | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
    share: float | None,
    dtype: str,
    kv_dtype: str,
    kv_gib: int | None,
) -> tuple[ModelShape, EnginePlan | NoFit, Choice | None]:
    """The model and its plan. Every fault of the input is one sentence and exit status 2."""
    from hybridsched.core.engine_plan import Wish, WishError, plan_engine
    from hybridsched.core.gpus import GIB, UnknownDevice, find_device
    from hybridsched.engines.devices import DeviceError, choose, list_devices
    from hybridsched.engines.model_files import ModelFileError, read_model
    from hybridsched.traces import TraceError, read_trace

    if kv_gib is not None and gpu != "cpu":
        raise click.UsageError("--kv-gib goes with --gpu cpu; on a GPU the KV cache takes what is left")
    source = click.get_current_context().get_parameter_source("wanted")
    if gpu != "auto" and source is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError(
            f"--device {wanted} goes with --gpu auto, which asks what that device is; with --gpu {gpu} the "
            "engine takes the devices of CUDA_VISIBLE_DEVICES. Leave one of the two out"
        )
    try:
        choice = None
        if gpu == "auto":
            choice = choose(list_devices(nvidia_smi), wanted, from_slurm=_slurm_chose())
        device = None if gpu == "cpu" else choice.device if choice is not None else find_device(gpu)
        rows = [] if trace is None else read_trace(trace)
        shape = read_model(folder, dtype=dtype)
        wish = Wish(
            device=device,
            gpus=gpus or (choice.count if choice is not None else 1),
            kv_dtype=kv_dtype,
            kv_space_bytes=(kv_gib or 4) * GIB if device is None else None,
            lengths=tuple(sorted(row.prompt_tokens + row.output_tokens for row in rows)),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            share=share,
        )
        if choice is not None and wish.gpus > choice.count:
            raise click.UsageError(f"--gpus {wish.gpus}: {choice.count} can be seen here (--device)")
        return shape, plan_engine(shape, wish), choice
    except (DeviceError, UnknownDevice, TraceError, ModelFileError, WishError) as error:
        raise click.UsageError(str(error)) from None


def _slurm_chose() -> bool:
    """Whether the devices come from CUDA_VISIBLE_DEVICES inside a Slurm job, not from the operator."""
    source = click.get_current_context().get_parameter_source("wanted")
    return "SLURM_JOB_ID" in os.environ and source is click.core.ParameterSource.ENVIRONMENT


def _check_name(name: str) -> None:
    from hybridsched.store.keys import check_name

    try:
        check_name("model", name)
    except ValueError as error:
        raise click.UsageError(f"{error}: give it with --served-model-name") from None
