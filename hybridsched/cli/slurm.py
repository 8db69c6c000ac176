"""`hybridsched slurm`: the files that Slurm loads, put in place and checked on the live cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hybridsched.slurmfiles import Finding, Plan, Site

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group()
def slurm() -> None:
    """Render, install and check what Slurm needs."""


@slurm.command()
@click.argument("site_file", type=click.Path(dir_okay=False))
@click.option(
    "--out",
    default="slurm-files",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write to.",
)
@_json_option
def render(site_file: str, out: Path, as_json: bool) -> None:
    """Write the files of SITE_FILE to a folder: configuration, job_submit.lua, prolog, epilog."""
    from hybridsched.slurmfiles import render as render_site
    from hybridsched.slurmfiles.render import EXECUTABLE

    site = _site(site_file)
    try:
        files = render_site(site)
    except ValueError as error:
        raise click.UsageError(f"{site_file}: {error}") from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = out / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name in EXECUTABLE else 0o644)
    except OSError as error:
        raise click.ClickException(
            f"cannot write to {out}: {error}; give another folder with --out"
        ) from error
    if as_json:
        click.echo(json.dumps({"folder": str(out), "files": sorted(files)}))
        return
    for name in sorted(files):
        click.echo(out / name)


@slurm.command()
@click.argument("site_file", type=click.Path(dir_okay=False))
@click.option(
    "--etc",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of slurm.conf (default: slurm.etc of the site file).",
)
@click.option("--yes", is_flag=True, help="Write. Without it the diff is shown and nothing is written.")
@_json_option
def install(site_file: str, etc: Path | None, yes: bool, as_json: bool) -> None:
    """Put the files of SITE_FILE into Slurm's folder. Shows the diff; writes with --yes, old files kept."""
    from hybridsched.slurmfiles import InstallError, apply, plan
    from hybridsched.slurmfiles.install import next_steps

    site = _site(site_file)
    backups: list[Path] = []
    try:
        the_plan = plan(site, etc or Path(site.slurm.etc))
        if yes:
            backups = apply(the_plan)
    except ValueError as error:
        raise click.UsageError(f"{site_file}: {error}") from error
    except (InstallError, OSError) as error:
        raise click.ClickException(str(error)) from error
    steps = next_steps(the_plan)
    if as_json:
        click.echo(json.dumps(_plan_json(the_plan, yes, backups, steps)))
        return
    if not yes:
        click.echo(the_plan.diff(), nl=False)
    for sentence in the_plan.by_hand:
        click.echo(f"By hand: {sentence}.")
    count = len(the_plan.needed)
    if not count:
        click.echo("Everything is in place; nothing to write.")
        return
    if not yes:
        click.echo(f"{_files(count)} would be written. Nothing was; add --yes to write.")
        return
    click.echo(f"{_files(count)} written.")
    for backup in backups:
        click.echo(f"Kept: {backup}")
    for number, step in enumerate(steps, start=1):
        click.echo(f"Next {number}: {step}.")


@slurm.command()
@click.argument("site_file", required=False, type=click.Path(dir_okay=False))
@click.option(
    "--timeout",
    "timeout_s",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.1, 300),
    help="Seconds for each command of Slurm.",
)
@click.option("--all", "show_all", is_flag=True, help="Show what is as it should be too.")
@_json_option
@click.pass_context
def check(ctx: click.Context, site_file: str | None, timeout_s: float, show_all: bool, as_json: bool) -> None:
    """Check the live cluster against SITE_FILE (or the default names), one line a finding, with the remedy.

    Asks the cluster of SLURM_CONF and changes nothing. Exit status, as Nagios has it: 0 ok, 1 warning,
    2 critical, 3 unknown (Slurm could not be asked; also a site file or an option that cannot be used).
    """
    from hybridsched.slurmfiles import (
        Finding,
        Level,
        Site,
        SiteError,
        SlurmUnreachableError,
        examine,
        exit_status,
        gather,
        load_site,
    )

    try:
        site = load_site(site_file) if site_file else Site()
    except SiteError as error:
        # Not 2: a monitor would read it as critical.
        click.echo(f"SLURM UNKNOWN - {error}", err=as_json)
        ctx.exit(3)
    try:
        findings = examine(gather(offline=site.partitions.offline, timeout_s=timeout_s), site)
    except SlurmUnreachableError as error:
        remedy = "check SLURM_CONF and that slurmctld and munge run; `scontrol ping` says more"
        findings = [Finding(code="unreachable", level=Level.UNKNOWN, text=str(error), remedy=remedy)]
    status = exit_status(findings)
    if as_json:
        import msgspec

        click.echo(json.dumps({"status": status, "findings": msgspec.to_builtins(findings)}))
    else:
        _print(findings, status, show_all)
    ctx.exit(status)


def _print(findings: list[Finding], status: int, show_all: bool) -> None:
    counts = {
        level: sum(f.level == level for f in findings) for level in ("critical", "unknown", "warning", "ok")
    }
    said = ", ".join(f"{count} {level}" for level, count in counts.items() if count)
    click.echo(f"SLURM {('OK', 'WARNING', 'CRITICAL', 'UNKNOWN')[status]} - {said}")
    for finding in findings:
        if finding.level == "ok" and not show_all:
            continue
        remedy = f". Remedy: {finding.remedy}" if finding.remedy else ""
        click.echo(f"{finding.level.upper()} {finding.code}: {finding.text}{remedy}")


def _site(path: str) -> Site:
    from hybridsched.slurmfiles import SiteError, load_site

    try:
        return load_site(path)
    except SiteError as error:
        raise click.UsageError(str(error)) from error


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _plan_json(the_plan: Plan, written: bool, backups: list[Path], steps: list[str]) -> dict[str, Any]:
    return {
        "written": written,
        "changes": [
            {"path": str(c.path), "new": c.before is None, "diff": c.diff()} for c in the_plan.needed
        ],
        "by_hand": list(the_plan.by_hand),
        "backups": [str(path) for path in backups],
        "next": steps if written else [],
    }
