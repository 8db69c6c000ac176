"""Continuous batching as vLLM's V1 scheduler does it: a state machine without clock, thread or I/O.

One iteration is `plan(now)`, then, when its time is over, `commit(iteration, now)`. The server drives it by a
real clock and a discrete-event twin by a virtual one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from hybridsched.engines.simulated.iteration import Iteration, Outcome
from hybridsched.engines.simulated.kv import BLOCK_SIZE, BlockPool
from hybridsched.engines.simulated.queue import WaitingQueue
from hybridsched.engines.simulated.sequence import Seq, Status
from hybridsched.engines.simulated.tokens import EOS

PAUSE_MODES = ("abort", "wait", "keep")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's options of the same names, in tokens and sequences."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 16_384
    kv_tokens: int = 400_000
    scheduling_policy: str = "fcfs"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy must be fcfs or priority, got {self.scheduling_policy!r}")
        if self.kv_tokens // BLOCK_SIZE * BLOCK_SIZE < self.max_model_len:
            raise ValueError(
                f"kv_tokens {self.kv_tokens} cannot hold one sequence of max_model_len {self.max_model_len}; "
                "raise kv_tokens or lower max_model_len"
            )


class Scheduler:
    """Waiting and running sequences over one KV cache.

    Running sequences go first and prefill in slices of what the token budget leaves. `max_num_seqs` never
    preempts; only want of KV blocks does, by recomputation.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.kv = BlockPool(limits.kv_tokens // BLOCK_SIZE)
        self.running: list[Seq] = []
        self._by_priority = limits.scheduling_policy == "priority"
        self.queue: WaitingQueue[Seq] = WaitingQueue(by_priority=self._by_priority)
        self._held: deque[Seq] = deque()
        self._order = 0
        self._in_flight: Iteration | None = None
        self._aborts: list[Seq] = []
        self._pause: tuple[str, bool] | None = None
        self.paused = False
        self.draining = False
        self.preemptions_total = 0
        self.prefix_queries_total = 0
        self.prefix_hits_total = 0

    # -- entry and exit ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Sequences admitted to the queue and not running, without those held back by a pause."""
        return self.queue.online + self.queue.offline

    @property
    def held(self) -> int:
        return sum(1 for s in self._held if s.status is Status.HELD)

    @property
    def unfinished(self) -> int:
        return len(self.running) + self.waiting + self.held

    def add(self, seq: Seq) -> None:
        """Queue a sequence. While paused or draining it is held until `resume`.

        Raises:
            ValueError: prompt and output cannot fit into `max_model_len`.
        """
        if seq.total >= self.limits.max_model_len + (1 if seq.pooling else 0):
            raise ValueError(
                f"a prompt of {seq.total} tokens leaves no room within {self.limits.max_model_len}"
            )
        self._order += 1
        seq.order = self._order
        if self.paused or self.draining:
            seq.status = Status.HELD
            self._held.append(seq)
        else:
            self.queue.add(seq)

    def abort(self, seq: Seq) -> bool:
        """End a sequence with reason "abort". True when that happened now, False when it will at `commit`.

        A running sequence is never ended in the middle of an iteration.
        """
        if seq.status is Status.FINISHED:
            return True
        if seq.status is Status.RUNNING and self._in_flight is not None:
            self._aborts.append(seq)
            return False
        self._finish(seq, "abort")
        return True

    def finish(self, seq: Seq, reason: str) -> None:
        """End a sequence between two iterations, as a stop string that was found does."""
        if seq.status is not Status.FINISHED:
            self._finish(seq, reason)

    def sequences(self) -> Iterator[Seq]:
        """Every unfinished sequence: running, waiting, held."""
        yield from self.running
        yield from self.queue.items()
        yield from (s for s in self._held if s.status is Status.HELD)

    # -- pause ------------------------------------------------------------------------------------------

    def pause(self, mode: str, *, clear_cache: bool = True) -> list[Seq]:
        """Stop planning, at the next boundary if an iteration runs. Returns the sequences this ended.

        abort ends all; wait runs what was accepted to its end first; keep freezes all. With `clear_cache`
        the prefix cache is dropped, and frozen sequences are preempted: they recompute after `resume`.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r} is unknown; use one of {', '.join(PAUSE_MODES)}")
        if self.paused:
            return []
        if mode == "wait":
            self.draining = True
        self._pause = (mode, clear_cache)
        return [] if self._in_flight is not None else self._apply_pause()

    def resume(self) -> None:
        """Plan again; what was held joins the queue."""
        self.paused = self.draining = False
        self._pause = None
        held, self._held = self._held, deque()
        for seq in held:
            if seq.status is Status.HELD:
                self.queue.add(seq)

    def _apply_pause(self) -> list[Seq]:
        if self._pause is None:
            return []
        mode, clear_cache = self._pause
        ended: list[Seq] = []
        if mode == "abort":
            ended = list(self.sequences())
            for seq in ended:
                self._finish(seq, "abort")
        elif mode == "wait" and (self.running or self.waiting):
            return []
        if clear_cache:
            for seq in reversed(list(self.running)):
                self._preempt(seq)
            self.kv.reset_cache()
        self._pause = None
        self.draining = False
        self.paused = True
        return ended

    # -- one iteration ----------------------------------------------------------------------------------

    def plan(self, now: float) -> Iteration | None:
        """The next step, or None when there is nothing to run (or the engine is paused)."""
        if self._in_flight is not None:
            raise RuntimeError("plan() was called again before commit()")
        if self.paused:
            return None
        it = Iteration(now)
        budget = self.limits.max_num_batched_tokens
        budget, preempted = self._plan_running(it, budget)
        if not preempted and budget > 0 and self.waiting:
            self._plan_waiting(it, budget, now)
        if not it.work:
            return None
        self._measure(it)
        self._in_flight = it
        return it

    def _plan_running(self, it: Iteration, budget: int) -> tuple[int, bool]:
        work = it.work
        kv = self.kv
        running = self.running
        preempted = False
        i = 0
        while i < len(running) and budget > 0:
            seq = running[i]
            n = seq.total - seq.computed
            if n > budget:
                n = budget
            short = -(-(seq.computed + n) // BLOCK_SIZE) - len(seq.blocks)
            if short > 0:
                while short > kv.free:
                    victim = max(running, key=_urgency) if self._by_priority else running[-1]
                    at = running.index(victim)
                    self._preempt(victim)
                    preempted = True
                    if at < i:
                        i -= 1
                        for k, (planned, used) in enumerate(work):
                            if planned is victim:
                                budget += used
                                del work[k]
                                break
                    if victim is seq:
                        break
                if seq.status is not Status.RUNNING:
                    continue  # it gave itself up for the others, whose turn it is now
                seq.blocks += kv.allocate(short)
            work.append((seq, n))
            budget -= n
            i += 1
        return budget, preempted

    def _plan_waiting(self, it: Iteration, budget: int, now: float) -> None:
        kv = self.kv
        limit = self.limits.max_num_seqs
        while budget > 0 and len(self.running) < limit:
            seq = self.queue.peek()
            if seq is None:
                return
            # The last token is always computed: its logits give the next one.
            hits = kv.lookup(seq.hashes, (seq.total - 1) // BLOCK_SIZE)
            cached = len(hits) * BLOCK_SIZE
            n = min(seq.total - cached, budget)
            short = -(-(cached + n) // BLOCK_SIZE) - len(hits)
            if short > kv.free_after(hits):
                return
            self.queue.pop()
            kv.take(hits)
            seq.blocks = hits + kv.allocate(short)
            seq.computed = cached
            seq.status = Status.RUNNING
            self.running.append(seq)
            if seq.first_scheduled_at is None:
                seq.first_scheduled_at = now
                seq.cached_tokens = min(cached, len(seq.prompt))
                self.prefix_queries_total += seq.total
                self.prefix_hits_total += cached
            it.work.append((seq, n))
            budget -= n

    @staticmethod
    def _measure(it: Iteration) -> None:
        """Sums that the iteration's time and log need."""
        for seq, n in it.work:
            if n == 1 and seq.output and seq.computed + 1 == seq.total:
                it.decodes += 1
                it.context += seq.total
            else:
                if seq.offline:
                    it.prefill_offline += n
                else:
                    it.prefill_online += n
                it.prefill_pairs += n * (n + 2 * seq.computed)
            if seq.offline:
                it.offline += 1
        it.online = len(it.work) - it.offline

    def commit(self, it: Iteration, now: float) -> Outcome:
        """The step is over: tokens appear, sequences finish, aborts and pauses take effect."""
        if it is not self._in_flight:
            raise RuntimeError("commit() needs the iteration that plan() gave last")
        self._in_flight = None
        out = Outcome()
        emitted = out.emitted
        kv = self.kv
        longest = self.limits.max_model_len
        start = it.start
        for seq, n in it.work:
            before = seq.computed
            computed = before + n
            seq.computed = computed
            if before // BLOCK_SIZE != computed // BLOCK_SIZE:
                blocks, hashes = seq.blocks, seq.hashes
                for b in range(before // BLOCK_SIZE, computed // BLOCK_SIZE):
                    kv.register(blocks[b], hashes[b])
            if computed < seq.total:
                continue
            if seq.pooling:
                out.prompt_tokens += len(seq.prompt)
                self._finish(seq, "stop")
                out.finished.append(seq)
                continue
            token = seq.append_next()
            emitted.append(seq)
            if seq.first_token_at is None:
                seq.first_token_at = now
                out.first.append(seq)
                out.prompt_tokens += len(seq.prompt)
            elif seq.last_token_at == start:
                out.steady += 1
            else:
                out.gaps.append(now - seq.last_token_at)
            seq.last_token_at = now
            made = len(seq.output)
            reason: str | None = None
            if made >= seq.min_tokens and (
                (token == EOS and not seq.ignore_eos) or token in seq.stop_token_ids
            ):
                reason = "stop"
            elif made >= seq.max_tokens or seq.total >= longest:
                reason = "length"
            if reason is not None:
                self._finish(seq, reason)
                out.finished.append(seq)
        if self._aborts:
            for seq in self._aborts:
                if seq.status is not Status.FINISHED:
                    self._finish(seq, "abort")
                    out.finished.append(seq)
            self._aborts.clear()
        self.read_gauges(out)
        if self._pause is not None:
            ended = self._apply_pause()
            if ended:
                out.finished += ended
                self.read_gauges(out)
        for seq in out.finished:
            seq.finished_at = now
        return out

    def read_gauges(self, out: Outcome) -> None:
        """Take the gauges anew; needed after `finish` between `commit` and their use."""
        out.running, out.waiting, out.kv_use = len(self.running), self.waiting, self.kv.use

    # -- parts ------------------------------------------------------------------------------------------

    def _finish(self, seq: Seq, reason: str) -> None:
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is Status.WAITING:
            self.queue.forget(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self.kv.release(seq.blocks)
        seq.blocks = []

    def _preempt(self, seq: Seq) -> None:
        self.running.remove(seq)
        self.kv.release(seq.blocks)
        seq.blocks = []
        seq.computed = 0
        seq.preemptions += 1
        self.preemptions_total += 1
        self.queue.add(seq, front=True)


def _urgency(seq: Seq) -> tuple[int, float, int]:
    return (seq.priority, seq.arrival, seq.order)
