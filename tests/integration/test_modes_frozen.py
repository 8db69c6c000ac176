"""A policy worker that is frozen in the middle of a change of mode, and goes on when another has taken over.

On real Slurm daemons. What the frozen one was about to do is done by nobody, however late it would come.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest
import redis

from tests.helpers import await_until
from tests.integration.modes_faults import held_pool, nothing_invalid
from tests.integration.modes_rig import ModesPool, ModesTestbed, day_slurm, modes_slurm

__all__ = ["day_slurm", "modes_slurm"]

POINTS = [
    ("slurmd-stop", 2, "at once"),
    ("mig-apply", 1, "late"),
]
"""A word of the hand and at which of its calls the leader is frozen (after the first it would set the record
down), and when what it had asked for there comes to its end: while it is frozen and nobody has taken
over yet, or when its successor has long gone on, into the night and back."""


async def freeze(pool: ModesPool) -> subprocess.Popen[bytes]:
    """SIGSTOP of the worker that leads."""
    frozen = await pool.leading()
    frozen.send_signal(signal.SIGSTOP)
    return frozen


async def standing(pool: ModesPool) -> tuple[object, ...]:
    """How the host stands: its GPUs, its slurmd, its node records, the journal."""
    slurm = pool.slurm
    layout = (slurm.state / "mig" / "n1").read_text()
    states = {name: re.match(r"[a-z]+", state) for name, state in slurm.states().items()}
    named = {name: found[0] for name, found in states.items() if found is not None}
    # What each look notes of a host at rest; Slurm may say for a moment that it does not use a host yet.
    seen = {"booted_ms": None, "started_ms": None, "wait": ""}
    hosts = {name: msgspec.structs.replace(h, **seen) for name, h in (await pool.state()).hosts.items()}
    return layout, slurm.pid("slurmd-n1"), named, hosts


@pytest.mark.timeout(240)
async def test_a_leader_that_was_frozen_at_a_step_does_nothing_when_it_goes_on(
    day_slurm: ModesTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    async with held_pool(day_slurm, valkey_url, tmp_path) as (pool, faults):
        pool.start()  # a standby
        for n, (word, call, ends) in enumerate(POINTS, start=1):
            faults.hold(word, call)
            await pool.store.order("night", (), by="the test")
            await faults.at(word)
            before = await pool.leader()
            frozen = await freeze(pool)
            try:
                if ends == "at once":
                    faults.release(word)

                async def another(before: str = before) -> bool:
                    return await pool.leader() not in ("", before)

                await await_until(another, timeout_s=20, what="a successor")
                # There and back: what comes late now would cut GPUs or end a slurmd in use.
                await pool.at_rest("night", 1)
                await pool.store.order("day", (), by="the test")
                await pool.at_rest("day", 1)
                stood = await standing(pool)
                if ends == "late":
                    faults.release(word)
                    await faults.left(word)
            finally:
                frozen.send_signal(signal.SIGCONT)

            def stood_down(n: int = n) -> bool:
                return pool.log.read_text().count("policy_leadership_lost") >= n

            await await_until(stood_down, timeout_s=20, what="the old leader to stand by")
            await faults.left(word)
            faults.release(word)
            await pool.at_rest("day", 1)
            assert await standing(pool) == stood
            assert '"selected":"slices"' in stood[0]
        nothing_invalid(day_slurm)
