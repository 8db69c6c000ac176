"""Checks of what the machines have: the fill GRES, the hooks, plugins, nodes, releases."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridsched.slurmfiles.facts import ClusterFacts
from hybridsched.slurmfiles.findings import Finding, Level, critical, nodes_of, ok, release, some, warning
from hybridsched.slurmfiles.records import gres_counts, words
from hybridsched.slurmfiles.site import Site

OLDEST = (22, 5)
"""Oldest release of Slurm that was tried."""

SLOW_PING_MS = 2000.0
"""An answer of slurmctld that takes longer delays every start of an offline job."""


def check_fill(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    gres, part = site.fill.gres, site.partitions.offline
    if gres not in words(facts.setting("GresTypes")):
        yield critical(
            "fill_gres_type",
            f"GresTypes is {facts.setting('GresTypes') or 'unset'} and lacks {gres}: no job can ask "
            "for a lane",
            f"add {gres} to GresTypes in slurm.conf, then restart slurmctld and the slurmd",
        )
        return
    yield ok("fill_gres_type", f"GresTypes has {gres}")
    members = [name for name in nodes_of(facts, part) if name != site.fill.parked_node]
    counts = {name: gres_counts(facts.nodes[name].get("Gres", "")).get(gres) for name in members}
    without = sorted(name for name, count in counts.items() if count is None)
    if without and members:
        say = critical if len(without) == len(members) else warning
        yield say(
            "fill_nodes",
            f"{some(without)} of partition {part} have no {gres}: no lane of theirs can be opened",
            f"add {gres}:N to Gres= of their NodeName lines and NodeName=... Name={gres} Count=N to "
            "gres.conf, "
            f"restart slurmctld and their slurmd",
        )
    live = {name: count for name, count in counts.items() if count is not None}
    if live:
        total = ", ".join(f"{name} {count}" for name, count in sorted(live.items())[:8])
        yield ok("fill_live", f"live count of {gres}: {total}{' ...' if len(live) > 8 else ''}")
    yield from _parked(facts, site)


def _parked(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    gres, part, name = site.fill.gres, site.partitions.offline, site.fill.parked_node
    node = facts.nodes.get(name)
    remedy = (
        f"`NodeName={name} NodeAddr=127.0.0.1 Port=1 Gres=...,{gres}:N State=DOWN "
        "Reason=hybridsched-parked` in "
        f"slurm.conf (`hybridsched slurm render` writes it) and {name} in the Nodes= of {part}"
    )
    if node is None:
        yield critical(
            "parked_node",
            f"there is no parked node {name}: while every lane is closed, sbatch refuses jobs for {gres}",
            remedy,
        )
        return
    problems = []
    if part in facts.partitions and name not in nodes_of(facts, part):
        problems.append(f"is not in partition {part}")
    if gres not in gres_counts(node.get("Gres", "")):
        problems.append(f"has no {gres}")
    if problems:
        yield critical("parked_node", f"the parked node {name} {' and '.join(problems)}", remedy)
    elif "DOWN" not in node.get("State", "") and "DRAIN" not in node.get("State", ""):
        yield critical(
            "parked_node",
            f"the parked node {name} is {node.get('State', 'in an unknown state')}: jobs would be sent "
            "to it, and it "
            f"is no machine",
            f"`scontrol update nodename={name} state=down reason=hybridsched-parked`, State=DOWN in "
            "slurm.conf",
        )
    else:
        yield ok("parked_node", f"the parked node {name} is {node['State']} and has {gres}")


def check_hooks(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    part = site.partitions.offline
    if "lua" not in words(facts.setting("JobSubmitPlugins")):
        yield critical(
            "job_submit",
            f"JobSubmitPlugins is {facts.setting('JobSubmitPlugins') or 'unset'}: offline jobs are "
            "taken without what "
            f"they need to give their GPU back",
            "JobSubmitPlugins=lua in slurm.conf and job_submit.lua beside it, then `scontrol reconfigure`",
        )
    elif facts.refusal is None:
        if part in facts.partitions:
            yield Finding(
                code="job_submit",
                level=Level.UNKNOWN,
                text="whether job_submit.lua is loaded could not be tried: sbatch --test-only gave no answer",
                remedy="run the check where sbatch works, as a user who may submit",
            )
    elif facts.accepted or "hybridsched" not in facts.refusal:
        said = "was accepted" if facts.accepted else f"was refused by something else ({facts.refusal[:120]})"
        yield critical(
            "job_submit",
            f"a job of partition {part} without what it needs {said}: job_submit.lua is not this "
            "site's, or has not "
            f"loaded",
            "put the rendered job_submit.lua beside slurm.conf on slurmctld's machine and look for `lua` in "
            "slurmctld's log",
        )
    else:
        yield ok("job_submit", "job_submit.lua refuses an offline job that lacks what it needs")
    for name in ("Prolog", "Epilog"):
        if not facts.setting(name):
            yield warning(
                name.lower(),
                f"{name} is unset: "
                + (
                    "a broken GPU is found by the job"
                    if name == "Prolog"
                    else "what a job leaves holds the GPU"
                ),
                f"{name}={site.slurm.etc}/{name.lower()}.sh in slurm.conf, then `scontrol reconfigure`",
            )
    if facts.setting("Prolog") and "nohold_on_prolog_fail" not in words(facts.setting("SchedulerParameters")):
        yield warning(
            "prolog_hold",
            "SchedulerParameters lacks nohold_on_prolog_fail: the job of a node with a broken GPU is "
            "held instead of "
            "going to another",
            "add nohold_on_prolog_fail to SchedulerParameters, then `scontrol reconfigure`",
        )
    if site.jobs.append_is_default and facts.setting("JobFileAppend") != "1":
        yield critical(
            "job_file_append",
            "JobFileAppend is not 1 although jobs.append_is_default says so: a second run empties the "
            "job's log",
            "JobFileAppend=1 in slurm.conf, or append_is_default = false in the site file",
        )


def check_plugins(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    if (select := facts.setting("SelectType")) not in ("select/cons_tres", "select/cons_res"):
        yield critical(
            "select_type",
            f"SelectType is {select or 'unset'}: whole nodes are given out, and offline never runs "
            "beside online",
            "SelectType=select/cons_tres and SelectTypeParameters=CR_Core_Memory, then restart slurmctld",
        )
    if (track := facts.setting("ProctrackType")) != "proctrack/cgroup":
        yield warning(
            "proctrack",
            f"ProctrackType is {track or 'unset'}: engine processes can outlive their job and hold the GPU",
            "ProctrackType=proctrack/cgroup and TaskPlugin=task/cgroup, ConstrainDevices=yes in cgroup.conf",
        )
    if facts.setting("MULTIPLE_SLURMD").lower() not in ("yes", "1"):
        yield warning(
            "multiple_slurmd",
            "this build of Slurm has no MULTIPLE_SLURMD: a node changes its shape by way of a "
            "reconfigure, in "
            "seconds instead of tenths",
            "nothing, or a build with --enable-multiple-slurmd (Debian's has it)",
        )
    else:
        yield ok("multiple_slurmd", "this build has MULTIPLE_SLURMD")


def check_nodes(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    part = site.partitions
    ours = sorted({*nodes_of(facts, part.online), *nodes_of(facts, part.offline)} - {site.fill.parked_node})
    bad = {}
    for name in ours:
        row = facts.nodes[name]
        state = row.get("State", "")
        if re.search(r"DOWN|DRAIN|FAIL|INVAL|NOT_RESPONDING|UNKNOWN", state) or state.endswith("*"):
            bad[name] = f"{name} is {state} ({row.get('Reason', 'no reason given').partition(' [')[0]})"
    for name, said in list(bad.items())[:20]:
        reason = facts.nodes[name].get("Reason", "")
        if "count reported lower" in reason:
            remedy = (
                f"`slurmd -G` on {name} shows what it has: make its lines in gres.conf and slurm.conf "
                "agree, restart "
                f"slurmd, then `scontrol update nodename={name} state=resume`"
            )
        elif "Prolog error" in reason:
            remedy = (
                f"look for `prolog` in syslog of {name} (or node.log), repair the GPU, then "
                f"`scontrol update nodename={name} state=resume`"
            )
        else:
            remedy = f"see its slurmd's log; `scontrol update nodename={name} state=resume` when it is well"
        yield warning("node_state", said, remedy)
    if ours and len(bad) == len(ours):
        yield critical("no_node", "no node of the pool is up", "see the warnings on each")
    elif ours:
        yield ok("node_state", f"{len(ours) - len(bad)} of {len(ours)} nodes are up")
    for device in [d for d in facts.devices if d.problem][:20]:
        yield critical(
            "device_file",
            f"gres.conf of {device.node} names {device.path}: {device.problem}",
            "load the driver (`nvidia-smi`, `nvidia-modprobe -u -c=0`), or correct File= in "
            "gres.conf, and restart slurmd",
        )
    if facts.devices and not any(d.problem for d in facts.devices):
        yield ok("device_file", f"{len(facts.devices)} device files of gres.conf are there")


def check_versions(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    controller = facts.setting("SLURM_VERSION")
    running = release(controller)
    if running is None:
        return
    if running < OLDEST:
        yield critical(
            "version",
            f"slurmctld is {controller}; {OLDEST[0]}.{OLDEST[1]:02} is the oldest that was tried",
            "update Slurm",
        )
    if running != site.slurm.release and site.nodes:
        yield warning(
            "version_site",
            f"slurmctld is {controller} and the site file says {site.slurm.version}: settings may "
            "stand in the wrong "
            f"place",
            f'slurm.version = "{running[0]}.{running[1]:02}" in the site file, then render again',
        )
    client = release(facts.client)
    if client is not None and client > running:
        yield critical(
            "version_client",
            f"the commands here are {facts.client}, newer than slurmctld {controller}",
            "update slurmctld first, then the nodes, then the clients",
        )
    seen: dict[str, list[str]] = {}
    for name, row in facts.nodes.items():
        if version := row.get("Version", ""):
            seen.setdefault(version, []).append(name)
    for version, names in sorted(seen.items()):
        node = release(version)
        if node is not None and node > running:
            yield critical(
                "version_node",
                f"slurmd of {some(names)} is {version}, newer than slurmctld {controller}",
                "update slurmctld first: a slurmd must not be newer",
            )
    if len(seen) > 1:
        mix = ", ".join(f"{version} on {len(names)}" for version, names in sorted(seen.items()))
        yield warning(
            "version_mix", f"the nodes run different releases: {mix}", "finish the update of the nodes"
        )
    yield ok(
        "version",
        f"slurmctld {controller}, commands {facts.client}, nodes {', '.join(sorted(seen)) or 'none'}",
    )


def check_speed(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    del site
    if facts.ping_ms > SLOW_PING_MS:
        yield warning(
            "slow",
            f"slurmctld took {facts.ping_ms / 1000:.1f} s to answer: offline jobs start and leave late",
            "`sdiag` shows what it does; see SchedulerParameters (defer, bf_interval)",
        )
