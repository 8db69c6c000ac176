"""Models and nodes: which model each job of offline work needs, where it is served, and which waiting job is
kept away from which nodes, because no lane there could ever be its own.

A job is kept away by the nodes that Slurm excludes for it. Those are the user's own as well (`--exclude`):
which of them are ours stands at the end of the job's comment, set in the same call, so that no record of it
can be lost or left behind.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hybridsched.cluster.values import Job
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.replica_values import read_tag
from hybridsched.store.job_models import commented_model
from hybridsched.workers.policy_slurm_acts import Acts
from hybridsched.workers.policy_slurm_view import Look, fill_jobs, place_name

AT_ONCE = 16
"""Jobs that are told at most after one look at Slurm; the others are told after the next ones."""

LONGEST = 1000
"""Characters of a comment; slurmctld takes 1024. A job that would need more is not kept away: it leaves a
node without its model after `slurm.wrong_node_ms`."""

_OURS = re.compile(r" ?\[hybridsched keeps it from ([^\[\]\s]*)\]$")

MOST_NODES = 10_000
_RUN = re.compile(r"(.*?)([0-9]{1,9}):([0-9]{1,9})")


class Away(NamedTuple):
    """What a job's record has to become."""

    excluded: tuple[str, ...]
    comment: str


def job_models(jobs: Sequence[Job], said: Mapping[str, str]) -> dict[int, str]:
    """The model of each job that is known; `said`: what jobs have said themselves, by their places' names.

    Slurm may give a number again when it has lost its state: a job that has never run has said nothing yet.
    """
    found = {}
    for job in jobs:
        fresh = job.pending and job.restarts == 0
        model = (None if fresh else said.get(place_name(job))) or commented_model(job.comment)
        if model:
            found[job.id] = model
    return found


def serving_nodes(look: Look, policy: SlurmPolicy, *, pool: str, user: str) -> dict[str, frozenset[str]]:
    """The nodes of each model: where an engine says so, and where a replica of ours starts."""
    found: dict[str, set[str]] = {}
    records = () if look.telemetry is None else look.telemetry.replicas.values()
    for record in records:
        if record is not None and record.node:
            found.setdefault(record.model, set()).add(record.node)
    groups = {replicas.group: replicas.model for replicas in policy.replicas}
    for job in look.jobs:
        tag = read_tag(job.comment)
        if tag is None or tag.pool != pool or job.user not in ("", user) or not job.running:
            continue
        if tag.group in groups:
            found.setdefault(groups[tag.group], set()).update(job.nodes)
    return {model: frozenset(nodes) for model, nodes in found.items()}


def keep_away(job: Job, wrong: Collection[str], nodes: Collection[str]) -> Away | None:
    """How a waiting job's record has to change to keep it from the nodes `wrong`; None: it is right.

    What the user excluded stays excluded, a node that the user asked for is never excluded, and of `nodes`,
    those of the partition, one is left.
    """
    found = _OURS.search(job.comment)
    ours = _unfold(found[1]) if found else frozenset()
    base = job.comment[: found.start()] if found else job.comment
    theirs = [node for node in job.excluded if node not in ours]
    wanted = sorted(set(wrong) - set(theirs) - set(job.required))
    if not set(nodes) - set(theirs) - set(wanted):
        wanted = []
    comment = f"{base} [hybridsched keeps it from {_fold(wanted)}]".lstrip() if wanted else base
    if len(comment) > LONGEST:
        wanted, comment = [], base
    if set(job.excluded) == {*theirs, *wanted}:
        return None
    return Away((*theirs, *wanted), comment)


def _fold(nodes: Collection[str]) -> str:
    """Names in few characters: `n1:3,n7` for n1, n2, n3 and n7. No name of a node has a colon."""
    runs: list[tuple[str, str, int]] = []
    for node in sorted(nodes, key=lambda name: (len(name), name)):
        stem = node.rstrip("0123456789")
        digits = node[len(stem) :]
        if runs and digits and runs[-1][:1] == (stem,) and len(runs[-1][1]) <= len(digits):
            last = runs[-1]
            if int(digits) == last[2] + 1 and digits == f"{last[2] + 1:0{len(last[1])}d}":
                runs[-1] = (stem, last[1], last[2] + 1)
                continue
        runs.append((stem, digits, int(digits) if digits else 0))
    return ",".join(
        stem + first if not first or int(first) == last else f"{stem}{first}:{last:0{len(first)}d}"
        for stem, first, last in runs
    )


def _unfold(text: str) -> frozenset[str]:
    """What `_fold` was given. A user may write anything here: what is no such text names no node."""
    found: set[str] = set()
    for word in text.split(","):
        run = _RUN.fullmatch(word)
        if run is None:
            found.add(word)
        elif int(run[3]) - int(run[2]) < MOST_NODES:
            found |= {f"{run[1]}{n:0{len(run[2])}d}" for n in range(int(run[2]), int(run[3]) + 1)}
    return frozenset(found)


class Steer:
    """Keeps waiting jobs away from nodes without their model, during one policy worker's term."""

    def __init__(self, acts: Acts) -> None:
        self._acts = acts
        self._tried_s: dict[int, float] = {}

    async def look(self, look: Look, policy: SlurmPolicy, serving: Mapping[str, frozenset[str]]) -> bool:
        """After each look at Slurm and Redis; whether any job was told."""
        nodes = {node.name for node in look.nodes if policy.partition_offline in node.partitions}
        machines = nodes - {policy.parked_node}
        now_s = time.monotonic()
        waiting = [job for job in fill_jobs(look.jobs, policy) if job.pending]
        self._tried_s = {job.id: at for job in waiting if (at := self._tried_s.get(job.id)) is not None}
        told = []
        for job in waiting:
            model = look.models.get(job.id)
            wrong = machines - serving.get(model, frozenset()) if model is not None else frozenset[str]()
            change = keep_away(job, wrong, nodes)
            if (
                change is None
                or now_s - self._tried_s.get(job.id, float("-inf")) < policy.reassert_ms / 1000.0
            ):
                continue
            self._tried_s[job.id] = now_s
            told.append(self._acts.keep_away(job, change.excluded, change.comment))
            if len(told) == AT_ONCE:
                break
        await asyncio.gather(*told)
        return bool(told)
