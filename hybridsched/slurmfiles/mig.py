"""What Slurm's files say of GPUs that are cut: the Gres= of a node in slurm.conf, and its lines in gres.conf.

Every GRES is typed: an untyped `gpu:1` may land on a slice or on a whole GPU. A type is the profile's name,
its `+` written as a `.` (`1g.10gb.me`): the site's types hold none. Two ways for gres.conf (gres.conf(5)):

- *files*: one line an instance with `MultipleFiles=`: the GPU's device file and the capability files of the
  GPU instance and the compute instance. They follow from the instances' ids and the driver's table of
  minors, so they can only be written after the cut, on the node.
- *autodetect*: `AutoDetect=nvml` finds all that itself, where Slurm was built with NVML. It names each slice
  by model and profile; a type in slurm.conf matches where it is a part of that name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from hybridsched.core.mig import Gpu, Instance, Want, gres_type
from hybridsched.core.values import Value

MINORS = "/proc/driver/nvidia-caps/mig-minors"
"""The driver's table: `gpu0/gi1/ci0/access 13`, the minor numbers of /dev/nvidia-caps/nvidia-capN."""
_MINOR = re.compile(r"(gpu\d+/\S+) (\d+)")


def parse_minors(text: str) -> dict[str, int]:
    """`gpu0/gi1/access` -> minor number, of the driver's table; other lines are left out."""
    return {m[1]: int(m[2]) for line in text.splitlines() if (m := _MINOR.fullmatch(line.strip()))}


def counts(wants: Sequence[Want], gpu_type: str) -> dict[str, int]:
    """GRES type -> how many a node has of it when each GPU is as wanted; whole GPUs are of `gpu_type`."""
    found: Counter[str] = Counter()
    for want in wants:
        if want.enabled:
            found.update(gres_type(piece.profile) for piece in want.pieces)
        else:
            found[gpu_type] += 1
    return dict(sorted(found.items(), key=lambda item: (item[0] != gpu_type, item[0])))


def gres_field(wants: Sequence[Want], gpu_type: str) -> str:
    """The GPUs' part of a node's Gres= in slurm.conf: `gpu:a100:2,gpu:1g.10gb:14`."""
    return ",".join(f"gpu:{name}:{count}" for name, count in counts(wants, gpu_type).items())


class Device(Value, frozen=True, kw_only=True):
    """One GPU or slice that a job can be given."""

    kind: str
    """Its GRES type."""
    gpu: Gpu
    instance: Instance | None = None
    """None: the whole GPU."""

    @property
    def uuid(self) -> str:
        """What CUDA knows it by; empty: unknown."""
        if self.instance is None:
            return self.gpu.uuid
        return self.instance.compute[0].uuid if self.instance.compute else ""


def devices(gpus: Sequence[Gpu], gpu_type: str) -> list[Device]:
    """A node's devices in the order of their numbers in Slurm.

    By files Slurm knows no UUID: a job finds such a number in SLURM_JOB_GPUS, SLURM_STEP_GPUS and
    CUDA_VISIBLE_DEVICES, where CUDA would take it for something else. The numbers follow the types in the
    order of Gres= in slurm.conf, and in a type the order of gres.conf (both seen on 22.05).
    """
    found = []
    for gpu in gpus:
        if not gpu.enabled:
            found.append(Device(kind=gpu_type, gpu=gpu))
        found += [Device(kind=gres_type(i.profile), gpu=gpu, instance=i) for i in gpu.instances]
    return sorted(found, key=lambda device: (device.kind != gpu_type, device.kind))


def gres_conf(
    node: str, gpus: Sequence[Gpu], gpu_type: str, minors: Mapping[str, int], *, dev: str = "/dev"
) -> str:
    """The node's lines in gres.conf, by files, for the GPUs as they stand.

    `minors` is the driver's table. `dev` is the folder of the device files.

    Raises:
        ValueError: an instance has not exactly one compute instance, or the table lacks a file: what to do is
        said.
    """
    lines = [f"NodeName={node} AutoDetect=off"]
    for device in devices(gpus, gpu_type):
        if device.gpu.minor is None:
            raise ValueError(f"GPU {device.gpu.index}: the number of its device file is unknown")
        files = f"{dev}/nvidia{device.gpu.minor}"
        word = "File"
        if device.instance is not None:
            files = ",".join([files, *_caps(device.gpu, device.instance, minors, dev)])
            word = "MultipleFiles"
        lines.append(f"NodeName={node} Name=gpu Type={device.kind} {word}={files}")
    return "\n".join(lines) + "\n"


def _caps(gpu: Gpu, instance: Instance, minors: Mapping[str, int], dev: str) -> list[str]:
    """The capability files of a GPU instance and the compute instance in it."""
    where = f"GPU {gpu.index}: {instance.profile} at {instance.start}"
    if len(instance.compute) != 1:
        raise ValueError(
            f"{where} has {len(instance.compute)} compute instances; Slurm's files take whole instances "
            "only: see `hybridsched mode assert`"
        )
    base = f"gpu{gpu.minor}/gi{instance.id}"
    found = []
    for key in (f"{base}/access", f"{base}/ci{instance.compute[0].id}/access"):
        if key not in minors:
            raise ValueError(f"{where}: the driver's table {MINORS} has no {key}")
        found.append(f"{dev}/nvidia-caps/nvidia-cap{minors[key]}")
    return found


def gres_conf_autodetect(node: str, wants: Sequence[Want], gpu_type: str) -> str:
    """The node's lines in gres.conf where Slurm finds the GPUs itself.

    Raises ValueError when two types of the node cannot be told apart in the names that it finds.
    """
    profiles = sorted({piece.profile for want in wants for piece in want.pieces})
    for profile in profiles:
        if "+" in profile:
            raise ValueError(
                f"{profile} cannot be had by AutoDetect=nvml: its type would match "
                f"{profile.partition('+')[0]} too; write gres.conf by files"
            )
    if profiles and any(not want.enabled for want in wants):
        raise ValueError(
            f"whole GPUs beside slices cannot be had by AutoDetect=nvml: the type {gpu_type} would match the "
            "slices' names too; write gres.conf by files"
        )
    return f"NodeName={node} AutoDetect=nvml\n"
