"""One contract for every GPU sampler: the shipped fake, NVML over a stand-in for pynvml, and the real pynvml
over the test double of NVML's library (tests/native). No driver is here.

A fourth run reads a real GPU where the machine has a driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hybridsched.telemetry.fake import FakeSampler
from hybridsched.telemetry.nvml import RETRY_MS, NvmlSampler
from hybridsched.telemetry.protocol import ActivitySource, GpuProcess, GpuSample, GpuSampler, MigMode
from tests.contract.standin_nvml import CODES, StandInNvml
from tests.nvml_double import UNSAID, Double, double


class FakeRig:
    """Drives the fake by the contract's words."""

    def __init__(self) -> None:
        self.fake = FakeSampler("0", gpm=False)
        self.sampler: GpuSampler = self.fake

    def set(self, *, used: int, total: int, activity: float) -> None:
        self.fake.memory_used_bytes, self.fake.memory_total_bytes = used, total
        self.fake.activity = activity

    def mig(self, on: bool, *, gpm: bool) -> None:
        self.fake.mig = MigMode.ON if on else MigMode.OFF
        self.fake.gpm = gpm

    def processes(self, *entries: tuple[int, int | None, float]) -> None:
        self.fake.processes = tuple(GpuProcess(pid=p, memory_bytes=m, activity=a) for p, m, a in entries)

    def break_field(self, field: str) -> None:
        self.fake.errors = {field: "timeout"}

    def lose_driver(self) -> None:
        self.fake.gone = "driver_missing"

    def bring_driver_back(self) -> None:
        self.fake.gone = ""


class StandInRig:
    """Drives NvmlSampler over the stand-in module. Not a real GPU."""

    FUNCTIONS: ClassVar = {
        "memory_used_bytes": "nvmlDeviceGetMemoryInfo",
        "activity": "nvmlDeviceGetUtilizationRates",
        "mig": "nvmlDeviceGetMigMode",
        "processes": "nvmlDeviceGetComputeRunningProcesses",
    }

    def __init__(self, device: int | str = 0, mig_index: int | None = None) -> None:
        self.nvml = StandInNvml()
        self.sampler: GpuSampler = NvmlSampler(device, mig_index=mig_index, load=lambda: self.nvml)

    def set(self, *, used: int, total: int, activity: float) -> None:
        self.nvml.used, self.nvml.total, self.nvml.gpu_percent = used, total, activity * 100

    def mig(self, on: bool, *, gpm: bool) -> None:
        self.nvml.mig, self.nvml.gpm = int(on), gpm

    def processes(self, *entries: tuple[int, int | None, float]) -> None:
        self.nvml.processes = [(p, m, int(a * 100)) for p, m, a in entries]

    def break_field(self, field: str) -> None:
        self.nvml.fail = {self.FUNCTIONS[field]: CODES["TIMEOUT"]}

    def lose_driver(self) -> None:
        self.sampler.close()
        self.nvml.fail = {"nvmlInit": CODES["LIBRARY_NOT_FOUND"]}

    def bring_driver_back(self) -> None:
        self.nvml.fail = {}


class DoubleRig:
    """Drives NvmlSampler over the real pynvml and the double of NVML's library. Not a real GPU."""

    FUNCTIONS: ClassVar = {
        "memory_used_bytes": "nvmlDeviceGetMemoryInfo",
        "activity": "nvmlDeviceGetUtilizationRates",
        "mig": "nvmlDeviceGetMigMode",
        "processes": "nvmlDeviceGetComputeRunningProcesses_v3",
    }

    def __init__(self, made: Double) -> None:
        self.double = made
        made.gpm(0, False)
        self.sampler: GpuSampler = NvmlSampler(0, load=lambda: made.nvml)

    def set(self, *, used: int, total: int, activity: float) -> None:
        self.double.memory(0, used, total)
        self.double.activity(0, round(activity * 100))

    def mig(self, on: bool, *, gpm: bool) -> None:
        self.double.mode(0, on)
        self.double.gpm(0, gpm)

    def processes(self, *entries: tuple[int, int | None, float]) -> None:
        self.double.no_processes(0)
        for pid, memory, share in entries:
            self.double.process(
                0, pid, memory=UNSAID if memory is None else memory, percent=round(share * 100)
            )

    def break_field(self, field: str) -> None:
        self.double.fail_call(self.FUNCTIONS[field], CODES["TIMEOUT"])

    def lose_driver(self) -> None:
        self.sampler.close()
        self.double.fail_call("nvmlInitWithFlags", CODES["LIBRARY_NOT_FOUND"])

    def bring_driver_back(self) -> None:
        self.double.fail_call("", 0)


Rig = FakeRig | StandInRig | DoubleRig


@pytest.fixture(params=["fake", "nvml-on-stand-in-module", "pynvml-on-the-double"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    if request.param == "fake":
        yield FakeRig()
    elif request.param == "nvml-on-stand-in-module":
        yield StandInRig()
    else:
        with double(tmp_path / "gpus", "h100-80gb") as made:
            found = DoubleRig(made)
            yield found
            made.fail_call("", 0)
            found.sampler.close()
            assert made.inits() == 0, "every nvmlInit has its nvmlShutdown"


def unknown_is_said(sample: GpuSample) -> None:
    """Nothing is unknown without a reason, and nothing known has one."""
    for field in ("memory_used_bytes", "memory_total_bytes", "activity", "processes"):
        assert (getattr(sample, field) is None) == (field in sample.unknown), (field, sample)
    assert (sample.mig is MigMode.UNKNOWN) == ("mig" in sample.unknown)
    assert (sample.activity is None) == (sample.activity_source is None) == (sample.activity_span_ms is None)
    assert bool(sample.reason) == (not sample.available)


def test_a_whole_gpu_is_read(rig: Rig) -> None:
    rig.set(used=10, total=100, activity=0.25)
    rig.processes((11, 6, 0.2), (12, None, 0.0))
    sample = rig.sampler.sample(1000.0)
    unknown_is_said(sample)
    assert sample.available
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (10, 100)
    assert sample.activity == pytest.approx(0.25)
    assert sample.activity_source is ActivitySource.UTILIZATION
    assert sample.mig is MigMode.OFF
    assert sample.processes is not None
    assert [(p.pid, p.memory_bytes) for p in sample.processes] == [(11, 6), (12, None)]
    assert sample.processes[0].activity == pytest.approx(0.2)
    assert sample.at_ms == 1000.0
    assert sample.device == rig.sampler.device == "0"


def test_under_mig_without_gpm_activity_is_unknown_and_never_zero(rig: Rig) -> None:
    rig.set(used=1, total=2, activity=0.9)
    rig.processes((11, 6, 0.2))
    rig.mig(True, gpm=False)
    for now in (0.0, 500.0):
        sample = rig.sampler.sample(now)
        unknown_is_said(sample)
        assert sample.activity is None
        assert sample.unknown["activity"] == "gpm_not_supported"
        assert sample.mig is MigMode.ON
        assert sample.memory_used_bytes == 1
        assert sample.processes is not None
        assert sample.processes[0].activity is None


def test_under_mig_gpm_needs_two_samples_far_enough_apart(rig: Rig) -> None:
    rig.set(used=1, total=2, activity=0.4)
    rig.mig(True, gpm=True)
    first = rig.sampler.sample(1000.0)
    assert (first.activity, first.unknown["activity"]) == (None, "gpm_warming_up")
    too_soon = rig.sampler.sample(1099.0)
    assert (too_soon.activity, too_soon.unknown["activity"]) == (None, "gpm_warming_up")
    second = rig.sampler.sample(1150.0)
    unknown_is_said(second)
    assert second.activity == pytest.approx(0.4)
    assert second.activity_source is ActivitySource.GPM
    assert second.activity_span_ms == pytest.approx(150.0)
    rig.set(used=1, total=2, activity=0.7)
    again = rig.sampler.sample(1160.0)
    assert again.activity == pytest.approx(0.4), "within the span the last figure stands"
    assert rig.sampler.sample(1260.0).activity == pytest.approx(0.7)


def test_a_clock_that_went_back_starts_gpm_anew(rig: Rig) -> None:
    rig.set(used=1, total=2, activity=0.4)
    rig.mig(True, gpm=True)
    rig.sampler.sample(5000.0)
    for now in (1000.0, 1200.0):
        sample = rig.sampler.sample(now)
        unknown_is_said(sample)
        assert sample.activity_span_ms is None or sample.activity_span_ms <= 4000.0


@pytest.mark.parametrize("field", ["memory_used_bytes", "activity", "mig", "processes"])
def test_each_field_fails_alone(rig: Rig, field: str) -> None:
    rig.set(used=1, total=2, activity=0.5)
    rig.break_field(field)
    sample = rig.sampler.sample(0.0)
    unknown_is_said(sample)
    assert sample.available
    if field == "mig":
        # whether utilisation may be believed is unknown then, and this GPU has no GPM
        assert sample.unknown["activity"] == "gpm_not_supported"
    assert sample.unknown[field] == "timeout"
    assert (sample.memory_used_bytes is None) == (field == "memory_used_bytes")
    assert (sample.processes is None) == (field == "processes")


def test_no_driver_says_so_and_recovers(rig: Rig) -> None:
    rig.set(used=1, total=2, activity=0.5)
    rig.lose_driver()
    sample = rig.sampler.sample(0.0)
    unknown_is_said(sample)
    assert (sample.available, sample.reason) == (False, "driver_missing")
    assert set(sample.unknown.values()) == {"driver_missing"}
    rig.bring_driver_back()
    assert rig.sampler.sample(RETRY_MS + 1).available


def test_close_may_be_repeated_and_sampling_goes_on(rig: Rig) -> None:
    rig.set(used=1, total=2, activity=0.5)
    rig.sampler.sample(0.0)
    rig.sampler.close()
    rig.sampler.close()
    assert rig.sampler.sample(10.0).available


# What only the NVML sampler has


def test_without_the_package_the_device_is_unavailable() -> None:
    def nothing() -> Any:
        raise ImportError("No module named 'pynvml'")

    sample = NvmlSampler(0, load=nothing).sample(0.0)
    assert (sample.available, sample.reason) == (False, "nvidia_ml_py_missing")


@pytest.mark.parametrize(("device", "mig_index"), [("MIG-1", None), (0, 0), ("GPU-1", 0)])
def test_a_mig_device_is_sampled_through_its_gpu_instance(device: int | str, mig_index: int | None) -> None:
    rig = StandInRig(device, mig_index)
    rig.set(used=3, total=9, activity=0.5)
    rig.mig(True, gpm=True)
    rig.sampler.sample(0.0)
    sample = rig.sampler.sample(200.0)
    assert sample.activity == pytest.approx(0.5)
    assert rig.nvml.mig_samples == 2
    assert sample.memory_used_bytes == 3


def test_every_gpm_buffer_and_every_init_is_given_back() -> None:
    rig = StandInRig()
    rig.mig(True, gpm=True)
    for step in range(5):
        rig.sampler.sample(step * 200.0)
    assert rig.nvml.allocated == 2
    rig.sampler.close()
    assert (rig.nvml.allocated, rig.nvml.initialised) == (0, 0)


def test_a_metric_that_gpm_refuses_is_unknown() -> None:
    rig = StandInRig()
    rig.mig(True, gpm=True)
    rig.nvml.gpm_return = 3
    rig.sampler.sample(0.0)
    sample = rig.sampler.sample(200.0)
    assert (sample.activity, sample.unknown["activity"]) == (None, "gpm_no_value")


@pytest.mark.parametrize("percent", [math.nan, 250.0, -1.0])
def test_an_impossible_utilisation_is_unknown(percent: float) -> None:
    rig = StandInRig()
    rig.nvml.gpu_percent = percent
    sample = rig.sampler.sample(0.0)
    unknown_is_said(sample)
    assert sample.unknown["activity"] == "impossible_value"


@pytest.mark.parametrize(
    ("function", "code", "reason"),
    [
        ("nvmlDeviceGetMemoryInfo", "GPU_IS_LOST", "gpu_lost"),
        ("nvmlDeviceGetMigMode", "INVALID_ARGUMENT", "handle_lost"),
        ("nvmlDeviceGetHandleByIndex", "INVALID_ARGUMENT", "device_missing"),
        ("nvmlInit", "NO_PERMISSION", "no_permission"),
        ("nvmlInit", "UNKNOWN", "nvml_unknown"),
    ],
)
def test_a_lost_device_is_unavailable_and_asked_again_later(function: str, code: str, reason: str) -> None:
    rig = StandInRig()
    rig.nvml.fail = {function: CODES[code]}
    sample = rig.sampler.sample(0.0)
    unknown_is_said(sample)
    assert sample.reason == reason
    assert rig.nvml.initialised == 0
    rig.nvml.fail = {}
    assert not rig.sampler.sample(1.0).available, "not asked again at once"
    assert rig.sampler.sample(RETRY_MS + 1).available


def test_a_gpu_without_mig_says_unsupported() -> None:
    rig = StandInRig()
    rig.nvml.fail = {"nvmlDeviceGetMigMode": CODES["NOT_SUPPORTED"]}
    sample = rig.sampler.sample(0.0)
    assert (sample.mig, "mig" in sample.unknown) == (MigMode.UNSUPPORTED, False)


def test_the_stand_in_has_only_names_of_the_real_module() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    used = [n for n in dir(StandInNvml()) if n.lower().startswith(("nvml", "c_nvml"))]
    assert len(used) > 20
    for name in used:
        assert hasattr(real, name), name
        if name.startswith("NVML_"):
            assert getattr(real, name) == getattr(StandInNvml(), name), name
    fields = {name for name, _ in real.c_nvmlGpmMetricsGet_t._fields_}
    assert {"version", "numMetrics", "sample1", "sample2", "metrics"} <= fields


def test_the_real_module_without_a_driver_is_unavailable_and_with_one_is_read() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    sampler = NvmlSampler(0)
    sample = sampler.sample(0.0)
    unknown_is_said(sample)
    if sample.available:
        assert sample.memory_total_bytes is None or sample.memory_total_bytes > 0
    else:
        assert sample.reason
    sampler.close()


def _protocol(make: Callable[[], GpuSampler]) -> GpuSampler:
    return make()


def test_both_are_gpu_samplers_by_type() -> None:
    assert _protocol(lambda: FakeSampler()).device == "0"
    assert _protocol(lambda: NvmlSampler("GPU-1", mig_index=2)).device == "GPU-1/2"
