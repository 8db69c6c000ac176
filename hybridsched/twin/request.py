"""A request in the twin's engine: how many tokens it has, not which."""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum

from hybridsched.engines.simulated.sequence import Status


class EventKind(IntEnum):
    """What happened to a request at the end of an iteration."""

    FIRST_TOKEN = 1
    """Its prefill is done."""
    FINISHED = 2
    """It has all its tokens."""
    ABORTED = 3
    """It was ended before; `made` says what it keeps."""


class TwinRequest:
    """One request and, once an engine has taken it, what became of it. Times are seconds on the loop's clock.

    To go on with an ended request (its prompt and what was kept, or the next slice of its prompt), make a new
    one with the same `cache_key`: it finds its blocks where they have not been evicted.
    """

    __slots__ = (
        "arrival",
        "cache_key",
        "cached_tokens",
        "computed",
        "finish_at",
        "finish_reason",
        "finished_s",
        "first_scheduled_s",
        "first_token_s",
        "goal",
        "known",
        "made",
        "offline",
        "order",
        "output_tokens",
        "owner",
        "preemptions",
        "priority",
        "prompt_tokens",
        "status",
        "total",
    )

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        offline: bool = False,
        priority: int = 0,
        cache_key: Hashable = None,
        known_tokens: int = 0,
        owner: object = None,
    ) -> None:
        """`known_tokens`: prompt tokens that were computed before, in a request that this one goes on with.
        Those of them that are computed again count as recomputed. `owner` is the caller's own.

        Raises:
            ValueError: no prompt or no output.
        """
        if prompt_tokens < 1:
            raise ValueError(f"a prompt needs at least one token, got {prompt_tokens}")
        if output_tokens < 1:
            raise ValueError(f"output_tokens must be at least 1, got {output_tokens}")
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.offline = offline
        self.priority = priority
        self.cache_key = cache_key
        self.owner = owner
        self.arrival = 0.0
        """Seconds; set by the engine's `add`."""
        self.order = 0
        self.status = Status.WAITING
        self.goal = output_tokens
        """Output tokens at its end: fewer than asked for where the model's length ends it."""
        self.made = 0
        """Output tokens. While it decodes this stands still: see `TwinEngine.made`."""
        self.total = prompt_tokens
        self.computed = 0
        self.known = known_tokens
        """Tokens that were computed at some time."""
        self.finish_at = 0
        """While it decodes: the number of the engine's iteration that ends it. 0: it does not decode."""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission."""
        self.preemptions = 0
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.finish_reason: str | None = None
        """"length" or "abort"."""


Event = tuple[EventKind, TwinRequest]
