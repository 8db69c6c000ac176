"""Site file in, files for Slurm out. Pure but for the hooks' text, which comes with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from hybridsched.slurmfiles.groups import Group, Records, plain
from hybridsched.slurmfiles.site import Site

CLUSTER = "hybridsched-cluster.conf"
RECORDS = "hybridsched-partitions.conf"
GRES = "hybridsched-gres.conf"
NODE = "hybridsched-node.conf"
LUA = "job_submit.lua"
HOOKS = ("prolog.sh", "epilog.sh")
EXECUTABLE = frozenset(HOOKS)

LISTS = frozenset({"GresTypes", "JobSubmitPlugins", "SlurmctldParameters", "PreemptParameters",
                   "SchedulerParameters", "AuthInfo"})  # fmt: skip
"""Settings whose value is a list that a site has words of its own in."""

HOOK_SETTINGS = frozenset({"Prolog", "Epilog"})
KEPT = HOOK_SETTINGS | {"PrologEpilogTimeout"}
"""Settings where a site's own value stays: another program may stand there."""

_BEGIN, _END = "-- site: begin", "-- site: end"
USER_SIGNAL_MOVED = (23, 2)
"""From this release the switch for the user's own signal at preemption stands in PreemptParameters."""


def source_folder() -> Path:
    """The folder of job_submit.lua and the hooks: in the installed package, or a checkout's slurm/."""
    here = Path(__file__).resolve().parent
    for folder in (here / "slurm", here.parent.parent / "slurm"):
        if (folder / LUA).is_file():
            return folder
    raise FileNotFoundError(
        f"{LUA} and the hooks did not come with this installation of hybridsched; install it again"
    )


def cluster_settings(site: Site) -> dict[str, str]:
    """What the whole cluster needs in slurm.conf, in the order it is written."""
    etc = site.slurm.etc.rstrip("/")
    found = {
        "GresTypes": f"gpu,{site.fill.gres},{site.fill.places}",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "PreemptExemptTime": "00:00:05",
        "JobRequeue": "1",
        "KillWait": str(site.slurm.kill_wait_s),
        "JobSubmitPlugins": "lua",
        "Prolog": f"{etc}/prolog.sh",
        "Epilog": f"{etc}/epilog.sh",
        "PrologEpilogTimeout": "120",
        "SchedulerParameters": "nohold_on_prolog_fail",
    }
    if site.slurm.release >= USER_SIGNAL_MOVED:
        found["PreemptParameters"] = "send_user_signal"
    else:
        found["SlurmctldParameters"] = "preempt_send_user_signal"
    if site.jobs.append_is_default:
        found["JobFileAppend"] = "1"
    if site.slurm.cred_expire_s is not None:
        found["AuthInfo"] = f"cred_expire={site.slurm.cred_expire_s}"
    return found


_SIZES = ("cpus", "procs", "boards", "sockets", "socketsperboard", "corespersocket", "threadspercore",
          "realmemory", "tmpdisk", "feature", "features")  # fmt: skip

_TOPOLOGY = ("boards", "sockets", "socketsperboard", "corespersocket", "threadspercore")

_WHY = {
    "GresTypes": "admission: a gate that jobs do not consume, and places that they do; both without files",
    "PreemptType": "online takes GPUs from offline by the PriorityTier of the partitions",
    "PreemptMode": "an offline job goes back to the queue; SUSPEND would free neither GRES nor GPU memory",
    "PreemptExemptTime": "a signal before a job's script can hear it would be lost, or the end of the job",
    "JobRequeue": "jobs may be requeued unless they say otherwise",
    "KillWait": "s between SIGTERM and SIGKILL",
    "JobSubmitPlugins": "job_submit.lua stands beside slurm.conf on slurmctld's machine",
    "Prolog": "proves the GPU usable",
    "Epilog": "frees what a job left",
    "PrologEpilogTimeout": "s: both are bounded by themselves; this is the second net",
    "SchedulerParameters": "a job whose node fails its prolog goes to another instead of being held",
    "PreemptParameters": "a preempted job gets the signal that it asked for",
    "SlurmctldParameters": "a preempted job gets the signal that it asked for",
    "JobFileAppend": "a second run goes on in the job's log",
    "AuthInfo": "s that a requeued job waits; read at the start of slurmctld, not by reconfigure",
}


def part_names(mode: str) -> tuple[str, str]:
    """The files of a mode whose records are written in the place of others: for slurm.conf, for gres.conf."""
    return f"hybridsched-mode-{mode}-nodes.conf", f"hybridsched-mode-{mode}-gres.conf"


def group_gres(site: Site, group: Group) -> str:
    """The Gres= of a group's NodeName line."""
    gpus = [f"gpu:{kind}:{count}" for kind, count in group.gpus.items()]
    return ",".join([*gpus, _admission(site, group.lanes)])


def _admission(site: Site, lanes: int) -> str:
    """The gate and the places. A gate that is consumed takes nodes out of service when its count changes."""
    return f"{site.fill.gres}:no_consume:{lanes},{site.fill.places}:{lanes}"


def partition_fields(site: Site, groups: Sequence[Group]) -> dict[str, dict[str, str]]:
    """Name of each partition -> its fields."""
    part = site.partitions
    hosts = [group.names for group in groups]
    return {
        part.online: {
            "Nodes": ",".join(hosts),
            "MaxTime": "INFINITE",
            "State": "UP",
            "PriorityTier": str(part.online_tier),
            "PreemptMode": "OFF",
        },
        part.offline: {
            "Nodes": ",".join([*hosts, site.fill.parked_node]),
            "MaxTime": part.offline_max_time,
            "State": "UP",
            "PriorityTier": str(part.offline_tier),
            "PreemptMode": "REQUEUE",
            "GraceTime": str(part.grace_s),
        },
    }


SCRIPTS = ("offline.sbatch", "own.sbatch", "online.sbatch")


def batch_scripts(site: Site) -> dict[str, str]:
    """Batch scripts with the site's own names in their #SBATCH lines, for its users."""
    here = Path(__file__).resolve().parent
    folders = (here / "workers", here.parent.parent / "workers")
    found = {}
    for name in SCRIPTS:
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            raise FileNotFoundError(
                f"workers/{name} did not come with this installation of hybridsched; install it again"
            )
        online = name == "online.sbatch"
        part, jobs = site.partitions, site.jobs
        options = {"partition": part.online if online else part.offline}
        if not online:
            options["gres"] = f"{site.fill.gres}:1,{site.fill.places}:1"
            options["signal"] = f"B:{jobs.signal}@{jobs.notice_s}"
        text = path.read_text(encoding="utf-8")
        for key, value in options.items():
            text, count = re.subn(
                rf"^#SBATCH --{key}=.*$", f"#SBATCH --{key}={value}", text, flags=re.MULTILINE
            )
            if count != 1:
                raise ValueError(f"workers/{name} has {count} lines #SBATCH --{key}: not this release's")
        found[name] = text
    return found


def render(site: Site, records: Records | None = None, *, present: Collection[str] = ()) -> dict[str, str]:
    """File name -> text of every file of the site.

    `records`: its node records where hosts have modes (`modes.records_of`); None: those of the site file.
    `present` names nodes (as the site file writes them) and partitions whose records slurm.conf has itself:
    Slurm takes each once, so they are left out here. Raises ValueError when the site names no nodes.
    """
    if not site.nodes:
        raise ValueError("the site file names no nodes: add a [[nodes]] table with names, gpu_type and gpus")
    folder = source_folder()
    records = records or plain(site)
    files = {
        CLUSTER: _cluster(site),
        RECORDS: _records(site, records, present),
        GRES: _gres(site, records.groups),
        NODE: _node(site),
        LUA: _lua(site, records, (folder / LUA).read_text(encoding="utf-8")),
    }
    for mode, groups in records.parts.items():
        for_nodes, for_gres = part_names(mode)
        files[for_nodes] = _head(f"Nodes in mode {mode}, for `hybridsched slurm configure`.") + "".join(
            f"{_node_line(site, group)}\n" for group in groups
        )
        files[for_gres] = _gres(site, groups, f"GRES of the nodes in mode {mode}, for the same.")
    return files | {name: (folder / name).read_text(encoding="utf-8") for name in HOOKS}


def _head(what: str) -> str:
    return f"# {what}\n# Written by `hybridsched slurm render`: change the site file and render again.\n\n"


def _cluster(site: Site) -> str:
    lines = [f"# {_WHY[key]}\n{key}={value}\n" for key, value in cluster_settings(site).items()]
    return _head("Settings of the whole cluster, for slurm.conf itself.") + "\n".join(lines)


def _node_line(site: Site, group: Group) -> str:
    return (
        f"NodeName={group.names} Gres={group_gres(site, group)} State=UNKNOWN {group.options or ''}".rstrip()
    )


def _records(site: Site, records: Records, present: Collection[str]) -> str:
    out = [_head("Nodes and partitions. In slurm.conf, at its end:  Include " + RECORDS).rstrip()]
    for group in records.groups:
        if group.options is not None and group.names not in present:
            out.append(_node_line(site, group))
        else:
            out.append(f"# In the NodeName line of {group.names}:  Gres={group_gres(site, group)}")
    # Of each GPU type the parked node has what the largest node has: every job that fits somewhere is valid.
    most: dict[str, int] = {}
    for group in records.every:
        most |= {kind: max(most.get(kind, 0), count) for kind, count in group.gpus.items()}
    gres = [f"gpu:{name}:{count}" for name, count in most.items()]
    gres.append(_admission(site, max(group.lanes for group in records.every)))
    out.append(
        "\n# No machine: with its count, jobs that ask for a lane stay valid while no lane is open "
        "anywhere.\n"
        f"NodeName={site.fill.parked_node} NodeAddr=127.0.0.1 Port=1 {_size(site)} "
        f"Gres={','.join(gres)} State=DOWN Reason=hybridsched-parked\n"
    )
    for name, fields in partition_fields(site, records.groups).items():
        if name not in present:
            out.append(f"PartitionName={name} " + " ".join(f"{k}={v}" for k, v in fields.items()))
    return "\n".join(out) + "\n"


def _size(site: Site) -> str:
    """CPUs and memory of the parked node: those of the node with most GPUs, or more than any node has."""
    largest = max(site.nodes, key=lambda group: group.gpus)
    pairs = [word for word in (largest.options or "").split() if word.partition("=")[0].lower() in _SIZES]
    if not pairs:
        pairs = ["CPUs=1024", "RealMemory=16777216"]
    # Without these a site's NodeName=DEFAULT Sockets=... fits no CPUs=, and every command says so.
    if not any(word.partition("=")[0].lower() in _TOPOLOGY for word in pairs):
        cpus = next((w.partition("=")[2] for w in pairs if w.lower().startswith("cpus=")), "1")
        after = next((i for i, w in enumerate(pairs) if w.lower().startswith("cpus=")), -1) + 1
        pairs[after:after] = ["Sockets=1", f"CoresPerSocket={cpus}", "ThreadsPerCore=1"]
    return " ".join(pairs)


_GRES_HEAD = "GRES of the nodes. In gres.conf, at its end:  Include " + GRES


def _gres(site: Site, groups: Sequence[Group], head: str = _GRES_HEAD) -> str:
    out: list[str] = []
    for group in groups:
        out += [*group.gpu_lines, *(f"# {said}" for said in group.unlisted)]
        both = (site.fill.gres, site.fill.places)
        out += [f"NodeName={group.names} Name={name} Count={group.lanes}" for name in both]
    return _head(head) + "\n".join(out) + "\n"


def _node(site: Site) -> str:
    node = site.node
    keys = ("log", "run_dir", "shm_dir", "shm_min_mib", "gpu_probe", "probe_timeout_s", "on_timeout")
    lines = [f"{key} = {value}" for key in keys if (value := getattr(node, key)) is not None]
    return _head("Settings of prolog.sh and epilog.sh, beside them on every node.") + "\n".join(lines) + "\n"


def _lua(site: Site, records: Records, text: str) -> str:
    begin, end = text.index(_BEGIN), text.index(_END)
    jobs = site.jobs
    values: dict[str, object] = {
        "offline": [site.partitions.offline],
        "fill": site.fill.gres,
        "place": site.fill.places,
        "gpu_types": list(records.gpu_types),
        "signal": jobs.signal,
        "notice_s": jobs.notice_s,
        "min_notice_s": jobs.min_notice_s,
        "default_minutes": jobs.default_minutes,
        "append_is_default": jobs.append_is_default,
    }
    head, table = text[:begin], text[begin:end]
    for key, value in values.items():
        found = re.findall(rf"^  {key} = .*?,(?:[ ]*--.*)?$", table, re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"{LUA} has {len(found)} lines for {key} between its marks: not this release's")
        # The remark keeps its column where it can.
        remark = found[0].partition("--")
        line = f"  {key} = {_literal(value)},"
        table = table.replace(found[0], f"{line:<35} {remark[1]}{remark[2]}".rstrip())
    return head + table + text[end:]


def _literal(value: object) -> str:
    """A Lua literal. The site file's patterns leave no character that JSON and Lua quote differently."""
    if isinstance(value, list):
        return "{ " + ", ".join(_literal(part) for part in value) + " }"
    return json.dumps(value)
