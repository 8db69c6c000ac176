"""Pools of the twin for tests, with everything written down that the report only counts."""

from __future__ import annotations

from collections.abc import Sequence

from hybridsched.core.codec import DecisionRecord
from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.engines.simulated.perf import load_profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.report.record import EngineLog, Event, Iteration
from hybridsched.traces import TraceRow
from hybridsched.twin.clock import Loop
from hybridsched.twin.lengths import Length
from hybridsched.twin.meter import Meter
from hybridsched.twin.pool import Pool, PoolSpec

PROFILE = load_profile("a100-llama3-8b")
IDLE_WINDOW = PoolPolicy(name="idle-window", kind=PolicyKind.IDLE_WINDOW)


class WrittenMeter(Meter):
    """A meter that keeps what it is told as the engine's log would, one row for each run of iterations."""

    def __init__(self, lane: str, width_s: float) -> None:
        super().__init__(lane, width_s)
        self.iterations: list[Iteration] = []
        self.events: list[Event] = []
        self.now = lambda: 0.0

    def ran(
        self,
        start_s: float,
        end_s: float,
        kind: int,
        steps: int,
        first_ms: float,
        growth_ms: float,
        tokens: int,
    ) -> None:
        super().ran(start_s, end_s, kind, steps, first_ms, growth_ms, tokens)
        at = start_s
        for step in range(steps):
            # Seen from the end: the sum of a run is a sum of its iterations up to rounding.
            until = end_s if step == steps - 1 else at + (first_ms + growth_ms * step) / 1e3
            self.iterations.append(
                Iteration(s=at, e=until, on=kind & 1, off=kind >> 1, goff=tokens if step == 0 else 0)
            )
            at = until

    def signal(self, accepted_s: float) -> None:
        super().signal(accepted_s)
        self.events.append(Event(t="signal", mono_s=accepted_s, lane=self.lane))

    def resumed(self, running: tuple[float, float] | None = None) -> None:
        super().resumed(running)
        self.events.append(Event(t="resume", mono_s=self.now(), lane=self.lane))

    def log(self) -> EngineLog:
        """What the engine's own log would hold."""
        return EngineLog(replica=self.lane, iterations=tuple(self.iterations))


def spec(engines: int = 2, policy: PoolPolicy = IDLE_WINDOW, **more: object) -> PoolSpec:
    values: dict[str, object] = {
        "engines": engines,
        "policy": policy,
        "limits": Limits(),
        "profile": PROFILE,
        "bin_s": 0.5,
    }
    return PoolSpec(**(values | more))  # type: ignore[arg-type]


def rows_of(arrivals: Sequence[tuple[float, int, int]]) -> list[TraceRow]:
    return [
        TraceRow(arrival_s=at, prompt_tokens=prompt, output_tokens=output) for at, prompt, output in arrivals
    ]


def run(
    of: PoolSpec,
    arrivals: Sequence[tuple[float, int, int]],
    batch: Sequence[tuple[int, int]],
    duration_s: float,
    *,
    records: list[DecisionRecord] | None = None,
) -> Pool:
    """A finished run."""
    pool = Pool(
        Loop(),
        of,
        rows_of(arrivals),
        [Length(prompt_tokens=prompt, output_tokens=output) for prompt, output in batch],
        log=None if records is None else records.append,
    )
    pool.run(duration_s)
    return pool
