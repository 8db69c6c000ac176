"""The site file: a cluster's own names and sizes, every key with its meaning, limits and default."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

# What stands in slurm.conf cannot be quoted there: these patterns keep out whatever would end a value.
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=63)]
_GresType = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$", max_length=63)]
_Hosts = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._,\[\]-]*$", max_length=1000)]
_Path = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/+-]*$", max_length=200)]
_Devices = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/+,\[\]-]*$", max_length=500)]
_Time = Annotated[
    str, Field(pattern=r"^(UNLIMITED|INFINITE|\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2})$", max_length=20)
]
_Seconds = Annotated[int, Field(ge=0, le=65_535)]
_Tier = Annotated[int, Field(ge=0, le=65_533)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Partitions(Table):
    online: _Name = Field(default="online", description="partition of the online replicas")
    offline: _Name = Field(default="offline", description="partition of the offline batches")
    online_tier: _Tier = Field(default=100, description="PriorityTier of online, above that of offline")
    offline_tier: _Tier = Field(default=1, description="PriorityTier of offline")
    grace_s: _Seconds = Field(
        default=120, description="s: GraceTime, between the signal and the end of a preempted offline job"
    )
    offline_max_time: _Time = Field(default="1-00:00:00", description="MaxTime of offline, in Slurm's form")


class Fill(Table):
    gres: _GresType = Field(
        default="hsfill", description="GRES, not consumed, whose live count is a node's free open lanes"
    )
    places: _GresType = Field(
        default="hslane", description="GRES that each offline job takes one of; its count never changes"
    )
    parked_node: _Name = Field(
        default="hspark", description="node that is no machine and keeps jobs valid while no lane is open"
    )


class Nodes(Table):
    names: _Hosts = Field(description="the nodes as slurm.conf names them, such as gpu[01-08]")
    gpu_type: _GresType = Field(description="GRES type of their GPUs, such as a100 or 1g.10gb")
    gpus: Annotated[int, Field(ge=1, le=1024)] = Field(description="GPUs (or MIG instances) of each")
    fill: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description="most lanes of each; unset: one for each GPU"
    )
    device_files: _Devices | None = Field(
        default=None, description="gres.conf's File= of the GPUs; unset: gres.conf has their lines already"
    )
    autodetect: bool = Field(
        default=False,
        description="Slurm was built with NVML and finds the GPUs itself (AutoDetect=nvml), slices too",
    )
    options: Annotated[str, Field(pattern=r"^[A-Za-z0-9=:,.()\[\]_/ -]*$", max_length=1000)] | None = Field(
        default=None,
        description="further words of the NodeName line, such as CPUs=64; unset: slurm.conf has the line",
    )

    @property
    def lanes(self) -> int:
        """Configured count of both GRES of admission."""
        return self.gpus if self.fill is None else self.fill


class Jobs(Table):
    signal: Literal["USR1", "USR2"] = Field(default="USR2", description="signal before the GPU is taken")
    notice_s: Annotated[int, Field(ge=1, le=65_535)] = Field(
        default=60, description="s: notice in the line that users are told to add"
    )
    min_notice_s: Annotated[int, Field(ge=0, le=65_535)] = Field(
        default=10, description="s: shortest notice that is accepted"
    )
    default_minutes: Annotated[int, Field(ge=0, le=525_600)] = Field(
        default=0, description="min: time limit of an offline job that names none; 0: it is refused"
    )
    append_is_default: bool = Field(
        default=False, description="JobFileAppend=1 for the whole cluster, so that no job needs to say it"
    )


class Slurm(Table):
    version: Annotated[str, Field(pattern=r"^\d\d\.\d\d(\.\d+)?$")] = Field(
        default="22.05", description="release of slurmctld: it decides where some settings stand"
    )
    etc: _Path = Field(default="/etc/slurm", description="folder of slurm.conf, on every machine")
    slurmd_port: Annotated[int, Field(ge=1, le=65_535)] = Field(
        default=6818, description="SlurmdPort; records of a host's further modes listen on those above it"
    )
    kill_wait_s: Annotated[int, Field(ge=1, le=65_533)] = Field(
        default=30, description="s: KillWait, between SIGTERM and SIGKILL"
    )
    cred_expire_s: Annotated[int, Field(ge=5, le=3_600)] | None = Field(
        default=None, description="s: life of a munge credential; a requeued job waits this long (Slurm: 120)"
    )

    @property
    def release(self) -> tuple[int, int]:
        """(22, 5) for 22.05.8."""
        major, minor, *_ = self.version.split(".")
        return int(major), int(minor)


class Node(Table):
    run_dir: _Path = Field(default="/run/hybridsched", description="folder of prolog's and epilog's marks")
    log: _Path | None = Field(default=None, description="file they write to; unset: syslog")
    shm_dir: _Path = Field(default="/dev/shm", description="shared memory of the engines")  # noqa: S108
    shm_min_mib: Annotated[int, Field(ge=0, le=9_999_999)] = Field(
        default=0, description="MiB: an engine needs a shared memory of this size; 0: not looked at"
    )
    gpu_probe: Annotated[str, Field(pattern=r"^(nvidia-smi|/[A-Za-z0-9._/+-]+)$")] = Field(
        default="nvidia-smi", description="nvidia-smi, or the path of a probe: exit 0 usable, 1 broken"
    )
    probe_timeout_s: Annotated[int, Field(ge=1, le=60)] = Field(default=10, description="s: limit of a probe")
    on_timeout: Literal["pass", "fail"] = Field(
        default="pass", description="what a probe that does not end means: pass, or fail (drains the node)"
    )


class Check(Table):
    accept: tuple[str, ...] = Field(
        default=(), strict=False, description="codes of findings that the site knows of and accepts"
    )


class Site(Table):
    """A cluster as `hybridsched slurm` sees it."""

    partitions: Partitions = Field(default=Partitions(), description="partitions and their priorities")
    fill: Fill = Field(default=Fill(), description="the live admission count")
    nodes: tuple[Nodes, ...] = Field(default=(), strict=False, description="groups of like nodes")
    jobs: Jobs = Field(default=Jobs(), description="what an offline job must have")
    slurm: Slurm = Field(default=Slurm(), description="the installation")
    node: Node = Field(default=Node(), description="prolog and epilog on each node")
    check: Check = Field(default=Check(), description="the check of the live cluster")


class SiteError(Exception):
    """A site file cannot be used. `problems` holds every mistake as (key, message)."""

    def __init__(self, source: str, problems: tuple[tuple[str, str], ...]) -> None:
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        lines = "\n".join(f"  {key + ' ' if key else ''}{message}" for key, message in problems)
        super().__init__(f"site file {source} has {count}:\n{lines}")
        self.source = source
        self.problems = problems


def load_site(path: str | Path) -> Site:
    """Read a site file. Raises `SiteError` with every mistake."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SiteError(str(path), (("", f"cannot be read: {error}"),)) from error
    return parse_site(text, source=str(path))


def parse_site(text: str, *, source: str = "text") -> Site:
    """Check the TOML `text`; `source` names it in messages. Raises `SiteError` with every mistake."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SiteError(source, (("", f"is not valid TOML: {error}"),)) from error
    try:
        site = Site.model_validate(data)
    except ValidationError as error:
        raise SiteError(source, tuple(_problem(dict(e)) for e in error.errors(include_url=False))) from error
    if problems := tuple(_contradictions(site)):
        raise SiteError(source, problems)
    return site


def _problem(detail: dict[str, object]) -> tuple[str, str]:
    loc = detail["loc"]
    if not isinstance(loc, tuple):
        raise TypeError(f"pydantic's loc is a {type(loc).__name__}")
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    field = _find(loc)
    meaning = f" ({field})" if field else ""
    match detail["type"]:
        case "extra_forbidden":
            known = _keys(loc[:-1])
            near = difflib.get_close_matches(str(loc[-1]), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return key, f"is not a key of a site file{hint} (allowed here: {', '.join(known)})"
        case "missing":
            return key, f"is missing{meaning}"
        case _:
            limits = str(detail["msg"]).removeprefix("Input ").removeprefix("String ")
            return key, f"was given {detail['input']!r}; it {limits}{meaning}"


def _model(loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The table that the keys of `loc` lead to."""
    tables: dict[str, type[BaseModel]] = {
        "partitions": Partitions,
        "fill": Fill,
        "nodes": Nodes,
        "jobs": Jobs,
        "slurm": Slurm,
        "node": Node,
        "check": Check,
    }
    names = [part for part in loc if isinstance(part, str)]
    if not names:
        return Site
    return tables.get(names[0]) if len(names) == 1 else None


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    model = _model(loc)
    return sorted(model.model_fields) if model else []


def _find(loc: tuple[int | str, ...]) -> str:
    names = [part for part in loc if isinstance(part, str)]
    model = _model(tuple(names[:-1]))
    field = model.model_fields.get(names[-1]) if model and names else None
    return (field.description or "") if field else ""


def _contradictions(site: Site) -> list[tuple[str, str]]:
    found = []
    part = site.partitions
    if part.online_tier <= part.offline_tier:
        found.append(
            (
                "partitions.online_tier",
                f"was given {part.online_tier}; it must be above offline_tier ({part.offline_tier}), "
                "or online "
                f"takes no GPU back",
            )
        )
    if site.fill.gres == site.fill.places:
        found.append(("fill.places", f"was given {site.fill.places!r}, the name of fill.gres too"))
    if part.online == part.offline:
        found.append(
            ("partitions.offline", f"was given {part.offline!r}, the name of the online partition too")
        )
    if site.jobs.min_notice_s > site.jobs.notice_s:
        found.append(
            ("jobs.min_notice_s", f"was given {site.jobs.min_notice_s}; it must not be above notice_s")
        )
    seen: dict[str, int] = {}
    for number, group in enumerate(site.nodes):
        if group.names in seen:
            found.append(
                (f"nodes[{number}].names", f"was given {group.names!r}, as nodes[{seen[group.names]}] was")
            )
        seen[group.names] = number
        if group.names == site.fill.parked_node:
            found.append((f"nodes[{number}].names", "is the parked node's name, which is no machine"))
        if group.device_files and group.autodetect:
            found.append((f"nodes[{number}].autodetect", "was given with device_files: give one of them"))
        if group.device_files and "Gres=" in (group.options or ""):
            found.append((f"nodes[{number}].options", "must not hold Gres=, which is written from gpu_type"))
    return found
