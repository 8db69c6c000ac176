"""`hybridsched mode assert|apply|export|gres`: this machine's GPUs, mig-parted's layouts, Slurm's files."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridsched.cli.access import pool_options

if TYPE_CHECKING:
    from hybridsched.core.mig import Gpu, Layout, Want
    from hybridsched.mig import MigDriver, Outcome, StepReport

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
_driver_option = click.option(
    "--driver",
    type=click.Choice(["nvml", "mig-parted"]),
    default="nvml",
    show_default=True,
    help="What cuts: NVML, or the nvidia-mig-parted command. Reading is always NVML's.",
)
_file_option = click.option(
    "-f",
    "--config-file",
    "config_file",
    metavar="FILE|-",
    envvar="MIG_PARTED_CONFIG_FILE",
    help="Layout file in mig-parted's format (version: v1), YAML or JSON; -: standard input.",
)
_label_option = click.option(
    "-c",
    "--selected-config",
    "label",
    metavar="LABEL",
    envvar="MIG_PARTED_SELECTED_CONFIG",
    help="Which layout of the file. Needed only where it has several.",
)
_layout_option = click.option(
    "--layout", metavar="NAME|FILE", help="A layout of the file given with -f, or such a file itself."
)
_node_option = click.option(
    "--node",
    metavar="HOST",
    help="Without a file: this machine's name in the policy. Default: its host name.",
)


@click.command("assert")
@_layout_option
@_file_option
@_label_option
@_node_option
@pool_options
@_json_option
@click.pass_context
def assert_(
    ctx: click.Context,
    redis_option: str | None,
    pool: str,
    node: str | None,
    layout: str | None,
    config_file: str | None,
    label: str | None,
    as_json: bool,
) -> None:
    """Say whether this machine's GPUs are cut so.

    One line for each GPU that is not as the layout has it. Without a file the layout is that of the pool's
    policy, for the mode in which this machine stands.
    Changes nothing. GPUs in MIG mode are listed to root only. GPUs that the layout does not name are not
    looked at. Exit status: 0 it stands, 1 it does not, or GPUs or policy could not be read, 2 wrong usage or
    a layout that cannot be.
    """
    from hybridsched.core.mig import difference

    chosen, name = _wanted(layout, config_file, label, redis_option, pool, node)
    gpus = _read(_driver("nvml"))
    wanted = _wants(chosen, name, gpus)
    lines = {gpu.index: difference(gpu, wanted[gpu.index]) for gpu in gpus if gpu.index in wanted}
    differs = {index: line for index, line in lines.items() if line is not None}
    if as_json:
        found = [{"gpu": index, "text": line} for index, line in differs.items()]
        click.echo(
            json.dumps({"layout": name, "stands": not differs, "gpus": sorted(wanted), "differs": found})
        )
    else:
        for line in differs.values():
            click.echo(line)
    if differs:
        click.echo(f"Layout {name} does not stand: {_gpus(len(differs))} of {len(wanted)} differ.", err=True)
        ctx.exit(1)


@click.command()
@_layout_option
@_file_option
@_label_option
@_node_option
@pool_options
@_driver_option
@click.option("--dry-run", is_flag=True, help="Print the steps and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask, on a terminal.")
@_json_option
@click.pass_context
def apply(
    ctx: click.Context,
    redis_option: str | None,
    pool: str,
    node: str | None,
    layout: str | None,
    config_file: str | None,
    label: str | None,
    driver: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Cut this machine's GPUs as a layout has it.

    By the least change: what can stay, stays. Needs root. Without a file the layout is that of the pool's
    policy, for the mode in which this machine stands.
    Nothing is begun while something runs on an instance that must go. It stops at the first failure and says
    what was made, what was not, what stands now, and the steps that would lead back; it takes none of them by
    itself. Exit status: 0 it stands, 1 it does not, 2 wrong usage or a layout that cannot be.
    """
    from hybridsched.core.mig import plan

    chosen, name = _wanted(layout, config_file, label, redis_option, pool, node)
    cutter = _driver(driver)
    gpus = _read(cutter)
    made = plan(gpus, _wants(chosen, name, gpus))
    if dry_run:
        if as_json:
            steps = [str(step) for step in made.steps]
            click.echo(json.dumps({"layout": name, "steps": steps, "blockers": list(made.blockers)}))
            return
        for step in made.steps:
            click.echo(step)
        for blocker in made.blockers:
            click.echo(f"waits: {blocker}")
        if not made.steps:
            click.echo(f"Layout {name} stands; there is nothing to do.", err=True)
        return
    if made.steps and sys.stdin.isatty() and not yes:
        for step in made.steps:
            click.echo(step, err=True)
        click.confirm(f"Change the GPUs in {len(made.steps)} steps?", abort=True, err=True)
    outcome = cutter.apply(made, _silent if as_json else _say)
    if as_json:
        click.echo(json.dumps(_outcome_json(name, outcome)))
    if not outcome.ok:
        click.echo(f"Error: layout {name} was not made ({outcome.code}): {outcome.why}", err=True)
        if not as_json:
            for line in outcome.lines():
                if not line.startswith(("failed:", "done before:")):
                    click.echo(line, err=True)
        ctx.exit(1)


@click.command()
@click.option("--label", default="current", show_default=True, help="Label of the layout that is written.")
@_json_option
def export(label: str, as_json: bool) -> None:
    """Print how this machine's GPUs are cut.

    As a layout file of mig-parted's format. GPUs in MIG mode are listed to root only."""
    from hybridsched.core.mig import export as export_layout
    from hybridsched.mig.files import dump

    document, notes = export_layout(_read(_driver("nvml")), label)
    for note in notes:
        click.echo(f"Note: {note}.", err=True)
    click.echo(json.dumps(document) if as_json else dump(document), nl=as_json)


@click.command()
@click.option("--node", metavar="NAME", required=True, help="NodeName of this machine in slurm.conf.")
@click.option("--gpu-type", metavar="TYPE", required=True, help="GRES type of its whole GPUs, such as a100.")
@click.option(
    "--autodetect", is_flag=True, help="AutoDetect=nvml, for a Slurm built with it, instead of files."
)
@click.option(
    "--minors",
    metavar="FILE",
    default="/proc/driver/nvidia-caps/mig-minors",
    show_default=True,
    help="The driver's table of capability files.",
)
@_json_option
def gres(node: str, gpu_type: str, autodetect: bool, minors: str, as_json: bool) -> None:
    """Print this machine's lines of gres.conf.

    What gres.conf and slurm.conf must say of its GPUs as they are cut now: the lines of gres.conf as they
    are; the GPUs' part of the node's Gres= behind a #.
    """
    from hybridsched.core.mig import Piece, Want
    from hybridsched.slurmfiles.mig import devices, gres_conf, gres_conf_autodetect, gres_field, parse_minors

    for option, name in (("--node", node), ("--gpu-type", gpu_type)):
        if not _NAME.fullmatch(name):
            raise click.UsageError(f"{option} was given {name!r}; letters, digits, ., _ and - are allowed")
    gpus = _read(_driver("nvml"))
    now = [
        Want(enabled=gpu.enabled, pieces=tuple(Piece(profile=i.profile) for i in gpu.instances))
        for gpu in gpus
    ]
    try:
        if autodetect:
            text = gres_conf_autodetect(node, now, gpu_type)
        else:
            cut = any(gpu.instances for gpu in gpus)
            table = parse_minors(Path(minors).read_text(encoding="utf-8")) if cut else {}
            text = gres_conf(node, gpus, gpu_type, table)
    except OSError as error:
        raise click.ClickException(
            f"the driver's table of capability files, {minors}, cannot be read ({error.strerror}): load the "
            "driver's module nvidia-caps (`nvidia-modprobe`), or name the table with --minors FILE"
        ) from error
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    field = gres_field(now, gpu_type)
    if as_json:
        found = [
            {"number": number, "type": device.kind, "uuid": device.uuid}
            for number, device in enumerate(devices(gpus, gpu_type))
        ]
        click.echo(json.dumps({"node": node, "gres": field, "gres_conf": text, "devices": found}))
        return
    click.echo(text, nl=False)
    click.echo(f"# In slurm.conf:  NodeName={node} Gres={field}")


def _wanted(
    layout: str | None,
    config_file: str | None,
    label: str | None,
    redis_option: str | None,
    pool: str,
    node: str | None,
) -> tuple[Layout, str]:
    """The layout that is meant, and its label: of a file, or where none is named, of the pool's policy."""
    from hybridsched.store.connection import resolve_url

    given = [o for o in (layout, config_file, label) if o is not None]
    if given and node is not None:
        raise click.UsageError(
            "--node is for the pool's policy, and a layout of a file was asked for as well"
        )
    if given or (node is None and resolve_url(redis_option) is None):
        return _layout(layout, config_file, label)
    from hybridsched.cli.mode_here import here

    found = here(redis_option, pool, node)
    if not found.label:
        click.echo(
            f"Mode {found.mode} of host {found.host} has no layout: its GPUs stay as they are.", err=True
        )
    return found.layout, found.label or found.mode


def _layout(layout: str | None, config_file: str | None, label: str | None) -> tuple[Layout, str]:
    """The layout that the options mean, and its label. Raises `UsageError`."""
    from hybridsched.core.mig import LayoutFileError
    from hybridsched.mig.files import read_layouts

    if layout is not None and label is not None and config_file is not None:
        raise click.UsageError("--layout and --selected-config both name a layout: give one of them")
    if layout is not None and config_file is None:
        if not Path(layout).exists():
            raise click.UsageError(
                f"--layout was given {layout!r}, which is no file; for a layout of a file add -f FILE"
            )
        config_file = layout
    elif layout is not None:
        label = layout
    if config_file is None:
        raise click.UsageError(
            "which layout: give -f FILE and, where it has several, --selected-config LABEL; or --redis URL, "
            "for what the pool's policy wants of this machine"
        )
    try:
        layouts, selected = read_layouts(config_file, sys.stdin)
    except LayoutFileError as error:
        raise click.UsageError(str(error)) from error
    label = label or selected or (next(iter(layouts)) if len(layouts) == 1 else None)
    if label is None:
        raise click.UsageError(
            f"{config_file} has several layouts: give --selected-config ({', '.join(layouts)})"
        )
    if label not in layouts:
        raise click.UsageError(f"{config_file} has no layout {label!r}; it has {', '.join(layouts)}")
    return layouts[label], label


def _wants(layout: Layout, name: str, gpus: tuple[Gpu, ...]) -> dict[int, Want]:
    """GPU -> what the layout wants of it. Raises `UsageError` for a layout that these GPUs cannot have."""
    from hybridsched.core.mig import MigRefusalError, plan, wants

    try:
        wanted = wants(layout, gpus)
        plan(gpus, wanted)
    except MigRefusalError as error:
        raise click.UsageError(f"layout {name}: {error}") from error
    return wanted


def _driver(name: str) -> MigDriver:
    from hybridsched.mig.nvml import NvmlMig
    from hybridsched.mig.parted import PartedMig

    return NvmlMig() if name == "nvml" else PartedMig(NvmlMig())


def _read(driver: MigDriver) -> tuple[Gpu, ...]:
    from hybridsched.mig import MigError

    try:
        return driver.read()
    except MigError as error:
        raise click.ClickException(f"the GPUs could not be read ({error.code}): {error}") from error


def _silent(report: StepReport) -> None:
    """The one JSON document at the end says it all."""


def _say(report: StepReport) -> None:
    """Each step as it is done; what failed is said with the outcome."""
    if not report.code:
        click.echo(f"done: {report.step}")


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _outcome_json(name: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "layout": name,
        "stands": outcome.ok,
        "code": outcome.code,
        "why": outcome.why,
        "done": [str(step) for step in outcome.done],
        "failed": None if outcome.failed is None else str(outcome.failed),
        "not_done": [str(step) for step in outcome.not_done],
        "known": outcome.after is not None or outcome.ok,
        "differs": list(outcome.differs),
        "way_back": None if outcome.back is None else [str(step) for step in outcome.back.steps],
    }
