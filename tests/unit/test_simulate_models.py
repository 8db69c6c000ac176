"""Several models from one file: each by itself as if alone, and the sums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli

MODELS = """
[[model]]
name = "chat"
gpus = 2
waves = "5,1,8"

[[model]]
name = "code"
gpus = 1
trace = "code.csv"
batch = "work.csv"
policy = "mine.toml"
away = ["r0@0-3"]
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["simulate", "--duration", "16", "--lines", "150", *arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    columns = "arrival_s,prompt_tokens,output_tokens\n"
    (tmp_path / "code.csv").write_text(columns + "".join(f"{n / 2},{300 + n},20\n" for n in range(30)))
    (tmp_path / "work.csv").write_text(columns + "0,700,90\n")
    (tmp_path / "mine.toml").write_text('name = "mine"\nkind = "idle-window"\n')
    path = tmp_path / "models.toml"
    path.write_text(MODELS)
    return path


def test_each_model_is_as_it_is_alone(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    done = invoke("--models", str(file), "--report", str(folder))
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.output.splitlines()[:3]] == ["model", "chat", "code"]
    assert "all 2 models, 3 engines" in done.output
    chat = json.loads((folder / "chat" / "summary.json").read_bytes())
    code = json.loads((folder / "code" / "summary.json").read_bytes())
    assert (folder / "code" / "report.html").exists()
    assert code["policy"]["name"] == "mine"
    assert code["harvest"]["engine_seconds"] < 16.0, "it was away for 3 s"
    assert chat["harvest"]["engine_seconds"] >= 32.0
    alone = json.loads(invoke("--waves", "5,1,8", "--gpus", "2", "--json").output)
    assert alone | {"wall_s": 0} == chat | {"wall_s": 0}
    total = json.loads((folder / "total.json").read_bytes())
    assert total["requests"] == chat["online"]["requests"] + 30
    assert total["ceiling_tokens"] == chat["ceiling"]["tokens"] + code["ceiling"]["tokens"]
    assert min(chat["ceiling"]["share"], code["ceiling"]["share"]) <= total["ceiling_share"]
    shown = json.loads(invoke("--models", str(file), "--json").output)
    assert [one["model"] for one in shown["models"]] == ["chat", "code"]
    assert shown["total"] == total


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing required field `model`"),
        ("model = []", "names no model"),
        ("[[model]]\nname = 'a'\nload = 'high'", "Expected `float | null`, got `str`"),
        ("[[model]]\nname = 'a'\ngpu = 2", "unknown field `gpu`"),
        ("[[model]]\nname = '../a'", "cannot be a folder's name"),
        ("[[model]]\nname = 'a'\n[[model]]\nname = 'a'", "two of them are called 'a'"),
        ("[[model]]\nname = 'a'\ngpus = 0", "gpus is 0"),
        ("[[model]]\nname = 'a'\ntrace = 'none.csv'", "model a: trace"),
        ("[[model]]\nname = 'a'\npolicy = 'idel'", "model a: policy idel"),
        ("[[model]]\nname = 'a'\nwaves = '1,2'", "model a: waves '1,2' have 2 numbers"),
        ("[[model]]\nname = 'a'\nwaves = '2,1,9'\nstart = 3.0", "without trace and start"),
        ("[[model]]\nname = 'a'\naway = ['r9@0-3']", "replica 9 cannot be away"),
        ("[[model", "tables [[model]] are allowed"),
    ],
)
def test_a_file_that_cannot_be_used_says_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    done = invoke("--models", str(path))
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output


def test_several_policies_and_several_models_are_one_too_many(file: Path) -> None:
    done = invoke("--models", str(file), "--compare", "idle-window")
    assert done.exit_code == 2
    assert "give either" in done.output
