"""What is asked of Slurm, without Slurm: command lines, the own job's place, scripts and units."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hybridsched.cli.batch_sbatch import (
    Wishes,
    expand,
    job_spec,
    program,
    script_path,
    short_limit,
    take_wishes,
)
from hybridsched.cli.main import cli
from hybridsched.cluster.commands import sbatch_arguments, sbatch_environment
from hybridsched.workers.slurm_env import JobPlace, job_place, requeue

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "sbatch-offline.txt"

CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("one file", ["/data/my.jsonl"], {}),
    (
        "one file with everything",
        ["/data/a b.jsonl"],
        {
            "wishes": Wishes(time_limit_min=480, partition="night", account="llm", qos="low"),
            "output": "/out/o.jsonl",
            "errors": "/out/e.jsonl",
            "model": "tiny",
            "comment": "hybridsched batch_1",
        },
    ),
    ("several files", ["/data/a.jsonl", "/data/b.jsonl", "/data/c.jsonl"], {}),
    ("several, two at once", ["/data/a.jsonl", "/data/b.jsonl"], {"wishes": Wishes(at_once=2)}),
]


def described(words: list[str], files: list[str], **given: Any) -> Any:
    known: dict[str, Any] = {
        "wishes": Wishes(),
        "output": None,
        "errors": None,
        "model": None,
        "environment": {"HYBRIDSCHED_REDIS_URL": "redis://:secret@redis/0"},
        "comment": None,
        "folder": "/home/ada",
    }
    return job_spec(words, files, **(known | given))


def test_the_command_lines_are_those_of_the_golden_file() -> None:
    """`HYBRIDSCHED_GOLDEN=write` writes it anew."""
    lines = []
    for what, words, given in CASES:
        spec = described(words, words, **given)
        argv = sbatch_arguments(spec)
        assert not any("secret" in word for word in argv), "a password is seen by every user of the machine"
        assert sbatch_environment(spec, {})["HYBRIDSCHED_REDIS_URL"] == "redis://:secret@redis/0"
        lines += [f"# {what}", *(word.replace(str(ROOT), "ROOT") for word in argv), ""]
    text = "\n".join(lines)
    if os.environ.get("HYBRIDSCHED_GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_list_stands_for_its_files(tmp_path: Path) -> None:
    names = tmp_path / "l.txt"
    names.write_text("a.jsonl\r\n\n  \nb c.jsonl\n")
    words = ["x.jsonl", f"@{names}"]
    files = expand(words)
    assert files == ["x.jsonl", "a.jsonl", "b c.jsonl"]
    spec = described(words, files)
    assert spec.array == "0-2"
    assert spec.arguments == (str(Path("x.jsonl").absolute()), f"@{names}")
    for bad in ("@nowhere", f"@{tmp_path}"):
        with pytest.raises(click.ClickException, match="cannot be read"):
            expand([bad])
    names.write_text("\n")
    with pytest.raises(click.ClickException, match="names no file"):
        expand([f"@{names}"])


@pytest.mark.parametrize(
    ("files", "given", "says"),
    [
        (["a", "b"], {"output": "o"}, "are for one file"),
        (["a"], {"wishes": Wishes(at_once=2)}, "is for several"),
        (["a" * 70_000], {}, "give @LIST"),
    ],
)
def test_what_does_not_fit_together(files: list[str], given: dict[str, Any], says: str) -> None:
    with pytest.raises(click.UsageError, match=says):
        described(files, files, **given)


def test_slurm_options_need_sbatch() -> None:
    nothing = dict.fromkeys(("time", "partition", "gres", "account", "qos", "at_once"))
    assert take_wishes(False, nothing) is None
    with pytest.raises(click.UsageError, match="--at-once goes with --sbatch"):
        take_wishes(False, nothing | {"at_once": 3})
    assert take_wishes(True, nothing | {"time": 90_000.0}) == Wishes(time_limit_min=2)
    result = CliRunner().invoke(cli, ["batch", "submit", "a.jsonl", "b.jsonl", "--redis", "redis://x"])
    assert result.exit_code == 2
    assert "several go with --sbatch" in result.output


def test_a_sites_own_names_reach_the_job() -> None:
    wishes = Wishes(partition="scavenge", gres="openlane:1,lane:1")
    argv = sbatch_arguments(described(["/a.jsonl"], ["/a.jsonl"], wishes=wishes))
    assert {"--partition=scavenge", "--gres=openlane:1,lane:1"} <= set(argv)
    for bad in ("openlane", "openlane:0", "a:1;b", "--x:1", ""):
        with pytest.raises(click.UsageError, match="--gres was given"):
            described(["/a.jsonl"], ["/a.jsonl"], wishes=Wishes(gres=bad))


def test_the_script_and_the_program_are_found() -> None:
    assert script_path("offline.sbatch").read_text().startswith("#!/bin/bash\n#SBATCH")
    assert Path(program()).name == "hybridsched"
    with pytest.raises(click.ClickException, match="by hand"):
        script_path("nothing.sbatch")


# --- the own job


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, JobPlace(job="7", node="n1")),
        (
            {
                "SLURM_JOB_ID": "7",
                "SLURM_ARRAY_JOB_ID": "7",
                "SLURM_ARRAY_TASK_ID": "0",
                "SLURMD_NODENAME": "n1",
                "SLURM_RESTART_COUNT": "2",
            },
            JobPlace(job="7_0", node="n1", restarts=2),
        ),
    ],
)
def test_the_place_of_the_own_job(env: dict[str, str], expected: JobPlace | None) -> None:
    assert job_place(env) == expected


def fake_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    log = folder / "asked"
    program = folder / "scontrol"
    program.write_text(f'#!/bin/bash\necho "$*" >> {log}\n{body}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_a_requeue_is_asked_for_until_slurm_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"(( $(wc -l < {tmp_path}/asked) > 2 ))"
    log = fake_scontrol(tmp_path, monkeypatch, body)
    assert requeue(JobPlace(job="7_0", node="n1"), pause_s=0)
    assert log.read_text() == "requeue 7_0\n" * 3


def test_a_requeue_that_slurm_never_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = fake_scontrol(tmp_path, monkeypatch, "exit 1")
    assert not requeue(JobPlace(job="7", node="n1"), attempts=2, pause_s=0)
    assert log.read_text() == "requeue 7\n" * 2


def test_a_refusal_that_is_no_text_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "scontrol"
    command.write_text("#!/bin/sh\nprintf 'caf\\351' >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not requeue(JobPlace(job="7", node="n1"), attempts=1, pause_s=0)


# --- scripts and units


@pytest.mark.parametrize("path", sorted((ROOT / "workers").glob("*.sbatch")), ids=lambda path: path.name)
def test_a_batch_script_is_bash_and_has_its_options_first(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)
    head = path.read_text().split("\n\n")[0].splitlines()
    assert any(line.startswith("#SBATCH --signal=B:USR2@60") for line in head)
    assert "#SBATCH --open-mode=append" in head


@pytest.mark.parametrize("path", sorted((ROOT / "workers").glob("*.service")), ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_exists(path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False, comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string(path.read_text())
    words = unit["Service"]["ExecStart"].split()
    assert words[:2] == ["/usr/bin/env", "hybridsched"]
    result = CliRunner().invoke(cli, [*words[2:4], "--help"])
    assert result.exit_code == 0
    for option in words[4:]:
        assert option in re.sub(r"\s", " ", result.output)
    assert unit["Service"]["Restart"] == "always"
    if (verify := shutil.which("systemd-analyze")) is not None:
        said = subprocess.run([verify, "verify", path], capture_output=True, text=True, check=False)
        assert "Unknown" not in said.stderr, said.stderr


def test_the_offline_job_needs_a_slurm_job() -> None:
    clean = {name: None for name in os.environ if name.startswith("SLURM")}
    result = CliRunner().invoke(cli, ["worker", "offline", "--slurm-job", "a.jsonl"], env=clean)
    assert result.exit_code == 2
    assert "sbatch workers/offline.sbatch FILE" in result.output
    result = CliRunner().invoke(cli, ["worker", "offline", "--slurm-job", "a", "--lane", "r0"], env=clean)
    assert "cannot be chosen" in result.output
    result = CliRunner().invoke(cli, ["worker", "offline", "--output", "x"], env=clean)
    assert "--output goes with --slurm-job" in result.output
    result = CliRunner().invoke(cli, ["worker", "offline"], env=clean)
    assert "or --slurm-job FILE" in result.output


SCRIPT = "#SBATCH --time=1\n#SBATCH --signal=B:USR2@{}\n"


@pytest.mark.parametrize(
    ("minutes", "notice", "least"),
    [(1, 60, "3m"), (2, 60, "3m"), (3, 60, ""), (5, 240, "6m"), (None, 60, "")],
)
def test_a_time_limit_hardly_above_the_notice_is_told(minutes: int | None, notice: int, least: str) -> None:
    said = short_limit(Wishes(time_limit_min=minutes), SCRIPT.format(notice))
    assert (said is not None) is bool(least)
    assert said is None or (f"--time is {minutes} min" in said and f"Give {least} or more" in said)


def test_the_batch_script_has_a_notice_that_can_be_read() -> None:
    assert short_limit(Wishes(time_limit_min=1), script_path("offline.sbatch").read_text()) is not None


@pytest.mark.parametrize(
    ("left", "warned"),
    [
        ("0:59", "59 s are left"),
        ("02:00", "120 s"),
        ("03:00", ""),
        ("1:00:00", ""),
        ("UNLIMITED", ""),
        ("", ""),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_the_jobs_log_says_that_its_time_limit_is_short(
    tmp_path: Path, left: str, warned: str, array: bool
) -> None:
    for name, text in (("squeue", f'echo "$@" >> {tmp_path}/asked; echo {left}'), ("worker", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "my.jsonl").touch()
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12",
        "HYBRIDSCHED_BIN": str(tmp_path / "worker"),
        **({"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"} if array else {}),
    }
    done = subprocess.run(
        ["bash", script_path("offline.sbatch"), tmp_path / "my.jsonl"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert ("of the time limit" in done.stderr) is bool(warned), done.stderr
    assert warned in done.stderr
    assert (tmp_path / "asked").read_text() == f"-h -j {'12_0' if array else '12'} -o %L\n"
