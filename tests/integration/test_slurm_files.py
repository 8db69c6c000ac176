"""`hybridsched slurm install` and `check` on real daemons: a cluster made right, and made wrong in turn."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hybridsched.cli.slurm import slurm as command
from tests.helpers import wait_until
from tests.slurm import Testbed, new_state, require_slurm, sweep

# Several slurmd on one machine cannot use cgroups; the rest of the testbed is a site as it should be.
SITE = """
[partitions]
grace_s = 30
[[nodes]]
names = "n1"
gpu_type = "a100"
gpus = 2
[[nodes]]
names = "n2"
gpu_type = "a100"
gpus = 2
[slurm]
version = "{version}"
kill_wait_s = 5
[check]
accept = ["proctrack"]
"""


@pytest.fixture
def bed() -> Iterator[Testbed]:
    """A testbed whose files are written and whose daemons do not run yet."""
    require_slurm()
    sweep()
    testbed = Testbed(new_state(), nodes=2, gpus=2)
    try:
        testbed.up("--prepare")
        yield testbed
    finally:
        testbed.down()


@pytest.fixture
def site(bed: Testbed, tmp_path: Path) -> Path:
    version = re.search(r"\d+\.\d+", bed.run("scontrol", "--version"))
    assert version is not None
    path = tmp_path / "site.toml"
    path.write_text(SITE.format(version=version.group()))
    return path


def check(bed: Testbed, *options: str) -> Result:
    return CliRunner(env={"SLURM_CONF": str(bed.conf)}).invoke(command, ["check", *options])


def edit(bed: Testbed, old: str, new: str, *, file: str = "slurm.conf") -> None:
    """Change one file of the prepared testbed; the test fails where `old` is not in it."""
    path = bed.state / "etc" / file
    text = path.read_text()
    changed = re.sub(old, new, text, flags=re.MULTILINE)
    assert changed != text, f"{old} is not in {file}"
    path.write_text(changed)


def test_a_right_cluster_is_ok(clean_slurm: Testbed, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('[slurm]\nkill_wait_s = 5\n[check]\naccept = ["proctrack"]\n')
    answer = check(clean_slurm, str(path))
    assert answer.exit_code == 0, answer.output
    assert re.fullmatch(r"SLURM OK - \d+ ok\n", answer.output)
    shown = check(clean_slurm, str(path), "--all").output
    assert "live count of hsfill: n1 4, n2 4, n3 4, n4 4" in shown
    assert "accepted by the site file: ProctrackType" in shown


def test_without_a_site_file_the_default_names_are_checked(clean_slurm: Testbed) -> None:
    answer = check(clean_slurm)
    assert answer.exit_code == 1, answer.output
    assert [line.split(":")[0] for line in answer.output.splitlines()[1:]] == ["WARNING proctrack"]
    assert ". Remedy: ProctrackType=proctrack/cgroup" in answer.output


PLANTED = {
    "tiers": (2, [("PriorityTier=100", "PriorityTier=1")], "PriorityTier=100 for online"),
    "preempt_type": (
        2,
        [
            ("^PreemptType=.*", "PreemptType=preempt/none"),
            ("^PreemptMode=.*", "PreemptMode=OFF"),
            (" PreemptMode=(OFF|REQUEUE)", ""),
        ],
        "PreemptType=preempt/partition_prio",
    ),
    "offline_preempt_mode": (2, [(" PreemptMode=REQUEUE", " PreemptMode=CANCEL")], "PreemptMode=REQUEUE"),
    "online_preemptable": (1, [(" PreemptMode=OFF", " PreemptMode=REQUEUE")], "PreemptMode=OFF"),
    "user_signal": (2, [("^(Slurmctld|Preempt)Parameters=.*", "")], "send_user_signal"),
    "grace_time": (2, [(" GraceTime=30", "")], "GraceTime=30"),
    "offline_max_time": (1, [("MaxTime=1-00:00:00", "MaxTime=INFINITE")], "MaxTime=1-00:00:00"),
    "job_requeue": (2, [("^JobRequeue=1", "JobRequeue=0")], "JobRequeue=1"),
    "kill_wait": (1, [("^KillWait=.*", "KillWait=1")], "KillWait=5"),
    "fill_gres_type": (
        2,
        [("GresTypes=gpu,hsfill,hslane", "GresTypes=gpu"), (",hsfill:no_consume:2,hslane:2", "")],
        "add hsfill,hslane to GresTypes",
    ),
    "fill_nodes": (
        2,
        [(r"^(NodeName=n\d.*),hsfill:no_consume:2", r"\1")],
        "add hsfill:no_consume:N to Gres=",
    ),
    "place_nodes": (2, [(r"^(NodeName=n\d.*),hslane:2", r"\1")], "add hslane:N to Gres="),
    "fill_consumed": (2, [("hsfill:no_consume:2", "hsfill:2")], "hsfill:no_consume:N in Gres="),
    "node_sizes": (
        1,
        [
            ("^(NodeName=DEFAULT.*) Sockets=1 CoresPerSocket=16", r"\1 Sockets=2 CoresPerSocket=8"),
            ("^NodeName=hspark", "NodeName=hspark CPUs=1024"),
        ],
        "Sockets=, CoresPerSocket= and ThreadsPerCore=",
    ),
    "parked_node": (2, [("^NodeName=hspark.*", ""), (",hspark", "")], "NodeName=hspark NodeAddr=127.0.0.1"),
    "job_submit": (2, [("^JobSubmitPlugins=lua", "")], "JobSubmitPlugins=lua"),
    "prolog": (1, [("^Prolog=.*", "")], "Prolog=/etc/slurm/prolog.sh"),
    "prolog_hold": (1, [(",nohold_on_prolog_fail", "")], "nohold_on_prolog_fail"),
    "default_memory": (
        2,
        [("^SelectTypeParameters=.*", "SelectTypeParameters=CR_Core_Memory")],
        "DefMemPerCPU=N",
    ),
    "preempt_exempt": (
        2,
        [("^PreemptExemptTime=.*", "PreemptExemptTime=1-00:00:00")],
        "PreemptExemptTime=00:00:05",
    ),
    "hook_timeout": (1, [("^PrologEpilogTimeout=.*", "PrologEpilogTimeout=5")], "PrologEpilogTimeout=120"),
    "epilog_path": (2, [("^Epilog=.*", "Epilog=/nowhere/epilog.sh")], "correct Epilog in slurm.conf"),
    "places_fewer": (1, [("hslane:2", "hslane:1")], "give hslane the count of hsfill"),
    "partition_missing": (2, [("^PartitionName=offline", "PartitionName=night")], "PartitionName=offline"),
    "no_common_nodes": (
        2,
        [(r"(PartitionName=online Nodes=)n\[1-2\]", r"\1n1"), (r"(=offline Nodes=)n\[1-2\]", r"\1n2")],
        "put the nodes of online",
    ),
}


@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_misconfiguration_is_found(bed: Testbed, site: Path, code: str) -> None:
    status, edits, remedy = PLANTED[code]
    for old, new in edits:
        edit(bed, old, new)
    # What is planted stands in slurmctld's configuration: no node needs to run.
    bed.up("--controller-only")
    answer = check(bed, str(site), "--json")
    seen = json.loads(answer.stdout)
    found = [f for f in seen["findings"] if f["code"] == code]
    level = {1: "warning", 2: "critical"}[status]
    assert [f["level"] for f in found] == [level], answer.output
    assert remedy in found[0]["remedy"]
    assert seen["status"] == answer.exit_code == 2
    # Nothing else is called wrong: the nodes that do not run, and what follows from the planted one.
    others = {f["code"] for f in seen["findings"] if f["level"] not in ("ok",)} - {code}
    follows = {"preempt_type": {"offline_preempt_mode", "online_preemptable"}}
    assert others - {"node_state", "no_node"} <= follows.get(code, set()), answer.output


def test_another_job_submit_script_is_found(bed: Testbed, site: Path) -> None:
    bed.up("--controller-only")
    script = bed.state / "etc" / "job_submit.lua"
    script.write_text(
        "function slurm_job_submit() return slurm.SUCCESS end\n"
        "function slurm_job_modify() return slurm.SUCCESS end\nreturn slurm.SUCCESS\n"
    )
    # slurmctld looks at the time of change, in seconds.
    os.utime(script, (time.time() + 5, time.time() + 5))
    answer = check(bed, str(site))
    assert answer.exit_code == 2
    assert "CRITICAL job_submit: a job of partition offline without what it needs was " in answer.output
    assert "job_submit.lua is not this site's, or has not loaded. Remedy: put the rendered" in answer.output


def test_a_parked_node_that_was_resumed_is_found(bed: Testbed, site: Path) -> None:
    bed.up("--controller-only")
    bed.run("scontrol", "update", "nodename=hspark", "state=resume")
    answer = check(bed, str(site))
    assert "jobs would be sent to it" in answer.output


def test_missing_device_files_are_found(bed: Testbed, site: Path) -> None:
    edit(bed, "^(NodeName=n1 Name=gpu.*File=).*", r"\1/dev/nowhere[0-1]", file="gres.conf")
    bed.up("--controller-only")
    answer = check(bed, str(site))
    assert answer.exit_code == 2
    assert (
        "CRITICAL device_file: gres.conf of n1 names /dev/nowhere0: No such file or directory"
        in answer.output
    )
    assert "/dev/nowhere1" in answer.output


def test_a_drained_node_is_found_with_its_reason(clean_slurm: Testbed) -> None:
    clean_slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=Prolog error")
    answer = check(clean_slurm)
    assert (
        "WARNING node_state: n3 is IDLE+DRAIN (Prolog error). Remedy: look for `prolog` in syslog"
        in answer.output
    )


def test_a_pool_that_an_operator_drained_is_no_alarm(clean_slurm: Testbed) -> None:
    """Its reason is no UTF-8, which ended the check in a traceback."""
    for name in ("n1", "n2", "n3"):
        said = b"reason=caf\xe9"
        drain = [*(word.encode() for word in ("scontrol", "update", f"nodename={name}", "state=drain")), said]
        subprocess.run(drain, env=clean_slurm.env, check=True, timeout=20)
    answer = check(clean_slurm)
    assert not isinstance(answer.exception, Exception)
    assert "WARNING node_drained: n1 is IDLE+DRAIN: root took it out at 20" in answer.output
    assert "(caf\ufffd)" in answer.output
    assert "CRITICAL no_node" not in answer.output


def test_no_other_partition_takes_places(clean_slurm: Testbed) -> None:
    for gres in ("hslane:2", "hsfill:1", "gpu:1,hslane:1"):
        done = clean_slurm.attempt("sbatch", "-p", "online", f"--gres={gres}", "--wrap=true")
        assert done.returncode != 0
        assert "is for partition offline only" in done.stderr
    assert clean_slurm.sbatch("-p", "online", "--gres=gpu:1", "--wrap=true")


def test_no_answer_is_unknown(tmp_path: Path, bed: Testbed) -> None:
    answer = check(bed, "--timeout", "1")
    assert answer.exit_code == 3
    assert answer.output.startswith("SLURM UNKNOWN - 1 unknown\nUNKNOWN unreachable: `scontrol show config` ")
    bad = tmp_path / "site.toml"
    bad.write_text("[partitions]\ncolour = 1\n")
    assert check(bed, str(bad)).exit_code == 3


def test_a_plain_cluster_becomes_right_by_install(bed: Testbed, site: Path) -> None:
    """From a slurm.conf without any of it to a cluster on which an offline job runs."""
    for name in ("job_submit.lua", "prolog.sh", "epilog.sh", "hybridsched-node.conf"):
        (bed.state / "etc" / name).unlink()
    edit(
        bed,
        "^(JobSubmitPlugins|Prolog|Epilog|PrologEpilogTimeout|Preempt.*"
        "|SlurmctldParameters|JobRequeue|KillWait)=.*\n",
        "",
    )
    edit(bed, "^NodeName=hspark.*\n", "")
    edit(bed, "^PartitionName=o.*\n", "")
    edit(bed, "GresTypes=gpu,hsfill,hslane", "GresTypes=gpu")
    edit(bed, ",hsfill:no_consume:2,hslane:2", "")
    edit(bed, ",nohold_on_prolog_fail", "")
    edit(bed, "^.*Name=(hsfill|hslane).*\n", "", file="gres.conf")
    edit(bed, r"\Z", "PartitionName=all Nodes=n[1-2] Default=YES\n")
    bed.up()
    assert check(bed, str(site)).exit_code == 2
    bed.kill("slurmctld", 15)
    for node in bed.nodes:
        bed.kill(f"slurmd-{node}", 15)

    text = site.read_text().replace('version = "', f'etc = "{bed.state}/etc"\nversion = "')
    site.write_text(text + f'[node]\nlog = "{bed.state}/log/hooks.log"\nrun_dir = "{bed.state}/jobs"\n')
    done = CliRunner().invoke(command, ["install", str(site), "--yes"])
    assert done.exit_code == 0, done.output
    bed.up("--no-hooks")
    answer = check(bed, str(site))
    assert answer.exit_code == 0, answer.output
    for node in bed.nodes:
        bed.set_fill(node, 0)
    night = check(bed, str(site))
    assert night.exit_code == 0, f"all lanes closed is no fault: {night.output}"
    job = bed.sbatch(
        script="#!/bin/bash\n#SBATCH -p offline --gres=hsfill:1 --signal=B:USR2@60\n"
        "#SBATCH --open-mode=append --time=5\necho ran\n"
    )
    assert bed.job(job)["JobState"] == "PENDING"
    bed.set_fill("n2", 1)
    bed.wait_job(job, "COMPLETED")
    wait_until(lambda: "ran" in bed.output(job), what="the job's output")
