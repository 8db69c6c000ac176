"""Findings on a live cluster. Pure: facts and the site's wishes in, findings with their remedy out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from hybridsched.slurmfiles import check_fill, check_limits, check_machines, check_modes, check_rules
from hybridsched.slurmfiles.facts import ClusterFacts
from hybridsched.slurmfiles.findings import WORST_FIRST, Finding, Level, exit_status
from hybridsched.slurmfiles.modes import ModeRecord
from hybridsched.slurmfiles.site import Site

__all__ = ["Finding", "Level", "examine", "exit_status"]


def examine(
    facts: ClusterFacts, site: Site, records: Sequence[ModeRecord] | None = None, *, way: str = "records"
) -> list[Finding]:
    """Every finding, worst first. Codes that the site accepts are turned into ok.

    `records`: the node records of hosts with modes; `way`: how these change (`modes.way`).
    """
    if records:
        facts = replace(facts, resting=check_modes.resting(facts, records))
    found = [finding for check in _CHECKS for finding in check(facts, site)]
    if records:
        found += check_modes.check_modes(facts, site, records, way)
    accepted = set(site.check.accept)
    found = [
        msgspec.structs.replace(f, level=Level.OK, text=f"accepted by the site file: {f.text}", remedy="")
        if f.code in accepted and f.level is not Level.OK
        else f
        for f in found
    ]
    return sorted(found, key=lambda f: WORST_FIRST.index(f.level))


_CHECKS: tuple[Callable[[ClusterFacts, Site], Iterator[Finding]], ...] = (
    check_rules.check_partitions,
    check_rules.check_common_nodes,
    check_rules.check_preemption,
    check_rules.check_user_signal,
    check_rules.check_requeue,
    check_fill.check_fill,
    check_limits.check_places,
    check_limits.check_memory,
    check_limits.check_exempt,
    check_machines.check_hooks,
    check_limits.check_hook_limits,
    check_machines.check_plugins,
    check_machines.check_nodes,
    check_machines.check_sizes,
    check_machines.check_versions,
    check_machines.check_speed,
)
