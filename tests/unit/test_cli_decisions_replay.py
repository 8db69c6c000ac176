"""`hybridsched decisions replay` on logs that are cut off, empty or something else."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli

SHORT = ("--duration", "5", "--gpus", "2", "--lines", "50", "--no-baseline", "--policy", "consolidate")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The records of a short run in the twin, one a line."""
    folder = tmp_path_factory.mktemp("run") / "report"
    done = CliRunner().invoke(cli, ["simulate", *SHORT, "--decisions", "--report", str(folder)])
    assert done.exit_code == 0, done.output
    return (folder / "decisions.jsonl").read_text().splitlines()


def replay(lines: list[str], *options: str) -> Result:
    return CliRunner().invoke(cli, ["decisions", "replay", "-", *options], input="\n".join(lines))


def test_a_log_that_is_cut_off_is_replayed_up_to_there(log: list[str]) -> None:
    forged = json.loads(log[1])
    forged["decisions"][0]["reason"] = "unprotected"
    done = replay([log[0], json.dumps(forged), log[2], log[3][:200]])
    assert done.exit_code == 1
    assert "line 2, cycle" in done.stdout
    assert "3 records replayed, 1 differences." in done.stdout
    assert "Error: line 4: not a DecisionRecord" in done.stderr
    found = json.loads(replay([*log[:2], "{}", log[2]], "--json").stdout)
    assert (found["records"], found["differences"]) == (3, [])
    assert [one["line"] for one in found["unreadable"]] == [3]


def test_a_whole_log_replays_and_an_empty_one_proves_nothing(log: list[str]) -> None:
    done = replay(log)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"{len(log)} records replayed, 0 differences.\n"
    done = replay(["", ""])
    assert done.exit_code == 1
    assert "no record in it" in done.stderr
