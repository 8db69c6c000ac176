"""The lines of one lane on one engine, as the offline worker's executor runs them.

Admission, prompts by slices at the pace of `core.pacing`, the pause that ends requests and keeps their
tokens, and going on from there. See `workers.offline_lines`, `offline_steps` and `offline_wire`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from math import inf

from hybridsched.core.admission import OfflineAdmission
from hybridsched.core.pacing import Grant, PromptPace, slice_step
from hybridsched.core.values import NO_BUDGET, Budget
from hybridsched.engines.simulated.kv import BLOCK_SIZE
from hybridsched.twin.clock import EngineClock, Loop
from hybridsched.twin.feed import Line
from hybridsched.twin.latencies import Latencies, Ways
from hybridsched.twin.request import TwinRequest

YOUNG_S = 0.01
"""A request sent less than this before a pause may still be on its way, where no abort finds it: its
connection is closed, and what it has made is lost."""

_CACHE_TRUST = 0.5
"""Below this share of expected prefix hits after pauses, prompts are fed by slices again."""


class Sent:
    """A request of a line, in the engine or on its way."""

    __slots__ = ("dropped", "grant", "is_slice", "line", "request", "sent_s")

    def __init__(
        self, line: Line, request: TwinRequest, grant: Grant, sent_s: float, *, is_slice: bool
    ) -> None:
        self.line = line
        self.request = request
        self.grant = grant
        self.sent_s = sent_s
        self.is_slice = is_slice
        self.dropped = False
        """Nobody waits for its answer any more."""
        request.owner = self


class Executor:
    """The lines that one lane has in hand."""

    def __init__(
        self,
        loop: Loop,
        clock: EngineClock,
        latencies: Latencies,
        ways: Ways,
        *,
        admission: OfflineAdmission,
        online_inflight: Callable[[], int],
        on_change: Callable[[], None],
        on_finish: Callable[[Line], None],
        priority: int = 0,
    ) -> None:
        """`on_change` is told when requests have come back or lines are fewer, `on_finish` of each result."""
        self._loop = loop
        self._clock = clock
        self._engine = clock.engine
        self._ways = ways
        self._send_s = latencies.offline_send_ms / 1e3
        self._answer_s = latencies.offline_answer_ms / 1e3
        self._abort_s = latencies.abort_ms / 1e3
        self._admission = admission
        kv, longest = admission.capacity.kv_tokens, admission.capacity.max_model_len
        most = inf if kv is None else int(kv * admission.policy.kv_share)
        self._most = min(most, inf if longest is None else longest)
        self._online_inflight = online_inflight
        self._on_change = on_change
        self._on_finish = on_finish
        self._priority = priority
        self._pace = PromptPace()
        self.budget = NO_BUDGET
        self._step = 0
        """Prompt tokens of a slice; 0: prompts go in whole."""
        self._admitting = False
        self._waiting: list[tuple[tuple[int, int], Line]] = []
        self._running: set[Line] = set()
        self._running_tokens = 0
        self._to_send: list[tuple[tuple[int, int], Line]] = []
        """Lines that are admitted and wait for leave to send their next request."""
        self._sent: dict[Sent, None] = {}
        self._closed: list[Sent] = []
        self._timer_s = inf
        self._cache_share = 1.0
        self.peak = 0
        """Most requests in flight since the lane was last quiet."""
        self.finished_tokens = 0

    @property
    def inflight(self) -> int:
        """Requests in the engine, or on their way to it or back."""
        return len(self._sent)

    @property
    def lines(self) -> int:
        """Lines in hand that have not ended."""
        return len(self._waiting) + len(self._running)

    def held(self) -> set[int]:
        """Numbers of the lines in hand."""
        return {line.number for _, line in self._waiting} | {line.number for line in self._running}

    @property
    def in_flight(self) -> list[Sent]:
        """Requests whose answers are waited for."""
        return list(self._sent)

    @property
    def closing(self) -> int:
        """Requests that may be in the engine still although nobody waits for them: their connections are
        closed, and the engine has not noticed yet."""
        self._closed = [one for one in self._closed if one.request.finished_s is None and one.request.order]
        return len(self._closed)

    @property
    def admitting(self) -> bool:
        return self._admitting

    # -- in and out -----------------------------------------------------------------------------------------

    def submit(self, lines: list[Line]) -> None:
        """Take lines in hand."""
        for line in lines:
            if not line.results:
                heappush(self._waiting, (line.order, line))
        self._pump()

    def withdraw(self, lines: list[Line]) -> None:
        """Give lines out of hand again. None of them has a request in flight."""
        gone = set(map(id, lines))
        self._waiting = [entry for entry in self._waiting if id(entry[1]) not in gone]
        self._waiting.sort()

    def admit(self, budget: Budget) -> None:
        """The gate is open with `budget`."""
        self.budget = budget
        self._pace.slice_tokens = budget.slice_tokens
        self._step = slice_step(budget.slice_tokens, BLOCK_SIZE) if budget.slice_tokens > 0 else 0
        self._admitting = True
        self._pump()

    def stop_admitting(self) -> None:
        """Nothing new is sent from here on; lines that waited for leave to send are put back."""
        self._admitting = False
        stopped, self._to_send = self._to_send, []
        for _, line in stopped:
            self._suspend(line)

    def end_inflight(self) -> tuple[int, int]:
        """Have the engine end every request. Returns how many there are, and how many of them were closed
        because they were too young for an abort."""
        self.stop_admitting()
        now_s = self._loop.now_s
        sent = list(self._sent)
        young = 0
        for one in sent:
            if one.sent_s > now_s - YOUNG_S:
                young += 1
                one.dropped = True
                self._closed.append(one)
                del self._sent[one]
                self._pace.close(one.grant)
                self._suspend(one.line)
        if sent:
            self._loop.after(
                self._abort_s * self._ways.next(), partial(self._abort, [one.request for one in sent])
            )
        return len(sent), young

    # -- starting and sending ----------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start lines as far as the gate, the engine and the budget allow."""
        if not self._admitting:
            return
        waiting, running = self._waiting, self._running
        most = self.budget.max_inflight
        while waiting and len(running) < most:  # a full lane is the usual case, and no question to ask
            line = waiting[0][1]
            answer = self._admission.may_admit(
                tokens=int(min(line.planned, self._most)),
                offline_inflight=len(running),
                offline_tokens=self._running_tokens,
                online_inflight=self._online_inflight(),
                budget=self.budget,
            )
            if not answer.ok:
                break
            heappop(waiting)
            running.add(line)
            self._running_tokens += line.planned
            heappush(self._to_send, (line.order, line))
        if self._to_send or self._timer_s != inf:
            self._send_some()

    def _send_some(self) -> None:
        """Send requests of the lines that come first, as far as the pace allows."""
        to_send, pace, now_s, step = self._to_send, self._pace, self._loop.now_s, self._step
        self._timer_s = inf
        while to_send:
            line = to_send[0][1]
            fed = line.fed
            # How far its next request goes (0: to its end), and what of its prompt is to be computed.
            left = line.prompt_tokens + line.kept - fed
            if 0 < step < left:
                upto, tokens = fed + step, step
            else:
                upto, tokens = 0, left if left > 1 else 1
            wait_s = pace.wait_s(tokens, now_s)
            if wait_s > 0:
                if wait_s != inf:
                    self._timer_s = now_s + wait_s
                    self._loop.at(self._timer_s, self._timer)
                return
            heappop(to_send)
            self._send(line, upto, pace.grant(tokens, now_s), now_s)
            pace.read(pace.sent)  # the twin's engine has no front end that could fall behind

    def _timer(self) -> None:
        if self._loop.now_s == self._timer_s:
            self._send_some()

    def _send(self, line: Line, upto: int, grant: Grant, now_s: float) -> None:
        if upto:
            request = TwinRequest(
                upto,
                1,
                offline=True,
                priority=self._priority,
                cache_key=line,
                known_tokens=line.computed,
            )
        else:
            request = TwinRequest(
                line.prompt_tokens + line.kept,
                line.output_tokens - line.kept,
                offline=True,
                priority=self._priority,
                cache_key=line,
                known_tokens=line.computed,
            )
            if self._pace.slice_tokens > 0:
                self._loop.after(self._pace.final_s, partial(self._prompt_in, grant))
        sent = Sent(line, request, grant, now_s, is_slice=upto > 0)
        self._sent[sent] = None
        if len(self._sent) > self.peak:
            self.peak = len(self._sent)
        self._loop.after(self._send_s * self._ways.next(), partial(self._arrive, sent))

    def _prompt_in(self, grant: Grant) -> None:
        if self._pace.close(grant):
            self._send_some()

    def _arrive(self, sent: Sent) -> None:
        if not sent.dropped:
            self._engine.add(sent.request, self._loop.now_s)
            self._clock.changed()

    # -- answers -----------------------------------------------------------------------------------------

    def ended(self, requests: list[TwinRequest]) -> None:
        """The engine has ended these requests just now."""
        self._loop.after(self._answer_s * self._ways.next(), partial(self._answered, requests))

    def _abort(self, requests: list[TwinRequest]) -> None:
        now_s = self._loop.now_s
        waited = []
        for request in requests:
            if not request.order or request.finished_s is not None:
                continue  # it never got there, or has ended by itself
            if self._engine.abort(request, now_s) <= now_s and request.finish_reason is not None:
                waited.append(request)
        self._clock.changed()
        if waited:
            self.ended(waited)

    def _answered(self, requests: list[TwinRequest]) -> None:
        for request in requests:
            sent = request.owner
            if type(sent) is Sent and not sent.dropped:
                self._take_answer(sent)
        self._pump()
        self._on_change()

    def _take_answer(self, sent: Sent) -> None:
        del self._sent[sent]
        request, line = sent.request, sent.line
        aborted = request.finish_reason == "abort"
        if sent.is_slice and not aborted:
            self._pace.measured(sent.grant, self._loop.now_s)
        self._pace.close(sent.grant)
        self._account(line, request, aborted=aborted)
        if sent.is_slice:
            if aborted:
                self._suspend(line)
                return
            line.fed = request.prompt_tokens
            if self._admitting:
                heappush(self._to_send, (line.order, line))
            else:
                self._suspend(line)
            return
        line.kept += request.made
        if aborted:
            self._suspend(line)
            return
        self._stop_running(line)
        line.results += 1
        self.finished_tokens += line.planned
        self._on_finish(line)

    def _account(self, line: Line, request: TwinRequest, *, aborted: bool) -> None:
        """Take up what an answer says of computed and cached tokens."""
        prompt, made = request.prompt_tokens, request.made
        expected = min(line.computed, prompt)
        if expected and (made or not aborted):
            cached = request.cached_tokens or 0
            if cached < expected:
                line.recomputed += expected - cached
            if line.paused and expected >= 2 * BLOCK_SIZE:
                self._cache_share += 0.2 * (min(1.0, cached / expected) - self._cache_share)
        if made and prompt + made - 1 > line.computed:
            line.computed = prompt + made - 1
        if not aborted:
            line.paused = False

    def _suspend(self, line: Line) -> None:
        """It waits to go on."""
        self._stop_running(line)
        line.paused = True
        line.fed = line.computed - line.computed % BLOCK_SIZE if self._cache_share >= _CACHE_TRUST else 0
        heappush(self._waiting, (line.order, line))

    def _stop_running(self, line: Line) -> None:
        self._running.discard(line)
        self._running_tokens -= line.planned
