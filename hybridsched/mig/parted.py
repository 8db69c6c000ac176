"""MIG through the `nvidia-mig-parted` command, for sites that prefer it.

The GPUs are read by another driver (NVML); the command cuts. It is given only the GPUs that must change, and
told not to reset any: without that it resets all GPUs of the node when the mode of one is pending. It may cut
a GPU anew that could have kept something, so nothing at all may run on a GPU that changes. It does not tell
how far it came. A site's hooks (MIG_PARTED_HOOKS_FILE) run as ever.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence

from hybridsched.core.mig import Gpu, Plan
from hybridsched.mig.protocol import MigDriver, MigError, Outcome, StepReport, begin_refused, read_back

COMMAND = ("nvidia-mig-parted",)
LABEL = "hybridsched"
TIMEOUT_S = 300.0


class PartedMig:
    """A `MigDriver` that cuts with mig-parted. `reader` reads; `command` is an argument list."""

    def __init__(
        self, reader: MigDriver, *, command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._reader = reader
        self._command = tuple(command)
        self._timeout_s = timeout_s

    def read(self) -> tuple[Gpu, ...]:
        return self._reader.read()

    def apply(self, plan: Plan, report: Callable[[StepReport], None]) -> Outcome:
        steps = plan.steps
        try:
            before = self.read()
        except MigError as error:
            return Outcome(code=error.code, why=str(error), not_done=steps)
        refused = begin_refused(plan, before) or _in_the_way(plan, before)
        if refused is not None or not steps:
            return refused or read_back(plan, before, self.read, done=())
        try:
            self._run(document(plan))
        except MigError as error:
            report(StepReport(step=steps[0], code=error.code, why=str(error)))
            return read_back(
                plan, before, self.read, done=(), failed=steps[0], not_done=steps[1:], error=error
            )
        for step in steps:
            report(StepReport(step=step))
        return read_back(plan, before, self.read, done=steps)

    def _run(self, text: str) -> None:
        argv = [*self._command, "apply", "--skip-reset", "--config-file", "-", "--selected-config", LABEL]
        try:
            process = subprocess.Popen(  # noqa: S603 - an argument list
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env={k: v for k, v in os.environ.items() if k != "MIG_PARTED_MODE_CHANGE_ONLY"},
                start_new_session=True,
            )
        except OSError as error:
            raise MigError(f"{argv[0]} could not be started: {error}", code="parted_missing") from error
        try:
            said, _ = process.communicate(text, timeout=self._timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # its end, and its pipes closed
            raise MigError(
                f"{argv[0]} did not end within {self._timeout_s:g} s and was stopped", code="parted_failed"
            ) from error
        if process.returncode:
            last = " / ".join(line.strip() for line in said.strip().splitlines()[-3:]) or "nothing"
            raise MigError(
                f"{argv[0]} failed (exit status {process.returncode}), saying: {last}", code="parted_failed"
            )


def document(plan: Plan) -> str:
    """What mig-parted is given: the GPUs that must change, in JSON, which is YAML too."""
    entries = [
        {
            "devices": [gpu.gpu],
            "mig-enabled": gpu.want.enabled,
            "mig-devices": dict(Counter(piece.profile for piece in gpu.want.pieces)),
        }
        for gpu in plan.gpus
        if gpu.steps
    ]
    return json.dumps({"version": "v1", "mig-configs": {LABEL: entries}})


def _in_the_way(plan: Plan, now: Sequence[Gpu]) -> Outcome | None:
    """What runs on instances that the plan would keep, and mig-parted may not."""
    changing = {gpu.gpu for gpu in plan.gpus if gpu.steps}
    used = [
        f"GPU {gpu.index}: {instance.profile} at {instance.start} is in use"
        for gpu in now
        if gpu.index in changing
        for instance in gpu.instances
        if instance.used
    ]
    if not used:
        return None
    why = (
        f"{'; '.join(used)}, and mig-parted may cut the whole GPU anew. End what runs there, or cut with NVML"
    )
    return Outcome(code="in_use", why=why, not_done=plan.steps, after=tuple(now))
