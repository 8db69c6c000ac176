"""What is asked of pyslurm (25.11 and its neighbours), in its own names. Runs only in `pyslurm_host`.

The module is an argument: nothing here imports it. Faults that are stepped around:

- an array's task 0 reads as no task (0 is taken for NO_VAL): told apart by the tasks that still wait;
- a signal sent to a job that waits makes an error of a thing that is none: the state is asked first;
- `JobSubmitDescription` needs `environment`, and signals by their full name (`SIGUSR2`);
- `Node.allocated_gres` knows only what is accounted as a TRES, and typed GRES twice: the adapter counts from
  the jobs instead;
- `Node(configured_gres=)` changes nothing, `Job.get_resource_layout_per_node` ends the process with a
  segmentation fault on a running job, `Reservation.create` aborts it: none of them is called.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

from hybridsched.cluster import checks
from hybridsched.cluster.parse_words import job_state, node_states, nothing, parse_gres, unreadable
from hybridsched.cluster.rows import UNREADABLE, Rows
from hybridsched.cluster.run import refusal
from hybridsched.cluster.values import ENDED, Gres, Job, JobChange, JobSpec, Node, Partition, Reservation


class Calls:
    """The calls, over one pyslurm module. Raises `ClusterError`, and pyslurm's own errors as they come."""

    def __init__(self, module: Any) -> None:
        self._slurm = module
        self._rows = Rows()

    def ping(self) -> None:
        if not self._slurm.slurmctld.ping_primary().is_responding:
            raise refusal("answer a ping", "Unable to contact slurm controller")

    def jobs(self) -> list[tuple[Job, str]]:
        return self._rows.read("a job", self._slurm.Jobs.load().values(), lambda j: _job(j, self._rows))

    def nodes(self) -> list[Node]:
        return self._rows.read("a node", self._slurm.Nodes.load().values(), _node)

    def partitions(self) -> list[tuple[Partition, str]]:
        return self._rows.read("a partition", self._slurm.Partitions.load().values(), _partition)

    def reservations(self) -> list[tuple[Reservation, str]]:
        return self._rows.read("a reservation", self._slurm.Reservations.load().values(), _reservation)

    def submit(self, spec: JobSpec, environment: dict[str, str]) -> int:
        fields: dict[str, Any] = {
            "name": spec.name,
            "script": spec.script if spec.script is not None else spec.script_path,
            "script_args": list(spec.arguments) or None,
            "partitions": spec.partition,
            "gres_per_node": {f"{g.name}:{g.type}" if g.type else g.name: g.count for g in spec.gres} or None,
            "required_nodes": list(spec.nodes) or None,
            "excluded_nodes": list(spec.excluded) or None,
            "time_limit": _span(spec.time_limit_min),
            "cpus_per_task": spec.cpus_per_task,
            "memory_per_node": None if spec.memory_mb is None else f"{spec.memory_mb}M",
            "comment": spec.comment,
            "is_requeueable": spec.requeue,
            "log_files_open_mode": "append" if spec.append else None,
            "standard_output": spec.output,
            "standard_error": spec.error,
            "working_directory": spec.chdir,
            "array": spec.array,
            "account": spec.account,
            "qos": spec.qos,
            "user_id": spec.user,
            "priority": 0 if spec.hold else None,
            "signal": None if spec.signal is None else _full_signal(spec.signal),
        }
        given = {k: v for k, v in fields.items() if v is not None}
        description = self._slurm.JobSubmitDescription(environment=environment, **given)
        return int(description.submit())

    def signal(self, job: int, name: str, steps: bool) -> None:
        found, _ = _job(self._slurm.Job.load(job), self._rows)
        if found.ended:
            raise refusal(f"send {name} to job {job}", "Invalid job id specified")
        if found.running:
            self._slurm.Job(job).send_signal(
                "SIG" + checks.signal_name(name), steps="all" if steps else "batch"
            )

    def requeue(self, job: int) -> None:
        self._slurm.Job(job).requeue()

    def cancel(self, job: int) -> None:
        self._slurm.Job(job).cancel()

    def update_job(self, job: int, change: JobChange) -> None:
        fields: dict[str, Any] = {
            "comment": change.comment,
            "time_limit": _span(change.time_limit_min),
            "is_requeueable": change.requeue,
            "begin_time": "now" if change.start_now else None,
        }
        given = {k: v for k, v in fields.items() if v is not None}
        if given:
            self._slurm.Job(job).modify(self._slurm.JobSubmitDescription(**given))
        if change.held is not None:
            record = self._slurm.Job(job)
            _ = record.hold() if change.held else record.release()

    def drain(self, node: str, reason: str) -> None:
        self._slurm.Node(node).modify(self._slurm.Node(state="DRAIN", reason=reason))

    def resume(self, node: str) -> None:
        self._slurm.Node(node).modify(self._slurm.Node(state="RESUME"))

    def table(self) -> dict[str, Callable[..., Any]]:
        """The calls by name, as the host offers them."""
        return {
            f.__name__: f
            for f in (
                self.ping,
                self.jobs,
                self.nodes,
                self.partitions,
                self.reservations,
                self.submit,
                self.signal,
                self.requeue,
                self.cancel,
                self.update_job,
                self.drain,
                self.resume,
            )
        }


def _job(j: Any, rows: Rows) -> tuple[Job, str]:
    state, flags = job_state(str(j.state).split("+"))
    array = _number(j.array_id)
    waiting = _text(j.array_tasks_waiting)
    task = _number(j.array_task_id)
    if array is not None and task is None and not waiting:
        task = 0
    limit = _number(j.time_limit)
    value = Job(
        id=int(j.id),
        name=str(j.name or ""),
        user=_text(j.user_name),
        partition=_text(j.partition),
        state=state,
        flags=flags,
        reason=_text(j.state_reason),
        gres=_wished(j, rows),
        excluded=tuple(filter(None, [_text(j.excluded_nodes)])),
        required=tuple(filter(None, [_text(j.required_nodes)])),
        comment=str(j.comment or ""),
        restarts=_number(j.requeue_count),
        priority=_number(j.priority),
        submit_ms=_ms(j.submit_time),
        begin_ms=_ms(j.start_time) if state == "PENDING" and _text(j.state_reason) == "BeginTime" else None,
        start_ms=None if state == "PENDING" else _ms(j.start_time),
        end_ms=_ms(j.end_time) if state in ENDED else None,
        time_limit_ms=None if limit is None else limit * 60_000.0,
        array_job=array,
        array_task=task,
        array_waiting=waiting,
    )
    return value, _text(j.allocated_nodes)


def _node(n: Any) -> Node:
    return Node(
        name=str(n.name),
        host=_text(n.hostname) or str(n.name),
        states=node_states(str(n.state)),
        gres=_gres(n.configured_gres),
        reason=_text(n.reason),
        partitions=tuple(n.partitions or ()),
        booted_ms=_ms(getattr(n, "boot_time", None)),
        started_ms=_ms(getattr(n, "slurmd_start_time", None)),
    )


def _partition(p: Any) -> tuple[Partition, str]:
    limit = _number(p.max_time)
    mode = p.preempt_mode
    value = Partition(
        name=str(p.name),
        up=_text(p.state).upper() == "UP",
        priority_tier=_number(p.priority_tier),
        preempt_mode=",".join(mode).upper() if isinstance(mode, list | tuple) else _text(mode).upper(),
        grace_s=_number(p.preemption_grace_time) or 0,
        default=bool(p.is_default),
        max_time_ms=None if limit is None else limit * 60_000.0,
    )
    return value, _text(p.nodes)


def _reservation(r: Any) -> tuple[Reservation, str]:
    flags = (
        [str(f.name) for f in type(r.flags) if f in r.flags]
        if isinstance(r.flags, enum.Flag)
        else list(r.flags)
    )
    again = str(getattr(r.reoccurrence, "name", r.reoccurrence) or "NO")
    value = Reservation(
        name=str(r.name),
        start_ms=_ms(r.start_time),
        end_ms=_ms(r.end_time),
        flags=(*flags, *([again] if again != "NO" else [])),
        users=tuple(r.users or ()),
        active=bool(r.is_active),
    )
    return value, _text(r.nodes)


def _wished(j: Any, rows: Rows) -> tuple[Gres, ...]:
    """A job's GRES, of which its owner may have written anything. What cannot be read counts as none."""
    try:
        value = j.gres_per_node
        return rows.gres(value, f"job {j.id}") if isinstance(value, str) else _gres(value)
    except UNREADABLE as error:
        rows.say(f"job {j.id} asks for GRES that cannot be read; they count as none", str(error))
        return ()


def _gres(value: Any) -> tuple[Gres, ...]:
    """`{"gpu:a100": 4}` or `{"gpu:a100": {"count": "4", "indexes": "0-3"}}`, or Slurm's own text."""
    if value is None:
        return ()
    if isinstance(value, str):
        return parse_gres(value)
    if not isinstance(value, Mapping):
        raise unreadable("GRES are a dictionary or a text", value)
    found = []
    for key, count in value.items():
        name, _, kind = str(key).removeprefix("gres/").removeprefix("gres:").partition(":")
        detail: Mapping[str, Any] = count if isinstance(count, Mapping) else {"count": count}
        found.append(
            Gres(
                name=name,
                type=nothing(kind) or None,
                count=int(detail.get("count") or 0),
                index=nothing(str(detail.get("indexes") or "")) or None,
            )
        )
    return tuple(found)


def _number(value: Any) -> int | None:
    """A number; None for none, and for the word UNLIMITED."""
    if value is None or (isinstance(value, str) and not value.isdecimal()):
        return None
    return int(value)


def _ms(value: Any) -> float | None:
    seconds = _number(value)
    return seconds * 1000.0 if seconds else None


def _text(value: Any) -> str:
    return nothing(None if value is None else str(value))


def _full_signal(text: str) -> str:
    """`B:USR2@60` as `B:SIGUSR2@60`."""
    flags, mark, name = text.rpartition(":")
    return f"{flags}{mark}SIG{name.removeprefix('SIG')}"


def _span(minutes: int | None) -> str | None:
    """Minutes as Slurm's hours:minutes:seconds: a bare number reads as minutes here and as seconds there."""
    return None if minutes is None else f"{minutes // 60:02d}:{minutes % 60:02d}:00"
