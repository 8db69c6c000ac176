"""One contract for what cuts GPUs: the shipped fake, and NVML by the real pynvml over the test double.

The double is no driver (see tests/native): it shows that our calls are NVML's and that its
documented answers are handled, not that a GPU behaves so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hybridsched.core.mig import MODELS, Act, Gpu, Piece, Plan, Want, difference, plan
from hybridsched.mig.fake import FakeMig, fake_gpu
from hybridsched.mig.nvml import NvmlMig
from hybridsched.mig.protocol import MigDriver, MigError, Outcome, StepReport
from tests.nvml_double import Double, double

GPUS = ("a100-80gb", "h100-80gb", "none")
IN_USE, NO_PERMISSION, RESET_REQUIRED, LOST, UNKNOWN = 19, 4, 16, 15, 999


class FakeRig:
    """Drives the fake by the contract's words."""

    def __init__(self) -> None:
        self.fake = FakeMig([fake_gpu(i, model) for i, model in enumerate(GPUS)])
        self.driver: MigDriver = self.fake

    def process(self, gpu: int, pid: int, start: int | None = None) -> None:
        old = self.fake.gpus[gpu]
        if start is None:
            self.fake.gpus[gpu] = msgspec.structs.replace(old, pids=(pid,))
            return
        instances = tuple(
            msgspec.structs.replace(i, compute=(msgspec.structs.replace(i.compute[0], pids=(pid,)),))
            if i.start == start
            else i
            for i in old.instances
        )
        self.fake.gpus[gpu] = msgspec.structs.replace(old, pids=(pid,), instances=instances)

    def fail_at(self, step: int) -> None:
        self.fake.fail_at(step)

    def not_root(self) -> None:
        self.fake.root = False

    def needs_reset(self, gpu: int) -> None:
        self.fake.needs_reset = True

    def unreadable(self) -> None:
        self.fake.unreadable = "lost"

    def reboot(self, gpu: int) -> None:
        old = self.fake.gpus[gpu]
        on = old.enabled and old.resets
        self.fake.gpus[gpu] = msgspec.structs.replace(old, instances=(), pids=(), enabled=on, pending=on)


class DoubleRig:
    """Drives NvmlMig over the real pynvml over the double."""

    def __init__(self, made: Double) -> None:
        self.double = made
        self.driver: MigDriver = NvmlMig(load=lambda: made.nvml)

    def process(self, gpu: int, pid: int, start: int | None = None) -> None:
        if start is None:
            self.double.process(gpu, pid)
            return
        (instance,) = [i for i in self.driver.read()[gpu].instances if i.start == start]
        self.double.process(gpu, pid, gi=instance.id, ci=instance.compute[0].id)

    def fail_at(self, step: int) -> None:
        self.double.fail_change(step, UNKNOWN)

    def not_root(self) -> None:
        self.double.root(False)

    def needs_reset(self, gpu: int) -> None:
        self.double.needs_reset(gpu)

    def unreadable(self) -> None:
        self.double.lost(0)

    def reboot(self, gpu: int) -> None:
        self.double.reboot(gpu)


Rig = FakeRig | DoubleRig


@pytest.fixture(params=["fake", "pynvml-on-the-double"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    if request.param == "fake":
        yield FakeRig()
        return
    with double(tmp_path / "gpus", *GPUS) as made:
        yield DoubleRig(made)
        assert made.inits() == 0, "NVML is left after every call"


def cut(*names: str) -> Want:
    return Want(enabled=True, pieces=tuple(Piece(profile=name) for name in names))


OFF = Want(enabled=False)
SEVEN = cut(*["1g.10gb"] * 7)
MIXED = cut("3g.40gb", *["1g.10gb"] * 4)


def go(rig: Rig, wants: dict[int, Want]) -> tuple[Plan, Outcome, list[StepReport]]:
    made = plan(rig.driver.read(), wants)
    reports: list[StepReport] = []
    return made, rig.driver.apply(made, reports.append), reports


def must(rig: Rig, wants: dict[int, Want]) -> tuple[Gpu, ...]:
    _, outcome, _ = go(rig, wants)
    assert outcome.ok, outcome.lines()
    return rig.driver.read()


def test_fresh_gpus_are_read_with_their_profiles(rig: Rig) -> None:
    ampere, hopper, without = rig.driver.read()
    assert (ampere.index, ampere.enabled, ampere.pending, ampere.instances) == (0, False, False, ())
    assert (ampere.resets, hopper.resets) == (True, False)
    assert (ampere.supported, without.supported) == (True, False)
    assert ampere.profiles == MODELS["a100-80gb"]
    assert hopper.profiles == MODELS["h100-80gb"]
    assert (ampere.pci_id, hopper.pci_id) == (0x20B210DE, 0x233010DE)
    assert len({gpu.uuid for gpu in (ampere, hopper, without)}) == 3


def test_a_layout_is_cut_step_by_step_and_read_back(rig: Rig) -> None:
    made, outcome, reports = go(rig, {0: SEVEN, 1: MIXED, 2: OFF})
    assert outcome.ok, outcome.lines()
    assert [r.step for r in reports] == list(made.steps) == list(outcome.done)
    assert not any(r.code for r in reports)
    assert [s.act for s in made.steps if s.gpu == 0] == [Act.MODE_ON, *[Act.CREATE, Act.CREATE_COMPUTE] * 7]
    assert [s.profile for s in made.steps if s.gpu == 1 and s.act is Act.CREATE] == [
        "3g.40gb",
        *["1g.10gb"] * 4,
    ]
    gpus = rig.driver.read()
    assert outcome.after == gpus
    assert [difference(gpus[0], SEVEN), difference(gpus[1], MIXED)] == [None, None]
    uuids = [c.uuid for gpu in gpus for i in gpu.instances for c in i.compute]
    assert len(set(uuids)) == 12
    assert all(uuid.startswith("MIG-") for uuid in uuids)


def test_what_stays_keeps_its_instance_and_uuid(rig: Rig) -> None:
    before = {i.start: i for i in must(rig, {0: MIXED})[0].instances}
    rig.process(0, 4711, start=4)
    made, outcome, _ = go(rig, {0: cut("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb")})
    assert outcome.ok, outcome.lines()
    after = {i.start: i for i in rig.driver.read()[0].instances}
    kept = [p.start for p in made.gpus[0].stays]
    assert len(kept) == 3
    assert 4 in kept
    for start in kept:
        assert start is not None
        assert after[start].compute[0].uuid == before[start].compute[0].uuid
    assert after[4].pids == (4711,)


def test_nothing_to_do_is_done_at_once(rig: Rig) -> None:
    must(rig, {0: SEVEN})
    made, outcome, reports = go(rig, {0: SEVEN, 1: OFF, 2: OFF})
    assert (made.steps, outcome.ok, reports) == ((), True, [])


def test_whole_again_and_off_again(rig: Rig) -> None:
    must(rig, {0: SEVEN, 1: SEVEN})
    gpus = must(rig, {0: OFF, 1: cut("7g.80gb")})
    assert (gpus[0].enabled, gpus[0].instances) == (False, ())
    assert [i.profile for i in gpus[1].instances] == ["7g.80gb"]


def test_an_instance_in_use_that_must_go_stops_everything_before_the_first_step(rig: Rig) -> None:
    before = must(rig, {0: SEVEN})
    rig.process(0, 4711, start=3)
    made, outcome, reports = go(rig, {0: cut("7g.80gb")})
    assert made.blockers == ("GPU 0: 1g.10gb at 3 is in use by process 4711",)
    assert (outcome.code, outcome.done, outcome.not_done, reports) == ("in_use", (), made.steps, [])
    assert "1g.10gb at 3 is in use by process 4711" in outcome.why
    assert [i.id for i in rig.driver.read()[0].instances] == [i.id for i in before[0].instances]


def test_a_busy_gpu_does_not_change_its_mode(rig: Rig) -> None:
    rig.process(1, 4711)
    made, outcome, _ = go(rig, {1: SEVEN})
    assert made.blockers == ("GPU 1 is in use by process 4711",)
    assert (outcome.code, outcome.done) == ("in_use", ())
    assert rig.driver.read()[1].pending is False


def test_a_process_that_comes_between_plan_and_cut_is_found(rig: Rig) -> None:
    must(rig, {0: SEVEN})
    made = plan(rig.driver.read(), {0: cut("7g.80gb")})
    rig.process(0, 4711, start=0)
    outcome = rig.driver.apply(made, lambda _: None)
    assert (outcome.code, outcome.done) == ("in_use", ())


def test_a_plan_that_is_out_of_date_is_not_begun(rig: Rig) -> None:
    made = plan(rig.driver.read(), {0: SEVEN})
    before = must(rig, {0: MIXED})
    outcome = rig.driver.apply(made, lambda _: None)
    assert (outcome.code, outcome.done, rig.driver.read()) == ("changed", (), before)


def test_without_root_nothing_is_changed_and_it_says_so(rig: Rig) -> None:
    before = rig.driver.read()
    rig.not_root()
    made, outcome, reports = go(rig, {0: SEVEN})
    assert (outcome.code, outcome.done, outcome.failed) == ("no_permission", (), made.steps[0])
    assert "root" in outcome.why
    assert [r.code for r in reports] == ["no_permission"]
    assert outcome.back is None, "nothing was changed"
    assert rig.driver.read() == before


def test_without_root_a_cut_gpu_is_not_listed_and_never_taken_for_empty(rig: Rig) -> None:
    must(rig, {0: SEVEN})
    made = plan(rig.driver.read(), {0: OFF})
    rig.not_root()
    with pytest.raises(MigError) as caught:
        rig.driver.read()
    assert caught.value.code == "no_permission"
    assert "run this as root on the node" in str(caught.value)
    outcome = rig.driver.apply(made, lambda _: None)
    assert (outcome.code, outcome.done, outcome.not_done) == ("no_permission", (), made.steps)


def test_a_mode_that_waits_for_a_reset_is_said_and_can_be_taken_back(rig: Rig) -> None:
    rig.needs_reset(0)
    _, outcome, _ = go(rig, {0: SEVEN})
    assert (outcome.code, outcome.done) == ("reset_required", ())
    assert "reset" in outcome.why
    assert outcome.differs == ("GPU 0: MIG mode is off, wanted on (a change is pending)",)
    assert rig.driver.read()[0].pending is True
    assert outcome.back is not None
    assert [s.act for s in outcome.back.steps] == [Act.MODE_OFF]
    assert rig.driver.apply(outcome.back, lambda _: None).ok
    assert rig.driver.read()[0].pending is False


@pytest.mark.parametrize("way", ["cut", "whole"])
def test_an_error_at_each_change_in_turn_is_reported_exactly_and_leads_back(rig: Rig, way: str) -> None:
    start, wanted = (OFF, MIXED) if way == "cut" else (SEVEN, OFF)
    must(rig, {1: start})
    steps = len(plan(rig.driver.read(), {1: wanted}).steps)
    assert steps >= 11
    for number in range(steps):
        before = rig.driver.read()
        rig.fail_at(number)
        made, outcome, reports = go(rig, {1: wanted})
        assert (*outcome.done, outcome.failed, *outcome.not_done) == made.steps
        assert len(outcome.done) == number
        assert [bool(r.code) for r in reports] == [*[False] * number, True]
        now = rig.driver.read()
        assert outcome.after == now
        said = difference(now[1], wanted)
        assert outcome.differs == (said,)
        assert said is not None
        assert any(line == f"differs: {said}" for line in outcome.lines())
        if number == 0:
            assert outcome.back is None
            assert now == before
        else:
            assert outcome.back is not None
            assert rig.driver.apply(outcome.back, lambda _: None).ok
        assert difference(rig.driver.read()[1], start) is None, number
    assert must(rig, {1: wanted})[1].enabled is wanted.enabled


def test_gpus_that_can_not_be_read_back_are_said_to_be_unknown(rig: Rig) -> None:
    made = plan(rig.driver.read(), {0: SEVEN})

    def lose(report: StepReport) -> None:
        if report.step == made.steps[2]:
            rig.unreadable()
            rig.fail_at(0)

    outcome = rig.driver.apply(made, lose)
    assert outcome.done == made.steps[:3]
    assert outcome.after is None
    assert outcome.back is None
    assert "unknown: the GPUs could not be read back" in outcome.lines()


def test_a_reboot_takes_the_instances_and_on_hopper_the_mode(rig: Rig) -> None:
    must(rig, {0: SEVEN, 1: SEVEN})
    for gpu in (0, 1):
        rig.reboot(gpu)
    gpus = rig.driver.read()
    assert [gpu.enabled for gpu in gpus] == [True, False, False]
    assert [gpu.instances for gpu in gpus] == [(), (), ()]
    assert must(rig, {0: SEVEN, 1: SEVEN})[1].enabled
