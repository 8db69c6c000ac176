"""One node's GRES written anew for a mode, into slurm.conf and gres.conf as they stand: what a hand is asked
to do where hosts have one record for all modes (`modes.way = "reconfigure"`).

What is written was rendered before (`render.part_names`). Each file is replaced as a whole, one call at a
time, and a call that was cut off between the two is repaired by the next.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hybridsched.slurmfiles.conf import Conf
from hybridsched.slurmfiles.facts import expand
from hybridsched.slurmfiles.files import Change, InstallError, read, read_included, write
from hybridsched.slurmfiles.modes import ModeRecord, gpu_counts
from hybridsched.slurmfiles.records import Entry, entries, with_fields
from hybridsched.slurmfiles.render import part_names


class ConfigureRefusedError(Exception):
    """It cannot be done with these files: trying again is no use. Says what to do."""


def configure(folder: Path, node: str, mode: str) -> list[Path]:
    """Write `node`'s GRES in `mode` into the files of `folder`; the files that were changed.

    Raises `ConfigureRefusedError`, and `InstallError` where a file cannot be read or written.
    """
    with _alone(folder):
        needed = [change for change in _changes_for(folder, node, mode)[1] if change.is_needed]
        for change in needed:
            try:
                write(change)
            except OSError as error:
                raise InstallError(f"{change.path} could not be written: {error}") from error
    return [change.path for change in needed]


MOST_TRIED = 32


def refusals(folder: Path, records: Sequence[ModeRecord]) -> dict[str, str]:
    """Mode -> why `configure` could not take a host there, or what it would write otherwise than the policy
    has it; empty: it could. Writes nothing. Of more than `MOST_TRIED` hosts the first are tried."""
    found: dict[str, str] = {}
    tried = list(dict.fromkeys(record.host for record in records))[:MOST_TRIED]
    for record in records:
        for mode in record.modes if record.host in tried else ():
            if mode in found:
                continue
            try:
                gres, _ = _changes_for(folder, record.name, mode)
            except (ConfigureRefusedError, InstallError) as error:
                found[mode] = str(error)
                continue
            if gpu_counts(gres) != dict(record.group.gpus):
                for_nodes, _ = part_names(mode)
                found[mode] = (
                    f"{folder / for_nodes} gives node {record.name} {gres}, which is not the policy's"
                )
    return found


def _changes_for(folder: Path, node: str, mode: str) -> tuple[str, list[Change]]:
    """The node's Gres= in the mode, and the files as they would be."""
    gres, lines = _parts(folder, node, mode)
    return gres, [*_in_gres_conf(folder, node, lines), *_in_slurm_conf(folder, node, gres)]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two hosts may change at once, and both change the same files."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigureRefusedError(f"{folder} is no folder that can be read: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _parts(folder: Path, node: str, mode: str) -> tuple[str, list[str]]:
    """The node's Gres= and its lines of gres.conf in the mode."""
    for_nodes, for_gres = (folder / name for name in part_names(mode))
    again = "render the site's files with the policy and put them there (`hybridsched slurm install`)"
    texts = []
    for path in (for_nodes, for_gres):
        text = read(path)
        if text is None:
            raise ConfigureRefusedError(f"there is no {path}: {again}")
        texts.append(text)
    found = [entry for entry in entries(texts[0]) if _name(entry) == node]
    gres = next((v for entry in found for k, v in entry.fields.items() if k.lower() == "gres"), None)
    if gres is None:
        raise ConfigureRefusedError(f"{for_nodes} has no Gres of node {node}: {again}")
    lines = [
        " ".join(texts[1].split("\n")[entry.first : entry.last + 1])
        for entry in entries(texts[1])
        if _name(entry) == node
    ]
    if gpu_counts(gres) and not any("name=gpu" in low or "autodetect=nvml" in low for low in _low(lines)):
        raise ConfigureRefusedError(
            f"{for_gres} has no lines of the GPUs of {node}, and with none Slurm would refuse the node: "
            "see the remark there"
        )
    return gres, lines


def _low(lines: list[str]) -> list[str]:
    return [line.lower().replace(" ", "") for line in lines]


def _in_slurm_conf(folder: Path, node: str, gres: str) -> Iterator[Change]:
    main = folder / "slurm.conf"
    conf = _conf(main)
    found = conf.record("NodeName", node)
    if found is None:
        raise ConfigureRefusedError(f"{main} has no line of node {node} alone{_shared(conf, node)}")
    path, entry = found
    conf.put(path, entry, with_fields(conf.texts[path], entry, {"Gres": lambda _: gres}))
    yield from _changes(conf)


def _in_gres_conf(folder: Path, node: str, lines: list[str]) -> Iterator[Change]:
    main = folder / "gres.conf"
    conf = _conf(main)
    place: tuple[Path, int] | None = None
    for path in conf.before:
        kept = conf.texts[path].split("\n")
        mine = [entry for entry in entries(conf.texts[path]) if _name(entry) == node]
        for entry in reversed(mine):
            del kept[entry.first : entry.last + 1]
        if mine and place is None:
            place = (path, mine[0].first)
        conf.texts[path] = "\n".join(kept)
    if shared := _shared(conf, node):
        raise ConfigureRefusedError(f"{main} says something of node {node} that is not of it alone{shared}")
    path, at = place or (main, len(conf.texts[main].rstrip("\n").split("\n")))
    kept = conf.texts[path].split("\n")
    kept[at:at] = lines
    conf.texts[path] = "\n".join(kept).rstrip("\n") + "\n"
    yield from _changes(conf)


def _shared(conf: Conf, node: str) -> str:
    """A line that speaks of the node and of others; empty: there is none."""
    for path, entry in conf.walk():
        names = _name(entry)
        plain = entry.key.lower() == "name" and names is None  # of whatever node reads it
        if plain or (names is not None and names != node and node in expand(names)):
            what = f"NodeName={names}" if names else f"{entry.key}={entry.value} without NodeName="
            return f"; {path} line {entry.first + 1} has {what}: divide it, a line for each node"
    return ""


def _name(entry: Entry) -> str | None:
    if entry.key.lower() == "nodename":
        return entry.value
    if entry.key.lower() != "name":
        return None
    return next((v for k, v in entry.fields.items() if k.lower() == "nodename"), None)


def _conf(main: Path) -> Conf:
    if not main.exists():
        raise ConfigureRefusedError(f"there is no {main}: give the folder of slurm.conf")
    return Conf(main, read_included, ())


def _changes(conf: Conf) -> Iterator[Change]:
    for path, text in conf.texts.items():
        yield Change(path, conf.before[path], text, 0o644)
