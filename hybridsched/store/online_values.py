"""What the online queue takes and gives: requests, claims, ends. Times are ms of the server's clock."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

DECODE_WEIGHT = 0.05
"""Load of a token still to be decoded, in prompt tokens: decode is bound by memory bandwidth and shares
each iteration with all running sequences, so it costs far less than a prompt token waiting for compute."""

NULL = msgspec.Raw(b"null")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One online request as a service hands it in."""

    id: str
    """Accepted once; a repeat attaches to the first."""
    model: str
    body: bytes
    """The OpenAI-style body, JSON."""
    reply: str
    """Key of the stream on which the answer is read (`Keys.reply`)."""
    timeout_ms: float
    """From acceptance to the deadline, after which the request is not run any more."""
    path: str = "/v1/chat/completions"
    stream: bool = False
    priority: int = 1
    """0 most urgent, 1 normal, 2 low."""
    prompt_tokens: int = 0
    """Estimate."""
    cost: int = 0
    """Estimate of prompt and output tokens together."""
    max_waiting: int = 0
    """Refuse (`queue_full`) when this many requests of its class wait already; 0: no limit."""


class Acceptance(StrEnum):
    """What became of an accept."""

    ACCEPTED = "accepted"
    ATTACHED = "attached"
    """The id is known and not yet answered: the answer comes to the reply stream of this repeat as well."""
    DONE = "done"
    """The id was answered before: the kept answer was sent again."""
    STREAM_GAP = "stream_gap"
    """The id is that of a stream of which others have been sent a part, and that part is not kept."""
    CONFLICT = "conflict"
    """The id is that of another request, which was left alone."""
    RETRY_BUDGET_EXHAUSTED = "retry_budget_exhausted"
    QUEUE_FULL = "queue_full"
    REFUSED = "refused"
    """It is none that can be queued; `Accepted.entry` says why."""


class Accepted(msgspec.Struct, frozen=True):
    """Outcome of one accept, with the id of the stream entry (empty when there is none)."""

    id: str
    outcome: Acceptance
    entry: str
    live: int = 0
    """Live replicas of its model."""


class Claimed(msgspec.Struct, kw_only=True):
    """One request that a worker holds under a lease."""

    id: str
    model: str
    priority: int
    entry: str
    consumer: str
    attempt: int
    """1 for the first worker, raised each time a worker was lost."""
    path: str
    body: bytes
    stream: bool
    reply: str
    """The reply streams of all that wait for it, apart by spaces; renewed when one comes or leaves."""
    deadline_ms: float
    accepted_ms: float
    cost: int
    prompt_tokens: int
    age_ms: float
    """Since acceptance, when it was claimed."""
    left_ms: float
    """To its deadline, when the claim came back; counted from the claim's sending, so never too long."""
    closed_gate: bool = False
    """The claim that granted it found the lane's gate open and closed it."""
    epoch: int = 0
    """The lane's epoch after that claim; 0 when no lane was named."""

    @property
    def load(self) -> float:
        """What it adds to its replica's load, in the unit of the replicas hash."""
        return self.prompt_tokens + DECODE_WEIGHT * max(0, self.cost - self.prompt_tokens)


class EndStatus(StrEnum):
    OK = "ok"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


class End(msgspec.Struct, kw_only=True):
    """The last entry of a request on its reply stream."""

    status: EndStatus
    code: str | None = None
    """Stable word for what went wrong; None when nothing did."""
    message: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    body: msgspec.Raw = NULL
    """The engine's response body as it was (JSON); `null` for streams and failures."""
    http_status: int | None = None
    replica: str | None = None

    @classmethod
    def expired(cls, replica: str | None = None) -> End:
        """The answer to a request whose deadline passed before it could run."""
        return cls(
            status=EndStatus.EXPIRED,
            code="deadline_exceeded",
            message="the deadline passed before the request could run",
            http_status=504,
            replica=replica,
        )

    @classmethod
    def failed(
        cls, code: str, message: str, *, http_status: int | None = 502, replica: str | None = None
    ) -> End:
        """An error; `code` is a stable word."""
        return cls(
            status=EndStatus.FAILED, code=code, message=message, http_status=http_status, replica=replica
        )

    @classmethod
    def cancelled(cls, replica: str | None = None) -> End:
        """The answer to a request that its client cancelled."""
        return cls(
            status=EndStatus.CANCELLED,
            code="cancelled",
            message="the request was cancelled",
            http_status=499,
            replica=replica,
        )


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one model waits."""

    model: str
    now_ms: float
    waiting: tuple[int, int, int]
    """Unclaimed requests of each priority class."""
    claimed: tuple[int, int, int]
    """Claimed and not yet ended."""
    oldest_wait_ms: float | None
    """Of the unclaimed; None when nothing waits."""

    @property
    def depth(self) -> int:
        """Unclaimed requests of all classes."""
        return sum(self.waiting)


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Lives and bounds of what the queue keeps in Redis."""

    keep_ms: int = 60_000
    """A result stays this long for a repeat of its id; the hash outlives the deadline by as much."""
    retry_budget: int = 2
    """Repeats of one id that attach."""
    reply_ttl_ms: int = 120_000
    """A reply stream goes this long after its last entry."""
    reply_maxlen: int = 100_000
    """Entries that a reply stream holds at most, about; a client that far behind reads results by id."""
    max_attempts: int = 3
    """Workers that a request is given to before it fails."""
    record_ttl_ms: int = 3_000
    """A replica that neither claims nor registers for this long counts as gone."""
    slack_tokens: float = 256.0
    """A replica may claim while it carries at most this much more load than the least loaded one: loads lag
    by a heartbeat, and below one small prompt the order of two replicas does not matter."""
    patience_ms: float = 25.0
    """A request that has waited longer goes to any replica that asks: the least loaded one may be dead."""
    gate_ttl_ms: int = 1_000
    """Life of the closed gate that a claim publishes; without one a lane is closed as well."""


END_DECODER = msgspec.json.Decoder(End)
END_ENCODER = msgspec.json.Encoder()
