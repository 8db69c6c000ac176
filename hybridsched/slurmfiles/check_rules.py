"""Checks of what slurmctld is told: partitions, preemption, signal, requeue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hybridsched.slurmfiles.facts import ClusterFacts
from hybridsched.slurmfiles.findings import Finding, critical, nodes_of, number, ok, release, some, warning
from hybridsched.slurmfiles.records import words
from hybridsched.slurmfiles.render import USER_SIGNAL_MOVED
from hybridsched.slurmfiles.site import Site


def check_partitions(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    names = site.partitions
    absent = [name for name in (names.online, names.offline) if name not in facts.partitions]
    for name in absent:
        have = ", ".join(sorted(facts.partitions)) or "none"
        yield critical(
            "partition_missing",
            f"there is no partition {name} (there are: {have})",
            f"define PartitionName={name} in slurm.conf (`hybridsched slurm render` writes it), or "
            "name yours in "
            f"[partitions] of the site file",
        )
    if absent:
        return
    online, offline = facts.partitions[names.online], facts.partitions[names.offline]
    for name, row in ((names.online, online), (names.offline, offline)):
        if row.get("State", "UP") != "UP":
            yield critical(
                "partition_down",
                f"partition {name} is {row['State']}",
                f"`scontrol update partitionname={name} state=up`, and State=UP in slurm.conf",
            )
    high, low = number(online.get("PriorityTier", "")), number(offline.get("PriorityTier", ""))
    if high is None or low is None or high <= low:
        yield critical(
            "tiers",
            f"PriorityTier of {names.online} is {high} and of {names.offline} {low}, so online takes "
            "no GPU back",
            f"in slurm.conf: PriorityTier={site.partitions.online_tier} for {names.online}, "
            f"PriorityTier={site.partitions.offline_tier} for {names.offline}; then `scontrol reconfigure`",
        )
    else:
        yield ok("tiers", f"PriorityTier {high} of {names.online} is above {low} of {names.offline}")
    if offline.get("MaxTime") in ("UNLIMITED", "INFINITE"):
        yield warning(
            "offline_max_time",
            f"partition {names.offline} has no MaxTime: a job that never ends holds its lane for ever",
            f"MaxTime={site.partitions.offline_max_time} in its PartitionName line; a batch goes on in "
            "its next run",
        )


def check_common_nodes(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    names = site.partitions
    if not {names.online, names.offline} <= set(facts.partitions):
        return
    online, offline = set(nodes_of(facts, names.online)), set(nodes_of(facts, names.offline))
    common = (online & offline) - {site.fill.parked_node}
    if not common:
        yield critical(
            "no_common_nodes",
            f"partitions {names.online} and {names.offline} share no node, so there is nothing to fill",
            f"put the nodes of {names.online} into the Nodes= of {names.offline} too",
        )
    elif left_out := sorted(online - offline):
        yield warning(
            "nodes_left_out",
            f"{some(left_out)} of {names.online} are not in {names.offline}: their idle GPUs stay idle",
            f"add them to the Nodes= of {names.offline}",
        )
    else:
        yield ok("common_nodes", f"{len(common)} nodes are in both partitions")


def check_preemption(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    kind = facts.setting("PreemptType")
    if kind != "preempt/partition_prio":
        yield critical(
            "preempt_type",
            f"PreemptType is {kind or 'unset'}: the tiers of the partitions take no GPU back",
            "PreemptType=preempt/partition_prio in slurm.conf, then restart slurmctld",
        )
    else:
        yield ok("preempt_type", f"PreemptType is {kind}")
    if "suspend" in words(facts.setting("PreemptMode")):
        yield critical(
            "preempt_mode_suspend",
            "PreemptMode is SUSPEND: a suspended job keeps its GRES and its GPU memory",
            "PreemptMode=REQUEUE in slurm.conf, then restart slurmctld",
        )
    names = site.partitions
    offline = facts.partitions.get(names.offline)
    if offline is not None:
        mode = offline.get("PreemptMode", "")
        if "REQUEUE" not in mode.upper().split(","):
            yield critical(
                "offline_preempt_mode",
                f"PreemptMode of partition {names.offline} is {mode or 'unset'}, not REQUEUE",
                f"PreemptMode=REQUEUE in the PartitionName line of {names.offline}, and "
                "PreemptMode=REQUEUE for the "
                f"cluster; then `scontrol reconfigure`",
            )
        else:
            yield ok("offline_preempt_mode", f"preempted jobs of {names.offline} go back to the queue")
        yield from _grace(offline, site)
    online = facts.partitions.get(names.online)
    if online is not None and online.get("PreemptMode", "").upper() != "OFF":
        yield warning(
            "online_preemptable",
            f"PreemptMode of partition {names.online} is {online.get('PreemptMode', 'unset')}: "
            "replicas could lose "
            f"their GPU to a higher tier",
            f"PreemptMode=OFF in the PartitionName line of {names.online}",
        )


def _grace(offline: Mapping[str, str], site: Site) -> Iterator[Finding]:
    grace = number(offline.get("GraceTime", "")) or 0
    name = site.partitions.offline
    if grace == 0:
        yield critical(
            "grace_time",
            f"GraceTime of partition {name} is 0: a preempted job is killed before it can keep its work",
            f"GraceTime={site.partitions.grace_s} in the PartitionName line of {name}; then `scontrol "
            "reconfigure`",
        )
    elif grace < site.jobs.min_notice_s:
        yield warning(
            "grace_short",
            f"GraceTime of partition {name} is {grace} s, below the {site.jobs.min_notice_s} s of "
            "jobs.min_notice_s",
            f"GraceTime={site.partitions.grace_s} in the PartitionName line of {name}",
        )
    else:
        yield ok("grace_time", f"GraceTime of partition {name} is {grace} s")


def check_user_signal(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    version = release(facts.setting("SLURM_VERSION")) or site.slurm.release
    if version >= USER_SIGNAL_MOVED:
        key, word = "PreemptParameters", "send_user_signal"
    else:
        key, word = "SlurmctldParameters", "preempt_send_user_signal"
    if word not in words(facts.setting(key)):
        yield critical(
            "user_signal",
            f"{key} lacks {word}: a preempted job never gets its own --signal and cannot keep its work",
            f"add {word} to {key} in slurm.conf (Slurm {version[0]}.{version[1]:02}), then `scontrol "
            "reconfigure`",
        )
    else:
        yield ok("user_signal", f"{key} has {word}")


def check_requeue(facts: ClusterFacts, site: Site) -> Iterator[Finding]:
    if facts.setting("JobRequeue") not in ("1", "yes", "Yes"):
        yield critical(
            "job_requeue",
            f"JobRequeue is {facts.setting('JobRequeue') or 'unset'}: jobs are lost with their node",
            "JobRequeue=1 in slurm.conf, then `scontrol reconfigure`",
        )
    else:
        yield ok("job_requeue", "JobRequeue is 1")
    wait = number(facts.setting("KillWait"))
    if wait is not None and wait < min(5, site.slurm.kill_wait_s):
        yield warning(
            "kill_wait",
            f"KillWait is {wait} s: an engine is killed before it has closed its files",
            f"KillWait={site.slurm.kill_wait_s} in slurm.conf, then `scontrol reconfigure`",
        )
    life = re.search(r"cred_expire=(\d+)", facts.setting("AuthInfo"))
    seconds = int(life.group(1)) if life else 120
    yield ok(
        "cred_expire", f"a requeued job may start again after about {seconds + 1} s (AuthInfo cred_expire)"
    )
