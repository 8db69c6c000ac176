"""One lane at its worker: the state machine of `core.lane`, driven as the offline worker drives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from hybridsched.core import lane as machine
from hybridsched.core.chunking import Throughput
from hybridsched.core.policy import PoolPolicy, Rung
from hybridsched.core.values import Gate
from hybridsched.twin.clock import Loop
from hybridsched.twin.executor import Executor
from hybridsched.twin.feed import Chunk, Feed, Line
from hybridsched.twin.latencies import Latencies
from hybridsched.twin.meter import MeteredEngine

PIPELINE = 6
"""Chunks that a lane may have in hand (`workers.offline.PIPELINE`)."""

HOLD_S, BEAT_S = 30.0, 2.0
"""How long a lane that is paused keeps a chunk that another lane could run, and how often it looks."""

MEASURE_S = 1.0
"""The throughput is measured over at least this long with the gate open (half a chunk's target if
shorter)."""


class PauseCounts:
    """What the pauses of a pool have come to."""

    def __init__(self) -> None:
        self.by_rung: Counter[str] = Counter()
        self.ended = 0
        """Requests that were in the engine."""
        self.kept_tokens = 0
        """Output tokens that they brought back."""


class TwinLane:
    """A lane, its chunks and its executor."""

    def __init__(
        self,
        name: str,
        loop: Loop,
        feed: Feed,
        engine: MeteredEngine,
        latencies: Latencies,
        policy: PoolPolicy,
        counts: PauseCounts,
        *,
        kv_tokens: int,
        changed: Callable[[], None],
    ) -> None:
        """`changed`: what the policy worker would read of the lane may be another now."""
        self.name = name
        self._loop = loop
        self._feed = feed
        self._engine = engine
        self._policy = policy
        self._counts = counts
        self._kv_tokens = kv_tokens
        self._changed = changed
        self._chunk_s = latencies.chunk_ms / 1e3
        self._state = machine.LaneState(lane=name, ladder=policy.pause.ladder)
        self._executor: Executor | None = None
        self._grace: int | None = None
        self._chunks: set[Chunk] = set()
        self._taking = False
        self._closed_at_s = 0.0
        self._ended = 0
        self._kept_before = 0
        self.throughput = Throughput()
        self._measured_s = min(MEASURE_S, policy.offline.chunk_target_ms / 2000.0)
        self._open_s = 0.0
        self._open_since_s = 0.0
        self._tokens_before = 0

    def attach(self, executor: Executor) -> None:
        """The executor, which needs the lane's callbacks to be made."""
        self._executor = executor

    @property
    def executor(self) -> Executor:
        if self._executor is None:
            raise RuntimeError(f"lane {self.name} has no executor yet")
        return self._executor

    @property
    def is_open(self) -> bool:
        return self._state.phase is machine.Phase.OPEN

    @property
    def quiet(self) -> bool:
        """Closed, and none of its requests is in the engine."""
        return self._state.phase is machine.Phase.CLOSED

    @property
    def work(self) -> int:
        """Lines that the lane could run."""
        return self.executor.lines + (0 if self._feed.seen_empty else max(1, self._feed.backlog))

    @property
    def has_work(self) -> bool:
        return not self._feed.seen_empty or self.executor.lines > 0

    # -- the gate -----------------------------------------------------------------------------------------

    def gate_seen(self, gate: Gate) -> None:
        """The gate as it is now."""
        self._handle(machine.GateSeen(gate=gate, inflight=self.executor.inflight))

    def lease_over(self) -> None:
        """Nobody has renewed the gate."""
        self._handle(machine.LeaseOver(inflight=self.executor.inflight))

    def stop(self) -> None:
        """A last pause without grace, which ends what is in flight whatever the policy's ladder says."""
        self._state = self._state.with_ladder((Rung.BOUNDARY, Rung.ITERATION))
        self._handle(machine.Stop(inflight=self.executor.inflight))

    def leave(self) -> bool:
        """The worker goes, and its chunks with it. False: the lane is not quiet, so it cannot yet."""
        if self.is_open or not self.quiet:
            return False
        self._give_back(self._closed_at_s)
        return True

    def _handle(self, event: machine.Event) -> None:
        was_open = self.is_open
        self._state, instructions = machine.handle(self._state, event)
        now_s = self._loop.now_s
        if self.is_open is not was_open:
            if was_open:
                self._open_s += now_s - self._open_since_s
                self._closed_at_s = now_s
                if self._chunks:
                    self._look_to_give_back(now_s)
            else:
                self._open_since_s = now_s
        for instruction in instructions:
            self._execute(instruction)

    def _execute(self, instruction: machine.Instruction) -> None:
        executor = self.executor
        match instruction:
            case machine.StopAdmitting():
                executor.stop_admitting()
                self._ended, self._kept_before = executor.inflight, self._kept()
            case machine.AbortInflight():
                self._ended, _ = executor.end_inflight()
                if executor.inflight == 0:
                    self._loop.after(0.0, self._all_quiet)
            case machine.Admit(budget=budget, resumed=resumed):
                if resumed:
                    self._engine.resumed(self._loop.now_s)
                    executor.peak = 0
                executor.admit(budget)
                self._take_if_wanted()
            case machine.StartGrace(pause=pause, ms=ms):
                self._grace = self._loop.after(ms / 1e3, partial(self._grace_over, pause))
            case machine.CancelGrace():
                if self._grace is not None:
                    self._loop.cancel(self._grace)
                    self._grace = None
            case machine.ReportQuiet(rung=rung, had_work=had_work):
                if had_work:
                    self._counts.by_rung[rung.value] += 1
                    self._counts.ended += self._ended
                    self._counts.kept_tokens += max(0, self._kept() - self._kept_before)

    def _grace_over(self, pause: int) -> None:
        self._grace = None
        self._handle(machine.GraceOver(pause=pause))

    def _all_quiet(self) -> None:
        if self.executor.inflight == 0:
            self._handle(machine.AllQuiet())

    def _kept(self) -> int:
        """Tokens of unfinished lines in hand that are kept."""
        return sum(line.kept for chunk in self._chunks for line in chunk.lines if not line.results)

    # -- the executor ---------------------------------------------------------------------------------------

    def executor_changed(self) -> None:
        """Requests have come back."""
        if not self.is_open and not self.quiet and self.executor.inflight == 0:
            self._handle(machine.AllQuiet())
        if self._feed.seen_empty:
            self._changed()  # whether the lane has work left depends on its own lines now
        self._take_if_wanted()

    def finished(self, line: Line) -> None:
        """A line has its result."""
        self._feed.finished += 1
        chunk = line.chunk
        if chunk is not None:
            chunk.left -= 1
            if chunk.left == 0:
                self._chunks.discard(chunk)
        now_s = self._loop.now_s
        if not self._feed.remaining:
            self._changed()
        open_s = self._open_s + (now_s - self._open_since_s if self.is_open else 0.0)
        tokens = self.executor.finished_tokens
        if open_s >= self._measured_s and tokens > self._tokens_before:
            self.throughput = self.throughput.observe(tokens=tokens - self._tokens_before, seconds=open_s)
            self._tokens_before, self._open_s, self._open_since_s = tokens, 0.0, now_s
            self._changed()

    # -- chunks ------------------------------------------------------------------------------------------

    def _take_if_wanted(self) -> None:
        executor = self._executor
        if (
            executor is None
            or self._taking
            or not self.is_open
            or self._feed.empty
            or executor.lines >= max(1, executor.budget.max_inflight)
            or len(self._chunks) >= PIPELINE
        ):
            return
        self._taking = True
        self._loop.after(self._chunk_s, self._take)

    def _take(self) -> None:
        self._taking = False
        if not self.is_open:
            return
        executor, offline = self.executor, self._policy.offline
        chunk = self._feed.take(
            offline,
            self.throughput.tokens_per_s,
            parallel=executor.budget.max_inflight or offline.max_inflight,
            kv_tokens=self._kv_tokens,
            now_s=self._loop.now_s,
        )
        if chunk is None:
            return
        self._chunks.add(chunk)
        executor.submit(chunk.lines)
        self._take_if_wanted()

    def _look_to_give_back(self, closed_s: float) -> None:
        """A worker looks with each beat of a chunk's lease whether the lane has been closed for too long."""
        first = min(chunk.taken_s for chunk in self._chunks)
        beats = int((closed_s + HOLD_S - first) / BEAT_S) + 1
        self._loop.at(max(self._loop.now_s, first + beats * BEAT_S), partial(self._give_back, closed_s))

    def _give_back(self, closed_s: float) -> None:
        if self.is_open or self._closed_at_s != closed_s or not self.quiet:
            return
        for chunk in sorted(self._chunks, key=lambda one: one.sequence, reverse=True):
            self.executor.withdraw(chunk.lines)
            self._feed.give_back(chunk)
        self._chunks.clear()
        self._changed()  # it has less work, or none
