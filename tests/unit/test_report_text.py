"""The summary at a terminal: it says what was missed, and when the machine itself was to blame."""

from __future__ import annotations

import msgspec

from hybridsched.report.record import RunRecord
from hybridsched.report.summary import summarise
from hybridsched.report.text import text
from tests.unit.report_record import make_record


def shown(record: RunRecord) -> str:
    return text(summarise(record))


def test_the_figures_stand_beside_their_bars() -> None:
    lines = shown(make_record()).splitlines()
    [harvested] = [line for line in lines if "idle engine seconds harvested" in line]
    assert "0.975" in harvested
    assert "≥ 0.95" in harvested
    assert harvested.endswith("reached")
    [tpot] = [line for line in lines if "time per output token" in line]
    assert tpot.endswith("MISSED")


def test_without_a_baseline_the_cost_is_not_measured() -> None:
    lines = shown(make_record(baseline=False)).splitlines()
    [ttft] = [line for line in lines if "against online alone" in line and "first" in line]
    assert ttft.endswith("not measured")
    assert not any(line.strip().startswith("online alone") for line in lines)


def test_a_busy_machine_and_restarts_are_said() -> None:
    record = make_record()
    assert "too busy" in shown(record), "1 of 48 requests was sent late"
    punctual = tuple(msgspec.structs.replace(row, sent_s=row.scheduled_s) for row in record.together.online)
    quiet = msgspec.structs.replace(record.together, online=punctual)
    assert "too busy" not in shown(msgspec.structs.replace(record, together=quiet))
    restarted = msgspec.structs.replace(quiet, restarts={"engine-r0": 2})
    assert "engine-r0 ×2" in shown(msgspec.structs.replace(record, together=restarted))
