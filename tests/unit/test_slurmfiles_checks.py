"""The check's judging, without Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridsched.slurmfiles import Finding, Level, Site, examine, exit_status, parse_site
from hybridsched.slurmfiles.check_limits import EPILOG_LIMIT_S
from tests.unit.right_cluster import bad, changed, right


@pytest.mark.parametrize("version", ["22.05.8", "23.02.1", "24.11.5", "26.05.5"])
def test_nothing_is_found_on_a_right_cluster(version: str) -> None:
    assert bad(right(version)) == {}


def test_the_signal_in_the_old_place_does_nothing_on_a_new_release() -> None:
    facts = right("24.11.5")
    config = {**facts.config, "PreemptParameters": "", "SlurmctldParameters": "preempt_send_user_signal"}
    found = bad(replace(facts, config=config))
    assert found.keys() == {"user_signal"}
    assert "PreemptParameters" in found["user_signal"].remedy


@pytest.mark.parametrize(
    ("node", "fields", "code", "level"),
    [
        ("n1", {"Version": "24.11.1"}, "version_node", Level.CRITICAL),
        ("n1", {"Version": "21.08.8"}, "version_mix", Level.WARNING),
        ("n1", {"Partitions": "online", "Gres": "gpu:a100:4"}, "nodes_left_out", Level.WARNING),
        ("n1", {"Gres": "gpu:a100:4,hsfill:4"}, "place_nodes", Level.WARNING),
        ("n1", {"GresUsed": "hsfill:1,hslane:1"}, "fill_consumed", Level.CRITICAL),
        ("n1", {"State": "IDLE*"}, "node_state", Level.WARNING),
        ("n1", {"State": "DOWN*+DRAIN", "Reason": "Not responding"}, "node_state", Level.WARNING),
        ("hspark", {"State": "IDLE"}, "parked_node", Level.CRITICAL),
        ("hspark", {"Gres": "gpu:a100:4,hslane:4"}, "parked_node", Level.CRITICAL),
        ("hspark", {"Gres": "gpu:a100:4,hsfill:4"}, "parked_node", Level.CRITICAL),
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


@pytest.mark.parametrize("reason", ["hybridsched: mode held: cut failed", "hybridsched: mode day to night"])
def test_a_host_that_changes_its_mode_is_not_to_be_resumed_by_hand(reason: str) -> None:
    """Nobody knows how the GPUs of a held one are cut, and Slurm would start jobs there."""
    found = bad(changed(right(), "n1", State="DOWN+DRAIN", Reason=f"{reason} [root@2026-01-01T00:00:00]"))
    assert "state=resume" not in found["node_state"].remedy
    assert "`hybridsched mode status`" in found["node_state"].remedy


def test_a_node_that_a_changed_count_put_out_of_service_says_how_it_comes_back() -> None:
    reason = "gres/hsfill count changed and jobs are using them (4 != 1) [root@2026-01-01T00:00:00]"
    found = bad(changed(right(), "n1", State="MIXED+DRAIN+INVALID_REG", Reason=reason))
    assert "`scontrol requeue` those of `squeue -w n1`" in found["node_state"].remedy
    assert "no_consume" in found["node_state"].remedy


def test_a_quiet_night_is_no_fault() -> None:
    """All lanes closed: the count is 0 everywhere, and the GRES is on no node's list."""
    facts = right()
    for node in ("n1", "n2"):
        facts = changed(facts, node, Gres="gpu:a100:4,hslane:4")
    assert bad(facts) == {}
    assert bad(replace(facts, configured_gres=None)).keys() == {"fill_consumed"}


@pytest.mark.parametrize(
    ("configured", "code", "level"),
    [
        ("gpu:a100:4,hsfill:4,hslane:4", "fill_consumed", Level.CRITICAL),
        ("gpu:a100:4,hslane:4", "fill_nodes", Level.WARNING),
        (None, "fill_consumed", Level.UNKNOWN),
    ],
)
def test_what_slurm_conf_says_of_the_gate(configured: str | None, code: str, level: Level) -> None:
    facts = right()
    texts = None if configured is None else {**(facts.configured_gres or {}), "n1": configured}
    found = bad(replace(facts, configured_gres=texts))
    assert {k: f.level for k, f in found.items()} == {code: level}
    assert found[code].remedy


def test_a_line_that_every_command_prints_is_found() -> None:
    said = "scontrol: error: NodeNames=hspark CPUs=1024 match no Sockets, Sockets*CoresPerSocket"
    found = bad(replace(right(), complaints=(said,)))
    assert found.keys() == {"node_sizes"}
    assert "hspark" in found["node_sizes"].text


@pytest.mark.parametrize(
    ("config", "code", "level"),
    [
        ({"GresTypes": "gpu,hsfill"}, "fill_gres_type", Level.CRITICAL),
        ({"SLURM_VERSION": "21.08.8"}, "version", Level.CRITICAL),
        ({"SelectType": "select/linear"}, "select_type", Level.CRITICAL),
        ({"ProctrackType": "proctrack/linuxproc"}, "proctrack", Level.WARNING),
        ({"MULTIPLE_SLURMD": "No"}, "multiple_slurmd", Level.WARNING),
        ({"PreemptMode": "SUSPEND,GANG"}, "preempt_mode_suspend", Level.CRITICAL),
        ({"Epilog": "(null)"}, "epilog", Level.WARNING),
        ({"JobSubmitPlugins": "(null)"}, "job_submit", Level.CRITICAL),
        ({"KillWait": "1 sec"}, "kill_wait", Level.WARNING),
        ({"SelectTypeParameters": "CR_CORE_MEMORY"}, "default_memory", Level.CRITICAL),
        (
            {"SelectTypeParameters": "CR_CORE_MEMORY", "DefMemPerNode": "UNLIMITED"},
            "default_memory",
            Level.CRITICAL,
        ),
        ({"PreemptExemptTime": "1-00:00:00"}, "preempt_exempt", Level.CRITICAL),
        ({"PreemptExemptTime": "00:10:00"}, "preempt_exempt", Level.CRITICAL),
        ({"PreemptExemptTime": "00:00:00"}, "preempt_exempt", Level.WARNING),
        ({"PreemptExemptTime": "NONE"}, "preempt_exempt", Level.WARNING),
        ({"PrologEpilogTimeout": "5"}, "hook_timeout", Level.WARNING),
    ],
)
def test_settings(config: dict[str, str], code: str, level: Level) -> None:
    facts = right()
    found = bad(replace(facts, config={**facts.config, **config}))
    assert found[code].level is level
    assert found[code].remedy


@pytest.mark.parametrize(
    "config",
    [
        {"SelectTypeParameters": "CR_CORE_MEMORY", "DefMemPerCPU": "4000"},
        {"SelectTypeParameters": "CR_CORE_MEMORY", "JobDefaults": "DefMemPerGPU=64000"},
        {"SelectTypeParameters": "CR_CORE", "DefMemPerNode": "UNLIMITED"},
        {"PreemptExemptTime": "00:00:03"},
        {"PreemptExemptTime": "00:01:00"},
        {"PrologEpilogTimeout": "65534"},
        {"PrologEpilogTimeout": "120", "Epilog": "(null)", "Epilog[0]": "/etc/slurm/epilog.sh"},
    ],
)
def test_limits_that_are_well(config: dict[str, str]) -> None:
    facts = right()
    assert not bad(replace(facts, config={**facts.config, **config})).keys() - {"epilog"}


def test_memory_defaults_of_the_partitions() -> None:
    facts = right()
    config = {**facts.config, "SelectTypeParameters": "CR_CORE_MEMORY"}
    rows = {name: {**row, "DefMemPerCPU": "4000"} for name, row in facts.partitions.items()}
    assert bad(replace(facts, config=config, partitions=rows)) == {}
    rows["offline"] = dict(facts.partitions["offline"])
    found = bad(replace(facts, config=config, partitions=rows))
    assert "and offline have" in found["default_memory"].text
    assert "DefMemPerCPU" in found["default_memory"].remedy


def test_the_remedy_for_whole_nodes_makes_no_new_fault() -> None:
    facts = right()
    found = bad(replace(facts, config={**facts.config, "SelectType": "select/linear"}))
    assert "DefMemPerCPU" in found["select_type"].remedy


def test_fewer_places_than_lanes() -> None:
    facts = right()
    texts = {**(facts.configured_gres or {}), "n1": "gpu:a100:4,hsfill:no_consume:4,hslane:1"}
    found = bad(replace(facts, configured_gres=texts))
    assert found.keys() == {"places_fewer"}
    assert "n1 (hslane 1, hsfill 4)" in found["places_fewer"].text


def test_the_epilog_s_bound_is_the_one_that_is_checked() -> None:
    script = (Path(__file__).resolve().parents[2] / "slurm" / "epilog.sh").read_text()
    assert f"\nLIMIT_S={EPILOG_LIMIT_S} " in script


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


def drained(reason: str, *names: str, state: str = "IDLE+DRAIN", slurm_user: str = "slurm(64030)") -> Any:
    facts = right()
    facts = replace(facts, config={**facts.config, "SlurmUser": slurm_user})
    for name in names:
        facts = changed(facts, name, State=state, Reason=reason)
    return bad(facts)


def test_a_pool_that_an_operator_drained_is_no_alarm() -> None:
    found = drained("rack 4 [west] [ada@2026-01-02T03:04:05]", "n1", "n2")
    assert {code: f.level for code, f in found.items()} == {
        "node_drained": Level.WARNING,
        "no_node": Level.WARNING,
    }
    assert "ada took it out at 2026-01-02T03:04:05 (rack 4 [west])" in found["node_drained"].text
    assert "state=resume` puts it back" in found["node_drained"].remedy
    found = drained("fan [root@1795994605]", "n1", slurm_user="root(0)")
    assert found.keys() == {"node_drained"}
    assert "root took it out at 2026-11-29T23:23:25+00:00 (fan)" in found["node_drained"].text


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("Not responding [slurm@2026-01-02T03:04:05]", "DOWN*"),
        ("Not responding [root@2026-01-02T03:04:05]", "DOWN*"),
        ("something new [slurm@2026-01-02T03:04:05]", "IDLE+DRAIN"),
        ("hybridsched: job 7 lost a GPU [root@2026-01-02T03:04:05]", "IDLE+DRAIN"),
        ("Prolog error [root@2026-01-02T03:04:05]", "IDLE+DRAIN"),
        ("fan [ada@2026-01-02T03:04:05]", "IDLE+DRAIN+INVALID_REG"),
        ("", "IDLE+DRAIN"),
    ],
)
def test_a_pool_that_went_away_by_itself_is_one(reason: str, state: str) -> None:
    found = drained(reason, "n1", "n2", state=state)
    assert found["no_node"].level is Level.CRITICAL
    assert found.keys() == {"node_state", "no_node"}
    mixed = examine(changed(right(), "n1", State="DOWN*", Reason="Not responding"), Site())
    assert "no_node" not in {f.code for f in mixed}
