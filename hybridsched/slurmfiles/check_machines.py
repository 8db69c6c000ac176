"""Checks of what the machines have: the hooks, plugins, nodes, releases."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from hybridsched.core.switch_rest import REASON as MODES_REASON
from hybridsched.slurmfiles.facts import ClusterFacts
from hybridsched.slurmfiles.findings import Finding, Level, critical, nodes_of, ok, release, some, warning
from hybridsched.slurmfiles.records import words
from hybridsched.slurmfiles.site import Site

OLDEST = (22, 5)
"""Oldest release of Slurm that was tried."""

_BY_ITSELF = re.compile(
    r"hybridsched|NHC|Not responding|Node unexpectedly|Node unresponsive|Prolog error|Epilog error|"
    r"batch job complete failure|Kill task failed|gres/|Low |Duplicate jobid|[Rr]eboot|Power|none$",
)
"""How reasons begin that this suite, Slurm or a health check writes."""

_REASON = re.compile(r"(?P<why>.*?)\s*\[(?P<who>[^@\[\]]*)@(?P<when>[^\[\]]*)\]$", re.DOTALL)

SLOW_PING_MS = 2000.0
"""An answer of slurmctld that takes longer delays every start of an offline job."""


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
            "SelectType=select/cons_tres and SelectTypeParameters=CR_Core_Memory with DefMemPerCPU=N (else a "
            "job without --mem takes the whole memory), or CR_Core; then restart slurmctld",
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
    here = {*nodes_of(facts, part.online), *nodes_of(facts, part.offline)}
    ours = sorted(here - {site.fill.parked_node} - facts.resting)
    bad = {}
    for name in ours:
        row = facts.nodes[name]
        state = row.get("State", "")
        if re.search(r"DOWN|DRAIN|FAIL|INVAL|NOT_RESPONDING|UNKNOWN", state) or state.endswith("*"):
            bad[name] = f"{name} is {state} ({row.get('Reason', 'no reason given').partition(' [')[0]})"
    drains = {name: said for name in bad if (said := operators_drain(facts, name))}
    for name, said in list(drains.items())[:20]:
        yield warning(
            "node_drained",
            f"{name} is {facts.nodes[name]['State']}: {said}",
            f"none while that is meant; `scontrol update nodename={name} state=resume` puts it back",
        )
    for name, said in [(name, said) for name, said in bad.items() if name not in drains][:20]:
        reason = facts.nodes[name].get("Reason", "")
        if reason.startswith(MODES_REASON):
            remedy = (
                "nothing in Slurm, and no resume, for its GPUs may be cut otherwise: "
                "`hybridsched mode status` says where the host stands; one that is held comes back by "
                "`hybridsched mode switch --to MODE --node HOST`"
            )
        elif "count changed and jobs are using them" in reason:
            remedy = (
                "resume is refused while its jobs are there: "
                f"`scontrol requeue` those of `squeue -w {name}`, "
                "see that the GRES is no_consume in slurm.conf, restart slurmctld, then "
                f"`scontrol update nodename={name} state=resume`"
            )
        elif "count reported lower" in reason:
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
    if ours and len(drains) == len(ours):
        yield warning(
            "no_node",
            "every node of the pool was taken out by an operator: no work runs",
            "none while that is meant; the warnings on each say who did it and how it comes back",
        )
    elif ours and len(bad) == len(ours):
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


def operators_drain(facts: ClusterFacts, node: str) -> str:
    """Who took a node out of service, when and why; empty where it was not an operator, as far as that shows.

    Slurm shows the reason only: one that begins like those of Slurm, of a health check or of this suite, or
    that an unprivileged SlurmUser has set, is not an operator's.
    """
    row = facts.nodes[node]
    found = _REASON.match(row.get("Reason", ""))
    if found is None or "INVAL" in row.get("State", "") or not re.search("DRAIN|DOWN", row.get("State", "")):
        return ""
    who = found["who"]
    if _BY_ITSELF.match(found["why"]) or who == facts.setting("SlurmUser").partition("(")[0] != "root":
        return ""
    when = found["when"]
    if re.fullmatch(r"\d{1,11}", when, re.ASCII):  # SLURM_TIME_FORMAT=%s
        when = datetime.fromtimestamp(int(when), UTC).isoformat()
    return f"{who or 'an operator'} took it out at {when} ({found['why'] or 'no reason given'})"


def check_sizes(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    parked = site.fill.parked_node
    for said in [c for c in facts.complaints if "Sockets" in c][:5]:
        yield warning(
            "node_sizes",
            f"every command of Slurm says: {said}",
            f"in the NodeName line that it means ({parked}, or yours): Sockets=, CoresPerSocket= and "
            "ThreadsPerCore= whose product is CPUs=; a NodeName=DEFAULT line sets them otherwise",
        )


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
