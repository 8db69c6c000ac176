"""Checks of admission: the gate that Slurm does not consume, the places, and the parked node."""

from __future__ import annotations

from collections.abc import Iterator

from hybridsched.slurmfiles.facts import ClusterFacts
from hybridsched.slurmfiles.findings import Finding, Level, critical, nodes_of, ok, some, warning
from hybridsched.slurmfiles.records import gres_counts, gres_not_consumed, words
from hybridsched.slurmfiles.site import Site


def check_fill(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    gate, places = site.fill.gres, site.fill.places
    known = words(facts.setting("GresTypes"))
    if absent := [name for name in (gate, places) if name.lower() not in known]:
        yield critical(
            "fill_gres_type",
            f"GresTypes is {facts.setting('GresTypes') or 'unset'} and lacks {' and '.join(absent)}: "
            "no job can ask for a lane",
            f"add {','.join(absent)} to GresTypes in slurm.conf, then restart slurmctld and the slurmd",
        )
        return
    yield ok("fill_gres_type", f"GresTypes has {gate} and {places}")
    members = [n for n in nodes_of(facts, site.partitions.offline) if n != site.fill.parked_node]
    # A live count of 0 leaves the node's list: all lanes closed, a quiet night. What a node is configured
    # with stands in slurm.conf only, and that Slurm does not consume a GRES too.
    configured = facts.configured_gres
    yield from _without(members, facts, site, places, "place_nodes", configured=False)
    if configured is not None:
        yield from _without(members, facts, site, gate, "fill_nodes", configured=True)
    yield from _consumed(members, facts, site)
    live = {name: gres_counts(facts.nodes[name].get("Gres", "")).get(gate, 0) for name in members}
    if live:
        total = ", ".join(f"{name} {count}" for name, count in sorted(live.items())[:8])
        yield ok("fill_live", f"live count of {gate}: {total}{' ...' if len(live) > 8 else ''}")
    yield from _parked(facts, site)


def _without(
    members: list[str], facts: ClusterFacts, site: Site, gres: str, code: str, *, configured: bool
) -> Iterator[Finding]:
    texts = facts.configured_gres if configured and facts.configured_gres is not None else _live(facts)
    without = sorted(name for name in members if gres not in gres_counts(texts.get(name, "")))
    if not without:
        return
    word = f"{gres}:no_consume:N" if gres == site.fill.gres else f"{gres}:N"
    say = critical if len(without) == len(members) else warning
    yield say(
        code,
        f"{some(without)} of partition {site.partitions.offline} have no {gres}: no offline job starts there",
        f"add {word} to Gres= of their NodeName lines and NodeName=... Name={gres} Count=N to gres.conf, "
        "restart slurmctld and their slurmd",
    )


def _live(facts: ClusterFacts) -> dict[str, str]:
    return {name: row.get("Gres", "") for name, row in facts.nodes.items()}


def _consumed(members: list[str], facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    """A gate that is consumed takes nodes out of service: with jobs on it and another count than at the last
    registration slurmctld calls a node INVAL and drains it."""
    gate = site.fill.gres
    used = {n for n in members if gres_counts(facts.nodes[n].get("GresUsed", "")).get(gate, 0) > 0}
    texts = facts.configured_gres
    if texts is not None:
        used |= {n for n in members if gate in gres_counts(texts.get(n, "")) and not _free(texts[n], gate)}
    if used:
        yield critical(
            "fill_consumed",
            f"{gate} of {some(sorted(used))} is consumed by jobs: when its count changes, slurmctld takes "
            "the node out of service (INVAL) at its next registration",
            f"{gate}:no_consume:N in Gres= of their NodeName lines (`hybridsched slurm render` writes it), "
            "then restart slurmctld",
        )
    elif texts is None:
        yield Finding(
            code="fill_consumed",
            level=Level.UNKNOWN,
            text=f"whether {gate} is no_consume cannot be told: Slurm shows it nowhere, and slurm.conf "
            f"({facts.setting('SLURM_CONF') or 'its place is not known'}) cannot be read here",
            remedy="run the check where slurm.conf can be read, or look yourself and accept the code",
        )
    elif members:
        yield ok("fill_consumed", f"{gate} is not consumed by jobs")


def _free(text: str, gres: str) -> bool:
    return gres in gres_not_consumed(text)


def _parked(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    gate, places = site.fill.gres, site.fill.places
    part, name = site.partitions.offline, site.fill.parked_node
    node = facts.nodes.get(name)
    remedy = (
        f"`NodeName={name} NodeAddr=127.0.0.1 Port=1 Gres=...,{gate}:no_consume:N,{places}:N State=DOWN "
        f"Reason=hybridsched-parked` in slurm.conf (`hybridsched slurm render` writes it) and {name} in the "
        f"Nodes= of {part}, then restart slurmctld"
    )
    if node is None:
        yield critical(
            "parked_node",
            f"there is no parked node {name}: while every lane is closed, sbatch refuses jobs for {gate}",
            remedy,
        )
        return
    problems = []
    if part in facts.partitions and name not in nodes_of(facts, part):
        problems.append(f"is not in partition {part}")
    have = gres_counts(node.get("Gres", ""))
    problems += [f"has no {gres}" for gres in (gate, places) if not have.get(gres)]
    if problems:
        yield critical("parked_node", f"the parked node {name} {' and '.join(problems)}", remedy)
    elif "DOWN" not in node.get("State", "") and "DRAIN" not in node.get("State", ""):
        yield critical(
            "parked_node",
            f"the parked node {name} is {node.get('State', 'in an unknown state')}: jobs would be sent "
            "to it, and it is no machine",
            f"`scontrol update nodename={name} state=down reason=hybridsched-parked`, State=DOWN in "
            "slurm.conf",
        )
    else:
        yield ok("parked_node", f"the parked node {name} is {node['State']} and has {gate} and {places}")
