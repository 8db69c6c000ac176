"""What one engine step runs, and what it produced."""

from __future__ import annotations

from hybridsched.engines.simulated.sequence import Seq


class Iteration:
    """What one engine step runs. `work` pairs each sequence with its tokens in the step."""

    __slots__ = (
        "context",
        "decodes",
        "offline",
        "online",
        "prefill_offline",
        "prefill_online",
        "prefill_pairs",
        "start",
        "work",
    )

    def __init__(self, start: float) -> None:
        self.start = start
        self.work: list[tuple[Seq, int]] = []
        self.decodes = 0
        self.context = 0
        """Sum of the lengths of the decoding sequences."""
        self.prefill_online = 0
        self.prefill_offline = 0
        self.prefill_pairs = 0
        """See `Profile.iteration_ms`."""
        self.online = 0
        self.offline = 0

    @property
    def prefill_tokens(self) -> int:
        return self.prefill_online + self.prefill_offline


class Outcome:
    """What an iteration produced. A sequence in `emitted` has its new token last in `output`."""

    __slots__ = (
        "emitted",
        "finished",
        "first",
        "gaps",
        "kv_use",
        "prompt_tokens",
        "running",
        "steady",
        "waiting",
    )

    def __init__(self) -> None:
        self.emitted: list[Seq] = []
        self.finished: list[Seq] = []
        self.first: list[Seq] = []
        """Those whose first token this is."""
        self.prompt_tokens = 0
        """Prompt tokens of the requests whose prefill ended now (vLLM counts them then)."""
        self.steady = 0
        """Sequences that also emitted at the end of the iteration before."""
        self.gaps: list[float] = []
        """Time since the token before, for the sequences that did not."""
        self.running = 0
        self.waiting = 0
        self.kv_use = 0.0
        """The gauges after this step. A pause that freezes sequences leaves them as they were before it."""
