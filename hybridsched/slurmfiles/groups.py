"""Groups of like node records: those of the site file, and for hosts with modes those of `modes`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hybridsched.slurmfiles.site import Nodes, Site


@dataclass(frozen=True)
class Group:
    """Node records that differ in their names alone."""

    names: str
    """As slurm.conf names them, such as gpu[01-08]."""
    gpus: Mapping[str, int]
    """GRES type -> GPUs or slices of it that each has."""
    lanes: int
    """Configured count of both GRES of admission."""
    options: str | None
    """Further words of the NodeName line; None: slurm.conf has the line."""
    gpu_lines: tuple[str, ...] = ()
    """Lines of gres.conf for their GPUs; empty: gres.conf has them already."""
    of_modes: bool = False
    """What a host has in a mode is all that it has: GPUs that slurm.conf gives it otherwise go."""
    unlisted: tuple[str, ...] = ()
    """Records whose lines of GPUs are missing, each with what to do."""


@dataclass(frozen=True)
class Records:
    """Every node record of a site."""

    groups: tuple[Group, ...]
    """Those that slurm.conf and gres.conf define."""
    parts: Mapping[str, tuple[Group, ...]] = field(default_factory=dict)
    """Mode -> what is written in the place of a host's record when it goes into the mode. Empty where each
    mode has a record of its own."""

    @property
    def every(self) -> Iterator[Group]:
        """The groups, and what may come into their place: in an order that does not depend on what stands."""
        for groups in self.parts.values():
            yield from groups
        yield from self.groups

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """Types of GPUs and slices that a job can ask for, each once."""
        return tuple(dict.fromkeys(kind for group in self.every for kind in group.gpus))

    @property
    def unlisted(self) -> tuple[str, ...]:
        """What is missing in gres.conf, each thing once."""
        return tuple(dict.fromkeys(said for group in self.every for said in group.unlisted))


def plain(site: Site) -> Records:
    """The records of a site without modes."""
    return Records(tuple(group_of(nodes) for nodes in site.nodes))


def group_of(nodes: Nodes) -> Group:
    """The group of a table [[nodes]]."""
    return Group(
        names=nodes.names,
        gpus={nodes.gpu_type: nodes.gpus},
        lanes=nodes.lanes,
        options=nodes.options,
        gpu_lines=whole_gpu_lines(nodes, nodes.names),
    )


def whole_gpu_lines(nodes: Nodes, names: str) -> tuple[str, ...]:
    """Lines of gres.conf for whole GPUs, as far as the site file says where they are."""
    if nodes.autodetect:
        return (f"NodeName={names} AutoDetect=nvml",)
    if nodes.device_files:
        return (f"NodeName={names} Name=gpu Type={nodes.gpu_type} File={nodes.device_files}",)
    return ()
