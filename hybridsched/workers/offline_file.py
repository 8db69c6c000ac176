"""Run one batch file against engines of one's own, without a store: `hybridsched batch run`.

The same executor, journals and assembly as the offline worker's; the gate is always open. A run that was
stopped or killed goes on where it was when it is started again with the same input and output.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec

from hybridsched.batches.assemble import Assembler
from hybridsched.batches.cut import Cursor, cut_chunk
from hybridsched.batches.errors import DiskFullError
from hybridsched.batches.progress import Progress
from hybridsched.batches.work import WorkFolder
from hybridsched.core.chunking import Throughput, next_chunk_lines, next_chunk_tokens
from hybridsched.core.policy import OfflinePolicy, PolicyKind, PoolPolicy
from hybridsched.core.values import Budget
from hybridsched.engines.protocol import EngineError
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.log import get_logger
from hybridsched.workers.offline_chunks import ChunkInHand
from hybridsched.workers.offline_engine import LaneEngine, lane_engine
from hybridsched.workers.offline_run import LineRun

_log = get_logger("offline")
_T = TypeVar("_T")

PIPELINE = 2
"""Chunks in hand: while the last lines of one run, the next one fills the engine."""

ENGINE_PATIENCE_S = 300.0
"""How long an engine may be there and unusable (it fails every request, or serves another model) before the
run ends. For one that is away it waits for ever."""

_DISK_WAIT_S = (0.5, 10.0)


class RunState(msgspec.Struct, kw_only=True):
    """How far a run is, for a progress display."""

    lines: int
    """Lines of the batch."""
    done: int = 0
    """Lines with a result, those in chunks that are not finished included."""
    failed: int = 0
    inflight: int = 0
    output_tokens: int = 0
    """Of this run."""


async def run_file(
    work: WorkFolder,
    engine_urls: Sequence[str],
    *,
    policy: PoolPolicy | None = None,
    api_key: str | None = None,
    stop: asyncio.Event | None = None,
    on_progress: Callable[[RunState], None] = lambda state: None,
) -> Progress:
    """Run the batch of `work` on the engines at `engine_urls` until its end, or until `stop` is set.

    Of several engines a line goes to one that serves its model; to the first where none does, whose refusal
    is the line's result. What they serve is asked for once, at the start.

    Takes the folder's exclusive lock and keeps it; the caller removes the folder when `at_end` is true and
    the files are wanted no more. While the engine is away or the disk is full it waits.

    Raises:
        OutputBusyError: another run works on this batch.
        EngineError: an engine has been there and unusable for `ENGINE_PATIENCE_S`, and the place is kept; or
            one of several does not say at the start what it serves.
        BatchFileError: input, journals or output cannot be used; what is finished is kept.
    """
    work.lock_exclusive()
    if policy is None:
        policy = PoolPolicy(
            name="local",
            kind=PolicyKind.UNPROTECTED,
            offline=OfflinePolicy(slots_for_online=0, slice_tokens=0),
        )
    asked = work.index.models
    served = await _models(engine_urls, api_key)
    async with AsyncExitStack() as stack:
        lanes = []
        for url, models in zip(engine_urls, served, strict=True):
            mine = [name for name in asked if not models or name in models]
            likely = max(mine, key=lambda name: asked[name]) if mine else None
            lane = lane_engine(url, policy, likely=likely, api_key=api_key)
            lanes.append(await stack.enter_async_context(lane))
        routes = Routes(lanes, served)
        return await FileRun(work, routes, policy, stop or asyncio.Event(), on_progress).run()


async def _models(urls: Sequence[str], api_key: str | None) -> list[frozenset[str]]:
    """The models of each of several engines; one alone takes every line, so it is not asked."""
    if len(urls) == 1:
        return [frozenset()]
    found = []
    for url in urls:
        engine = VllmHttpEngine(url, api_key=api_key)
        try:
            found.append(frozenset((await engine.info()).models))
        finally:
            await engine.close()
    return found


class Routes:
    """Several engines, and which lines each of them takes."""

    def __init__(self, lanes: Sequence[LaneEngine], models: Sequence[frozenset[str]]) -> None:
        self.lanes = list(lanes)
        self._models = list(models)

    @property
    def inflight(self) -> int:
        return sum(lane.executor.inflight for lane in self.lanes)

    @property
    def problem(self) -> str:
        """Why an engine that is there cannot be used, as code and sentence; empty: none is so."""
        return next((lane.problem for lane in self.lanes if lane.problem), "")

    @property
    def kv_tokens(self) -> int | None:
        """The largest of their KV caches; None while none is known."""
        known = [lane.admission.kv_tokens for lane in self.lanes]
        return max((tokens for tokens in known if tokens is not None), default=None)

    def submit(self, runs: Iterable[LineRun]) -> None:
        """Hand lines out, each to the engine of its model that has the fewest in hand."""
        parts: dict[int, list[LineRun]] = {}
        for run in runs:
            able = [i for i, models in enumerate(self._models) if run.body.get("model") in models] or [0]
            place = min(able, key=lambda i: self.lanes[i].executor.lines + len(parts.get(i, ())))
            parts.setdefault(place, []).append(run)
        for place, mine in parts.items():
            self.lanes[place].executor.submit(mine)


class FileRun:
    """One run of `run_file`."""

    def __init__(
        self,
        work: WorkFolder,
        routes: Routes,
        policy: PoolPolicy,
        stop: asyncio.Event,
        on_progress: Callable[[RunState], None],
    ) -> None:
        self._work = work
        self._routes = routes
        self._policy = policy.offline
        self._stop = stop
        self._on_progress = on_progress
        self._assembler = Assembler(work)
        self._progress = Progress()
        self._throughput = Throughput()
        self._chunks: list[ChunkInHand] = []
        self._wake = asyncio.Event()
        self._trouble_s: float | None = None
        self._output_tokens = 0

    async def run(self) -> Progress:
        progress = await self._patiently(self._assembler.restart)
        if progress is None:
            return await asyncio.to_thread(self._assembler.state)
        self._progress = progress
        cursor: Cursor | None = Cursor(self._progress.offset, self._progress.line)
        if self._progress.at_end:
            cursor = None
        number = self._progress.next_chunk
        budget = Budget(
            max_inflight=self._policy.max_inflight, chunk_tokens=0, slice_tokens=self._policy.slice_tokens
        )
        for lane in self._routes.lanes:
            lane.executor.admit(budget)
        stopping = asyncio.create_task(self._stop.wait())
        stopping.add_done_callback(lambda _: self._wake.set())
        try:
            while (cursor is not None or self._chunks) and not self._stop.is_set():
                self._wake.clear()
                while cursor is not None and len(self._chunks) < PIPELINE and not self._stop.is_set():
                    cursor = await self._next(cursor, number)
                    number += 1
                for chunk in [c for c in self._chunks if c.settled]:
                    await self._settle(chunk)
                if not any(c.settled for c in self._chunks) and self._chunks:
                    await self._wait()
        finally:
            stopping.cancel()
            await self._leave()
        return self._progress

    async def _next(self, cursor: Cursor, number: int) -> Cursor | None:
        """Cut the next chunk and take it in hand; returns where the one after it begins."""
        rate = self._throughput.tokens_per_s
        index = self._work.index
        per_line = index.tokens / max(1, index.valid)
        parallel = self._policy.max_inflight * len(self._routes.lanes)
        with self._work.open_input() as file:
            span = await asyncio.to_thread(
                cut_chunk,
                file,
                cursor,
                max_tokens=next_chunk_tokens(
                    self._policy,
                    rate,
                    kv_tokens=self._routes.kv_tokens,
                    tokens_per_line=per_line,
                    parallel=parallel,
                ),
                max_lines=next_chunk_lines(self._policy, rate, tokens_per_line=per_line, parallel=parallel),
                min_lines=self._policy.chunk_min_lines,
                duplicates=index.duplicates,
            )
        if span is None:
            return None
        # A new fence for each attempt: one that met a full disk may have left a journal.
        fences = itertools.count(1)
        chunk = await self._patiently(
            lambda: ChunkInHand.load(self._work, number, next(fences), span, sequence=number)
        )
        if chunk is None:
            return cursor
        chunk.on_settled = self._wake.set
        self._chunks.append(chunk)
        self._routes.submit(chunk.runs)
        if chunk.settled:
            self._wake.set()
        return None if span.at_end else Cursor(span.end, span.next_line)

    async def _settle(self, chunk: ChunkInHand) -> None:
        if chunk.failure is not None:
            raise chunk.failure

        def flush() -> Progress:
            chunk.seal()
            return self._assembler.advance()

        progress = await self._patiently(flush)
        if progress is None:
            return
        self._chunks.remove(chunk)
        chunk.close()
        self._progress = progress
        totals = chunk.totals
        self._output_tokens += totals.output_tokens
        self._throughput = self._throughput.observe(
            tokens=(totals.prompt_tokens + totals.output_tokens) * max(1, len(self._chunks) + 1),
            seconds=asyncio.get_running_loop().time() - chunk.started_s,
        )
        self._report()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_DISK_WAIT_S[0]):
                await self._wake.wait()
        except TimeoutError:
            for chunk in self._chunks:
                if chunk.disk_full:
                    chunk.write()
        self._give_up_on_engine()
        self._report()

    def _give_up_on_engine(self) -> None:
        """Nobody may be there to read a warning, and an engine that is there and cannot be used stays so."""
        problem = self._routes.problem
        now_s = asyncio.get_running_loop().time()
        if not problem:
            self._trouble_s = None
        elif self._trouble_s is None:
            self._trouble_s = now_s
        elif now_s - self._trouble_s > ENGINE_PATIENCE_S:
            code, _, text = problem.partition(": ")
            raise EngineError(
                f"{text}; it has been so for {ENGINE_PATIENCE_S:g} s, and the run ends with its place kept: "
                "the same command goes on from here",
                code=code,
                retryable=True,
            )

    async def _patiently(self, act: Callable[[], _T]) -> _T | None:
        """Do it in a thread, again while the disk is full; None when the run is stopped meanwhile."""
        wait_s = _DISK_WAIT_S[0]
        while True:
            try:
                return await asyncio.to_thread(act)
            except DiskFullError as error:
                _log.error(
                    "The disk is full; the run waits for space, nothing is lost.",
                    key="disk_full",
                    error=str(error),
                )
            try:
                async with asyncio.timeout(wait_s):
                    await self._stop.wait()
            except TimeoutError:
                wait_s = min(wait_s * 2, _DISK_WAIT_S[1])
            else:
                return None

    async def _leave(self) -> None:
        """End what is in flight and put its tokens down."""
        await asyncio.gather(*(lane.executor.end_inflight() for lane in self._routes.lanes))
        for chunk in self._chunks:
            for lane in self._routes.lanes:
                lane.executor.withdraw(chunk)
            await asyncio.to_thread(chunk.leave)
            chunk.close()
        self._report()

    def _report(self) -> None:
        counts = [chunk.counts for chunk in self._chunks]
        self._on_progress(
            RunState(
                lines=self._work.index.lines,
                done=self._progress.done + self._progress.failed + sum(done + bad for done, bad in counts),
                failed=self._progress.failed + sum(bad for _, bad in counts),
                inflight=self._routes.inflight,
                output_tokens=self._output_tokens + sum(c.totals.output_tokens for c in self._chunks),
            )
        )
