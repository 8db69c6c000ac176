"""docs/modes-first-switch.md, as an operator pastes its trial on one machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hybridsched.ports import KeptPorts
from tests.integration.pages import ROOT, paste, shell_lines
from tests.slurm import Testbed, new_state, require_slurm, sweep


@pytest.mark.timeout(240)
def test_the_page_can_be_pasted(tmp_path: Path) -> None:
    require_slurm()
    sweep()
    bed = Testbed(new_state(), nodes=2, gpus=4, records=2)
    first = bed.port_base + 11
    place = f"--state {bed.state} --port-base {bed.port_base}"
    with KeptPorts([0]) as kept:
        changes = {
            "$PWD/.venv/bin": str(Path(sys.executable).parent),
            "17011-17012": f"{first}-{first + 1}",
            "testbed/up --nodes": f"testbed/up {place} --nodes",
            "testbed/up\n": f"testbed/up --state {bed.state}\n",
            "testbed/down": f"testbed/down --state {bed.state}",
            "6390": str(kept.numbers[0]),
            "first/": f"{tmp_path}/first/",
            "-p first ": f"-p {tmp_path}/first ",
            "rm -r first": f"rm -r {tmp_path}/first",
        }
        script = shell_lines("modes-first-switch.md", changes)
        try:
            status, out, err = paste(script, ROOT)
        finally:
            bed.down()
    assert status == 0, out + err
    assert out.count("SLURM OK - ") == 2, out
    assert re.search(r"^NodeName=n2-night Gres=gpu:a100:2,.* NodeHostname=n2 ", out, re.M), out
    assert re.search(r"^n1 +night +serving", out, re.M), out
    assert re.search(r"^n1-night idle\*? gpu:a100:2", out, re.M), out
    assert "Approved day@" in out
    assert re.search(r"^n1 +day +serving", out.rpartition("Approved")[2], re.M), out
    assert not (tmp_path / "first").exists()
