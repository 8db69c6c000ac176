"""The engine's clock: plans and commits iterations at the times the profile gives.

The clock is virtual and chained. An iteration starts at the exact end of the one before while there is work,
and an idle engine starts at the arrival, however late the event loop is; only requests that had arrived by an
iteration's start join it. When the loop is late, iterations are caught up one after the other.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from hybridsched.engines.simulated.iteration import Iteration, Outcome
from hybridsched.engines.simulated.log import FLUSH_EVERY_S, IterationLog
from hybridsched.engines.simulated.metrics import EngineMetrics
from hybridsched.engines.simulated.perf import Profile
from hybridsched.engines.simulated.scheduler import Limits, Scheduler
from hybridsched.engines.simulated.sequence import Seq, Status
from hybridsched.engines.simulated.timer import PreciseTimer

_BURST = 4
"""Iterations caught up before the event loop gets a turn. More than one merges tokens into one event."""
_GIVE_UP_LAG_S = 10.0
"""A clock further behind than this (the process was stopped) jumps to the present."""


class Sink(Protocol):
    """Who waits for a sequence."""

    streaming: bool
    stop: tuple[str, ...]

    def token(self, seq: Seq) -> str | None:
        """A new token stands last in `seq.output` (only called when streaming or with stop strings).

        Returns a finish reason to end the sequence with, or None.
        """

    def done(self, seq: Seq) -> None: ...

    def failed(self) -> None:
        """The engine died."""


class Timer(Protocol):
    """Calls back once the clock has reached a time."""

    def start(self) -> None: ...

    def at(self, when: float) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class EngineLoop:
    """Drives a `Scheduler` in real time, `speed` times faster than the profile says."""

    def __init__(
        self,
        limits: Limits,
        profile: Profile,
        *,
        model: str,
        speed: float,
        log: IterationLog | None,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[Callable[[], None]], Timer] = PreciseTimer,
    ) -> None:
        if not 0 < speed < math.inf:
            raise ValueError(f"speed must be a number above 0, got {speed}")
        self.scheduler = Scheduler(limits)
        self.metrics = EngineMetrics(model, self.scheduler, profile=profile.name, speed=speed)
        self.profile = profile
        self.speed = speed
        self.dead = False
        self.lag_jumps = 0
        self._log = log
        self._clock = clock
        self._arrivals: deque[Seq] = deque()
        self._current: Iteration | None = None
        self._waiting = (0, 0)
        self._end = 0.0
        self._live: dict[str, list[Seq]] = {}
        self._left: set[Seq] = set()
        self._aborting: set[Seq] = set()
        self._quiet: list[asyncio.Future[None]] = []
        self._timer = timer(self._tick)
        self._flusher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._timer.start()
        if self._log is not None:
            self._flusher = asyncio.get_running_loop().create_task(self._flush_for_ever(self._log))

    async def _flush_for_ever(self, log: IterationLog) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            log.flush()

    def close(self) -> None:
        """Write the rest of the log and release the timer."""
        if self._flusher is not None:
            self._flusher.cancel()
        self._timer.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def kill(self, *, tell: bool) -> None:
        """Stop for good. With `tell` the waiting sinks hear of it; without, they hang as at a SIGTERM."""
        self.dead = True
        self._timer.cancel()
        self._current = None
        if self._log is not None:
            self._log.flush()
        if tell:
            for seqs in list(self._live.values()):
                for seq in seqs:
                    seq.sink.failed()
            self._live.clear()

    # -- requests ---------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Sequences accepted and not ended."""
        return self.scheduler.unfinished + len(self._arrivals)

    @property
    def lag_s(self) -> float:
        return max(0.0, self._clock() - self._end) if self._current is not None else 0.0

    def submit(self, seqs: Iterable[Seq]) -> None:
        """Accept sequences, stamped with the present."""
        now = self._clock()
        for seq in seqs:
            seq.arrival = now
            self._live.setdefault(seq.request_id, []).append(seq)
            self._arrivals.append(seq)
        self._kick(now)

    def abort(self, request_ids: Iterable[str]) -> int:
        """End by id, at the next boundary; no ids end nothing here. Returns how many matched.

        As in vLLM, requests that are ended so are not counted among the finished ones; by a pause they are.
        """
        count = 0
        for request_id in dict.fromkeys(request_ids):
            for seq in list(self._live.get(request_id, ())):
                if seq not in self._aborting:
                    count += 1
                    self._aborting.add(seq)
                    self._abort(seq)
        return count

    def abort_all(self) -> int:
        return self.abort(list(self._live))

    def abandon(self, seq: Seq) -> None:
        """The client left: end the sequence and count nothing."""
        if seq.status is not Status.FINISHED and not self.dead:
            self._left.add(seq)
            self._abort(seq)

    def _abort(self, seq: Seq) -> None:
        if seq.status is Status.FINISHED:
            return
        if seq.order == 0:  # not yet given to the scheduler
            self._arrivals.remove(seq)
            seq.status, seq.finish_reason = Status.FINISHED, "abort"
            self._ended([seq], self._clock())
        elif self.scheduler.abort(seq):
            self._ended([seq], self._clock())
            if self._current is None and not self.scheduler.paused:
                self.metrics.set_gauges()

    # -- pause ------------------------------------------------------------------------------------------

    async def pause(self, mode: str, *, clear_cache: bool = True) -> None:
        """As `Scheduler.pause`; returns once the engine stands still."""
        self._admit(self._clock())
        was_paused = self.scheduler.paused
        ended = self.scheduler.pause(mode, clear_cache=clear_cache)
        self._ended(ended, self._clock())
        if ended and not was_paused and mode == "abort":
            self.metrics.set_gauges()
        if not (self.scheduler.paused or self.dead):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._quiet.append(waiter)
            await waiter

    def resume(self) -> None:
        self.scheduler.resume()
        self._kick(self._clock())
        if self._current is None:
            self.metrics.set_gauges()  # what was aborted during the pause leaves no step that would
        self._tell_quiet()

    def _tell_quiet(self) -> None:
        waiters, self._quiet = self._quiet, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- the chain --------------------------------------------------------------------------------------

    def _kick(self, now: float) -> None:
        if self._current is None and self._begin(now):
            self._timer.at(self._end)

    def _admit(self, start: float) -> None:
        arrivals = self._arrivals
        while arrivals and arrivals[0].arrival <= start:
            self.scheduler.add(arrivals.popleft())

    def _begin(self, start: float) -> bool:
        """Plan the iteration that starts at `start`; when there is no work, at the next arrival.

        False: there is nothing to run.
        """
        if self.dead:
            return False
        scheduler = self.scheduler
        while True:
            self._admit(start)
            it = scheduler.plan(start)
            if it is not None:
                break
            if scheduler.paused:
                self._tell_quiet()
            if not self._arrivals:
                self._current = None
                return False
            start = max(start, self._arrivals[0].arrival)
        self._waiting = (scheduler.queue.online, scheduler.queue.offline)
        ms = self.profile.iteration_ms(
            prefill_tokens=it.prefill_online + it.prefill_offline,
            batch_decode=it.decodes,
            total_context=it.context,
            prefill_pairs=it.prefill_pairs,
        )
        self._current = it
        self._end = start + ms / 1000.0 / self.speed
        return True

    def _tick(self) -> None:
        """The current iteration's time is over: commit it and begin the next."""
        for _ in range(_BURST):
            it = self._current
            if it is None or self.dead:
                return
            now = self._clock()
            if self._end > now:
                break
            end = self._end
            out = self.scheduler.commit(it, end)
            self._current = None
            self._deliver(it, out, end)
            if now - end > _GIVE_UP_LAG_S:
                self.lag_jumps += 1
                end = now
            self._begin(end)
        if self._current is not None:
            self._timer.at(self._end)

    def _deliver(self, it: Iteration, out: Outcome, end: float) -> None:
        for seq in out.emitted:
            sink = seq.sink
            if sink.streaming or sink.stop:
                reason = sink.token(seq)
                if reason is not None and seq.status is not Status.FINISHED:
                    self.scheduler.finish(seq, reason)
                    seq.finished_at = end
                    out.finished.append(seq)
                    self.scheduler.read_gauges(out)
        self.metrics.step(it, out, end)
        if out.finished:
            self._ended(out.finished, end)
        if self._log is not None:
            self._log.add(it, end, out, self.scheduler, self._waiting)

    def _ended(self, seqs: list[Seq], now: float) -> None:
        counted = []
        for seq in seqs:
            told = seq in self._aborting
            self._aborting.discard(seq)
            same = self._live.get(seq.request_id)
            if same is not None and seq in same:
                same.remove(seq)
                if not same:
                    del self._live[seq.request_id]
            if seq in self._left:
                self._left.discard(seq)
                continue
            seq.sink.done(seq)
            if not told:
                counted.append(seq)
        self.metrics.finished(counted, now)
