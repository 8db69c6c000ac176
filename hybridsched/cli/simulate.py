"""`hybridsched simulate`: the twin, for one policy or several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hybridsched.twin.absence import Absence
    from hybridsched.twin.jobs import SlurmDelays
    from hybridsched.twin.trace import Waves


class Above0(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A finite number above 0."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(str(value))
        except ValueError:
            number = math.nan
        if not 0.0 < number < math.inf:
            self.fail(f"{value!r} is not allowed; give a number above 0", param, ctx)
        return number


_LOAD_OPTIONS = (
    click.option(
        "--trace",
        type=click.Path(path_type=Path),
        metavar="CSV",
        help="Online load: arrival_s, prompt_tokens, output_tokens; plain or .gz. Default: the shipped one.",
    ),
    click.option(
        "--waves",
        metavar="HIGH,LOW,S[,PROMPT,OUTPUT]",
        help="In the place of --trace: HIGH requests/s for S seconds, then LOW, in turn. Tokens: 512,128.",
    ),
    click.option(
        "--start",
        "start_s",
        type=click.FloatRange(min=0),
        default=None,
        help="Second of the trace to begin at. Default: 0; 1140, a lively part, of the shipped trace.",
    ),
    click.option(
        "--duration",
        "duration_s",
        type=Above0(),
        default=300.0,
        show_default=True,
        help="Seconds of the trace to replay.",
    ),
    click.option(
        "--load",
        type=Above0(),
        default=1.0,
        show_default=True,
        help="Requests, times those of the trace: some are left out at random, or copied close by.",
    ),
    click.option(
        "--batch",
        type=click.Path(path_type=Path),
        metavar="JSONL|CSV",
        help="Offline work: an OpenAI batch, or lengths (columns as a trace). Default: summaries' lengths.",
    ),
    click.option(
        "--lines",
        type=click.IntRange(min=1),
        help="Lines of offline work, lengths in turn. Default: a JSONL file's own, else enough to last.",
    ),
    click.option(
        "--gpus",
        type=click.IntRange(min=1, max=1024),
        default=4,
        show_default=True,
        help="Engines, one a GPU.",
    ),
    click.option(
        "--away",
        multiple=True,
        metavar="R@FROM-TO",
        help="A replica is away between two seconds (cold start: r0@0-47); it ends first what it holds.",
    ),
    click.option(
        "--slurm",
        is_flag=True,
        help="Lanes are Slurm jobs: they come after the gate opens, and go when it is closed for long.",
    ),
    click.option(
        "--profile",
        default="a100-llama3-8b",
        show_default=True,
        metavar="NAME|FILE",
        help="Iteration times of the engines.",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all that is random."
    ),
    click.option(
        "--repeat",
        type=click.IntRange(min=1, max=100),
        default=1,
        show_default=True,
        help="Runs, each with the arrivals moved by milliseconds: least, middle and greatest of each figure.",
    ),
)


def load_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what is simulated: load, batch, engines. For every command of the twin."""
    for option in reversed(_LOAD_OPTIONS):
        command = option(command)
    return command


@click.command()
@load_options
@click.option(
    "--policy",
    default="idle-window",
    show_default=True,
    metavar="NAME|FILE",
    help="A preset (idle-window, consolidate, ...), a TOML file, or a baseline (docs/simulate.md).",
)
@click.option(
    "--compare", metavar="P,P,...", help="Several policies, in one table; in the place of --policy."
)
@click.option(
    "--models",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TOML",
    help="Several models, each with engines, load, batch and policy of its own; see docs/simulate.md.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for summary.json, report.html, requests.csv; with --compare one each, and a page of all.",
)
@click.option("--decisions", is_flag=True, help="With --report: also decisions.jsonl, each change of a gate.")
@click.option("--baseline/--no-baseline", default=True, help="Also replay the trace with online alone.")
@click.option("--json", "as_json", is_flag=True, help="Print summary.json (with --compare a list of rows).")
def simulate(
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
    policy: str,
    compare: str | None,
    models: Path | None,
    profile: str,
    seed: int,
    report: Path | None,
    decisions: bool,
    baseline: bool,
    repeat: int,
    as_json: bool,
) -> None:
    """Replay an online trace and a batch in the twin: the scheduler's own code on a virtual clock.

    Needs no engine, no Redis and no time: minutes of a pool pass in seconds. The same command gives
    the same figures each time. Exit status 1 when a line of the batch is missing or was done twice.
    """
    from hybridsched.report.text import text
    from hybridsched.simulate import compare as comparison
    from hybridsched.simulate.models import read_models, total, total_text
    from hybridsched.simulate.options import SimulateOptions, SimulateUsageError, make_plan
    from hybridsched.simulate.run import simulate as run
    from hybridsched.simulate.run import simulate_models

    names = [policy] if compare is None else [name.strip() for name in compare.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--compare names no policy; give them as P,P,...")
    asked = click.get_current_context().get_parameter_source("policy")
    if compare is not None and asked is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--compare stands in the place of --policy: give either")
    if models is not None and compare is not None:
        raise click.UsageError("--models has a policy for each model, --compare several for one: give either")
    if decisions and report is None:
        raise click.UsageError("--decisions goes with --report, whose folder it is written to")
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
        policies=tuple(names),
        profile=profile,
        seed=seed,
        baseline=baseline,
        repeat=repeat,
    )
    try:
        if models is not None:
            parts = read_models(models, options)
            names = [part.name for part in parts]
            say(note for part in parts for note in part.plan.notes)
            summaries = simulate_models(parts, report, decisions=decisions, progress=_progress())
        else:
            plan = make_plan(options)
            say(plan.notes)
            summaries = run(plan, report, decisions=decisions, progress=_progress())
    except SimulateUsageError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(
            f"the report cannot be written ({error}); choose another --report"
        ) from error
    if as_json:
        import json

        out: object = comparison.rows(summaries) if compare is not None else summaries[0]
        if models is not None:
            of_each = [dict(model=name, **one) for name, one in zip(names, summaries, strict=True)]
            out = {"models": of_each, "total": total(summaries)}
        click.echo(json.dumps(out, indent=2))
    elif models is not None:
        click.echo(comparison.table(summaries, names=names, of="model"))
        click.echo(total_text(total(summaries)))
    elif compare is not None:
        click.echo(comparison.table(summaries))
    else:
        click.echo(text(summaries[0]))
    if report is not None and not as_json:
        click.echo(f"report    {report}")
    wrong = [one for one in summaries if one["offline"]["missing"] or one["offline"]["duplicates"]]
    if wrong:
        raise click.ClickException(
            f"{wrong[0]['offline']['missing']} lines are missing and {wrong[0]['offline']['duplicates']} "
            "were done twice: the twin has a defect, please report it"
        )


def say(notes: Iterable[str]) -> None:
    """What the user should know of the inputs, each once."""
    for note in dict.fromkeys(notes):
        click.echo(f"note: {note}", err=True)


def absences_of(given: tuple[str, ...]) -> tuple[Absence, ...]:
    """What --away asks for."""
    if not given:
        return ()
    from hybridsched.twin.absence import parse_absence

    try:
        return tuple(parse_absence(one) for one in given)
    except ValueError as error:
        raise click.UsageError(f"--away: {error}") from None


def slurm_of(asked: bool) -> SlurmDelays | None:
    """What --slurm asks for."""
    if not asked:
        return None
    from hybridsched.twin.jobs import SlurmDelays

    return SlurmDelays()


def waves_of(given: str | None, trace: Path | None, start_s: float | None) -> Waves | None:
    """The made load that --waves asks for."""
    if given is None:
        return None
    from hybridsched.twin.trace import parse_waves

    if trace is not None or start_s is not None:
        raise click.UsageError("--waves makes a load of its own: give it without --trace and --start")
    try:
        return parse_waves(given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _progress() -> Callable[[str, float], None]:
    """A line that is written over at a terminal; nothing in a pipe."""
    import sys

    if not sys.stderr.isatty():
        return lambda what, share: None

    def show(what: str, share: float) -> None:
        click.echo(f"\r\x1b[K{what}: {share:.0%}" if share < 1 else "\r\x1b[K", nl=False, err=True)

    return show
