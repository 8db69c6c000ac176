"""A pass through Slurm: engines and online workers are jobs that the policy worker keeps running, the batch
comes by sbatch, and Slurm starts its jobs as the policy worker raises the counts of the nodes.

The offline jobs, one more than there are lanes, share the one batch. One of them also holds a GPU of its own;
on the way an extra online job wants it, and Slurm takes it back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.values import ClusterError, Gres, Job, JobSpec
from hybridsched.core.policy import PoolPolicy, ReplicasPolicy
from hybridsched.demo.batch import RunningBatch, result_files
from hybridsched.demo.options import Plan
from hybridsched.demo.passes import STOP_S, Outcome, Pass
from hybridsched.demo.slurm_jobs import Timeline, over, tell_to_leave
from hybridsched.demo.slurm_testbed import GPU_TYPE, Testbed, program
from hybridsched.demo.stack import READY_S, Stack, wait_ready
from hybridsched.demo.supervisor import ChildError, ChildSpec, log_tail
from hybridsched.log import get_logger
from hybridsched.report.record import Reclaim, SlurmRecord
from hybridsched.store.batches import BatchStore
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import TelemetryStore

LOOK_S = 0.5
"""Between two looks at Slurm's jobs during the trace: each costs a process."""
CLOSE_LOOK_S = 0.1
"""The same while jobs come up or a GPU is given back."""
OBSERVE_MS = 1000.0
"""How often the policy worker looks at Slurm here; by default every 2 s, for sites with longer lists."""
DRAIN_S = 3
"""What requests in flight get when a replica is told to stop: at the end of a pass there are none."""
RECLAIM_AT = 0.34
"""Share of the trace after which the extra online job comes: in the default slice as a long burst of online
requests begins, with offline work still in every engine."""
RECLAIM_WITHIN_S = 30.0
"""The notice of an offline job, after which Slurm ends it."""
RECLAIM_FOR_S = 5

_log = get_logger("slurm-demo")


class SlurmPass(Pass):
    """One replay of the trace on a private Slurm."""

    def __init__(self, stack: Stack, plan: Plan, testbed: Testbed, *, offline: bool, live: bool) -> None:
        self._env = {
            **testbed.env,
            "HYBRIDSCHED_BIN": program(),
            "HYBRIDSCHED_ENGINE": "simulated",
            "HYBRIDSCHED_DRAIN_S": str(DRAIN_S),
        }
        plan = msgspec.structs.replace(plan, policy=on_slurm(plan.policy, stack, plan.options.gpus))
        super().__init__(stack, plan, offline=offline, live=live, env=self._env)
        self._testbed = testbed
        self._cluster = CommandCluster(environment=self._env)
        self._timeline = Timeline()
        self._look_s = CLOSE_LOOK_S
        self._tasks: list[asyncio.Task[None]] = []
        self._lanes: dict[str, str] = {}
        self._offline_jobs: list[int] = []
        self._reclaims: list[Reclaim] = []
        self._version = ""
        self._out = stack.folder / "logs" / "jobs"

    async def run(self) -> Outcome:
        try:
            return await super().run()
        except ClusterError as error:
            raise ChildError(f"Slurm: {error}; its logs are in {self._stack.folder / 'logs'}") from error
        finally:
            await end_tasks(*self._tasks)
            await self._cluster.close()

    # -- start

    async def _start(self, load: ChildSpec) -> None:
        stack, gpus = self._stack, self._plan.options.gpus
        self._out.mkdir(parents=True, exist_ok=True)
        self._version = (await self._cluster.config(["SLURM_VERSION"])).get("SLURM_VERSION", "")
        self._tasks.append(asyncio.create_task(self._keep_looking(), name="slurm-jobs"))
        policy = stack.policy()
        words = (*policy.argv, "--scripts", str(self._testbed.scripts))
        policy = msgspec.structs.replace(policy, argv=words, cwd=self._out)
        names = []
        for spec in (policy, load):
            self._children.start(spec)
            names.append(spec.name)
        telemetry = TelemetryStore(self._client, stack.pool)

        async def serving() -> bool:
            self._check_looking()
            known = [r for r in (await telemetry.read_all()).replicas.values() if r is not None]
            if sum(r.engine.healthy == 1.0 for r in known) < gpus:
                return False
            self._lanes = {r.lane: r.node for r in known}
            self._stack = msgspec.structs.replace(
                stack, ports={r.replica: urlsplit(r.url).port or 0 for r in known}
            )
            return True

        async def policy_there() -> bool:
            return bool(await self._client.exists(Keys(stack.pool).policy_worker))

        async def load_there() -> bool:
            return stack.online_log().exists()

        await wait_ready(self._children, names, "policy", policy_there)
        await self._patiently(names, "policy", serving)
        await wait_ready(self._children, names, "load", load_there)
        if self._offline:
            await self._submit_batch()
            await self._patiently(names, "policy", self._standing)
            found = BatchStore(self._sync, stack.pool)
            self._batch = RunningBatch.of(found, found.all()[0])

    async def _patiently(self, names: list[str], name: str, ready: Callable[[], Awaitable[bool]]) -> None:
        try:
            await wait_ready(self._children, names, name, ready)
        except ChildError as error:
            tails = "\n".join(f"{path.name}: {log_tail(path, 2)}" for path in sorted(self._out.glob("*.out")))
            raise ChildError(f"{error}\nThe jobs' logs end with:\n{tails}") from error

    async def _submit_batch(self) -> None:
        """The jobs of the batch, as a user would: `sbatch workers/offline.sbatch batch.jsonl`."""
        stack = self._stack
        output, errors = result_files(stack.folder)
        lanes = self._plan.options.gpus
        for number in range(lanes + 1):
            own = (Gres(name="gpu", type=GPU_TYPE, count=1),) if number == lanes - 1 else ()
            spec = JobSpec(
                name="offline" if not own else "offline-own-gpu",
                script_path=str(self._testbed.scripts / "workers" / "offline.sbatch"),
                arguments=(
                    str(self._plan.batch),
                    *("--output", str(output), "--errors", str(errors), "--speed", str(stack.speed)),
                    # It stands for offline work with a GPU that online wants back.
                    *(("--idle-gpus",) if own else ()),
                ),
                gres=(Gres(name="hsfill"), Gres(name="hslane"), *own) if own else (),
                output=str(self._out / "slurm-%j.out"),
                chdir=str(self._out),
                environment={"HYBRIDSCHED_REDIS_URL": stack.redis_url, "HYBRIDSCHED_POOL": stack.pool},
            )
            at_s = time.monotonic()
            job = await self._cluster.submit(spec)
            self._timeline.submitted(job, at_s)
            self._offline_jobs.append(job)

    async def _standing(self) -> bool:
        """Whether every lane has its job, but for the policy's floor."""
        self._check_looking()
        for job in self._offline_jobs:
            run = self._timeline.last(job)
            if run is not None and run.end_s is not None and run.state not in ("COMPLETED", "REQUEUED"):
                raise ChildError(f"offline job {job} ended at once ({run.state}), see its log in {self._out}")
        if BatchStore(self._sync, self._stack.pool).all() and await self._all_over():
            return True
        holders = await LaneHolders(self._client, self._stack.pool).read_many(list(self._lanes))
        telemetry = await TelemetryStore(self._client, self._stack.pool).read_all()
        held = sum(bool(holders.get(lane) and telemetry.lanes.get(lane)) for lane in self._lanes)
        return held >= len(self._lanes) - self._plan.policy.floor_gpus

    async def _all_over(self) -> bool:
        """A small batch may be complete before every lane has had a job."""
        return all(b.status.ended for b in BatchStore(self._sync, self._stack.pool).all())

    # -- meanwhile

    async def _begin(self, start_s: float) -> None:
        self._look_s = LOOK_S
        if self._offline:
            at_s = start_s + RECLAIM_AT * self._plan.options.duration_s / self._stack.speed
            self._tasks.append(asyncio.create_task(self._reclaim_at(at_s), name="slurm-reclaim"))

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._look_s)

    async def _look(self) -> tuple[Job, ...]:
        jobs = await self._cluster.jobs()
        mine = [job for job in jobs if self._is_ours(job)]
        self._timeline.look(mine, time.monotonic())
        return tuple(mine)

    def _is_ours(self, job: Job) -> bool:
        """Of this pass: the testbed remembers those of the pass before."""
        known = self._timeline.last(job.id) is not None
        return known or not job.ended

    def _check_looking(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _reclaim_at(self, at_s: float) -> None:
        """Let an online job want the GPU that an offline job holds."""
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        own = self._offline_jobs[-2]
        run = self._timeline.last(own)
        if run is None or run.start_s is None or run.end_s is not None:
            _log.warning(
                "The offline job with a GPU of its own does not run, so there is nothing to take back.",
                key="slurm_reclaim_skipped",
                job=own,
            )
            return
        asked_s = time.monotonic()
        job = await self._cluster.submit(
            JobSpec(
                name="online-extra",
                script=f"#!/bin/bash\nexec sleep {RECLAIM_FOR_S}\n",
                partition="online",
                gres=(Gres(name="gpu", type=GPU_TYPE, count=1),),
                nodes=(run.node,),
                time_limit_min=5,
                cpus_per_task=1,
                requeue=False,
                output=str(self._out / "slurm-%j.out"),
                chdir=str(self._out),
            )
        )
        self._timeline.submitted(job, asked_s)
        self._look_s = CLOSE_LOOK_S
        try:
            while time.monotonic() < asked_s + RECLAIM_WITHIN_S:
                await asyncio.sleep(CLOSE_LOOK_S)
                found = self._timeline.last(job)
                if found is not None and found.start_s is not None:
                    break
        finally:
            self._look_s = LOOK_S
            found = self._timeline.last(job)
            self._reclaims.append(
                Reclaim(
                    online_job=job,
                    offline_job=own,
                    node=run.node,
                    submit_s=asked_s,
                    running_s=found.start_s if found is not None else None,
                )
            )

    # -- stop

    async def _stop(self) -> None:
        stack = self._stack
        looking, *others = self._tasks
        await end_tasks(*others)
        # The waiting ones first: none must start in the place of one that ends.
        for job in sorted(self._offline_jobs, key=self._runs_now):
            await self._cluster.cancel(job)
        await self._until_over(self._offline_jobs, STOP_S)
        self._children.stop()  # the policy worker would replace its replicas
        mine = await self._look()
        left = [job.id for job in mine if job.running and job.partition == "online"]
        for job in left:
            await tell_to_leave(self._cluster, job)
        await self._until_over(left, DRAIN_S + STOP_S)
        for found in await self._look():
            if not found.ended:
                await self._cluster.cancel(found.id)
        await self._until_over([job.id for job in await self._look()], STOP_S)
        await end_tasks(looking)
        await self._look()
        # Also replicas that died on the way have logged what they ran.
        prefix = f"{stack.label}-"
        for path in (stack.folder / "engines").glob(f"{prefix}*.jsonl"):
            self._stack.ports.setdefault(path.stem.removeprefix(prefix), 0)

    def _runs_now(self, job: int) -> bool:
        run = self._timeline.last(job)
        return run is not None and run.start_s is not None and run.end_s is None

    async def _until_over(self, jobs: Sequence[int], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if over(job for job in await self._look() if job.id in jobs):
                return
            await asyncio.sleep(CLOSE_LOOK_S)
        _log.warning(
            "Jobs do not end in time and are cancelled.",
            key="slurm_jobs_left",
            jobs=[job.id for job in await self._look() if job.id in jobs and not job.ended],
        )

    def _slurm(self) -> SlurmRecord | None:
        return SlurmRecord(
            version=self._version,
            nodes=self._testbed.nodes,
            lanes=self._lanes,
            look_s=CLOSE_LOOK_S,
            jobs=self._timeline.runs(),
            reclaims=tuple(self._reclaims),
        )


def on_slurm(policy: PoolPolicy, stack: Stack, replicas: int) -> PoolPolicy:
    """The policy with its replicas as Slurm jobs; what else it says of Slurm stays."""
    engine = stack.engine_options("{replica}")
    wanted = ReplicasPolicy(
        model=stack.model,
        count=replicas,
        gres=f"gpu:{GPU_TYPE}:1",
        script=str(Path("workers") / "online.sbatch"),
        arguments=engine,
        warm_ms=READY_S * 1000,
    )
    slurm = msgspec.structs.replace(
        policy.slurm,
        enabled=True,
        partition_online="online",
        partition_offline="offline",
        fill_gres="hsfill",
        place_gres="hslane",
        parked_node="hspark",
        observe_ms=min(policy.slurm.observe_ms, OBSERVE_MS),
        replicas=(wanted,),
    )
    return msgspec.structs.replace(policy, slurm=slurm)
