"""Cutting through the mig-parted command. Here a stand-in of a few lines answers to its options, over the
double.

It shows what our driver asks, and how it takes the answers; it does not show what mig-parted does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridsched.core.mig import Piece, Want, difference, parse_layouts, plan
from hybridsched.mig.nvml import NvmlMig
from hybridsched.mig.parted import LABEL, PartedMig
from hybridsched.mig.protocol import StepReport
from tests.nvml_double import Double, double

STAND_IN = """
import json, os, sys, time
from hybridsched.core.mig import Piece, Want, parse_layouts, plan, wants
from hybridsched.mig.nvml import NvmlMig
text = sys.stdin.read()
with open(sys.argv[1], "a") as log:
    log.write(json.dumps({"argv": sys.argv[3:], "document": json.loads(text)}) + "\\n")
if sys.argv[2] == "refuse":
    sys.exit("time=now level=fatal msg=Error applying MIG configuration")
if sys.argv[2] == "hang":
    time.sleep(600)
mig = NvmlMig()
layout = parse_layouts(json.loads(text))[sys.argv[-1]]
empty = {i: Want(enabled=w.enabled) for i, w in wants(layout, mig.read()).items()}
for target in (empty, wants(layout, mig.read())):  # the whole GPU anew, wherever the driver likes
    if not mig.apply(plan(mig.read(), target), lambda r: None).ok:
        sys.exit(1)
    if sys.argv[2] == "half":
        sys.exit("time=now level=fatal msg=half way")
"""


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Double]:
    with double(tmp_path / "gpus", "a100-80gb", "h100-80gb") as made:
        yield made


class Parted:
    def __init__(self, made: Double, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("LD_LIBRARY_PATH",):
            monkeypatch.setenv(name, made.environment[name])
        self.program = folder / "parted.py"
        self.program.write_text(STAND_IN)
        self.log = folder / "log"
        self.made = made

    def driver(self, way: str = "obey", timeout_s: float = 60.0) -> PartedMig:
        command = [sys.executable, str(self.program), str(self.log), way]
        return PartedMig(NvmlMig(load=lambda: self.made.nvml), command=command, timeout_s=timeout_s)

    def asked(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def parted(gpus: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parted:
    return Parted(gpus, tmp_path, monkeypatch)


MIXED = Want(enabled=True, pieces=(Piece(profile="3g.40gb"), Piece(profile="1g.10gb")))
OFF = Want(enabled=False)


def test_it_is_given_what_must_change_and_told_not_to_reset(parted: Parted) -> None:
    mig = parted.driver()
    made = plan(mig.read(), {0: MIXED, 1: OFF})
    reports: list[StepReport] = []
    outcome = mig.apply(made, reports.append)
    assert outcome.ok, outcome.lines()
    assert tuple(r.step for r in reports) == outcome.done == made.steps
    assert difference(mig.read()[0], MIXED) is None
    (asked,) = parted.asked()
    assert asked["argv"] == ["apply", "--skip-reset", "--config-file", "-", "--selected-config", LABEL]
    assert list(parse_layouts(asked["document"])) == [LABEL]
    entry = {"devices": [0], "mig-enabled": True, "mig-devices": {"3g.40gb": 1, "1g.10gb": 1}}
    assert asked["document"] == {"version": "v1", "mig-configs": {LABEL: [entry]}}


def test_nothing_to_change_asks_nothing(parted: Parted) -> None:
    mig = parted.driver()
    assert mig.apply(plan(mig.read(), {0: OFF, 1: OFF}), lambda _: None).ok
    assert parted.asked() == []


def test_work_on_an_instance_that_could_have_stayed_is_in_its_way(parted: Parted) -> None:
    mig = parted.driver()
    assert mig.apply(plan(mig.read(), {0: MIXED}), lambda _: None).ok
    large = next(i for i in mig.read()[0].instances if i.profile == "3g.40gb")
    parted.made.process(0, 4711, gi=large.id, ci=0)
    made = plan(mig.read(), {0: Want(enabled=True, pieces=(Piece(profile="3g.40gb"),))})
    assert made.blockers == ()
    outcome = mig.apply(made, lambda _: None)
    assert (outcome.code, outcome.done) == ("in_use", ())
    assert "mig-parted may cut the whole GPU anew" in outcome.why
    assert len(parted.asked()) == 1


@pytest.mark.parametrize(
    ("way", "code", "said", "stands"),
    [
        ("refuse", "parted_failed", "Error applying MIG configuration", "MIG mode is off, wanted on"),
        ("half", "parted_failed", "half way", "has nothing, wanted 1 x 3g.40gb, 1 x 1g.10gb"),
    ],
)
def test_its_failure_is_said_with_what_stands_now(
    parted: Parted, way: str, code: str, said: str, stands: str
) -> None:
    mig = parted.driver(way)
    reports: list[StepReport] = []
    outcome = mig.apply(plan(mig.read(), {0: MIXED}), reports.append)
    assert (outcome.code, outcome.done) == (code, ())
    assert said in outcome.why
    assert outcome.differs == (f"GPU 0: {stands}",)
    assert [r.code for r in reports] == [code]
    assert (outcome.back is not None) == (way == "half")


def test_one_that_hangs_is_stopped(parted: Parted) -> None:
    mig = parted.driver("hang", timeout_s=3.0)
    outcome = mig.apply(plan(mig.read(), {0: MIXED}), lambda _: None)
    assert outcome.code == "parted_failed"
    assert "did not end within 3 s" in outcome.why
    assert outcome.after is not None


def test_one_that_is_not_there_is_said(parted: Parted) -> None:
    mig = PartedMig(NvmlMig(load=lambda: parted.made.nvml), command=["/no/such/nvidia-mig-parted"])
    outcome = mig.apply(plan(mig.read(), {0: MIXED}), lambda _: None)
    assert outcome.code == "parted_missing"
