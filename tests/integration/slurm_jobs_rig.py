"""Offline batches as real Slurm jobs: the testbed, a simulated engine said to run on node n1, and a gate."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridsched.store.connection import async_client
from hybridsched.store.keys import Keys
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from tests.conftest import missing
from tests.helpers import wait_until
from tests.integration.offline_rig import LANE, MODEL, POOL, Door, door
from tests.slurm import Testbed

WORKERS = Path(__file__).resolve().parents[2] / "workers"
BIN = Path(sys.executable).parent / "hybridsched"
NODE = "n1"
KEYS = Keys(POOL)


class Site:
    """One pool on the testbed."""

    def __init__(self, slurm: Testbed, redis_url: str, gate: Door) -> None:
        self.slurm = slurm
        self.gate = gate
        self.environment = {
            "HYBRIDSCHED_REDIS_URL": redis_url,
            "HYBRIDSCHED_POOL": POOL,
            "HYBRIDSCHED_BIN": str(BIN),
        }

    def close_all(self) -> None:
        """No node takes offline jobs."""
        for node in self.slurm.nodes:
            self.slurm.set_fill(node, 0)

    def sbatch(self, *words: str, options: tuple[str, ...] = (), script: Path | None = None) -> int:
        """`sbatch workers/offline.sbatch WORDS` as a user types it; the job's id."""
        out = self.slurm.state / "out"
        out.mkdir(exist_ok=True)
        out.chmod(0o1777)
        said = self.slurm.run(
            "env",
            *(f"{name}={value}" for name, value in self.environment.items()),
            *("sbatch", "--parsable", f"--output={out}/%j.out", *options),
            *(str(script or WORKERS / "offline.sbatch"), *words),
        )
        return int(said.strip().split(";")[0])

    def script(self, body: str) -> Path:
        """A user's own batch script for the offline partition."""
        path = self.slurm.state / "own.sbatch"
        path.write_text(
            "#!/bin/bash\n#SBATCH --partition=offline\n#SBATCH --gres=hsfill:1,hslane:1\n#SBATCH --requeue\n"
            f"#SBATCH --signal=B:USR2@60\n#SBATCH --open-mode=append\n#SBATCH --time=30\n{body}\n"
        )
        return path

    async def wait(self, job: int, *states: str, timeout_s: float = 60) -> dict[str, str]:
        """Wait until the job is in one of `states`; what it said stands in the error when it does not."""
        try:
            return await asyncio.to_thread(self.slurm.wait_job, job, *states, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.slurm.output(job)[-4000:]}") from None


@asynccontextmanager
async def site(slurm: Testbed, redis_url: str, engine_url: str) -> AsyncIterator[Site]:
    """The pool, with its replica's record and its gate renewed until the end.

    Only the node with the lane takes offline jobs, as the policy worker would have it.
    """
    for node in slurm.nodes:
        if node != NODE:
            await asyncio.to_thread(slurm.set_fill, node, 0)
    client = async_client(redis_url)
    store = TelemetryStore(client, POOL)

    async def replica() -> None:
        while True:
            await store.publish(
                ReplicaRecord(replica=LANE, model=MODEL, lane=LANE, url=engine_url, node=NODE)
            )
            await asyncio.sleep(0.5)

    async with door(redis_url) as gate:
        publishing = asyncio.create_task(replica())
        try:
            yield Site(slurm, redis_url, gate)
        finally:
            await end_tasks(publishing)
            await client.aclose()
            await asyncio.to_thread(slurm.clear)


def bin_for_others(folder: Path) -> Path:
    """A `hybridsched` that any user may run: the environment of the tests may lie in a private folder."""
    shims = folder / "shims"
    shims.mkdir(exist_ok=True)
    # What redis-py needs on a Python before 3.11.3, and was not installed for this newer one.
    (shims / "async_timeout.py").write_text("from asyncio import timeout as timeout\n")
    libraries = f"{WORKERS.parent}:{sysconfig.get_paths()['purelib']}:{shims}"
    for python in (sys.executable, "/usr/bin/python3.11", "/usr/bin/python3"):
        try:
            probe = subprocess.run(
                [python, "-c", "import hybridsched.cli.main, msgspec, redis"],
                user=65534,
                group=65534,
                cwd="/",
                env={"PYTHONPATH": libraries},
                capture_output=True,
                check=False,
            )
        except OSError:
            continue
        if probe.returncode == 0:
            program = folder / "hybridsched-for-others"
            program.write_text(f'#!/bin/bash\nPYTHONPATH="{libraries}" exec {python} -m hybridsched "$@"\n')
            program.chmod(0o755)
            return program
    missing("a Python that another user may run")
    raise AssertionError


def is_root() -> bool:
    return os.geteuid() == 0


async def until(check: Callable[[], object], *, timeout_s: float = 40, what: str) -> None:
    """Poll in a thread: the loop renews the gate meanwhile."""
    await asyncio.to_thread(wait_until, check, timeout_s=timeout_s, what=what)


BATCH_LINES = 160
CASE_SPEED = 2.0


@dataclass(frozen=True)
class BatchCase:
    """A batch (of BATCH_LINES lines, or as many as the test asks for), what it gives undisturbed, and an
    engine on which it takes long enough to be interrupted."""

    source: Path
    expected: dict[str, Any]
    slurm: Testbed
    redis_url: str
    engine_url: str
    speed: tuple[str, str] = ("--speed", str(CASE_SPEED))
    """Words for the job: how fast that engine's clock runs."""

    def site(self) -> AbstractAsyncContextManager[Site]:
        """See `site`."""
        return site(self.slurm, self.redis_url, self.engine_url)
