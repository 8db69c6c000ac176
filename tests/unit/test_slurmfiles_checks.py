"""The check's reading and judging, without Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridsched.slurmfiles import ClusterFacts, Finding, Level, Site, examine, exit_status, parse_site
from hybridsched.slurmfiles.facts import SlurmUnreachableError, expand, gather, local_devices, parse_config
from hybridsched.slurmfiles.records import parse_fields


def right(version: str = "22.05.8") -> ClusterFacts:
    """A cluster with nothing to find."""
    new = version >= "23.02"
    node = {
        "Gres": "gpu:a100:4,hsfill:4",
        "Partitions": "online,offline",
        "State": "IDLE",
        "Version": version,
    }
    return ClusterFacts(
        config={
            "SLURM_VERSION": version,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "PreemptParameters": "send_user_signal" if new else "(null)",
            "SlurmctldParameters": "(null)" if new else "enable_configless,preempt_send_user_signal",
            "SchedulerParameters": "nohold_on_prolog_fail",
            "JobRequeue": "1",
            "KillWait": "30 sec",
            "GresTypes": "gpu,hsfill",
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
            "hspark": {"Gres": "gpu:a100:4,hsfill:4", "Partitions": "offline", "State": "DOWN"},
        },
        client=version,
        refusal="sbatch: error: hybridsched: partition offline needs 4 more lines",
    )


def bad(facts: ClusterFacts, site: Site | None = None) -> dict[str, Finding]:
    return {f.code: f for f in examine(facts, site or Site()) if f.level is not Level.OK}


@pytest.mark.parametrize("version", ["22.05.8", "23.02.1", "24.11.5", "26.05.5"])
def test_nothing_is_found_on_a_right_cluster(version: str) -> None:
    assert bad(right(version)) == {}


def test_the_signal_in_the_old_place_does_nothing_on_a_new_release() -> None:
    facts = right("24.11.5")
    config = {**facts.config, "PreemptParameters": "", "SlurmctldParameters": "preempt_send_user_signal"}
    found = bad(replace(facts, config=config))
    assert found.keys() == {"user_signal"}
    assert "PreemptParameters" in found["user_signal"].remedy


def changed(facts: ClusterFacts, node: str, **fields: str) -> ClusterFacts:
    return replace(facts, nodes={**facts.nodes, node: {**facts.nodes[node], **fields}})


@pytest.mark.parametrize(
    ("node", "fields", "code", "level"),
    [
        ("n1", {"Version": "24.11.1"}, "version_node", Level.CRITICAL),
        ("n1", {"Version": "21.08.8"}, "version_mix", Level.WARNING),
        ("n1", {"Partitions": "online", "Gres": "gpu:a100:4"}, "nodes_left_out", Level.WARNING),
        ("n1", {"Gres": "gpu:a100:4"}, "fill_nodes", Level.WARNING),
        ("n1", {"State": "IDLE*"}, "node_state", Level.WARNING),
        ("n1", {"State": "DOWN*+DRAIN", "Reason": "Not responding"}, "node_state", Level.WARNING),
        ("hspark", {"State": "IDLE"}, "parked_node", Level.CRITICAL),
        ("hspark", {"Gres": "gpu:a100:4"}, "parked_node", Level.CRITICAL),
        ("hspark", {"Partitions": ""}, "parked_node", Level.CRITICAL),
    ],
)  # fmt: skip
def test_nodes(node: str, fields: dict[str, str], code: str, level: Level) -> None:
    found = bad(changed(right(), node, **fields))
    assert found[code].level is level
    assert found[code].remedy


def test_an_invalid_node_says_how_to_make_its_files_agree() -> None:
    reason = "gres/gpu count reported lower than configured (0 < 4) [slurm@2026-01-01T00:00:00]"
    found = bad(changed(right(), "n1", State="IDLE+DRAIN+INVALID_REG", Reason=reason))
    assert "slurmd -G" in found["node_state"].remedy


@pytest.mark.parametrize(
    ("config", "code", "level"),
    [
        ({"SLURM_VERSION": "21.08.8"}, "version", Level.CRITICAL),
        ({"SelectType": "select/linear"}, "select_type", Level.CRITICAL),
        ({"ProctrackType": "proctrack/linuxproc"}, "proctrack", Level.WARNING),
        ({"MULTIPLE_SLURMD": "No"}, "multiple_slurmd", Level.WARNING),
        ({"PreemptMode": "SUSPEND,GANG"}, "preempt_mode_suspend", Level.CRITICAL),
        ({"Epilog": "(null)"}, "epilog", Level.WARNING),
        ({"JobSubmitPlugins": "(null)"}, "job_submit", Level.CRITICAL),
        ({"KillWait": "1 sec"}, "kill_wait", Level.WARNING),
    ],
)
def test_settings(config: dict[str, str], code: str, level: Level) -> None:
    facts = right()
    found = bad(replace(facts, config={**facts.config, **config}))
    assert found[code].level is level


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({"refusal": None}, Level.UNKNOWN),
        ({"refusal": "", "accepted": True}, Level.CRITICAL),
        ({"refusal": "sbatch: error: Access denied"}, Level.CRITICAL),
    ],
)
def test_job_submit(change: dict[str, Any], level: Level) -> None:
    assert bad(replace(right(), **change))["job_submit"].level is level


def test_a_slow_slurmctld_and_a_newer_client() -> None:
    found = bad(replace(right(), ping_ms=9000.0, client="24.11.5"))
    assert found["slow"].level is Level.WARNING
    assert found["version_client"].level is Level.CRITICAL


def test_a_site_file_for_another_release() -> None:
    site = parse_site('[[nodes]]\nnames = "n1"\ngpu_type = "a100"\ngpus = 4\n[slurm]\nversion = "24.11"\n')
    assert bad(right(), site).keys() == {"version_site"}


def test_accepted_findings_do_not_count() -> None:
    facts = right()
    facts = replace(facts, config={**facts.config, "ProctrackType": "proctrack/linuxproc"})
    findings = examine(facts, parse_site('[check]\naccept = ["proctrack"]\n'))
    assert exit_status(findings) == 0
    assert any(f.text.startswith("accepted by the site file") for f in findings)


def test_exit_status() -> None:
    def of(*levels: Level) -> int:
        return exit_status([Finding(code="x", level=level, text="") for level in levels])

    assert of() == of(Level.OK) == 0
    assert of(Level.OK, Level.WARNING) == 1
    assert of(Level.UNKNOWN, Level.CRITICAL, Level.WARNING) == 2
    assert of(Level.WARNING, Level.UNKNOWN) == 3


def test_reading_scontrol() -> None:
    config = parse_config(
        "Configuration data as of X\nKillWait                = 30 sec\nPrologFlags = (null)\n\n"
    )
    assert config == {"KillWait": "30 sec", "PrologFlags": "(null)"}
    row = parse_fields(
        "NodeName=n1 OS=Linux 6.1 #1 SMP @0  State=IDLE Reason=two words [root@now] AllocTRES= X=1"
    )
    assert row["OS"] == "Linux 6.1 #1 SMP @0"
    assert row["Reason"] == "two words [root@now]"
    assert (row["AllocTRES"], row["X"]) == ("", "1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("gpu[08-10],x", ["gpu08", "gpu09", "gpu10", "x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("/dev/nvidia[0-1]", ["/dev/nvidia0", "/dev/nvidia1"]),
        ("", []),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_device_files_are_looked_up_through_includes(tmp_path: Path) -> None:
    (tmp_path / "gres.conf").write_text(
        "AutoDetect=off\nInclude more.conf\nNodeName=far Name=gpu File=/dev/none\n"
    )
    (tmp_path / "more.conf").write_text(
        f"NodeName=n[1-2] Name=gpu File=/dev/null,/dev/none,{tmp_path}/gres.conf\n"
    )
    nodes = {
        "n1": {"NodeAddr": "127.0.0.1"},
        "n2": {"NodeAddr": "127.0.0.1"},
        "far": {"NodeAddr": "10.0.0.9"},
    }
    found = local_devices(str(tmp_path / "slurm.conf"), nodes)
    assert [(d.node, Path(d.path).name, d.problem) for d in found] == [
        ("n1", "null", None),
        ("n1", "none", "No such file or directory"),
        ("n1", "gres.conf", "is no device"),
    ]
    assert local_devices("/nowhere/slurm.conf", nodes) == []


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnreachableError, match="is not installed here"):
        gather(offline="offline")
    slow = tmp_path / "scontrol"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(SlurmUnreachableError, match=r"did not answer within 0\.1 s"):
        gather(offline="offline", timeout_s=0.1)
