"""`hybridsched slurm`: the files that Slurm loads, put in place and checked on the live cluster."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hybridsched.core.modes import ModesPolicy
    from hybridsched.slurmfiles import Finding, Plan, Site

_policy_option = click.option(
    "--policy",
    "policy_file",
    metavar="FILE",
    help="A policy with [modes]: the node records of every mode, in the place of their hosts'.",
)
_devices_option = click.option(
    "--devices",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder with what `hybridsched mode gres` printed on the hosts, a folder for each mode: the "
    "lines of their slices, where Slurm does not find them itself.",
)
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
@_policy_option
@_devices_option
@_json_option
def render(site_file: str, out: Path, policy_file: str | None, devices: Path | None, as_json: bool) -> None:
    """Write the files of SITE_FILE to a folder: configuration, job_submit.lua, prolog, epilog, and the batch
    scripts of workers/ with the site's own names.

    With --policy the configuration has the node records of all modes. Where a host has one record for all
    (modes.way = "reconfigure"), there are two files more for each mode: what `slurm configure` writes.
    """
    from hybridsched.slurmfiles import records_of
    from hybridsched.slurmfiles import render as render_site
    from hybridsched.slurmfiles.render import EXECUTABLE, batch_scripts

    site, modes = _site(site_file), _modes(policy_file)
    try:
        scripts = {f"workers/{name}": text for name, text in batch_scripts(site).items()}
        records = None if modes is None else records_of(site, modes, _devices(devices))
        files = render_site(site, records) | scripts
    except ValueError as error:
        raise click.UsageError(f"{site_file}: {error}") from error
    except OSError as error:
        raise click.ClickException(str(error)) from error
    try:
        (out / "workers").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = out / name
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name in EXECUTABLE or name in scripts else 0o644)
    except OSError as error:
        raise click.ClickException(
            f"cannot write to {out}: {error}; give another folder with --out"
        ) from error
    if as_json:
        click.echo(json.dumps({"folder": str(out), "files": sorted(files)}))
        return
    for name in sorted(files):
        click.echo(out / name)
    if records is not None:
        _say_unlisted(records.unlisted)


@slurm.command()
@click.argument("site_file", type=click.Path(dir_okay=False))
@click.option(
    "--etc",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of slurm.conf (default: slurm.etc of the site file).",
)
@click.option("--yes", is_flag=True, help="Write. Without it the diff is shown and nothing is written.")
@_policy_option
@_devices_option
@_json_option
def install(
    site_file: str,
    etc: Path | None,
    yes: bool,
    policy_file: str | None,
    devices: Path | None,
    as_json: bool,
) -> None:
    """Put the files of SITE_FILE into Slurm's folder. Shows the diff; writes with --yes, old files kept."""
    from hybridsched.slurmfiles import InstallError, apply, plan
    from hybridsched.slurmfiles.install import next_steps

    site, modes = _site(site_file), _modes(policy_file)
    backups: list[Path] = []
    try:
        the_plan = plan(site, etc or Path(site.slurm.etc), modes, _devices(devices))
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
@click.argument("node")
@click.argument("mode")
@click.option(
    "--etc",
    default="/etc/slurm",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of slurm.conf.",
)
@_json_option
def configure(node: str, mode: str, etc: Path, as_json: bool) -> None:
    """Write NODE's GRES in MODE into slurm.conf and gres.conf, for hosts that have one record for all modes.

    For the hand of the policy worker; `slurm install --policy` has put there what it writes. Restarts
    nothing, and nothing is written where the files say so already. Exit status: 0 they say so, 1 it failed,
    2 it cannot be done with these files.
    """
    from hybridsched.slurmfiles import InstallError
    from hybridsched.slurmfiles.configure import ConfigureRefusedError
    from hybridsched.slurmfiles.configure import configure as write

    try:
        changed = [str(path) for path in write(etc, node, mode)]
    except ConfigureRefusedError as error:
        raise click.UsageError(str(error)) from error
    except InstallError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"node": node, "mode": mode, "changed": changed}))
        return
    click.echo("\n".join(f"written: {path}" for path in changed) or f"{node} stands in mode {mode} already.")


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
@_policy_option
@_json_option
@click.pass_context
def check(
    ctx: click.Context,
    site_file: str | None,
    timeout_s: float,
    show_all: bool,
    policy_file: str | None,
    as_json: bool,
) -> None:
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
        mode_records,
    )
    from hybridsched.slurmfiles.configure import refusals

    try:
        site = load_site(site_file) if site_file else Site()
        modes = _modes(policy_file, needs=site_file)
        wanted = None if modes is None else mode_records(site, modes)
    except (SiteError, click.UsageError, ValueError) as error:
        # Not 2: a monitor would read it as critical.
        click.echo(f"SLURM UNKNOWN - {getattr(error, 'message', error)}", err=as_json)
        ctx.exit(3)
    try:
        facts = gather(offline=site.partitions.offline, timeout_s=timeout_s)
        conf = Path(facts.setting("SLURM_CONF"))
        if wanted is not None and modes is not None and modes.way == "reconfigure" and conf.is_file():
            facts = replace(facts, mode_refusals=refusals(conf.parent, wanted))
        findings = examine(facts, site, wanted, way="records" if modes is None else modes.way)
    except SlurmUnreachableError as error:
        remedy = "check SLURM_CONF and that slurmctld and munge run; `scontrol ping` says more"
        findings = [Finding(code="unreachable", level=Level.UNKNOWN, text=str(error), remedy=remedy)]
    except Exception as error:  # noqa: BLE001 - outer edge: a traceback's status 1 would read as a warning
        text = f"what Slurm said could not be judged ({type(error).__name__}: {error})"
        remedy = "see what `scontrol show config` and `scontrol -d show node` print, and report it"
        findings = [Finding(code="unreadable", level=Level.UNKNOWN, text=text, remedy=remedy)]
    status = exit_status(findings)
    if as_json:
        import msgspec

        click.echo(json.dumps({"status": status, "findings": msgspec.to_builtins(findings)}))
    else:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a monitor's locale may lack what a reason holds
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


def _modes(policy_file: str | None, *, needs: str | None = "") -> ModesPolicy | None:
    """The modes of a policy file; None: none was given. `needs`: the site file, which may be absent."""
    from hybridsched.policyfile import PolicyError, load_policy

    if policy_file is None:
        return None
    if needs is None:
        raise click.UsageError("--policy needs a SITE_FILE, which says what the policy's hosts are")
    try:
        modes = load_policy(policy_file).policy.modes
    except PolicyError as error:
        raise click.UsageError(str(error)) from error
    if modes is None:
        raise click.UsageError(
            f"policy {policy_file} has no [modes]; leave --policy out, or see docs/modes.md"
        )
    return modes


def _devices(folder: Path | None) -> dict[tuple[str, str], list[str]]:
    """Mode and record -> lines of gres.conf, of the files FOLDER/MODE/*.conf."""
    from hybridsched.slurmfiles.modes import parse_devices

    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(folder.glob("*/*.conf")) if folder is not None else ():
        try:
            parse_devices(path.parent.name, path.read_text(encoding="utf-8"), found)
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--devices: {path} cannot be read: {error}") from error
    return found


def _say_unlisted(unlisted: tuple[str, ...]) -> None:
    if unlisted:
        click.echo(
            f"gres.conf lacks the GPUs of {len(unlisted)} records, for it does not know their device files. "
            f"One of them is: {unlisted[0]}.",
            err=True,
        )


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
