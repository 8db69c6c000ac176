"""Holding a policy worker up in the middle of a change of mode: then it is in that step for certain."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_values import Step
from tests.helpers import alive, await_until
from tests.integration.modes_rig import HAND, ModesPool, ModesTestbed, modes_pool, two_modes

POINTS = [
    ("slurmd-stop", Step.EMPTY),
    ("down", Step.EMPTY),
    ("mig-apply", Step.CUTTING),
    ("slurmd-start", Step.CONFIGURING),
    ("resume", Step.VERIFYING),
]
"""A word of the hand, or the state that scontrol sets a node to, at which the worker is held up, and the step
of the host then. The hand is held up before it has done anything, scontrol when it has: done, and the answer
never came. The tests have `draining` with a job, and `warming`, besides."""


class Faults:
    """The testbed's hand and scontrol for one pool, held up at a word while the test wants it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_ = folder / "bin"
        bin_.mkdir()
        self.hand = bin_ / "hand"
        self._program(self.hand, f'word=$2\nhold\nexec "{HAND}" "$@"\n')
        real = shutil.which("scontrol")
        states = "word=none\nfor given; do [[ $given != state=* ]] || word=${given#state=}; done\n"
        self._program(bin_ / "scontrol", f'{states}"{real}" "$@"\nstatus=$?\nhold\nexit $status\n')

    def _program(self, path: Path, body: str) -> None:
        path.write_text(
            "#!/bin/bash\n"
            "hold() {\n"
            f'  local calls="{self.folder}/calls-$word" held="{self.folder}/hold-$word" call\n'
            "  [[ -e $held ]] || return 0\n"
            '  echo >> "$calls"\n'
            '  call=$(wc -l < "$calls")\n'
            '  while [[ -e $held ]] && ((call == $(cat "$held"))); do\n'
            f'    echo $$ > "{self.folder}/at-$word"\n'
            "    sleep 0.05\n"
            "  done\n"
            "}\n" + body
        )
        path.chmod(0o755)

    def take(self, pool: ModesPool) -> None:
        """Have the pool's policy workers use them."""
        pool.environment["HYBRIDSCHED_HAND"] = str(self.hand)
        pool.environment["PATH"] = f"{self.folder}/bin:{pool.environment['PATH']}"

    def hold(self, word: str, call: int = 1) -> None:
        """At the `call`-th call from now; the others pass."""
        for mark in ("at", "calls"):
            (self.folder / f"{mark}-{word}").unlink(missing_ok=True)
        (self.folder / f"hold-{word}").write_text(str(call))

    def release(self, word: str) -> None:
        """Let whoever is held up at it go on."""
        (self.folder / f"hold-{word}").unlink(missing_ok=True)

    async def at(self, word: str) -> int:
        """Wait until somebody is held up there; its pid."""
        mark = self.folder / f"at-{word}"
        await await_until(lambda: mark.exists() and mark.read_text(), timeout_s=30, what=f"a call of {word}")
        return int(mark.read_text())

    async def left(self, word: str) -> None:
        """Wait until whoever was held up there is no more."""
        pid = int((self.folder / f"at-{word}").read_text())
        await await_until(lambda: not alive(pid), timeout_s=30, what=f"the end of a call of {word}")


def without_engines() -> ModesPolicy:
    """One host, two modes, nothing on them."""
    modes = two_modes(1)
    return msgspec.structs.replace(
        modes,
        act_ms=60_000.0,
        mode=tuple(msgspec.structs.replace(mode, engines=()) for mode in modes.mode),
    )


def nothing_invalid(slurm: ModesTestbed) -> None:
    """No node was ever refused for its GRES."""
    assert not re.search(r"count (reported lower|changed)|INVALID_REG", slurm.log())
    assert not [state for state in slurm.states().values() if "inval" in state]


async def other_mode(pool: ModesPool, n: int) -> str:
    """Order the mode that the host does not stand in."""
    mode = ("night", "day")[n % 2]
    await pool.store.order(mode, (), by="the test")
    return mode


@asynccontextmanager
async def held_pool(slurm: ModesTestbed, url: str, folder: Path) -> AsyncIterator[tuple[ModesPool, Faults]]:
    """A pool by day, without engines, and what holds its policy worker up."""
    faults = Faults(folder)
    async with modes_pool(slurm, url, folder, without_engines(), start=False) as pool:
        faults.take(pool)
        pool.start()
        await pool.at_rest("day", 1)
        yield pool, faults


async def draining(pool: ModesPool) -> tuple[int, str]:
    """From the day to where the host drains, for a job is still there: the job, and the mode ordered."""
    job = pool.slurm.sbatch("-p", "online", "-w", "n1", script="#!/bin/bash\nexec sleep 600\n")
    await asyncio.to_thread(pool.slurm.wait_job, job, "RUNNING")
    mode = await other_mode(pool, 0)
    await pool.until(lambda hosts: hosts["n1"].step is Step.DRAINING, "a host that drains")
    return job, mode
