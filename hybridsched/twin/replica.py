"""One replica: the online worker's claims and what it holds, beside its engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Protocol

from hybridsched.core.admission import Capacity, OnlineAdmission
from hybridsched.core.latency import IterationTimes, Reading
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.routing import Asker, Terms, claim, load_of
from hybridsched.core.values import LatencyFit
from hybridsched.telemetry.window import SlidingWindow
from hybridsched.twin.clock import EngineClock, Loop
from hybridsched.twin.executor import Sent
from hybridsched.twin.latencies import Latencies, Way, Ways
from hybridsched.twin.meter import MeteredEngine
from hybridsched.twin.online import OnlineRequest
from hybridsched.twin.queue import OnlineQueue
from hybridsched.twin.request import Event, EventKind, TwinRequest

_FIRST_TOKEN = EventKind.FIRST_TOKEN

SCRAPE_S, BUSY_SCRAPE_S, HEALTH_S, PUBLISH_S = 0.15, 0.4, 0.5, 0.2
"""Between two readings of the engine's metrics, idle and busy, two health checks, two records: see
`workers.online_engine` and `workers.online_telemetry`."""


LATENCY_WINDOW_MS = 30_000.0
"""Latency is averaged over this span, as `workers.online_telemetry` does."""


class Hooks(Protocol):
    """What a replica tells the pool."""

    def claimed(self, replica: int, accepted_s: float, load: float) -> None:
        """A claim was granted requests to run, the oldest accepted at `accepted_s`; the load with them."""

    def edge(self, replica: int, at_s: float) -> None:
        """The replica fell idle or became busy; its record says so from `at_s` on."""

    def leaving(self, replica: int) -> None:
        """An expired request is in the engine until the end of the iteration, and held by nobody."""

    def left(self, replica: int) -> None:
        """It has gone."""

    def ended(self, request: OnlineRequest) -> None:
        """A request has its answer."""


class Replica:
    """Claims while it has room, sends to its engine, and answers."""

    def __init__(
        self,
        index: int,
        loop: Loop,
        engine: MeteredEngine,
        queue: OnlineQueue,
        hooks: Hooks,
        latencies: Latencies,
        ways: Ways,
        policy: PoolPolicy,
        terms: Terms,
        *,
        offline_ended: Callable[[list[TwinRequest]], None],
    ) -> None:
        self.index = index
        self.engine = engine
        self.clock = EngineClock(loop, engine, self._on_events)
        self._loop = loop
        self._queue = queue
        self._hooks = hooks
        self._terms = terms
        self._offline_ended = offline_ended
        self._ways = ways
        self._wake_s = latencies.wake_ms / 1e3
        self._send_s = latencies.send_ms / 1e3
        self._reply_s = latencies.reply_ms / 1e3
        self._record_s = latencies.record_ms / 1e3
        limits = engine.limits
        self._kv_tokens = limits.kv_tokens
        admission = OnlineAdmission(
            policy=policy.online,
            capacity=Capacity(kv_tokens=limits.kv_tokens, max_model_len=limits.max_model_len).or_policy(
                policy.engine
            ),
        )
        cap = admission.room(online_inflight=0)
        self._rooms = [admission.room(online_inflight=held) for held in range(cap + 1)]
        """Core's answer for each number that it may hold; it is asked several times a request."""
        self.load = 0.0
        self.claimed = 0
        self.claimed_tokens = 0
        """Requests that were claimed, and their prompt tokens."""
        self._times = IterationTimes()
        self._sampled_s = -inf
        self._ttft = SlidingWindow(LATENCY_WINDOW_MS)
        self._tpot = SlidingWindow(LATENCY_WINDOW_MS)
        self.inflight = 0
        """Online requests that the worker holds."""
        self._cost = 0
        self._claiming = False
        self._full = False
        self._again_s = -inf
        """A claim is under way until then."""
        self.idle_since_s = -60.0
        """When the last one ended, by the worker's count. Long before the trace begins there was none."""
        self.changed_s = -60.0
        """When its last edge stood in its record."""
        self.serving = True
        """Whether it claims; a scheduler may give whole engines to offline work (`twin.baselines`)."""
        self.away = False
        """It claims nothing, and its engine stops (or has) once it holds nothing."""
        self._left_s = 0.0
        self._away_s = 0.0

    def announce(self) -> None:
        """Whether it serves has changed: its record says so."""
        self._queue.board.write(self.index, self.load, self.inflight, room=self.room() > 0)

    def leave(self) -> None:
        """Claim nothing from now on."""
        self.away, self._left_s = True, self._loop.now_s
        self._queue.board.write(self.index, self.load, self.inflight, room=False)
        self._hooks.edge(self.index, self._loop.now_s)

    def come_back(self) -> None:
        """The engine has started anew, unless it never stopped, and serves."""
        now_s = self._loop.now_s
        self._away_s, self.away = self.away_s(now_s), False
        if not self.inflight:
            if not self.engine.online and not self.engine.offline:
                self.engine.blocks.reset_cache()
            self.idle_since_s = now_s
            self.changed_s = now_s + self._record_s
        self._queue.board.write(self.index, self.load, self.inflight, room=self.room() > 0)
        self._hooks.edge(self.index, now_s + self._record_s)
        self.wake(after_s=0.0)

    def away_s(self, now_s: float) -> float:
        """For how long its engine has not been there."""
        if not self.away or self.inflight:
            return self._away_s
        return self._away_s + max(0.0, now_s - max(self._left_s, self.idle_since_s))

    def room(self) -> int:
        """How many requests may be claimed now."""
        if self.away or not self.serving:
            return 0
        if self.inflight and self._cost >= self._kv_tokens:
            return 0
        rooms = self._rooms
        return rooms[self.inflight] if self.inflight < len(rooms) else 0

    # -- claims ---------------------------------------------------------------------------------------------

    def wake(self, *, after_s: float | None = None) -> None:
        """A wake was published for the replica, or it has a reason of its own to claim."""
        if not self._claiming:
            self._claiming = True
            now_s = self._loop.now_s
            if after_s is None:
                waiting = self._queue.waiting
                factor = self._ways.of(waiting[0].index, Way.WAKE) if waiting else 1.0
                after_s = self._wake_s * factor
            self._loop.at(max(now_s + after_s, self._again_s), self._claim)

    def _claim(self) -> None:
        self._claiming = False
        now_s = self._loop.now_s
        room = self.room()
        self._full = room <= 0
        if room <= 0:
            return
        queue = self._queue
        other = queue.board.least_loaded(now_s, self.index)
        grant = claim(
            (queue.waiting,),
            Asker(
                load=self.load,
                inflight=self.inflight,
                room=room,
                turn=queue.board.turn(self.index, now_s),
            ),
            None if other is None else other[1],
            self._terms,
            now_ms=now_s * 1e3,
        )
        queue.board.write(self.index, grant.load, grant.inflight, room=grant.live < room)
        queue.board.woken[self.index] = False
        granted = queue.take(grant.taken[0], now_s)
        if granted:
            first = granted[0]
            self._hooks.claimed(self.index, first.accepted_ms / 1e3, grant.load)
            for request in granted:
                self._begin(request, now_s)
            send_s = self._send_s * self._ways.of(first.index, Way.SEND)
            self._loop.after(send_s, partial(self._send, granted))
        if queue.waiting:
            if other is not None:
                queue.wake(other[0])
            queue.look_later()
        self._again_s = now_s + self._wake_s
        if grant.live >= room:
            self.wake(after_s=0.0)

    def _begin(self, request: OnlineRequest, now_s: float) -> None:
        request.replica = self.index
        request.claimed_s = now_s
        request.load = load_of(request, self._terms)
        self.load += request.load
        self._cost += request.cost
        self.inflight += 1
        self.claimed += 1
        self.claimed_tokens += request.prompt_tokens
        if self.inflight == 1:
            self.changed_s = now_s + self._record_s
            self._hooks.edge(self.index, self.changed_s)

    def _send(self, requests: list[OnlineRequest]) -> None:
        engine, now_s = self.engine, self._loop.now_s
        for request in requests:
            if request.status:
                continue  # it has expired meanwhile
            twin = TwinRequest(request.prompt_tokens, request.output_tokens, owner=request)
            request.twin = twin
            if not engine.online:
                engine.meter.online_began(now_s)
            engine.add(twin, now_s)
        self.clock.changed()

    # -- answers --------------------------------------------------------------------------------------------

    def _on_events(self, events: list[Event]) -> None:
        now_s = self._loop.now_s
        offline: list[TwinRequest] = []
        online = False
        for kind, twin in events:
            owner = twin.owner
            if twin.offline:
                if kind is not _FIRST_TOKEN and isinstance(owner, Sent) and not owner.dropped:
                    offline.append(twin)
            elif isinstance(owner, OnlineRequest):
                online = self._on_online(kind, owner, now_s) or online
        if online and not self.engine.online:
            self.engine.meter.online_ended(now_s)
        if offline:
            self._offline_ended(offline)

    def _on_online(self, kind: EventKind, request: OnlineRequest, now_s: float) -> bool:
        """An online request has its first token, or has ended; whether the latter."""
        first = kind is _FIRST_TOKEN
        if request.status:  # it had expired
            if not first:
                self._hooks.left(self.index)
            return not first
        at_s = now_s + self._reply_s * self._ways.of(request.index, Way.REPLY)
        if first:
            request.first_s = at_s
            self._ttft.add(now_s * 1e3, at_s * 1e3 - request.accepted_ms)
            self._lower(request, request.load - request.prompt_tokens)
            return False
        request.last_s = request.end_s = at_s
        request.status = "ok"
        request.twin = None
        decodes = request.output_tokens - 1
        if decodes > 0 and request.first_s is not None:
            self._tpot.add(now_s * 1e3, (at_s - request.first_s) * 1e3 / decodes)
        self._end(request)
        return True

    def _lower(self, request: OnlineRequest, to: float) -> None:
        self.load = max(0.0, self.load - (request.load - to))
        request.load = to
        now_s = self._loop.now_s
        self._queue.board.will_write(
            self.index, self.load, self.inflight, room=self.room() > 0, now_s=now_s + self._reply_s
        )

    def _end(self, request: OnlineRequest) -> None:
        self.inflight -= 1
        self._cost -= request.cost
        if not self.inflight:
            self.idle_since_s = self._loop.now_s + self._reply_s
            self.changed_s = self.idle_since_s + self._record_s
            self._hooks.edge(self.index, self.changed_s)
        self._lower(request, 0.0)
        if self._full:
            self.wake(after_s=self._reply_s)
        self._hooks.ended(request)

    def expire(self, request: OnlineRequest) -> None:
        """The deadline of a request that it holds has passed: it is ended in the engine."""
        now_s = self._loop.now_s
        if request.twin is not None:
            if self.engine.abort(request.twin, now_s) > now_s:
                self._hooks.leaving(self.index)
            elif not self.engine.online:
                self.engine.meter.online_ended(now_s)
            self.clock.changed()
        self._end(request)

    def fit(self, now_s: float) -> tuple[LatencyFit | None, float | None]:
        """How long the engine's iterations take, by readings of its counters, and the age of that in ms."""
        if now_s - self._sampled_s >= SCRAPE_S:
            self._sampled_s = now_s
            engine = self.engine
            engine.settle(now_s)
            totals = engine.totals
            tokens = totals.prefill_online + totals.prefill_offline
            self._times.observe(
                Reading(
                    at_ms=now_s * 1e3,
                    iterations=float(totals.iterations),
                    tokens=float(tokens + totals.output_online + totals.output_offline),
                    kv_use=engine.kv_use,
                    running=float(engine.running),
                )
            )
        at_ms = self._times.at_ms
        return self._times.fit(), None if at_ms is None else now_s * 1e3 - at_ms

    def ttft_ms(self, now_s: float) -> float | None:
        """Mean time to first token of late; None: there was none."""
        return self._ttft.mean(now_s * 1e3)

    def tpot_ms(self, now_s: float) -> float | None:
        """The same of the time per further token."""
        return self._tpot.mean(now_s * 1e3)

    # -- what its records say -------------------------------------------------------------------------------

    def record_age_s(self, now_s: float) -> float:
        """Age of its last record: one comes at each edge, and regularly after it."""
        return (now_s - self.changed_s) % PUBLISH_S if now_s >= self.changed_s else 0.0

    def scrape_age_s(self, now_s: float) -> float:
        """Age of the last reading of the engine's metrics; falling idle begins a new one."""
        if self.inflight:
            return (now_s - self.changed_s) % BUSY_SCRAPE_S
        return (now_s - self.idle_since_s) % SCRAPE_S if now_s >= self.idle_since_s else 0.0

    def health_age_s(self, now_s: float) -> float:
        """Age of the last health check."""
        return (now_s + 0.01 * self.index) % HEALTH_S
