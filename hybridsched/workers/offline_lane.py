"""One lane at its worker: follows the gate, lets lines in, pauses them, and says what it did.

Nothing is awaited between the gate's message and the request that pauses: the gate's callback runs the state
machine (`core.lane`) and the executor at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hybridsched.core import lane as machine
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import Gate
from hybridsched.log import get_logger
from hybridsched.workers.offline_lines import Ended, LineExecutor
from hybridsched.workers.offline_own import OwnEngine

_log = get_logger("offline")

KEEP = "keep"
"""How a report calls the rung of the iteration on an engine of the lane's own, where nothing is ended."""

PEAK_WINDOW_S = 2.0
"""Span of the peak of requests in the engine, seconds: longer than any gauge lags (`core.idle`)."""


class Lane:
    """The state of one lane, driven by its gate and its executor. Everything happens on one event loop."""

    def __init__(
        self,
        name: str,
        executor: LineExecutor,
        *,
        event: Callable[[dict[str, Any]], None],
        on_open: Callable[[bool], None] = lambda is_open: None,
        clock: Callable[[], float] = time.monotonic,
        own: OwnEngine | None = None,
    ) -> None:
        """`event` takes the events of the report (see `store.events`); `on_open` is told when it opens or
        closes. `own`: the lane has its engine to itself, and may stop it and put it to sleep."""
        self.name = name
        self._executor = executor
        self._event = event
        self._on_open = on_open
        self._clock = clock
        self._own = own
        if own is not None:
            own.tell = self._handle
        self._state = machine.LaneState(lane=name, own=own is not None)
        self._grace: asyncio.TimerHandle | None = None
        self._rest: list[asyncio.TimerHandle] = []
        self._ending: asyncio.Task[None] | None = None
        self._ended = Ended()
        self._inflight_at_close = 0
        self._opened = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.unloaded = asyncio.Event()
        """Set when an engine that stood still has given back the requests that it held."""
        self._peaks: deque[tuple[float, int]] = deque()

    @property
    def is_open(self) -> bool:
        return self._state.phase is machine.Phase.OPEN

    @property
    def quiet(self) -> bool:
        """Whether the lane is closed and none of its requests runs."""
        return self._state.phase in machine.QUIET

    async def opened(self) -> None:
        """Wait until the lane is open."""
        await self._opened.wait()

    async def until_quiet(self) -> None:
        """Wait until the lane is closed and quiet."""
        await self._idle.wait()

    def policy_changed(self, policy: PoolPolicy) -> None:
        """Take up what a new policy says of pauses."""
        self._state = self._state.with_pause(policy.pause)

    def found(self, stands: bool) -> None:
        """How the worker has found the engine: one that stands still or sleeps is checked before it works."""
        self._state = self._state.found(stands=stands)

    def can_sleep(self, can: bool) -> None:
        """Whether the engine can be put to sleep."""
        self._state = self._state.with_sleep(can=can)

    def gate_changed(self, gate: Gate) -> None:
        """The gate as it is now; called by the gate's watch the moment it knows."""
        self._inflight_at_close = self._executor.inflight
        self._handle(machine.GateSeen(gate=gate, inflight=self._executor.inflight))

    def stop(self) -> None:
        """A last pause without grace; no gate opens the lane after it."""
        self._handle(machine.Stop(inflight=self._executor.inflight))

    def executor_changed(self) -> None:
        """The number of requests in the engine has changed."""
        now_s, inflight = self._clock(), self._executor.inflight
        self._note_peak(now_s, inflight)
        if inflight == 0 and self._state.phase is machine.Phase.GRACE:
            self._handle(machine.AllQuiet())

    def peak(self) -> int:
        """Most requests in the engine at once over the last `PEAK_WINDOW_S`."""
        self._note_peak(self._clock(), self._executor.inflight)
        return self._peaks[0][1]

    def _note_peak(self, now_s: float, inflight: int) -> None:
        # A falling queue of maxima: its first entry is the peak of the window. A value counts as long as it
        # stood, so the entry before the window's begin stays until a later one covers it.
        while self._peaks and self._peaks[-1][1] <= inflight:
            self._peaks.pop()
        self._peaks.append((now_s, inflight))
        while len(self._peaks) > 1 and self._peaks[1][0] < now_s - PEAK_WINDOW_S:
            self._peaks.popleft()

    def _handle(self, event: machine.Event) -> None:
        was_open = self.is_open
        self._state, instructions = machine.handle(self._state, event)
        for instruction in instructions:
            self._execute(instruction)
        if self.is_open:
            self._opened.set()
        else:
            self._opened.clear()
        if self.quiet:
            self._idle.set()
        else:
            self._idle.clear()
        if self.is_open != was_open:
            self._on_open(self.is_open)

    def _execute(self, instruction: machine.Instruction) -> None:
        match instruction:
            case machine.StopAdmitting():
                self._executor.stop_admitting()
            case machine.AbortInflight():
                self._ending = asyncio.create_task(self._end(), name=f"lane-end-{self.name}")
            case machine.Admit(budget=budget, resumed=resumed):
                self._executor.admit(budget)
                if resumed:
                    self._event({"t": "resume", "lane": self.name, "mono_s": self._clock()})
            case machine.StartGrace(pause=pause, ms=ms):
                self._grace = asyncio.get_running_loop().call_later(
                    ms / 1000.0, self._handle, machine.GraceOver(pause=pause)
                )
            case machine.CancelGrace():
                if self._grace is not None:
                    self._grace.cancel()
                    self._grace = None
            case machine.ReportQuiet():
                self._report(instruction)
            case machine.StartRest(pause=pause, keep_ms=keep_ms, sleep_ms=sleep_ms):
                self._rest = [
                    asyncio.get_running_loop().call_later(ms / 1000.0, self._handle, event)
                    for ms, event in (
                        (keep_ms, machine.KeepOver(pause=pause)),
                        (sleep_ms, machine.SleepDue(pause=pause)),
                    )
                    if ms is not None
                ]
            case machine.CancelRest():
                for timer in self._rest:
                    timer.cancel()
                self._rest = []
            case machine.ReportAsleep(reason=reason):
                self._event(
                    {"t": "asleep", "lane": self.name, "mono_s": self._clock(), "reason": reason.value}
                )
            case _:
                self._order(instruction)

    def _order(self, instruction: machine.Instruction) -> None:
        """What only an engine of the lane's own is told."""
        own = self._own
        if own is None:
            raise RuntimeError(f"lane {self.name} shares its engine and was to do {instruction}")
        match instruction:
            case machine.HoldEngine(pause=pause):
                own.hold(pause)
            case machine.LetGo(turn=turn, check=check):
                own.let_go(turn, check=check)
            case machine.CancelLetGo():
                own.cancel()
            case machine.PutToSleep(pause=pause):
                own.sleep(pause)
            case machine.Release():
                own.release()

    async def _end(self) -> None:
        held = self._state.told
        self._ended = await self._executor.end_inflight()
        if self._ended.closed:
            _log.warning(
                "Some requests did not come back after an abort; their connections were closed and their "
                "lines run again. See whether the engine hangs.",
                key="abort_hung",
                lane=self.name,
                closed=self._ended.closed,
            )
        if held:
            self.unloaded.set()
        self._handle(machine.AllQuiet())

    def _report(self, quiet: machine.ReportQuiet) -> None:
        if not quiet.had_work:
            self._ended = Ended()
            return
        ended, self._ended = self._ended, Ended()
        held = self._executor.inflight if quiet.held else 0
        self._event(
            {
                "t": "quiet",
                "lane": self.name,
                "mono_s": self._clock() if quiet.held else self._executor.quiet_s,
                "rung": KEEP if quiet.held else quiet.rung.value,
                "reason": quiet.reason.value,
                "ended": 0 if quiet.held else ended.ended or self._inflight_at_close,
                "held": held,
                "kept_tokens": ended.kept_tokens,
                "closed": ended.closed,
            }
        )
