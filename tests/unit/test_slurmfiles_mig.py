"""gres.conf and the Gres= of slurm.conf for GPUs that are cut; the files whole against golden ones."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hybridsched.core.mig import Gpu, Piece, Want, plan
from hybridsched.mig.fake import FakeMig, fake_gpu
from hybridsched.slurmfiles.mig import gres_conf, gres_conf_autodetect, gres_field, parse_minors
from tests.mig_layouts import LAYOUTS, cut_gpus, minors_of

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "slurm" / "mig"


@pytest.mark.parametrize("name", LAYOUTS)
def test_golden_files(name: str) -> None:
    gpus = cut_gpus(name)
    node = gres_conf("n1", gpus, "a100", parse_minors(minors_of(gpus)))
    field = f"NodeName=n1 Gres={gres_field([want for _, want in LAYOUTS[name]], 'a100')}\n"
    assert (GOLDEN / f"{name}.gres.conf").read_text() == node
    assert (GOLDEN / f"{name}.slurm.conf").read_text() == field


def test_every_golden_file_is_of_a_layout() -> None:
    assert {path.name.partition(".")[0] for path in GOLDEN.iterdir()} == set(LAYOUTS)


def test_where_slurm_finds_the_gpus_itself() -> None:
    slices = Want(enabled=True, pieces=(Piece(profile="1g.10gb"),) * 7)
    assert gres_conf_autodetect("n1", [slices, slices], "a100") == "NodeName=n1 AutoDetect=nvml\n"
    assert gres_field([slices, slices], "a100") == "gpu:1g.10gb:14"
    with pytest.raises(ValueError, match=r"1g\.10gb\+me cannot be had"):
        gres_conf_autodetect("n1", [Want(enabled=True, pieces=(Piece(profile="1g.10gb+me"),))], "a100")
    with pytest.raises(ValueError, match="whole GPUs beside slices"):
        gres_conf_autodetect("n1", [slices, Want(enabled=False)], "a100")


def test_the_drivers_table_is_read_and_what_is_no_line_of_it_left_out() -> None:
    text = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n\nnonsense\n"
    assert parse_minors(text) == {"gpu0/gi0/access": 3, "gpu0/gi0/ci0/access": 4}


def cut(*names: str) -> Gpu:
    fake = FakeMig([fake_gpu(0, "a100-80gb")])
    want = Want(enabled=True, pieces=tuple(Piece(profile=name) for name in names))
    assert fake.apply(plan(fake.read(), {0: want}), lambda _: None).ok
    return fake.read()[0]


def test_a_half_cut_gpu_gets_no_lines() -> None:
    gpu = cut("3g.40gb")
    instance = msgspec.structs.replace(gpu.instances[0], compute=())
    half = msgspec.structs.replace(gpu, instances=(instance,))
    with pytest.raises(ValueError, match=r"GPU 0: 3g\.40gb at 0 has 0 compute instances"):
        gres_conf("n1", [half], "a100", parse_minors(minors_of([gpu])))


def test_a_table_without_the_instance_is_said() -> None:
    with pytest.raises(ValueError, match="has no gpu0/gi1/access"):
        gres_conf("n1", [cut("3g.40gb")], "a100", {})


def test_a_gpu_whose_device_file_is_unknown_is_said() -> None:
    gpu = msgspec.structs.replace(fake_gpu(0, "a100-80gb"), minor=None)
    with pytest.raises(ValueError, match="GPU 0: the number of its device file is unknown"):
        gres_conf("n1", [gpu], "a100", {})
