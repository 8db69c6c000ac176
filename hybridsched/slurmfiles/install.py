"""Rendered files into a site's Slurm folder: a plan that can be read as a diff, then written with backups."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from pathlib import Path

from hybridsched.core.modes import ModesPolicy
from hybridsched.slurmfiles.conf import Conf
from hybridsched.slurmfiles.facts import expand
from hybridsched.slurmfiles.files import Change, InstallError, free_name, read, read_included, write
from hybridsched.slurmfiles.groups import Records, plain
from hybridsched.slurmfiles.modes import Devices, records_of, standing_modes
from hybridsched.slurmfiles.records import add_words, entries, with_fields
from hybridsched.slurmfiles.render import (
    CLUSTER,
    EXECUTABLE,
    GRES,
    HOOK_SETTINGS,
    KEPT,
    LISTS,
    RECORDS,
    cluster_settings,
    group_gres,
    partition_fields,
    render,
)
from hybridsched.slurmfiles.site import Site

_MARK = "# Added by `hybridsched slurm install`:"


@dataclass(frozen=True)
class Plan:
    """What an installation would do."""

    changes: tuple[Change, ...]
    by_hand: tuple[str, ...] = field(default=())
    """What is left to the operator, one sentence each."""

    @property
    def needed(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_needed)

    def diff(self) -> str:
        """What changes, for people: a line for each new file, then the diffs of those that are there."""
        new = [c for c in self.needed if c.before is None]
        said = [f"New: {c.path}, {len(c.after.splitlines())} lines\n" for c in new]
        if new:
            said.append("(`hybridsched slurm render` writes the new files to a folder, to be read.)\n")
        return "".join([*said, *(c.diff() for c in self.needed if c.before is not None)])


def plan(site: Site, folder: Path, modes: ModesPolicy | None = None, devices: Devices | None = None) -> Plan:
    """Compare the site's files with what stands in `folder`. Reads only.

    `modes`, `devices`: of hosts that change their mode, as `modes.records_of` takes them. Raises
    `InstallError`, and ValueError as `records_of` and `render` do.
    """
    main = folder / "slurm.conf"
    if not main.exists():
        raise InstallError(
            f"{main} does not exist: give the folder of slurm.conf with --etc, or slurm.etc in the site file"
        )
    conf = Conf(main, read_included, (CLUSTER, GRES, RECORDS))
    by_hand: list[str] = []
    present: set[str] = set()
    records = _records(site, conf, folder, modes, devices)
    for group in records.groups:
        gres = group_gres(site, group)
        there = _put_gres(conf, expand(group.names), gres, by_hand, gpus_too=group.of_modes)
        missing = [host for host in expand(group.names) if host not in there]
        if not missing:
            present.add(group.names)
        elif there and group.options is not None:
            raise InstallError(
                f"{main} has lines for some of the nodes {group.names} and none for {','.join(missing)}, and "
                "Slurm takes a node once: give these a [[nodes]] table of their own in the site file"
            )
        elif group.options is None:
            by_hand.append(
                f"{main} has no line NodeName={','.join(missing)}: add Gres={gres} to the lines of these "
                "nodes, or give nodes.options in the site file to have their line written"
            )
    of_partitions = partition_fields(site, records.groups)
    for name, fields in of_partitions.items():
        if found := conf.record("PartitionName", name):
            present.add(name)
            path, entry = found
            made = {key: _always(value) for key, value in fields.items()}
            conf.put(path, entry, with_fields(conf.texts[path], entry, made))
    if found := conf.record("NodeName", site.fill.parked_node):
        raise InstallError(
            f"{found[0]} defines {site.fill.parked_node} itself, and Slurm takes a node once: remove its "
            "line, or "
            f"name another fill.parked_node in the site file"
        )
    kept = KEPT if "kill_wait_s" in site.slurm.model_fields_set else KEPT | {"KillWait"}
    wanted = cluster_settings(site)
    _merge(conf, wanted, by_hand, kept)
    conf.texts[main] = _include(conf.texts[main], RECORDS)
    free = {key.lower() for fields in of_partitions.values() for key in fields}
    changed = {
        **{key.lower(): () for key in (*wanted, "Include")},
        "nodename": ("gres",),
        "partitionname": free,
    }
    if damage := conf.damage(changed):
        raise InstallError(
            f"{damage}: nothing was written; write that line plainly, one setting or record on it, and try "
            "again"
        )
    gres_conf = folder / "gres.conf"
    files = {name: body for name, body in render(site, records, present=present).items() if name != CLUSTER}
    changes = [
        _change(folder / name, body, 0o755 if name in EXECUTABLE else 0o644) for name, body in files.items()
    ]
    changes.append(_change(gres_conf, _include(read(gres_conf) or "", GRES), 0o644))
    # Last: only when all it names is there does slurm.conf name it.
    changes += [_change(path, text, 0o644) for path, text in reversed(conf.texts.items())]
    return Plan(tuple(changes), tuple(by_hand))


def _records(
    site: Site, conf: Conf, folder: Path, modes: ModesPolicy | None, devices: Devices | None
) -> Records:
    """The site's node records; hosts whose record is written anew for each mode keep the mode they are in."""
    if modes is None:
        return plain(site)

    def gres() -> Iterator[tuple[str, str]]:
        ours = entries(read(folder / RECORDS) or "")
        for entry in [*(entry for _, entry in conf.walk()), *ours]:
            if entry.key.lower() == "nodename":
                yield entry.value, next((v for k, v in entry.fields.items() if k.lower() == "gres"), "")

    return records_of(site, modes, devices, standing_modes(site, modes, dict(gres())))


def apply(the_plan: Plan, *, stamp: str | None = None) -> list[Path]:
    """Write the plan's files, each whole or not at all, the old one kept as FILE.hybridsched-STAMP.

    Returns the backups. Raises `InstallError` when a file changed since the plan was made, or cannot be
    written; what was written until then stays, and each old file is beside it. A file that does not
    read as it was written is put back.
    """
    stamp = stamp or time.strftime("%Y%m%dT%H%M%S")
    needed = the_plan.needed
    for change in needed:
        if read(change.path) != change.before:
            raise InstallError(
                f"{change.path} has changed meanwhile: nothing was written; look at the diff again"
            )
    backups = []
    for change in needed:
        try:
            if change.before is not None:
                backup = free_name(change.path.with_name(f"{change.path.name}.hybridsched-{stamp}"))
                shutil.copy2(change.path, backup)
                backups.append(backup)
            write(change)
            if read(change.path) != change.after:
                if change.before is not None:
                    write(Change(change.path, change.after, change.before, change.mode))
                raise InstallError(
                    f"{change.path} does not read as it was written, and was put back: does something else "
                    "write it?"
                )
        except OSError as error:
            raise InstallError(
                f"{change.path} could not be written: {error}; the files before it are in place"
            ) from error
    return backups


def next_steps(the_plan: Plan) -> list[str]:
    """What the operator does after the files are in place."""
    if not the_plan.needed:
        return []
    return [
        "copy the folder's files to every machine of the cluster, unless it is shared or configless",
        "restart slurmctld, then slurmd on the nodes (GresTypes, PreemptType and AuthInfo are read at "
        "their start)",
        "run `hybridsched slurm check` with the site file",
    ]


def _put_gres(
    conf: Conf, hosts: list[str], gres: str, by_hand: list[str], *, gpus_too: bool = False
) -> set[str]:
    """Set Gres= in the lines of these nodes, however slurm.conf groups them; which of them it has."""
    there: set[str] = set()
    for name in [entry.value for _, entry in conf.walk() if entry.key.lower() == "nodename"]:
        theirs = set(expand(name))
        if not theirs & set(hosts) or (found := conf.record("NodeName", name)) is None:
            continue
        path, entry = found
        there |= theirs & set(hosts)
        if theirs <= set(hosts):
            made = {"Gres": lambda old: _with_gres(old, gres, gpus_too=gpus_too)}
            conf.put(path, entry, with_fields(conf.texts[path], entry, made))
        else:
            by_hand.append(
                f"{path} line {entry.first + 1}, NodeName={name}, has nodes beside those of the site file: "
                f"divide it, and give {','.join(sorted(theirs & set(hosts)))} Gres={gres}"
            )
    return there


def _merge(conf: Conf, wanted: dict[str, str], by_hand: list[str], kept: Set[str]) -> None:
    """The settings put into slurm.conf: changed where they stand, lists joined, the rest in a block below."""
    added = []
    for key, value in wanted.items():
        found = conf.setting(key)
        if found is None:
            added.append(f"{key}={value}")
            continue
        path, entry = found
        if key in kept:
            if entry.value != value and key in HOOK_SETTINGS:
                by_hand.append(
                    f"{path} line {entry.first + 1} has {entry.key}={entry.value}: have that program "
                    f"call {value} "
                    f"too and end with its exit status"
                )
            continue
        joined = add_words(entry.value, value) if key in LISTS else value
        if joined.lower() != entry.value.lower():
            conf.put(path, entry, f"{entry.key}={joined}")
    if added:
        block = [_MARK, *added]
        conf.texts[conf.main] = conf.texts[conf.main].rstrip("\n") + "\n\n" + "\n".join(block) + "\n"


def _always(value: str) -> Callable[[str], str]:
    return lambda _: value


def _include(text: str, name: str) -> str:
    if any(entry.key == "Include" and entry.value.rpartition("/")[2] == name for entry in entries(text)):
        return text
    return (text.rstrip("\n") + "\n\n" if text.strip() else "") + f"{_MARK}\nInclude {name}\n"


def _with_gres(old: str, new: str, *, gpus_too: bool = False) -> str:
    """The new GRES, and those of the site that they do not replace. `gpu:8` without a type gives way, and
    with `gpus_too` GPUs of every type.

    So does `hsfill:8` of an older release to `hsfill:no_consume:8`: with both it would still be consumed.
    """
    replaced = {*(_kind(part) for part in new.split(",")), ("gpu",)}
    kept = [part for part in old.split(",") if part and _kind(part) not in replaced]
    kept = [part for part in kept if not (gpus_too and _kind(part)[0] == "gpu")]
    return ",".join([*new.split(","), *kept])


def _kind(part: str) -> tuple[str, ...]:
    """Name and type of an entry, without the count and `no_consume`."""
    name, *words = part.strip().split(":")
    return (name, *(w for w in words if w != "no_consume" and not re.fullmatch(r"\d+[KMGTP]?", w)))


def _change(path: Path, after: str, mode: int) -> Change:
    return Change(path, read(path), after, mode)
