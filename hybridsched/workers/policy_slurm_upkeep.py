"""What the policy worker keeps right in Slurm beside counts, requeues and replicas: the parked node, jobs
that Slurm holds because of it, and jobs that only sit out the wait after a requeue.

Anything that a person has to know or do stands in `troubles`, for `hybridsched pool status` and the like.
"""

from __future__ import annotations

import time

from hybridsched.cluster.values import Job, Node, total
from hybridsched.core.policy import SlurmPolicy
from hybridsched.log import get_logger
from hybridsched.workers.policy_slurm_acts import Acts
from hybridsched.workers.policy_slurm_view import (
    BAD_CONSTRAINTS,
    Look,
    consumed_nodes,
    fill_jobs,
    fill_nodes,
    hastened,
    launch_failed,
    parked,
    stray_jobs,
    unseen_places,
)

SETTLED_S = 2.0
"""A requeued job must have been seen waiting for this long before its wait is cut short. slurmd refuses a run
whose credential is not of a later second than the order to end the run before, and slurmctld then ends the
job for good; both times are slurmctld's own, in whole seconds."""

RELEASE_AGAIN_S = 600.0
"""A job that Slurm holds again after it was let go has asked for something else that no node has."""

UNSEEN_S = 10.0
"""Places must have been taken by nobody for this long before it is said: the jobs and the nodes of one look
are not of one moment."""

PARKED_REASON = "hybridsched-parked: no machine, keeps waiting jobs valid"

_log = get_logger("policy-slurm")


class Upkeep:
    """One policy worker's term."""

    def __init__(self, acts: Acts) -> None:
        self._acts = acts
        self._waiting: dict[int, tuple[int, float]] = {}
        """Requeued jobs that wait: which restart, and since when that has been seen."""
        self._hastened: dict[int, int] = {}
        self._released: dict[int, float] = {}
        self._tried_s: dict[str, float] = {}
        self._unseen_ms: dict[str, float] = {}
        """Nodes with places taken by no job that was seen, and since when."""
        self._said: set[str] = set()
        self.troubles: dict[str, str] = {}

    async def look(self, look: Look, policy: SlurmPolicy) -> None:
        """After each look at Slurm."""
        self.troubles = {}
        self._nodes(look, policy)
        self._places(look, policy)
        right = await self._parked(look, policy)
        ours = fill_jobs(look.jobs, policy)
        await self._held([j for j in ours if j.held and j.reason.startswith(BAD_CONSTRAINTS)], right=right)
        for job in ours:
            if launch_failed(job):
                self._trouble(
                    f"job {job.id}",
                    f"failed at once in run {(job.restarts or 0) + 1}: if slurmctld's log says that it "
                    f"killed a non-startable batch, {job.user or 'its owner'} submits the same again",
                )
        waiting = {job.id: job.restarts or 0 for job in ours if hastened(job, look.wait_ms)}
        self._waiting = {
            job: before if (before := self._waiting.get(job)) and before[0] == run else (run, look.at_ms)
            for job, run in waiting.items()
        }
        self._hastened = {job: run for job, run in self._hastened.items() if job in waiting}
        self._said &= set(self.troubles)

    async def hasten(self, look: Look, policy: SlurmPolicy, places: int) -> bool:
        """Let up to `places` jobs start that only sit out the wait after a requeue; whether any was told."""
        now = time.monotonic() * 1000.0
        done = False
        for job in [job for job in fill_jobs(look.jobs, policy) if job.id in self._waiting][:places]:
            run, seen_ms = self._waiting[job.id]
            if self._hastened.get(job.id) == run or now - seen_ms < SETTLED_S * 1000.0:
                continue
            if await self._acts.hasten(job):
                self._hastened[job.id] = run
                done = True
            else:  # tried again, a little later
                self._waiting[job.id] = (run, now)
        return done

    # -- parts

    def _nodes(self, look: Look, policy: SlurmPolicy) -> None:
        for node in consumed_nodes(look, policy):
            self._trouble(
                f"node {node}",
                f"Slurm consumes {policy.fill_gres} there: the next registration may take the node out of "
                f"service. It needs {policy.fill_gres}:no_consume:N in slurm.conf and a restart of slurmctld",
            )
        for seen in fill_nodes(look, policy):
            if seen.places == 0:
                self._trouble(
                    f"node {seen.node}",
                    f"it has no {policy.place_gres}, which bounds the jobs there: no offline job starts on "
                    "it. See `hybridsched slurm check`",
                )

    def _places(self, look: Look, policy: SlurmPolicy) -> None:
        """Say who takes the places of offline work without doing any."""
        gres = policy.place_gres
        for job, count in stray_jobs(look, policy):
            self._trouble(
                f"job {job.id}",
                f"of {job.user or 'an unknown user'} in partition {job.partition} takes {count} {gres} more "
                f"on {','.join(job.nodes)} than it uses lanes: so many offline jobs fewer start there. "
                f"`scancel {job.id}` frees them; its owner submits it with no more {gres} than "
                f"{policy.fill_gres}",
            )
        unseen = unseen_places(look, policy)
        self._unseen_ms = {node: self._unseen_ms.get(node, look.at_ms) for node in unseen}
        for node, since_ms in self._unseen_ms.items():
            if look.at_ms - since_ms >= UNSEEN_S * 1000.0:
                self._trouble(
                    f"node {node}",
                    f"{unseen[node]} {gres} there are taken by jobs of other partitions than the pool's: "
                    f"so many offline jobs fewer start on it. `squeue -w {node}` shows them",
                )

    async def _parked(self, look: Look, policy: SlurmPolicy) -> bool:
        """Keep the parked node as it must be; whether it is."""
        node = parked(look, policy)
        if node is None:
            self._trouble(
                f"node {policy.parked_node}",
                "there is no such node: while every lane is closed sbatch refuses offline jobs. "
                "See `hybridsched slurm check`",
            )
            return False
        right = True
        wanted = max(1, total(node.gres, policy.place_gres))
        if total(node.gres, policy.fill_gres) < wanted:
            right = False
            self._trouble(
                f"node {node.name}",
                f"the parked node lacks {policy.fill_gres}: jobs are held or refused. It is set again",
            )
            if self._due(f"count {node.name}", policy):
                await self._acts.park_count(node.name, wanted, policy)
        if not node.shut:
            self._trouble(f"node {node.name}", _resumed(node))
            if self._due(f"drain {node.name}", policy):
                await self._acts.park(node.name, PARKED_REASON)
        return right

    async def _held(self, jobs: list[Job], *, right: bool) -> None:
        """Let go the jobs that Slurm took for impossible while the parked node was not as it must be."""
        now = time.monotonic()
        held = {job.id for job in jobs}
        self._released = {
            job: at for job, at in self._released.items() if job in held or now - at < RELEASE_AGAIN_S
        }
        for job in jobs:
            before = self._released.get(job.id)
            if right and (before is None or now - before >= RELEASE_AGAIN_S):
                self._released[job.id] = now
                await self._acts.release(job)
            elif before is not None:
                self._trouble(
                    f"job {job.id}",
                    "no node can run it as it was submitted (BadConstraints): see `scontrol show job`, "
                    f"submit it with less, or `scontrol release {job.id}` when the nodes are there",
                )

    def _due(self, what: str, policy: SlurmPolicy) -> bool:
        now = time.monotonic()
        before = self._tried_s.get(what)
        if before is not None and now - before < policy.reassert_ms / 1000.0:
            return False
        self._tried_s[what] = now
        return True

    def _trouble(self, what: str, words: str) -> None:
        self.troubles[what] = words
        if what not in self._said:
            self._said.add(what)
            _log.warning("Slurm needs a look.", key="slurm_trouble", what=what, why=words)


def _resumed(node: Node) -> str:
    return (
        f"the parked node is {'+'.join(node.states) or 'in an unknown state'}: somebody resumed it, and it "
        "is no machine. It is drained again"
    )
