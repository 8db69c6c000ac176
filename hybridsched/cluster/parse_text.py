"""Slurm's text outputs, for where it has no JSON: `scontrol -o show …`, `scontrol show config`, `squeue -o`.

Values may hold blanks, equal signs and whatever an administrator typed. A record of `scontrol -o` is cut at
the keys that Slurm is known to print; the first of each counts, because all that is free text (`Reason=`,
`Comment=`, `Extra=`) comes after what is read here. Job names and comments are their users' own, may hold
line breaks, and could spell out another job's record: so jobs are never read from `scontrol`, but from
`squeue` with a mark in its format that nobody can foresee.

Times must have been printed under `SLURM_TIME_FORMAT=%s`.
"""

from __future__ import annotations

import re

from hybridsched.cluster.parse_words import (
    epoch_ms,
    job_state,
    minutes_ms,
    node_states,
    nothing,
    parse_gres,
    unreadable,
    whole,
)
from hybridsched.cluster.rows import Rows
from hybridsched.cluster.values import ENDED, Job, Node, Partition, Reservation


def _keys(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NODE_KEYS = _keys(
    """
    NodeName Arch CoresPerSocket CPUAlloc CPUEfctv CPUTot CPULoad AvailableFeatures ActiveFeatures
    Gres GresDrain GresUsed NodeAddr NodeHostName Port Version OS RealMemory AllocMem FreeMem
    Sockets Boards MemSpecLimit CoreSpecCount State ThreadsPerCore TmpDisk Weight Owner MCS_label
    Partitions BootTime SlurmdStartTime LastBusyTime ResumeAfterTime CfgTRES AllocTRES CapWatts
    CurrentWatts AveWatts ExtSensorsJoules ExtSensorsWatts ExtSensorsTemp Reason
    """
)

PARTITION_KEYS = _keys(
    """
    PartitionName AllowGroups AllowAccounts AllowQos AllocNodes Alternate Default QoS DefaultTime
    DisableRootJobs ExclusiveUser ExclusiveTopo GraceTime Hidden MaxNodes MaxTime MinNodes LLN
    MaxCPUsPerNode MaxCPUsPerSocket NodeSets Nodes PriorityJobFactor PriorityTier RootOnly ReqResv
    OverSubscribe OverTimeLimit PreemptMode State TotalCPUs TotalNodes SelectTypeParameters
    JobDefaults DefMemPerNode MaxMemPerNode TRES
    """
)

RESERVATION_KEYS = _keys(
    """
    ReservationName StartTime EndTime Duration Nodes NodeCnt CoreCnt Features PartitionName Flags
    TRES Users Groups Accounts Licenses State BurstBuffer Watts MaxStartDelay Comment
    """
)

_SQUEUE = "%A|%F|%K|%P|%u|%T|%N|%b|%S|%l|%V|%e|%Q|%r|%x|%n|"


def squeue_format(mark: str) -> str:
    """The `-o` of squeue for `parse_jobs`; `mark` must be new for each call, of letters and digits."""
    return f"{mark}|{_SQUEUE}{mark}%k{mark}%j{mark}"


def records(text: str, keys: tuple[str, ...]) -> list[dict[str, str]]:
    """The records of `scontrol -o show …`, one a line; the first of `keys` begins each."""
    cut = re.compile(r"(?:^|\s)(" + "|".join(map(re.escape, keys)) + r")=")
    out = []
    for line in text.split("\n"):  # Slurm ends lines so; what else divides them is somebody's own words
        if not line.startswith(f"{keys[0]}="):
            continue  # "No reservations in the system" and the like
        found: dict[str, str] = {}
        marks = list(cut.finditer(line))
        for i, mark in enumerate(marks):
            free = mark[1] == "Reason"
            end = len(line) if free or i + 1 == len(marks) else marks[i + 1].start()
            value = line[mark.end() : end].strip()
            # A key that a newer Slurm prints stands behind the value of the one before it.
            found.setdefault(mark[1], value if free else value.partition(" ")[0])
            if free:
                break
        out.append(found)
    return out


def parse_nodes(text: str, rows: Rows | None = None) -> tuple[Node, ...]:
    """`scontrol -o -d show node` (without -d there is no `GresUsed`).

    A node of whose GRES one entry cannot be read is passed over whole: they are repeated when a count is set.
    Where none can be read, the answer cannot: `ClusterError("unreadable")`.
    """
    shown = records(text, NODE_KEYS)
    found = (rows or Rows()).read("a node", shown, _node)
    if shown and not found:
        raise unreadable("no record of a node can be read", shown[0])
    return tuple(found)


def _node(r: dict[str, str]) -> Node:
    return Node(
        name=r["NodeName"],
        host=nothing(r.get("NodeHostName")) or r["NodeName"],
        states=node_states(_needed(r, "State")),
        gres=parse_gres(r.get("Gres")),
        gres_used=parse_gres(r.get("GresUsed")),
        reason=_reason(r.get("Reason", "")),
        partitions=tuple(filter(None, nothing(r.get("Partitions")).split(","))),
        booted_ms=epoch_ms(r.get("BootTime", "")),
        started_ms=epoch_ms(r.get("SlurmdStartTime", "")),
    )


def parse_partitions(text: str, rows: Rows | None = None) -> list[tuple[Partition, str]]:
    """`scontrol -o show partition`: each with its node list, not expanded."""
    return (rows or Rows()).read("a partition", records(text, PARTITION_KEYS), _partition)


def _partition(r: dict[str, str]) -> tuple[Partition, str]:
    found = Partition(
        name=r["PartitionName"],
        up=_needed(r, "State").upper() == "UP",
        priority_tier=whole(r.get("PriorityTier")),
        preempt_mode=nothing(r.get("PreemptMode")).upper(),
        grace_s=whole(r.get("GraceTime")),
        default=r.get("Default", "NO").upper() == "YES",
        max_time_ms=minutes_ms(r.get("MaxTime", "")),
    )
    return found, nothing(r.get("Nodes"))


def parse_reservations(text: str, rows: Rows | None = None) -> list[tuple[Reservation, str]]:
    """`scontrol -o show reservation`: each with its node list, not expanded."""
    return (rows or Rows()).read("a reservation", records(text, RESERVATION_KEYS), _reservation)


def _reservation(r: dict[str, str]) -> tuple[Reservation, str]:
    found = Reservation(
        name=r["ReservationName"],
        start_ms=epoch_ms(r.get("StartTime", "")),
        end_ms=epoch_ms(r.get("EndTime", "")),
        flags=tuple(filter(None, nothing(r.get("Flags")).split(","))),
        users=tuple(filter(None, nothing(r.get("Users")).split(","))),
        active=_needed(r, "State").upper() == "ACTIVE",
    )
    return found, nothing(r.get("Nodes"))


def parse_jobs(text: str, mark: str, rows: Rows | None = None) -> list[tuple[Job, str]]:
    """`squeue --noheader --states=all -o squeue_format(mark)`: each with its node list, not expanded,
    nor is what it excludes or requires.

    The number of restarts is not among squeue's short fields: it stays unknown. Raises
    `ClusterError("unreadable")` for an answer that does not follow the format.
    """
    made = rows or Rows()
    marked = _marked(text, mark)
    whole_rows = made.read("a job", marked, _fields)
    if marked and not whole_rows:
        raise unreadable("no record of squeue has the fields that were asked for", marked[0])
    return made.read("a job", whole_rows, lambda fields: _job(fields, made))


def _marked(text: str, mark: str) -> list[tuple[str, str, str]]:
    """Records: fields of Slurm's own, comment and name."""
    pieces = text.split(mark)
    if len(pieces) % 4 != 1 or any(p.strip() for p in pieces[::4]):
        raise unreadable("squeue printed something beside the jobs", text[:200])
    return [(pieces[i], pieces[i + 1], pieces[i + 2]) for i in range(1, len(pieces), 4)]


def _fields(record: tuple[str, str, str]) -> list[str]:
    """16 fields, comment and name."""
    fields = record[0].split("|")
    if len(fields) != 18 or whole(fields[1]) is None:
        raise unreadable("a record of squeue", record[0])
    return [*fields[1:17], *record[1:]]


def _job(fields: list[str], rows: Rows) -> tuple[Job, str]:
    number, array, task, partition, user, word, nodes, gres, start, limit, submit, end = fields[:12]
    priority, reason, excluded, required, comment, name = fields[12:]
    state, flags = job_state([word])
    is_array = task not in ("N/A", "")
    value = Job(
        id=int(number),
        name=name,
        user=user,
        partition=partition,
        state=state,
        flags=flags,
        reason=nothing(reason),
        gres=rows.gres(gres, f"job {number}"),
        excluded=tuple(filter(None, [nothing(excluded)])),
        required=tuple(filter(None, [nothing(required)])),
        comment=nothing(comment),
        priority=whole(priority),
        submit_ms=epoch_ms(submit),
        begin_ms=epoch_ms(start) if state == "PENDING" and reason == "BeginTime" else None,
        start_ms=None if state == "PENDING" else epoch_ms(start),
        end_ms=epoch_ms(end) if state in ENDED else None,
        time_limit_ms=minutes_ms(limit),
        array_job=whole(array) if is_array else None,
        array_task=whole(task),
        array_waiting=task if is_array and whole(task) is None else "",
    )
    return value, nothing(nodes)


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: every `Key = value` line."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, mark, value = line.partition("=")
        if mark and key.strip() and not key[0].isspace():
            found.setdefault(key.strip(), value.strip())
    return found


def parse_ping(text: str) -> tuple[bool, str]:
    """`scontrol ping`: whether any slurmctld is up, and what was said."""
    lines = [line for line in text.splitlines() if line.startswith("Slurmctld")]
    return any(re.search(r"\bUP\b", line) for line in lines), "; ".join(lines) or text.strip()


def parse_version(text: str) -> tuple[int, int]:
    """`slurm-wlm 22.05.8`, `slurm 26.05.5` as (major, minor)."""
    found = re.search(r"(\d+)\.(\d+)", text)
    if not found:
        raise unreadable("a Slurm version is written major.minor.micro", text)
    return int(found[1]), int(found[2])


def _reason(text: str) -> str:
    """Without who gave it and when (`… [root@1795994605]`), and without the comments that follow it."""
    stamped = re.match(r"(.*?)\s*\[[^\[\]\s]+@[^\[\]\s]+\](?:\s|$)", text)
    return nothing(stamped[1] if stamped else re.split(r"\s(?:Comment|Extra)=", text)[0])


def _needed(record: dict[str, str], key: str) -> str:
    if key not in record:
        raise unreadable(f"a record without {key}", record)
    return record[key]
