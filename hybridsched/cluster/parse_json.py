"""Slurm's JSON of jobs and nodes in both shapes, reading few fields and passing over the rest.

Partitions and reservations are read as text on every version: their JSON, where there is one, leaves out what
is needed (PreemptMode, whether a reservation is active).

22.05: states are strings, numbers are plain, null where there is none. 23.02 and later: states are lists,
numbers are `{"set", "infinite", "number"}`, and lists may stand in an envelope. A field that is absent is
None; one whose shape was never seen spoils its row, for a guess could start or end a job. An answer without a
single row that can be read raises `ClusterError("unreadable")`: it is of a shape that is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hybridsched.cluster.parse_words import job_state, node_states, nothing, parse_gres, unreadable
from hybridsched.cluster.rows import Rows
from hybridsched.cluster.values import ENDED, Job, Node

T = TypeVar("T")

_INFINITE = 0xFFFFFFFF
_NO_VALUE = 0xFFFFFFFE
"""INFINITE and NO_VAL of slurm.h (32 bit), which some versions print as they are."""


def decode(raw: bytes, *envelopes: str) -> list[Any]:
    """The list of records under the first of `envelopes` that is there."""
    try:
        # Names and comments are users' own bytes, and Slurm prints them as they are.
        answer = msgspec.json.decode(raw.decode("utf-8", "replace"))
    except msgspec.DecodeError as error:
        raise unreadable(f"it is no JSON ({error})", raw[:200]) from error
    if not isinstance(answer, dict):
        raise unreadable("a JSON object is expected", raw[:200])
    for name in envelopes:
        found = answer.get(name)
        if isinstance(found, dict):
            found = found.get(name)
        if isinstance(found, list):
            return found
    raise unreadable(f"none of {', '.join(map(repr, envelopes))} is in it", raw[:200])


def number(value: Any) -> int | None:
    """A plain number or `{set, infinite, number}`; None for unset, infinite and Slurm's magic numbers."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise unreadable("a number is expected", value)
    return None if int(value) in (_INFINITE, _NO_VALUE) else int(value)


def words(value: Any) -> list[str]:
    """A string or a list of strings."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(w, str) for w in value):
        return value
    raise unreadable("a string or a list of strings is expected", value)


def text(value: Any) -> str:
    """A string, without Slurm's words for nothing; null is empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise unreadable("a string is expected", value)
    return nothing(value)


def raw_text(value: Any) -> str:
    """A user's own string, as it is."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise unreadable("a string is expected", value)
    return value


def parse_jobs(raw: bytes, rows: Rows | None = None) -> list[tuple[Job, str]]:
    """`squeue --json`: each job with its node list, not expanded; nor is what it excludes or requires."""
    made = rows or Rows()
    return _each("a job", decode(raw, "jobs"), lambda r: _job(r, made), made)


def _each(what: str, records: list[Any], one: Callable[[dict[str, Any]], T], rows: Rows) -> list[T]:
    def read(record: Any) -> T:
        if not isinstance(record, dict):
            raise unreadable("a JSON object is expected", record)
        return one(record)

    found = rows.read(what, records, read)
    if records and not found:
        raise unreadable(f"nothing that is {what} in a shape known here", records[0])
    return found


def _job(r: dict[str, Any], rows: Rows) -> tuple[Job, str]:
    job = number(r.get("job_id"))
    if job is None:
        raise unreadable("a job without job_id", r)
    state, flags = job_state(words(r.get("job_state")))
    reason = text(r.get("state_description")) or text(r.get("state_reason"))
    limit = number(r.get("time_limit"))
    array = number(r.get("array_job_id"))
    task = number(r.get("array_task_id"))
    waiting = text(r.get("array_task_string"))
    value = Job(
        id=job,
        name=raw_text(r.get("name")),
        user=text(r.get("user_name")),
        partition=text(r.get("partition")),
        state=state,
        flags=flags,
        reason=reason,
        gres=rows.gres(text(r.get("tres_per_node")), f"job {job}"),
        excluded=tuple(filter(None, [text(r.get("excluded_nodes"))])),
        required=tuple(filter(None, [text(r.get("required_nodes"))])),
        comment=_comment(r.get("comment")),
        restarts=number(r.get("restart_cnt")),
        priority=number(r.get("priority")),
        submit_ms=_ms(r.get("submit_time")),
        begin_ms=_ms(r.get("start_time")) if state == "PENDING" and reason == "BeginTime" else None,
        start_ms=None if state == "PENDING" else _ms(r.get("start_time")),
        end_ms=_ms(r.get("end_time")) if state in ENDED else None,
        time_limit_ms=None if limit is None else limit * 60_000.0,
        array_job=array or None,
        array_task=task if array else None,
        array_waiting=waiting if array and task is None else "",
    )
    return value, text(r.get("nodes"))


def parse_nodes(raw: bytes, rows: Rows | None = None) -> tuple[Node, ...]:
    """`scontrol show nodes --json`, and `sinfo --json` of 22.05.

    A node of whose GRES one entry cannot be read is passed over whole: they are repeated when a count is set.
    """
    return tuple(_each("a node", decode(raw, "nodes"), _node, rows or Rows()))


def _node(r: dict[str, Any]) -> Node:
    name = text(r.get("name"))
    if not name:
        raise unreadable("a node without a name", r)
    states: list[str] = []
    for word in [*words(r.get("state")), *words(r.get("state_flags"))]:
        states.extend(node_states(word))
    partitions = r.get("partitions")
    return Node(
        name=name,
        host=text(r.get("hostname")) or name,
        states=tuple(dict.fromkeys(states)),
        gres=parse_gres(text(r.get("gres"))),
        gres_used=parse_gres(text(r.get("gres_used"))),
        reason=text(r.get("reason")),
        partitions=tuple(words(partitions)),
        booted_ms=_ms(r.get("boot_time")),
        started_ms=_ms(r.get("slurmd_start_time")),
    )


def _ms(value: Any) -> float | None:
    seconds = number(value)
    return seconds * 1000.0 if seconds else None


def _comment(value: Any) -> str:
    """The user's own comment: a string, or in some versions an object that also holds the others'."""
    if isinstance(value, dict):
        value = value.get("job")
    return raw_text(value)
