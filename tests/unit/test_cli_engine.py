"""`hybridsched engine plan` and `launch` as commands: JSON, exit statuses, wrong input in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli
from hybridsched.core.engine_plan import EnginePlan, NoFit
from tests.model_kit import LLAMA_8B, TINY, write_model

LISTING = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaaaaaa-1111-2222-3333-444444444444)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbbbbbb-1111-2222-3333-444444444444)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
"""
SECOND = "  MIG 3g.40gb     Device  1: (UUID: MIG-22222222-42e4-5de3-91c7-45d71c87eb3f)\n"


def run(*words: str, **env: str) -> Result:
    clean = dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "HYBRIDSCHED_VLLM", "HYBRIDSCHED_REDIS_URL", "SLURM_JOB_ID")
    )
    return CliRunner().invoke(cli, ["engine", *words], env=clean | env)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_model(tmp_path / "llama", LLAMA_8B))


@pytest.fixture
def nvidia_smi(tmp_path: Path) -> str:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{LISTING}EOF\n")
    path.chmod(0o755)
    return str(path)


def test_a_plan_as_json(model: str) -> None:
    done = run("plan", "--model", model, "--gpu", "h200", "--json")
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["schema"], said["fits"]) == (1, True)
    assert said["notes"] == ["head_dim is not in config.json: hidden_size 4096 / 32 heads = 128"]
    assert msgspec.convert(said["plan"], EnginePlan).device == "h200"


def test_a_refusal_as_json_has_exit_status_1(model: str) -> None:
    done = run("plan", "--model", model, "--gpu", "1g.10gb@h100", "--json")
    assert done.exit_code == 1
    said = json.loads(done.stdout)
    assert said["fits"] is False
    refusal = msgspec.convert(said["refusal"], NoFit)
    assert refusal.would_fit == ("a larger device: --gpu 1g.20gb@h100-80gb",)


@pytest.mark.parametrize(
    ("options", "environment", "device"),
    [
        (("--device", "0"), {}, "a100-80gb"),
        ((), {"CUDA_VISIBLE_DEVICES": "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"}, "3g.40gb@a100-80gb"),
        (("--gpu", "h200"), {"CUDA_VISIBLE_DEVICES": "MIG-gone"}, "h200"),
    ],
)
def test_auto_takes_the_devices_that_are_here(
    model: str, nvidia_smi: str, options: tuple[str, ...], environment: dict[str, str], device: str
) -> None:
    done = run("plan", "--model", model, "--nvidia-smi", nvidia_smi, "--json", *options, **environment)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"]["device"] == device


def test_launch_on_a_slice_names_it_by_number(model: str, nvidia_smi: str) -> None:
    done = run(
        *("launch", "--model", model, "--nvidia-smi", nvidia_smi, "--dry-run"),
        CUDA_VISIBLE_DEVICES="MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1 VLLM_SERVER_DEV_MODE=1 vllm "
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gpu", "v100"), "'v100' is no device that is known; there are a30"),
        (("--gpu", "a100"), "a100-40gb or a100-80gb"),
        (("--gpu", "h200", "--max-model-len", "9000"), "takes 1 to 8192"),
        (("--gpu", "3g.40gb@h100", "--gpus", "2"), "a process sees one slice"),
        (("--gpu", "h200", "--kv-gib", "4"), "--gpu cpu"),
        (("--gpu", "3g.40gb@h100", "--device", "MIG-1"), "--device MIG-1 goes with --gpu auto"),
        (("--gpu", "h200", "--trace", "/no/such.csv"), "/no/such.csv does not exist"),
        (("--nvidia-smi", "/no/such/program"), "/no/such/program -L cannot be run"),
    ],
)
def test_wrong_usage_is_one_sentence(model: str, options: tuple[str, ...], says: str) -> None:
    done = run("plan", "--model", model, *options)
    assert done.exit_code == 2, done.output
    assert says in done.output
    assert done.stdout == ""


def test_a_number_of_slurms_says_nothing_where_slices_can_be_seen(model: str, nvidia_smi: str) -> None:
    """Slurm counts slices where it manages them by their files: a GPU of that number is another device."""
    program = Path(nvidia_smi)
    program.write_text(program.read_text().replace(LISTING, LISTING + SECOND))
    words = ("plan", "--model", model, "--nvidia-smi", nvidia_smi)
    done = run(*words, CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="7")
    assert done.exit_code == 2
    assert "may count slices" in done.output
    assert run(*words, "--device", "0", SLURM_JOB_ID="7").exit_code == 0
    uuid = SECOND.split("UUID: ")[1].rstrip(")\n")
    assert run(*words, CUDA_VISIBLE_DEVICES=uuid, SLURM_JOB_ID="7").exit_code == 0


def test_more_gpus_than_there_are(model: str, nvidia_smi: str) -> None:
    done = run("plan", "--model", model, "--nvidia-smi", nvidia_smi, "--device", "0", "--gpus", "2")
    assert done.exit_code == 2
    assert "1 can be seen here" in done.output


def test_models_that_cannot_be_read(tmp_path: Path) -> None:
    done = run("plan", "--model", str(tmp_path), "--gpu", "h200")
    assert done.exit_code == 2
    assert "config.json does not exist" in done.output
    file = write_model(tmp_path / "m", TINY) / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(9000)
    done = run("plan", "--model", str(tmp_path / "m"), "--gpu", "h200")
    assert done.exit_code == 2
    assert "is truncated" in done.output


def test_launch_refuses_before_it_starts_anything(model: str) -> None:
    done = run("launch", "--model", model, "--gpu", "1g.10gb@h100")
    assert done.exit_code == 1
    assert "It does not fit" in done.output
    assert "1g.20gb@h100-80gb" in done.output
    open_host = run("launch", "--model", model, "--gpu", "h200", "--", "--host", "0.0.0.0")
    assert open_host.exit_code == 2
    assert "control endpoints" in open_host.output
    name = run("launch", "--model", model, "--gpu", "h200", "--served-model-name", "two words")
    assert name.exit_code == 2
    assert "--served-model-name" in name.output


def test_profiles_need_a_redis() -> None:
    done = run("profile")
    assert done.exit_code == 2
    assert "HYBRIDSCHED_REDIS_URL" in done.output
