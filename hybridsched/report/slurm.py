"""What Slurm did in a run: its jobs, how fast it followed the gates, how fast it gave a GPU back. Pure.

Slurm does not run faster with the engines: durations here are those of the wall clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridsched.report.percentiles import spread
from hybridsched.report.record import Event, PassRecord, Reclaim, SlurmRecord


def slurm_summary(slurm: SlurmRecord, run: PassRecord) -> dict[str, Any]:
    """The `slurm` part of the summary."""

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - run.start_s, 3)

    acts = [event for event in run.events if event.t == "slurm"]
    return {
        "version": slurm.version,
        "nodes": slurm.nodes,
        "jobs": [
            {
                "id": job.id,
                "name": job.name,
                "partition": job.partition,
                "node": job.node,
                "run": job.run,
                "submit_s": since(job.submit_s),
                "start_s": since(job.start_s),
                "end_s": since(job.end_s),
                "state": job.state,
                "requeues": max(other.run for other in slurm.jobs if other.id == job.id) - 1,
            }
            for job in slurm.jobs
        ],
        "look_ms": round(slurm.look_s * 1000, 1),
        "gate_open_to_job_running_ms": spread(
            [value * 1000 for value in admissions(slurm, run.events)], "p50", "max"
        ),
        "requeued_runs": sum(job.state == "REQUEUED" for job in slurm.jobs),
        "queued_again_to_running_ms": spread(
            [
                (job.start_s - job.submit_s) * 1000
                for job in slurm.jobs
                if job.run > 1 and job.start_s is not None
            ],
            "p50",
            "max",
        ),
        "reclaims": [_reclaim(one, slurm, run) for one in slurm.reclaims],
        "fill_changes": sum(event.data.get("act") == "set_fill" for event in acts),
        "acts_failed": sum(event.data.get("outcome") not in ("ok", "withheld") for event in acts),
    }


def admissions(slurm: SlurmRecord, events: Sequence[Event]) -> list[float]:
    """From the first opening of each lane's gate to the offline job that Slurm started for it, seconds.

    Lanes of a node are alike to Slurm: the node's first opening belongs to its first job, and so on. Jobs
    that come later find a gate that has opened and closed many times, which tells nothing of the admission.
    """
    opened: dict[str, list[float]] = {}
    seen: set[str] = set()
    for event in sorted(events, key=lambda event: event.mono_s):
        if event.t == "gate" and event.data.get("state") == "open" and event.lane not in seen:
            seen.add(event.lane)
            if node := slurm.lanes.get(event.lane):
                opened.setdefault(node, []).append(event.mono_s)
    started: dict[str, list[float]] = {}
    for job in slurm.jobs:
        if job.partition == slurm.partition_offline and job.run == 1 and job.start_s is not None:
            started.setdefault(job.node, []).append(job.start_s)
    return [
        start - gate
        for node, gates in sorted(opened.items())
        for gate, start in zip(gates, sorted(started.get(node, [])), strict=False)
        if start >= gate
    ]


def _reclaim(one: Reclaim, slurm: SlurmRecord, run: PassRecord) -> dict[str, Any]:
    runs = [job for job in slurm.jobs if job.id == one.offline_job]
    gave = [job for job in runs if job.state == "REQUEUED" and (job.end_s or 0.0) >= one.submit_s]
    took_s = None if one.running_s is None else one.running_s - one.submit_s
    until_s = one.submit_s if one.running_s is None else one.running_s
    put_down = [
        event.data
        for event in run.events
        if event.t == "quiet"
        and event.data.get("reason") == "stopping"
        and slurm.lanes.get(event.lane) == one.node
        and one.submit_s <= event.mono_s <= until_s
    ]
    return {
        "online_job": one.online_job,
        "offline_job": one.offline_job,
        "node": one.node,
        "at_s": round(one.submit_s - run.start_s, 3),
        "submit_to_gpu_ms": None if took_s is None else round(took_s * 1000, 1),
        "offline_requeued": bool(gave),
        "requests_put_down": sum(int(data.get("ended", 0)) for data in put_down),
        "tokens_kept": sum(int(data.get("kept_tokens", 0)) for data in put_down),
        "offline_state": runs[-1].state if runs else "",
    }
