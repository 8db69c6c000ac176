"""MIG through NVML (package nvidia-ml-py, imported as pynvml when it is used).

NVML is entered for each call and left again: whoever holds it can keep a GPU from changing its mode. Handles
are looked up anew for every step, since a change of the mode makes old ones invalid. NVML lets only root (or
who may open the driver's `mig/config` capability) list instances and placements, and cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec

from hybridsched.core.mig import MODELS, Act, Compute, Gpu, Instance, Plan, Profile, Step, model_of
from hybridsched.mig.protocol import MigError, Outcome, StepReport, carry_out

_ROOT = "only root may list and cut instances: run this as root on the node"
_HOLDERS = (
    "stop what holds it (jobs, dcgm, nvidia-persistenced, nvsm, a monitor, slurmstepd's GPU accounting), "
    "then try again"
)
_RESET = (
    "reset it (nvidia-smi --gpu-reset, or a reboot where the platform passes no reset on), then try again"
)
_MEANING: dict[str, tuple[str, str]] = {
    # NVML's error -> code, what to do
    "IN_USE": ("in_use", f"is in use; {_HOLDERS}"),
    "NO_PERMISSION": ("no_permission", f"is closed to this user; {_ROOT}"),
    "RESET_REQUIRED": ("reset_required", f"must be reset first; {_RESET}"),
    "INSUFFICIENT_RESOURCES": ("no_room", "has no room for it; read the GPU again and plan again"),
    "NOT_SUPPORTED": ("not_supported", "does not support it in its present state"),
    "INVALID_ARGUMENT": ("failed", "took it for a mistake; the GPU may have changed meanwhile: plan again"),
    "NOT_FOUND": ("changed", "has it no more; plan again"),
    "GPU_IS_LOST": ("lost", "has fallen off the bus; drain the node and look at the kernel's log"),
    "FUNCTION_NOT_FOUND": ("not_supported", "needs a newer driver"),
}
_NO_DRIVER = ("LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH")
_AMPERE = 7


class NvmlMig:
    """A `MigDriver` over NVML. `load` gives the pynvml module; tests pass their own."""

    def __init__(self, *, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load

    def read(self) -> tuple[Gpu, ...]:
        """All GPUs. Raises `MigError`; `no_permission` where one is in MIG mode and this is not root."""
        with self._session() as nvml:
            try:
                count = nvml.nvmlDeviceGetCount()
            except nvml.NVMLError as error:
                raise _error(nvml, error, "the driver") from error
            return tuple(_gpu(nvml, index) for index in range(count))

    def apply(self, plan: Plan, report: Callable[[StepReport], None]) -> Outcome:
        return carry_out(plan, read=self.read, do=self._do, report=report)

    def _do(self, step: Step) -> None:
        with self._session() as nvml:
            try:
                device = nvml.nvmlDeviceGetHandleByIndex(step.gpu)
                if step.act in (Act.MODE_ON, Act.MODE_OFF):
                    status = nvml.nvmlDeviceSetMigMode(device, int(step.act is Act.MODE_ON))
                    # The handle is stale now; whether the mode stands is asked of a new one.
                    device = nvml.nvmlDeviceGetHandleByIndex(step.gpu)
                    current, _ = nvml.nvmlDeviceGetMigMode(device)
                    _check_mode(nvml, step, status, bool(current))
                elif step.act is Act.CREATE:
                    place = nvml.c_nvmlGpuInstancePlacement_t(step.start, step.size)
                    nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                        device, _profile_id(nvml, device, step), ctypes.byref(place)
                    )
                else:
                    _inside(nvml, device, step)
            except nvml.NVMLError as error:
                raise _error(nvml, error, f"{step}: the GPU") from error

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        try:
            nvml = self._load()
        except ImportError as error:
            raise MigError(
                "nvidia-ml-py is not installed: pip install 'hybridsched[nvml]'", code="nvidia_ml_py_missing"
            ) from error
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise _error(nvml, error, "NVML") from error
        try:
            yield nvml
        finally:
            with contextlib.suppress(nvml.NVMLError):  # on the way out: says nothing of what was done
                nvml.nvmlShutdown()


def _name(nvml: Any, error: Exception) -> str:
    """IN_USE and so on: the name of the error's code in the module."""
    code = getattr(error, "value", None)
    return _names(nvml).get(code, f"code {code}")


@cache
def _names(nvml: Any) -> dict[Any, str]:
    names = (name for name in dir(nvml) if name.startswith("NVML_ERROR_"))
    return {getattr(nvml, name): name.removeprefix("NVML_ERROR_") for name in names}


def _error(nvml: Any, error: Exception, what: str) -> MigError:
    name = _name(nvml, error)
    if name in _NO_DRIVER:
        return MigError(f"no NVIDIA driver runs on this machine (NVML: {name})", code="driver_missing")
    code, meaning = _MEANING.get(name, ("failed", "refused"))
    return MigError(f"{what} {meaning} (NVML: {name})", code=code)


def _check_mode(nvml: Any, step: Step, status: int, current: bool) -> None:
    """The call can succeed while the mode does not change: the reason stands in the status, or nowhere."""
    if status == nvml.NVML_ERROR_IN_USE:
        raise MigError(f"{step}: it is pending, because the GPU is in use; {_HOLDERS}", code="in_use")
    if status == nvml.NVML_ERROR_RESET_REQUIRED:
        raise MigError(f"{step}: it is pending until the GPU is reset; {_RESET}", code="reset_required")
    if status != nvml.NVML_SUCCESS:
        raise _error(nvml, nvml.NVMLError(status), f"{step}: the GPU")
    if current != (step.act is Act.MODE_ON):
        raise MigError(f"{step}: it was accepted and has not taken effect; {_RESET}", code="pending")


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        found = Gpu(
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(device),
            name=nvml.nvmlDeviceGetName(device),
            pci_id=int(nvml.nvmlDeviceGetPciInfo(device).pciDeviceId),
            minor=int(nvml.nvmlDeviceGetMinorNumber(device)),
            resets=int(nvml.nvmlDeviceGetArchitecture(device)) <= _AMPERE,
            pids=_pids(nvml, device),
        )
        try:
            current, pending = nvml.nvmlDeviceGetMigMode(device)
        except nvml.NVMLError as error:
            if _name(nvml, error) != "NOT_SUPPORTED":
                raise
            return msgspec.structs.replace(found, supported=False)
        profiles = _profiles(nvml, device) or MODELS.get(model_of(found.name) or "", ())
        return msgspec.structs.replace(
            found,
            enabled=bool(current),
            pending=bool(pending),
            profiles=profiles,
            instances=_instances(nvml, device, profiles) if current else (),
        )
    except nvml.NVMLError as error:
        raise _error(nvml, error, f"GPU {index}") from error


def _pids(nvml: Any, device: Any) -> tuple[int, ...] | None:
    try:
        return tuple(sorted({int(p.pid) for p in nvml.nvmlDeviceGetComputeRunningProcesses(device)}))
    except nvml.NVMLError:
        return None  # unknown: whoever plans takes the device for used


def _profiles(nvml: Any, device: Any) -> tuple[Profile, ...]:
    """The device's own profiles, smallest first; empty when it does not tell (MIG off, or not this user)."""
    found = []
    for which in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, which, version=2)
            starts = _starts(nvml, device, info)
        except nvml.NVMLError as error:
            if _name(nvml, error) in ("NOT_SUPPORTED", "INVALID_ARGUMENT"):
                continue
            if _name(nvml, error) == "NO_PERMISSION":
                return ()
            raise
        if starts:
            found.append(
                Profile(
                    name=str(info.name).removeprefix("MIG "),
                    id=int(info.id),
                    slices=int(info.sliceCount),
                    size=starts[0][1],
                    starts=tuple(start for start, _ in starts),
                    most=int(info.instanceCount),
                    multiprocessors=int(info.multiprocessorCount) or None,
                    memory_mib=int(info.memorySizeMB) or None,
                )
            )
    return tuple(sorted(found, key=lambda p: (p.slices, p.size, len(p.name), p.name)))


def _starts(nvml: Any, device: Any, info: Any) -> list[tuple[int, int]]:
    """(first slice, slices) of each placement, in order."""
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, info.id, None, ctypes.byref(count))
    places = (nvml.c_nvmlGpuInstancePlacement_t * max(1, count.value))()
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, info.id, places, ctypes.byref(count))
    return sorted((int(p.start), int(p.size)) for p in places[: count.value])


def _instances(nvml: Any, device: Any, profiles: tuple[Profile, ...]) -> tuple[Instance, ...]:
    devices = _mig_devices(nvml, device)
    found = []
    for profile in profiles:
        for handle in _handles(nvml, device, profile):
            info = nvml.nvmlGpuInstanceGetInfo(handle)
            found.append(
                Instance(
                    id=int(info.id),
                    profile=profile.name,
                    start=int(info.placement.start),
                    size=int(info.placement.size),
                    compute=tuple(
                        _compute(nvml, slices, ci, devices.get((int(info.id), ci)))
                        for slices, ci, _ in _compute_instances(nvml, handle)
                    ),
                )
            )
    return tuple(sorted(found, key=lambda i: i.start))


def _handles(nvml: Any, device: Any, profile: Profile) -> list[Any]:
    count = ctypes.c_uint(profile.most)
    handles = (nvml.c_nvmlGpuInstance_t * profile.most)()
    nvml.nvmlDeviceGetGpuInstances(device, profile.id, handles, ctypes.byref(count))
    return list(handles[: count.value])


def _compute_instances(nvml: Any, instance: Any) -> Iterator[tuple[int, int, Any]]:
    """(slices, id, handle) of each compute instance of a GPU instance."""
    for slices, profile_id, most in _compute_profiles(nvml, instance):
        count = ctypes.c_uint(most)
        handles = (nvml.c_nvmlComputeInstance_t * most)()
        nvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, handles, ctypes.byref(count))
        for handle in handles[: count.value]:
            yield slices, int(nvml.nvmlComputeInstanceGetInfo(handle).id), handle


def _compute_profiles(nvml: Any, instance: Any) -> Iterator[tuple[int, int, int]]:
    """(slices, id, most) of each compute profile of a GPU instance."""
    for which in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                instance, which, nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, version=2
            )
        except nvml.NVMLError as error:
            if _name(nvml, error) in ("NOT_SUPPORTED", "INVALID_ARGUMENT"):
                continue
            raise
        yield int(info.sliceCount), int(info.id), max(1, int(info.instanceCount))


def _mig_devices(nvml: Any, device: Any) -> dict[tuple[int, int], Any]:
    """(GPU instance, compute instance) -> handle of the MIG device."""
    found = {}
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
            key = (
                int(nvml.nvmlDeviceGetGpuInstanceId(handle)),
                int(nvml.nvmlDeviceGetComputeInstanceId(handle)),
            )
        except nvml.NVMLError as error:
            if _name(nvml, error) == "NOT_FOUND":
                continue
            raise
        found[key] = handle
    return found


def _compute(nvml: Any, slices: int, ci: int, handle: Any) -> Compute:
    if handle is None:
        return Compute(id=ci, slices=slices, pids=None)
    return Compute(id=ci, slices=slices, uuid=nvml.nvmlDeviceGetUUID(handle), pids=_pids(nvml, handle))


def _profile_id(nvml: Any, device: Any, step: Step) -> int:
    """The ID that the driver wants, which is not the number of the enumeration."""
    for profile in _profiles(nvml, device):
        if profile.name == step.profile:
            return profile.id
    raise MigError(f"{step}: the driver has no such profile", code="not_supported")


def _inside(nvml: Any, device: Any, step: Step) -> None:
    """A step on an instance that stands: found by profile and place, as the plan names it."""
    profile = next((p for p in _profiles(nvml, device) if p.name == step.profile), None)
    handles = [] if profile is None else _handles(nvml, device, profile)
    instance = next(
        (h for h in handles if int(nvml.nvmlGpuInstanceGetInfo(h).placement.start) == step.start), None
    )
    if profile is None or instance is None:
        raise MigError(f"{step}: there is no such instance any more; plan again", code="changed")
    match step.act:
        case Act.DESTROY:
            nvml.nvmlGpuInstanceDestroy(instance)
        case Act.CREATE_COMPUTE:
            whole = next(
                (i for slices, i, _ in _compute_profiles(nvml, instance) if slices == profile.slices), None
            )
            if whole is None:
                raise MigError(
                    f"{step}: the driver has no compute profile over the whole of it", code="not_supported"
                )
            nvml.nvmlGpuInstanceCreateComputeInstance(instance, whole)
        case _:
            gone = next((h for _, i, h in _compute_instances(nvml, instance) if i == step.compute), None)
            if gone is None:
                raise MigError(f"{step}: it is gone already; plan again", code="changed")
            nvml.nvmlComputeInstanceDestroy(gone)
