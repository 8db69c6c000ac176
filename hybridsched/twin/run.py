"""The time of a run: iterations in which nothing changes but the length of the requests."""

from __future__ import annotations

from math import inf

from hybridsched.engines.simulated.perf import run_iterations, run_ms


class Run:
    """What an engine does now, and up to when. Its first iteration's length and their growth say it all."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._end_s = inf
        """Infinite: nothing runs."""
        self._steps = 0
        """Iterations in the run."""
        self._first_ms = 0.0
        self._growth_ms = 0.0
        """See `run_ms`. Of no meaning in a run of one iteration."""

    def next_s(self) -> float:
        """When `advance` is due. Infinite when nothing runs."""
        return self._end_s

    def iteration_at(self, now_s: float) -> tuple[float, float] | None:
        """Start and end of the iteration that is going on, or None."""
        if self._end_s == inf:
            return None
        steps = self._steps_by(now_s)
        start = self._start_s
        first, growth = self._first_ms, self._growth_ms
        return start + run_ms(first, growth, steps - 1) / 1e3, start + run_ms(first, growth, steps) / 1e3

    def _late(self, now_s: float) -> ValueError:
        return ValueError(f"the engine stands at {self._end_s} s: advance it before it is {now_s} s")

    def _steps_by(self, now_s: float) -> int:
        """The number, within the run, of the iteration that `now_s` falls into, from 1."""
        if self._steps == 1:
            return 1
        steps = run_iterations(self._first_ms, self._growth_ms, (now_s - self._start_s) * 1e3)
        return min(steps, self._steps)

    def _ended_by(self, now_s: float) -> tuple[int, float]:
        """Iterations that have ended by `now_s`, without the run's last, and when the last of them did."""
        done = self._steps_by(now_s)
        ended_s = self._start_s + run_ms(self._first_ms, self._growth_ms, done) / 1e3
        if ended_s > now_s or done == self._steps:
            done -= 1
            ended_s = self._start_s + run_ms(self._first_ms, self._growth_ms, done) / 1e3
        return done, ended_s

    def _cut(self, now_s: float) -> None:
        """End the run with the iteration that is going on."""
        if self._steps > 1:
            first_ms, growth_ms = self._first_ms, self._growth_ms
            steps = run_iterations(first_ms, growth_ms, (now_s - self._start_s) * 1e3)
            if steps < self._steps:
                self._steps = steps
                end_s = self._start_s + run_ms(first_ms, growth_ms, steps) / 1e3
                self._end_s = end_s if end_s > now_s else now_s  # the last digit may say that it is past
