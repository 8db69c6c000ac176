"""GPUs that are not cut as the mode says, after a reboot: cut again before a job lands there, or held.

They are those of NVML's test double under the real binding; Slurm is the fake in memory, then the real one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import redis

from hybridsched.cluster.values import ClusterError, JobSpec
from hybridsched.core.switch_values import Step
from tests.integration.modes_faults import nothing_invalid, without_engines
from tests.integration.modes_rig import ModesTestbed, day_slurm, modes_pool, modes_slurm
from tests.integration.test_modes_driver import DAY, MODES, Host, gpus, host
from tests.nvml_double import Double

__all__ = ["day_slurm", "gpus", "host", "modes_slurm"]

BOOTED, AGAIN = 1_000_000_000.0, 1_000_600_000.0


async def known(host: Host) -> None:
    """At rest by day, and its start is remembered."""
    await host.store.withdraw()
    node = host.slurm.nodes["n1"]
    node.booted_ms = node.started_ms = BOOTED
    for _ in range(3):
        await host.look()
    assert (host.state.booted_ms, host.nothing_half()) == (BOOTED, "day")


def reboot(host: Host, gpus: Double) -> None:
    """The machine comes back: its GPUs are whole, and Slurm uses it again."""
    gpus.reboot(0)
    assert host.hands.stands(MODES.mig_configs["slices"])
    host.slurm.nodes["n1"].booted_ms = host.slurm.nodes["n1"].started_ms = AGAIN


async def test_a_host_that_was_rebooted_is_drained_and_cut_again_before_a_job_lands_there(
    host: Host, gpus: Double
) -> None:
    await known(host)
    reboot(host, gpus)
    await host.look()
    assert "DRAIN" in host.slurm.nodes["n1"].states, "before anything else"
    spec = JobSpec(name="late", script="#!/bin/sh\n", partition="online", gres=DAY[:1])
    job = await host.cluster.submit(spec)
    while host.state.step is not Step.SERVING:
        if host.slurm.jobs[job].value.running:
            assert host.hands.stands(MODES.mig_configs["slices"]) == ""
        await host.look()
    assert host.nothing_half() == "day"
    await host.events.flush()
    assert "its machine was started anew: the GPUs of n1 are not cut" in "".join(
        str(event) for event in await host.events.read_all(kinds=["mode"])
    )
    assert host.state.booted_ms is None or host.state.booted_ms == AGAIN
    cut = len([call for call in host.hands.calls if call[0] == "mig-apply"])
    for _ in range(5):
        await host.look()
    assert len([call for call in host.hands.calls if call[0] == "mig-apply"]) == cut


async def test_a_reboot_that_leaves_the_gpus_as_they_were_costs_a_look(host: Host) -> None:
    await known(host)
    asked = len(host.hands.calls)
    host.slurm.nodes["n1"].booted_ms = AGAIN
    await host.look()
    await host.settle()
    for _ in range(3):
        await host.look()
    assert host.nothing_half() == "day"
    assert host.hands.calls[asked:] == []  # DriverHands notes no mig-assert
    assert (await host.store.durations()).spans == {}


async def test_a_host_that_cannot_be_cut_again_is_held_with_the_reason(host: Host, gpus: Double) -> None:
    await known(host)
    reboot(host, gpus)
    gpus.fail_call("nvmlDeviceCreateGpuInstanceWithPlacement", 999)
    for _ in range(60):
        await host.look()
    assert host.state.step is Step.HELD
    assert "its machine was started anew" in host.state.why
    assert "cut failed" in host.state.why
    assert not any(node.usable for node in await host.cluster.nodes())
    assert host.task.troubles["n1"] == host.state.why


async def test_a_host_that_cannot_be_read_stays_drained_until_it_can(host: Host, gpus: Double) -> None:
    """Nothing is sent away for what is not known, however long, and nothing lands there."""
    await known(host)
    reboot(host, gpus)
    gpus.fail_call("nvmlInitWithFlags", 999)
    for _ in range(60):
        await host.look()
    assert host.state.step is Step.VERIFYING
    assert host.task.troubles["n1"] == host.state.wait != ""
    assert "DRAIN" in host.slurm.nodes["n1"].states
    gpus.fail_call("", 0)
    for _ in range(60):
        await host.look()
    assert host.nothing_half() == "day"


async def test_a_host_that_does_not_come_up_is_cut_again(host: Host, gpus: Double) -> None:
    """Its slurmd finds no slices: Slurm sets it down, or refuses it."""
    await known(host)
    reboot(host, gpus)
    node = host.slurm.nodes["n1"]
    node.states, node.reason = ("DOWN",), "Node unexpectedly rebooted"
    for _ in range(80):
        await host.look()
    assert host.nothing_half() == "day"


async def test_a_host_that_a_person_has_taken_down_is_left_alone(host: Host, gpus: Double) -> None:
    await known(host)
    gpus.reboot(0)
    node = host.slurm.nodes["n1"]
    node.states, node.reason = ("DOWN",), "a fan is broken"
    asked = len(host.hands.calls)
    for _ in range(40):
        await host.look()
    assert (host.state.step, len(host.hands.calls)) == (Step.SERVING, asked)
    assert node.states == ("DOWN",)


@pytest.mark.parametrize("down", [False, True])
async def test_what_an_older_leader_did_late_to_a_host_at_rest_is_put_right(host: Host, down: bool) -> None:
    await known(host)
    if down:
        host.slurm.take_down("n1", "hybridsched: mode day to night")
    else:
        host.slurm.drain("n1", "hybridsched: mode day to night")
    for _ in range(80):
        await host.look()
    assert host.nothing_half() == "day"


async def test_a_hand_that_is_gone_empties_no_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    await known(host)
    error = ClusterError("no such program", code="missing", retryable=False)

    async def gone(*_: object) -> str:
        raise error

    monkeypatch.setattr(host.hands, "differs", gone)
    host.slurm.nodes["n1"].started_ms = AGAIN
    for _ in range(40):
        await host.look()
    assert host.state.step is Step.SERVING
    assert host.task.troubles["n1"] == "no such program"
    assert host.slurm.nodes["n1"].states == ("IDLE",)


@pytest.mark.timeout(120)
async def test_on_real_daemons_a_host_whose_slurmd_comes_back_without_its_layout_is_cut_again(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """The machine is that of the tests: slurmd is started anew, and the record set down as Slurm does it."""
    layout = day_slurm.state / "mig" / "n1"
    async with modes_pool(day_slurm, valkey_url, tmp_path, without_engines()) as pool:
        await pool.at_rest("day", 1)
        await pool.store.order("night", (), by="the test")
        await pool.at_rest("night", 1)
        await pool.store.order("day", (), by="the test")
        await pool.at_rest("day", 1)
        await pool.until(lambda hosts: hosts["n1"].started_ms is not None, "the start of its slurmd")
        wanted = layout.read_bytes()
        for how in ("started anew", "set down"):
            layout.write_bytes(b"whole")
            if how == "started anew":
                await asyncio.sleep(1.1)  # Slurm tells the start in whole seconds
                await asyncio.to_thread(day_slurm.hand, "n1", "slurmd-stop", "n1")
                await asyncio.to_thread(day_slurm.hand, "n1", "slurmd-start", "n1")
            else:
                day_slurm.run(
                    "scontrol", "update", "nodename=n1", "state=down", "reason=Node unexpectedly rebooted"
                )
            await pool.until(lambda hosts: hosts["n1"].step is not Step.SERVING, f"what is done: {how}")
            await pool.at_rest("day", 1)
            assert layout.read_bytes() == wanted
        nothing_invalid(day_slurm)
