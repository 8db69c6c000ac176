"""Which GPU or slice an engine gets: what `nvidia-smi -L` lists, and what CUDA_VISIBLE_DEVICES must then say.

vLLM reads CUDA_VISIBLE_DEVICES as numbers and ends at a UUID (vLLM issue 41848, seen in 0.20.1), which is
what Slurm and NVIDIA's own tools put there for slices. So a UUID is turned into the number of its GPU, in
the order of the bus. Named by its number, a GPU with slices gives CUDA its first slice: any other keeps its
UUID.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from hybridsched.core.gpus import Device, UnknownDevice, device_by_label
from hybridsched.core.values import Value

_GPU = re.compile(r"GPU (\d{1,4}): (.*?) \(UUID: (GPU-[^)]+)\)")
_SLICE = re.compile(r"\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")


class DeviceError(Exception):
    """There is no such GPU here, or it cannot be used so; the message says what there is."""


class Slice(Value, frozen=True, kw_only=True):
    """One MIG instance."""

    profile: str
    uuid: str


class Listed(Value, frozen=True, kw_only=True):
    """One GPU of this machine."""

    number: int
    label: str
    """NVIDIA's name, such as `NVIDIA A100-SXM4-80GB`."""
    uuid: str
    slices: tuple[Slice, ...] = ()


class Choice(Value, frozen=True, kw_only=True):
    """What an engine gets."""

    device: Device
    count: int
    """How many of it."""
    visible: str
    """For CUDA_VISIBLE_DEVICES, with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    note: str = ""
    """What the operator should know; empty: nothing."""


def read_listing(text: str) -> tuple[Listed, ...]:
    """The GPUs in the words of `nvidia-smi -L`."""
    gpus: list[tuple[int, str, str, list[Slice]]] = []
    for line in text.splitlines():
        if found := _GPU.match(line):
            gpus.append((int(found[1]), found[2], found[3], []))
        elif gpus and (found := _SLICE.match(line)):
            gpus[-1][3].append(Slice(profile=found[1].lower(), uuid=found[2]))
    return tuple(
        Listed(number=number, label=label, uuid=uuid, slices=tuple(slices))
        for number, label, uuid, slices in gpus
    )


def list_devices(program: str = "nvidia-smi", timeout_s: float = 20.0) -> tuple[Listed, ...]:
    """The GPUs of this machine.

    Raises:
        DeviceError: the program cannot be run, fails, or lists none.
    """
    try:
        done = subprocess.run(  # noqa: S603 - an argument list; the program is the operator's
            [program, "-L"], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{program} -L cannot be run ({error}); name the device with --gpu") from None
    gpus = read_listing(done.stdout)
    if done.returncode or not gpus:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise DeviceError(
            f"{program} -L ended with {done.returncode} and lists no GPU ({said or 'no word'}); "
            "name the device with --gpu"
        )
    return gpus


def choose(gpus: Sequence[Listed], wanted: str | None, *, from_slurm: bool = False) -> Choice:
    """The devices that `wanted` names: numbers, GPU-UUIDs or one MIG-UUID, by commas; None: all there are.

    `from_slurm`: Slurm chose the names. Its numbers count slices where it manages those by their files, so a
    number says nothing while a GPU with several slices can be seen.

    Raises:
        DeviceError: one is not there, they are of several kinds, or they are slices that should work
        together.
    """
    names = [part.strip() for part in (wanted or "").split(",") if part.strip()]
    if not names:
        names = [str(gpu.number) for gpu in gpus]
    if from_slurm and any(len(gpu.slices) > 1 for gpu in gpus) and any(name.isdigit() for name in names):
        raise DeviceError(
            f"Slurm gave {', '.join(names)}, which may count slices and not GPUs; choose one with --device: "
            f"{_listing(gpus)}"
        )
    found = [_find(gpus, name) for name in names]
    slices = [part for _, part in found if part is not None]
    if slices and len(found) > 1:
        raise DeviceError(
            f"{', '.join(names)} would be {len(found)} devices with slices among them, and an "
            "engine works on one slice "
            f"alone; choose one with --device: {_listing(gpus)}"
        )
    try:
        kinds = [device_by_label(gpu.label, None if part is None else part.profile) for gpu, part in found]
    except UnknownDevice as error:
        raise DeviceError(str(error)) from None
    if len(set(kinds)) > 1:
        raise DeviceError(
            f"{', '.join(names)} are of several kinds ({', '.join(sorted({kind.name for kind in kinds}))}); "
            "choose those of one with --device"
        )
    gpu, part = found[0]
    if part is not None and part is not gpu.slices[0]:
        return Choice(
            device=kinds[0],
            count=1,
            visible=part.uuid,
            note=(
                f"{part.uuid} is not the first slice of GPU {gpu.number}, so its UUID is kept; "
                "vLLM 0.20 ends at a "
                "UUID (issue 41848). Where it does, let the job see only this slice (Slurm's "
                "ConstrainDevices)"
            ),
        )
    return Choice(device=kinds[0], count=len(found), visible=",".join(str(one.number) for one, _ in found))


def _find(gpus: Sequence[Listed], name: str) -> tuple[Listed, Slice | None]:
    """A GPU without slices, or one slice of a GPU."""
    for gpu in gpus:
        for part in gpu.slices:
            if part.uuid == name:
                return gpu, part
        if name == str(gpu.number) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            if len(gpu.slices) > 1:
                raise DeviceError(
                    f"GPU {gpu.number} is cut into {len(gpu.slices)} slices; choose one with "
                    f"--device: {_listing(gpus)}"
                )
            return gpu, gpu.slices[0] if gpu.slices else None
    raise DeviceError(f"{name!r} is not here; there are {_listing(gpus)}")


def _listing(gpus: Sequence[Listed]) -> str:
    names = []
    for gpu in gpus:
        names += [f"{part.uuid} ({part.profile})" for part in gpu.slices] or [f"{gpu.number} ({gpu.label})"]
    return ", ".join(names)
