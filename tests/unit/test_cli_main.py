"""The command line as a whole: what --help loads, what wrong usage says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from hybridsched.cli.main import COMMANDS, cli

HEAVY = ["redis", "rq", "aiohttp", "pydantic", "plotly", "starlette", "uvicorn", "rich", "structlog"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridsched", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_loads_no_heavy_module() -> None:
    """150 ms for `--help` holds only while it imports click and nothing more: count imports, not time."""
    script = (
        "import sys, json\n"
        "from click.testing import CliRunner\n"
        "from hybridsched.cli.main import cli\n"
        "result = CliRunner().invoke(cli, ['--help'])\n"
        "assert result.exit_code == 0\n"
        f"print(json.dumps(sorted(set(sys.modules) & set({HEAVY!r}))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_command_module_is_lazy_and_documented(name: str) -> None:
    entry = COMMANDS[name]
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    assert isinstance(command, click.Command)
    assert command.help, f"`hybridsched {name}` has no help text"
    assert entry.summary in CliRunner().invoke(cli, ["--help"]).output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_has_help(name: str) -> None:
    def check(path: str, command: click.Command) -> None:
        result = CliRunner().invoke(command, ["--help"])
        assert result.exit_code == 0, path
        assert command.help, f"`{path}` has no help text"
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"`{path} {parameter.opts[0]}` has no help text"
        if isinstance(command, click.Group):
            for sub in command.commands.values():
                check(f"{path} {sub.name}", sub)

    entry = COMMANDS[name]
    check(f"hybridsched {name}", getattr(importlib.import_module(entry.module), entry.attribute))


def test_unknown_command_names_the_nearest() -> None:
    done = run("wroker")
    assert done.returncode == 2
    assert "Did you mean 'worker'?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["worker", "policy", "--redis", "http://x"], 2, "redis://"),
        (["worker", "policy", "--redis", "redis://127.0.0.1:1"], 1, "127.0.0.1:1"),
        (["worker", "online", "--replica", "r 0", "--model", "m", "--engine", "http://h:1"], 2, "not a name"),
        (["worker", "online", "--replica", "r0", "--model", "m", "--engine", "h:1"], 2, "http://HOST:PORT"),
        (["worker", "policy", "--pool", "{x}"], 2, "not a name"),
        (["batch", "submit", "/no/such/file.jsonl", "--redis", "redis://127.0.0.1:1"], 2, "no/such/file"),
        (["demo", "--trace", "/no/such/trace.csv"], 2, "no/such/trace"),
        (["demo", "--batch", "/no/such/batch.jsonl"], 2, "no/such/batch"),
        (["demo", "--policy", "nope"], 2, "idle-window"),
        (["demo", "--gpus", "0"], 2, "gpus"),
        (["pool", "status", "--redis", "redis://127.0.0.1:1"], 1, "127.0.0.1:1"),
    ],
)
def test_wrong_usage_is_one_clear_sentence(arguments: list[str], status: int, says: str) -> None:
    done = run(*arguments)
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
