"""What the rest of the package needs of a GPU sampler, and the values that cross that border."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from hybridsched.core.values import Value

GPM_MIN_SPAN_MS = 100.0
"""Two GPM samples closer together than this give no metric (NVML's documentation of the GPM functions)."""


class MigMode(StrEnum):
    """Whether the GPU is cut into MIG instances."""

    ON = "on"
    OFF = "off"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


class ActivitySource(StrEnum):
    """Where an activity figure came from."""

    UTILIZATION = "utilization"
    """NVML's utilisation: a kernel ran, averaged over up to one second. Hides bursts shorter than that."""
    GPM = "gpm"
    """GPU performance monitoring between two samples (Hopper and later, also inside MIG)."""


class GpuProcess(Value, frozen=True, kw_only=True):
    """One process on the GPU. None: NVML does not say."""

    pid: int
    memory_bytes: int | None = None
    activity: float | None = None
    """Share of the time in which this process kept multiprocessors busy, 0..1; unknown under MIG."""


class GpuSample(Value, frozen=True, kw_only=True):
    """One reading of one GPU or MIG device. A field that is None is unknown, which is never 0 or idle.

    Each unknown field stands in `unknown` with its reason: a short stable word such as `not_supported`.
    """

    device: str
    """The device as it was asked for: an index, a UUID, or `index/mig-index`."""
    at_ms: float
    """The time that the caller gave to `sample`."""
    available: bool
    """Whether the device could be reached at all."""
    reason: str = ""
    """Why not: `nvidia_ml_py_missing`, `driver_missing`, `device_missing`, `gpu_lost`, `nvml_...`."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    activity: float | None = None
    """Share of the span in which a kernel ran, 0..1."""
    activity_source: ActivitySource | None = None
    activity_span_ms: float | None = None
    """What the activity is averaged over. A burst much shorter than it does not show."""
    mig: MigMode = MigMode.UNKNOWN
    processes: tuple[GpuProcess, ...] | None = None
    unknown: dict[str, str] = msgspec.field(default_factory=dict)


class GpuSampler(Protocol):
    """Reads one GPU. Never raises for what a driver or a GPU does: it says what is unknown, and why."""

    @property
    def device(self) -> str: ...

    def sample(self, now_ms: float) -> GpuSample:
        """One reading. `now_ms` is a monotonic time in milliseconds, the same clock at every call.

        Takes a few milliseconds in the driver: call it in a thread where an event loop is served.
        """
        ...

    def close(self) -> None:
        """Release the driver's handles. A later `sample` opens them again."""
        ...


def unavailable(device: str, now_ms: float, reason: str) -> GpuSample:
    """The reading of a device that cannot be reached: everything unknown for one reason."""
    fields = ("memory_used_bytes", "memory_total_bytes", "activity", "mig", "processes")
    return GpuSample(
        device=device, at_ms=now_ms, available=False, reason=reason, unknown=dict.fromkeys(fields, reason)
    )
