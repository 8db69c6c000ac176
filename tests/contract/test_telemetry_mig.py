"""The NVML sampler on MIG devices, by the real pynvml over the double of NVML's library (not a real GPU)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridsched.core.mig import Instance, Piece, Want, plan
from hybridsched.mig.nvml import NvmlMig
from hybridsched.telemetry.nvml import RETRY_MS, NvmlSampler
from hybridsched.telemetry.protocol import ActivitySource, MigMode
from tests.nvml_double import Double, double

GIB = 2**30
MIXED = Want(
    enabled=True, pieces=(Piece(profile="3g.40gb"), Piece(profile="1g.10gb"), Piece(profile="1g.10gb"))
)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Double]:
    """An A100 and an H100, both cut the same way."""
    with double(tmp_path / "gpus", "a100-80gb", "h100-80gb") as found:
        cut(found, {0: MIXED, 1: MIXED})
        yield found


def cut(made: Double, wants: dict[int, Want]) -> None:
    mig = NvmlMig(load=lambda: made.nvml)
    assert mig.apply(plan(mig.read(), wants), lambda _: None).ok


def sampler(made: Double, device: int | str, mig_index: int | None = None) -> NvmlSampler:
    return NvmlSampler(device, mig_index=mig_index, load=lambda: made.nvml)


def instance(made: Double, gpu: int, profile: str) -> Instance:
    found = NvmlMig(load=lambda: made.nvml).read()[gpu].instances
    return next(i for i in found if i.profile == profile)


def test_on_ampere_a_mig_device_has_memory_and_processes_and_no_activity(made: Double) -> None:
    large = instance(made, 0, "3g.40gb")
    made.process(0, 4711, gi=large.id, ci=0, memory=3 * GIB, percent=90)
    made.activity(0, 90)
    read = sampler(made, large.compute[0].uuid)
    for now in (0.0, 500.0):
        sample = read.sample(now)
        assert (sample.memory_total_bytes, sample.memory_used_bytes) == (int(39.25 * GIB), 3 * GIB)
        assert [p.pid for p in sample.processes or ()] == [4711]
        assert (sample.mig, sample.activity) == (MigMode.ON, None)
        assert sample.unknown["activity"] == "gpm_not_supported"
    read.close()


def test_on_hopper_each_instance_has_an_activity_of_its_own(made: Double) -> None:
    large, small = instance(made, 1, "3g.40gb"), instance(made, 1, "1g.10gb")
    made.process(1, 4711, gi=large.id, ci=0, memory=GIB, percent=80)
    busy, idle = sampler(made, large.compute[0].uuid), sampler(made, small.compute[0].uuid)
    for read, share, pids in ((busy, 0.8, [4711]), (idle, 0.0, [])):
        assert read.sample(0.0).unknown["activity"] == "gpm_warming_up"
        sample = read.sample(200.0)
        assert sample.activity == pytest.approx(share)
        assert (sample.activity_source, sample.activity_span_ms) == (ActivitySource.GPM, 200.0)
        assert [p.pid for p in sample.processes or ()] == pids
        read.close()


def test_a_mig_device_is_found_by_its_number_too(made: Double) -> None:
    totals = []
    for number in range(3):
        read = sampler(made, 1, number)
        totals.append(read.sample(0.0).memory_total_bytes)
        read.close()
    assert sorted(t or 0 for t in totals) == [int(9.75 * GIB)] * 2 + [int(39.5 * GIB)]
    read = sampler(made, 1, 3)
    assert read.sample(0.0).reason == "device_missing"
    read.close()


def test_a_device_that_is_cut_away_is_missing_and_the_new_one_is_found(made: Double) -> None:
    old = instance(made, 1, "3g.40gb").compute[0].uuid
    read = sampler(made, old)
    assert read.sample(0.0).available
    cut(made, {1: Want(enabled=True, pieces=(Piece(profile="7g.80gb"),))})
    assert read.sample(1.0).reason == "handle_lost"
    assert read.sample(RETRY_MS + 2.0).reason == "device_missing"
    read.close()
    new = sampler(made, instance(made, 1, "7g.80gb").compute[0].uuid)
    assert new.sample(0.0).memory_total_bytes == int(79.25 * GIB)
    new.close()


def test_a_change_of_the_mode_makes_handles_stale_and_they_are_looked_up_again(made: Double) -> None:
    read = sampler(made, 0)
    assert read.sample(0.0).mig is MigMode.ON
    cut(made, {0: Want(enabled=False)})
    made.activity(0, 40)
    assert read.sample(1.0).reason == "handle_lost"
    again = read.sample(RETRY_MS + 2.0)
    assert (again.mig, again.activity, again.activity_source) == (
        MigMode.OFF,
        pytest.approx(0.4),
        ActivitySource.UTILIZATION,
    )
    read.close()
