"""Several models at once: each with replicas, load, batch and policy of its own, from one TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.core.values import Value
from hybridsched.simulate.options import SimulateOptions, SimulatePlan, SimulateUsageError, make_plan
from hybridsched.twin.absence import parse_absence
from hybridsched.twin.trace import parse_waves


class ModelTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table [[model]]. What is not set is as in the options of the command."""

    name: str
    gpus: int | None = None
    trace: str | None = None
    start: float | None = None
    load: float | None = None
    waves: str | None = None
    batch: str | None = None
    lines: int | None = None
    policy: str | None = None
    profile: str | None = None
    away: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: tuple[ModelTable, ...]


class ModelPlan(Value, frozen=True, kw_only=True):
    """One of the models, ready to run."""

    name: str
    plan: SimulatePlan


def read_models(path: Path, common: SimulateOptions) -> tuple[ModelPlan, ...]:
    """The models of a file. Paths in it are relative to its folder; a policy is a preset's name or a path.

    Raises:
        SimulateUsageError: the file, or what it names, cannot be used.
    """
    try:
        tables = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File).model
    except (OSError, UnicodeDecodeError) as error:
        raise SimulateUsageError(f"models {path} cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        known = ", ".join(ModelTable.__struct_fields__)
        raise SimulateUsageError(
            f"models {path}: {error}; tables [[model]] are allowed, with {known}"
        ) from None
    if not tables:
        raise SimulateUsageError(f"models {path} names no model; give a table [[model]] for each")
    plans: list[ModelPlan] = []
    for table in tables:
        if not table.name or table.name != Path(table.name).name or table.name.startswith("."):
            raise SimulateUsageError(f"models {path}: {table.name!r} cannot be a folder's name")
        if table.name in {one.name for one in plans}:
            raise SimulateUsageError(f"models {path}: two of them are called {table.name!r}")
        try:
            plans.append(ModelPlan(name=table.name, plan=make_plan(_options(table, path.parent, common))))
        except (SimulateUsageError, ValueError) as error:
            raise SimulateUsageError(f"models {path}, model {table.name}: {error}") from None
    return tuple(plans)


def _options(table: ModelTable, folder: Path, common: SimulateOptions) -> SimulateOptions:
    changed: dict[str, Any] = {
        "gpus": table.gpus,
        "trace": None if table.trace is None else folder / table.trace,
        "start_s": table.start,
        "load": table.load,
        "batch": None if table.batch is None else folder / table.batch,
        "lines": table.lines,
        "profile": _file_or_name(table.profile, folder),
        "waves": None if table.waves is None else parse_waves(table.waves),
    }
    if table.waves is not None and (table.trace is not None or table.start is not None):
        raise ValueError("waves are a load of their own: give them without trace and start")
    if table.gpus is not None and table.gpus < 1:
        raise ValueError(f"gpus is {table.gpus}; 1 or more are allowed")
    if table.policy is not None:
        changed["policies"] = (_file_or_name(table.policy, folder),)
    if table.away:
        changed["absences"] = tuple(parse_absence(one) for one in table.away)
    return msgspec.structs.replace(
        common, **{name: value for name, value in changed.items() if value is not None}
    )


def _file_or_name(given: str | None, folder: Path) -> str | None:
    """A file of the folder if there is one of that name, else the name itself."""
    return str(folder / given) if given is not None and (folder / given).is_file() else given


def total(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole pool: sums over its models, and the shares of the sums."""
    harvested = sum(one["harvest"]["harvested_s"] for one in summaries)
    idle = sum(one["harvest"]["idle_s"] for one in summaries)
    done = sum(one["ceiling"]["tokens_done"] for one in summaries)
    most = sum(one["ceiling"]["tokens"] for one in summaries)
    requests = sum(one["online"]["requests"] for one in summaries)
    kept = sum((one["online"]["slo_attainment"] or 0.0) * one["online"]["requests"] for one in summaries)
    return {
        "models": len(summaries),
        "engines": sum(one["run"]["gpus"] for one in summaries),
        "requests": requests,
        "harvested_s": round(harvested, 3),
        "idle_s": round(idle, 3),
        "harvested_ratio": round(harvested / idle, 6) if idle > 0 else None,
        "offline_tokens_done": done,
        "ceiling_tokens": most,
        "ceiling_share": round(done / most, 6) if most > 0 else None,
        "slo_attainment": round(kept / requests, 6) if requests else None,
        "pauses": sum(one["pauses"]["count"] for one in summaries),
        "lines_completed": sum(one["offline"]["completed"] for one in summaries),
        "tokens_recomputed": sum(one["offline"]["tokens_recomputed"] for one in summaries),
    }


def total_text(summed: dict[str, Any]) -> str:
    """The same in a sentence."""

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.1%}"

    return (
        f"all {summed['models']} models, {summed['engines']} engines: {share(summed['harvested_ratio'])} of "
        f"the idle engine seconds harvested, {share(summed['ceiling_share'])} of the ceiling, "
        f"{share(summed['slo_attainment'])} of {summed['requests']:,} requests in their objectives"
    )
