"""An engine's use by its requests: the same report as from iterations, less what only those show."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from hybridsched.engines.request_log import RequestLog, RequestRow, read_requests, tokens_of
from hybridsched.report import harvest
from hybridsched.report.html import render
from hybridsched.report.record import Event, Interrupted, PassRecord
from hybridsched.report.request_spans import engine_log
from hybridsched.report.summary import summarise
from hybridsched.report.text import text
from tests.unit.report_record import make_record


def row(s: float, e: float, *, offline: bool = True, **more: object) -> RequestRow:
    return RequestRow(s=s, e=e, offline=offline, id="x", **more)  # type: ignore[arg-type]


ROWS = [
    row(0.0, 4.0, prompt=100, cached=64, output=10),
    row(1.0, 4.0, prompt=50, output=3, end="abort"),
    row(4.5, 6.0, offline=False, prompt=20, output=5),
    row(5.0, 5.5, offline=False, prompt=20, output=1),
    row(7.0, 8.0, prompt=10, output=9),
]


def test_stretches_hold_what_the_engine_held_and_all_tokens() -> None:
    log = engine_log(ROWS, "r0", torn=2)
    found = [(it.s, it.e, it.on, it.off) for it in log.iterations]
    assert found == [
        (0.0, 1.0, 0, 1),
        (1.0, 4.0, 0, 2),
        (4.5, 5.0, 1, 0),
        (5.0, 5.5, 2, 0),
        (5.5, 6.0, 1, 0),
        (7.0, 8.0, 0, 1),
    ]
    assert harvest.offline_tokens(log) == (36 + 50 + 10, 10 + 3 + 9)
    assert sum(it.gon for it in log.iterations) == 6
    assert log.torn_lines == 2


def test_a_pause_lasts_until_the_last_answer_was_back() -> None:
    events = (
        Event(t="signal", mono_s=3.9, lane="r0"),
        Event(t="resume", mono_s=6.5, lane="r0"),
    )
    run = PassRecord(
        start_s=0.0, end_s=10.0, engines=(engine_log(ROWS, "r0"),), events=events, by_requests=True
    )
    (pause,) = harvest.pauses(run)
    assert (pause.found_work, round(pause.quiet_s, 6), pause.iteration_s) == (True, 0.1, 0.0)
    use = harvest.engine_use(run.engines[0], run, 8.0)
    assert use.online_s == pytest.approx(1.5 + 0.6), "from the signal on it is online's"
    assert use.harvested_s == pytest.approx(3.9 + 1.0)


def test_the_report_has_no_value_for_what_only_iterations_show() -> None:
    record = make_record()
    record = msgspec.structs.replace(
        record,
        together=msgspec.structs.replace(record.together, by_requests=True),
        engine="vLLM 0.1",
        engines_start_s=12.5,
        interrupted=Interrupted(lines=9, compared=8, identical=7, different=("line-3",)),
    )
    summary = summarise(record)
    assert summary["pauses"]["signal_path_ms"] == {"p50": None, "p99": None, "max": None}
    assert summary["pauses"]["signal_to_quiet_ms"]["p50"] is not None
    assert summary["iterations"]["with_offline_ms"]["p50"] is None
    assert summary["lateness"]["engine_clock_ms"]["p99"] is None
    assert summary["bars"]["interrupted_differ"] == {
        "value": 1.0,
        "bar": 0.0,
        "at_least": False,
        "reached": False,
    }
    assert summary["run"]["engine"] == "vLLM 0.1"
    said = text(summary)
    assert "7 of 8 wrote the same; DIFFERENT: line-3" in said
    assert "vLLM 0.1" in said
    assert "vLLM 0.1" in render(summary, record)


def test_a_log_survives_a_kill_and_refuses_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "r0.jsonl"
    log = RequestLog(path)
    for one in ROWS:
        log.add(one)
    log.close()
    with path.open("ab") as file:
        file.write(b'{"s":1,"e"')
    assert read_requests(path) == (ROWS, 1)
    assert read_requests(tmp_path / "none") == ([], 0)
    path.write_text(json.dumps({"s": 1}))
    with pytest.raises(msgspec.ValidationError):
        read_requests(path)


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": -1}, {"prompt_tokens_details": 3}])
def test_usage_that_says_nothing_counts_nothing(usage: object) -> None:
    assert tokens_of(usage) == {"prompt": 0, "cached": 0, "output": 0}
