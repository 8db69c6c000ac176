"""Verdicts of both GPU probes, the prolog's and the replica's, over the same stand-in for nvidia-smi.

A node is drained on the word "broken" only, so whatever is not proof has to come out as unknown.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from hybridsched.workers.gpu_probe import KEPT_BYTES, job_gpus, probe_gpus

PROLOG = Path(__file__).resolve().parents[2] / "slurm" / "prolog.sh"

GPUS = 8
PARTS = 7


def uuid(*numbers: int) -> str:
    return "-".join(["1b0d7f3a", "aaaa", "4bbb", "8ccc", "".join(f"{n:06x}" for n in numbers).rjust(12, "0")])


def gpu_line(gpu: int) -> str:
    return f"GPU {gpu}: NVIDIA A100-SXM4-80GB (UUID: GPU-{uuid(gpu)})"


def new_form(gpu: int, part: int) -> str:
    return f"MIG-{uuid(gpu + 1, part)}"


def old_form(gpu: int, part: int) -> str:
    return f"MIG-GPU-{uuid(gpu)}/{part}/0"


def mig_listing(*, old: bool = False, gpus: int = GPUS) -> str:
    name = old_form if old else new_form
    lines = []
    for gpu in range(gpus):
        lines.append(gpu_line(gpu))
        lines += [f"  MIG 1g.10gb     Device  {part}: (UUID: {name(gpu, part)})" for part in range(PARTS)]
    return "\n".join(lines) + "\n"


PLAIN = "".join(gpu_line(gpu) + "\n" for gpu in range(GPUS))


class Smi:
    """A program called nvidia-smi, and the prolog that finds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "bin" / "nvidia-smi"
        self.path.parent.mkdir()
        self.listing, self.listing_status = PLAIN, 0
        self.answers: dict[str, str] = {}
        """Shell commands by the number asked for; without one the GPU is well."""
        self.before = ""

    @property
    def timeout_s(self) -> int:
        """Short only where it has to be waited for."""
        return 1 if "sleep 60" in (self.before, *self.answers.values()) else 30

    def write(self) -> None:
        (self.folder / "listing").write_text(self.listing)
        cases = "".join(f"{number}) {answer} ;;\n" for number, answer in self.answers.items())
        self.path.write_text(
            f"#!/bin/bash\n{self.before}\n"
            f"if [[ $1 == -L ]]; then cat {shlex.quote(str(self.folder / 'listing'))};"
            f" exit {self.listing_status}; fi\n"
            f'[[ $1 == -i ]] || exit 2\ncase "$2" in\n{cases}*) echo "GPU-x, 40"; exit 0 ;;\nesac\n'
        )
        self.path.chmod(0o755)

    def prolog(self, env: Mapping[str, str]) -> tuple[int, str]:
        """Exit status of the prolog, and what it says."""
        self.write()
        script = self.folder / "prolog.sh"
        script.write_text(
            PROLOG.read_text()
            .replace("\nPATH=", f"\nPATH={self.path.parent}:", 1)
            .replace("sleep 1\n", "sleep 0\n")
        )
        (self.folder / "hybridsched-node.conf").write_text(
            f"run_dir = {self.folder}/run\nlog = {self.folder}/log\nprobe_timeout_s = {self.timeout_s}\n"
        )
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "1000", "SLURMD_NODENAME": "n1"}
        done = subprocess.run(
            ["/bin/bash", str(script)],
            env=job | dict(env),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stderr

    async def replica(self, *gpus: str, used: bool = True) -> bool | None:
        self.write()
        verdict = await probe_gpus(
            gpus, probe=str(self.path), timeout_s=self.timeout_s, pause_s=0.0, used=used
        )
        return verdict.broken


@pytest.fixture
def smi(tmp_path: Path) -> Smi:
    return Smi(tmp_path)


def with_mig(gpus: Sequence[str]) -> dict[str, str]:
    return {"SLURM_JOB_GPUS": "0", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("gpu", "part"), [(0, 0), (0, 6), (4, 3), (GPUS - 1, PARTS - 1)])
async def test_each_mig_instance_of_a_large_node_is_seen(smi: Smi, old: bool, gpu: int, part: int) -> None:
    smi.listing = mig_listing(old=old)
    assert len(smi.listing) > 4_000
    name = (old_form if old else new_form)(gpu, part)
    assert smi.prolog(with_mig([name])) == (0, "")
    assert await smi.replica(name) is False


@pytest.mark.parametrize("old", [False, True])
async def test_an_absent_mig_instance_is_proof(smi: Smi, old: bool) -> None:
    smi.listing = mig_listing(old=old)
    name = (old_form if old else new_form)(3, PARTS + 2)
    status, said = smi.prolog(with_mig([new_form(0, 0) if not old else old_form(0, 0), name]))
    assert status == 1
    assert f"MIG instance {name.lower()} is not there" in said
    assert await smi.replica(name) is True
    assert await smi.replica(name, used=False) is None, "a container may hide it"


@pytest.mark.parametrize(
    ("given", "old"),
    [(old_form(2, 1), False), (new_form(2, 1), True)],
    ids=["old name, new list", "new name, old list"],
)
async def test_a_mig_instance_named_in_the_other_form_proves_nothing(smi: Smi, given: str, old: bool) -> None:
    smi.listing = mig_listing(old=old)
    status, said = smi.prolog(with_mig([given]))
    assert status == 0
    assert "another form" in said
    assert await smi.replica(given) is None


async def test_the_old_name_of_an_instance_on_a_gpu_that_is_gone_is_proof(smi: Smi) -> None:
    smi.listing = mig_listing(gpus=4)
    assert smi.prolog(with_mig([old_form(6, 1)]))[0] == 1
    assert await smi.replica(old_form(6, 1)) is True


async def test_mig_switched_off_is_proof(smi: Smi) -> None:
    assert smi.prolog(with_mig([new_form(0, 0)]))[0] == 1
    assert await smi.replica(new_form(0, 0)) is True


@pytest.mark.parametrize("name", ["MIG-" + uuid(3, 4)[:8], "MIG-" + uuid(3, 4).upper()])
async def test_the_beginning_of_a_uuid_and_capitals_will_do(smi: Smi, name: str) -> None:
    smi.listing = mig_listing()
    assert smi.prolog(with_mig([name])) == (0, "")
    assert await smi.replica(name) is False


async def test_the_old_forms_numbers_are_compared_whole(smi: Smi) -> None:
    smi.listing = (
        f"{gpu_line(0)}\n  MIG 1g.10gb     Device  0: (UUID: MIG-GPU-{uuid(0)}/11/0)\n"
        f"  MIG 1g.10gb     Device  1: (UUID: MIG-GPU-{uuid(0)}/1/10)\n"
    )
    assert smi.prolog(with_mig([f"MIG-GPU-{uuid(0)}/1/1"]))[0] == 1
    assert await smi.replica(f"MIG-GPU-{uuid(0)}/1/1") is True


@pytest.mark.parametrize(
    "spoil",
    [
        lambda smi: setattr(smi, "listing", mig_listing()[:2_000]),
        lambda smi: setattr(smi, "listing", mig_listing(gpus=3) + "WARNING: infoROM is corrupted at gpu 0\n"),
        lambda smi: setattr(smi, "listing", mig_listing(gpus=3) + " " * KEPT_BYTES + "\n" + mig_listing()),
        lambda smi: setattr(smi, "listing", ""),
        lambda smi: setattr(smi, "listing_status", 255),
        lambda smi: setattr(smi, "listing_status", 10),
        lambda smi: setattr(smi, "listing_status", 19),
        lambda smi: setattr(smi, "before", "kill -9 $$"),
        lambda smi: setattr(smi, "before", "sleep 60"),
    ],
    ids=["cut", "warning", "endless", "empty", "unknown", "timeout", "in use", "killed", "hangs"],
)
async def test_an_answer_that_is_not_whole_proves_nothing(smi: Smi, spoil: object) -> None:
    smi.listing = mig_listing(gpus=3)
    spoil(smi)  # type: ignore[operator]
    status, said = smi.prolog(with_mig([new_form(7, 6)]))
    assert status == 0
    assert "could not be probed" in said
    assert await smi.replica(new_form(7, 6)) is None


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        ("exit 0", False),
        ("echo '[GPU requires reset]'", True),
        ("echo 'GPU is lost.  Reboot the system to recover this GPU'; exit 255", True),
        ("exit 15", True),
        ("exit 16", True),
        ("exit 3", None),
        ("exit 6", None),
        ("exit 10", None),
        ("exit 255", None),
        ("kill -9 $$", None),
        ("sleep 60", None),
    ],
)
async def test_what_is_said_of_the_jobs_gpu(smi: Smi, answer: str, broken: bool | None) -> None:
    smi.answers["2"] = answer
    status, said = smi.prolog({"SLURM_JOB_GPUS": "1,2", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert status == int(broken is True)
    assert bool(said) is (broken is not False)
    assert await smi.replica("1", "2") is broken
    assert await smi.replica("GPU-" + uuid(2)) is broken


async def test_another_jobs_lost_gpu_is_not_ours(smi: Smi) -> None:
    smi.listing = f"{gpu_line(0)}\nUnable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.\n"
    smi.listing_status = 15
    smi.answers["1"] = "exit 15"
    assert smi.prolog({"SLURM_JOB_GPUS": "0"}) == (0, "")
    assert smi.prolog({"SLURM_JOB_GPUS": "1"})[0] == 1
    assert await smi.replica("0") is False
    assert await smi.replica("1") is True


async def test_no_gpu_is_left(smi: Smi) -> None:
    smi.listing, smi.listing_status = "No devices were found\n", 6
    smi.answers["0"] = "echo No devices were found; exit 6"
    for gpu in ("0", "GPU-" + uuid(0), new_form(0, 0)):
        assert await smi.replica(gpu) is True
        assert await smi.replica(gpu, used=False) is None, "a container may hide it"
    assert smi.prolog({"SLURM_JOB_GPUS": "0"})[0] == 1
    assert smi.prolog(with_mig([new_form(0, 0)]))[0] == 1


@pytest.mark.parametrize(("status", "inside"), [(9, True), (18, None)])
async def test_the_driver(smi: Smi, status: int, inside: bool | None) -> None:
    """Inside a job the library of another version may be the program's own."""
    smi.listing, smi.listing_status, smi.answers["0"] = "", status, f"exit {status}"
    assert smi.prolog({"SLURM_JOB_GPUS": "0"})[0] == 1
    assert await smi.replica("0") is inside


async def test_a_number_beyond_the_list(smi: Smi) -> None:
    smi.answers["9"] = "echo No devices were found; exit 6"
    assert smi.prolog({"SLURM_JOB_GPUS": "9"})[0] == 1, "outside a job numbers are the node's"
    assert await smi.replica("9") is None, "a cgroup may number otherwise"
    smi.listing = gpu_line(0) + "\n"
    assert await smi.replica("0", "9") is True, "two were given, and one is left"


async def test_numbers_that_count_mig_instances_are_not_asked_for(smi: Smi) -> None:
    smi.listing = mig_listing()
    smi.answers["40"] = "exit 6"
    assert smi.prolog({"SLURM_JOB_GPUS": "40"}) == (0, "")
    assert await smi.replica("40") is None


@pytest.mark.parametrize("word", ["NoDevFiles", "-1", "all", "0-3", "123456", "GPU0"])
async def test_words_that_name_no_gpu_prove_nothing(smi: Smi, word: str) -> None:
    smi.before = "[[ $1 != -i ]] || exit 6"
    assert smi.prolog({"SLURM_JOB_GPUS": word})[0] == 0
    assert await smi.replica(word) is None


async def test_a_failure_that_passes_is_none(smi: Smi) -> None:
    smi.answers["0"] = f"[[ -e {smi.folder}/seen ]] && exit 0; touch {smi.folder}/seen; exit 15"
    assert smi.prolog({"SLURM_JOB_GPUS": "0"}) == (0, "")
    (smi.folder / "seen").unlink()
    assert await smi.replica("0") is False


def test_a_full_disk_cuts_no_list(smi: Smi) -> None:
    smi.listing = mig_listing()
    env = with_mig([new_form(7, 6)]) | {"TMPDIR": "/nowhere"}
    assert smi.prolog(env) == (0, "")


def test_what_the_probe_leaves_behind_is_not_waited_for(smi: Smi) -> None:
    smi.before = f"setsid sleep 30 & echo $! > {smi.folder}/left"
    try:
        status, said = smi.prolog({"SLURM_JOB_GPUS": "0"})
    finally:
        subprocess.run(["kill", (smi.folder / "left").read_text().strip()], check=False)
    assert (status, said) == (0, "")


def test_the_jobs_gpus() -> None:
    assert job_gpus({"CUDA_VISIBLE_DEVICES": " 0, MIG-1 ,", "SLURM_JOB_GPUS": "5"}) == ("0", "MIG-1")
    assert job_gpus({"SLURM_JOB_GPUS": "5,6"}) == ("5", "6")
    assert job_gpus({}) == ()
