"""The summary at a terminal: it says what was missed, and when the machine itself was to blame."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.report.html import against, fidelity, headline
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


def test_the_headline_of_a_run_without_idle_seconds_or_without_online_requests() -> None:
    summary = summarise(make_record(baseline=False))
    summary["harvest"] |= {"harvested_ratio": None, "harvested_s": 0.0, "idle_s": 0.0}
    summary["online"]["ttft_ms"]["p99"] = None
    said = headline(summary)
    assert said.startswith("No engine second was idle: ")
    assert said.endswith("No online request had a first token.")
    summary["harvest"] |= {"harvested_ratio": 0.5, "harvested_s": 0.2, "idle_s": 0.4}
    assert headline(summary).startswith("50.0% of the idle engine seconds (0.2 of 0.4 s) ran")


@pytest.mark.parametrize(
    ("value", "bar", "at_least", "seen"),
    [
        (0.94997, 0.95, True, "0.94997"),
        (0.95, 0.95, True, "0.950"),
        (0.9755, 0.95, True, "0.976"),
        (1.0500004, 1.05, False, "1.0500004"),
        (1.0499, 1.05, False, "1.050"),
    ],
)
def test_a_figure_near_its_bar_has_digits_enough_for_the_verdict(
    value: float, bar: float, at_least: bool, seen: str
) -> None:
    reached = value >= bar if at_least else value <= bar
    assert against(value, {"bar": bar, "at_least": at_least, "reached": reached}, 3) == seen


def test_a_busy_machine_is_said_on_the_page_too_with_the_figure() -> None:
    summary = summarise(make_record())
    assert "engines' processes were p99" in fidelity(summary)
    summary["lateness"]["engine_clock_ms"]["p99"] = 83.4
    said = fidelity(summary)
    assert "too busy for speed" in said
    assert "83.4 ms behind" in said
    assert "lower --speed" in said
    assert "bars that were missed" in said
