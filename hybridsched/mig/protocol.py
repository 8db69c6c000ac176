"""What the rest of the package needs of something that cuts GPUs, and how a plan is carried out.

Codes of `MigError` (stable; the text says what to do):
    in_use                something runs on what must go, or holds the GPU
    pending               the MIG mode was set and has not taken effect
    reset_required        the GPU wants a reset before anything else
    no_permission         only root may cut GPUs
    changed               the GPUs are no longer as they were when the plan was made
    no_room               the driver has no room for an instance that should fit
    not_supported         the GPU or the driver has no such thing
    lost                  the GPU has fallen off the bus
    driver_missing        no driver, or it does not run
    nvidia_ml_py_missing  the package that speaks to the driver is not installed
    parted_missing, parted_failed   the mig-parted command
    failed                anything else, with the driver's word
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hybridsched.core.mig import Gpu, MigRefusalError, Plan, Step, back, difference
from hybridsched.core.mig import plan as make_plan
from hybridsched.core.values import Value


class MigError(Exception):
    """The driver, or what stands for it, did not do something. `code` is one of the module's list."""

    def __init__(self, text: str, *, code: str) -> None:
        super().__init__(text)
        self.code = code


class StepReport(Value, frozen=True, kw_only=True):
    """One step that was tried."""

    step: Step
    code: str = ""
    """Empty: done. Else the code of the error."""
    why: str = ""


class Outcome(Value, frozen=True, kw_only=True):
    """What became of a plan: exactly what was made, what was not, and what stands now."""

    done: tuple[Step, ...] = ()
    failed: Step | None = None
    """The step that failed; the ones after it were not tried. None with a `code`: nothing was begun."""
    code: str = ""
    """Empty: the plan was carried out and the GPUs read back as wanted."""
    why: str = ""
    not_done: tuple[Step, ...] = ()
    """Steps after the failed one."""
    after: tuple[Gpu, ...] | None = None
    """The GPUs read back; None: they could not be read, and what stands is unknown."""
    differs: tuple[str, ...] = ()
    """One line for each GPU that is not as wanted."""
    back: Plan | None = None
    """The way back to what stood before, where a failed plan changed something. Never followed unasked."""

    @property
    def ok(self) -> bool:
        return not self.code

    def lines(self) -> list[str]:
        """The whole of it for a person, one fact a line."""
        if self.ok:
            return [f"done: {step}" for step in self.done]
        said = [f"failed: {self.failed or 'nothing was begun'}: {self.why}"]
        said += [f"done before: {step}" for step in self.done]
        said += [f"not done: {step}" for step in self.not_done]
        if self.after is None and (self.done or self.failed):
            said.append("unknown: the GPUs could not be read back")
        said += [f"differs: {line}" for line in self.differs]
        if self.back is not None:
            said += [f"way back: {step}" for step in self.back.steps]
            said += [f"way back waits: {blocker}" for blocker in self.back.blockers]
        return said


class MigDriver(Protocol):
    """Reads and cuts the GPUs of the machine it runs on. Calls block: from an event loop, use a thread."""

    def read(self) -> tuple[Gpu, ...]:
        """The state of all GPUs. Raises `MigError`."""
        ...

    def apply(self, plan: Plan, report: Callable[[StepReport], None]) -> Outcome:
        """Carry out a plan that was made on a `read` of this driver. `report` is told each step as it ends.

        Nothing is begun when the GPUs have changed since, or when something that must go is in use. It stops
        at the first failure. Raises nothing: what went wrong stands in the outcome.
        """
        ...


def carry_out(
    plan: Plan,
    *,
    read: Callable[[], tuple[Gpu, ...]],
    do: Callable[[Step], None],
    report: Callable[[StepReport], None],
) -> Outcome:
    """`MigDriver.apply` for a driver whose `do` makes one step, raising `MigError` when it cannot."""
    steps = plan.steps
    try:
        before = read()
    except MigError as error:
        return Outcome(code=error.code, why=str(error), not_done=steps)
    refused = begin_refused(plan, before)
    if refused is not None:
        return refused
    done: list[Step] = []
    for number, step in enumerate(steps):
        try:
            do(step)
        except MigError as error:
            report(StepReport(step=step, code=error.code, why=str(error)))
            return read_back(
                plan, before, read, done=done, failed=step, not_done=steps[number + 1 :], error=error
            )
        done.append(step)
        report(StepReport(step=step))
    return read_back(plan, before, read, done=done)


def begin_refused(plan: Plan, now: Sequence[Gpu]) -> Outcome | None:
    """The outcome of a plan that may not begin on the GPUs as they are; None: it may."""
    try:
        current = make_plan(now, plan.wants)
    except MigRefusalError as error:
        return Outcome(
            code="changed", why=f"the plan is out of date: {error}", not_done=plan.steps, after=tuple(now)
        )
    if current.blockers:
        why = f"{'; '.join(current.blockers)}. End what runs there, then plan again"
        return Outcome(code="in_use", why=why, not_done=plan.steps, after=tuple(now))
    if current.steps != plan.steps:
        why = "the GPUs are not as they were when the plan was made; plan again"
        return Outcome(code="changed", why=why, not_done=plan.steps, after=tuple(now))
    return None


def read_back(
    plan: Plan,
    before: Sequence[Gpu],
    read: Callable[[], tuple[Gpu, ...]],
    *,
    done: Sequence[Step],
    failed: Step | None = None,
    not_done: Sequence[Step] = (),
    error: MigError | None = None,
) -> Outcome:
    """The outcome of a plan that was begun, verified on the GPUs as they are now."""
    code, why = (error.code, str(error)) if error is not None else ("", "")
    try:
        after = read()
    except MigError as unread:
        if error is None:
            code, why = unread.code, f"every step was done, but the GPUs could not be read back: {unread}"
        return Outcome(done=tuple(done), failed=failed, code=code, why=why, not_done=tuple(not_done))
    by_index = {gpu.index: gpu for gpu in after}
    differs = tuple(
        difference(by_index[index], want) or "" if index in by_index else f"GPU {index}: is not there"
        for index, want in plan.wants.items()
    )
    differs = tuple(line for line in differs if line)
    if differs and error is None:
        code, why = "failed", "every step was done, but the GPUs read back otherwise"
    way_back = None
    if code:
        touched = [gpu for gpu in before if gpu.index in plan.wants]
        try:
            way_back = back(touched, after)
        except MigRefusalError as refused:
            why = f"{why} (no way back was found: {refused})"
        if way_back is not None and not way_back.steps:
            way_back = None  # all stands as it did
    return Outcome(
        done=tuple(done),
        failed=failed,
        code=code,
        why=why,
        not_done=tuple(not_done),
        after=after,
        differs=differs,
        back=way_back,
    )
