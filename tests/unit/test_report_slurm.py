"""What the report says of Slurm: admission, the GPU given back, table and figure."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.report.html import render
from hybridsched.report.job_figure import job_figures
from hybridsched.report.record import Event, JobRun, Reclaim, RunRecord, SlurmRecord
from hybridsched.report.slurm import admissions
from hybridsched.report.summary import summarise
from hybridsched.report.text import text
from tests.unit.report_record import ORIGIN_S, make_record


def run(number: int, *, job: int, node: str, start_s: float | None, **more: object) -> JobRun:
    fields: dict[str, object] = {
        "name": "offline",
        "partition": "offline",
        "submit_s": ORIGIN_S - 3,
        "end_s": ORIGIN_S + 30,
        "state": "CANCELLED",
        **more,
    }
    return msgspec.convert({"id": job, "node": node, "run": number, "start_s": start_s, **fields}, JobRun)


SLURM = SlurmRecord(
    version="22.05.8",
    nodes=2,
    lanes={"r0": "n1", "r1": "n2"},
    look_s=0.1,
    jobs=(
        run(1, job=1, node="n1", start_s=ORIGIN_S - 8, name="replica", partition="online"),
        run(1, job=2, node="n1", start_s=ORIGIN_S + 0.25),
        run(1, job=3, node="n2", start_s=ORIGIN_S + 0.75, end_s=ORIGIN_S + 9, state="REQUEUED"),
        run(2, job=3, node="n2", start_s=None, submit_s=ORIGIN_S + 9),
        run(1, job=4, node="n2", start_s=ORIGIN_S + 9, name="</script><b>", partition="online"),
    ),
    reclaims=(
        Reclaim(online_job=4, offline_job=3, node="n2", submit_s=ORIGIN_S + 8, running_s=ORIGIN_S + 9),
    ),
)


@pytest.fixture
def record() -> RunRecord:
    made = make_record()
    quiet = Event(
        t="quiet",
        lane="r1",
        mono_s=ORIGIN_S + 8.5,
        data={"rung": "iteration", "reason": "stopping", "ended": 8, "kept_tokens": 321},
    )
    act = Event(t="slurm", mono_s=ORIGIN_S, data={"act": "set_fill", "outcome": "ok"})
    failed = Event(t="slurm", mono_s=ORIGIN_S, data={"act": "set_fill", "outcome": "timeout"})
    together = msgspec.structs.replace(made.together, events=(*made.together.events, quiet, act, failed))
    return msgspec.structs.replace(made, together=together, slurm=SLURM)


def test_the_slurm_part_of_the_summary(record: RunRecord) -> None:
    slurm = summarise(record)["slurm"]
    assert slurm["gate_open_to_job_running_ms"] == {"p50": 250.0, "max": 750.0}
    assert [(job["id"], job["run"], job["requeues"]) for job in slurm["jobs"]] == [
        (1, 1, 0),
        (2, 1, 0),
        (3, 1, 1),
        (3, 2, 1),
        (4, 1, 0),
    ]
    assert slurm["jobs"][1]["start_s"] == 0.25
    assert slurm["jobs"][3]["start_s"] is None
    assert (slurm["fill_changes"], slurm["acts_failed"], slurm["requeued_runs"]) == (2, 1, 1)
    assert slurm["reclaims"] == [
        {
            "online_job": 4,
            "offline_job": 3,
            "node": "n2",
            "at_s": 8.0,
            "submit_to_gpu_ms": 1000.0,
            "offline_requeued": True,
            "requests_put_down": 8,
            "tokens_kept": 321,
            "offline_state": "CANCELLED",
        }
    ]


def test_only_the_first_opening_of_a_lane_counts_for_the_admission() -> None:
    gate = {"state": "open"}
    events = [
        Event(t="gate", lane="r0", mono_s=ORIGIN_S, data=gate),
        Event(t="gate", lane="r0", mono_s=ORIGIN_S + 0.2, data=gate),
        Event(t="gate", lane="other", mono_s=ORIGIN_S, data=gate),
        Event(t="gate", lane="r1", mono_s=ORIGIN_S, data={"state": "closed"}),
    ]
    assert admissions(SLURM, events) == [0.25]


def test_people_see_it_and_no_name_becomes_markup(record: RunRecord) -> None:
    summary = summarise(record)
    assert "gate open to job running: p50 250 ms" in text(summary)
    assert "offline job 3 was requeued with 321 tokens of 8 requests kept" in text(summary)
    page = render(summary, record)
    assert "Slurm jobs" in page
    assert "</script><b>" not in page
    (figure,) = job_figures(record)
    bars = figure.data[0]
    assert len(bars["y"]) == len(bars["x"]) == len(bars["base"]) == len(bars["text"])
    assert all(length > 0 for length in bars["x"])


def test_a_run_without_slurm_says_nothing_of_it() -> None:
    record = make_record()
    summary = summarise(record)
    assert "slurm" not in summary
    assert "slurm" not in text(summary)
    assert job_figures(record) == []


def test_the_figure_stands_in_slurms_section_and_has_its_clock(record: RunRecord) -> None:
    """It was in a section of its own, in trace time, beside a table of the same jobs in wall seconds."""
    fast = msgspec.structs.replace(record, speed=4.0)
    (figure,) = job_figures(fast)
    assert 0.25 in figure.data[0]["base"], "job 2 began at 0.25 s of the wall clock"
    page = render(summarise(fast), fast)
    assert page.count("Slurm jobs</h2>") == 1
    assert page.index("Slurm jobs</h2>") < page.index('id="slurm-jobs"')
    assert "Slurm&#x27;s jobs" not in page
