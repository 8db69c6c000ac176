"""Slurm by its own commands: works with every version, needs nothing but the client package.

Argument lists only, a time limit on every call. Where slurmctld is dead the commands try on for minutes: a
call that has taken `doubt_s` asks `scontrol ping` on the side, and gives up when that says DOWN.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from hybridsched.cluster import checks, parse_json, parse_text
from hybridsched.cluster.parse_words import single_host, with_count
from hybridsched.cluster.rows import Rows
from hybridsched.cluster.run import Answer, base_environment, refusal, run
from hybridsched.cluster.values import (
    ClusterError,
    Job,
    JobChange,
    JobSpec,
    Node,
    Partition,
    Reservation,
    total,
)
from hybridsched.log import get_logger

_ALREADY_DONE = 2021 & 0xFF
"""Exit status of scancel when the job ended under it (ESLURM_ALREADY_DONE of slurm_errno.h, low byte)."""

JSON_AGAIN_S = 60.0
"""After an answer in JSON that could not be read."""

_JSON_NODES = (23, 2)
"""First version whose `scontrol` has --json."""


class CommandCluster:
    """`Cluster` over scontrol, squeue, sbatch and scancel.

    `environment` is the one the commands run in (None: this process's own); `SLURM_CONF` in it says which
    cluster. `timeout_s` bounds each command, `doubt_s` is when a silent one makes us ask whether slurmctld is
    alive, `at_once` how many commands may run side by side.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 15.0,
        ping_timeout_s: float = 3.0,
        doubt_s: float = 1.0,
        at_once: int = 4,
    ) -> None:
        self._plain = base_environment(os.environ if environment is None else environment)
        self._reading = {**self._plain, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        self._timeout_s = timeout_s
        self._ping_timeout_s = ping_timeout_s
        self._doubt_s = doubt_s
        self._slots = asyncio.Semaphore(at_once)
        self._gres_locks: dict[str, asyncio.Lock] = {}
        self._hosts: dict[str, tuple[str, ...]] = {}
        self._version: tuple[int, int] | None = None
        self._no_json: dict[str, float] = {}
        """Commands whose JSON could not be read, and when (`time.monotonic`) it is tried again."""
        self._rows = Rows()
        self._log = get_logger("cluster")

    # -- reading ----------------------------------------------------------------------------------------

    async def ping(self) -> None:
        up, said = await self._pinged()
        if not up:
            raise ClusterError(
                f"no slurmctld answers ({said}); start it, or set SLURM_CONF to the right cluster",
                code="unreachable",
                retryable=True,
            )

    async def config(self, keys: Collection[str]) -> dict[str, str]:
        said = await self._read("read the configuration", "scontrol", "show", "config")
        found = parse_text.parse_config(said.text)
        return {k: found[k] for k in keys if k in found}

    async def jobs(self, *, partitions: Collection[str] = (), ids: Collection[int] = ()) -> tuple[Job, ...]:
        listed = await self._squeue()
        # The filters of squeue do not hold with --json (seen on several versions), so they are applied here.
        wanted = [
            (job, nodes)
            for job, nodes in listed
            if (not partitions or not set(partitions).isdisjoint(job.partition.split(",")))
            and (not ids or job.id in ids)
        ]
        return tuple([await self.with_nodes(job, nodes) for job, nodes in wanted])

    async def nodes(self, names: Collection[str] = ()) -> tuple[Node, ...]:
        picked = [checks.one_node(n) for n in names]
        found: tuple[Node, ...] | None = None
        if await self._has_json("scontrol"):
            found = await self._nodes_json(picked)
        if found is None:
            which = [",".join(picked)] if picked else []
            said = await self._ask(["scontrol", "-a", "-o", "-d", "show", "node", *which])
            if said.status and not (picked and "not found" in said.text + said.err):
                raise refusal("show the nodes", said.complaint)
            found = parse_text.parse_nodes(said.text, self._rows)
        return tuple(n for n in found if not picked or n.name in picked)

    async def partitions(self) -> tuple[Partition, ...]:
        said = await self._read("show the partitions", "scontrol", "-a", "-o", "show", "partition")
        return tuple(
            [
                msgspec.structs.replace(p, nodes=await self.expand(nodes))
                for p, nodes in parse_text.parse_partitions(said.text, self._rows)
            ]
        )

    async def reservations(self) -> tuple[Reservation, ...]:
        said = await self._read("show the reservations", "scontrol", "-a", "-o", "show", "reservation")
        return tuple(
            [
                msgspec.structs.replace(r, nodes=await self.expand(nodes))
                for r, nodes in parse_text.parse_reservations(said.text, self._rows)
            ]
        )

    # -- acting on jobs ---------------------------------------------------------------------------------

    async def submit(self, spec: JobSpec) -> int:
        spec = checks.spec(spec)
        said = await self._ask(
            sbatch_arguments(spec),
            stdin=spec.script.encode() if spec.script is not None else None,
            environment=sbatch_environment(spec, self._plain),
        )
        if said.status:
            raise refusal(f"take job {spec.name!r}", said.complaint)
        number = said.text.strip().splitlines()[-1].split(";")[0] if said.text.strip() else ""
        if not number.isdigit():
            raise ClusterError(
                f"sbatch took job {spec.name!r} and named no job id but {said.text.strip()!r}; look "
                "for it by name in squeue",
                code="unreadable",
                retryable=False,
            )
        return int(number)

    async def signal(self, job: int, name: str, *, steps: bool = False, task: int | None = None) -> None:
        # Without the state filter scancel tries for minutes to signal a job that waits (seen on 22.05).
        which = "--full" if steps else "--batch"
        address = checks.job_address(job, task)
        said = await self._ask(
            ["scancel", "--state=RUNNING", f"--signal={checks.signal_name(name)}", which, address]
        )
        if said.status not in (0, _ALREADY_DONE) or "invalid job id" in said.err.lower():
            raise refusal(f"send {name} to job {address}", said.complaint)

    async def requeue(self, job: int, *, task: int | None = None) -> None:
        address = checks.job_address(job, task)
        await self._do(f"requeue job {address}", "scontrol", "requeue", address)

    async def cancel(self, job: int) -> None:
        said = await self._ask(["scancel", checks.job_id(job)])
        words = said.err.lower()
        gone = "invalid job id" in words or "already compl" in words
        if said.status not in (0, _ALREADY_DONE) and not gone:
            raise refusal(f"cancel job {job}", said.complaint)

    async def update_job(self, job: int, change: JobChange, *, task: int | None = None) -> None:
        number = checks.job_address(job, task)
        fields = []
        if change.comment is not None:
            fields.append("Comment=" + checks.one_line("the comment", change.comment))
        if change.time_limit_min is not None:
            fields.append(f"TimeLimit={change.time_limit_min}")
        if change.requeue is not None:
            fields.append(f"Requeue={int(change.requeue)}")
        if change.start_now:
            fields.append("StartTime=now")
        if change.excluded is not None:
            fields.append("ExcNodeList=" + ",".join(map(checks.one_node, change.excluded)))
        if fields:
            await self._do(f"change job {number}", "scontrol", "update", f"jobid={number}", *fields)
        if change.held is not None:
            word = "hold" if change.held else "release"
            await self._do(f"{word} job {number}", "scontrol", word, number)

    # -- acting on nodes --------------------------------------------------------------------------------

    async def drain(self, node: str, reason: str) -> None:
        which = f"nodename={checks.one_node(node)}"
        words = f"reason={checks.reason(reason)}"
        await self._do(f"drain node {node}", "scontrol", "update", which, "state=drain", words)

    async def down(self, node: str, reason: str) -> None:
        which = f"nodename={checks.one_node(node)}"
        words = f"reason={checks.reason(reason)}"
        await self._do(f"take node {node} out of service", "scontrol", "update", which, "state=down", words)

    async def resume(self, node: str) -> None:
        try:
            which = f"nodename={checks.one_node(node)}"
            await self._do(f"resume node {node}", "scontrol", "update", which, "state=resume")
        except ClusterError as error:
            # Slurm says "Invalid node state" of a node that is up already, and of one that is INVAL.
            if error.code != "refused" or "node state" not in str(error):
                raise
            found = await self.nodes([node])
            if not found or found[0].shut:
                raise

    async def set_gres_count(self, node: str, name: str, count: int) -> None:
        checks.gres_word(name)
        checks.gres_count(count)
        async with self._gres_locks.setdefault(checks.one_node(node), asyncio.Lock()):
            before = await self._one_node(node)
            wanted = with_count(before.gres, name, count)
            await self._do(
                f"set {name} of node {node} to {count}",
                "scontrol",
                "update",
                f"nodename={node}",
                f"gres={wanted}",
            )
            after = await self._one_node(node)
        shown = total(after.gres, name)
        if shown != count:
            raise ClusterError(
                f"Slurm took {name}:{count} for node {node} and shows {shown}; is {name} in GresTypes, in "
                "the node's Gres= and in gres.conf as a GRES without files?",
                code="no_effect",
                retryable=True,
            )

    async def reserve(self, name: str, nodes: Collection[str], start_ms: float, minutes: int) -> None:
        fields = checks.reservation(name, nodes, start_ms, minutes)
        known = {r.name for r in await self.reservations()}
        if name in known:
            await self._do(f"move reservation {name}", "scontrol", "update", f"reservation={name}", *fields)
        else:
            new = checks.new_reservation(pwd.getpwuid(os.geteuid()).pw_name)
            await self._do(
                f"make reservation {name}", "scontrol", "create", f"reservation={name}", *fields, *new
            )

    async def unreserve(self, name: str) -> None:
        checks.gres_word(name)
        if name in {r.name for r in await self.reservations()}:
            await self._do(f"remove reservation {name}", "scontrol", "delete", f"reservation={name}")

    async def reconfigure(self) -> None:
        await self._do("read its configuration again", "scontrol", "reconfigure")

    async def close(self) -> None:
        """Nothing is held between calls."""

    # -- parts ------------------------------------------------------------------------------------------

    async def _one_node(self, node: str) -> Node:
        found = await self.nodes([node])
        if not found:
            raise ClusterError(
                f"Slurm has no node {node!r}; see `sinfo -N`", code="not_found", retryable=False
            )
        return found[0]

    async def _squeue(self) -> list[tuple[Job, str]]:
        if await self._has_json("squeue"):
            said = await self._ask(["squeue", "--all", "--states=all", "--json"])
            if said.status == 0:
                try:
                    found = parse_json.parse_jobs(said.out, self._rows)
                except ClusterError as error:
                    self._give_up_json("squeue", str(error))
                else:
                    self._no_json.pop("squeue", None)
                    return found
            else:
                self._judge_json("squeue", said)
        mark = secrets.token_hex(12)
        form = parse_text.squeue_format(mark)
        said = await self._read("show the jobs", "squeue", "--all", "--states=all", "--noheader", "-o", form)
        return parse_text.parse_jobs(said.text, mark, self._rows)

    async def _nodes_json(self, picked: list[str]) -> tuple[Node, ...] | None:
        """None: JSON is not to be had, read the text."""
        which = [picked[0]] if len(picked) == 1 else []
        said = await self._ask(["scontrol", "-a", "-d", "show", "node", *which, "--json"])
        if said.status and "not found" in said.text + said.err:
            return None
        if said.status:
            self._judge_json("scontrol", said)
            return None
        try:
            return parse_json.parse_nodes(said.out, self._rows)
        except ClusterError as error:
            self._give_up_json("scontrol", str(error))
            return None

    async def _has_json(self, command: str) -> bool:
        if self._version is None:
            said = await self._ask(["scontrol", "--version"])
            self._version = parse_text.parse_version(said.text)
        if command == "scontrol" and self._version < _JSON_NODES:
            return False
        return time.monotonic() >= self._no_json.get(command, 0.0)

    def _judge_json(self, command: str, said: Answer) -> None:
        """A failure of --json: of the option itself, or of Slurm as a whole, which is raised."""
        error = refusal("answer in JSON", said.complaint)
        if error.code in ("unreachable", "denied"):
            raise error
        self._give_up_json(command, said.complaint)

    def _give_up_json(self, command: str, why: str) -> None:
        """For a while: what one job's owner wrote somewhere must not cost the JSON for ever."""
        said = self._log.debug if command in self._no_json else self._log.warning
        self._no_json[command] = time.monotonic() + JSON_AGAIN_S
        said(
            f"{command} gives no JSON that can be read; its text is read for {JSON_AGAIN_S:g} s",
            event_key="cluster.no_json",
            why=why,
        )

    async def with_nodes(self, job: Job, nodes: str) -> Job:
        """The job with its node lists expanded."""
        excluded = await self.expand(",".join(job.excluded))
        required = await self.expand(",".join(job.required))
        there = await self.expand(nodes)
        return msgspec.structs.replace(job, nodes=there, excluded=excluded, required=required)

    async def expand(self, nodes: str) -> tuple[str, ...]:
        """The names in a node list, by `scontrol show hostnames`, which asks no daemon."""
        if not nodes:
            return ()
        if single_host(nodes):
            return (nodes,)
        if nodes not in self._hosts:
            said = await self._read("expand a node list", "scontrol", "show", "hostnames", nodes)
            if len(self._hosts) > 10_000:
                self._hosts.clear()
            self._hosts[nodes] = tuple(said.text.split())
        return self._hosts[nodes]

    async def _read(self, asked: str, *argv: str) -> Answer:
        said = await self._ask(argv)
        if said.status:
            raise refusal(asked, said.complaint)
        return said

    async def _do(self, asked: str, *argv: str) -> None:
        await self._read(asked, *argv)

    async def _ask(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Answer:
        """Run a command; find out early when nobody can answer it."""
        async with self._slots:
            call = asyncio.create_task(
                run(
                    argv,
                    timeout_s=self._timeout_s,
                    environment=environment or self._reading,
                    stdin=stdin,
                )
            )
            try:
                done, _ = await asyncio.wait([call], timeout=self._doubt_s)
                if not done:
                    await self._doubt(argv)
                return await call
            finally:
                if not call.done():
                    call.cancel()
                    await asyncio.wait([call])

    async def _doubt(self, argv: Sequence[str]) -> None:
        """Raise when slurmctld is known to be down; a ping that hangs as well says nothing new."""
        try:
            up, said = await self._pinged()
        except ClusterError as error:
            if error.code != "timeout":
                raise
            return
        if not up:
            raise ClusterError(
                f"`{' '.join(argv[:3])}` waits for slurmctld, which is down ({said}); start it, or set "
                "SLURM_CONF to the right cluster",
                code="unreachable",
                retryable=True,
            )

    async def _pinged(self) -> tuple[bool, str]:
        said = await run(["scontrol", "ping"], timeout_s=self._ping_timeout_s, environment=self._reading)
        up, words = parse_text.parse_ping(said.text)
        return up, words or said.complaint


def sbatch_arguments(spec: JobSpec) -> list[str]:
    """The command line for a job. The signal is not in it: see `sbatch_environment`."""
    options: list[tuple[str, object]] = [
        ("job-name", spec.name),
        ("partition", spec.partition),
        ("gres", ",".join(g.spec() for g in spec.gres) or None),
        ("nodelist", ",".join(spec.nodes) or None),
        ("exclude", ",".join(spec.excluded) or None),
        ("time", spec.time_limit_min),
        ("cpus-per-task", spec.cpus_per_task),
        ("mem", None if spec.memory_mb is None else f"{spec.memory_mb}M"),
        ("comment", spec.comment),
        ("open-mode", "append" if spec.append else None),
        ("output", spec.output),
        ("error", spec.error),
        ("chdir", spec.chdir),
        ("array", spec.array),
        ("account", spec.account),
        ("qos", spec.qos),
        ("uid", spec.user),
    ]
    argv = ["sbatch", "--parsable", *(f"--{k}={v}" for k, v in options if v is not None)]
    if spec.requeue is not None:
        argv.append("--requeue" if spec.requeue else "--no-requeue")
    if spec.hold:
        argv.append("--hold")
    if spec.script_path is not None:
        argv.extend([str(Path(spec.script_path).absolute()), *spec.arguments])
    return argv


def sbatch_environment(spec: JobSpec, base: Mapping[str, str]) -> dict[str, str]:
    """The environment sbatch runs in and hands on to the job.

    The signal goes in here as `SBATCH_SIGNAL`: a job_submit plugin sees the environment, but not --signal.
    """
    found = {**base, **spec.environment}
    if spec.signal is not None:
        found["SBATCH_SIGNAL"] = spec.signal
    return found
