"""GPUs in memory that obey MIG's rules, for tests and for trying a calendar without GPUs.

It shows that a caller handles what the rules say; it does not show that a GPU behaves so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hybridsched.core.mig import MODELS, PCI_IDS, Act, Compute, Gpu, Instance, Plan, Profile, Step
from hybridsched.core.mig.placing import MEDIA, cells
from hybridsched.mig.protocol import MigError, Outcome, StepReport, carry_out

NAMES = {
    "a30": "NVIDIA A30",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "h100-80gb": "NVIDIA H100 80GB HBM3",
    "h100-94gb": "NVIDIA H100 NVL",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}
"""Model -> NVML's product name of one board of it."""

_AMPERE = ("a30", "a100-40gb", "a100-80gb")


def fake_gpu(index: int, model: str) -> Gpu:
    """A GPU of `model` (a key of `MODELS`) with MIG off and nothing on it; `none`: one that has no MIG."""
    uuid = f"GPU-{index:08x}-0000-0000-0000-000000000000"
    if model == "none":
        return Gpu(index=index, uuid=uuid, name="NVIDIA L40S", minor=index, supported=False)
    return Gpu(
        index=index,
        uuid=uuid,
        name=NAMES[model],
        pci_id=PCI_IDS[model][0],
        minor=index,
        resets=model in _AMPERE,
        profiles=MODELS[model],
    )


class FakeMig:
    """A `MigDriver` over GPUs in memory.

    `gpus` is the present state; tests may replace it. `fail_at` raises `MigError` at the n-th step from now
    (0: the next). `root` and `needs_reset` play a caller without rights and a platform that cannot reset a
    GPU.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = list(gpus)
        self.root = True
        self.needs_reset = False
        self.unreadable = ""
        """The code of the error that `read` raises; empty: it reads."""
        self._fail: tuple[int, str] | None = None
        self._made = 0

    def fail_at(self, steps: int, code: str = "failed") -> None:
        self._fail = (steps, code)

    def read(self) -> tuple[Gpu, ...]:
        if self.unreadable:
            raise MigError("the fake was told not to be read", code=self.unreadable)
        if not self.root and any(gpu.enabled for gpu in self.gpus):
            raise MigError("only root may list instances: run this as root on the node", code="no_permission")
        return tuple(self.gpus)

    def apply(self, plan: Plan, report: Callable[[StepReport], None]) -> Outcome:
        return carry_out(plan, read=self.read, do=self.do, report=report)

    def do(self, step: Step) -> None:
        """One step, by the rules. Raises `MigError`."""
        if self._fail is not None:
            left, code = self._fail
            self._fail = (left - 1, code) if left else None
            if not left:
                raise MigError("the fake was told to fail here", code=code)
        if not self.root:
            raise MigError("only root may cut GPUs: run this as root on the node", code="no_permission")
        position = next((i for i, gpu in enumerate(self.gpus) if gpu.index == step.gpu), None)
        if position is None or not self.gpus[position].supported:
            raise MigError(f"GPU {step.gpu} has no MIG", code="not_supported")
        gpu = self.gpus[position]
        if step.act in (Act.MODE_ON, Act.MODE_OFF):
            changed = self._mode(gpu, step.act is Act.MODE_ON)
            self.gpus[position] = changed
            if changed.pending != changed.enabled:
                raise _pending(changed, needs_reset=self.needs_reset)
            return
        if not gpu.enabled:
            raise MigError(f"GPU {gpu.index}: MIG mode is off", code="not_supported")
        if step.act is Act.CREATE:
            self.gpus[position] = self._create(gpu, step)
            return
        instance = next(
            (i for i in gpu.instances if (i.profile, i.start) == (step.profile, step.start)), None
        )
        if instance is None:
            raise MigError(f"{step}: there is no such instance", code="failed")
        others = tuple(i for i in gpu.instances if i is not instance)
        new = self._changed(gpu, instance, step)
        kept = others if new is None else (*others, new)
        self.gpus[position] = msgspec.structs.replace(
            gpu, instances=tuple(sorted(kept, key=lambda i: i.start))
        )

    def _mode(self, gpu: Gpu, on: bool) -> Gpu:
        if gpu.enabled == on:
            return msgspec.structs.replace(gpu, pending=on)
        if self.needs_reset or gpu.instances or gpu.pids is None or gpu.pids:
            return msgspec.structs.replace(gpu, pending=on)
        return msgspec.structs.replace(gpu, enabled=on, pending=on)

    def _create(self, gpu: Gpu, step: Step) -> Gpu:
        profile = _profile(gpu, step)
        if step.start not in profile.starts or step.size != profile.size:
            raise MigError(f"{step}: no placement of that profile", code="failed")
        taken = 0
        for instance in gpu.instances:
            taken |= cells(instance.start, instance.size)
        like = [i for i in gpu.instances if i.profile == profile.name]
        media = profile.name.endswith(MEDIA) and any(i.profile.endswith(MEDIA) for i in gpu.instances)
        if taken & cells(step.start, profile.size) or len(like) >= profile.most or media:
            raise MigError(f"{step}: no room", code="no_room")
        used = {i.id for i in gpu.instances}
        free = next(n for n in range(1, 16) if n not in used)
        made = Instance(id=free, profile=profile.name, start=step.start, size=profile.size)
        return msgspec.structs.replace(
            gpu, instances=tuple(sorted((*gpu.instances, made), key=lambda i: i.start))
        )

    def _changed(self, gpu: Gpu, instance: Instance, step: Step) -> Instance | None:
        """The instance after the step; None: it is gone."""
        if step.act is Act.CREATE_COMPUTE:
            if instance.compute:
                raise MigError(f"{step}: no room", code="no_room")
            self._made += 1
            uuid = f"MIG-{gpu.index:08x}-0000-0000-0000-{self._made:012x}"
            return msgspec.structs.replace(
                instance, compute=(Compute(id=0, slices=_profile(gpu, step).slices, uuid=uuid),)
            )
        if step.act is Act.DESTROY:
            if instance.compute:
                raise MigError(f"{step}: compute instances stand in it", code="in_use")
            return None
        gone = next((c for c in instance.compute if c.id == step.compute), None)
        if gone is None:
            raise MigError(f"{step}: there is no such compute instance", code="failed")
        if gone.pids is None or gone.pids:
            raise MigError(f"{step}: a process runs on it", code="in_use")
        return msgspec.structs.replace(instance, compute=tuple(c for c in instance.compute if c is not gone))


def _profile(gpu: Gpu, step: Step) -> Profile:
    found = gpu.profile(step.profile)
    if found is None:
        raise MigError(f"GPU {gpu.index} has no profile {step.profile}", code="not_supported")
    return found


def _pending(gpu: Gpu, *, needs_reset: bool) -> MigError:
    if needs_reset:
        return MigError(f"GPU {gpu.index} must be reset before its MIG mode changes", code="reset_required")
    return MigError(
        f"GPU {gpu.index}: the MIG mode is pending: something holds the GPU or stands on it", code="in_use"
    )
