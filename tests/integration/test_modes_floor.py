"""A host that holds every replica of the floor is ordered away, on real Slurm daemons."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import redis

from hybridsched.core.switch_values import Step
from hybridsched.store.tasks import end_tasks
from tests.helpers import await_until
from tests.integration.modes_rig import ModesPool, ModesTestbed, day_slurm, modes_pool, modes_slurm, two_modes

__all__ = ["day_slurm", "modes_slurm"]


async def watch(pool: ModesPool, seen: list[int]) -> None:
    """How many replicas serve, again and again."""
    while True:
        seen.append(len(await pool.serving()))
        await asyncio.sleep(0.1)


def nodes_of(slurm: ModesTestbed) -> list[str]:
    """Where jobs run."""
    return sorted(slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%N").split())


@pytest.mark.timeout(120)
async def test_its_successors_start_on_another_host_and_then_it_leaves(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    modes = two_modes(2, drain_ms=60_000.0)
    engines = [msgspec.structs.replace(mode.engines[0], warm_ms=60_000.0) for mode in modes.mode]
    modes = msgspec.structs.replace(
        modes,
        mode=tuple(
            msgspec.structs.replace(mode, engines=(engine,))
            for mode, engine in zip(modes.mode, engines, strict=True)
        ),
    )
    day_slurm.run("scontrol", "update", "nodename=n[2-4]", "state=drain", "reason=both on n1")
    async with modes_pool(day_slurm, valkey_url, tmp_path, modes) as pool:

        async def both() -> bool:
            return len(await pool.serving()) == 2

        await await_until(both, timeout_s=60, what="two replicas")
        assert await asyncio.to_thread(nodes_of, day_slurm) == ["n1", "n1"]
        day_slurm.run("scontrol", "update", "nodename=n[2-4]", "state=resume")
        seen: list[int] = []
        watching = asyncio.create_task(watch(pool, seen))
        try:
            # The two others belong to no host of the modes: successors could go there as well, as strays.
            await pool.store.order("night", ("n1",), by="the test")
            await pool.until(
                lambda hosts: hosts["n1"].mode == "night" and hosts["n1"].step is Step.SERVING,
                "n1 in the night",
                90,
            )
        finally:
            await end_tasks(watching)
        assert min(seen) >= 1, "the floor"
        where = await asyncio.to_thread(nodes_of, day_slurm)
        assert "night-n1" in where
        assert any(node != "night-n1" for node in where)
        log = pool.log.read_text()
        assert "successor of one whose host is to change its mode" in log
