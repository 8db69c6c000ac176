"""What the replica says of itself to the policy worker: at once on becoming busy or idle, else regularly."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from redis.exceptions import RedisError

from hybridsched.log import get_logger
from hybridsched.store.telemetry import EngineRecord, ReplicaRecord, TelemetryStore
from hybridsched.telemetry.protocol import GpuSample, GpuSampler
from hybridsched.telemetry.window import SlidingWindow
from hybridsched.workers.online_engine import EngineWatch
from hybridsched.workers.online_tasks import run_together

PUBLISH_S = 0.2
"""Between two records without an edge."""

GPU_S = 0.5
"""Between two samples of the GPU, where one is given."""

LATENCY_WINDOW_MS = 30_000.0

LANE_AGE_MS = 1_500.0
"""A lane's record that is older says nothing of what its worker has in the engine now."""

_log = get_logger("online")


class OfflineSaid(NamedTuple):
    """What the lane's worker says of itself."""

    requests: int = 0
    """How many it has in the engine; 0 where it says nothing."""
    at_ms: float = 0.0
    """When it said so, on the monotonic clock."""


class OnlineCounts:
    """How many online requests the worker holds, since when it holds none, and how fast they were served.

    TTFT and TPOT are measured here, of online requests alone: the engine's histograms mix offline work in.
    """

    def __init__(self) -> None:
        self.inflight = 0
        self.tokens = 0
        """Estimated tokens (prompt and most output) of what is held."""
        self.sequences = 0
        self.load = 0.0
        """Outstanding tokens as the replicas hash counts them: prompts to work off, and some for decode."""
        self.claimed = 0
        self.claimed_tokens = 0
        """Requests claimed since the worker began, and their prompt tokens."""
        self.edge = asyncio.Event()
        """Set when the replica became busy or idle."""
        self._idle_since = time.monotonic()
        self._ttft = SlidingWindow(LATENCY_WINDOW_MS)
        self._tpot = SlidingWindow(LATENCY_WINDOW_MS)

    def begin(self, tokens: int, prompt_tokens: int = 0) -> None:
        """A request was claimed. `tokens`: prompt and most output."""
        self.claimed += 1
        self.claimed_tokens += prompt_tokens
        self.inflight += 1
        self.sequences += 1
        self.tokens += tokens
        if self.inflight == 1:
            self.edge.set()

    def end(self, tokens: int, sequences: int = 1) -> bool:
        """It is over, whatever became of it. Returns whether the replica is idle now."""
        self.inflight -= 1
        self.sequences -= sequences
        self.tokens -= tokens
        if self.inflight == 0:
            self._idle_since = time.monotonic()
            self.edge.set()
        return self.inflight == 0

    def widen(self, sequences: int) -> None:
        """A held request turned out to take more than one sequence (`n`)."""
        self.sequences += sequences - 1

    def idle_ms(self) -> float:
        """How long none has been held; 0 while any is."""
        return 0.0 if self.inflight else (time.monotonic() - self._idle_since) * 1000.0

    def first_token(self, ttft_ms: float) -> None:
        """`ttft_ms`: from the accept by the store to the first token here."""
        self._ttft.add(time.monotonic() * 1000.0, ttft_ms)

    def decoded(self, tpot_ms: float) -> None:
        """Time per output token after the first, of one finished request."""
        self._tpot.add(time.monotonic() * 1000.0, tpot_ms)

    def ttft_p99_ms(self) -> float | None:
        return self._ttft.percentile(0.99, time.monotonic() * 1000.0)

    def ttft_ms(self) -> float | None:
        """The mean."""
        return self._ttft.mean(time.monotonic() * 1000.0)

    def tpot_ms(self) -> float | None:
        """The mean."""
        return self._tpot.mean(time.monotonic() * 1000.0)

    def tpot_p99_ms(self) -> float | None:
        return self._tpot.percentile(0.99, time.monotonic() * 1000.0)


class TelemetryPublisher:
    """Publishes one replica's record. In an outage of the store the last record grows stale by itself."""

    def __init__(
        self,
        store: TelemetryStore,
        *,
        replica: str,
        model: str,
        lane: str,
        url: str,
        counts: OnlineCounts,
        watch: EngineWatch,
        sampler: GpuSampler | None = None,
        node: str = "",
        job: str = "",
    ) -> None:
        self._store = store
        self._replica = replica
        self._model = model
        self._lane = lane
        self._url = url
        self._node = node
        self._job = job
        self._counts = counts
        self._watch = watch
        self._sampler = sampler
        self._gpu: GpuSample | None = None
        self._out = False
        self.offline = OfflineSaid()

    def record(self) -> ReplicaRecord:
        """The record as of now."""
        now = time.monotonic()
        watch, seen, gpu = self._watch, self._watch.tracker.last, self._gpu
        fitted_ms = watch.times.at_ms
        engine = EngineRecord(
            metrics_age_ms=None if seen is None else now * 1000.0 - seen.at_ms,
            running=None if seen is None else seen.running,
            waiting=None if seen is None else seen.waiting,
            kv_use=None if seen is None else seen.kv_use,
            frozen_ms=None if seen is None else seen.frozen_ms,
            ttft_p99_ms=self._counts.ttft_p99_ms(),
            tpot_p99_ms=self._counts.tpot_p99_ms(),
            healthy=None if watch.checked_at is None else float(watch.healthy),
            fault=watch.fault,
            restarts=watch.restarts,
            health_age_ms=None if watch.checked_at is None else (now - watch.checked_at) * 1000.0,
            latency=watch.times.fit(),
            latency_age_ms=None if fitted_ms is None else now * 1000.0 - fitted_ms,
            gpu_activity=None if gpu is None else gpu.activity,
            gpu_age_ms=None if gpu is None else now * 1000.0 - gpu.at_ms,
        )
        return ReplicaRecord(
            replica=self._replica,
            model=self._model,
            lane=self._lane,
            url=self._url,
            node=self._node,
            job=self._job,
            online_inflight=self._counts.inflight,
            online_idle_ms=self._counts.idle_ms(),
            online_load=self._counts.load,
            online_ttft_ms=self._counts.ttft_ms(),
            online_tpot_ms=self._counts.tpot_ms(),
            claimed=self._counts.claimed,
            claimed_tokens=self._counts.claimed_tokens,
            engine=engine,
        )

    async def run(self) -> None:
        """Until cancelled."""
        loops = {"records": self._publish_all()}
        if self._sampler is not None:
            loops["gpu"] = self._sample(self._sampler)
        await run_together(**loops)

    async def _publish_all(self) -> None:
        edge = self._counts.edge
        while True:
            try:
                async with asyncio.timeout(PUBLISH_S):
                    await edge.wait()
            except TimeoutError:
                pass
            nudge = edge.is_set()
            edge.clear()
            try:
                now_ms = await self._store.publish(self.record(), nudge=nudge)
                if self._lane:
                    asked = time.monotonic()
                    count, age_ms = await self._store.offline_inflight(self._lane, now_ms, LANE_AGE_MS)
                    self.offline = OfflineSaid(count, asked * 1000.0 - age_ms)
            except (RedisError, OSError) as error:
                if not self._out:
                    _log.warning(
                        "Telemetry cannot be published; lanes close until it can.",
                        key="telemetry_outage",
                        error=str(error),
                    )
                self._out = True
                self.offline = OfflineSaid()
                if nudge:
                    edge.set()  # the edge is still news when the store is back
                await asyncio.sleep(PUBLISH_S)
            except Exception:  # noqa: BLE001 - the loop's edge: the last record ages, and the lane closes
                if not self._out:
                    _log.exception(
                        "Telemetry could not be made; lanes close until it is.", key="telemetry_broke"
                    )
                self._out = True
                await asyncio.sleep(PUBLISH_S)
            else:
                self._out = False

    async def _sample(self, sampler: GpuSampler) -> None:
        said = False
        while True:
            now_ms = time.monotonic() * 1000.0
            try:
                self._gpu = await asyncio.to_thread(sampler.sample, now_ms)
            except Exception:  # noqa: BLE001 - the loop's edge: the last sample ages
                if not said:
                    _log.exception("The GPU could not be sampled; it is tried again.", key="gpu_sample_broke")
                said = True
            await asyncio.sleep(GPU_S)
