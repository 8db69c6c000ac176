"""The example of hosts with three layouts (tests/golden/slurm/modes), and what `mode gres` prints on them."""

from __future__ import annotations

from pathlib import Path

from hybridsched.core.mig import plan, wants
from hybridsched.core.modes import ModesPolicy, node_name
from hybridsched.mig.fake import FakeMig, fake_gpu
from hybridsched.policyfile import parse_policy
from hybridsched.slurmfiles import Site, load_site
from hybridsched.slurmfiles.mig import gres_conf, parse_minors
from tests.mig_layouts import minors_of

GOLDEN = Path(__file__).resolve().parent / "golden" / "slurm" / "modes"
WAYS = ("records", "reconfigure")


def policy_text(way: str = "records") -> str:
    """The policy's file, of one way or the other."""
    text = (GOLDEN / "policy.toml").read_text()
    if way == "records":
        return text
    for template in ('node = "{host}-evening"\n', 'node = "{host}-night"\n'):
        text = text.replace(template, "")
    return text.replace("enabled = true\ndefault", f'enabled = true\nway = "{way}"\ndefault')


def modes_of(way: str = "records", text: str | None = None) -> ModesPolicy:
    modes = parse_policy(text or policy_text(way)).policy.modes
    assert modes is not None
    return modes


def example_site() -> Site:
    return load_site(GOLDEN / "site.toml")


def printed_lines(modes: ModesPolicy, *, dev: str = "/dev") -> dict[tuple[str, str], list[str]]:
    """Mode and record -> the lines that `mode gres` prints there, of GPUs that the shipped fake cut."""
    found = {}
    for host, group in modes.all_hosts().items():
        for mode in modes.mode:
            fake = FakeMig([fake_gpu(i, group.gpu) for i in range(group.gpus)])
            gpus = fake.read()
            assert fake.apply(plan(gpus, wants(modes.mig_configs[mode.layout], gpus)), lambda _: None).ok
            gpus, name = fake.read(), node_name(mode, host)
            text = gres_conf(name, gpus, "a100", parse_minors(minors_of(gpus)), dev=dev)
            found[mode.name, name] = text.splitlines()
    return found
