"""What only the NVML driver has, over the double: every model's tables, foreign cuts, NVML's errors."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridsched.core.mig import MODELS, PCI_IDS, Piece, Want, difference, export, plan
from hybridsched.mig.fake import NAMES
from hybridsched.mig.nvml import NvmlMig
from hybridsched.mig.protocol import MigError, StepReport
from tests.nvml_double import VARIABLE, Double, build, double

SEVEN = Want(enabled=True, pieces=(Piece(profile="1g.10gb"),) * 7)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Double]:
    with double(tmp_path / "gpus", "a100-80gb") as made:
        yield made


def driver(made: Double) -> NvmlMig:
    return NvmlMig(load=lambda: made.nvml)


def cut(made: Double, want: Want) -> None:
    mig = driver(made)
    assert mig.apply(plan(mig.read(), {0: want}), lambda _: None).ok


def test_each_models_tables_are_those_of_the_core(tmp_path: Path) -> None:
    """Two hands wrote the tables down. The double makes up the sizes of the later models."""
    with double(tmp_path / "gpus", *MODELS) as made:
        for read, (model, known) in zip(driver(made).read(), MODELS.items(), strict=True):
            assert (read.name, read.pci_id) == (NAMES[model], PCI_IDS[model][0])
            assert len(read.profiles) == len(known)
            for ours, theirs in zip(known, read.profiles, strict=True):
                shape = ("name", "id", "slices", "size", "starts", "most")
                assert [getattr(ours, f) for f in shape] == [getattr(theirs, f) for f in shape]
                if theirs.multiprocessors is not None:
                    assert ours.memory_mib == theirs.memory_mib
                    assert ours.multiprocessors == theirs.multiprocessors


def test_a_compute_instance_that_covers_a_part_is_seen_and_made_whole(gpu: Double) -> None:
    cut(gpu, Want(enabled=True, pieces=(Piece(profile="3g.40gb"),)))
    nvml: Any = gpu.nvml
    nvml.nvmlInit()
    device = nvml.nvmlDeviceGetHandleByIndex(0)
    (instance,) = driver(gpu).read()[0].instances
    handle = nvml.nvmlDeviceGetGpuInstanceById(device, instance.id)
    nvml.nvmlComputeInstanceDestroy(nvml.nvmlGpuInstanceGetComputeInstanceById(handle, 0))
    for profile in (0, 1):  # one slice and two
        nvml.nvmlGpuInstanceCreateComputeInstance(handle, profile)
    nvml.nvmlShutdown()
    (read,) = driver(gpu).read()
    assert [c.slices for c in read.instances[0].compute] == [1, 2]
    want = Want(enabled=True, pieces=(Piece(profile="3g.40gb"),))
    assert difference(read, want) == (
        "GPU 0: 3g.40gb at 0 has 2 compute instances, wanted 1 over the whole of it"
    )
    written, notes = export([read], "now")
    assert written["mig-configs"]["now"][0]["mig-devices"] == {"1c.3g.40gb": 1, "2c.3g.40gb": 1}
    assert "cut further" in notes[0]
    cut(gpu, want)
    (after,) = driver(gpu).read()
    assert after.instances[0].id == instance.id, "the GPU instance stayed"
    assert [c.slices for c in after.instances[0].compute] == [3]


@pytest.mark.parametrize(
    ("code", "name", "said"),
    [
        (19, "in_use", "stop what holds it"),
        (4, "no_permission", "root"),
        (16, "reset_required", "gpu-reset"),
        (23, "no_room", "plan again"),
        (15, "lost", "kernel's log"),
        (13, "not_supported", "newer driver"),
        (3, "not_supported", "does not support"),
        (999, "failed", "NVML: UNKNOWN"),
    ],
)
def test_each_error_of_nvml_is_said_with_what_to_do(gpu: Double, code: int, name: str, said: str) -> None:
    mig = driver(gpu)
    gpu.fail_change(1, code)
    reports: list[StepReport] = []
    outcome = mig.apply(plan(mig.read(), {0: SEVEN}), reports.append)
    assert outcome.code == reports[-1].code == name
    assert "GPU 0: create 1g.10gb at 0" in outcome.why
    assert said in outcome.why


def test_a_driver_that_tells_no_profiles_while_mig_is_off_is_helped_out_by_the_table(gpu: Double) -> None:
    gpu.fail_call("nvmlDeviceGetGpuInstanceProfileInfoV", 3)
    assert driver(gpu).read()[0].profiles == MODELS["a100-80gb"]
    gpu.fail_call("", 0)


def test_without_root_profiles_come_from_the_table(gpu: Double) -> None:
    """NVML tells placements to root only."""
    gpu.root(False)
    assert driver(gpu).read()[0].profiles == MODELS["a100-80gb"]


def test_a_mode_that_is_accepted_and_does_not_take_effect_is_pending(
    gpu: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.nvml, "nvmlDeviceSetMigMode", lambda device, mode: 0)
    mig = driver(gpu)
    outcome = mig.apply(plan(mig.read(), {0: SEVEN}), lambda _: None)
    assert (outcome.code, outcome.done) == ("pending", ())


def test_a_client_that_nvml_does_not_list_leaves_the_mode_pending(
    gpu: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A monitor has no compute process: only the status of the call tells."""
    real = gpu.nvml.nvmlDeviceSetMigMode

    def held(device: Any, mode: int) -> int:
        gpu.process(0, 99)
        status = real(device, mode)
        gpu.no_processes(0)
        return int(status)

    monkeypatch.setattr(gpu.nvml, "nvmlDeviceSetMigMode", held)
    mig = driver(gpu)
    outcome = mig.apply(plan(mig.read(), {0: SEVEN}), lambda _: None)
    assert (outcome.code, outcome.done) == ("in_use", ())
    assert "pending" in outcome.why
    assert outcome.differs == ("GPU 0: MIG mode is off, wanted on (a change is pending)",)


def test_processes_that_can_not_be_read_count_as_running(gpu: Double) -> None:
    cut(gpu, SEVEN)
    gpu.fail_call("nvmlDeviceGetComputeRunningProcesses_v3", 999)
    (read,) = driver(gpu).read()
    assert read.pids is None
    made = plan([read], {0: Want(enabled=False)})
    assert "GPU 0: 1g.10gb at 0 may be in use: its processes could not be read" in made.blockers
    assert made.blockers[-1] == "GPU 0 may be in use: its processes could not be read"


@pytest.mark.parametrize(
    ("call", "code", "name"),
    [
        ("nvmlDeviceGetCount_v2", 999, "failed"),
        ("nvmlDeviceGetMigMode", 15, "lost"),
        ("nvmlDeviceGetGpuInstances", 4, "no_permission"),
        ("nvmlInitWithFlags", 18, "driver_missing"),
    ],
)
def test_what_can_not_be_read_is_an_error_and_never_an_empty_gpu(
    gpu: Double, call: str, code: int, name: str
) -> None:
    cut(gpu, SEVEN)
    gpu.fail_call(call, code)
    with pytest.raises(MigError) as caught:
        driver(gpu).read()
    assert caught.value.code == name
    gpu.fail_call("", 0)


def test_without_a_driver_and_without_the_package(gpu: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(MigError) as caught:
        driver(gpu).read()
    assert caught.value.code == "driver_missing"

    def nothing() -> Any:
        raise ImportError("No module named 'pynvml'")

    with pytest.raises(MigError) as caught:
        NvmlMig(load=nothing).read()
    assert caught.value.code == "nvidia_ml_py_missing"
    monkeypatch.setenv(VARIABLE, str(gpu.path))


def test_an_error_at_every_single_call_in_turn_leaves_nothing_untold(gpu: Double) -> None:
    """Reading calls too: from the first look at the GPUs to the last one after the cut."""
    want = Want(enabled=True, pieces=(Piece(profile="4g.24gb"),))
    mig = driver(gpu)
    codes: set[str] = set()
    for number in range(5000):
        gpu.new(["a30"])
        made = plan(mig.read(), {0: want})
        gpu.fail_any(number, 999)
        reports: list[StepReport] = []
        outcome = mig.apply(made, reports.append)
        if not gpu.failed():
            assert outcome.ok
            break
        codes.add(outcome.code)
        now = mig.read()
        assert [r.step for r in reports if not r.code] == list(outcome.done)
        if outcome.ok:  # the way out of NVML, or processes that were not needed
            assert difference(now[0], want) is None
        elif outcome.failed is not None:
            assert (*outcome.done, outcome.failed, *outcome.not_done) == made.steps
        else:
            assert outcome.done in ((), made.steps)
        if outcome.after is not None and outcome.code:
            assert outcome.after[0].instances == now[0].instances or outcome.after[0].pids is None
        again = mig.apply(plan(now, {0: want}), lambda _: None)
        assert again.ok, (number, outcome.lines(), again.lines())
    else:
        raise AssertionError("a cut takes more than 5000 calls")
    assert number > 100
    assert {"failed", "in_use", ""} <= codes


CHILD = """
import sys
from hybridsched.core.mig import Piece, Want, plan
from hybridsched.mig.nvml import NvmlMig
mig = NvmlMig()
index = int(sys.argv[1])
want = Want(enabled=True, pieces=(Piece(profile="1g.10gb"),) * 7)
outcome = mig.apply(plan(mig.read(), {index: want}), lambda r: None)
print("\\n".join(outcome.lines()))
sys.exit(0 if outcome.ok else 1)
"""


def test_processes_that_find_the_library_themselves_cut_the_same_gpus(tmp_path: Path) -> None:
    """Two children at once, each with pynvml's own search for the library; neither loses the other's work."""
    with double(tmp_path / "gpus", "a100-80gb", "a100-80gb") as made:
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(index)],
                env=made.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in (0, 1)
        ]
        said = [child.communicate(timeout=60)[0] for child in children]
        assert [child.returncode for child in children] == [0, 0], said
        assert [len(read.instances) for read in driver(made).read()] == [7, 7]
        assert made.changes() == 2 * 15


def test_the_double_says_what_it_is(tmp_path: Path) -> None:
    assert b"test-double" in (build() / "libnvidia-ml.so.1").read_bytes()
    with double(tmp_path / "gpus", "h200") as made:
        made.nvml.nvmlInit()
        assert made.nvml.nvmlSystemGetDriverVersion() == "0.0-test-double"
        made.nvml.nvmlShutdown()
        assert json.dumps(made.environment[VARIABLE]) == json.dumps(str(tmp_path / "gpus"))
