"""Values of `core.replicas`: what is seen of replica jobs, what is remembered, what is to be done.

Times are milliseconds on one clock of the caller's (monotonic); what Slurm says in its own time is converted
by the caller.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from hybridsched.core.policy import ReplicasPolicy
from hybridsched.core.values import Value

_TAG = "hs-replica"

MOVED = "-off"
"""End of the token of a job that was kept off nodes when it was submitted."""


class Phase(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    LEAVING = "leaving"
    """Being ended; it serves no more and its GPU is not free yet."""
    ENDED = "ended"


class ReplicaTag(Value, frozen=True, kw_only=True):
    """What a job's comment says of it, so that any policy worker knows its replicas again."""

    pool: str
    token: str
    """Differs for every submission: tells whether one whose answer was lost has come to be."""
    spec: str
    """Digest of what it was started with; another one than the policy's is out of date."""
    group: str

    def text(self) -> str:
        return f"{_TAG}:{self.pool}:{self.token}:{self.spec}:{self.group}"


def read_tag(comment: str) -> ReplicaTag | None:
    """The tag in a job's comment; None: not one of ours."""
    parts = comment.split(":", 4)
    if len(parts) != 5 or parts[0] != _TAG or not all(parts):
        return None
    return ReplicaTag(pool=parts[1], token=parts[2], spec=parts[3], group=parts[4])


def digest(wanted: ReplicasPolicy) -> str:
    """What makes a running job out of date when it changes: not the number of jobs, nor their timing."""
    parts = [wanted.model, wanted.gres, wanted.time_limit_s, wanted.script, list(wanted.arguments)]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:10]


class SeenJob(Value, frozen=True, kw_only=True):
    """One replica job as Slurm and its own telemetry show it."""

    job: int
    group: str
    token: str
    spec: str
    phase: Phase
    stuck: bool = False
    """Slurm could not launch it and holds it: it will not start by itself."""
    ends_ms: float | None = None
    """End of its time limit; None: none, or it has not started."""
    serving: bool | None = None
    """Whether its engine is healthy by fresh telemetry; None: telemetry could not be read."""
    going: bool = False
    """Its host changes its mode: it is made to leave elsewhere, and counts for nothing."""
    nodes: tuple[str, ...] = ()
    """Where it runs."""
    excluded: tuple[str, ...] = ()
    """Nodes that Slurm keeps it off."""

    @property
    def kept_off(self) -> bool:
        """Whether it waits, and was kept off nodes by us."""
        return self.phase is Phase.PENDING and self.token.endswith(MOVED)


class Move(Value, frozen=True, kw_only=True):
    """Replicas of a group that have to come to serve off certain nodes, whose host is to change its mode."""

    group: str
    count: int
    nodes: tuple[str, ...]


class LostGpu(Value, frozen=True, kw_only=True):
    """A replica job's report that its GPU is gone, proved by a probe."""

    job: int
    node: str
    why: str


class Seen(Value, frozen=True, kw_only=True):
    """One look at Slurm. `at_ms`: when it began, so nothing asked later shows in it for certain."""

    at_ms: float
    jobs: tuple[SeenJob, ...] = ()
    lost: tuple[LostGpu, ...] = ()
    moves: tuple[Move, ...] = ()
    drained: tuple[str, ...] = ()
    """Nodes that stand drained with a reason of ours."""


class Submit(Value, frozen=True, kw_only=True, tag="submit"):
    group: str
    token: str
    spec: str
    why: str
    excluded: tuple[str, ...] = ()
    """Nodes on which it must not start."""


class Stop(Value, frozen=True, kw_only=True, tag="stop"):
    """Tell the replica to finish what it holds and leave."""

    job: int
    group: str
    why: str


class Cancel(Value, frozen=True, kw_only=True, tag="cancel"):
    job: int
    group: str
    why: str


class Drain(Value, frozen=True, kw_only=True, tag="drain"):
    node: str
    job: int
    reason: str


class Withheld(Value, frozen=True, kw_only=True, tag="withheld"):
    """A node that should be drained and is not, for a human to look at. Comes once for each report."""

    node: str
    job: int
    why: str


Instruction = Submit | Stop | Cancel | Drain | Withheld


class Result(Value, frozen=True, kw_only=True):
    """What came of one instruction."""

    at_ms: float
    ok: bool
    job: int | None = None
    """Of a submission."""
    error: str = ""
    sure: bool = True
    """False: it may have been done all the same (a timeout)."""


class Life(Value, frozen=True, kw_only=True):
    """What is remembered of one job that has been seen alive."""

    job: int
    group: str
    ends_ms: float | None = None
    served_ms: float | None = None
    """When it was first seen serving."""
    silent_ms: float | None = None
    """Since when it runs and does not serve; None: it serves, waits, or nobody knows."""
    stop_ms: float | None = None
    """When it was told to stop."""
    cancel_ms: float | None = None
    """When its cancellation was last asked for."""

    @property
    def dismissed(self) -> bool:
        return self.stop_ms is not None or self.cancel_ms is not None


class Order(Value, frozen=True, kw_only=True):
    """A submission whose job has not been seen yet."""

    group: str
    token: str
    at_ms: float
    job: int | None = None
    moved: bool = False
    """It was kept off nodes."""
    unsure_ms: float | None = None
    """Nobody knows whether Slurm took it; since when."""
    looked_ms: float | None = None
    """First look at Slurm since then: its answer may have come before Slurm read the submission."""


class Trouble(Value, frozen=True, kw_only=True):
    """A group whose jobs die soon, or cannot be submitted."""

    group: str
    deaths: int
    until_ms: float
    """No submission before that."""
    last: str


class Fleet(Value, frozen=True, kw_only=True):
    """The state between two steps. `born` tells this policy worker's submissions from those of others."""

    born: str
    count: int = 0
    seen_ms: float | None = None
    lives: tuple[Life, ...] = ()
    orders: tuple[Order, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    drains: dict[int, float] = msgspec.field(default_factory=dict)
    """Reports of lost GPUs (by job) that were acted on, and when."""
    settled: tuple[int, ...] = ()
    """Those of them that are done with."""
