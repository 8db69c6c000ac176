"""The devices that an engine can be planned for: GPUs and MIG slices, by name, with their memory.

Slices are those of `core.mig.MODELS`. Memory of a whole GPU is what CUDA has to give, which is less than
its label says: the "total capacity" that PyTorch names when memory runs out, the lowest one seen; of an A30
its largest slice.
"""

from __future__ import annotations

from hybridsched.core.mig.profiles import MODELS, model_of
from hybridsched.core.mig.values import Profile
from hybridsched.core.values import Value

MIB = 1024**2
GIB = 1024**3


class UnknownDevice(ValueError):  # noqa: N818 - a word of the domain, as `Expired` is
    """No such GPU or profile, or several; the message lists what there is."""


class GpuKind(Value, frozen=True, kw_only=True):
    """One model of GPU."""

    name: str
    """As in `core.mig.MODELS`."""
    aliases: tuple[str, ...] = ()
    memory_bytes: int
    compute_capability: tuple[int, int]

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """Its slices, smallest first; without `+me`, whose memory is the same."""
        return tuple(
            one for one in MODELS[self.name] if one.memory_mib is not None and not one.name.endswith("+me")
        )


class Device(Value, frozen=True, kw_only=True):
    """What one engine gets: a GPU, or a slice of one."""

    name: str
    """`a100-80gb`, or `3g.40gb@a100-80gb`."""
    gpu: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    profile: str | None = None
    """None: the whole GPU."""


def _kind(name: str, gib: float, capability: tuple[int, int], *aliases: str) -> GpuKind:
    return GpuKind(
        name=name, memory_bytes=int(gib * GIB), compute_capability=capability, aliases=tuple(aliases)
    )


GPUS: tuple[GpuKind, ...] = (
    _kind("a30", 23.4375, (8, 0), "a30-24gb"),
    _kind("a100-40gb", 39.38, (8, 0), "a100"),
    _kind("a100-80gb", 79.14, (8, 0), "a100"),
    _kind("h100-80gb", 79.18, (9, 0), "h100"),
    _kind("h200", 139.80, (9, 0), "h200-141gb"),
    _kind("b200", 178.35, (10, 0), "b200-180gb"),
)
"""By memory, the least first."""


def whole(gpu: GpuKind) -> Device:
    """The GPU without MIG."""
    return Device(
        name=gpu.name,
        gpu=gpu.name,
        memory_bytes=gpu.memory_bytes,
        compute_capability=gpu.compute_capability,
    )


def slices(gpu: GpuKind) -> tuple[Device, ...]:
    """Its slices as devices, smallest first."""
    return tuple(
        Device(
            name=f"{one.name}@{gpu.name}",
            gpu=gpu.name,
            # A slice that takes all of the GPU cannot have more than CUDA gives of the whole.
            memory_bytes=min((one.memory_mib or 0) * MIB, gpu.memory_bytes),
            compute_capability=gpu.compute_capability,
            profile=one.name,
        )
        for one in gpu.profiles
    )


def find_device(text: str) -> Device:
    """The device called `a100-80gb`, `3g.40gb@a100-80gb`, or `3g.40gb@a100` where one A100 has that profile.

    Raises:
        UnknownDevice: there is none of that name, or there are several.
    """
    left, at, right = text.strip().lower().partition("@")
    profile, gpu = (left.removesuffix("+me"), right) if at else ("", left)
    named = [kind for kind in GPUS if gpu == kind.name or gpu in kind.aliases]
    found = [whole(kind) for kind in named]
    if profile:
        found = [one for kind in named for one in slices(kind) if one.profile == profile]
    elif not named:
        found = [one for kind in GPUS for one in slices(kind) if one.profile == left]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownDevice(f"{text!r} could be {' or '.join(one.name for one in found)}; give one of them")
    raise UnknownDevice(f"{text!r} is no device that is known; there are {device_list()}")


def device_list() -> str:
    """All names, for a message."""
    gpus = ", ".join(f"{gpu.name} (with {' '.join(one.name for one in gpu.profiles)})" for gpu in GPUS)
    return f"{gpus}; a slice is written as 3g.40gb@a100-80gb"


def device_by_label(label: str, profile: str | None = None) -> Device:
    """The device that NVIDIA's tools call `label`, such as `NVIDIA A100-SXM4-80GB`, or a slice of it.

    Raises:
        UnknownDevice: it is none of those in the table.
    """
    model = model_of(label)
    if model is None or all(gpu.name != model for gpu in GPUS):
        raise UnknownDevice(
            f"the GPU here is {label!r}, which is not in the table; name one with no more memory by --gpu: "
            f"{device_list()}"
        )
    return find_device(model if profile is None else f"{profile}@{model}")
