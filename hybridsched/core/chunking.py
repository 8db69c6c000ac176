"""How large the next chunk is, so that its boundary comes about `chunk_target_ms` after it starts.

The size follows the lane's measured throughput. Two facts shape it:

- lines of a chunk run side by side, so a chunk with fewer lines than the lane may have in flight ends no
  sooner (its longest line decides) and only leaves the engine empty. Measured once, a chunk has at least that
  many;
- a first chunk is small, because nothing is known yet and a boundary must come soon.
"""

from __future__ import annotations

from math import exp, isfinite

from hybridsched.core.policy import OfflinePolicy
from hybridsched.core.values import Value

_MOST_TOKENS = 1e12
"""Beyond any engine: it only keeps the arithmetic finite."""


class Throughput(Value, frozen=True, kw_only=True):
    """Tokens (prompt + output) per second, as an average that forgets.

    Samples weigh by their length: one of `tau_s` seconds moves the average by 63 %, a very short one hardly.
    """

    tokens_per_s: float | None = None
    """None until something was measured."""
    tau_s: float = 10.0
    samples: int = 0

    def observe(self, *, tokens: float, seconds: float) -> Throughput:
        """The average after `tokens` were done in `seconds`. What cannot be a measurement is ignored."""
        if not (isfinite(tokens) and isfinite(seconds)) or tokens <= 0 or seconds <= 0:
            return self
        rate = tokens / seconds
        old = self.tokens_per_s
        if old is not None:
            rate = old + (1.0 - exp(-seconds / self.tau_s)) * (rate - old)
        return Throughput(tokens_per_s=rate, tau_s=self.tau_s, samples=self.samples + 1)


def next_chunk_tokens(
    policy: OfflinePolicy,
    tokens_per_s: float | None,
    *,
    kv_tokens: int | None = None,
    tokens_per_line: float | None = None,
    parallel: int = 1,
) -> int:
    """Tokens for the next chunk: at least 1; `chunk_first_tokens` before anything was measured.

    Once measured, `parallel` lines of `tokens_per_line` always fit (both as in `next_chunk_lines`): a
    throughput that was measured on few lines at a time would else keep the chunks as small as they were.
    `kv_tokens` is the engine's KV capacity where it is known: a chunk never holds more than the share of it
    that offline may plan with, so that a whole chunk can be in flight.
    """
    if tokens_per_s is None or not isfinite(tokens_per_s) or tokens_per_s <= 0:
        tokens = policy.chunk_first_tokens
    else:
        side_by_side = parallel * (tokens_per_line or 0.0)
        tokens = int(min(max(tokens_per_s * policy.chunk_target_ms / 1000.0, side_by_side), _MOST_TOKENS))
    if kv_tokens is not None:
        tokens = min(tokens, int(kv_tokens * policy.kv_share))
    return max(1, tokens)


def next_chunk_lines(
    policy: OfflinePolicy,
    tokens_per_s: float | None,
    *,
    tokens_per_line: float | None,
    parallel: int,
) -> int:
    """Lines for the next chunk, within `chunk_min_lines..chunk_max_lines` and never 0.

    `tokens_per_line` is the expected size of a line (None or 0: unknown), `parallel` how many lines the lane
    may have in flight at once (the gate's budget).
    """
    measured = tokens_per_s is not None and isfinite(tokens_per_s) and tokens_per_s > 0
    sized = tokens_per_line is not None and isfinite(tokens_per_line) and tokens_per_line > 0
    if not measured or not sized or tokens_per_line is None:
        lines = policy.chunk_first_lines
    else:
        fitting = min(next_chunk_tokens(policy, tokens_per_s) / tokens_per_line, policy.chunk_max_lines)
        lines = max(int(fitting), parallel)
    return max(1, policy.chunk_min_lines, min(lines, policy.chunk_max_lines))
