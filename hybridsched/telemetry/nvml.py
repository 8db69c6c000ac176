"""GPU samples from NVML (package nvidia-ml-py, imported as pynvml, only when a sample is taken).

Every NVML error becomes an unknown field with a reason. Utilisation does not exist on MIG-enabled GPUs: there
the activity comes from GPM (Hopper and later), out of two samples at least `GPM_MIN_SPAN_MS` apart, else it
is unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from math import isfinite
from typing import Any

from hybridsched.telemetry.protocol import (
    GPM_MIN_SPAN_MS,
    ActivitySource,
    GpuProcess,
    GpuSample,
    MigMode,
    unavailable,
)

UTILIZATION_SPAN_MS = 1000.0
"""NVML averages utilisation over 1/6 to 1 s, by product (see nvmlUtilization_t); the longer is assumed."""

RETRY_MS = 5000.0
"""After the driver or the device could not be reached, samples within this do not ask again."""

_MISSING_DRIVER = ("LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH")
_LOST = ("GPU_IS_LOST", "RESET_REQUIRED", "UNINITIALIZED", "GPU_NOT_FOUND", "INVALID_ARGUMENT")
_GONE = ("gpu_lost", "gpu_reset_required", "handle_lost")
_NO_DEVICE = ("NOT_FOUND", "INVALID_ARGUMENT", "GPU_NOT_FOUND")
_REASONS = {
    "NOT_SUPPORTED": "not_supported",
    "FUNCTION_NOT_FOUND": "driver_too_old",
    "NO_PERMISSION": "no_permission",
    "NOT_FOUND": "not_found",
    "GPU_IS_LOST": "gpu_lost",
    "RESET_REQUIRED": "gpu_reset_required",
    "TIMEOUT": "timeout",
}


class NvmlSampler:
    """Reads one GPU, or one MIG device of it.

    `device`: an index, a GPU UUID or a MIG UUID (`MIG-...`). `mig_index`: which MIG device of that GPU.
    `load`: gives the pynvml module; tests and exotic installs pass their own.
    """

    def __init__(
        self,
        device: int | str = 0,
        *,
        mig_index: int | None = None,
        load: Callable[[], Any] = lambda: importlib.import_module("pynvml"),
    ) -> None:
        self._asked = device
        self._mig_index = mig_index
        self._load = load
        self._nvml: Any = None
        self._handle: Any = None
        """The device that memory and processes are read from: the GPU, or the MIG device."""
        self._parent: Any = None
        """The GPU itself."""
        self._instance: int | None = None
        """GPU instance id of the MIG device."""
        self._samples: list[Any] = []
        self._gpm_at_ms: float | None = None
        self._gpm_last: tuple[float, float] | None = None
        self._down: tuple[float, str] | None = None
        self._seen_us: dict[int, int] = {}

    @property
    def device(self) -> str:
        return str(self._asked) if self._mig_index is None else f"{self._asked}/{self._mig_index}"

    def sample(self, now_ms: float) -> GpuSample:
        """One reading; see `GpuSampler.sample`. Not for two threads at once."""
        if self._down is not None:
            since, reason = self._down
            if 0.0 <= now_ms - since < RETRY_MS:
                return unavailable(self.device, now_ms, reason)
            self._down = None
        if self._handle is None:
            reason = self._open()
            if reason:
                self.close()
                self._down = (now_ms, reason)
                return unavailable(self.device, now_ms, reason)
        unknown: dict[str, str] = {}
        nvml, handle = self._nvml, self._handle
        memory = self._read("memory_used_bytes", unknown, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        if memory is None:
            unknown["memory_total_bytes"] = unknown["memory_used_bytes"]
        mig = self._mig_mode(unknown)
        activity, source, span = self._activity(mig, now_ms, unknown)
        processes = self._processes(mig, unknown)
        lost = next((reason for reason in unknown.values() if reason in _GONE), None)
        if lost:
            self.close()  # handles are looked up again: a MIG change or a reset makes old ones invalid
            self._down = (now_ms, lost)
            return unavailable(self.device, now_ms, lost)
        return GpuSample(
            device=self.device,
            at_ms=now_ms,
            available=True,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            activity=activity,
            activity_source=source,
            activity_span_ms=span,
            mig=mig,
            processes=processes,
            unknown=unknown,
        )

    def close(self) -> None:
        """Free the GPM buffers and leave NVML. Errors on the way out say nothing useful and are dropped."""
        nvml, self._nvml = self._nvml, None
        samples, self._samples = self._samples, []
        self._handle = self._parent = self._instance = None
        self._gpm_at_ms = self._gpm_last = None
        if nvml is None:
            return
        for buffer in samples:
            _quietly(nvml, partial(nvml.nvmlGpmSampleFree, buffer))
        _quietly(nvml, nvml.nvmlShutdown)

    def _open(self) -> str:
        """Load, initialise, find the device. Returns the reason of a failure, empty on success."""
        try:
            nvml = self._load()
        except ImportError:
            return "nvidia_ml_py_missing"
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            name = _name(nvml, error)
            return "driver_missing" if name in _MISSING_DRIVER else _reason(name)
        self._nvml = nvml
        try:
            if isinstance(self._asked, int) or self._asked.isdigit():
                found = nvml.nvmlDeviceGetHandleByIndex(int(self._asked))
            else:
                found = nvml.nvmlDeviceGetHandleByUUID(self._asked)
            if isinstance(self._asked, str) and self._asked.startswith("MIG-"):
                self._parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(found)
                self._handle = found
            elif self._mig_index is not None:
                self._parent = found
                self._handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(found, self._mig_index)
            else:
                self._parent = self._handle = found
            if self._handle is not self._parent:
                self._instance = int(nvml.nvmlDeviceGetGpuInstanceId(self._handle))
        except nvml.NVMLError as error:
            name = _name(nvml, error)
            return "device_missing" if name in _NO_DEVICE else _reason(name)
        return ""

    def _read(self, field: str, unknown: dict[str, str], call: Callable[[], Any]) -> Any:
        """The call's answer; None with a reason in `unknown` when NVML refuses."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            name = _name(self._nvml, error)
            unknown[field] = _reason(name) if name in _REASONS or name not in _LOST else "handle_lost"
            return None

    def _mig_mode(self, unknown: dict[str, str]) -> MigMode:
        answer = self._read("mig", unknown, lambda: self._nvml.nvmlDeviceGetMigMode(self._parent))
        if answer is None:
            if unknown["mig"] == "not_supported":
                del unknown["mig"]
                return MigMode.UNSUPPORTED
            return MigMode.UNKNOWN
        return MigMode.ON if answer[0] == self._nvml.NVML_DEVICE_MIG_ENABLE else MigMode.OFF

    def _activity(
        self, mig: MigMode, now_ms: float, unknown: dict[str, str]
    ) -> tuple[float | None, ActivitySource | None, float | None]:
        if mig in (MigMode.OFF, MigMode.UNSUPPORTED):
            nvml, gpu = self._nvml, self._parent
            rates = self._read("activity", unknown, lambda: nvml.nvmlDeviceGetUtilizationRates(gpu))
            if rates is not None:
                share = _share(rates.gpu)
                if share is not None:
                    return share, ActivitySource.UTILIZATION, UTILIZATION_SPAN_MS
                unknown["activity"] = "impossible_value"
            if unknown["activity"] != "not_supported":
                return None, None, None
            del unknown["activity"]
        if not self._gpm_supported(unknown):
            return None, None, None
        if self._gpm_due(now_ms):
            self._gpm_step(now_ms, unknown)
        if self._gpm_last is None:
            unknown.setdefault("activity", "gpm_warming_up")
            return None, None, None
        return self._gpm_last[0], ActivitySource.GPM, self._gpm_last[1]

    def _gpm_supported(self, unknown: dict[str, str]) -> bool:
        support = self._read("activity", unknown, lambda: self._nvml.nvmlGpmQueryDeviceSupport(self._parent))
        if support is not None and support.isSupportedDevice:
            return True
        if unknown.get("activity") in (None, "not_supported", "driver_too_old"):
            unknown["activity"] = "gpm_not_supported"
        return False

    def _gpm_due(self, now_ms: float) -> bool:
        return self._gpm_at_ms is None or not 0.0 <= now_ms - self._gpm_at_ms < GPM_MIN_SPAN_MS

    def _gpm_step(self, now_ms: float, unknown: dict[str, str]) -> None:
        """Take the newer sample, and the metric between it and the older one when there is one."""
        nvml, before = self._nvml, self._gpm_at_ms
        self._gpm_at_ms = self._gpm_last = None

        def take() -> bool:
            while len(self._samples) < 2:
                self._samples.append(nvml.nvmlGpmSampleAlloc())
            if self._instance is None:
                nvml.nvmlGpmSampleGet(self._parent, self._samples[1])
            else:
                nvml.nvmlGpmMigSampleGet(self._parent, self._instance, self._samples[1])
            return True

        if not self._read("activity", unknown, take):
            return
        if before is not None and now_ms > before:
            value = self._read("activity", unknown, self._gpm_metric)
            if value is None:
                unknown.setdefault("activity", "gpm_no_value")
            else:
                self._gpm_last = (value, now_ms - before)
        self._samples.reverse()  # the newer sample is the older one of the next step
        self._gpm_at_ms = now_ms

    def _gpm_metric(self) -> float | None:
        nvml = self._nvml
        ask = nvml.c_nvmlGpmMetricsGet_t()
        ask.version = nvml.NVML_GPM_METRICS_GET_VERSION
        ask.numMetrics = 1
        ask.sample1, ask.sample2 = self._samples[0], self._samples[1]
        # "percentage of time any compute app was active": the same meaning as utilisation
        ask.metrics[0].metricId = nvml.NVML_GPM_METRIC_GRAPHICS_UTIL
        nvml.nvmlGpmMetricsGet(ask)
        answer = ask.metrics[0]
        return _share(answer.value) if answer.nvmlReturn == nvml.NVML_SUCCESS else None

    def _processes(self, mig: MigMode, unknown: dict[str, str]) -> tuple[GpuProcess, ...] | None:
        running = self._read(
            "processes", unknown, lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        )
        if running is None:
            return None
        shares = self._process_shares() if mig in (MigMode.OFF, MigMode.UNSUPPORTED) else {}
        return tuple(
            GpuProcess(
                pid=int(p.pid),
                memory_bytes=None if p.usedGpuMemory is None else int(p.usedGpuMemory),
                activity=shares.get(int(p.pid)),
            )
            for p in running
        )

    def _process_shares(self) -> dict[int, float]:
        """Multiprocessor share by process since the last reading; empty where the driver keeps no samples.

        A process without a newer sample has no entry: unknown, which is not the same as idle.
        """
        since = max(self._seen_us.values(), default=0)
        try:
            found = self._nvml.nvmlDeviceGetProcessUtilization(self._parent, since)
        except self._nvml.NVMLError:
            return {}  # NOT_FOUND: no newer sample; NOT_SUPPORTED: vGPU and the like. Memory is still known.
        newest: dict[int, tuple[int, float]] = {}
        for entry in found:
            share = _share(entry.smUtil)
            if share is not None and int(entry.timeStamp) >= newest.get(int(entry.pid), (0, 0.0))[0]:
                newest[int(entry.pid)] = (int(entry.timeStamp), share)
        self._seen_us = {pid: at for pid, (at, _) in newest.items()}
        return {pid: share for pid, (_, share) in newest.items()}


def _share(percent: float) -> float | None:
    """0..100 to 0..1; None for what cannot be (NVML has sent such values for processes that just ended)."""
    value = float(percent) / 100.0
    return value if isfinite(value) and 0.0 <= value <= 1.0 else None


def _name(nvml: Any, error: Exception) -> str:
    """NOT_SUPPORTED and so on: the name of the error's code in the module."""
    code = getattr(error, "value", None)
    return _names(nvml).get(code, f"code_{code}")


@cache
def _names(nvml: Any) -> dict[Any, str]:
    names = (name for name in dir(nvml) if name.startswith("NVML_ERROR_"))
    return {getattr(nvml, name): name.removeprefix("NVML_ERROR_") for name in names}


def _reason(name: str) -> str:
    return _REASONS.get(name, f"nvml_{name.lower()}")


def _quietly(nvml: Any, call: Callable[[], Any]) -> None:
    try:
        call()
    except nvml.NVMLError:
        return
