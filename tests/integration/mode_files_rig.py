"""A testbed that `hybridsched slurm install --policy` made to a site whose hosts have modes.

The GPUs' files are links to /dev/null; their lines are those that `mode gres` would print.
"""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner, Result

from hybridsched.cli.slurm import slurm as command
from hybridsched.slurmfiles import mode_records, parse_site
from tests.mode_files import GOLDEN, modes_of, policy_text, printed_lines
from tests.slurm import Testbed

HOSTS, RECORDS = 2, 3


def hosts_policy(way: str = "records") -> str:
    """The example's policy for the hosts of a testbed."""
    return policy_text(way).replace("gpu[1-2]", "n[1-2]")


class ModeSite:
    """The site file, the policy and the lines of devices in `folder`, on a prepared testbed."""

    def __init__(self, bed: Testbed, folder: Path, way: str = "records") -> None:
        self.bed = bed
        self.file, self.policy = folder / "site.toml", folder / "policy.toml"
        first = bed.port_base + 11
        version = re.search(r"\d+\.\d+", bed.run("scontrol", "--version"))
        assert version is not None
        text = (GOLDEN / "site.toml").read_text().partition('\n[[nodes]]\nnames = "old1"')[0]
        text = text.replace("gpu[1-2]", "n[1-2]").replace(
            '"/dev/nvidia[0-1]"', f'"{bed.state}/mig/nvidia[0-1]"'
        )
        text = text.replace("NodeAddr=10.0.0.[1-2]", f"NodeAddr=127.0.0.1 Port=[{first}-{first + 1}]")
        text = text.replace(" CPUs=32 RealMemory=250000", "")  # the testbed has a line NodeName=DEFAULT
        self.file.write_text(
            f'{text}\n[slurm]\nversion = "{version.group()}"\nkill_wait_s = 5\netc = "{bed.state}/etc"\n'
            f'\n[node]\nrun_dir = "{bed.state}/jobs"\nshm_dir = "{bed.state}/shm"\n'
            '\n[check]\naccept = ["proctrack"]\n'
        )
        self.policy.write_text(hosts_policy(way))
        self.modes = modes_of(text=hosts_policy(way))
        self.records = mode_records(parse_site(self.file.read_text()), self.modes)
        self.devices = folder / "devices"
        lines = printed_lines(self.modes, dev=f"{bed.state}/mig")
        for (mode, name), said in lines.items():
            path = self.devices / mode / f"{name}.conf"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(said) + "\n")
            for file in re.findall(rf"{bed.state}/mig/[^,\s]+", path.read_text()):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                if not Path(file).exists():
                    Path(file).symlink_to("/dev/null")
        # The site's own: its nodes without GPUs, no parked node.
        conf = bed.conf.read_text()
        bed.conf.write_text(re.sub(r"^NodeName=hspark.*\n", "", conf, flags=re.M).replace(",hspark", ""))
        (bed.state / "etc" / "gres.conf").write_text("AutoDetect=off\n")

    def invoke(self, word: str, *more: str) -> Result:
        runner = CliRunner(env={"SLURM_CONF": str(self.bed.conf)})
        return runner.invoke(command, [word, str(self.file), "--policy", str(self.policy), *more])
