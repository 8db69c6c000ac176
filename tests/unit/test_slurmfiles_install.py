"""Installation: the diff first, a backup of each file, nothing half written."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hybridsched.cli.slurm import slurm
from hybridsched.slurmfiles import InstallError, apply, install, parse_site, plan
from hybridsched.slurmfiles.records import add_words, leftovers, record, settings

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


def slurm_conf_after(etc: Path, site: str = SITE) -> str:
    return next(c.after for c in plan(parse_site(site), etc).changes if c.path.name == "slurm.conf")


def conf_with(etc: Path, *lines: str) -> None:
    """The site's slurm.conf with other lines for its nodes."""
    text = SLURM_CONF.replace(
        "NodeName=n[1-2] RealMemory=1000 \\\n   Gres=gpu:4,nic:1 State=UNKNOWN\n", "\n".join(lines) + "\n"
    )
    assert text != SLURM_CONF
    (etc / "slurm.conf").write_text(text)


def test_a_kill_wait_of_the_site_stays_unless_the_site_file_names_one(etc: Path) -> None:
    (etc / "slurm.conf").write_text(SLURM_CONF + "KillWait=90\n")
    assert settings(slurm_conf_after(etc))["killwait"].value == "90"
    named = SITE + "[slurm]\nkill_wait_s = 45\n"
    assert settings(slurm_conf_after(etc, named))["killwait"].value == "45"


def test_a_consumed_gate_of_an_older_release_gives_way(etc: Path) -> None:
    conf_with(etc, "NodeName=n[1-2] CPUs=8 Gres=gpu:a100:4,hsfill:4,nic:no_consume:2,gpu:1g.10gb:2")
    node = record(slurm_conf_after(etc), "NodeName", "n[1-2]")
    assert node is not None
    assert node.fields["Gres"] == ("gpu:a100:4,hsfill:no_consume:4,hslane:4,nic:no_consume:2,gpu:1g.10gb:2")


def test_a_dry_run_shows_the_lines_that_change_and_names_what_is_new(etc: Path) -> None:
    said = plan(parse_site(SITE), etc).diff()
    assert len(said.splitlines()) < 80, "the scripts themselves are for `render`"
    assert f"New: {etc / 'job_submit.lua'}, " in said
    assert said.index("New: ") < said.index("+GresTypes=gpu,hsfill,hslane")


def test_nodes_with_a_line_each_are_the_group_too(etc: Path) -> None:
    conf_with(etc, "NodeName=n1 CPUs=4", "NodeName=n2 CPUs=8 Gres=nic:1")
    after = slurm_conf_after(etc)
    for name in ("n1", "n2"):
        node = record(after, "NodeName", name)
        assert node is not None
        assert node.fields["Gres"].startswith("gpu:a100:4,hsfill:no_consume:4,hslane:4")
    assert not plan(parse_site(SITE), etc).by_hand[1:], "but for the prolog nothing is left to do"


def test_a_line_with_other_nodes_is_left_and_said(etc: Path) -> None:
    conf_with(etc, "NodeName=n[1-8] CPUs=4")
    the_plan = plan(parse_site(SITE), etc)
    assert any("NodeName=n[1-8]" in said and "divide it" in said for said in the_plan.by_hand)


def test_nodes_are_never_defined_twice(etc: Path) -> None:
    conf_with(etc, "NodeName=n1 CPUs=4")
    with pytest.raises(InstallError, match="none for n2"):
        plan(parse_site(SITE + 'options = "CPUs=4"\n'), etc)
    assert any("NodeName=n2" in said for said in plan(parse_site(SITE), etc).by_hand)


def test_blanks_round_the_sign_are_slurm_s_too(etc: Path) -> None:
    """`Gres = x` became `Gres=new = x`: slurmctld ended with a parse error."""
    conf_with(etc, "nodename = n[1-2] cpus=64 gres = gpu:a100:8  # racks", 'NodeName=n3 Reason="a  b = c"')
    after = slurm_conf_after(etc)
    (line,) = [line for line in after.split("\n") if "n[1-2]" in line and "cpus" in line]
    assert line == "nodename = n[1-2] cpus=64 gres=gpu:a100:4,hsfill:no_consume:4,hslane:4  # racks"
    assert leftovers(after) == []
    assert 'NodeName=n3 Reason="a  b = c"' in after


@pytest.mark.parametrize("mark", ["\f", "\u2028", "\x85", "\v", "\r", "\x1c"])
def test_only_a_line_feed_ends_a_comment(etc: Path, mark: str) -> None:
    """The rest of the comment became a setting."""
    text = SLURM_CONF + f"# old:{mark}SelectType=select/linear{mark}GresTypes=x\n"
    (etc / "slurm.conf").write_text(text, newline="")
    the_plan = plan(parse_site(SITE), etc)
    apply(the_plan)
    after = (etc / "slurm.conf").read_bytes().decode()
    assert text.split("\n")[-2] in after.split("\n")
    assert settings(after)["grestypes"].value == "gpu,hsfill,hslane"
    assert plan(parse_site(SITE), etc).needed == ()


def test_an_included_file_is_changed_where_the_line_stands(etc: Path, tmp_path: Path) -> None:
    """With nodes.options the nodes were written a second time: "fatal: Duplicated NodeName"."""
    conf_with(etc, "Include nodes.conf", f"include {tmp_path}/more.conf", "Include deeper.conf")
    (etc / "nodes.conf").write_text("NodeName=n1 CPUs=8 Gres=gpu:4\nGresTypes=gpu,nic\n")
    (tmp_path / "more.conf").write_text("# more\nInclude deepest.conf\n")
    (etc / "deepest.conf").write_text("NodeName=n2 CPUs=8\nNodeName=n9 CPUs=1 Gres=nic:1\n")
    (etc / "deeper.conf").write_text("PartitionName=offline Nodes=n[1-2] PriorityTier=9\n")
    the_plan = plan(parse_site(SITE + 'options = "CPUs=4"\n'), etc)
    apply(the_plan)
    for name, node in (("nodes.conf", "n1"), ("deepest.conf", "n2")):
        found = record((etc / name).read_text(), "NodeName", node)
        assert found is not None
        assert found.fields["Gres"] == "gpu:a100:4,hsfill:no_consume:4,hslane:4"
    assert "NodeName=n9 CPUs=1 Gres=nic:1\n" in (etc / "deepest.conf").read_text()
    ours = (etc / "hybridsched-partitions.conf").read_text()
    assert record(ours, "NodeName", "n[1-2]") is None
    assert record(ours, "PartitionName", "offline") is None
    offline = record((etc / "deeper.conf").read_text(), "PartitionName", "offline")
    assert offline is not None
    assert offline.fields["PriorityTier"] == "1"
    # Later in Slurm's order than slurm.conf's own line, and so the one that counts.
    assert settings((etc / "nodes.conf").read_text())["grestypes"].value == "gpu,nic,hsfill,hslane"
    assert (tmp_path / "more.conf").read_text() == "# more\nInclude deepest.conf\n"
    assert plan(parse_site(SITE + 'options = "CPUs=4"\n'), etc).needed == ()


def test_an_included_file_that_is_not_there_is_said(etc: Path) -> None:
    conf_with(etc, "Include nodes.conf")
    with pytest.raises(InstallError, match=r"nodes\.conf does not exist, and slurm.conf includes it"):
        plan(parse_site(SITE), etc)


def test_nothing_is_written_where_more_than_meant_would_change(etc: Path) -> None:
    (etc / "slurm.conf").write_text(SLURM_CONF + "PreemptMode=OFF MaxJobCount=7\n")
    with pytest.raises(InstallError, match="PreemptMode=OFF, would change beside what is meant"):
        plan(parse_site(SITE), etc)


def test_a_file_that_reads_otherwise_than_written_is_put_back(
    etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    the_plan = plan(parse_site(SITE), etc)
    write = install.write

    def torn(change: install.Change) -> None:
        spoiled = change.path.name == "slurm.conf" and change.after != SLURM_CONF
        write(replace(change, after=change.after[:-9]) if spoiled else change)

    monkeypatch.setattr(install, "write", torn)
    with pytest.raises(InstallError, match="was put back"):
        apply(the_plan)
    assert (etc / "slurm.conf").read_text() == SLURM_CONF


def test_the_sites_own_settings_are_kept(etc: Path) -> None:
    the_plan = plan(parse_site(SITE), etc)
    assert (etc / "slurm.conf").read_text() == SLURM_CONF, "a plan writes nothing"
    after = next(change.after for change in the_plan.changes if change.path.name == "slurm.conf")
    found = {key: entry.value for key, entry in settings(after).items()}
    assert found["clustername"] == "site"
    assert found["grestypes"] == "gpu,hsfill,hslane"
    assert found["slurmctldparameters"] == "enable_configless,preempt_send_user_signal"
    assert found["schedulerparameters"] == "bf_continue,nohold_on_prolog_fail"
    assert found["preempttype"] == "preempt/partition_prio"
    assert found["prolog"] == "/site/prolog"
    assert [sentence for sentence in the_plan.by_hand if "/site/prolog" in sentence]
    node = record(after, "NodeName", "n[1-2]")
    assert node is not None
    assert node.fields["Gres"] == "gpu:a100:4,hsfill:no_consume:4,hslane:4,nic:1"
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
    assert any(
        "add Gres=gpu:a100:4,hsfill:no_consume:4,hslane:4" in sentence for sentence in the_plan.by_hand
    )


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
