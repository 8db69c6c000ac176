"""The section [modes] of a policy file: every key with its unit, limits and default."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hybridsched.core.autonomy import Autonomy
from hybridsched.core.modes import DAYS

_Ms = Annotated[float, Field(gt=0, le=604_800_000)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]
_Time = Annotated[str, Field(pattern=r"^([01]?[0-9]|2[0-3]):[0-5][0-9]$")]
_Day = Literal["daily", "weekday", "weekend", "mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_Node = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*\{host\}[A-Za-z0-9_.-]*$", max_length=80)]


_Indices = Annotated[tuple[Annotated[int, Field(ge=0, le=1023)], ...], Field(strict=False)]
_Devices = _Indices | Literal["all"] | None


class Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, frozen=True, populate_by_name=True
    )


class LayoutTable(Table):
    devices: _Devices = Field(default="all", description='indices of the GPUs that it is for, or "all"')
    device_filter: Annotated[tuple[Annotated[int, Field(ge=0, le=0xFFFFFFFF)], ...], Field(strict=False)] = (
        Field(default=(), alias="device-filter", description="only GPUs with these PCI ids: [0x20B510DE]")
    )
    mig_enabled: bool = Field(alias="mig-enabled", description="whether MIG mode is on for these GPUs")
    mig_devices: dict[str, Annotated[int, Field(ge=0, le=7)]] = Field(
        default_factory=dict, alias="mig-devices", description="profile -> instances on each of these GPUs"
    )


class WindowTable(Table):
    days: Annotated[tuple[_Day, ...], Field(strict=False, min_length=1)] = Field(
        default=("daily",), description=f"days on which it starts: daily, weekday, weekend, {', '.join(DAYS)}"
    )
    start: _Time = Field(default="00:00", description="time of day at which it starts")
    end: _Time = Field(
        default="00:00", description="time of day at which it ends; at or before start: on the next day"
    )


class EngineTable(Table):
    model: str = Field(pattern=r"^[!-z|~]{1,120}$", description="model that it serves, as requests name it")
    name: str = Field(
        default="",
        pattern=r"^[!-z|~]{0,80}$",
        description="tells several engines of one model apart",
    )
    per_host: int = Field(default=1, ge=0, le=1024, description="replicas on each host in the mode")
    gres: str = Field(
        default="gpu:1",
        pattern=r"^[A-Za-z][A-Za-z0-9_]*(:[A-Za-z0-9_.+-]+){0,2}$",
        description="GRES of each replica's job, as --gres takes it: gpu:TYPE:COUNT",
    )
    floor: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="replicas of the model that serve at every moment",
    )
    time_limit_s: int = Field(
        default=86_400, ge=60, le=31_536_000, description="s: time limit of each job, rounded up to minutes"
    )
    script: str = Field(
        default="workers/online.sbatch", min_length=1, description="batch script that starts one replica"
    )
    arguments: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="arguments of the script: options of the engine"
    )
    warm_ms: _Ms = Field(
        default=120_000.0, description="ms: from submission until a replica serves, before it was measured"
    )
    memory_gib: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        default=None,
        description="GiB: need of a replica on each GPU or slice (weights, KV, context, buffers); unset: not "
        "compared",
    )


class ModeTable(Table):
    name: _Name = Field(description="name of the mode: letters, digits, dash and underscore, at most 32")
    layout: str = Field(default="", description="label of modes.mig-configs; empty: GPUs stay as they are")
    windows: Annotated[tuple[WindowTable, ...], Field(strict=False)] = Field(
        default=(), description="when it holds, a table [[modes.mode.windows]] each"
    )
    node: _Node = Field(default="{host}", description="name of a host's node record in the mode")
    lanes: bool = Field(default=True, description="whether offline work may run on its engines")
    early: bool = Field(default=False, description="whether its engines serve when its window begins")
    engines: Annotated[tuple[EngineTable, ...], Field(strict=False)] = Field(
        default=(), description="what stands on each host, a table [[modes.mode.engines]] each"
    )


class HostsTable(Table):
    names: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._,\[\]-]*$",
        max_length=1000,
        description="the hosts as Slurm writes node lists: gpu[01-04],big1",
    )
    gpu: str = Field(
        default="", max_length=32, description="model of their GPUs, as `mode` knows it; empty: never cut"
    )
    gpus: int = Field(default=1, ge=1, le=1024, description="GPUs of each host")


class ModesTable(Table):
    enabled: bool = Field(default=False, description="whether the policy worker changes modes")
    time_zone: str = Field(default="UTC", description="zone of the windows, such as Europe/Berlin")
    default: str = Field(default="", description="mode outside every window; empty: what stands stays")
    autonomy: Autonomy = Field(
        default=Autonomy.APPROVE,
        strict=False,
        description="suggest, approve or auto: whether the calendar switches by itself",
    )
    max_unavailable: int = Field(
        default=1, ge=1, le=10_000, description="hosts that are out of service for a change at once"
    )
    way: Literal["records", "reconfigure"] = Field(
        default="records",
        description="records: a node record for each mode; reconfigure: one record, written anew",
    )
    drain_ms: _Ms = Field(default=600_000.0, description="ms: then what still runs on a host is requeued")
    requeue_ms: _Ms = Field(default=120_000.0, description="ms: after that the host's change is given up")
    act_ms: _Ms = Field(default=120_000.0, description="ms: a step that fails is tried again for this long")
    retry_ms: _Ms = Field(
        default=600_000.0, description="ms: a host that went back is left alone; twice as long each time"
    )
    attempts: int = Field(default=3, ge=1, le=100, description="tries of a host before it waits for a person")
    margin: Annotated[float, Field(ge=1, le=10)] = Field(
        default=1.2, description="an early switch begins this many times its expected span before the window"
    )
    reservation: bool = Field(
        default=False, description="whether a reservation keeps jobs out of a switch that is near"
    )
    reserve_ahead_ms: _Ms = Field(
        default=14_400_000.0, description="ms: how long before the switch the reservation is made"
    )
    mig_configs: dict[_Name, Annotated[tuple[LayoutTable, ...], Field(strict=False, min_length=1)]] = Field(
        default_factory=dict,
        alias="mig-configs",
        description="label -> layout, in the form of mig-parted's file (version v1)",
    )
    hosts: Annotated[tuple[HostsTable, ...], Field(strict=False)] = Field(
        default=(), description="the hosts that change modes, a table [[modes.hosts]] each"
    )
    mode: Annotated[tuple[ModeTable, ...], Field(strict=False)] = Field(
        default=(),
        description="the modes, a table [[modes.mode]] each; where windows overlap the first holds",
    )


_LISTS: dict[str, type[Table]] = {
    "modes": ModesTable,
    "modes.hosts": HostsTable,
    "modes.mode": ModeTable,
    "modes.mode.windows": WindowTable,
    "modes.mode.engines": EngineTable,
}


def mode_keys() -> dict[str, str]:
    """Every key of the section, dotted without the numbers of tables, with its meaning and unit."""
    found = {
        f"{table}.{field.alias or name}": field.description or ""
        for table, kind in _LISTS.items()
        for name, field in kind.model_fields.items()
    }
    for name, field in LayoutTable.model_fields.items():
        found[f"modes.mig-configs.{field.alias or name}"] = field.description or ""
    return found


def to_builtins(table: ModesTable) -> dict[str, Any]:
    """The section as `core.modes.ModesPolicy` takes it."""
    values: dict[str, Any] = table.model_dump(mode="json")
    for layout in values["mig_configs"].values():
        for entry in layout:
            entry["devices"] = None if entry["devices"] == "all" else entry["devices"]
    return values


def dump(values: Mapping[str, Any]) -> Iterator[str]:
    """The section as lines of TOML, from the values of a `ModesPolicy`."""
    yield from _table("modes", "[modes]", values, skip=("mig_configs", "hosts", "mode"))
    if values["mig_configs"]:
        yield from ("", "# label -> layout, in the form of mig-parted's file", "[modes.mig-configs]")
    for label, layout in values["mig_configs"].items():
        entries = ", ".join(_layout(entry) for entry in layout)
        yield f"{json.dumps(label)} = [{entries}]"
    for hosts in values["hosts"]:
        yield from ("", *_table("modes.hosts", "[[modes.hosts]]", hosts))
    for mode in values["mode"]:
        yield from ("", *_table("modes.mode", "[[modes.mode]]", mode, skip=("windows", "engines")))
        for key in ("windows", "engines"):
            for inner in mode[key]:
                yield from ("", *_table(f"modes.mode.{key}", f"[[modes.mode.{key}]]", inner))


def _table(name: str, header: str, values: Mapping[str, Any], skip: tuple[str, ...] = ()) -> Iterator[str]:
    meanings = mode_keys()
    yield header
    for key, value in values.items():
        if key not in skip:
            yield f"# {meanings[f'{name}.{key}']}"
            yield f"# {key} =" if value is None else f"{key} = {json.dumps(value)}"


def _layout(entry: Mapping[str, Any]) -> str:
    devices = "all" if entry["devices"] is None else list(entry["devices"])
    profiles = ", ".join(f"{json.dumps(name)} = {count}" for name, count in entry["mig_devices"].items())
    only = f"device-filter = {json.dumps(list(entry['device_filter']))}, " if entry["device_filter"] else ""
    return (
        f"{{devices = {json.dumps(devices)}, {only}mig-enabled = {json.dumps(entry['mig_enabled'])}, "
        f"mig-devices = {{{profiles}}}}}"
    )
