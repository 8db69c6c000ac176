"""The command: its report, its tables, what wrong usage says, and that it says the same twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli
from hybridsched.core.codec import decode_record, replay

SHORT = ("--duration", "20", "--gpus", "2", "--lines", "200")
FIXED = {
    "online": {"requests", "ok", "expired", "failed", "ttft_ms", "tpot_ms", "slo_attainment"},
    "offline": {"lines", "completed", "failed", "remaining", "duplicates", "missing", "output_tokens"},
    "harvest": {"engine_seconds", "online_busy_s", "idle_s", "harvested_s", "harvested_ratio"},
    "pauses": {"count", "signal_to_quiet_ms", "by_rung"},
    "policy": {"name", "version", "cycles", "cycle_ms"},
}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", *arguments])


def test_the_report_has_the_fixed_fields_and_opens(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    done = invoke(*SHORT, "--report", str(folder), "--decisions")
    assert done.exit_code == 0, done.output
    summary = json.loads((folder / "summary.json").read_bytes())
    assert summary["schema"] == 1
    for part, names in FIXED.items():
        assert names <= set(summary[part]), part
    assert summary["online_only"]["requests"] == summary["online"]["requests"] > 0
    assert summary["offline"]["missing"] == summary["offline"]["duplicates"] == 0
    assert summary["offline"]["completed"] > 0
    assert 0 < summary["harvest"]["harvested_ratio"] <= 1
    assert 0 < summary["ceiling"]["share"] < 1
    assert summary["run"]["simulated"] is True
    page = (folder / "report.html").read_text()
    assert "hybridsched simulate" in page
    assert "r1 gate" in page
    assert (folder / "requests.csv").read_text().count("\n") == 1 + 2 * summary["online"]["requests"]
    records = [decode_record(line) for line in (folder / "decisions.jsonl").read_bytes().splitlines()]
    assert records
    assert [difference for record in records for difference in replay(record)] == []


def test_the_same_command_gives_the_same_summary(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        folder = tmp_path / name
        assert invoke(*SHORT, "--load", "1.7", "--seed", "3", "--report", str(folder)).exit_code == 0
        text = (folder / "summary.json").read_text()
        wall = json.loads(text)["wall_s"]
        found.append(text.replace(f'"wall_s": {wall}', ""))
    assert found[0] == found[1]
    other = invoke(*SHORT, "--load", "1.7", "--seed", "4", "--json")
    assert json.loads(other.output)["online"] != json.loads(text)["online"]


def test_several_policies_in_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    asked = (*SHORT, "--compare", "idle-window, unprotected")
    table = invoke(*asked, "--report", str(folder))
    assert table.exit_code == 0, table.output
    lines = table.output.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["policy", "idle-window", "unprotected"]
    assert (folder / "idle-window" / "summary.json").exists()
    assert (folder / "unprotected" / "report.html").exists()
    page = (folder / "report.html").read_text()
    assert "policies compared" in page
    assert 'href="unprotected/report.html"' in page
    rows = json.loads(invoke(*asked, "--json").output)
    assert [row["policy"] for row in rows] == ["idle-window", "unprotected"]
    assert json.loads((folder / "compare.json").read_bytes()) == rows
    assert rows[1]["ttft_p99_ratio"] > rows[0]["ttft_p99_ratio"], "without protection online waits"


def test_repeated_runs_say_how_far_figures_lie_apart(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    done = invoke(*SHORT, "--repeat", "3", "--report", str(folder))
    assert done.exit_code == 0, done.output
    assert "3 runs" in done.output
    summary = json.loads((folder / "summary.json").read_bytes())
    repeats = summary["repeats"]
    assert repeats["runs"] == 3
    for name, one in repeats.items():
        if name != "runs" and one is not None:
            assert one["min"] <= one["median"] <= one["max"], name
    assert repeats["ttft_p99_ms"]["min"] < repeats["ttft_p99_ms"]["max"], "the arrivals were moved"
    assert repeats["ttft_p99_ms"]["min"] <= summary["online"]["ttft_ms"]["p99"]
    once = json.loads(invoke(*SHORT, "--json").output)
    assert once["online"] == summary["online"], "the first run is the one without repeats"
    rows = json.loads(invoke(*SHORT, "--repeat", "3", "--compare", "idle-window", "--json").output)
    assert rows[0]["ttft_p99_ratio"] == repeats["ttft_p99_ratio"]["median"]


def test_a_batch_of_ones_own_ends_and_is_counted(tmp_path: Path) -> None:
    batch = tmp_path / "work.jsonl"
    body = {"model": "m", "prompt": list(range(100, 300)), "max_tokens": 20, "ignore_eos": True}
    lines = [
        {"custom_id": f"l{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(40)
    ]
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = invoke("--duration", "20", "--gpus", "2", "--batch", str(batch), "--no-baseline", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.output)
    assert summary["online_only"] is None
    assert summary["offline"]["lines"] == summary["offline"]["completed"] == 40
    assert summary["offline"]["output_tokens"] == 40 * 20
    assert summary["harvest"]["work_remained_s"] < 20, "idle time counts only while there was work"


def test_waves_are_a_load_that_needs_no_file() -> None:
    asked = ("--waves", "8,1,10", "--duration", "20", "--gpus", "1", "--lines", "100", "--json")
    done = invoke(*asked)
    assert done.exit_code == 0, done.output
    summary = json.loads(done.output)
    assert summary["run"]["trace"] == "waves of 8 and 1 requests/s, 10 s each"
    assert 50 < summary["online"]["requests"] < 130
    assert json.loads(invoke(*asked, "--seed", "1").output)["online"] != summary["online"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace", "/nowhere.csv"), "does not exist"),
        (("--policy", "idel-window"), "idel-window"),
        (("--profile", "tpu"), "'tpu' is unknown"),
        (("--duration", "0"), "above 0"),
        (("--load", "nan"), "above 0"),
        (("--load", "0.000001"), "leaves no request"),
        (("--compare", " , "), "names no policy"),
        (("--compare", "idle-window,idle-window"), "two of the policies"),
        (("--decisions",), "goes with --report"),
        (("--waves", "15,1"), "have 2 numbers"),
        (("--waves", "15,x,90"), "such as 15,1,90"),
        (("--waves", "1,15,90"), "low_rps is 15"),
        (("--waves", "15,1,0"), "wave_s is 0"),
        (("--waves", "15,1,90,0,128"), "prompt_tokens is 0"),
        (("--waves", "15,1,90", "--start", "4"), "without --trace and --start"),
        (("--start", "1e9"), "no request of the trace"),
        (("--lines", "6000000"), "at most"),
        (("--policy", "static-split:9"), "more engines serve online than there are (4)"),
        (("--away", "r0@0-4", "--policy", "unprotected"), "closes no gate"),
        (("--away", "r0@0-4", "--compare", "idle-window,engine-priority"), "engine-priority closes no gate"),
        (("--load", "1e9"), "online requests were asked for"),
        (("--waves", "1e9,1,90"), "online requests were asked for"),
        (("--waves", "1,1,9,500000,9"), "has 500,009 tokens"),
        (("--compare", "idle-window", "--policy", "headroom"), "give either"),
        (("--batch", "/nowhere.jsonl"), "cannot be read"),
    ],
)
def test_wrong_usage_says_what_is_allowed(arguments: tuple[str, ...], said: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


def test_lines_that_are_left_out_are_said(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    body = {"model": "m", "prompt": "a", "max_tokens": 2}
    path.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n{cut"
    )
    done = invoke("--batch", str(path), "--duration", "5", "--gpus", "1", "--no-baseline", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["offline"]["lines"] == 1
    assert "note: 1 of 2 lines of batch" in done.stderr


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    done = invoke(*SHORT, "--report", str(tmp_path))
    assert done.exit_code == 2
    assert "not empty" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]
