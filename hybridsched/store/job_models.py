"""Which model a Slurm job of offline work needs: what `batch submit --sbatch` wrote into the job's comment,
and what the job itself said when it had read its batch.

A job says it under a key of its own with a life, which users' jobs may write (docs/slurm-jobs.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from hybridsched.store.keys import Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

LIFE_S = 7 * 86_400
"""What a job said is kept for a week after its last run began."""

_COMMENT = re.compile(r"hybridsched(?: \S+)*? model=(\S+)")


def job_comment(batch: str | None, model: str | None) -> str | None:
    """The comment of a job that runs a batch, or several of one model. None: there is nothing to say."""
    words = [*([batch] if batch else []), *([f"model={quote(model, safe='/:.')}"] if model else [])]
    return " ".join(["hybridsched", *words]) if words else None


def commented_model(comment: str) -> str | None:
    """The model in a comment that `job_comment` has made; None: it names none."""
    found = _COMMENT.match(comment)
    return unquote(found[1]) if found else None


class JobModels:
    """What the jobs of one pool have said. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client: Any = client
        self._keys = Keys(pool)

    async def note(self, job: str, model: str) -> None:
        """A job, named as it names itself to lanes (`8`, `8_3`), needs this model."""
        await self._client.set(self._keys.lane_job_model(job), model, ex=LIFE_S)

    async def read(self, jobs: Sequence[str]) -> Mapping[str, str]:
        """The models of those jobs that have said one."""
        if not jobs:
            return {}
        found = await self._client.mget([self._keys.lane_job_model(job) for job in jobs])
        return {job: raw.decode("utf-8", "replace") for job, raw in zip(jobs, found, strict=True) if raw}
