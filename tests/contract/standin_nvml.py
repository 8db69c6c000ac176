"""A stand-in for the module `pynvml` with the real one's names, for machines without a driver.

It shows that our code handles what the real module documents; it does not show that a GPU behaves so.
`test_telemetry_samplers.py` checks that every name used here exists in the real module.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

CODES = {
    "UNINITIALIZED": 1,
    "INVALID_ARGUMENT": 2,
    "NOT_SUPPORTED": 3,
    "NO_PERMISSION": 4,
    "NOT_FOUND": 6,
    "DRIVER_NOT_LOADED": 9,
    "TIMEOUT": 10,
    "LIBRARY_NOT_FOUND": 12,
    "FUNCTION_NOT_FOUND": 13,
    "GPU_IS_LOST": 15,
    "UNKNOWN": 999,
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML code {value}")
        self.value = value


class StandInNvml:
    """One GPU with one optional MIG device. `fail` maps a function's name to the error code it raises."""

    NVML_SUCCESS = 0
    NVML_DEVICE_MIG_DISABLE = 0
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_GPM_METRIC_GRAPHICS_UTIL = 1
    NVML_GPM_METRICS_GET_VERSION = 1
    NVMLError = NVMLError

    def __init__(self) -> None:
        for name, code in CODES.items():
            setattr(self, f"NVML_ERROR_{name}", code)
        self.used = 0
        self.total = 80 * 2**30
        self.gpu_percent = 0.0
        self.mig = 0
        self.gpm = False
        self.gpm_return = 0
        self.processes: list[tuple[int, int | None, int]] = []
        self.fail: dict[str, int] = {}
        self.initialised = 0
        self.allocated = 0
        self.mig_samples = 0

    def _call(self, name: str) -> None:
        if name in self.fail:
            raise NVMLError(self.fail[name])
        if name != "nvmlInit" and not self.initialised:
            raise NVMLError(CODES["UNINITIALIZED"])

    def nvmlInit(self) -> None:  # noqa: N802 - the real module's names
        self._call("nvmlInit")
        self.initialised += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._call("nvmlShutdown")
        self.initialised -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self._call("nvmlDeviceGetHandleByIndex")
        if index != 0:
            raise NVMLError(CODES["INVALID_ARGUMENT"])
        return "gpu"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self._call("nvmlDeviceGetHandleByUUID")
        known = {"GPU-1": "gpu", "MIG-1": "mig"}
        if uuid not in known:
            raise NVMLError(CODES["NOT_FOUND"])
        return known[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        self._call("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        assert handle == "mig"
        return "gpu"

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        self._call("nvmlDeviceGetMigDeviceHandleByIndex")
        if handle != "gpu" or index != 0 or not self.mig:
            raise NVMLError(CODES["NOT_FOUND"])
        return "mig"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:  # noqa: N802
        self._call("nvmlDeviceGetGpuInstanceId")
        assert handle == "mig"
        return 7

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=self.used, total=self.total, free=self.total - self.used)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        self._call("nvmlDeviceGetMigMode")
        assert handle == "gpu"
        return [self.mig, self.mig]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        self._call("nvmlDeviceGetUtilizationRates")
        if self.mig:
            raise NVMLError(CODES["NOT_SUPPORTED"])
        return SimpleNamespace(gpu=self.gpu_percent, memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        self._call("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory, _ in self.processes]

    def nvmlDeviceGetProcessUtilization(self, handle: str, since: int) -> list[Any]:  # noqa: N802
        self._call("nvmlDeviceGetProcessUtilization")
        if self.mig:
            raise NVMLError(CODES["NOT_SUPPORTED"])
        if not self.processes:
            raise NVMLError(CODES["NOT_FOUND"])
        return [SimpleNamespace(pid=pid, timeStamp=since + 1, smUtil=sm) for pid, _, sm in self.processes]

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:  # noqa: N802
        self._call("nvmlGpmQueryDeviceSupport")
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self) -> dict[str, float]:  # noqa: N802
        self._call("nvmlGpmSampleAlloc")
        self.allocated += 1
        return {}

    def nvmlGpmSampleFree(self, sample: dict[str, float]) -> None:  # noqa: N802
        self._call("nvmlGpmSampleFree")
        self.allocated -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: dict[str, float]) -> None:  # noqa: N802
        self._call("nvmlGpmSampleGet")
        sample["util"] = self.gpu_percent

    def nvmlGpmMigSampleGet(self, handle: str, instance: int, sample: dict[str, float]) -> None:  # noqa: N802
        self._call("nvmlGpmMigSampleGet")
        assert (handle, instance) == ("gpu", 7)
        self.mig_samples += 1
        sample["util"] = self.gpu_percent

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802
        metric = SimpleNamespace(metricId=0, nvmlReturn=-1, value=0.0)
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=[metric])

    def nvmlGpmMetricsGet(self, ask: Any) -> Any:  # noqa: N802
        self._call("nvmlGpmMetricsGet")
        assert ask.numMetrics == 1
        assert ask.version == 1
        assert ask.metrics[0].metricId == 1
        assert ask.sample1 is not ask.sample2
        ask.metrics[0].nvmlReturn = self.gpm_return
        ask.metrics[0].value = ask.sample2["util"]
        return ask
