"""Which device an engine gets, and the command that starts it there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from hybridsched.core.engine_plan import EnginePlan, Wish, plan_engine
from hybridsched.core.gpus import GIB, find_device
from hybridsched.engines.devices import Choice, DeviceError, choose, list_devices, read_listing
from hybridsched.engines.model_files import read_model
from hybridsched.engines.vllm_command import CommandError, engine_command, shm_problem
from tests.model_kit import LLAMA_8B, write_model

WHOLE = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaaaaaa-1111-2222-3333-444444444444)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbbbbbb-1111-2222-3333-444444444444)
"""
SLICED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaaaaaa-1111-2222-3333-444444444444)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbbbbbb-1111-2222-3333-444444444444)
  MIG 1g.10gb+me  Device  0: (UUID: MIG-11111111-42e4-5de3-91c7-45d71c87eb3f)
GPU 2: NVIDIA A30 (UUID: GPU-cccccccc-1111-2222-3333-444444444444)
"""


def test_all_gpus_that_are_there() -> None:
    choice = choose(read_listing(WHOLE), None)
    assert choice == Choice(device=find_device("a100-80gb"), count=2, visible="0,1")
    assert choose(read_listing(WHOLE), "") == choice


@pytest.mark.parametrize(
    ("wanted", "device", "visible"),
    [
        ("1", "1g.10gb@h100-80gb", "1"),
        ("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "3g.40gb@h100-80gb", "0"),
        ("MIG-11111111-42e4-5de3-91c7-45d71c87eb3f", "1g.10gb@h100-80gb", "1"),
        ("GPU-cccccccc", "a30", "2"),
        ("GPU-bbbbbbbb-1111-2222-3333-444444444444", "1g.10gb@h100-80gb", "1"),
    ],
)
def test_a_uuid_becomes_a_number(wanted: str, device: str, visible: str) -> None:
    choice = choose(read_listing(SLICED), wanted)
    assert (choice.device.name, choice.count, choice.visible, choice.note) == (device, 1, visible, "")


def test_a_slice_that_no_number_means_keeps_its_uuid() -> None:
    second = "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"
    choice = choose(read_listing(SLICED), second)
    assert choice.visible == second
    assert choice.device.name == "1g.10gb@h100-80gb"
    assert "41848" in choice.note


@pytest.mark.parametrize(
    ("text", "wanted", "says"),
    [
        (SLICED, "0", "GPU 0 is cut into 2 slices; choose one with --device: MIG-c6d4f1ef"),
        (SLICED, None, "GPU 0 is cut into 2 slices"),
        (SLICED, "1,2", "one slice alone"),
        (
            SLICED,
            "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f,MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb",
            "one slice alone",
        ),
        (SLICED, "7", "'7' is not here"),
        (SLICED, "MIG-none", "'MIG-none' is not here"),
        (WHOLE.replace("GPU 1: NVIDIA A100-SXM4-80GB", "GPU 1: NVIDIA A30"), None, "several kinds"),
        (WHOLE.replace("A100-SXM4-80GB", "T4"), None, "not in the table; name one with no more memory"),
    ],
)
def test_devices_that_cannot_be(text: str, wanted: str | None, says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        choose(read_listing(text), wanted)


def program(folder: Path, says: str, status: int = 0) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{says}EOF\nexit {status}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_listing_comes_from_a_program(tmp_path: Path) -> None:
    assert [gpu.number for gpu in list_devices(program(tmp_path, SLICED))] == [0, 1, 2]
    with pytest.raises(DeviceError, match=r"lists no GPU .No devices"):
        list_devices(program(tmp_path, "No devices were found\n", 6))
    with pytest.raises(DeviceError, match="cannot be run"):
        list_devices(str(tmp_path / "none"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "llama", LLAMA_8B)


def planned(model: Path, wish: Wish) -> EnginePlan:
    found = plan_engine(read_model(model), wish)
    assert isinstance(found, EnginePlan)
    return found


def flags(argv: tuple[str, ...]) -> dict[str, str]:
    begin = next(at for at, part in enumerate(argv) if part.startswith("--"))
    return dict(zip(argv[begin::2], argv[begin + 1 :: 2], strict=True))


def test_the_command_says_what_was_planned(model: Path) -> None:
    plan = planned(model, Wish(device=find_device("a100-80gb"), gpus=2, max_model_len=4096))
    choice = choose(read_listing(WHOLE), None)
    command = engine_command(plan, model=model, served_name="llama", port=8123, choice=choice)
    assert command.argv[:3] == ("vllm", "serve", str(model))
    assert flags(command.argv) == {
        "--served-model-name": "llama",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--max-model-len": "4096",
        "--max-num-seqs": "256",
        "--max-num-batched-tokens": "2048",
        "--shutdown-timeout": "30",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "1",
        "--gpu-memory-utilization": "0.95",
    }
    assert command.environment == {
        "VLLM_SERVER_DEV_MODE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert command.yours == ()


def test_an_engine_gets_no_more_gpus_than_its_plan_has(model: Path) -> None:
    choice = choose(read_listing(WHOLE), "1,0")
    plan = planned(model, Wish(device=choice.device, gpus=choice.count))
    command = engine_command(plan, model=model, served_name="m", port=1, choice=choice)
    assert plan.tensor_parallel == 1
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "1"


def test_own_flags_take_the_place_of_the_plans(model: Path) -> None:
    plan = planned(model, Wish(device=find_device("h100"), kv_dtype="fp8"))
    extra = ("--max-num-seqs=8", "--max_model_len", "100", "--enforce-eager")
    command = engine_command(plan, model=model, served_name="m", port=1, extra=extra)
    assert command.argv[-4:] == extra
    assert command.yours == ("--max-model-len", "--max-num-seqs")
    assert command.argv.count("--max-num-seqs") == 0
    assert command.argv[command.argv.index("--kv-cache-dtype") + 1] == "fp8"


@pytest.mark.parametrize("extra", [("--host", "0.0.0.0"), ("--host=::",), ("--host",)])
def test_control_endpoints_stay_on_the_loopback(model: Path, extra: tuple[str, ...]) -> None:
    plan = planned(model, Wish(device=find_device("h100")))
    with pytest.raises(CommandError, match="control endpoints"):
        engine_command(plan, model=model, served_name="m", port=1, extra=extra)
    engine_command(plan, model=model, served_name="m", port=1, extra=("--host", "localhost"))


@pytest.mark.parametrize("flag", ["--port", "--served-model-name"])
def test_what_the_engine_is_asked_by_is_an_option_of_the_command(model: Path, flag: str) -> None:
    plan = planned(model, Wish(device=find_device("h100")))
    for extra in ((flag, "9"), (f"{flag.replace('-m', '_m')}=9",)):
        with pytest.raises(CommandError, match=f"^{flag} after `--`"):
            engine_command(plan, model=model, served_name="m", port=1, extra=extra)


def test_cpu_and_simulated(model: Path) -> None:
    plan = planned(model, Wish(device=None, kv_space_bytes=3 * GIB))
    command = engine_command(plan, model=model, served_name="m", port=1)
    assert command.environment == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "3"}
    assert "--gpu-memory-utilization" not in command.argv
    simulated = engine_command(plan, model=model, served_name="m", port=1, program="simulated")
    assert simulated.argv[1:3] == ("-m", "hybridsched.engines.simulated")
    assert flags(simulated.argv)["--kv-tokens"] == str(plan.kv_tokens)
    assert "--dtype" not in simulated.argv


def test_shared_memory_is_looked_at_for_several_workers(model: Path, tmp_path: Path) -> None:
    plan = planned(model, Wish(device=find_device("h100")))
    assert shm_problem(plan, tmp_path / "none") is None
    two = msgspec.structs.replace(plan, tensor_parallel=2)
    assert "cannot be looked at" in (shm_problem(two, tmp_path / "none") or "")
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    many = msgspec.structs.replace(plan, tensor_parallel=free // (256 * 2**20) + 1)
    assert "--shm-size" in (shm_problem(many, tmp_path) or "")
    if free > 3 * 256 * 2**20:
        assert shm_problem(two, tmp_path) is None
