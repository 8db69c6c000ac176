"""A day of the calendar on real Slurm daemons: what a switch costs, against its lower bound.

    python benchmarks/mode_day.py [--json]

Four hosts with fake GPUs and simulated engines, two modes, a day's trace, batches that wait; the calendar's
clock runs three times faster than the wall, so it takes about three minutes. What must hold is asserted by
tests/integration/test_modes_day.py. Prints the timeline, and for each change of a host how long it was out of
service against the sum of its parts: the jobs' way out from their signal, the acts themselves (cutting,
slurmd down and up, verifying), and the engines' way from submission to serving. The rest is what the policy
worker itself takes: looks and decisions. Needs Slurm's daemons; the machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hybridsched import log  # noqa: E402
from hybridsched.store.embedded import EmbeddedValkey  # noqa: E402
from tests.integration.modes_day import DayReport, day_of, invalid  # noqa: E402
from tests.integration.modes_rig import ModesTestbed  # noqa: E402
from tests.slurm import new_state  # noqa: E402


def bound_s(row: dict[str, float]) -> float:
    """The sum of the parts of one change."""
    return row.get("leave", 0.0) + row["acts"] + row.get("load", 0.0)


def text(report: DayReport) -> str:
    lines = [*report.timeline(), ""]
    lines.append(f"{'change':<26}{'away s':>8}{'leave':>8}{'acts':>8}{'load':>8}{'ratio':>8}")
    for name, row in sorted(report.parts.items()):
        parts = "".join(f"{row.get(key, 0.0):8.2f}" for key in ("away", "leave", "acts", "load"))
        lines.append(f"{name:<26}{parts}{row['away'] / bound_s(row):8.2f}")
    away = sum(row["away"] for row in report.parts.values())
    least = sum(bound_s(row) for row in report.parts.values())
    lines += [
        "",
        f"capacity lost / lower bound   {away:.1f} s / {least:.1f} s = {away / least:.2f}",
        f"replicas serving, least       {report.least()} (floor {report.floor})",
        f"node states seen              {', '.join(sorted(report.nodes))}",
        f"nodes invalid                 {len(invalid(report.nodes))}",
        f"online requests               {report.online}",
        f"batches                       {report.batches}, lines {report.answers}",
        f"the day began                 {report.day_s:.1f} s",
        f"all hosts served by day       {report.day_served_s or 0:.1f} s",
        f"lateness said ahead           {report.late_said_s}",
    ]
    return "\n".join(lines)


async def measure() -> DayReport:
    testbed = ModesTestbed(new_state())
    try:
        testbed.begin()
        testbed.by_day()
        with tempfile.TemporaryDirectory() as folder:
            valkey = EmbeddedValkey(Path(folder) / "valkey")
            try:
                valkey.start()
                async with day_of(testbed, valkey.url, Path(folder)) as day:
                    return await day.run()
            finally:
                valkey.stop()
    finally:
        testbed.down()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    given = parser.parse_args()
    log.configure(level="error")
    report = asyncio.run(measure())
    print(json.dumps(msgspec.to_builtins(report)) if given.json else text(report))


if __name__ == "__main__":
    main()
