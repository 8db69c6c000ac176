"""The real slurmd reads what is rendered for GPUs that are cut. Their files are links to /dev/null."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridsched.slurmfiles.mig import (
    counts,
    devices,
    gres_conf,
    gres_conf_autodetect,
    gres_field,
    parse_minors,
)
from tests.mig_layouts import LAYOUTS, cut_gpus, minors_of
from tests.slurm import Testbed, new_state, require_slurm, sweep

ADMISSION = "hsfill:no_consume:2,hslane:2"


@pytest.fixture
def bed() -> Iterator[Testbed]:
    """A testbed whose files are written and of which nothing runs."""
    require_slurm()
    sweep()
    testbed = Testbed(new_state(), nodes=1, gpus=2)
    try:
        testbed.up("--prepare", "--no-hooks")
        yield testbed
    finally:
        testbed.down()


def put(bed: Testbed, field: str, gres: str) -> None:
    """Give node n1 this Gres= and these lines of gres.conf, and make the files that they name."""
    text = bed.conf.read_text()
    changed, count = re.subn(
        r"^(NodeName=(?:n1|hspark) .*Gres=)\S+", rf"\1{field},{ADMISSION}", text, flags=re.MULTILINE
    )
    assert count == 2
    bed.conf.write_text(changed)
    fill = "NodeName=n1 Name=hsfill Count=2\nNodeName=n1 Name=hslane Count=2\n"
    (bed.state / "etc" / "gres.conf").write_text(gres + fill)
    for path in re.findall(rf"{bed.state}/mig/[^,\s]+", gres):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        if not Path(path).exists():
            Path(path).symlink_to("/dev/null")


def said(bed: Testbed) -> str:
    """What `slurmd -G` prints: the GRES of the node by both files together."""
    answer = bed.attempt("slurmd", "-G", "-N", "n1", "-f", str(bed.conf))
    assert answer.returncode == 0, answer.stderr
    return answer.stdout + answer.stderr


@pytest.mark.parametrize("name", LAYOUTS)
def test_slurmd_has_every_device_of_a_layout_and_complains_of_nothing(bed: Testbed, name: str) -> None:
    gpus = cut_gpus(name)
    wants = [want for _, want in LAYOUTS[name]]
    gres = gres_conf("n1", gpus, "a100", parse_minors(minors_of(gpus)), dev=f"{bed.state}/mig")
    put(bed, gres_field(wants, "a100"), gres)
    found = said(bed)
    lines = re.findall(r"Gres Name=gpu Type=(\S+) Count=(\d+) .*?File=(\S+)", found)
    total: Counter[str] = Counter()
    for kind, count, _ in lines:
        total[kind] += int(count)
    assert dict(total) == counts(wants, "a100")
    if name != "whole":  # whole GPUs of one type stand in one line
        assert [path for *_, path in lines] == re.findall(r"Files?=(\S+)", gres), "in the rendered order"
    rest = [line for line in found.splitlines() if "Gres Name=" not in line]
    assert rest == [], "slurmd has no complaint"


def test_the_order_is_that_of_gres_in_slurm_conf_and_in_a_type_that_of_gres_conf(bed: Testbed) -> None:
    """What `devices` says of the numbers, with a gres.conf that is turned round."""
    gpus = cut_gpus("beside")
    gres = gres_conf("n1", gpus, "a100", parse_minors(minors_of(gpus)), dev=f"{bed.state}/mig")
    lines = gres.splitlines(keepends=True)
    put(bed, gres_field([want for _, want in LAYOUTS["beside"]], "a100"), "".join(reversed(lines)))
    found = re.findall(r"Gres Name=gpu .*?File=(\S+)", said(bed))
    a100, media, *twos = re.findall(r"Files?=(\S+)", gres)
    assert found == [a100, media, *reversed(twos)]


def test_fewer_devices_than_slurm_conf_says_are_noticed(bed: Testbed) -> None:
    """The check above can fail: what is missing in gres.conf shows."""
    gpus = cut_gpus("mixed")
    gres = gres_conf("n1", gpus, "a100", parse_minors(minors_of(gpus)), dev=f"{bed.state}/mig")
    put(bed, "gpu:1g.10gb:4,gpu:3g.40gb:1", "".join(gres.splitlines(keepends=True)[:-1]))
    assert "Type=3g.40gb" not in re.sub(r"Count=0.*", "", said(bed))


def test_slurmd_reads_the_line_of_autodetection(bed: Testbed) -> None:
    """Debian's slurmd is built without NVML: it reads the line and says what it lacks."""
    wants = [want for _, want in LAYOUTS["sevenths"]]
    put(bed, gres_field(wants, "a100"), gres_conf_autodetect("n1", wants, "a100"))
    found = said(bed)
    assert "nvml" in found.lower()
    assert "hsfill" in found


@pytest.mark.parametrize("turned", [False, True], ids=["as-rendered", "turned-round"])
def test_a_node_of_slices_registers_and_jobs_get_the_numbers_of_the_rendered_order(
    bed: Testbed, turned: bool
) -> None:
    gpus = cut_gpus("beside")
    gres = gres_conf("n1", gpus, "a100", parse_minors(minors_of(gpus)), dev=f"{bed.state}/mig")
    if turned:  # the order of gres.conf's types does not matter
        gres = "".join(reversed(gres.splitlines(keepends=True)))
    put(bed, gres_field([want for _, want in LAYOUTS["beside"]], "a100"), gres)
    bed.up("--no-hooks")
    assert bed.run("sinfo", "-h", "-n", "n1", "-o", "%t").strip() == "idle"
    kinds = [device.kind for device in devices(gpus, "a100")]
    assert kinds == ["a100", "1g.10gb.me", "2g.20gb", "2g.20gb", "2g.20gb"]
    for kind in dict.fromkeys(kinds):
        numbers = [str(number) for number, other in enumerate(kinds) if other == kind]
        words = ["sh", "-c", "echo $SLURM_STEP_GPUS $CUDA_VISIBLE_DEVICES"]
        seen = bed.run("srun", "-p", "online", f"--gres=gpu:{kind}:{len(numbers)}", *words)
        assert seen.split() == [",".join(numbers)] * 2, "by files Slurm knows no UUID"
