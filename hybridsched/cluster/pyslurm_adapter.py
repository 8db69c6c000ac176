"""Slurm by pyslurm, where the site has the one that matches its Slurm: no process per call, same values.

pyslurm lives in a child process (see `pyslurm_host`), which is killed when a call takes too long and started
anew for the next. What pyslurm gets wrong or cannot do goes through Slurm's commands: the live GRES count,
the configuration, node lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

import msgspec

from hybridsched.cluster import checks
from hybridsched.cluster.commands import CommandCluster, sbatch_environment
from hybridsched.cluster.pyslurm_host import Reply, Request
from hybridsched.cluster.run import base_environment
from hybridsched.cluster.values import (
    ClusterError,
    Gres,
    Job,
    JobChange,
    JobSpec,
    Node,
    Partition,
    Reservation,
)
from hybridsched.process import die_with_parent

_BIGGEST_ANSWER = 256 * 1024 * 1024
"""Bytes of one answer: about 500 for each job."""

T = TypeVar("T")


class PyslurmCluster:
    """`Cluster` over pyslurm. `commands` does what pyslurm cannot; `module` is for a stand-in."""

    def __init__(
        self,
        *,
        commands: CommandCluster,
        module: str = "pyslurm",
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 15.0,
        doubt_s: float = 1.0,
        python: str = sys.executable,
    ) -> None:
        self._commands = commands
        self._module = module
        self._environment = base_environment(os.environ if environment is None else environment)
        self._timeout_s = timeout_s
        self._doubt_s = doubt_s
        self._python = python
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    # -- by pyslurm -------------------------------------------------------------------------------------

    async def ping(self) -> None:
        await self._call(None, "ping")

    async def jobs(self, *, partitions: Collection[str] = (), ids: Collection[int] = ()) -> tuple[Job, ...]:
        found = await self._call(list[tuple[Job, str]], "jobs")
        return tuple(
            [
                await self._commands.with_nodes(job, nodes)
                for job, nodes in found
                if (not partitions or not set(partitions).isdisjoint(job.partition.split(",")))
                and (not ids or job.id in ids)
            ]
        )

    async def submit(self, spec: JobSpec) -> int:
        spec = checks.spec(spec)
        environment = sbatch_environment(spec, self._environment)
        return await self._call(int, "submit", spec=spec, environment=environment)

    async def signal(self, job: int, name: str, *, steps: bool = False, task: int | None = None) -> None:
        if task is not None:  # pyslurm knows jobs by their number only
            await self._commands.signal(job, name, steps=steps, task=task)
            return
        checks.job_id(job)
        await self._call(None, "signal", job, checks.signal_name(name), steps)

    async def requeue(self, job: int, *, task: int | None = None) -> None:
        if task is not None:
            await self._commands.requeue(job, task=task)
            return
        checks.job_id(job)
        await self._call(None, "requeue", job)

    async def cancel(self, job: int) -> None:
        checks.job_id(job)
        await self._call(None, "cancel", job)

    async def update_job(self, job: int, change: JobChange, *, task: int | None = None) -> None:
        # pyslurm takes an empty list for no change, so nothing could be excluded any more.
        if task is not None or change.excluded is not None:
            await self._commands.update_job(job, change, task=task)
            return
        checks.job_id(job)
        if change.comment is not None:
            checks.one_line("the comment", change.comment)
        await self._call(None, "update_job", job, change=change)

    async def nodes(self, names: Collection[str] = ()) -> tuple[Node, ...]:
        picked = [checks.one_node(n) for n in names]
        found = await self._call(list[Node], "nodes")
        holding = [j for j in await self.jobs() if j.running or j.leaving]
        return tuple(
            msgspec.structs.replace(n, gres_used=_used(n, holding))
            for n in found
            if not picked or n.name in picked
        )

    async def drain(self, node: str, reason: str) -> None:
        await self._call(None, "drain", checks.one_node(node), checks.reason(reason))

    async def resume(self, node: str) -> None:
        try:
            await self._call(None, "resume", checks.one_node(node))
        except ClusterError as error:
            if error.code != "refused" or "node state" not in str(error).lower():
                raise
            found = await self.nodes([node])
            if not found or found[0].shut:
                raise

    async def partitions(self) -> tuple[Partition, ...]:
        found = await self._call(list[tuple[Partition, str]], "partitions")
        return tuple([msgspec.structs.replace(p, nodes=await self._commands.expand(n)) for p, n in found])

    async def reservations(self) -> tuple[Reservation, ...]:
        found = await self._call(list[tuple[Reservation, str]], "reservations")
        return tuple([msgspec.structs.replace(r, nodes=await self._commands.expand(n)) for r, n in found])

    # -- by the commands --------------------------------------------------------------------------------

    async def config(self, keys: Collection[str]) -> dict[str, str]:
        return await self._commands.config(keys)

    async def down(self, node: str, reason: str) -> None:
        await self._commands.down(node, reason)

    async def reserve(self, name: str, nodes: Collection[str], start_ms: float, minutes: int) -> None:
        await self._commands.reserve(name, nodes, start_ms, minutes)

    async def unreserve(self, name: str) -> None:
        await self._commands.unreserve(name)

    async def reconfigure(self) -> None:
        await self._commands.reconfigure()

    async def set_gres_count(self, node: str, name: str, count: int) -> None:
        # Node(configured_gres=).modify() returns without an error and changes nothing (25.11.2).
        await self._commands.set_gres_count(node, name, count)

    async def close(self) -> None:
        async with self._turn:
            await self._stop()
        await self._commands.close()

    # -- the child --------------------------------------------------------------------------------------

    async def _call(
        self,
        kind: type[T] | None,
        op: str,
        *args: object,
        spec: JobSpec | None = None,
        environment: dict[str, str] | None = None,
        change: JobChange | None = None,
    ) -> T:
        request = Request(op=op, args=list(args), spec=spec, environment=environment, change=change)
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s):
                    child = self._child or await self._start()
                    reply = await self._ask(child, msgspec.json.encode(request) + b"\n")
            except TimeoutError as error:
                await self._stop()
                raise ClusterError(
                    f"pyslurm gave no answer to {op} within {self._timeout_s:g} s and was stopped; whether "
                    "Slurm acted on it is not known; look at `scontrol ping` and slurmctld's log",
                    code="timeout",
                    retryable=True,
                ) from error
            except BaseException:
                # The answer to a call that was given up must not be taken for the next one's.
                await self._stop()
                raise
        if reply.failure is not None:
            raise reply.failure.error()
        converted: Any = msgspec.convert(reply.value, type=Any if kind is None else kind)
        return cast("T", converted)

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            self._child = await asyncio.create_subprocess_exec(
                *[self._python, "-m", "hybridsched.cluster.pyslurm_host", self._module],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=self._environment,
                limit=_BIGGEST_ANSWER,
                preexec_fn=die_with_parent(),
            )
        except OSError as error:
            raise ClusterError(
                f"the process for pyslurm could not be started, so nothing was asked of Slurm: {error}",
                code="unreachable",
                retryable=True,
            ) from error
        hello = await self._exchange(self._child, b"")
        if hello.failure is not None:
            raise hello.failure.error()
        return self._child

    async def _ask(self, child: asyncio.subprocess.Process, line: bytes) -> Reply:
        """One exchange; where it takes long, ask `scontrol ping` whether anybody is there to answer."""
        exchange = asyncio.create_task(self._exchange(child, line))
        try:
            done, _ = await asyncio.wait([exchange], timeout=self._doubt_s)
            if not done:
                try:
                    await self._commands.ping()
                except ClusterError as error:
                    if error.code == "unreachable":
                        raise
            return await exchange
        finally:
            if not exchange.done():
                exchange.cancel()
                await asyncio.wait([exchange])

    async def _exchange(self, child: asyncio.subprocess.Process, line: bytes) -> Reply:
        if child.stdin is None or child.stdout is None:
            raise ClusterError("pyslurm's process has no pipes", code="died", retryable=True)
        with contextlib.suppress(ConnectionError):  # it died: the end of its output says so below
            child.stdin.write(line)
            await child.stdin.drain()
        said = await child.stdout.readline()
        if not said.endswith(b"\n"):
            status = await child.wait()
            raise ClusterError(
                f"pyslurm's process ended in the middle of a call (status {status}); whether Slurm acted on "
                "it is not known; if it happens again use Slurm's commands",
                code="died",
                retryable=True,
            )
        return msgspec.json.decode(said, type=Reply)

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None or child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _used(node: Node, holding: list[Job]) -> tuple[Gres, ...]:
    """What jobs hold of each GRES of a node. An ask without a type counts for each type there is."""
    asked = [g for j in holding if node.name in j.nodes for g in j.gres]
    kinds = list(dict.fromkeys([(g.name, g.type) for g in (*node.gres, *asked)]))
    typed = {name for name, kind in kinds if kind}
    return tuple(
        Gres(
            name=name,
            type=kind,
            count=sum(g.count for g in asked if g.name == name and g.type in (None, kind)),
        )
        for name, kind in kinds
        if kind or name not in typed
    )
