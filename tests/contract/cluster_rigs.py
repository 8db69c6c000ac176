"""The three clusters that the contract suite runs over, each with the same levers on the world behind it."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import msgspec

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.fake import FakeCluster, FakeSlurm
from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.pyslurm_adapter import PyslurmCluster
from hybridsched.cluster.values import ClusterError, Gres, JobChange, JobSpec, Reservation
from tests.slurm import Testbed

ROOT = Path(__file__).resolve().parents[2]
LANE = (Gres(name="hsfill"), Gres(name="hslane"))
SCRIPT = """#!/bin/bash
#SBATCH --signal=B:USR2@60 --open-mode=append
trap 'echo got USR2; exit 0' USR2
echo started "${SLURM_RESTART_COUNT:-0}"
sleep 120 &
wait
"""


class Rig(Protocol):
    cluster: Cluster
    start_wait_s: float
    """How long Slurm may take to start a job."""

    def reconfigure(self) -> None: ...

    def controller(self, *, up: bool) -> None: ...

    def reserve(self, name: str, node: str) -> None: ...

    def got_signal(self, job: int) -> bool: ...

    async def close(self) -> None: ...


def offline(rig: Rig, name: str = "hs-test", **changes: object) -> JobSpec:
    spec = JobSpec(
        name=name,
        script=SCRIPT,
        partition="offline",
        gres=LANE,
        time_limit_min=10,
        requeue=True,
        append=True,
        comment="batch=b1 with = and blanks",
        output=output_of(rig),
    )
    return msgspec.structs.replace(spec, **changes)


def output_of(rig: Rig) -> str | None:
    return f"{rig.folder}/%j.out" if isinstance(rig, RealRig) else None


class FakeRig:
    start_wait_s = 1.0

    def __init__(self) -> None:
        self.slurm = FakeSlurm()
        self.cluster: Cluster = FakeCluster(self.slurm)

    def reconfigure(self) -> None:
        self.slurm.reconfigure()

    def controller(self, *, up: bool) -> None:
        self.slurm.down = not up

    def reserve(self, name: str, node: str) -> None:
        self.slurm.reservations = (Reservation(name=name, nodes=(node,), start_ms=1e12, end_ms=2e12),)

    def got_signal(self, job: int) -> bool:
        return (job, "USR2", False) in self.slurm.signals

    async def close(self) -> None:
        await self.cluster.close()


class RealRig:
    start_wait_s = 15.0

    def __init__(self, testbed: Testbed) -> None:
        self.testbed = testbed
        self.cluster: Cluster = CommandCluster(environment=testbed.env)
        self.folder = testbed.state / "out"
        self.folder.mkdir(exist_ok=True, mode=0o1777)
        self._reserved: list[str] = []

    def reconfigure(self) -> None:
        self.testbed.run("scontrol", "reconfigure")

    def controller(self, *, up: bool) -> None:
        if up:
            self.testbed.up()
        else:
            self.testbed.kill("slurmctld", 15)

    def reserve(self, name: str, node: str) -> None:
        fields = [
            "starttime=now+3600",
            "duration=60",
            "flags=DAILY,IGNORE_JOBS",
            f"nodes={node}",
            "users=root",
        ]
        self.testbed.run("scontrol", "create", "reservation", f"reservationname={name}", *fields)
        self._reserved.append(name)

    def got_signal(self, job: int) -> bool:
        return "got USR2" in self.testbed.output(job)

    async def close(self) -> None:
        await self.cluster.close()
        for name in self._reserved:
            self.testbed.run("scontrol", "delete", f"reservationname={name}")


class RealPyslurmRig(RealRig):
    """pyslurm itself on real daemons: where both are, as in the root of slurm/pyslurm-root.sh."""

    def __init__(self, testbed: Testbed) -> None:
        super().__init__(testbed)
        environment = {**testbed.env, "PYTHONPATH": str(ROOT)}
        self.cluster = PyslurmCluster(
            commands=CommandCluster(environment=testbed.env), environment=environment
        )


class StandinCommands(CommandCluster):
    """What the pyslurm adapter leaves to the commands, done on the stand-in's state."""

    def __init__(self, rig: StandinRig) -> None:
        super().__init__(environment={})
        self._rig = rig

    async def set_gres_count(self, node: str, name: str, count: int) -> None:
        with self._rig.state() as slurm:
            slurm.set_gres_count(node, name, count)

    async def update_job(self, job: int, change: JobChange, *, task: int | None = None) -> None:
        with self._rig.state() as slurm:
            slurm.update(job, change, task)

    async def down(self, node: str, reason: str) -> None:
        with self._rig.state() as slurm:
            slurm.take_down(node, reason)

    async def reserve(self, name: str, nodes: Collection[str], start_ms: float, minutes: int) -> None:
        with self._rig.state() as slurm:
            slurm.reserve(name, nodes, start_ms, minutes)

    async def unreserve(self, name: str) -> None:
        with self._rig.state() as slurm:
            slurm.reservations = tuple(r for r in slurm.reservations if r.name != name)

    async def config(self, keys: Collection[str]) -> dict[str, str]:
        with self._rig.state() as slurm:
            return {k: slurm.config[k] for k in keys if k in slurm.config}

    async def ping(self) -> None:
        with self._rig.state():
            pass

    async def expand(self, nodes: str) -> tuple[str, ...]:
        return tuple(filter(None, nodes.split(",")))


class _State:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> FakeSlurm:
        self.slurm = msgspec.json.decode(self.path.read_bytes(), type=FakeSlurm)
        if self.slurm.down:
            raise ClusterError("no slurmctld answers", code="unreachable", retryable=True)
        return self.slurm

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(msgspec.json.encode(self.slurm))


class StandinRig:
    start_wait_s = 5.0

    def __init__(self, folder: Path) -> None:
        self.path = folder / "standin.json"
        self.path.write_bytes(msgspec.json.encode(FakeSlurm()))
        self.pyslurm = PyslurmCluster(
            commands=StandinCommands(self),
            module="tests.contract.standin_pyslurm",
            environment={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "STANDIN_PYSLURM_STATE": str(self.path),
            },
            python=sys.executable,
            timeout_s=20.0,
        )
        self.cluster: Cluster = self.pyslurm

    def state(self) -> _State:
        return _State(self.path)

    def reconfigure(self) -> None:
        with self.state() as slurm:
            slurm.reconfigure()

    def controller(self, *, up: bool) -> None:
        slurm = msgspec.json.decode(self.path.read_bytes(), type=FakeSlurm)
        slurm.down = not up
        self.path.write_bytes(msgspec.json.encode(slurm))

    def reserve(self, name: str, node: str) -> None:
        with self.state() as slurm:
            slurm.reservations = (Reservation(name=name, nodes=(node,), start_ms=1e12, end_ms=2e12),)

    def got_signal(self, job: int) -> bool:
        with self.state() as slurm:
            return (job, "USR2", False) in slurm.signals

    async def close(self) -> None:
        await self.cluster.close()
