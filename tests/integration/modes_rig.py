"""A testbed whose hosts have two node records each: `n1` with four slices by day, `night-n1` with two GPUs.

The pool on it: a policy worker in a process of its own or in this one, replicas of a simulated engine.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from hybridsched.core.autonomy import Autonomy
from hybridsched.core.mig import LayoutEntry
from hybridsched.core.modes import HostGroup, Mode, ModeEngine, ModesPolicy, Window
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.switch_values import HostState, Step, SwitchState
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.keys import Keys
from hybridsched.store.modes import ModeStore
from hybridsched.store.policy import PolicyStore
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from tests.helpers import await_until
from tests.integration.online_rig import MODEL, POOL
from tests.integration.policy_pool import policy
from tests.slurm import TESTBED, Testbed, new_state, require_slurm, sweep

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent / "hybridsched"
HAND = TESTBED / "hand"
SLICES, WHOLE = 4, 2
SLURM = SlurmPolicy(enabled=True, observe_ms=500.0, reassert_ms=500.0, notice_s=10, stop_ms=10_000.0)


class ModesTestbed(Testbed):
    """The testbed, with the second record of each host and the files of the hand."""

    def __init__(self, state: Path, *, nodes: int = 4) -> None:
        super().__init__(state, "--type", "1g.10gb", nodes=nodes, gpus=SLICES, records=2)
        self.up("--prepare")
        conf, gres = self.conf, state / "etc" / "gres.conf"
        files = re.search(r"File=(\S+)", gres.read_text())
        assert files is not None
        text = conf.read_text()
        listed = f"n[1-{nodes}]"
        text = text.replace(f"Nodes={listed}", f"Nodes={listed},night-{listed}")
        lines = gres.read_text()
        for i, node in enumerate(self.nodes, start=1):
            port = self.port_base + 10 + nodes + i
            counts = f"hsfill:no_consume:{SLICES},hslane:{SLICES}"
            record = f"NodeName=night-{node} NodeAddr=127.0.0.1 Port={port} Gres=gpu:a100:{WHOLE},{counts}\n"
            text = text.replace("# The parked node", record + "# The parked node", 1)
            lines += f"NodeName=night-{node} Name=gpu Type=a100 File={_first(files[1], WHOLE)}\n"
            lines += f"NodeName=night-{node} Name=hsfill Count={SLICES}\n"
            lines += f"NodeName=night-{node} Name=hslane Count={SLICES}\n"
        conf.write_text(text)
        gres.write_text(lines)

    def begin(self) -> None:
        """Up, every host in its record of the day."""
        self.up()
        for node in self.nodes:
            self.hand(node, "slurmd-stop", f"night-{node}")
            self.run("scontrol", "update", f"nodename=night-{node}", "state=down", "reason=by day")

    def hand(self, *words: str) -> None:
        self.run(str(HAND), *words, timeout_s=60)

    def by_day(self) -> None:
        """Back to that, whatever a test left."""
        self.up()
        for node in self.nodes:
            night = self.node(f"night-{node}")["State"]
            if "DOWN" not in night:
                self.hand(node, "slurmd-stop", f"night-{node}")
                self.run("scontrol", "update", f"nodename=night-{node}", "state=down", "reason=by day")
            self.hand(node, "slurmd-start", node)
        self.clear()

    def states(self) -> dict[str, str]:
        """Node record -> its state, of all but the parked one."""
        said = self.run("sinfo", "-h", "-N", "-o", "%N %T")
        found = dict(line.split()[:2] for line in said.splitlines())
        found.pop("hspark", None)
        return found


def _first(files: str, count: int) -> str:
    return re.sub(r"\[0-\d+\]", f"[0-{count - 1}]", files)


@pytest.fixture(scope="module")
def modes_slurm() -> Iterator[ModesTestbed]:
    """For one module of tests."""
    require_slurm()
    sweep()
    testbed = ModesTestbed(new_state())
    try:
        testbed.begin()
        yield testbed
    finally:
        testbed.down()


@pytest.fixture
def day_slurm(modes_slurm: ModesTestbed) -> ModesTestbed:
    """The same, every host by day, without jobs."""
    modes_slurm.by_day()
    return modes_slurm


def two_modes(hosts: int = 2, **changes: Any) -> ModesPolicy:
    """By day slices, at night whole GPUs. No windows: a test orders what it wants."""
    small = ModeEngine(model=MODEL, gres="gpu:1g.10gb:1", floor=1, warm_ms=20_000.0, time_limit_s=36_000)
    big = msgspec.structs.replace(small, gres="gpu:a100:1")
    given: dict[str, Any] = {
        "enabled": True,
        "autonomy": Autonomy.AUTO,
        "act_ms": 15_000.0,
        "drain_ms": 20_000.0,
        "requeue_ms": 20_000.0,
        "mig_configs": {
            "slices": (LayoutEntry(mig_enabled=True, mig_devices={"1g.10gb": 7}),),
            "whole": (LayoutEntry(mig_enabled=False),),
        },
        "hosts": (HostGroup(names=f"n[1-{hosts}]", gpu="a100-80gb", gpus=WHOLE),),
        "mode": (
            Mode(name="day", layout="slices", engines=(small,)),
            Mode(name="night", layout="whole", node="night-{host}", engines=(big,)),
        ),
    }
    return ModesPolicy(**(given | changes))


def windows(modes: ModesPolicy, **named: Window) -> ModesPolicy:
    """The modes with one window each."""
    return msgspec.structs.replace(
        modes,
        mode=tuple(
            msgspec.structs.replace(mode, windows=(named[mode.name],), early=mode.name == "day")
            for mode in modes.mode
        ),
    )


class ModesPool:
    """What a test sees of the pool."""

    def __init__(self, slurm: ModesTestbed, client: Redis, url: str, folder: Path) -> None:
        self.slurm, self.client, self.url, self.folder = slurm, client, url, folder
        self.store = ModeStore(client, POOL)
        self.telemetry = TelemetryStore(client, POOL)
        self.log = folder / "policy.log"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **slurm.env,
            "HYBRIDSCHED_BIN": str(BIN),
            "HYBRIDSCHED_ENGINE": "simulated",
            "HYBRIDSCHED_DRAIN_S": "2",
            "HYBRIDSCHED_HAND": str(HAND),
            "PYTHONPATH": str(ROOT),
        }

    def start(self) -> None:
        """A policy worker in a process of its own. The first leads, the others stand by."""
        with self.log.open("ab") as out:
            worker = subprocess.Popen(
                [
                    *(sys.executable, "-m", "hybridsched", "worker", "policy", "--redis", self.url),
                    *("--pool", POOL, "--scripts", str(ROOT)),
                ],
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
            )
        self.workers.append(worker)

    async def leader(self) -> str:
        """Token of the worker that leads; empty: none does now."""
        return (await self.client.get(Keys(POOL).leader) or b"").decode()

    async def leading(self) -> subprocess.Popen[bytes]:
        """The worker that leads."""
        pid = int((await self.leader()).split(":")[2])
        (leader,) = [worker for worker in self.workers if worker.pid == pid]
        return leader

    async def kill_leader(self) -> None:
        """kill -9 of the worker that leads; another standby is started."""
        leader = await self.leading()
        leader.send_signal(signal.SIGKILL)
        await asyncio.to_thread(leader.wait, 10)
        self.workers.remove(leader)
        self.start()

    def stop(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.wait(20)

    async def state(self) -> SwitchState:
        return await self.store.journal() or SwitchState()

    async def until(
        self, check: Callable[[dict[str, HostState]], object], what: str, timeout_s: float = 40
    ) -> dict[str, HostState]:
        """Wait until the journal is as `check` wants it."""
        found: dict[str, HostState] = {}

        async def there() -> object:
            found.clear()
            found.update((await self.state()).hosts)
            return check(found)

        try:
            await await_until(there, timeout_s=timeout_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}; {found}\n{self.log.read_text()[-3000:]}") from None
        return found

    async def at_rest(self, mode: str, hosts: int, timeout_s: float = 60) -> None:
        """Every host stands in a mode, and Slurm says the same."""

        def there(found: dict[str, HostState]) -> bool:
            return len(found) == hosts and all(
                h.mode == mode and h.step is Step.SERVING for h in found.values()
            )

        await self.until(there, f"{hosts} hosts in {mode}", timeout_s)
        states = self.slurm.states()
        up, down = ("", "night-") if mode == "day" else ("night-", "")
        for i in range(1, hosts + 1):
            assert re.match(r"idle|mixed|allocated", states[f"{up}n{i}"]), states
            assert re.match(r"down|drained", states[f"{down}n{i}"]), states

    async def serving(self) -> dict[str, ReplicaRecord]:
        """Replicas with a healthy engine, by job."""
        known = (await self.telemetry.read_all()).replicas.values()
        return {r.job: r for r in known if r is not None and r.engine.healthy == 1.0}

    async def events(self, *kinds: str) -> list[dict[str, Any]]:
        return await EventLog(self.client, POOL).read_all(kinds=list(kinds))


@asynccontextmanager
async def modes_pool(
    slurm: ModesTestbed, url: str, folder: Path, modes: ModesPolicy, *, start: bool = True
) -> AsyncIterator[ModesPool]:
    """The pool with a policy worker, until the end."""
    client = async_client(url)
    await PolicyStore(client, POOL).set(policy(slurm=SLURM, modes=modes))
    made = ModesPool(slurm, client, url, folder)
    if start:
        made.start()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.stop)
        await asyncio.to_thread(slurm.by_day)
        await client.aclose()
