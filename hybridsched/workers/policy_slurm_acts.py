"""Carrying out what was decided about Slurm: each act with its result, an event, and a line in the log."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.values import ClusterError, Gres, Job, JobChange, JobSpec
from hybridsched.core import fill_values as fill
from hybridsched.core.policy import ReplicasPolicy, SlurmPolicy
from hybridsched.core.replica_values import (
    Cancel,
    Drain,
    Instruction,
    ReplicaTag,
    Result,
    Stop,
    Submit,
    Withheld,
)
from hybridsched.log import get_logger
from hybridsched.store.events import EventLog

SURE = frozenset({"missing", "denied", "refused", "not_found", "unsupported", "invalid"})
"""Codes of `ClusterError` after which nothing was done for certain."""

NOTICE_S = 60.0
"""A job that was sent its signal to leave has this long before it is requeued without further ado; it is the
notice that offline jobs are submitted with (`--signal=B:USR2@60`)."""

LEAVE = "USR2"

_log = get_logger("policy-slurm")


def now_ms() -> float:
    """The clock of the decisions."""
    return time.monotonic() * 1000.0


class Acts:
    """Executes instructions for one pool. `redis_url` is handed to the jobs, as `HYBRIDSCHED_REDIS_URL`."""

    def __init__(
        self,
        cluster: Cluster,
        events: EventLog,
        *,
        redis_url: str,
        pool: str,
        speed: float,
        scripts: Path,
        forget: Callable[[int], Awaitable[None]],
    ) -> None:
        self._cluster, self._events = cluster, events
        self._redis_url, self._pool, self._speed, self._scripts = redis_url, pool, speed, scripts
        self._forget = forget
        self._leaving: dict[int, float] = {}
        self._addresses: dict[int, tuple[int, int | None]] = {}
        self.problem = ""
        """What went wrong last; empty when the last act went well."""

    async def fill(self, act: fill.Instruction, policy: SlurmPolicy) -> float:
        """One instruction of `core.fill`; returns when it was answered, however."""
        match act:
            case fill.SetFill(node=node, count=count):
                await self._do(act, lambda: self._cluster.set_gres_count(node, policy.fill_gres, count))
            case fill.RequeueJob(job=job):
                asked = self._leaving.get(job)
                number, task = self._addresses.get(job, (job, None))
                if asked is None:
                    # It keeps its place and requeues itself; what does not know how to is requeued below.
                    tell = self._cluster.signal
                    result = await self._do(act, lambda: tell(number, LEAVE, task=task), word="signal_job")
                    if result.ok:
                        self._leaving[job] = time.monotonic()
                elif time.monotonic() - asked >= NOTICE_S:
                    await self._do(act, lambda: self._cluster.requeue(number, task=task))
        return now_ms()

    def there(self, jobs: Mapping[int, tuple[int, int | None]]) -> None:
        """Which jobs still hold a place, and how each is named to Slurm: the others have left."""
        self._addresses = dict(jobs)
        self._leaving = {job: at for job, at in self._leaving.items() if job in jobs}

    async def hasten(self, job: Job) -> bool:
        """Let a requeued job start before its wait is over; whether Slurm did it."""
        return await self._change(_Hasten(job=job.id), job, JobChange(start_now=True))

    async def release(self, job: Job) -> None:
        """Let go a job that Slurm holds."""
        await self._change(_Release(job=job.id), job, JobChange(held=False))

    async def keep_away(self, job: Job, excluded: tuple[str, ...], comment: str) -> None:
        """Exclude nodes for a waiting job; `comment` says which of them are excluded by us."""
        number, task = job.address
        change = JobChange(excluded=excluded, comment=comment)

        async def tell() -> None:
            try:
                await self._cluster.update_job(number, change, task=task)
            except ClusterError as error:
                # It has started in between; or tasks of its array run, and the waiting ones were changed.
                if error.code != "refused" or "pending" not in str(error):
                    raise

        await self._do(_KeepAway(job=job.id, excluded=excluded), tell)

    async def park(self, node: str, reason: str) -> None:
        """Let nothing start on the parked node."""
        await self._do(_Park(node=node), lambda: self._cluster.drain(node, reason))

    async def park_count(self, node: str, count: int, policy: SlurmPolicy) -> None:
        """Give the parked node its count of the fill GRES."""
        act = _Park(node=node, count=count)
        await self._do(act, lambda: self._cluster.set_gres_count(node, policy.fill_gres, count))

    async def _change(self, act: msgspec.Struct, job: Job, change: JobChange) -> bool:
        number, task = job.address
        return (await self._do(act, lambda: self._cluster.update_job(number, change, task=task))).ok

    async def replica(self, act: Instruction, policy: SlurmPolicy) -> Result:
        """One instruction of `core.replicas`, with its result."""
        match act:
            case Submit(group=group):
                wanted = next((r for r in policy.replicas if r.group == group), None)
                if wanted is None:
                    return Result(at_ms=now_ms(), ok=False, error="the policy has changed")
                return await self._do(act, lambda: self._submit(act, wanted, policy))
            case Stop(job=job):
                return await self._do(act, lambda: self._cluster.signal(job, LEAVE))
            case Cancel(job=job):
                return await self._do(act, lambda: self._cluster.cancel(job))
            case Drain(node=node, job=job, reason=reason):
                result = await self._do(act, lambda: self._cluster.drain(node, reason))
                if result.ok:
                    await self._forget(job)
                return result
            case Withheld(node=node, job=job, why=why):
                _log.error(
                    "A node has lost a GPU and is not drained: the policy allows no more. Look at it.",
                    key="slurm_drain_withheld",
                    node=node,
                    job=job,
                    why=why,
                )
                self._event(act, "withheld", 0.0, "")
                await self._forget(job)
                return Result(at_ms=now_ms(), ok=True)

    async def _submit(self, act: Submit, wanted: ReplicasPolicy, policy: SlurmPolicy) -> int:
        tag = ReplicaTag(pool=self._pool, token=act.token, spec=act.spec, group=act.group)
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", act.group).strip("-.")
        return await self._cluster.submit(
            JobSpec(
                name=f"hs-{base}"[:40],
                script_path=str(script_below(self._scripts, wanted.script)),
                arguments=wanted.arguments,
                partition=policy.partition_online,
                gres=(parse_gres(wanted.gres),),
                excluded=act.excluded,
                time_limit_min=math.ceil(wanted.time_limit_s / 60),
                comment=tag.text(),
                signal=f"B:{LEAVE}@{max(1, policy.notice_s)}",
                # The policy worker replaces it: a requeued job would wait for minutes first.
                requeue=False,
                append=True,
                environment={
                    "HYBRIDSCHED_REDIS_URL": self._redis_url,
                    "HYBRIDSCHED_POOL": self._pool,
                    "HYBRIDSCHED_MODEL": wanted.model,
                    "HYBRIDSCHED_SPEED": f"{self._speed:g}",
                },
            )
        )

    async def _do(
        self, act: msgspec.Struct, call: Callable[[], Awaitable[int | None]], *, word: str = ""
    ) -> Result:
        word = word or str(act.__struct_config__.tag)
        began = time.monotonic()
        try:
            job = await call()
        except ClusterError as error:
            self.problem = str(error)
            self._event(act, word, began, error.code)
            _log.warning(
                "Slurm did not do what it was told; it is told again while it is still wanted.",
                key="slurm_act_failed",
                act=word,
                what=msgspec.to_builtins(act),
                error=str(error),
            )
            sure = error.code in SURE
            return Result(at_ms=now_ms(), ok=False, error=f"{error.code}: {error}"[:300], sure=sure)
        self.problem = ""
        self._event(act, word, began, "ok", job)
        _log.info("Slurm was told.", key="slurm_act", act=word, what=msgspec.to_builtins(act), job=job)
        return Result(at_ms=now_ms(), ok=True, job=job)

    def _event(
        self, act: msgspec.Struct, word: str, began: float, outcome: str, job: int | None = None
    ) -> None:
        took_s = round(time.monotonic() - began, 4) if began else 0.0
        what = msgspec.to_builtins(act)
        if job is not None:
            what["job"] = job
        event = {"t": "slurm", "act": word, "outcome": outcome, "mono_s": time.monotonic(), "took_s": took_s}
        self._events.append({**what, **event})


class _Hasten(msgspec.Struct, frozen=True, kw_only=True, tag="hasten_job"):
    job: int


class _KeepAway(msgspec.Struct, frozen=True, kw_only=True, tag="keep_away"):
    job: int
    excluded: tuple[str, ...]


class _Release(msgspec.Struct, frozen=True, kw_only=True, tag="release_job"):
    job: int


class _Park(msgspec.Struct, frozen=True, kw_only=True, tag="park_node"):
    node: str
    count: int | None = None


def parse_gres(text: str) -> Gres:
    """`gpu:a100:2` as the border to Slurm has it."""
    name, *rest = text.split(":")
    count = int(rest.pop()) if rest and rest[-1].isdigit() else 1
    return Gres(name=name, type=rest[0] if rest else None, count=count)


def script_below(folder: Path, script: str) -> Path:
    """The batch script of a policy, which must lie below the folder of the policy worker.

    Raises `ClusterError` code invalid otherwise: whoever may publish a policy must not run any file there is.
    """
    root = folder.resolve()
    path = (root / script).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        raise ClusterError(
            f"script {script!r} of the policy is no file below {root}; put it there, or start the policy "
            "worker with --scripts FOLDER",
            code="invalid",
            retryable=False,
        )
    return path
