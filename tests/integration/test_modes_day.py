"""A day of the calendar in three minutes; what it must show is independent of how fast the machine is."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.integration.modes_day import HOSTS, LINES, day_of, invalid
from tests.integration.modes_rig import ModesTestbed, day_slurm, modes_slurm

__all__ = ["day_slurm", "modes_slurm"]


@pytest.mark.timeout(420)
async def test_a_day_of_the_calendar(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with day_of(day_slurm, valkey_url, tmp_path) as day:
        report = await day.run()
    story = "\n".join(report.timeline())
    assert report.least() >= report.floor, story
    assert not invalid(report.nodes), report.nodes
    assert set(report.online) == {"ok"}, report.online
    # No batch is lost: complete, or back in the queue for the next night.
    for job, state in report.batches.items():
        assert state in ("COMPLETED", "PENDING", "RUNNING"), (job, state, day.pool.slurm.output(job)[-2000:])
        assert (state == "COMPLETED") is (report.answers[job] == LINES)
    assert "COMPLETED" in report.batches.values(), story
    # Every host was in the night, and is back.
    nights = {name for name in report.parts if name.endswith("day to night")}
    assert len(nights) == HOSTS, story
    assert report.day_served_s is not None, story
    # Each host by the same steps, both ways, and never more away than may be.
    way = ["draining", "empty", "cutting", "configuring", "verifying", "warming", "serving"]
    steps = [(e["host"], e["step"]) for e in report.events if e["t"] == "mode"]
    for i in range(1, HOSTS + 1):
        assert [step for name, step in steps if name == f"n{i}"] == ["serving", *way, *way], story
    away = 0
    for _, step in steps[HOSTS:]:
        away += (step == "draining") - (step == "serving")
        assert away <= 2, story
    assert set(report.cut.values()) == {""}, report.cut
    # In time, or it was said before that it would not be.
    late = report.day_served_s > report.day_s
    assert not late or report.late_said_s is not None, story
