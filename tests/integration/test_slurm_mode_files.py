"""The records of all modes, put in place on a testbed: what the real slurmd and slurmctld say of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.mode_files_rig import HOSTS, RECORDS, ModeSite, hosts_policy
from tests.integration.modes_rig import HAND
from tests.slurm import Testbed, new_state, require_slurm, sweep


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ModeSite]:
    require_slurm()
    sweep()
    bed = Testbed(new_state(), nodes=HOSTS, gpus=2, records=RECORDS)
    try:
        bed.up("--prepare")
        made = ModeSite(bed, tmp_path)
        answer = made.invoke("install", "--devices", str(made.devices), "--yes")
        assert answer.exit_code == 0, answer.output
        yield made
    finally:
        bed.down()


def test_slurmd_has_the_devices_of_every_record_and_complains_of_nothing(site: ModeSite) -> None:
    assert len(site.records) == HOSTS * RECORDS
    for record in site.records:
        answer = site.bed.attempt("slurmd", "-G", "-N", record.name, "-f", str(site.bed.conf))
        said = answer.stdout + answer.stderr
        assert answer.returncode == 0, said
        total: Counter[str] = Counter()
        for kind, count in re.findall(r"Gres Name=gpu Type=(\S+) Count=(\d+)", said):
            total[kind] += int(count)
        assert total == record.group.gpus, record.name
        for name in ("hsfill", "hslane"):
            assert f"Gres Name={name} Type=(null) Count={record.group.lanes} " in said, said
        assert [line for line in said.splitlines() if "Gres Name=" not in line] == []


def test_slurmd_notices_a_record_whose_lines_are_missing(site: ModeSite) -> None:
    """The test above can fail."""
    path = site.bed.state / "etc" / "hybridsched-gres.conf"
    path.write_text(re.sub(r"^NodeName=n1-night Name=gpu.*\n", "", path.read_text(), flags=re.M))
    said = site.bed.attempt("slurmd", "-G", "-N", "n1-night", "-f", str(site.bed.conf))
    assert "Type=a100" not in re.sub(r".*Count=0.*", "", said.stdout + said.stderr)


@pytest.mark.timeout(120)
def test_slurmctld_takes_each_record_and_the_check_finds_what_is_not_the_policys(site: ModeSite) -> None:
    bed = site.bed
    bed.up()
    resting = [record.name for record in site.records if record.name != record.host]
    for name in resting:
        bed.run("scontrol", "update", f"nodename={name}", "state=down", "reason=by day")
    answer = site.invoke("check", "--all")
    assert answer.exit_code == 0, answer.output
    assert "OK mode_records: 6 node records of 2 hosts are as the policy's modes have them" in answer.output

    # n1 through all of its modes: registered, never refused, a job gets what the mode has.
    for record in [r for r in site.records if r.host == "n1"]:
        for other in site.records:
            if other.host == "n1" and other.name != record.name:
                bed.run(str(HAND), "n1", "slurmd-stop", other.name)
                bed.run("scontrol", "update", f"nodename={other.name}", "state=down", "reason=a test")
        bed.run(str(HAND), "n1", "slurmd-start", record.name)
        bed.attempt("scontrol", "update", f"nodename={record.name}", "state=resume")
        for kind, count in record.group.gpus.items():
            gres = f"--gres=gpu:{kind}:{count}"
            said = bed.run(
                "srun", "-p", "online", "-w", record.name, gres, "sh", "-c", "echo $SLURM_STEP_GPUS"
            )
            assert len(said.split(",")) == count, (record.name, kind, said)
    assert not re.search(r"count (reported lower|changed)|INVALID_REG", bed.log())
    assert site.invoke("check").exit_code == 0, "n1 is in another mode now, and that is as it should be"

    # A policy that wants more than was put in place.
    site.policy.write_text(
        hosts_policy().replace('"3g.40gb" = 2', '"2g.20gb" = 3').replace("-night", "-dark")
    )
    answer = site.invoke("check")
    assert answer.exit_code == 2
    assert "CRITICAL mode_record_missing: Slurm has no node n1-dark, n2-dark: " in answer.output
    assert (
        "CRITICAL mode_record_gres: node n1 has gpu:3g.40gb:4; the policy has gpu:2g.20gb:6 in"
        in answer.output
    )
    assert ". Remedy: `hybridsched slurm install`" in answer.output
