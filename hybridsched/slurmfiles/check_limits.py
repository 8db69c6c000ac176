"""Checks of limits and sizes that let everything start and something wait for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hybridsched.slurmfiles.facts import ClusterFacts
from hybridsched.slurmfiles.findings import Finding, critical, nodes_of, number, ok, some, warning
from hybridsched.slurmfiles.records import gres_counts
from hybridsched.slurmfiles.site import Site

EPILOG_LIMIT_S = 40
"""The bound that epilog.sh gives itself (LIMIT_S there)."""

LONGEST_EXEMPT_S = 60
"""Online waits that long for a GPU that an offline job has just taken; more is no giving back."""

SHORTEST_EXEMPT_S = 3
"""A node under load takes that long from a job's start to the first line of its script."""

_DEF_MEM = ("DefMemPerCPU", "DefMemPerNode", "DefMemPerGPU")


def check_memory(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    """Where Slurm counts memory, a job that names none takes its node's whole."""
    parameters = facts.setting("SelectTypeParameters")
    if "MEMORY" not in parameters.upper():
        return
    cluster = {name: facts.setting(name) for name in (*_DEF_MEM, "JobDefaults")}
    without = [
        name
        for name in (site.partitions.online, site.partitions.offline)
        if name in facts.partitions and not (_has_default(facts.partitions[name]) or _has_default(cluster))
    ]
    if without:
        yield critical(
            "default_memory",
            f"SelectTypeParameters is {parameters} and {' and '.join(without)} have no default for "
            "memory: a job without --mem takes its node's whole memory, and what should run beside it "
            "waits for ever",
            "DefMemPerCPU=N (RealMemory / CPUs of a node, in MB) in slurm.conf, then `scontrol reconfigure`; "
            "or --mem in every batch script, replicas' too",
        )
    else:
        yield ok("default_memory", "a job that names no memory takes a part of its node's")


def _has_default(row: Mapping[str, str]) -> bool:
    if "DefMemPerGPU" in row.get("JobDefaults", ""):
        return True
    return any((number(row.get(name, "")) or 0) > 0 for name in _DEF_MEM)


def check_exempt(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    """How long a started job may not be preempted."""
    del site
    text = facts.setting("PreemptExemptTime")
    seconds = _span_s(text)
    if seconds > LONGEST_EXEMPT_S:
        yield critical(
            "preempt_exempt",
            f"PreemptExemptTime is {text}: an offline job gives its GPU back only that long after its start",
            "PreemptExemptTime=00:00:05 in slurm.conf, then `scontrol reconfigure`",
        )
    elif seconds < SHORTEST_EXEMPT_S:
        yield warning(
            "preempt_exempt",
            f"PreemptExemptTime is {text or 'unset'}: a job that is preempted before its script can hear "
            "the signal fails instead of going back to the queue, or keeps its GPU until GraceTime is over",
            "PreemptExemptTime=00:00:05 in slurm.conf, then `scontrol reconfigure`",
        )


def _span_s(text: str) -> int:
    """Seconds of `1-00:00:00`, `00:10:00`; 0 of a word for none."""
    found = re.fullmatch(r"(?:([0-9]{1,6})-)?([0-9]{1,6}):([0-9]{1,6}):([0-9]{1,6})", text)
    if found is None:
        return number(text) or 0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_hook_limits(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    """Whether the hooks are there, and may run as long as they need."""
    for hook in facts.hooks:
        if hook.problem is not None:
            yield critical(
                f"{hook.name.lower()}_path",
                f"{hook.name} is {hook.path}, and on this node that {hook.problem}: slurmd drains the node "
                "at the next job",
                f"put it there on every node (`hybridsched slurm install` writes {site.slurm.etc}/"
                f"{hook.name.lower()}.sh), or correct {hook.name} in slurm.conf and `scontrol reconfigure`",
            )
    limit = number(facts.setting("PrologEpilogTimeout"))
    if facts.setting("Epilog") and limit is not None and limit <= EPILOG_LIMIT_S:
        yield warning(
            "hook_timeout",
            f"PrologEpilogTimeout is {limit} s and epilog.sh may take {EPILOG_LIMIT_S} s: slurmd ends it "
            "half way and drains the node",
            "PrologEpilogTimeout=120 in slurm.conf, then `scontrol reconfigure`",
        )


def check_places(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    """Whether each lane that may open has a place."""
    gate, places = site.fill.gres, site.fill.places
    configured = facts.configured_gres or {}
    fewer = []
    for node in sorted({*nodes_of(facts, site.partitions.offline), site.fill.parked_node} & set(configured)):
        counts = gres_counts(configured[node])
        if gate in counts and places in counts and counts[places] < counts[gate]:
            fewer.append(f"{node} ({places} {counts[places]}, {gate} {counts[gate]})")
    if fewer:
        yield warning(
            "places_fewer",
            f"{some(fewer)}: lanes beyond the places never get a job",
            f"give {places} the count of {gate} in Gres= of their NodeName lines and in gres.conf, restart "
            "slurmctld and their slurmd",
        )
