"""What the policy worker publishes of Slurm for people, from one look."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.replica_values import Phase, Seen
from hybridsched.workers.policy_slurm_view import (
    MODELS_SHOWN,
    Look,
    SlurmStatus,
    fill_jobs,
    fill_nodes,
    fill_view_jobs,
    jobs_that_wait,
    place_name,
)


def seen_status(
    status: SlurmStatus,
    look: Look,
    seen: Seen,
    slurm: SlurmPolicy,
    *,
    epoch_to_ms: float,
    serving: Mapping[str, frozenset[str]],
    troubles: dict[str, str],
) -> SlurmStatus:
    """The status with what a look showed."""
    ours = fill_jobs(look.jobs, slurm)
    without = [
        job.job for job in fill_view_jobs(look, slurm, epoch_to_ms) if job.lane is None and not job.leaving
    ]
    waiting = [job.id for job in jobs_that_wait(look.jobs, slurm, look.wait_ms)] + without
    names = {job.id: place_name(job) for job in ours}
    live = [job for job in seen.jobs if job.phase in (Phase.PENDING, Phase.RUNNING)]
    return msgspec.structs.replace(
        status,
        fill={node.node: node.live for node in fill_nodes(look, slurm)},
        pending=sum(job.pending for job in ours),
        running=sum(job.running for job in ours),
        without_lane=tuple(without),
        tasks={str(job): names[job] for job in without if names.get(job, str(job)) != str(job)},
        waiting=dict(Counter(look.models.get(job, "") for job in waiting)),
        serving={model: sorted(nodes) for model, nodes in sorted(serving.items())},
        models={names[job]: look.models.get(job, "") for job in waiting[:MODELS_SHOWN]},
        replicas={
            r.group: {
                "wanted": r.count,
                "jobs": sum(job.group == r.group for job in live),
                "serving": sum(job.group == r.group and bool(job.serving) for job in live),
            }
            for r in slurm.replicas
        },
        troubles=troubles,
    )
