"""Reports of GPUs that are gone: from the jobs that had them, to the policy worker that may drain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hybridsched.store.found import read_json
from hybridsched.store.keys import Keys

if TYPE_CHECKING:
    from redis.asyncio import Redis

LIFE_S = 86_400
"""Reports are forgotten a day after the last one."""


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """A probe has shown that a GPU of this job cannot be used."""

    job: int
    node: str
    why: str


_REPORT = msgspec.json.Decoder(GpuReport)


class GpuReports:
    """The reports of one pool. Raises what the Redis client raises."""

    def __init__(self, client: Redis, pool: str) -> None:
        self._client: Any = client
        self._key = Keys(pool).gpu_reports

    async def report(self, report: GpuReport) -> None:
        """Make a report known. A job has one; the last counts."""
        pipe = self._client.pipeline(transaction=False)
        pipe.hset(self._key, str(report.job), msgspec.json.encode(report))
        pipe.expire(self._key, LIFE_S)
        await pipe.execute()

    async def remove(self, job: int) -> None:
        """Forget the report of a job: it was acted on."""
        await self._client.hdel(self._key, str(job))

    async def read(self) -> list[GpuReport]:
        """All reports, by job. What is none is left out."""
        raw = (await self._client.hgetall(self._key)).values()
        found = [read_json(_REPORT, text, "a report in", self._key) for text in raw]
        return sorted((r for r in found if r is not None), key=lambda report: report.job)
