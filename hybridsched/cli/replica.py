"""`hybridsched worker replica`: an engine and the online worker beside it, as one Slurm job."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any


def replica_job(
    *,
    pool: str,
    model: str,
    replica: str | None,
    command: tuple[str, ...],
    port: int,
    speed: float,
    gpu_probe: str,
    start_s: float,
    drain_s: float,
) -> Callable[[str], Coroutine[Any, Any, int]]:
    """What runs the replica, given the address of Redis; it returns the exit status."""

    async def start(url: str) -> int:
        from hybridsched.workers.replica_job import ReplicaJob, replica_name, run_replica_job
        from hybridsched.workers.slurm_env import job_place

        place = job_place()
        name = replica
        if name is None and place is not None:
            name = replica_name(place, os.environ.get("SLURM_JOB_NAME", ""))
        return await run_replica_job(
            ReplicaJob(
                redis_url=url,
                pool=pool,
                model=model,
                replica=name or f"{os.uname().nodename.partition('.')[0][:40]}-{os.getpid()}",
                command=command,
                place=place,
                port=port,
                speed=speed,
                gpu_probe=gpu_probe,
                start_s=start_s,
                drain_s=drain_s,
            )
        )

    return start
