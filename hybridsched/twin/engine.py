"""One vLLM engine by counts of tokens: the same iterations as the simulated scheduler's, most of them unseen.

What it does is a sequence of runs (see `Run`): one iteration with prompt tokens in it, or a number of
decode-only iterations of the same requests, which end with the first of them that has all its tokens, or
with the KV cache full. Whoever arrives meanwhile cuts the run at the end of the iteration that is going on.
A request that decodes is not touched: it is known by the number of the iteration that ends it.

At most one prompt is computed in part, and it is the last of the running ones: an iteration takes a further
prompt only with what the others leave, and every running request gets at least one token, as there are never
more of them than `max_num_batched_tokens`.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop
from math import inf

from hybridsched.engines.simulated.kv import BLOCK_SIZE
from hybridsched.engines.simulated.perf import Profile, run_ms
from hybridsched.engines.simulated.queue import WaitingQueue
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.engines.simulated.sequence import Status
from hybridsched.twin.batch import Batch, Work, blocks_of, key_of, measure
from hybridsched.twin.blocks import CountedBlocks
from hybridsched.twin.request import Event, EventKind, TwinRequest
from hybridsched.twin.run import Run
from hybridsched.twin.totals import Totals

_HELD, _WAITING, _RUNNING, _FINISHED = Status.HELD, Status.WAITING, Status.RUNNING, Status.FINISHED
_FIRST_TOKEN, _FINISH, _ABORT = EventKind.FIRST_TOKEN, EventKind.FINISHED, EventKind.ABORTED


class TwinEngine(Run):
    """Continuous batching, chunked prefill, preemption by recomputation, pause; see `Scheduler`.

    The caller keeps the clock: it calls `advance` at `next_s()`, and at no time hands in anything that is
    earlier than what it handed in before, or later than `next_s()`. A request that comes at the very end
    of an iteration, before `advance` to it, joins the next one.
    """

    def __init__(self, limits: Limits, profile: Profile, *, start_s: float = 0.0) -> None:
        super().__init__(start_s)
        self.limits = limits
        self.profile = profile
        self.totals = Totals()
        """Up to the last event; `settle` brings it to the present."""
        self.online = 0
        self.offline = 0
        """Requests in the engine, in whatever state."""
        self.paused = False
        self.blocks = CountedBlocks(limits.kv_tokens // BLOCK_SIZE)
        self._budget = limits.max_num_batched_tokens
        self._longest = limits.max_model_len
        self._places = limits.max_num_seqs
        self._by_priority = limits.scheduling_policy == "priority"
        self.queue: WaitingQueue[TwinRequest] = WaitingQueue(by_priority=self._by_priority)
        self._held: deque[TwinRequest] = deque()
        self._aborts: list[TwinRequest] = []
        self._pausing: bool | None = None
        """A pause to come with the end of the iteration, and whether it clears the cache."""
        self._order = 0
        self._batch = Batch(self.blocks)
        self._given = 0
        """Iterations of the run whose blocks have been given to the requests that decode."""
        self._work: Work = []
        """Prompt slices in the run."""
        self._slices = (0, 0, 0)
        """Tokens in them: online, offline, and those of both that had been computed before."""
        self._decode_ms: dict[int, tuple[float, float]] = {}
        """The profile's figures, by the number of requests that decode."""
        self._since_s = start_s
        """Up to where the time is accounted for."""
        self._iterating = False

    # -- what a caller sees -----------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._batch.requests)

    @property
    def running_offline(self) -> int:
        return self._batch.offline

    @property
    def waiting(self) -> int:
        """Requests in the queue, without those held back by a pause."""
        return self.queue.online + self.queue.offline

    @property
    def kv_use(self) -> float:
        """Share of the KV cache held by requests, 0..1, as of the last event or `settle`."""
        return self.blocks.use

    def made(self, request: TwinRequest) -> int:
        """Output tokens of a request, as of the last event or `settle`."""
        return self._batch.made(request)

    def settle(self, now_s: float) -> None:
        """Bring totals, `kv_use` and `made` to the last iteration that has ended by `now_s`."""
        if now_s > self._end_s:
            raise self._late(now_s)
        if self._end_s != inf:
            done, ended_s = self._ended_by(now_s)
            if done:
                self._pass(done, ended_s)
                self._given = 0
                self._start_s = ended_s
                self._first_ms += self._growth_ms * done
                self._steps -= done
            if not self._given:
                self._given = 1
                self._batch.grow(0, 1)
        self.totals.iterations = self._batch.done
        self._account(now_s)

    # -- what a caller does -----------------------------------------------------------------------------

    def add(self, request: TwinRequest, now_s: float) -> None:
        """Take a request. An idle engine starts with it at once; others of the same instant come after it.

        Raises:
            ValueError: the prompt cannot fit into `max_model_len`, or `now_s` is past `next_s()`.
        """
        self._take(request, now_s)
        if self._end_s == inf:
            self._plan(now_s)
        elif (
            self._steps > 1
            and len(self._batch.requests) < self._places
            and (self.waiting == 1 or self.queue.peek() is request)
        ):
            self._cut(now_s)

    def add_all(self, requests: list[TwinRequest], now_s: float) -> None:
        """Take requests that come in one call: an idle engine begins with all of them. Raises as `add`."""
        for request in requests:
            self._take(request, now_s)
        if self._end_s == inf:
            self._plan(now_s)
        elif self._steps > 1:
            self._cut(now_s)

    def abort(self, request: TwinRequest, now_s: float) -> float:
        """End a request with what it has made. Returns when that happens (or happened).

        One that runs ends with the iteration, and an event says so; one that waits ends at once, without.
        """
        if request.finished_s is not None:
            return request.finished_s
        if now_s > self._end_s:
            raise self._late(now_s)
        if self._end_s == inf:
            self._end(request, "abort", now_s)
            return now_s
        self._cut(now_s)
        if request.status is _RUNNING:
            self._aborts.append(request)
            return self._end_s
        self._end(request, "abort", now_s)
        return now_s

    def pause(self, now_s: float, *, clear_cache: bool = True) -> float:
        """Freeze the engine with the end of the iteration (mode `keep`). Returns when it stands still.

        With `clear_cache` the prefix cache is dropped and what runs is preempted: it recomputes then.
        """
        if now_s > self._end_s:
            raise self._late(now_s)
        if self.paused:
            return now_s
        self._pausing = clear_cache
        if self._end_s == inf:
            self._apply_pause()
            return now_s
        self._cut(now_s)
        return self._end_s

    def resume(self, now_s: float) -> None:
        """Go on; what was held joins the queue. A pause that has not come about is called off."""
        if now_s > self._end_s:
            raise self._late(now_s)
        self.paused = False
        self._pausing = None
        while self._held:
            request = self._held.popleft()
            if request.status is _HELD:
                self.queue.add(request)
        if self._end_s == inf:
            self._plan(now_s)

    def advance(self, to_s: float) -> list[Event]:
        """Let time pass up to `to_s`, which is included (infinite: to the end). Returns what happened."""
        events: list[Event] = []
        while (end_s := self._end_s) <= to_s and end_s != inf:
            self._commit(end_s, events)
            self._plan(end_s)
        return events

    # -- entry ------------------------------------------------------------------------------------------

    def _take(self, request: TwinRequest, now_s: float) -> None:
        longest = self._longest
        if request.prompt_tokens >= longest:
            raise ValueError(f"a prompt of {request.prompt_tokens} tokens leaves no room within {longest}")
        if now_s > self._end_s:
            raise self._late(now_s)
        self._order = request.order = self._order + 1
        request.arrival = now_s
        if request.prompt_tokens + request.goal > longest:
            request.goal = longest - request.prompt_tokens
        if request.offline:
            self.offline += 1
        else:
            if not self.online:
                self._account(now_s)
            self.online += 1
        if self.paused:
            request.status = _HELD
            self._held.append(request)
        else:
            self.queue.add(request)

    def _account(self, now_s: float) -> None:
        """Put the time since the last change under what the engine was doing."""
        self.totals.account(now_s - self._since_s, online=self.online > 0, iterating=self._iterating)
        self._since_s = now_s

    # -- a run ------------------------------------------------------------------------------------------

    def _plan(self, now_s: float) -> None:
        """Begin the run that starts now, or stand still."""
        batch = self._batch
        queue = self.queue
        decoding = batch.decoding
        waiting = queue.online or queue.offline
        if self.paused or not (waiting or decoding or batch.partial is not None):
            self._end_s = inf
            if self._iterating:
                self._set_iterating(False, now_s)
            return
        self._start_s = now_s
        self._given = 0
        changing = False
        if waiting or batch.partial is not None or decoding > self.blocks.free:
            changing = self._plan_changing(now_s)
            decoding = batch.decoding
        if self._work:
            self._steps = 1
            first_ms, self._slices = measure(self._work, batch, self.profile)
            self._first_ms = first_ms
            self._end_s = now_s + first_ms / 1e3
        else:
            known = self._decode_ms.get(decoding)
            if known is None:
                known = self._decode_ms[decoding] = self.profile.decode_ms(decoding)
            fixed_ms, token_ms = known
            self._first_ms = first_ms = fixed_ms + token_ms * batch.context
            self._growth_ms = growth_ms = token_ms * decoding
            self._steps = steps = 1 if changing else batch.steps_unchanged(self._given)
            self._end_s = now_s + run_ms(first_ms, growth_ms, steps) / 1e3
        if not self._iterating:
            self._set_iterating(True, now_s)

    def _plan_changing(self, now_s: float) -> bool:
        """Plan an iteration that may be no mere repetition of the one before.

        Returns whether the next one may differ from it even if nobody comes or goes.
        """
        batch = self._batch
        tokens, victims = batch.place(self._budget, by_priority=self._by_priority)
        self._given = 1
        if batch.partial is not None:
            self._work.append((batch.partial, tokens))
        if victims:
            self._requeue(victims)
            return True
        return self._admit(self._budget - batch.decoding - tokens, now_s)

    def _set_iterating(self, iterating: bool, now_s: float) -> None:
        if not self.online:
            self._account(now_s)
        self._iterating = iterating

    def _admit(self, budget: int, now_s: float) -> bool:
        """Take waiting requests with what the running ones leave.

        Returns whether the next of them might fit into a later iteration although it does not into this.
        """
        queue, blocks, batch = self.queue, self.blocks, self._batch
        limit = self._places
        while budget > 0 and len(batch.requests) < limit and (queue.online or queue.offline):
            request = queue.peek()
            if request is None:
                break
            total = request.total
            hits = cached = 0
            if request.cache_key is not None or request.preemptions:
                # The last token is always computed: its logits give the next one.
                hits = blocks.lookup(key_of(request), (total - 1) // BLOCK_SIZE)
                cached = hits * BLOCK_SIZE
            tokens = total - cached
            if tokens > budget:
                tokens = budget
            need = -(-(cached + tokens) // BLOCK_SIZE)
            if need > blocks.free:
                # Once the running ones have evicted some of its hits, the same budget needs fewer blocks.
                return hits > 0 and total > budget
            queue.pop()
            if hits:
                blocks.take(key_of(request), hits)
                request.computed = cached
            blocks.allocate(need - hits)
            batch.admit(request)
            if request.first_scheduled_s is None:
                request.first_scheduled_s = now_s
                request.cached_tokens = min(cached, request.prompt_tokens)
                self.totals.prefix_queries += total
                self.totals.prefix_hits += cached
            self._work.append((request, tokens))
            budget -= tokens
        return False

    def _pass(self, steps: int, ended_s: float) -> None:
        """Let iterations of the run end."""
        batch = self._batch
        decoding = batch.decoding
        if decoding:
            if steps > self._given:
                batch.grow(self._given, steps)
            tokens = steps * decoding
            batch.context += tokens
        else:
            tokens = 0
        batch.done += steps
        if batch.offline:
            offline = steps * batch.decoding_offline
            tokens -= offline
            self.totals.output_offline += offline
            self.totals.offline_iterations_s += ended_s - self._start_s
        self.totals.output_online += tokens

    def _commit(self, end_s: float, events: list[Event]) -> None:
        """The run is over: tokens appear, requests end, aborts and a pause take effect."""
        batch = self._batch
        self._pass(self._steps, end_s)
        ending, done = batch.ending, batch.done
        while ending and ending[0][0] <= done:
            finish_at, _, request = heappop(ending)
            if request.finish_at == finish_at:
                self._end(request, "length", end_s)
                events.append((_FINISH, request))
        if self._work:
            self._slices_done(end_s, events)
        if self._aborts:
            for request in self._aborts:
                if request.status is not _FINISHED:
                    self._end(request, "abort", end_s)
                    events.append((_ABORT, request))
            self._aborts.clear()
        if self._pausing is not None:
            self._apply_pause()

    def _slices_done(self, end_s: float, events: list[Event]) -> None:
        batch = self._batch
        totals = self.totals
        online, offline, again = self._slices
        totals.prefill_online += online
        if offline:
            totals.prefill_offline += offline
        if again:
            totals.recomputed += again
        batch.partial = None
        for request, tokens in self._work:
            request.computed = computed = request.computed + tokens
            if computed < request.total:
                batch.partial = request
                continue
            request.made += 1
            request.total += 1
            if request.offline:
                totals.output_offline += 1
            else:
                totals.output_online += 1
            if request.first_token_s is None:
                request.first_token_s = end_s
                events.append((_FIRST_TOKEN, request))
            if request.made < request.goal:
                batch.decode(request)
            else:
                self._end(request, "length", end_s)
                events.append((_FINISH, request))
        self._work.clear()

    # -- exit -------------------------------------------------------------------------------------------

    def _end(self, request: TwinRequest, reason: str, now_s: float) -> None:
        if request.status is _RUNNING:
            self._batch.leave(request)
            computed = request.computed
            self.blocks.release(blocks_of(computed), computed, request.cache_key)
        elif request.status is _WAITING:
            self.queue.forget(request)
        request.status = _FINISHED
        request.finish_reason = reason
        request.finished_s = now_s
        if request.offline:
            self.offline -= 1
        else:
            if self.online == 1:
                self._account(now_s)
            self.online -= 1

    def _requeue(self, victims: list[TwinRequest]) -> None:
        self.totals.preemptions += len(victims)
        for request in victims:
            self.queue.add(request, front=True)

    def _apply_pause(self) -> None:
        if self._pausing:
            victims = list(reversed(self._batch.requests.values()))
            for request in victims:
                self._batch.preempt(request)
            self._requeue(victims)
            self.blocks.reset_cache()
        self._pausing = None
        self.paused = True
