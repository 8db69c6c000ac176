"""Layouts in the format of mig-parted, which sites already have.

    version: v1
    mig-configs:
      LABEL:
        - devices: all | [0, 1]
          device-filter: "0x20B210DE"      # optional, or a list: PCI device and vendor
          mig-enabled: true
          mig-devices: {"1g.10gb": 7}

A GPU that no entry of a layout names is left as it is. Source: NVIDIA/mig-parted, README and api/spec/v1.
"""

from __future__ import annotations

import difflib
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from hybridsched.core.mig.placing import MigRefusalError, refusal
from hybridsched.core.mig.profiles import MODELS, PCI_IDS
from hybridsched.core.mig.values import Gpu, Instance, Piece, Want
from hybridsched.core.values import Value

VERSION = "v1"
_TOP = ("version", "mig-configs", "model")
"""`model` is for whoever checks the layout without a device."""
_KEYS = ("devices", "device-filter", "mig-enabled", "mig-devices")
_MOST_PIECES = 64
"""Of one profile in an entry: far above what a GPU holds, and small enough to reckon with."""
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 2, 120, 120


class LayoutEntry(Value, frozen=True, kw_only=True):
    """What some GPUs of a node shall be."""

    devices: tuple[int, ...] | None = None
    """Indexes of the GPUs; None: all."""
    device_filter: tuple[int, ...] = ()
    """Only GPUs with one of these PCI IDs; empty: any."""
    mig_enabled: bool
    mig_devices: dict[str, int] = msgspec.field(default_factory=dict)
    """Profile -> instances on each of the GPUs."""

    def names(self, gpu: Gpu) -> bool:
        """Whether it speaks of this GPU."""
        here = self.devices is None or gpu.index in self.devices
        return here and (not self.device_filter or gpu.pci_id in self.device_filter)

    @property
    def want(self) -> Want:
        pieces = [name for name, count in self.mig_devices.items() for _ in range(count)]
        return Want(enabled=self.mig_enabled, pieces=tuple(Piece(profile=name) for name in pieces))


Layout = tuple[LayoutEntry, ...]


class LayoutFileError(Exception):
    """A layout document cannot be used. `problems` holds every mistake as (where, message)."""

    def __init__(self, source: str, problems: Sequence[tuple[str, str]]) -> None:
        count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        lines = "\n".join(f"  {where + ' ' if where else ''}{message}" for where, message in problems)
        super().__init__(f"layouts {source} have {count}:\n{lines}")
        self.source = source
        self.problems = tuple(problems)


def _shown(given: object) -> str:
    """What was given, as far as it helps: a few lines of YAML can stand for billions of items."""
    said = _REPR.repr(given)
    return said if len(said) <= 200 else said[:200] + "..."


def parse_layouts(document: object, *, source: str = "document") -> dict[str, Layout]:
    """Label -> layout, of what a YAML or JSON reader gave. `source` names it in messages.

    Raises `LayoutFileError` with every mistake.
    """
    problems: list[tuple[str, str]] = []
    found: dict[str, Layout] = {}
    if not isinstance(document, Mapping):
        raise LayoutFileError(source, [("", "must be a mapping with `version: v1` and `mig-configs`")])
    if document.get("version") != VERSION:
        problems.append(("version", f"was given {_shown(document.get('version'))}; it must be {VERSION}"))
    top = ", ".join(_TOP[:2])
    strange = (str(key) for key in document if key not in _TOP)
    problems.extend((key, f"is not a key of a layout file (allowed: {top})") for key in strange)
    configs = document.get("mig-configs")
    if not isinstance(configs, Mapping) or not configs:
        problems.append(("mig-configs", "must map each layout's label to its list of entries"))
        raise LayoutFileError(source, problems)
    for label, entries in configs.items():
        where = f"mig-configs.{label}"
        if not isinstance(label, str) or not label:
            problems.append((where, "is no label: quote it"))
        elif not isinstance(entries, list) or not entries:
            problems.append((where, "must be a list of entries, each with `devices` and `mig-enabled`"))
        else:
            found[label] = tuple(_entries(entries, where, problems))
    if problems:
        raise LayoutFileError(source, problems)
    return found


def _entries(entries: list[Any], where: str, problems: list[tuple[str, str]]) -> Iterator[LayoutEntry]:
    for number, entry in enumerate(entries):
        here = f"{where}[{number}]"
        if not isinstance(entry, Mapping):
            problems.append((here, f"was given {_shown(entry)}; an entry is a mapping of {', '.join(_KEYS)}"))
            continue
        before = len(problems)
        for key in entry:
            if key not in _KEYS:
                near = difflib.get_close_matches(str(key), _KEYS, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                problems.append(
                    (f"{here}.{key}", f"is not a key of an entry{hint} (allowed: {', '.join(_KEYS)})")
                )
        devices = _devices(entry, here, problems)
        filters = _filters(entry, here, problems)
        enabled = entry.get("mig-enabled")
        if not isinstance(enabled, bool):
            problems.append((f"{here}.mig-enabled", f"was given {_shown(enabled)}; it must be true or false"))
        counts = _counts(entry, here, problems)
        if enabled is False and counts:
            problems.append((f"{here}.mig-devices", "must be empty where mig-enabled is false"))
        if enabled is True and entry.get("mig-devices") is None:
            problems.append((f"{here}.mig-devices", "is missing where mig-enabled is true; {} is for none"))
        if len(problems) == before:
            yield LayoutEntry(
                devices=devices, device_filter=filters, mig_enabled=bool(enabled), mig_devices=counts
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _devices(entry: Mapping[Any, Any], here: str, problems: list[tuple[str, str]]) -> tuple[int, ...] | None:
    given = entry.get("devices")
    if given == "all":
        return None
    if isinstance(given, list) and given and all(_whole(i) for i in given) and len(set(given)) == len(given):
        return tuple(given)
    problems.append(
        (f"{here}.devices", f"was given {_shown(given)}; it must be all, or a list of GPU indexes, each once")
    )
    return None


def _filters(entry: Mapping[Any, Any], here: str, problems: list[tuple[str, str]]) -> tuple[int, ...]:
    given = entry.get("device-filter")
    if given is None or given == "":
        return ()
    found = []
    for word in given if isinstance(given, list) else [given]:
        try:
            found.append(int(word, 16))
        except (TypeError, ValueError):
            problems.append(
                (
                    f"{here}.device-filter",
                    f"was given {_shown(word)}; it must be a PCI ID such as '0x20B210DE'",
                )
            )
    return tuple(found)


def _counts(entry: Mapping[Any, Any], here: str, problems: list[tuple[str, str]]) -> dict[str, int]:
    given = entry.get("mig-devices")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.append((f"{here}.mig-devices", f"was given {_shown(given)}; it must map profiles to counts"))
        return {}
    found = {}
    for name, count in given.items():
        if not isinstance(name, str) or not name:
            problems.append(
                (f"{here}.mig-devices", f"was given {_shown(name)} for a profile; one is 1g.10gb: quote it")
            )
        elif not _whole(count) or count > _MOST_PIECES:
            problems.append(
                (
                    f"{here}.mig-devices.{name}",
                    f"was given {_shown(count)}; it must be from 0 to {_MOST_PIECES}",
                )
            )
        elif count:
            found[name] = count
    return found


def wants(layout: Layout, gpus: Sequence[Gpu]) -> dict[int, Want]:
    """GPU index -> what the layout wants of it; GPUs that it does not name are absent.

    Raises `MigRefusalError` when two entries want different things of one GPU, or one names a GPU that is not
    there.
    """
    found: dict[int, Want] = {}
    there = {gpu.index for gpu in gpus}
    for number, entry in enumerate(layout):
        if missing := sorted(set(entry.devices or ()) - there):
            has = ", ".join(map(str, sorted(there))) or "none"
            raise MigRefusalError(f"entry {number} names GPU {missing[0]}, which is not there (GPUs: {has})")
        for gpu in gpus:
            if not entry.names(gpu):
                continue
            if gpu.index in found and _sorted(found[gpu.index]) != _sorted(entry.want):
                raise MigRefusalError(
                    f"two entries want different things of GPU {gpu.index}, one of them entry {number}"
                )
            found[gpu.index] = entry.want
    return found


def _sorted(want: Want) -> tuple[bool, list[str]]:
    return want.enabled, sorted(piece.profile for piece in want.pieces)


def layout_flaws(model: str, layout: Layout, gpus: int) -> list[str]:
    """What keeps a layout from a node with `gpus` GPUs of `model` (a key of `MODELS`); empty: it fits.

    Each text says what was given and what does fit. An entry whose `device-filter` names no board of the
    model is not for it, and not judged.
    """
    if model not in MODELS:
        near = difflib.get_close_matches(model, MODELS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return [f"the GPU model {model!r} is not known here{hint} (known: {', '.join(MODELS)})"]
    flaws = []
    seen: dict[int, int] = {}
    boards = set(PCI_IDS[model])
    concerned = [n for n, e in enumerate(layout) if not e.device_filter or boards & set(e.device_filter)]
    if not concerned:
        flaws.append(f"no entry is for {model}: their device filters name none of its boards")
    for number in concerned:
        entry = layout[number]
        named = range(gpus) if entry.devices is None else entry.devices
        if beyond := [i for i in named if i >= gpus]:
            flaws.append(f"entry {number} names GPU {beyond[0]}; a node has {gpus}, 0 to {gpus - 1}")
        if boards <= set(entry.device_filter) or not entry.device_filter:
            if twice := [
                i for i in named if i in seen and _sorted(layout[seen[i]].want) != _sorted(entry.want)
            ]:
                flaws.append(f"entries {seen[twice[0]]} and {number} want different things of GPU {twice[0]}")
            seen |= dict.fromkeys(named, number)
        problem = refusal(MODELS[model], entry.want.pieces)
        if problem:
            flaws.append(f"entry {number}, on {model}: {problem}")
    return flaws


def profile_memory_bytes(model: str, profile: str) -> int | None:
    """Memory of an instance; None: the model has no such profile, or its size is not known here."""
    found = next((p for p in MODELS.get(model, ()) if p.name == profile), None)
    return None if found is None or found.memory_mib is None else found.memory_mib * 2**20


def export(gpus: Sequence[Gpu], label: str) -> tuple[dict[str, Any], list[str]]:
    """The layout that the GPUs have, as a document of mig-parted's, and what it cannot say, in sentences."""
    notes: list[str] = []
    groups: dict[tuple[bool, tuple[tuple[str, int], ...]], list[int]] = {}
    for gpu in gpus:
        names = [name for instance in gpu.instances for name in _said(gpu, instance, notes)]
        groups.setdefault((gpu.enabled, tuple(sorted(Counter(names).items()))), []).append(gpu.index)
        if gpu.supported and gpu.pending != gpu.enabled:
            notes.append(f"GPU {gpu.index}: a change of the MIG mode is pending, which the file cannot say")
    entries: list[dict[str, Any]] = []
    for (enabled, counts), indexes in groups.items():
        devices: Any = "all" if len(groups) == 1 else indexes
        entries.append({"devices": devices, "mig-enabled": enabled, "mig-devices": dict(counts)})
    return {"version": VERSION, "mig-configs": {label: entries}}, notes


def _said(gpu: Gpu, instance: Instance, notes: list[str]) -> list[str]:
    """mig-parted's names of the devices in an instance."""
    profile = gpu.profile(instance.profile)
    if profile is None or instance.whole(profile.slices):
        return [instance.profile]
    where = f"GPU {gpu.index}: {instance.profile} at {instance.start}"
    if not instance.compute:
        notes.append(f"{where} has no compute instance, and is left out")
        return []
    notes.append(f"{where} is cut further; `mode assert` and `mode apply` take whole instances only")
    return [f"{c.slices}c.{instance.profile}" for c in instance.compute]
