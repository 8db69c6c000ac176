"""`hybridsched mode assert|apply|export` as processes, the real pynvml over the double of NVML's library."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
import redis

from hybridsched.cli.mode_here import here
from hybridsched.core.mig import LayoutEntry, difference, plan, wants
from hybridsched.core.modes import HostGroup, Mode, ModesPolicy
from hybridsched.core.switch_values import HostState, Step, SwitchState
from hybridsched.mig.files import parse_text
from hybridsched.mig.nvml import NvmlMig
from hybridsched.store.connection import async_client
from hybridsched.store.keys import Keys
from hybridsched.store.modes import ModeStore
from hybridsched.store.policy import PolicyStore
from tests.contract.test_mig_parted import STAND_IN
from tests.integration.policy_pool import policy
from tests.mig_layouts import minors_of
from tests.nvml_double import Double, double

LAYOUTS = """
version: v1
mig-configs:
  whole:
    - devices: all
      mig-enabled: false
  small:
    - devices: [0]
      mig-enabled: true
      mig-devices: {"3g.40gb": 1, "1g.10gb": 1}
  day:
    - devices: [0]
      mig-enabled: true
      mig-devices:
        "1g.10gb": 4
        "3g.40gb": 1
    - devices: [1]
      mig-enabled: true
      mig-devices: {"1g.10gb": 7}
"""


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Double]:
    with double(tmp_path / "gpus", "a100-80gb", "h100-80gb") as made:
        yield made


@pytest.fixture
def layouts(tmp_path: Path) -> Path:
    path = tmp_path / "layouts.yaml"
    path.write_text(LAYOUTS)
    return path


def run(made: Double, *options: str, stdin: str = "", path: str = "") -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "hybridsched", "mode", *options]
    environment = made.environment
    if path:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        argv, env=environment, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_day_is_made_asserted_exported_and_unmade(gpus: Double, layouts: Path) -> None:
    before = run(gpus, "assert", "-f", str(layouts), "--layout", "day")
    assert (before.returncode, before.stdout.splitlines()) == (
        1,
        ["GPU 0: MIG mode is off, wanted on", "GPU 1: MIG mode is off, wanted on"],
    )
    assert before.stderr == "Layout day does not stand: 2 GPUs of 2 differ.\n"
    planned = run(gpus, "apply", "-f", str(layouts), "-c", "day", "--dry-run")
    assert planned.returncode == 0
    assert gpus.changes() == 0
    made = run(gpus, "apply", "-f", str(layouts), "-c", "day")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == "".join(f"done: {line}\n" for line in planned.stdout.splitlines())
    assert gpus.changes() == len(planned.stdout.splitlines()) == 26
    stands = run(gpus, "assert", "-f", str(layouts), "-c", "day")
    assert (stands.returncode, stands.stdout, stands.stderr) == (0, "", "")
    exported = run(gpus, "export")
    assert exported.stdout == (
        "version: v1\n"
        "mig-configs:\n"
        "  current:\n"
        "  - devices:\n    - 0\n    mig-enabled: true\n    mig-devices:\n      1g.10gb: 4\n      3g.40gb: 1\n"
        "  - devices:\n    - 1\n    mig-enabled: true\n    mig-devices:\n      1g.10gb: 7\n"
    )
    assert run(gpus, "assert", "-f", "-", stdin=exported.stdout).returncode == 0
    assert run(gpus, "assert", "-f", "-", stdin=run(gpus, "export", "--json").stdout).returncode == 0
    assert run(gpus, "apply", "-f", str(layouts), "-c", "whole").returncode == 0
    assert not any(gpu.enabled for gpu in NvmlMig(load=lambda: gpus.nvml).read())


def test_a_document_on_standard_input_may_select_its_layout(gpus: Double) -> None:
    entry = {"devices": [1], "mig-enabled": True, "mig-devices": {"7g.80gb": 1}}
    off = {"devices": "all", "mig-enabled": False}
    text = json.dumps(
        {"version": "v1", "mig-configs": {"a": [entry], "b": [off]}, "selected": "a", "model": "h"}
    )
    assert run(gpus, "apply", "-f", "-", stdin=text).returncode == 0
    assert run(gpus, "assert", "-f", "-", stdin=text).returncode == 0
    answer = run(gpus, "assert", "-f", "-", "-c", "b", "--json", stdin=text)
    assert answer.returncode == 1
    assert json.loads(answer.stdout) == {
        "layout": "b",
        "stands": False,
        "gpus": [0, 1],
        "differs": [{"gpu": 1, "text": "GPU 1: MIG mode is on, wanted off"}],
    }


def test_a_failure_in_the_middle_says_what_was_made_and_the_way_back(gpus: Double, layouts: Path) -> None:
    gpus.fail_change(3, 999)
    answer = run(gpus, "apply", "-f", str(layouts), "-c", "day")
    assert answer.returncode == 1
    assert answer.stdout.splitlines() == [
        "done: GPU 0: MIG mode on",
        "done: GPU 0: create 3g.40gb at 4",
        "done: GPU 0: create the compute instance of 3g.40gb at 4",
    ]
    first, *rest = answer.stderr.splitlines()
    assert first == (
        "Error: layout day was not made (failed): GPU 0: create 1g.10gb at 0: the GPU refused (NVML: UNKNOWN)"
    )
    assert "not done: GPU 0: create the compute instance of 1g.10gb at 0" in rest
    assert "differs: GPU 0: has 1 x 3g.40gb, wanted 4 x 1g.10gb, 1 x 3g.40gb" in rest
    assert rest[-3:] == [
        "way back: GPU 0: destroy compute instance 0 of 3g.40gb at 4",
        "way back: GPU 0: destroy 3g.40gb at 4",
        "way back: GPU 0: MIG mode off",
    ]


def test_killed_at_each_change_in_turn_the_next_apply_ends_it(gpus: Double) -> None:
    """kill -9 of `mode apply`: what it left is seen by `assert`, and made whole by the next `apply`."""
    layout = parse_text(LAYOUTS)[0]["small"]
    mig = NvmlMig(load=lambda: gpus.nvml)
    for number in range(5):
        gpus.new(["a100-80gb", "h100-80gb"])
        wanted = wants(layout, mig.read())
        gpus.kill_change(number)
        killed = run(gpus, "apply", "-f", "-", "-c", "small", stdin=LAYOUTS)
        assert killed.returncode == -signal.SIGKILL
        left = mig.read()
        assert difference(left[0], wanted[0]) is not None
        rest = plan(left, wanted)
        assert len(rest.steps) == 5 - number, "what was made stays"
        assert mig.apply(rest, lambda _: None).ok


def test_without_root_and_with_work_on_it(gpus: Double, layouts: Path) -> None:
    gpus.root(False)
    answer = run(gpus, "apply", "-f", str(layouts), "-c", "day", "--json")
    assert answer.returncode == 1
    assert json.loads(answer.stdout)["code"] == "no_permission"
    assert "run this as root" in answer.stderr
    gpus.root(True)
    gpus.process(0, 4711)
    answer = run(gpus, "apply", "-f", str(layouts), "-c", "day")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith(
        "Error: layout day was not made (in_use): GPU 0 is in use by process 4711."
    )


def test_a_site_that_prefers_mig_parted(gpus: Double, layouts: Path, tmp_path: Path) -> None:
    """A stand-in of that name on the PATH; without it the command says what is missing."""
    options = ["apply", "-f", str(layouts), "-c", "day", "--driver", "mig-parted"]
    without = run(gpus, *options)
    assert (without.returncode, without.stdout) == (1, "")
    assert "(parted_missing): nvidia-mig-parted could not be started" in without.stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "parted.py").write_text(STAND_IN)
    program = tmp_path / "bin" / "nvidia-mig-parted"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/parted.py {tmp_path}/log obey "$@"\n')
    program.chmod(0o755)
    made = run(gpus, *options, path=f"{tmp_path}/bin")
    assert (made.returncode, made.stderr) == (0, "")
    assert run(gpus, "assert", "-f", str(layouts), "-c", "day").returncode == 0


def test_on_a_terminal_it_asks_first(gpus: Double, layouts: Path) -> None:
    argv = [sys.executable, "-m", "hybridsched", "mode", "apply", "-f", str(layouts), "-c", "small"]
    for answer, status in ((b"n\n", 1), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        done = subprocess.run(
            argv, env=gpus.environment, stdin=theirs, capture_output=True, text=True, timeout=60, check=False
        )
        os.close(ours)
        os.close(theirs)
        assert "Change the GPUs in 5 steps?" in done.stderr
        assert (done.returncode, gpus.changes()) == (status, 5 - 5 * status)


def test_slurms_lines_are_printed_for_the_gpus_as_they_stand(
    gpus: Double, layouts: Path, tmp_path: Path
) -> None:
    whole = run(gpus, "gres", "--node", "n1", "--gpu-type", "a100")
    assert whole.stdout == (  # the double counts device files the other way round than GPUs
        "NodeName=n1 AutoDetect=off\n"
        "NodeName=n1 Name=gpu Type=a100 File=/dev/nvidia1\n"
        "NodeName=n1 Name=gpu Type=a100 File=/dev/nvidia0\n"
        "# In slurm.conf:  NodeName=n1 Gres=gpu:a100:2\n"
    )
    assert run(gpus, "apply", "-f", str(layouts), "-c", "day").returncode == 0
    minors = tmp_path / "mig-minors"
    read = NvmlMig(load=lambda: gpus.nvml).read()
    minors.write_text(minors_of(read))
    options = ["gres", "--node", "n1", "--gpu-type", "a100"]
    cut = run(gpus, *options, "--minors", str(minors))
    assert cut.stdout.endswith("# In slurm.conf:  NodeName=n1 Gres=gpu:1g.10gb:11,gpu:3g.40gb:1\n")
    assert cut.stdout.count("MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap") == 5
    found = json.loads(run(gpus, *options, "--minors", str(minors), "--json").stdout)["devices"]
    assert [(d["number"], d["type"]) for d in found] == [
        *((number, "1g.10gb") for number in range(11)),
        (11, "3g.40gb"),
    ]
    assert {d["uuid"] for d in found} == {c.uuid for g in read for i in g.instances for c in i.compute}
    auto = run(gpus, *options, "--autodetect")
    assert auto.stdout.startswith("NodeName=n1 AutoDetect=nvml\n# In slurm.conf:  NodeName=n1 Gres=")
    missing = run(gpus, *options, "--minors", "/no/such/table")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "/no/such/table" in missing.stderr
    assert "nvidia-modprobe" in missing.stderr
    assert run(gpus, "gres", "--node", "n1 Gres=x", "--gpu-type", "a100").returncode == 2


ENTRY = LayoutEntry(mig_enabled=True, mig_devices={"7g.80gb": 1})
HERE = HostState(host="n1", mode="night", goal="night")


async def stand(url: str, host: HostState | None, layout: str = "whole") -> None:
    """A pool whose policy wants whole GPUs of n1 by night, and where n1 stands."""
    client = async_client(url)
    modes = ModesPolicy(
        mig_configs={"whole": (ENTRY,)},
        hosts=(HostGroup(names="n[1-2]", gpu="a100-80gb", gpus=2),),
        mode=(Mode(name="night", layout=layout), Mode(name="day", layout="")),
    )
    await PolicyStore(client, "here").set(policy(modes=modes))
    await client.set(Keys("here").leader, "1:test")
    hosts = {} if host is None else {"n1": host}
    assert await ModeStore(client, "here").write_journal(SwitchState(hosts=hosts), token="1:test")
    await client.aclose()


async def test_without_a_file_the_layout_is_that_of_the_pool_for_the_mode_of_this_machine(
    gpus: Double, valkey: redis.Redis, valkey_url: str
) -> None:
    await stand(valkey_url, HERE)
    pool = ["--redis", valkey_url, "--pool", "here", "--node", "n1"]
    before = run(gpus, "assert", *pool)
    assert (before.returncode, before.stdout.splitlines()[0]) == (1, "GPU 0: MIG mode is off, wanted on")
    assert before.stderr == "Layout whole does not stand: 2 GPUs of 2 differ.\n"
    assert run(gpus, "apply", *pool).returncode == 0
    after = run(gpus, "assert", *pool, "--json")
    assert (after.returncode, json.loads(after.stdout)["layout"]) == (0, "whole")
    # On its way out of the other mode it is cut for this one already.
    await stand(valkey_url, msgspec.structs.replace(HERE, mode="day", step=Step.CONFIGURING, left=True))
    assert run(gpus, "assert", *pool).returncode == 0
    # A mode without a layout wants nothing.
    await stand(valkey_url, msgspec.structs.replace(HERE, mode="day", goal="day"))
    free = run(gpus, "assert", *pool)
    assert (free.returncode, free.stdout) == (0, "")
    assert "Mode day of host n1 has no layout" in free.stderr


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (None, "no policy worker of pool here has said in which mode host n1 stands"),
        (msgspec.structs.replace(HERE, step=Step.HELD, why="cut failed"), "it is held: cut failed"),
        (msgspec.structs.replace(HERE, step=Step.CUTTING), "its GPUs are being cut for mode night"),
        (
            msgspec.structs.replace(HERE, mode="day", goal="day", step=Step.DRAINING, left=True, back=True),
            "it is on its way to mode day and may be cut otherwise",
        ),
        (msgspec.structs.replace(HERE, mode="noon", goal="noon"), "which the policy has no more"),
    ],
)
async def test_what_nobody_can_say_now_ends_with_1(
    valkey: redis.Redis, valkey_url: str, host: HostState | None, said: str
) -> None:
    await stand(valkey_url, host)
    with pytest.raises(click.ClickException) as error:
        await asyncio.to_thread(here, valkey_url, "here", "n1")
    assert error.value.exit_code == 1
    assert said in error.value.message


async def test_a_machine_that_is_no_host_of_the_policy_ends_with_2(
    gpus: Double, valkey: redis.Redis, valkey_url: str
) -> None:
    await stand(valkey_url, HERE)
    other = run(gpus, "assert", "--redis", valkey_url, "--pool", "here", "--node", "n7")
    assert other.returncode == 2
    assert "--node was given 'n7', which is no host of the policy's modes (n1, n2)" in other.stderr
    with pytest.raises(click.UsageError, match="give --node HOST"):
        await asyncio.to_thread(here, valkey_url, "here", None)
    both = run(gpus, "assert", "-f", "-", "--node", "n1")
    assert (both.returncode, "--node is for the pool's policy" in both.stderr) == (2, True)
    with pytest.raises(click.ClickException, match=r"has no section \[modes\]") as none:
        await asyncio.to_thread(here, valkey_url, "nobody", "n1")
    assert none.value.exit_code == 1


@pytest.mark.parametrize(
    ("options", "text", "said"),
    [
        (["-f", "-"], "version: v1\nmig-configs: [", "is not valid YAML"),
        (["-f", "-"], "version: v1\nmig-configs: {a: [], a: []}", "the key 'a' stands twice"),
        (["-f", "-"], "version: v1\nmig-configs: {a: [{devices: all}]}", "mig-configs.a[0].mig-enabled"),
        (["-f", "-"], LAYOUTS, "has several layouts: give --selected-config (whole, small, day)"),
        (["-f", "-", "-c", "dya"], LAYOUTS, "has no layout 'dya'; it has whole, small, day"),
        (["-f", "/no/such/file"], "", "cannot be read"),
        (["--layout", "day"], "", "which is no file; for a layout of a file add -f FILE"),
        ([], "", "give -f FILE"),
        (
            ["-f", "-", "-c", "far"],
            "version: v1\nmig-configs: {far: [{devices: [9], mig-enabled: false}]}",
            "GPU 9",
        ),
    ],
)
def test_wrong_usage_is_said_and_ends_with_2(gpus: Double, options: list[str], text: str, said: str) -> None:
    for command in ("assert", "apply"):
        answer = run(gpus, command, *options, stdin=text)
        assert answer.returncode == 2, answer.stderr
        assert said in answer.stderr
        assert "Traceback" not in answer.stderr
    assert gpus.changes() == 0


def test_a_layout_that_cannot_be_says_what_fits(gpus: Double) -> None:
    text = "version: v1\nmig-configs: {a: [{devices: [0], mig-enabled: true, mig-devices: {1g.5gb: 7}}]}"
    for command in ("apply", "assert"):
        answer = run(gpus, command, "-f", "-", stdin=text)
        assert answer.returncode == 2
        said = "GPU 0 (NVIDIA A100-SXM4-80GB): there is no profile 1g.5gb; did you mean 1g.10gb?"
        assert said in answer.stderr


def test_without_a_driver_it_says_so(gpus: Double, layouts: Path) -> None:
    gpus.fail_call("nvmlInitWithFlags", 9)
    for command in (["export"], ["assert", "-f", str(layouts), "-c", "day"]):
        answer = run(gpus, *command)
        assert answer.returncode == 1
        assert answer.stderr == (
            "Error: the GPUs could not be read (driver_missing): no NVIDIA driver runs on this machine "
            "(NVML: DRIVER_NOT_LOADED)\n"
        )
