"""A GPU sampler without a GPU, for tests and for machines that have none.

It keeps the awkward rules of the real one: no plain utilisation under MIG, GPM only from two samples that lie
far enough apart, and every field may fail by itself.
"""

from __future__ import annotations

from hybridsched.telemetry.protocol import (
    GPM_MIN_SPAN_MS,
    ActivitySource,
    GpuProcess,
    GpuSample,
    MigMode,
    unavailable,
)


class FakeSampler:
    """Set the public attributes, then `sample`. `errors`: fields of GpuSample that fail, with the reason."""

    def __init__(
        self,
        device: str = "0",
        *,
        memory_used_bytes: int = 0,
        memory_total_bytes: int = 80 * 2**30,
        activity: float = 0.0,
        mig: MigMode = MigMode.OFF,
        gpm: bool = False,
        processes: tuple[GpuProcess, ...] = (),
    ) -> None:
        self._device = device
        self.memory_used_bytes = memory_used_bytes
        self.memory_total_bytes = memory_total_bytes
        self.activity = activity
        self.mig = mig
        self.gpm = gpm
        self.processes = processes
        self.gone = ""
        """Why the device cannot be reached; empty while it can."""
        self.errors: dict[str, str] = {}
        self._gpm_at_ms: float | None = None
        self._gpm_last: tuple[float, float] | None = None

    @property
    def device(self) -> str:
        return self._device

    def sample(self, now_ms: float) -> GpuSample:
        """One reading of the attributes as they stand."""
        if self.gone:
            self._gpm_at_ms = self._gpm_last = None
            return unavailable(self._device, now_ms, self.gone)
        unknown = dict(self.errors)
        activity, source, span = self._activity(now_ms, unknown)
        memory_fails = "memory_used_bytes" in unknown or "memory_total_bytes" in unknown
        if memory_fails:
            why = unknown.get("memory_used_bytes") or unknown["memory_total_bytes"]
            unknown["memory_used_bytes"] = unknown["memory_total_bytes"] = why
        return GpuSample(
            device=self._device,
            at_ms=now_ms,
            available=True,
            memory_used_bytes=None if memory_fails else self.memory_used_bytes,
            memory_total_bytes=None if memory_fails else self.memory_total_bytes,
            activity=activity,
            activity_source=source,
            activity_span_ms=span,
            mig=MigMode.UNKNOWN if "mig" in unknown else self.mig,
            processes=None if "processes" in unknown else self._processes(),
            unknown=unknown,
        )

    def _processes(self) -> tuple[GpuProcess, ...]:
        if self.mig is MigMode.ON:
            return tuple(GpuProcess(pid=p.pid, memory_bytes=p.memory_bytes) for p in self.processes)
        return self.processes

    def _activity(
        self, now_ms: float, unknown: dict[str, str]
    ) -> tuple[float | None, ActivitySource | None, float | None]:
        if "activity" in unknown:
            return None, None, None
        if self.mig is not MigMode.ON and "mig" not in unknown:
            return self.activity, ActivitySource.UTILIZATION, 1000.0
        if not self.gpm:
            unknown["activity"] = "gpm_not_supported"
            return None, None, None
        before = self._gpm_at_ms
        if before is None or not 0.0 <= now_ms - before < GPM_MIN_SPAN_MS:
            self._gpm_at_ms = now_ms
            self._gpm_last = None if before is None else (self.activity, now_ms - before)
        if self._gpm_last is None:
            unknown["activity"] = "gpm_warming_up"
            return None, None, None
        return self._gpm_last[0], ActivitySource.GPM, self._gpm_last[1]

    def close(self) -> None:
        """Forget the first GPM sample, as the real one does."""
        self._gpm_at_ms = self._gpm_last = None
