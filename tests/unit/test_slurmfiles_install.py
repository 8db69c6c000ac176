"""Installation: the diff first, a backup of each file, nothing half written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from hybridsched.cli.slurm import slurm
from hybridsched.slurmfiles import InstallError, apply, parse_site, plan
from hybridsched.slurmfiles.records import add_words, record, settings

SITE = """
[[nodes]]
names = "n[1-2]"
gpu_type = "a100"
gpus = 4
"""

SLURM_CONF = """# The site's own file
ClusterName=site
GresTypes=gpu
slurmctldparameters=enable_configless   # for the nodes
PreemptType=preempt/none
Prolog=/site/prolog
SchedulerParameters=bf_continue
NodeName=DEFAULT CPUs=8
NodeName=n[1-2] RealMemory=1000 \\
   Gres=gpu:4,nic:1 State=UNKNOWN
PartitionName=online Nodes=n[1-2] Default=YES PriorityTier=1 AllowGroups=lab  # ours
"""


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "slurm.conf").write_text(SLURM_CONF)
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/nvidia[0-3]\n")
    return folder


def test_the_sites_own_settings_are_kept(etc: Path) -> None:
    the_plan = plan(parse_site(SITE), etc)
    assert (etc / "slurm.conf").read_text() == SLURM_CONF, "a plan writes nothing"
    after = next(change.after for change in the_plan.changes if change.path.name == "slurm.conf")
    found = {key: entry.value for key, entry in settings(after).items()}
    assert found["clustername"] == "site"
    assert found["grestypes"] == "gpu,hsfill"
    assert found["slurmctldparameters"] == "enable_configless,preempt_send_user_signal"
    assert found["schedulerparameters"] == "bf_continue,nohold_on_prolog_fail"
    assert found["preempttype"] == "preempt/partition_prio"
    assert found["prolog"] == "/site/prolog"
    assert [sentence for sentence in the_plan.by_hand if "/site/prolog" in sentence]
    node = record(after, "NodeName", "n[1-2]")
    assert node is not None
    assert node.fields["Gres"] == "gpu:a100:4,hsfill:4,nic:1"
    assert node.fields["RealMemory"] == "1000"
    online = record(after, "PartitionName", "online")
    assert online is not None
    assert online.fields["AllowGroups"] == "lab"
    assert online.fields["PriorityTier"] == "100"
    records = next(change.after for change in the_plan.changes if "partitions" in change.path.name)
    assert record(records, "PartitionName", "offline") is not None
    assert record(records, "PartitionName", "online") is None


def test_installing_twice_changes_nothing(etc: Path) -> None:
    first = plan(parse_site(SITE), etc)
    assert first.needed
    backups = apply(first, stamp="one")
    assert sorted(path.name for path in backups) == [
        "gres.conf.hybridsched-one",
        "slurm.conf.hybridsched-one",
    ]
    assert (etc / "slurm.conf.hybridsched-one").read_text() == SLURM_CONF
    again = plan(parse_site(SITE), etc)
    assert again.needed == ()
    assert again.diff() == ""


def test_a_second_backup_does_not_replace_the_first(etc: Path) -> None:
    apply(plan(parse_site(SITE), etc), stamp="same")
    (etc / "slurm.conf").write_text(SLURM_CONF + "# changed\n")
    apply(plan(parse_site(SITE), etc), stamp="same")
    assert (etc / "slurm.conf.hybridsched-same").read_text() == SLURM_CONF
    assert (etc / "slurm.conf.hybridsched-same.2").read_text() == SLURM_CONF + "# changed\n"


def test_a_file_that_changed_meanwhile_is_not_overwritten(etc: Path) -> None:
    the_plan = plan(parse_site(SITE), etc)
    (etc / "slurm.conf").write_text(SLURM_CONF + "# by someone else\n")
    with pytest.raises(InstallError, match="changed meanwhile"):
        apply(the_plan)
    assert sorted(path.name for path in etc.iterdir()) == ["gres.conf", "slurm.conf"]


def test_mode_and_link_are_kept(etc: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared.conf"
    (etc / "slurm.conf").rename(shared)
    shared.chmod(0o640)
    (etc / "slurm.conf").symlink_to(shared)
    apply(plan(parse_site(SITE), etc))
    assert (etc / "slurm.conf").is_symlink()
    assert "hsfill" in shared.read_text()
    assert shared.stat().st_mode & 0o777 == 0o640
    assert (etc / "prolog.sh").stat().st_mode & 0o777 == 0o755


def test_nothing_is_left_when_the_disk_refuses(etc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    the_plan = plan(parse_site(SITE), etc)

    def refuse(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(InstallError, match="No space left"):
        apply(the_plan)
    assert (etc / "slurm.conf").read_text() == SLURM_CONF
    assert not [path for path in etc.iterdir() if path.name.startswith(".")]


def test_nodes_that_slurm_conf_lacks_are_left_to_the_operator(etc: Path) -> None:
    the_plan = plan(parse_site(SITE.replace("n[1-2]", "other[1-2]")), etc)
    assert any("add Gres=gpu:a100:4,hsfill:4" in sentence for sentence in the_plan.by_hand)


def test_install_command(etc: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text(SITE)
    call = ["install", str(site), "--etc", str(etc)]
    dry = CliRunner().invoke(slurm, call)
    assert dry.exit_code == 0
    assert "+PreemptMode=REQUEUE" in dry.output
    assert "add --yes to write" in dry.output
    assert not (etc / "job_submit.lua").exists()
    done = CliRunner().invoke(slurm, [*call, "--yes"])
    assert done.exit_code == 0
    assert "restart slurmctld" in done.output
    assert (etc / "job_submit.lua").exists()
    assert "nothing to write" in CliRunner().invoke(slurm, [*call, "--yes"]).output
    missing = CliRunner().invoke(slurm, ["install", str(site), "--etc", str(tmp_path / "none")])
    assert missing.exit_code == 1
    assert "--etc" in missing.output


@pytest.mark.parametrize(
    ("value", "words", "joined"),
    [
        ("", "lua", "lua"),
        ("(null)", "lua", "lua"),
        ("a,b", "b,c", "a,b,c"),
        ("socket=/x,cred_expire=120", "cred_expire=10", "socket=/x,cred_expire=10"),
    ],
)
def test_add_words(value: str, words: str, joined: str) -> None:
    assert add_words(value, words) == joined
