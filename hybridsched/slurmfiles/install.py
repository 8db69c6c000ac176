"""Rendered files into a site's Slurm folder: a plan that can be read as a diff, then written with backups."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hybridsched.slurmfiles.records import add_words, entries, put, record, settings
from hybridsched.slurmfiles.render import (
    CLUSTER,
    EXECUTABLE,
    GRES,
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


class InstallError(Exception):
    """The files could not be written, or the site's own do not allow it. Says what to do."""


@dataclass(frozen=True)
class Change:
    """One file to write."""

    path: Path
    before: str | None
    """None when the file is new."""
    after: str
    mode: int

    @property
    def is_needed(self) -> bool:
        return self.before != self.after

    def diff(self) -> str:
        """Unified diff, empty when nothing changes."""
        old = f"{self.path}" if self.before is not None else "/dev/null"
        lines = difflib.unified_diff(
            (self.before or "").splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            fromfile=old,
            tofile=str(self.path),
        )
        return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


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
        return "".join(change.diff() for change in self.needed)


def plan(site: Site, folder: Path) -> Plan:
    """Compare the site's files with what stands in `folder`. Reads only. Raises `InstallError`."""
    main = folder / "slurm.conf"
    text = _read(main)
    if text is None:
        raise InstallError(
            f"{main} does not exist: give the folder of slurm.conf with --etc, or slurm.etc in the site file"
        )
    by_hand: list[str] = []
    present: set[str] = set()
    for group in site.nodes:
        if found := record(text, "NodeName", group.names):
            present.add(group.names)
            text = put(
                text, found, _with(_line(text, found.first, found.last), {"Gres": group_gres(site, group)})
            )
        elif group.options is None:
            by_hand.append(
                f"{main} has no line NodeName={group.names}: add Gres={group_gres(site, group)} to the "
                "lines of "
                f"these nodes, or give nodes.options in the site file to have their line written"
            )
    for name, fields in partition_fields(site).items():
        if found := record(text, "PartitionName", name):
            present.add(name)
            text = put(text, found, _with(_line(text, found.first, found.last), fields))
    if record(text, "NodeName", site.fill.parked_node):
        raise InstallError(
            f"{main} defines {site.fill.parked_node} itself, and Slurm takes a node once: remove its "
            "line, or "
            f"name another fill.parked_node in the site file"
        )
    text = _merge(text, cluster_settings(site), str(main), by_hand)
    text = _include(text, RECORDS)
    gres = folder / "gres.conf"
    files = {name: body for name, body in render(site, present=present).items() if name != CLUSTER}
    changes = [
        _change(folder / name, body, 0o755 if name in EXECUTABLE else 0o644) for name, body in files.items()
    ]
    changes.append(_change(gres, _include(_read(gres) or "", GRES), 0o644))
    # Last: only when all it names is there does slurm.conf name it.
    changes.append(_change(main, text, 0o644))
    return Plan(tuple(changes), tuple(by_hand))


def apply(the_plan: Plan, *, stamp: str | None = None) -> list[Path]:
    """Write the plan's files, each whole or not at all, the old one kept as FILE.hybridsched-STAMP.

    Returns the backups. Raises `InstallError` when a file changed since the plan was made, or cannot be
    written; what was written until then stays, and each old file is beside it.
    """
    stamp = stamp or time.strftime("%Y%m%dT%H%M%S")
    needed = the_plan.needed
    for change in needed:
        if _read(change.path) != change.before:
            raise InstallError(
                f"{change.path} has changed meanwhile: nothing was written; look at the diff again"
            )
    backups = []
    for change in needed:
        try:
            if change.before is not None:
                backup = _free_name(change.path.with_name(f"{change.path.name}.hybridsched-{stamp}"))
                shutil.copy2(change.path, backup)
                backups.append(backup)
            _write(change)
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


def _merge(text: str, wanted: dict[str, str], source: str, by_hand: list[str]) -> str:
    """The settings put into slurm.conf: changed where they stand, lists joined, the rest in a block below."""
    added = []
    for key, value in wanted.items():
        found = settings(text).get(key.lower())
        if found is None:
            added.append(f"{key}={value}")
            continue
        if key in KEPT:
            if found.value != value and not key.endswith("Timeout"):
                by_hand.append(
                    f"{source} line {found.first + 1} has {found.key}={found.value}: have that program "
                    f"call {value} "
                    f"too and end with its exit status"
                )
            continue
        joined = add_words(found.value, value) if key in LISTS else value
        if joined.lower() != found.value.lower():
            text = put(text, found, f"{found.key}={joined}")
    if added:
        block = [_MARK, *added]
        text = text.rstrip("\n") + "\n\n" + "\n".join(block) + "\n"
    return text


def _include(text: str, name: str) -> str:
    if any(entry.key == "Include" and entry.value.rpartition("/")[2] == name for entry in entries(text)):
        return text
    return (text.rstrip("\n") + "\n\n" if text.strip() else "") + f"{_MARK}\nInclude {name}\n"


def _line(text: str, first: int, last: int) -> str:
    """The logical line, its continuations joined."""
    lines = text.splitlines()[first : last + 1]
    return " ".join(line.rstrip().removesuffix("\\").strip() for line in lines)


def _with(line: str, fields: dict[str, str]) -> str:
    """A record's line with these fields, in place where it has them. Its own Gres of other kinds are kept."""
    words, remark = line.partition("#")[0].split(), line.partition("#")[2]
    for key, value in fields.items():
        at = next((i for i, w in enumerate(words) if w.partition("=")[0].lower() == key.lower()), None)
        if at is None:
            words.append(f"{key}={value}")
            continue
        old = words[at].partition("=")[2]
        words[at] = f"{words[at].partition('=')[0]}={_with_gres(old, value) if key == 'Gres' else value}"
    return " ".join(words) + (f"  #{remark}" if remark else "")


def _with_gres(old: str, new: str) -> str:
    """The new GRES, and those of the site that they do not replace. `gpu:8` without a type gives way."""
    names = {part.rpartition(":")[0] for part in new.split(",")}
    kept = [p for p in old.split(",") if p and p != "gpu" and p.rpartition(":")[0] not in {*names, "gpu"}]
    return ",".join([*new.split(","), *kept])


def _change(path: Path, after: str, mode: int) -> Change:
    return Change(path, _read(path), after, mode)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InstallError(f"{path} cannot be read: {error}") from error


def _free_name(path: Path) -> Path:
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def _write(change: Change) -> None:
    # A link (as a shared slurm.conf often is) stays one: what it points to is replaced.
    target = change.path.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(change.after)
            file.flush()
            os.fsync(file.fileno())
        mode = change.mode
        if target.exists():
            was = target.stat()
            mode = was.st_mode & 0o7777 | (change.mode & 0o111)
            if (was.st_uid, was.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(name, was.st_uid, was.st_gid)
        Path(name).chmod(mode)
        Path(name).replace(target)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
