"""The node records of hosts that change their mode: what slurm.conf and gres.conf say of each in each mode.

The site file says what a host is (its words in slurm.conf, its whole GPUs), the policy's modes how its GPUs
are cut. With `way = "records"` a host has a record for each mode, on a port of its own, for only one slurmd
of a host is up at a time. With `way = "reconfigure"` it has one record, and each mode has its parts that are
written in its place (`configure`).

Slices have device files only after the cut (`slurmfiles.mig`): their lines come from Slurm's own detection,
or from what `hybridsched mode gres` printed on the hosts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridsched.core.mig import MODELS, PCI_IDS, Gpu, MigRefusalError, Want, model_of
from hybridsched.core.mig import wants as wants_of
from hybridsched.core.modes import HostGroup, Mode, ModesPolicy, node_name
from hybridsched.slurmfiles.facts import expand
from hybridsched.slurmfiles.findings import some
from hybridsched.slurmfiles.groups import Group, Records, group_of, whole_gpu_lines
from hybridsched.slurmfiles.mig import counts, gres_conf_autodetect
from hybridsched.slurmfiles.records import entries
from hybridsched.slurmfiles.site import Nodes, Site

Devices = Mapping[tuple[str, str], Sequence[str]]
"""Mode and node record -> its GPUs' lines of gres.conf, as `hybridsched mode gres` printed them."""

_PLACES = ("nodeaddr", "nodehostname", "port")
_LAST_PORT = 65_535


@dataclass(frozen=True)
class ModeRecord:
    """A node record of a host, as it is in one mode or in several that are alike."""

    host: str
    modes: tuple[str, ...]
    group: Group

    @property
    def name(self) -> str:
        return self.group.names


def records_of(
    site: Site, modes: ModesPolicy, devices: Devices | None = None, standing: Mapping[str, str] | None = None
) -> Records:
    """The site's records with those of the modes in the place of their hosts'.

    `standing`: host -> the mode in which it is, for `way = "reconfigure"`; else the default mode, or the
    first.

    Raises:
        ValueError: site file and policy do not go together. Says what and what to do.
    """
    every = mode_records(site, modes, devices)
    by_mode = {(record.host, mode): record for record in every for mode in record.modes}
    default = modes.default or modes.mode[0].name
    groups: list[Group] = []
    for nodes in site.nodes:
        hosts = [host for host in expand(nodes.names) if host in modes.all_hosts()]
        if not hosts:
            groups.append(group_of(nodes))
        elif modes.way == "reconfigure":
            at = {host: (standing or {}).get(host, default) for host in hosts}
            groups += [by_mode[host, mode].group for host, mode in at.items()]
        else:
            own = [record for record in every if record.host in hosts]
            groups += _joined(nodes, [r.group for r in own if r.name == r.host])
            groups += [r.group for r in own if r.name != r.host]
    parts = {}
    if modes.way == "reconfigure":
        parts = {
            mode.name: tuple(by_mode[host, mode.name].group for host in modes.all_hosts())
            for mode in modes.mode
        }
    return Records(tuple(groups), parts)


def _joined(nodes: Nodes, groups: list[Group]) -> list[Group]:
    """Records that are called like their hosts in one line, as the site file names them."""
    if [group.names for group in groups] != expand(nodes.names):
        return groups
    if any((g.gpus, g.lanes) != (groups[0].gpus, groups[0].lanes) for g in groups):
        return groups
    lines = tuple(line for group in groups for line in group.gpu_lines)
    shared = whole_gpu_lines(nodes, nodes.names)
    if shared and lines == tuple(line for g in groups for line in whole_gpu_lines(nodes, g.names)):
        lines = shared
    left = tuple(said for group in groups for said in group.unlisted)
    return [replace(groups[0], names=nodes.names, options=nodes.options, gpu_lines=lines, unlisted=left)]


def mode_records(site: Site, modes: ModesPolicy, devices: Devices | None = None) -> tuple[ModeRecord, ...]:
    """Each record of each host of the modes. Raises ValueError as `records_of`."""
    if not modes.mode or not modes.hosts:
        raise ValueError("the policy has no modes, or no hosts for them: see [modes] in docs/modes.md")
    known = [host for nodes in site.nodes for host in expand(nodes.names)]
    if left := [host for host in modes.all_hosts() if host not in known]:
        raise ValueError(
            f"the policy has modes for {some(left)}, and no table [[nodes]] names "
            f"{'it' if len(left) == 1 else 'them'}: add one with names, gpu_type, gpus and options"
        )
    found: list[ModeRecord] = []
    for nodes in site.nodes:
        if hosts := [host for host in expand(nodes.names) if host in modes.all_hosts()]:
            _same(nodes, hosts, modes)
            found += _of_table(nodes, hosts, site, modes, devices or {})
    return tuple(found)


def _same(nodes: Nodes, hosts: list[str], modes: ModesPolicy) -> None:
    """Refuse a table of nodes that are not alike in the policy."""
    if others := [name for name in expand(nodes.names) if name not in hosts]:
        raise ValueError(
            f"of the table [[nodes]] {nodes.names} the policy has modes for {some(hosts)} and not for "
            f"{some(others)}: give these a table of their own"
        )
    groups = {(modes.all_hosts()[host].gpu, modes.all_hosts()[host].gpus) for host in hosts}
    if len(groups) > 1:
        raise ValueError(
            f"the hosts of the table [[nodes]] {nodes.names} have different GPUs in the policy: divide it"
        )
    ((_, count),) = groups
    if count != nodes.gpus:
        raise ValueError(
            f"{nodes.names} have {nodes.gpus} GPUs in the site file and {count} in the policy "
            "(modes.hosts.gpus): correct one"
        )
    if nodes.options is None:
        raise ValueError(
            f"the table [[nodes]] {nodes.names} has no options: give the words of its NodeName line, such as "
            'options = "CPUs=64 RealMemory=1000000", for each mode has a record with them'
        )


def _of_table(
    nodes: Nodes, hosts: list[str], site: Site, modes: ModesPolicy, devices: Devices
) -> Iterator[ModeRecord]:
    group = modes.all_hosts()[hosts[0]]
    gpus = {mode.name: wanted(modes, group, mode) for mode in modes.mode}
    # The record that is called like its host keeps the host's own port.
    templates = sorted(dict.fromkeys(mode.node for mode in modes.mode), key=lambda name: name != "{host}")
    places = _places(nodes, hosts, site)
    ports = [place.port for place in places]
    span = max(ports) - min(ports) + 1
    for number, host in enumerate(hosts):
        done: dict[str, list[str]] = {}
        for mode in modes.mode:
            key = mode.name if modes.way == "reconfigure" else mode.node
            done.setdefault(key, []).append(mode.name)
        for names in done.values():
            mode = next(one for one in modes.mode if one.name == names[0])
            shift = templates.index(mode.node) * span
            place, name = places[number], node_name(mode, host)
            made = Group(
                names=name,
                gpus=counts(gpus[mode.name], nodes.gpu_type),
                lanes=nodes.fill or max(1, sum(counts(gpus[mode.name], nodes.gpu_type).values())),
                options=place.words(name, host, shift),
                of_modes=True,
            )
            lines, unlisted = _gpu_lines(nodes, made, mode, gpus[mode.name], devices, names, host)
            yield ModeRecord(host, tuple(names), replace(made, gpu_lines=lines, unlisted=unlisted))


# -- where a record's slurmd listens ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """What slurm.conf says of one host, the lists of the table resolved."""

    address: str
    hostname: str
    port: int
    given_port: bool
    rest: str

    def words(self, name: str, host: str, shift: int) -> str:
        """The words of a record of the host whose port is `shift` above the host's own."""
        port = self.port + shift
        if port > _LAST_PORT:
            raise ValueError(f"the record {name} would listen on port {port}: choose lower ports in options")
        hostname = self.hostname or (host if name != host else "")
        found = [f"NodeHostname={hostname}"] if hostname else []
        found += [f"NodeAddr={self.address}"] if self.address else []
        found += [f"Port={port}"] if shift or self.given_port else []
        return " ".join([*found, self.rest]).strip()


def _places(nodes: Nodes, hosts: list[str], site: Site) -> list[_Place]:
    words = [word.partition("=") for word in (nodes.options or "").split()]
    given = {key.lower(): expand(value) for key, _, value in words if key.lower() in _PLACES}
    rest = " ".join(f"{key}{sign}{value}" for key, sign, value in words if key.lower() not in _PLACES)
    for key, values in given.items():
        if len(values) not in (1, len(hosts)):
            raise ValueError(
                f"{key} in the options of the table [[nodes]] {nodes.names} has {len(values)} values for "
                f"{len(hosts)} hosts"
            )

    def pick(key: str, number: int) -> str:
        values = given.get(key, [""])
        return values[number if len(values) > 1 else 0]

    found = []
    for number in range(len(hosts)):
        port = pick("port", number)
        if port and not port.isdigit():
            raise ValueError(f"Port={port} in the options of the table [[nodes]] {nodes.names} is no number")
        found.append(
            _Place(
                address=pick("nodeaddr", number),
                hostname=pick("nodehostname", number),
                port=int(port) if port else site.slurm.slurmd_port,
                given_port=bool(port),
                rest=rest,
            )
        )
    return found


# -- what a host has in a mode ---------------------------------------------------------------------------


def wanted(modes: ModesPolicy, group: HostGroup, mode: Mode) -> tuple[Want, ...]:
    """What each GPU of a host is in a mode.

    A GPU that the mode's layout does not name is as the other modes leave it; where none names it, whole.
    Raises ValueError where that depends on which mode was before.
    """
    own = _named(modes, group, mode.layout)
    others = [_named(modes, group, other.layout) for other in modes.mode]
    found = []
    for gpu in range(group.gpus):
        if gpu in own:
            found.append(own[gpu])
            continue
        left = {_shape(other[gpu]): other[gpu] for other in others if gpu in other}
        if len(left) > 1:
            raise ValueError(
                f"mode {mode.name} does not say how GPU {gpu} of {group.names} is cut, and the other modes "
                "cut it differently: name it in the mode's layout"
            )
        found += list(left.values()) or [Want(enabled=False)]
    return tuple(found)


def _named(modes: ModesPolicy, group: HostGroup, label: str) -> dict[int, Want]:
    """GPU -> what a layout wants of it; without the GPUs that it does not name."""
    layout = modes.mig_configs.get(label, ())
    model = group.gpu if group.gpu in MODELS else model_of(group.gpu)
    found: dict[tuple[object, ...], dict[int, Want]] = {}
    for board in PCI_IDS[model] if model is not None else (0,):
        gpus = [Gpu(index=i, uuid="", name=group.gpu, pci_id=board) for i in range(group.gpus)]
        try:
            told = wants_of(layout, gpus)
        except MigRefusalError as error:
            raise ValueError(f"layout {label} on {group.names}: {error}") from error
        if told:
            found[tuple((gpu, _shape(want)) for gpu, want in sorted(told.items()))] = told
    if len(found) > 1:
        raise ValueError(
            f"layout {label} cuts the boards of {model} differently by device-filter, and which board "
            f"{group.names} have is not known here: give it an entry for all of them"
        )
    return next(iter(found.values()), {})


def _shape(want: Want) -> tuple[object, ...]:
    return want.enabled, tuple(sorted(piece.profile for piece in want.pieces))


def _gpu_lines(
    nodes: Nodes,
    record: Group,
    mode: Mode,
    wants: Sequence[Want],
    devices: Devices,
    names: Sequence[str],
    host: str,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The record's lines of GPUs for gres.conf, and what is to be done where they are not known."""
    listed = next((devices[name, record.names] for name in names if (name, record.names) in devices), None)
    if listed is not None:
        _as_counted(record, mode, listed)
        return tuple(listed), ()
    if nodes.autodetect:
        return (gres_conf_autodetect(record.names, wants, nodes.gpu_type).rstrip("\n"),), ()
    if not any(want.enabled for want in wants) and (lines := whole_gpu_lines(nodes, record.names)):
        return lines, ()
    if not record.gpus:
        return (), ()
    how = f"cut as layout {mode.layout}" if mode.layout else "as it is"
    return (), (
        f"GPUs of {record.names}: on {host}, {how}, run `hybridsched mode gres --node {record.names} "
        f"--gpu-type {nodes.gpu_type} > DEVICES/{mode.name}/{record.names}.conf` and render with "
        "--devices DEVICES",
    )


def _as_counted(record: Group, mode: Mode, lines: Sequence[str]) -> None:
    """Refuse lines that say other GPUs than the mode has."""
    said: Counter[str] = Counter()
    for entry in entries("\n".join(lines)):
        low = {key.lower(): value for key, value in entry.fields.items()}
        if low.get("autodetect", "").lower() == "nvml":
            return
        if low.get("name") == "gpu":
            said[low.get("type", "")] += len(expand(low["file"])) if "file" in low else 1
    if said != Counter(record.gpus):
        raise ValueError(
            f"the lines of {record.names} in mode {mode.name} have {_counted(said)}, and the mode has "
            f"{_counted(record.gpus)}: was it cut otherwise when `hybridsched mode gres` ran?"
        )


def _counted(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(gpus.items())) or "no GPU"


def standing_modes(site: Site, modes: ModesPolicy, gres: Mapping[str, str]) -> dict[str, str]:
    """Host -> the mode in which it is by the GPUs of its only record; hosts of which that cannot be told are
    left out. `gres`: node record -> its Gres= in slurm.conf, or as Slurm shows it."""
    if modes.way != "reconfigure":
        return {}
    fitting: dict[str, list[str]] = {}
    for record in mode_records(site, modes):
        if gpu_counts(gres.get(record.name, "")) == dict(record.group.gpus):
            fitting.setdefault(record.host, []).extend(record.modes)
    return {host: names[0] for host, names in fitting.items()}


def gpu_counts(gres: str) -> dict[str, int]:
    """Type -> count of the GPUs in a Gres=, `gpu:a100:2,gpu:1g.10gb:7(S:0),hsfill:4`."""
    found: Counter[str] = Counter()
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = part.strip().split(":")
        if name == "gpu":
            count = int(words.pop()) if words and words[-1].isdecimal() else 1
            found[words[0] if words else ""] += count
    return {kind: count for kind, count in found.items() if count}


def parse_devices(mode: str, text: str, into: dict[tuple[str, str], list[str]]) -> None:
    """Add the lines of a file that `hybridsched mode gres` printed on a host that was cut as the mode."""
    lines = text.split("\n")
    for entry in entries(text):
        if entry.key.lower() == "nodename":
            into.setdefault((mode, entry.value), []).append(" ".join(lines[entry.first : entry.last + 1]))
