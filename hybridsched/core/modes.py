"""The modes of a pool as values: layouts, windows, engines, hosts. `policyfile` reads their TOML form.

A *layout* says how the GPUs of a host are cut, in the words of mig-parted's file (`mig-configs`). A *mode* is
a layout with the engines that stand on it and the windows in which it holds. Each host has a node record of
Slurm for each mode (`node_name`), or one for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from hybridsched.core.autonomy import Autonomy
from hybridsched.core.mig import LayoutEntry
from hybridsched.core.values import Value

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_SETS: dict[str, frozenset[int]] = {
    "daily": frozenset(range(7)),
    "weekday": frozenset(range(5)),
    "weekend": frozenset((5, 6)),
    **{day: frozenset((i,)) for i, day in enumerate(DAYS)},
}
"""Words of a window's `days`, as numbers of days of the week (Monday 0)."""

MOST_HOSTS = 10_000
_RANGE = re.compile(r"([^\[\]]*)\[([0-9,-]+)\]([^\[\]]*)")


class Window(Value, frozen=True, kw_only=True):
    """A span of the wall clock that comes again. One that ends before it starts crosses midnight and belongs
    to the day on which it starts; one that ends when it starts lasts a day."""

    days: tuple[str, ...] = ("daily",)
    start: str = "00:00"
    end: str = "00:00"

    @property
    def weekdays(self) -> frozenset[int]:
        """Days of the week on which it starts, Monday 0."""
        return frozenset(number for word in self.days for number in DAY_SETS.get(word, ()))


class ModeEngine(Value, frozen=True, kw_only=True):
    """Replicas of one kind on each host that stands in the mode."""

    model: str
    name: str = ""
    """Tells several kinds of one model apart; empty: the model's name."""
    per_host: int = 1
    gres: str = "gpu:1"
    floor: int = 0
    """Replicas of the model that serve at every moment in this mode."""
    time_limit_s: int = 86_400
    script: str = "workers/online.sbatch"
    arguments: tuple[str, ...] = ()
    warm_ms: float = 120_000.0
    """From a job's submission until its replica serves, before that has been measured."""
    memory_gib: float | None = None
    """What one replica needs on each of its GPUs or slices: weights, KV cache, context and buffers. None: not
    compared with the layout."""


class Mode(Value, frozen=True, kw_only=True):
    name: str
    layout: str = ""
    """A label of `ModesPolicy.mig_configs`; empty: the GPUs are not cut and are left as they are."""
    windows: tuple[Window, ...] = ()
    node: str = "{host}"
    """Name of a host's node record in this mode."""
    lanes: bool = True
    """Whether offline work may run on the engines of hosts in this mode."""
    early: bool = False
    """Its engines serve when its window begins: the switch begins before that. Else it begins then."""
    engines: tuple[ModeEngine, ...] = ()

    def group(self, engine: ModeEngine) -> str:
        """Name of the engine's group of replicas."""
        return f"{self.name}.{engine.name or engine.model}"

    def floors(self) -> dict[str, int]:
        """Model -> replicas that serve at every moment."""
        found: dict[str, int] = {}
        for engine in self.engines:
            found[engine.model] = found.get(engine.model, 0) + engine.floor
        return {model: floor for model, floor in found.items() if floor > 0}


class HostGroup(Value, frozen=True, kw_only=True):
    """Hosts that are alike."""

    names: str
    """As Slurm writes node lists: `gpu[01-04],big1`."""
    gpu: str = ""
    """The model of their GPUs, as `core.mig` knows it; empty: not one that is cut."""
    gpus: int = 1


class ModesPolicy(Value, frozen=True, kw_only=True):
    """Durations are milliseconds of the wall clock."""

    enabled: bool = False
    time_zone: str = "UTC"
    default: str = ""
    """The mode outside every window; empty: the mode stays as it is there."""
    autonomy: Autonomy = Autonomy.APPROVE
    max_unavailable: int = 1
    """Hosts that may be out of service for a change at once."""
    way: str = "records"
    """`records`: one node record for each mode, one slurmd up at a time. `reconfigure`: one record, whose
    configuration is written anew."""
    drain_ms: float = 600_000.0
    """What runs on a host may take this long to end by itself; then it is requeued."""
    requeue_ms: float = 120_000.0
    """After that: how long until the change of the host is given up."""
    act_ms: float = 120_000.0
    """How long a step of the change (cutting, Slurm, verifying) is tried again while it fails for a while."""
    retry_ms: float = 600_000.0
    """After a change that was rolled back: the host is left alone for this long; twice as long each time."""
    attempts: int = 3
    """Changes of a host that are tried; then it waits for an operator, or for the calendar's next mode."""
    margin: float = 1.2
    """A switch that must be early begins this many times the expected span before its window."""
    reservation: bool = False
    """Whether a reservation keeps jobs out of a switch that is near."""
    reserve_ahead_ms: float = 14_400_000.0
    """How long before the switch the reservation is made."""
    mig_configs: dict[str, tuple[LayoutEntry, ...]] = msgspec.field(default_factory=dict)
    hosts: tuple[HostGroup, ...] = ()
    mode: tuple[Mode, ...] = ()

    def named(self, name: str) -> Mode | None:
        return next((mode for mode in self.mode if mode.name == name), None)

    def all_hosts(self) -> dict[str, HostGroup]:
        """Host -> the group that it belongs to, in the order of the file."""
        return {host: group for group in self.hosts for host in expand(group.names)}


def node_name(mode: Mode, host: str) -> str:
    """The node record of a host in a mode."""
    return mode.node.replace("{host}", host)


def records(policy: ModesPolicy, host: str) -> tuple[str, ...]:
    """Every node record of a host, each once."""
    return tuple(dict.fromkeys(node_name(mode, host) for mode in policy.mode))


def expand(names: str) -> tuple[str, ...]:
    """The names in a node list such as `gpu[01-04,7],big1`; at most `MOST_HOSTS`.

    Raises:
        ValueError: it is no such list.
    """
    found: list[str] = []
    for part in _split(names):
        matched = _RANGE.fullmatch(part)
        if matched is not None:
            head, inside, tail = matched.groups()
            found += [f"{head}{number}{tail}" for number in _numbers(inside, len(found))]
        elif part and not set(part) & set("[]"):
            found.append(part)
        else:
            raise ValueError(f"{part!r} is no name of a node; write a list such as gpu[01-04],big1")
    return tuple(found)


def _split(names: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, sign in enumerate(names):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            parts.append(names[start:i].strip())
            start = i + 1
    return [*parts, names[start:].strip()]


def _numbers(inside: str, before: int) -> Iterable[str]:
    count = before
    for piece in inside.split(","):
        first, dash, last = piece.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"[{inside}] is no range of numbers; write one such as [01-04,7]")
        for number in range(int(first), int(last if dash else first) + 1):
            count += 1
            if count > MOST_HOSTS:
                raise ValueError(f"more than {MOST_HOSTS:,} names")
            yield f"{number:0{len(first)}d}"
