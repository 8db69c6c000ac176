"""What the check gathers of a cluster, for tests: one with nothing to find, and changes to it."""

from __future__ import annotations

from dataclasses import replace

from hybridsched.slurmfiles import ClusterFacts, Finding, Level, Site, examine


def right(version: str = "22.05.8") -> ClusterFacts:
    """A cluster with nothing to find."""
    new = version >= "23.02"
    node = {
        "Gres": "gpu:a100:4,hsfill:4,hslane:4",
        "GresUsed": "gpu:a100:0(IDX:N/A),hsfill:0,hslane:1",
        "Partitions": "online,offline",
        "State": "IDLE",
        "Version": version,
    }
    return ClusterFacts(
        config={
            "SLURM_VERSION": version,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "PreemptExemptTime": "00:00:05",
            "PreemptParameters": "send_user_signal" if new else "(null)",
            "SlurmctldParameters": "(null)" if new else "enable_configless,preempt_send_user_signal",
            "SchedulerParameters": "nohold_on_prolog_fail",
            "JobRequeue": "1",
            "KillWait": "30 sec",
            "GresTypes": "gpu,hsfill,hslane",
            "JobSubmitPlugins": "lua",
            "Prolog[0]" if new else "Prolog": "/etc/slurm/prolog.sh",
            "Epilog[0]" if new else "Epilog": "/etc/slurm/epilog.sh",
            "SelectType": "select/cons_tres",
            "ProctrackType": "proctrack/cgroup",
            "MULTIPLE_SLURMD": "Yes",
            "AuthInfo": "(null)",
        },
        partitions={
            "online": {"PriorityTier": "100", "PreemptMode": "OFF", "MaxTime": "UNLIMITED", "State": "UP"},
            "offline": {
                "PriorityTier": "1",
                "PreemptMode": "REQUEUE",
                "GraceTime": "120",
                "MaxTime": "1-00:00:00",
                "State": "UP",
            },
        },
        nodes={
            "n1": node,
            "n2": node,
            "hspark": {"Gres": "gpu:a100:4,hsfill:4,hslane:4", "Partitions": "offline", "State": "DOWN"},
        },
        client=version,
        refusal="sbatch: error: hybridsched: partition offline needs 4 more lines",
        configured_gres=dict.fromkeys(("n1", "n2", "hspark"), "gpu:a100:4,hsfill:no_consume:4,hslane:4"),
    )


def bad(facts: ClusterFacts, site: Site | None = None) -> dict[str, Finding]:
    return {f.code: f for f in examine(facts, site or Site()) if f.level is not Level.OK}


def changed(facts: ClusterFacts, node: str, **fields: str) -> ClusterFacts:
    return replace(facts, nodes={**facts.nodes, node: {**facts.nodes[node], **fields}})
