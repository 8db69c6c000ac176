"""The state of a node's GPUs under MIG, what is wanted of them, and the steps between.

Words of NVIDIA's MIG User Guide: a *profile* (`1g.10gb`) is a size; a GPU *instance* of it stands at a
*placement* (first memory slice and their number); the *compute* instance inside it is what a process sees as
its device.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from hybridsched.core.values import Value


class Profile(Value, frozen=True, kw_only=True):
    """One size of GPU instance that a GPU model has."""

    name: str
    """As `nvidia-smi mig -lgip` prints it, without `MIG `: `1g.10gb`, `1g.10gb+me`."""
    id: int
    """The profile's ID as in `nvidia-smi mig -lgip`."""
    slices: int
    """Compute slices: the number before the `g`."""
    size: int
    """Memory slices that an instance covers."""
    starts: tuple[int, ...]
    """Memory slices at which an instance may begin."""
    most: int
    """Instances of it that a whole GPU has room for."""
    multiprocessors: int | None = None
    memory_mib: int | None = None
    """Memory of an instance; None: to be read from the device."""


class Compute(Value, frozen=True, kw_only=True):
    """A compute instance."""

    id: int
    slices: int
    uuid: str = ""
    """The MIG device's UUID, `MIG-...`; empty when it could not be read."""
    pids: tuple[int, ...] | None = ()
    """Processes that run on it. None: unknown."""


class Instance(Value, frozen=True, kw_only=True):
    """A GPU instance as it stands."""

    id: int
    profile: str
    start: int
    size: int
    compute: tuple[Compute, ...] = ()

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes known to run in it."""
        return tuple(pid for compute in self.compute for pid in compute.pids or ())

    @property
    def used(self) -> bool:
        """Whether a process runs in it, or that is unknown."""
        return any(compute.pids is None or compute.pids for compute in self.compute)

    def whole(self, slices: int) -> bool:
        """Whether one compute instance covers all `slices` of it, as a layout wants it."""
        return len(self.compute) == 1 and self.compute[0].slices == slices


class Gpu(Value, frozen=True, kw_only=True):
    """One GPU as it was read."""

    index: int
    """As NVML counts; mig-parted's files name GPUs so."""
    uuid: str
    name: str
    """NVML's product name, such as `NVIDIA A100-SXM4-80GB`."""
    pci_id: int = 0
    """PCI device and vendor, `0x20B210DE`: what a `device-filter` names."""
    minor: int | None = None
    """N of its device file /dev/nvidiaN, which need not be `index`. None: unknown."""
    supported: bool = True
    """Whether the GPU has MIG at all."""
    enabled: bool = False
    pending: bool = False
    """The MIG mode after the next reset: another than `enabled` is a change that has not taken effect."""
    resets: bool = True
    """Whether a change of the MIG mode resets the GPU (Ampere) or not (Hopper and later)."""
    profiles: tuple[Profile, ...] = ()
    instances: tuple[Instance, ...] = ()
    pids: tuple[int, ...] | None = ()
    """Processes on the GPU as a whole. None: unknown."""

    def profile(self, name: str) -> Profile | None:
        return next((p for p in self.profiles if p.name == name), None)


class Piece(Value, frozen=True, kw_only=True):
    """One wanted GPU instance, with one compute instance over all of it."""

    profile: str
    start: int | None = None
    """Where it must stand; None: anywhere."""


class Want(Value, frozen=True, kw_only=True):
    """What one GPU shall be. MIG off has no pieces."""

    enabled: bool
    pieces: tuple[Piece, ...] = ()


class Act(StrEnum):
    """What a step does. The values are what reports print."""

    MODE_ON = "mode_on"
    MODE_OFF = "mode_off"
    DESTROY_COMPUTE = "destroy_compute"
    DESTROY = "destroy"
    CREATE = "create"
    CREATE_COMPUTE = "create_compute"


class Step(Value, frozen=True, kw_only=True):
    """One call that changes one GPU."""

    gpu: int
    act: Act
    profile: str = ""
    start: int | None = None
    size: int | None = None
    compute: int | None = None
    """Which compute instance is destroyed."""

    def __str__(self) -> str:
        where = "" if self.start is None else f" at {self.start}"
        match self.act:
            case Act.MODE_ON:
                return f"GPU {self.gpu}: MIG mode on"
            case Act.MODE_OFF:
                return f"GPU {self.gpu}: MIG mode off"
            case Act.DESTROY_COMPUTE:
                return f"GPU {self.gpu}: destroy compute instance {self.compute} of {self.profile}{where}"
            case Act.DESTROY:
                return f"GPU {self.gpu}: destroy {self.profile}{where}"
            case Act.CREATE:
                return f"GPU {self.gpu}: create {self.profile}{where}"
            case Act.CREATE_COMPUTE:
                return f"GPU {self.gpu}: create the compute instance of {self.profile}{where}"


class GpuPlan(Value, frozen=True, kw_only=True):
    """The steps of one GPU; none when it is as wanted."""

    gpu: int
    want: Want
    steps: tuple[Step, ...] = ()
    stays: tuple[Piece, ...] = ()
    """Instances that no step touches, with their places."""
    blockers: tuple[str, ...] = ()
    """What must end before the steps can work, in sentences without a full stop."""


class Plan(Value, frozen=True, kw_only=True):
    """The steps of a node, GPU by GPU."""

    gpus: tuple[GpuPlan, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(step for gpu in self.gpus for step in gpu.steps)

    @property
    def blockers(self) -> tuple[str, ...]:
        return tuple(blocker for gpu in self.gpus for blocker in gpu.blockers)

    @property
    def wants(self) -> dict[int, Want]:
        """GPU index -> what it shall be."""
        return {gpu.gpu: gpu.want for gpu in self.gpus}


def names_said(names: list[str] | tuple[str, ...]) -> str:
    """`2 x 1g.10gb, 1 x 3g.40gb`, in the order in which each first stands; `nothing` for none."""
    counts = Counter(names)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "nothing"
