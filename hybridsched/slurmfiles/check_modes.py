"""Checks of the node records of hosts that change their mode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hybridsched.slurmfiles.facts import ClusterFacts
from hybridsched.slurmfiles.findings import Finding, critical, ok, some, warning
from hybridsched.slurmfiles.modes import ModeRecord, gpu_counts
from hybridsched.slurmfiles.site import Site

_RENDER = (
    "`hybridsched slurm install` with the site file and --policy shows what is to be written; then restart "
    "slurmctld and the slurmd of these hosts"
)


def resting(facts: ClusterFacts, records: Sequence[ModeRecord]) -> frozenset[str]:
    """Records that are out of service while another of their host is in service, as they should be."""
    up = {record.host for record in records if _in_service(facts, record.name)}
    return frozenset(r.name for r in records if r.host in up and not _in_service(facts, r.name))


def check_modes(
    facts: ClusterFacts, site: Site, records: Sequence[ModeRecord], way: str
) -> Iterator[Finding]:
    """Whether Slurm has the records that the policy's modes need, as they need them."""
    names = list(dict.fromkeys(record.name for record in records))
    hosts = list(dict.fromkeys(record.host for record in records))
    found = [
        *_build(facts, names, hosts, way),
        *_missing(facts, names),
        *_gres(facts, records),
        *_partitions(facts, site, names),
        *_states(facts, records, hosts),
        *(
            critical(
                "mode_parts",
                f"no host could be written into mode {mode}: {why}",
                "`hybridsched slurm install` with the site file and --policy puts in place what is written",
            )
            for mode, why in facts.mode_refusals.items()
        ),
    ]
    yield from found or [
        ok(
            "mode_records",
            f"{len(names)} node records of {len(hosts)} hosts are as the policy's modes have them",
        )
    ]


def _build(facts: ClusterFacts, names: list[str], hosts: list[str], way: str) -> Iterator[Finding]:
    if way == "records" and len(names) > len(hosts) and not _multiple(facts):
        yield critical(
            "mode_multiple_slurmd",
            "this build of Slurm has no MULTIPLE_SLURMD, and the policy's hosts have a record for each mode",
            'modes.way = "reconfigure" in the policy and one record for each host, or a build with '
            "--enable-multiple-slurmd (Debian's has it)",
        )


def _multiple(facts: ClusterFacts) -> bool:
    return facts.setting("MULTIPLE_SLURMD").lower() in ("yes", "1")


def _missing(facts: ClusterFacts, names: list[str]) -> Iterator[Finding]:
    if absent := [name for name in names if name not in facts.nodes]:
        yield critical(
            "mode_record_missing",
            f"Slurm has no node {some(absent)}: hosts cannot go into the modes of these records",
            _RENDER,
        )


def _gres(facts: ClusterFacts, records: Sequence[ModeRecord]) -> Iterator[Finding]:
    """A record's GPUs; where it is one record for all modes, they must be those of one of them."""
    wanted: dict[str, list[ModeRecord]] = {}
    for record in records:
        if record.name in facts.nodes:
            wanted.setdefault(record.name, []).append(record)
    for name, those in wanted.items():
        have = gpu_counts(facts.nodes[name].get("Gres", ""))
        if have not in [dict(record.group.gpus) for record in those]:
            modes = " or ".join(
                f"{_said(record.group.gpus)} in mode {', '.join(record.modes)}" for record in those
            )
            yield critical(
                "mode_record_gres", f"node {name} has {_said(have)}; the policy has {modes} there", _RENDER
            )


def _said(gpus: Mapping[str, int]) -> str:
    return (
        ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in gpus.items())
        or "no GPU"
    )


def _partitions(facts: ClusterFacts, site: Site, names: list[str]) -> Iterator[Finding]:
    for part in (site.partitions.online, site.partitions.offline):
        if part not in facts.partitions:
            continue
        there = [n for n in names if n in facts.nodes]
        out = [n for n in there if part not in facts.nodes[n].get("Partitions", "").split(",")]
        if out:
            yield critical(
                "mode_record_partition",
                f"node {some(out)} is not in partition {part}: in its modes no job of that starts",
                f"add it to the Nodes= of {part} in slurm.conf, then `scontrol reconfigure`",
            )


def _states(facts: ClusterFacts, records: Sequence[ModeRecord], hosts: list[str]) -> Iterator[Finding]:
    for host in hosts:
        names = list(dict.fromkeys(r.name for r in records if r.host == host and r.name in facts.nodes))
        up = [name for name in names if _in_service(facts, name)]
        if len(up) > 1:
            yield critical(
                "mode_record_state",
                f"{' and '.join(up)} are in service at once, and they are one machine, {host}: its GPUs "
                "would be given out twice",
                f"end the slurmd of all but one on {host}, then `scontrol update nodename=NAME state=down "
                "reason=...` for these",
            )
        elif len(names) > 1 and not up:
            yield warning(
                "mode_record_state",
                f"no node record of host {host} is in service ({' and '.join(names)} are down)",
                "`hybridsched mode status` says whether it changes its mode just now, or is held and why; "
                "an order (`hybridsched mode switch --to MODE --node HOST`) brings it back",
            )


def _in_service(facts: ClusterFacts, name: str) -> bool:
    state = facts.nodes.get(name, {}).get("State", "DOWN")
    return not re.match(r"DOWN|FUTURE|UNKNOWN|ERROR", state) and "POWERED_DOWN" not in state
