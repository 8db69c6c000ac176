"""docs/engine.md says what the command says: its examples, its options, the fields of its JSON."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hybridsched.cli.engine import launch, plan, profile
from hybridsched.cli.main import cli
from hybridsched.core.engine_plan import EnginePlan, NoFit, Wish, plan_engine
from hybridsched.core.gpus import find_device
from hybridsched.engines.model_files import read_model
from hybridsched.store.engine_profiles import EngineProfile, Throughput
from tests.model_kit import LLAMA_8B, write_model

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(
    r"^```sh\n(hybridsched engine (?:plan|launch) " r".*)\n```\n(?:.*\n)*?^```text\n((?:.*\n)*?)```$",
    PAGE,
    re.M,
)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize(("line", "shown"), EXAMPLES)
def test_an_example_prints_what_the_page_shows(line: str, shown: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "llama-3-8b", LLAMA_8B, shards=4)
    words = shlex.split(line.replace("/models/llama-3-8b", str(model)))[1:]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == (1 if "does not fit" in shown else 0), done.output
    assert done.output.replace(str(tmp_path), "/models") == shown


def options(command: click.Command) -> set[str]:
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name for name in found if name.startswith("--")}


def section(begins: str, ends: str) -> str:
    return PAGE.split(begins)[1].split(ends)[0]


def cells(text: str) -> set[str]:
    """Names in the first column of the tables in `text`."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, flags=re.M)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_every_option_is_on_the_page_and_no_other() -> None:
    of_plan = cells(section("## Plan", "### What is exact"))
    assert of_plan == options(plan)
    of_launch = cells(section("## Launch", "## Replicas"))
    assert of_launch == options(launch) - (options(plan) - {"--json"})
    assert options(profile) == {"--redis", "--pool", "--model", "--json"}


def test_every_field_is_on_the_page_and_no_other() -> None:
    json = section("### JSON", "## Launch")
    assert cells(json.split("| field of `refusal`")[0]) == set(EnginePlan.__struct_fields__)
    assert cells(json.split("| field of `refusal`")[1]) == set(NoFit.__struct_fields__)
    assert cells(section("## Profile", "\n\n\n\n")) == set(EngineProfile.__struct_fields__)
    for name in Throughput.__struct_fields__:
        assert f"`{name}`" in PAGE.split("| `throughput` |")[1]


def test_the_plan_comes_as_near_to_the_published_log_as_the_page_says(tmp_path: Path) -> None:
    """vLLM pull request 10511: 53.29 GiB of KV cache."""
    said = re.search(r"pull request 10511\)[^.]*within (\d+) %", PAGE)
    assert said is not None
    shape = read_model(write_model(tmp_path / "m", LLAMA_8B))
    found = plan_engine(shape, Wish(device=find_device("h100-80gb"), share=0.9, max_num_seqs=256))
    assert isinstance(found, EnginePlan)
    assert found.kv_bytes == pytest.approx(53.29 * 2**30, rel=int(said[1]) / 100)
