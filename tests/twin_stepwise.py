"""The simulated scheduler, one iteration after the other on a virtual clock: what the twin must equal."""

from __future__ import annotations

import math

from hybridsched.engines.simulated.iteration import Iteration
from hybridsched.engines.simulated.perf import Profile
from hybridsched.engines.simulated.scheduler import Limits, Scheduler
from hybridsched.engines.simulated.sequence import Seq, Status
from hybridsched.twin.totals import Totals


class Stepwise:
    """`Scheduler` under the chained clock of `EngineLoop`, with the twin's totals counted at each step."""

    def __init__(self, limits: Limits, profile: Profile) -> None:
        self.scheduler = Scheduler(limits)
        self.profile = profile
        self.totals = Totals()
        self.current: Iteration | None = None
        self.end_s = math.inf
        self.events: list[tuple[str, str, float]] = []
        self.preempting_iterations = 0
        self._since_s = 0.0
        self._known: dict[str, int] = {}

    @property
    def online(self) -> int:
        return sum(1 for seq in self.scheduler.sequences() if not seq.offline)

    def _account(self, now_s: float) -> None:
        span = now_s - self._since_s
        self._since_s = now_s
        if self.online:
            self.totals.online_s += span
        elif self.current is not None:
            self.totals.offline_s += span
        else:
            self.totals.idle_s += span

    def _begin(self, start_s: float) -> None:
        before = self.scheduler.preemptions_total
        it = self.scheduler.plan(start_s)
        self.preempting_iterations += self.scheduler.preemptions_total > before
        self.current = it
        if it is None:
            self.end_s = math.inf
            return
        self.end_s = start_s + (
            self.profile.iteration_ms(
                prefill_tokens=it.prefill_tokens,
                batch_decode=it.decodes,
                total_context=it.context,
                prefill_pairs=it.prefill_pairs,
            )
            / 1e3
        )

    def add(self, seq: Seq, now_s: float, *, known: int = 0) -> None:
        self._account(now_s)
        seq.arrival = now_s
        self._known[seq.request_id] = known
        self.scheduler.add(seq)
        if self.current is None:
            self._begin(now_s)

    def abort(self, seq: Seq, now_s: float) -> None:
        self._account(now_s)
        if seq.status is not Status.FINISHED and self.scheduler.abort(seq):
            seq.finished_at = now_s

    def pause(self, now_s: float, *, clear_cache: bool) -> None:
        self._account(now_s)
        self.scheduler.pause("keep", clear_cache=clear_cache)

    def resume(self, now_s: float) -> None:
        self._account(now_s)
        self.scheduler.resume()
        if self.current is None:
            self._begin(now_s)

    def advance(self, to_s: float) -> None:
        while self.end_s <= to_s:
            self._step()

    def settle(self, now_s: float) -> None:
        self._account(now_s)
        self.totals.preemptions = self.scheduler.preemptions_total
        self.totals.prefix_queries = self.scheduler.prefix_queries_total
        self.totals.prefix_hits = self.scheduler.prefix_hits_total

    def _step(self) -> None:
        it, end_s, totals = self.current, self.end_s, self.totals
        assert it is not None
        self._account(end_s)
        for seq, tokens in it.work:
            known, computed = self._known[seq.request_id], seq.computed
            totals.recomputed += max(0, min(known, computed + tokens) - computed)
            self._known[seq.request_id] = max(known, computed + tokens)
        totals.iterations += 1
        totals.prefill_online += it.prefill_online
        totals.prefill_offline += it.prefill_offline
        if it.offline:
            totals.offline_iterations_s += end_s - it.start
        out = self.scheduler.commit(it, end_s)
        for seq in out.emitted:
            if seq.offline:
                totals.output_offline += 1
            else:
                totals.output_online += 1
        self.events += [("FIRST_TOKEN", seq.request_id, end_s) for seq in out.first]
        self.events += [
            ("ABORTED" if seq.finish_reason == "abort" else "FINISHED", seq.request_id, end_s)
            for seq in out.finished
        ]
        self.current = None
        self._begin(end_s)
