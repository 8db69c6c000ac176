"""What an engine of the twin has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Seconds of the loop's clock, and tokens, since the engine's start."""

    iterations: int = 0
    online_s: float = 0.0
    """With an online request in the engine, running, waiting or held."""
    offline_s: float = 0.0
    """Without one, in iterations: these are the harvested ones."""
    idle_s: float = 0.0
    """Neither. The three add up to all of the time."""
    offline_iterations_s: float = 0.0
    """In iterations with offline tokens, online beside them or not."""
    prefill_online: int = 0
    prefill_offline: int = 0
    output_online: int = 0
    output_offline: int = 0
    recomputed: int = 0
    """Tokens computed that had been computed before."""
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0

    def account(self, span_s: float, *, online: bool, iterating: bool) -> None:
        """Put a span of time under what the engine was doing in it."""
        if online:
            self.online_s += span_s
        elif iterating:
            self.offline_s += span_s
        else:
            self.idle_s += span_s
