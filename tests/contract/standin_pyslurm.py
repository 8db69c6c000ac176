"""A stand-in for the module pyslurm 25.11.2: its names and shapes, over a `FakeSlurm` kept in a file.

Names are those of the real one's listing (classes, methods, attributes used); shapes are those of its source:
GRES as dictionaries `{"gpu:a100": 4}`, times in seconds, limits in minutes, 0 read as nothing where it does.
Its faults are here too: an array's task 0 is None, a string for `configured_gres` changes nothing, and the
calls that end the real one's process end this one's.
"""

from __future__ import annotations

import enum
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from hybridsched.cluster.fake import FakeSlurm
from hybridsched.cluster.values import ClusterError, Gres, JobChange, JobSpec

STATE = Path(os.environ["STANDIN_PYSLURM_STATE"])


def load() -> FakeSlurm:
    return msgspec.json.decode(STATE.read_bytes(), type=FakeSlurm)


def save(slurm: FakeSlurm) -> None:
    part = STATE.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(slurm))
    part.replace(STATE)


class PyslurmError(Exception):
    pass


class RPCError(PyslurmError):
    def __init__(self, errno: int = -1, msg: str | None = None) -> None:
        super().__init__(msg or f"errno {errno}")


class _Session:
    """One RPC: the state read, changed, written; the fake's errors become RPCErrors with Slurm's words."""

    def __enter__(self) -> FakeSlurm:
        self.slurm = load()
        if self.slurm.down:
            raise RPCError(msg="Unable to contact slurm controller (connect failure)")
        return self.slurm

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        save(self.slurm)
        if isinstance(error, ClusterError):
            raise RPCError(msg=str(error).partition(": ")[2] or str(error)) from error


def _gres_dict(gres: tuple[Gres, ...]) -> dict[str, int]:
    return {f"{g.name}:{g.type}" if g.type else g.name: g.count for g in gres}


def _accounted(gres: tuple[Gres, ...]) -> dict[str, int]:
    """Of `Node.allocated_gres`: only what is accounted, and the typed ones twice."""
    return {k: g.count for g in gres if g.name == "gpu" for k in ("gpu", f"gpu:{g.type}")}


def _noval(value: int | None) -> int | None:
    """The real one's u32_parse takes 0 for nothing."""
    return value or None


class JobSubmitDescription:
    def __init__(self, **fields: Any) -> None:
        listed = (
            "name account comment working_directory qos standard_output standard_error gres_per_node "
            "required_nodes excluded_nodes partitions begin_time time_limit priority cpus_per_task "
            "is_requeueable log_files_open_mode script script_args environment memory_per_node array user_id "
            "signal"
        )
        known = set(listed.split())
        if set(fields) - known:
            raise AttributeError(f"no attribute {sorted(set(fields) - known)}")
        self.fields = fields

    def submit(self) -> int:
        f = self.fields
        if not f.get("environment"):
            raise RPCError(msg="Environment is missing in job")
        if not f.get("script"):
            raise ValueError("You need to provide a batch script.")
        limit = f.get("time_limit")
        if f.get("signal") and not re.fullmatch(r"(B:)?SIG[A-Z0-9]+(@\d+)?", f["signal"]):
            raise ValueError(f"Invalid Signal: {f['signal']}.")
        with _Session() as slurm:
            return slurm.submit(
                JobSpec(
                    name=f.get("name", ""),
                    script="#!/bin/sh\n",
                    partition=f.get("partitions"),
                    gres=tuple(
                        Gres(name=k.partition(":")[0], type=k.partition(":")[2] or None, count=n)
                        for k, n in (f.get("gres_per_node") or {}).items()
                    ),
                    nodes=tuple(f.get("required_nodes") or ()),
                    excluded=tuple(f.get("excluded_nodes") or ()),
                    time_limit_min=None if limit is None else _minutes(limit),
                    comment=f.get("comment"),
                    requeue=f.get("is_requeueable"),
                    hold=f.get("priority") == 0,
                    signal=f.get("signal"),
                    environment=f["environment"],
                    user=f.get("user_id"),
                )
            )


def _minutes(text: str) -> int:
    hours, minutes, _ = text.split(":")
    return int(hours) * 60 + int(minutes)


class Job:
    def __init__(self, job_id: int) -> None:
        self.id = job_id

    @staticmethod
    def load(job_id: int) -> Job:
        with _Session() as slurm:
            slurm._known(job_id)
            return _job(slurm, job_id)

    def send_signal(self, signal: str, steps: str = "children", hurry: bool = False) -> None:
        assert steps in ("all", "batch", "children")
        with _Session() as slurm:
            if slurm._known(self.id).value.pending:
                raise RPCError(msg="Job/step already completing or completed")
            slurm.signal(self.id, signal, steps == "all")

    def cancel(self) -> None:
        with _Session() as slurm:
            slurm.cancel(self.id)

    def requeue(self, hold: bool = False) -> None:
        with _Session() as slurm:
            slurm.requeue(self.id)

    def hold(self, mode: str | None = None) -> None:
        with _Session() as slurm:
            slurm.update(self.id, JobChange(held=True))

    def release(self) -> None:
        with _Session() as slurm:
            slurm.update(self.id, JobChange(held=False))

    def modify(self, changes: JobSubmitDescription) -> None:
        f = changes.fields
        limit = f.get("time_limit")
        with _Session() as slurm:
            slurm.update(
                self.id,
                JobChange(
                    comment=f.get("comment"),
                    time_limit_min=None if limit is None else _minutes(limit),
                    start_now=f.get("begin_time") == "now",
                    requeue=f.get("is_requeueable"),
                ),
            )

    def get_resource_layout_per_node(self) -> None:
        os.kill(os.getpid(), 11)


def _job(slurm: FakeSlurm, job_id: int) -> Job:
    v = slurm.jobs[job_id].value
    job = Job(job_id)
    job.__dict__.update(
        name=v.name,
        user_name=v.user,
        partition=v.partition,
        state=v.state,
        state_reason=v.reason or None,
        allocated_nodes=",".join(v.nodes) or None,
        gres_per_node=_gres_dict(v.gres),
        excluded_nodes=",".join(v.excluded) or None,
        required_nodes=",".join(v.required) or None,
        comment=v.comment or None,
        requeue_count=v.restarts,
        priority=v.priority,
        submit_time=_noval(int((v.submit_ms or 0) / 1000)),
        start_time=_noval(int((v.start_ms or v.begin_ms or 0) / 1000)),
        end_time=_noval(int((v.end_ms or 0) / 1000)),
        time_limit="UNLIMITED" if v.time_limit_ms is None else int(v.time_limit_ms / 60_000),
        array_id=_noval(v.array_job),
        array_task_id=_noval(v.array_task),
        array_tasks_waiting=v.array_waiting or None,
    )
    return job


class Jobs(dict[int, Job]):
    @staticmethod
    def load() -> Jobs:
        with _Session() as slurm:
            return Jobs({n: _job(slurm, n) for n in slurm.jobs})


class Node:
    def __init__(self, name: str | None = None, **changes: Any) -> None:
        if set(changes) - {"state", "reason", "comment", "weight", "configured_gres"}:
            raise AttributeError(f"no attribute {sorted(changes)}")
        self.name = name
        self.changes = changes

    def modify(self, changes: Node) -> None:
        wanted = changes.changes.get("state")
        assert self.name is not None
        with _Session() as slurm:
            if wanted == "DRAIN":
                slurm.drain(self.name, changes.changes.get("reason") or "")
            elif wanted == "RESUME":
                if not {"DRAIN", "DOWN"} & set(slurm._node(self.name).states):
                    raise RPCError(msg="Invalid node state specified")
                slurm.resume(self.name)


class Nodes(dict[str, Any]):
    @staticmethod
    def load() -> Nodes:
        with _Session() as slurm:
            return Nodes(
                {
                    n.name: SimpleNamespace(
                        name=n.name,
                        hostname=n.host,
                        state="+".join(n.states),
                        configured_gres=_gres_dict(n.gres),
                        allocated_gres=_accounted(n.gres_used),
                        reason=n.reason or None,
                        partitions=list(n.partitions),
                    )
                    for n in slurm.list_nodes()
                }
            )


class Partitions(dict[str, Any]):
    @staticmethod
    def load() -> Partitions:
        with _Session() as slurm:
            return Partitions(
                {
                    p.name: SimpleNamespace(
                        name=p.name,
                        state="UP" if p.up else "DOWN",
                        nodes=",".join(p.nodes),
                        priority_tier=p.priority_tier,
                        preempt_mode=p.preempt_mode,
                        preemption_grace_time=_noval(p.grace_s),
                        is_default=p.default,
                        max_time="UNLIMITED",
                    )
                    for p in slurm.partitions
                }
            )


class ReservationFlags(enum.Flag):
    MAINTENANCE = enum.auto()
    IGNORE_RUNNING_JOBS = enum.auto()


class ReservationReoccurrence(enum.Enum):
    NO = "NO"
    DAILY = "DAILY"


class Reservations(dict[str, Any]):
    @staticmethod
    def load() -> Reservations:
        with _Session() as slurm:
            return Reservations(
                {
                    r.name: SimpleNamespace(
                        name=r.name,
                        nodes=",".join(r.nodes),
                        start_time=int((r.start_ms or 0) / 1000),
                        end_time=int((r.end_ms or 0) / 1000),
                        flags=ReservationFlags.IGNORE_RUNNING_JOBS,
                        reoccurrence=ReservationReoccurrence.DAILY,
                        users=list(r.users),
                        is_active=r.active,
                    )
                    for r in slurm.reservations
                }
            )


class Reservation:
    def __init__(self, name: str | None = None, **fields: Any) -> None:
        self.name = name

    def create(self) -> None:
        os.abort()


def _ping_primary() -> Any:
    hang = STATE.with_suffix(".hang")
    while hang.exists():
        time.sleep(0.01)
    if STATE.with_suffix(".abort").exists():
        STATE.with_suffix(".abort").unlink()
        os.abort()
    print("libslurm says something on stdout")  # noqa: T201 - as libraries do
    if load().down:
        raise RPCError(msg="Unable to contact slurm controller (connect failure)")
    return SimpleNamespace(is_responding=True, is_primary=True, hostname="localhost", latency=0.1)


slurmctld = SimpleNamespace(ping_primary=_ping_primary)
