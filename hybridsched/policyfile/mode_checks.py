"""Values of the section [modes] that are each allowed and cannot go together, or do not fit the GPUs."""

from __future__ import annotations

import math
import re
import zoneinfo
from collections.abc import Iterator

from hybridsched.core.calendar import floor_between
from hybridsched.core.mig import (
    MODELS,
    LayoutEntry,
    gres_type,
    layout_flaws,
    model_of,
    profile_memory_bytes,
)
from hybridsched.core.mode_plan import wanted_replicas
from hybridsched.core.modes import HostGroup, Mode, ModeEngine, ModesPolicy, expand, node_name
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.replicas import shortest_limit_s

CALENDAR = "calendar"
"""In `mode switch --to` it withdraws orders, so no mode may be called so."""

Found = tuple[str, str]
"""A key, and what is wrong with it."""

_PARALLEL = re.compile(r"(?:--(?:tensor|pipeline)-parallel-size|-tp|-pp)(?:=(\d+))?\Z")
_SLICE = re.compile(r"\d+g\.\d+gb")


def mode_mistakes(policy: PoolPolicy) -> list[Found]:
    """Every mistake of the modes; none where the policy has no modes."""
    modes = policy.modes
    if modes is None:
        return []
    found = [*_frame(policy, modes), *_hosts(modes)]
    if any(key.startswith("modes.hosts") for key, _ in found):
        return found
    for i, mode in enumerate(modes.mode):
        found += [(f"modes.mode[{i}].{key}", text) for key, text in _mode(modes, mode)]
        found += [
            (f"modes.mode[{i}].engines[{j}].{key}", text) for j, key, text in _engines(policy, modes, mode)
        ]
    return [*found, *_floors(modes)]


def _frame(policy: PoolPolicy, modes: ModesPolicy) -> Iterator[Found]:
    try:
        zoneinfo.ZoneInfo(modes.time_zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        yield (
            "modes.time_zone",
            f"was given {modes.time_zone!r}, which is no time zone of this machine; give one such as "
            "Europe/Berlin, or UTC (Debian and others have them in the package tzdata)",
        )
    names = [mode.name for mode in modes.mode]
    if modes.default and modes.default not in names:
        yield "modes.default", f"was given {modes.default!r}, which is no mode; there are {_listed(names)}"
    for i, name in enumerate(names):
        if name == CALENDAR:
            yield f"modes.mode[{i}].name", f"was given {name!r}, the word by which orders are withdrawn"
        if name in names[:i]:
            yield f"modes.mode[{i}].name", f"was given {name!r}, as modes.mode[{names.index(name)}] is called"
    if not modes.enabled:
        return
    if not policy.slurm.enabled:
        yield (
            "modes.enabled",
            "was given True; Slurm changes the modes, so slurm.enabled must be true",
        )
    if not modes.mode:
        yield "modes.mode", "is empty; give at least one table [[modes.mode]]"
    if not modes.hosts:
        yield "modes.hosts", "is empty; give at least one table [[modes.hosts]]"


def _hosts(modes: ModesPolicy) -> Iterator[Found]:
    seen: dict[str, int] = {}
    for i, group in enumerate(modes.hosts):
        try:
            hosts = expand(group.names)
        except ValueError as error:
            yield f"modes.hosts[{i}].names", f"was given {group.names!r}: {error}"
            continue
        for host in hosts:
            if host in seen:
                yield f"modes.hosts[{i}].names", f"names {host}, which modes.hosts[{seen[host]}] has already"
            seen[host] = i


def _mode(modes: ModesPolicy, mode: Mode) -> Iterator[Found]:
    layout = modes.mig_configs.get(mode.layout)
    if mode.layout and layout is None:
        labels = _listed(list(modes.mig_configs))
        yield (
            "layout",
            f"was given {mode.layout!r}, which is no label of modes.mig-configs; there are {labels}",
        )
    for group in modes.hosts if layout is not None else ():
        flaws = layout_mistakes(group, layout or ())
        yield from (("layout", f"{mode.layout!r} does not fit {group.names}: {flaw}") for flaw in flaws)
    if mode.early and not mode.windows:
        yield "early", "was given True, but the mode has no window that it could be early for"
    for other in modes.mode:
        if other is mode:
            break
        same = other.node == mode.node
        if modes.way == "records" and same and other.layout != mode.layout:
            yield (
                "node",
                f"was given {mode.node!r}, as mode {other.name} with another layout has it; with modes.way "
                '"records" each layout has a node record of its own, such as "{host}-' + mode.name + '"',
            )
        if modes.way == "reconfigure" and not same:
            yield (
                "node",
                f"was given {mode.node!r}, and mode {other.name} has {other.node!r}; with modes.way "
                '"reconfigure" a host has one record, the same in every mode',
            )
    names: dict[str, str] = {}
    for host in modes.all_hosts():
        for one in modes.mode:
            record = node_name(one, host)
            if names.setdefault(record, host) != host:
                yield "node", f"gives {host} the record {record}, which {names[record]} has"
                return


def layout_mistakes(group: HostGroup, layout: tuple[LayoutEntry, ...]) -> list[str]:
    """Why a layout cannot stand on these hosts; empty: it can."""
    if not any(entry.mig_enabled or entry.mig_devices for entry in layout):
        return [f"it names GPU {i}, and there are {group.gpus}" for i in _beyond(group, layout)]
    if not group.gpu:
        return ["it cuts GPUs whose model is not given; set gpu in this table [[modes.hosts]]"]
    model = _model(group)
    if model is None:
        return [f"the model {group.gpu!r} is not known, or has no MIG; known are {', '.join(sorted(MODELS))}"]
    return layout_flaws(model, layout, group.gpus)


def _model(group: HostGroup) -> str | None:
    """Their GPU's key in `MODELS`: given as it is, or as NVML names the product."""
    return group.gpu if group.gpu in MODELS else model_of(group.gpu)


def _beyond(group: HostGroup, layout: tuple[LayoutEntry, ...]) -> list[int]:
    return [i for entry in layout for i in entry.devices or () if i >= group.gpus]


def _engines(policy: PoolPolicy, modes: ModesPolicy, mode: Mode) -> Iterator[tuple[int, str, str]]:
    groups = [mode.group(engine) for engine in mode.engines]
    taken = {replicas.group for replicas in policy.slurm.replicas}
    for j, engine in enumerate(mode.engines):
        if groups[j] in groups[:j]:
            yield (
                j,
                "name",
                f"is that of engines[{groups.index(groups[j])}] as well; give each a name of its own",
            )
        if groups[j] in taken:
            yield j, "name", f"makes the group {groups[j]!r}, which a table [[slurm.replicas]] has"
        for group in modes.hosts:
            yield from ((j, key, text) for key, text in _room(modes, mode, engine, group))
    for j, wanted in enumerate(wanted_replicas(_only(modes, mode), {mode.name: len(modes.all_hosts())})):
        least = shortest_limit_s(wanted, policy.slurm)
        if wanted.time_limit_s < least:
            yield (
                j,
                "time_limit_s",
                f"was given {wanted.time_limit_s}; with warm_ms {wanted.warm_ms:g} and {wanted.count} "
                f"replicas it must be at least {least}, or a replica would be replaced soon after it serves",
            )


def _only(modes: ModesPolicy, mode: Mode) -> ModesPolicy:
    return ModesPolicy(hosts=modes.hosts, mode=(mode,))


def _room(modes: ModesPolicy, mode: Mode, engine: ModeEngine, group: HostGroup) -> Iterator[Found]:
    """Whether an engine's replicas find what they ask for on a host."""
    kind, number = _gres(engine.gres)
    parallel = _parallel(engine.arguments)
    layout = modes.mig_configs.get(mode.layout, ())
    slices = _slices(layout, group)
    if kind not in slices and not _SLICE.match(kind):
        whole = group.gpus - _cut(layout, group)
        wholes = [e for e in mode.engines if _gres(e.gres)[0] not in slices and e.gres.startswith("gpu")]
        asked = sum(e.per_host * _gres(e.gres)[1] for e in wholes)
        if engine in wholes and engine is wholes[-1] and asked > whole:
            text = f"asks with the mode's others for {asked} whole GPUs; a host of {group.names} has {whole}"
            yield "per_host", text
        if engine in wholes and parallel > number:
            yield (
                "arguments",
                f"ask for an engine over {parallel} GPUs, and gres {engine.gres!r} gives each {number}",
            )
        return
    there = ", ".join(f"{name}: {count}" for name, count in sorted(slices.items())) or "whole GPUs only"
    if kind not in slices:
        yield "gres", f"was given {engine.gres!r}, which layout {mode.layout!r} does not have; it has {there}"
        return
    if number > 1 and _SLICE.match(kind):
        yield (
            "gres",
            f"was given {engine.gres!r}; a process sees one MIG slice and no tensor parallelism works across "
            f"them: take a larger profile ({there}) or whole GPUs",
        )
    same = sum(e.per_host * _gres(e.gres)[1] for e in mode.engines if _gres(e.gres)[0] == kind)
    if same > slices[kind]:
        yield "per_host", f"asks with others of its profile for {same} of {kind}; a host has {slices[kind]}"
    profile = next((p for entry in layout for p in entry.mig_devices if gres_type(p) == kind), kind)
    memory = profile_memory_bytes(_model(group) or "", profile)
    if engine.memory_gib is not None and memory is not None and engine.memory_gib * 2**30 > memory:
        yield (
            "memory_gib",
            f"was given {engine.memory_gib:g}; a slice {kind} has {memory / 2**30:.2f} GiB",
        )
    if parallel > number and _SLICE.match(kind):
        yield (
            "arguments",
            f"ask for an engine over {parallel} GPUs, and a replica has one MIG slice, which is as "
            "many as a process can see; take 1",
        )


def _slices(layout: tuple[LayoutEntry, ...], group: HostGroup) -> dict[str, int]:
    """Profile, as Slurm names its type, -> how many a host has in a layout; empty where nothing is cut."""
    found: dict[str, int] = {}
    for entry in layout:
        devices = group.gpus if entry.devices is None else len(entry.devices)
        for name, count in entry.mig_devices.items():
            kind = gres_type(name)
            found[kind] = found.get(kind, 0) + count * devices
    return found


def _cut(layout: tuple[LayoutEntry, ...], group: HostGroup) -> int:
    """GPUs of a host that a layout cuts."""
    return sum(group.gpus if e.devices is None else len(e.devices) for e in layout if e.mig_devices)


def _gres(text: str) -> tuple[str, int]:
    """Type and count of `gpu:TYPE:COUNT`."""
    _, *rest = text.split(":")
    count = int(rest.pop()) if rest and rest[-1].isdigit() else 1
    return (rest[0] if rest else ""), count


def _parallel(arguments: tuple[str, ...]) -> int:
    """GPUs of one engine: the product of what its arguments say."""
    found = 1
    for i, argument in enumerate(arguments):
        matched = _PARALLEL.match(argument)
        if matched is not None:
            value = matched[1] or (arguments[i + 1] if i + 1 < len(arguments) else "")
            found *= int(value) if value.isdigit() else 1
    return found


def _floors(modes: ModesPolicy) -> Iterator[Found]:
    hosts = len(modes.all_hosts())
    for i, mode in enumerate(modes.mode):
        for model, floor in mode.floors().items():
            per_host = sum(e.per_host for e in mode.engines if e.model == model)
            if floor > per_host * hosts:
                yield (
                    f"modes.mode[{i}].engines",
                    f"have a floor of {floor} replicas of {model}; {hosts} hosts have {per_host * hosts}",
                )
        for other in modes.mode[:i]:
            for model, floor in floor_between(mode, other).items():
                each = min(sum(e.per_host for e in m.engines if e.model == model) for m in (mode, other))
                if each and math.ceil(floor / each) > hosts - 1:
                    yield (
                        f"modes.mode[{i}].engines",
                        f"keep a floor of {floor} replicas of {model} from and to mode {other.name}; without "
                        f"one of {hosts} hosts there are {each * (hosts - 1)}: no host could ever change",
                    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"
