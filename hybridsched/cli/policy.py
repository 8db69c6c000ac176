"""`hybridsched policy`: policies before they go live. `hybridsched pool policy` is about the live one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridsched.cli.simulate import Above0, absences_of, load_options, say, slurm_of, waves_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridsched.core.policy import SloPolicy
    from hybridsched.simulate.tune import Trial


@click.group()
def policy() -> None:
    """Make a policy file."""


@policy.command()
@load_options
@click.option(
    "--policy",
    "source",
    default="idle-window",
    show_default=True,
    metavar="NAME|FILE",
    help="Where the search begins: a preset, or a TOML file.",
)
@click.option("--slo", metavar="TTFT,TPOT", help="Objectives in ms. Default: the policy's own.")
@click.option(
    "--max-ttft", type=Above0(), default=1.05, show_default=True, help="p99 TTFT allowed, x online alone."
)
@click.option(
    "--max-tpot", type=Above0(), default=1.02, show_default=True, help="p99 TPOT allowed, x online alone."
)
@click.option(
    "--attainment",
    type=click.FloatRange(0.0, 1.0),
    default=0.99,
    show_default=True,
    help="Share of requests within the objectives, if online alone reaches it.",
)
@click.option(
    "--knob",
    "given_knobs",
    multiple=True,
    metavar="KEY=LOW:HIGH[:log]",
    help="A key of the policy to search over, and its range; may be repeated. Default: those of its kind.",
)
@click.option(
    "--trials", type=click.IntRange(1, 10_000), default=40, show_default=True, help="Policies to try."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("tuned.toml"),
    show_default=True,
    help="The policy file. The picture is put beside it, with .html.",
)
@click.option("--force", is_flag=True, help="Write over files that are there.")
@click.option("--json", "as_json", is_flag=True, help="Print every trial as JSON.")
def tune(
    trace: Path | None,
    waves: str | None,
    start_s: float | None,
    duration_s: float,
    load: float,
    batch: Path | None,
    lines: int | None,
    gpus: int,
    away: tuple[str, ...],
    slurm: bool,
    profile: str,
    seed: int,
    repeat: int,
    source: str,
    slo: str | None,
    max_ttft: float,
    max_tpot: float,
    attainment: float,
    given_knobs: tuple[str, ...],
    trials: int,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Search a policy's thresholds in the twin: most offline work within what online may pay.

    Writes the best policy found as a file, and a picture of all that were tried: offline work
    against what online pays. The same command gives the same files. Exit status 1, and no policy
    file, when none that was tried keeps the bounds. Needs the extra: pip install 'hybridsched[tune]'.
    """
    import msgspec

    from hybridsched.policyfile import check_policy
    from hybridsched.simulate import tune_page
    from hybridsched.simulate.knobs import DEFAULT_KNOBS, KnobError, parse_knob
    from hybridsched.simulate.options import SimulateOptions, SimulateUsageError, make_plan
    from hybridsched.simulate.tune import Bounds, TuneError, tuned_policy
    from hybridsched.simulate.tune import tune as search

    picture = out.with_suffix(".html")
    if picture == out:
        raise click.UsageError(f"the picture would be put over the policy file {out}; let it end in .toml")
    if not os.access(out.parent, os.W_OK):
        raise click.UsageError(f"no file can be written into the folder {out.parent}; choose another --out")
    for path in (out, picture):
        if path.exists() and not force:
            raise click.UsageError(f"{path} is there; choose another --out, or write over it with --force")
    options = SimulateOptions(
        trace=trace,
        waves=waves_of(waves, trace, start_s),
        start_s=start_s,
        duration_s=duration_s,
        load=load,
        batch=batch,
        lines=lines,
        gpus=gpus,
        absences=absences_of(away),
        slurm=slurm_of(slurm),
        policies=(source,),
        profile=profile,
        seed=seed,
        repeat=repeat,
    )
    try:
        plan = make_plan(options)
        base = plan.policies[0]
        if slo is not None:
            base = msgspec.structs.replace(base, slo=_slo(slo))
            plan = msgspec.structs.replace(plan, policies=(base,))
        knobs = tuple(parse_knob(one) for one in given_knobs) or DEFAULT_KNOBS.get(base.kind, ())
    except (SimulateUsageError, KnobError) as error:
        raise click.UsageError(str(error)) from error
    if plan.baselines:
        raise click.UsageError(
            f"{source} is a baseline of the twin and no policy of a pool; begin at a preset or a TOML file"
        )
    if problems := check_policy(base):
        raise click.UsageError(f"--slo: {problems[0].key} {problems[0].message}")
    keys = [knob.key for knob in knobs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise click.UsageError(f"two knobs turn {twice}; give each key one range")
    if not knobs:
        raise click.UsageError(
            f"nothing is known to search over in a policy of kind {base.kind.value}; name keys with --knob"
        )
    say(plan.notes)
    bounds = Bounds(ttft_ratio=max_ttft, tpot_ratio=max_tpot, attainment=attainment)
    try:
        tuned = search(plan, knobs, bounds, trials=trials, told=_progress(trials))
        picture.write_text(tune_page.render(tuned, plan), encoding="utf-8")
        if as_json:
            import json

            click.echo(json.dumps(tune_page.as_json(tuned), indent=2))
        else:
            click.echo(tune_page.text(tuned))
            click.echo(f"\npicture   {picture}")
        found = tuned_policy(tuned, _name_of(base.name))
        out.write_text(tune_page.policy_text(tuned, found, plan), encoding="utf-8")
    except TuneError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"cannot be written ({error}); choose another --out") from error
    if not as_json:
        click.echo(f"policy    {out}")


def _name_of(name: str) -> str:
    """The name of a policy that was made of another one; 64 characters are allowed."""
    return name if name.endswith("-tuned") else f"{name[:58]}-tuned"


def _slo(given: str) -> SloPolicy:
    from hybridsched.core.policy import SloPolicy

    try:
        ttft_ms, tpot_ms = map(float, given.split(","))
    except ValueError:
        ttft_ms = tpot_ms = math.nan
    if not (0 < ttft_ms < math.inf and 0 < tpot_ms < math.inf):
        raise click.UsageError(f"--slo {given!r}: give two numbers of ms above 0, such as 1000,50")
    return SloPolicy(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def _progress(trials: int) -> Callable[[int, Trial], None]:
    """A line that is written over at a terminal; nothing in a pipe."""
    import sys

    if not sys.stderr.isatty():
        return lambda done, best: None

    def show(done: int, best: Trial) -> None:
        said = f"{done} of {trials}: best {best.ceiling_share:.1%} of the ceiling at ×{best.cost:.3f}"
        click.echo("\r\x1b[K" + (said if done < trials else ""), nl=False, err=True)

    return show
