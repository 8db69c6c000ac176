"""The values of `core.fill`: what it is told of nodes, lanes and jobs, what it remembers, what it orders."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.values import Value

LOST_MS = 60_000.0
"""An instruction whose end nobody has told for this long is taken for lost (its executor died or dropped it):
four times the longest call to Slurm that an adapter allows."""


class FillWhy(StrEnum):
    """Why a count is set."""

    LANES_OPEN = "lanes_open"
    LANES_CLOSED = "lanes_closed"
    LANES_TAKEN = "lanes_taken"
    """Lanes are open, and each has its job."""
    FLOOR = "floor"
    """Open lanes are left out, so that online keeps its floor of GPUs."""
    RESET = "reset"
    """Slurm had the right count and shows another: a reconfigure, a restart, somebody's hand."""
    LIVE_UNKNOWN = "live_unknown"
    NODE_UNUSABLE = "node_unusable"
    NO_PLACES = "no_places"
    """The node has none of `place_gres`: nothing would bound the jobs that start there."""
    OTHER_MODEL = "other_model"
    """Lanes are open and free, and every job that waits is for another model."""


class RequeueWhy(StrEnum):
    """Why a job gives its place back."""

    GATE_CLOSED = "gate_closed"
    NO_LANE = "no_lane"
    """It has no lane: its node has none, or all are closed, or held by others; or its own has gone."""
    WRONG_NODE = "wrong_node"
    """It has no lane, and no lane of its node serves its model."""


class FillNode(Value, frozen=True, kw_only=True):
    """A node of the pool, as last read from Slurm."""

    node: str
    live: int | None
    """The live count, which jobs do not lower; None when it could not be read. One that Slurm does not list
    counts 0."""
    seen_ms: float | None
    """When that reading began."""
    usable: bool = True
    places: int | None = None
    """How many jobs may be there at once, as Slurm is configured; None: not asked for."""


class FillLane(Value, frozen=True, kw_only=True):
    """A lane and its gate, as the policy worker has decided it."""

    lane: str
    node: str
    open: bool
    closed_since_ms: float | None = None
    """Since when it has been closed without a break; None: not known, or open."""
    model: str | None = None
    """What its engine serves; None: not known, it may be any."""


class FillJob(Value, frozen=True, kw_only=True):
    """An offline job that holds a place. Jobs that wait are Slurm's business."""

    job: int
    node: str
    lane: str | None
    """The lane it has claimed; None: none yet, or not known."""
    started_ms: float
    """Start of this run; another one after each requeue."""
    leaving: bool = False
    model: str | None = None
    """The model it needs; None: not known, or any will do."""


class FillView(Value, frozen=True, kw_only=True):
    """Everything a plan is made of. All times are on one clock."""

    now_ms: float
    nodes: tuple[FillNode, ...] = ()
    lanes: tuple[FillLane, ...] = ()
    jobs: tuple[FillJob, ...] = ()
    jobs_seen_ms: float | None = None
    """When the reading of the jobs began; None: they are not known, and nobody is requeued."""
    waiting: frozenset[str | None] = frozenset()
    """The models of the jobs that wait for a place; None among them: one whose model is not known."""
    floor: int = 0
    """Lanes of the pool that never admit offline work (the policy's `floor_gpus`)."""


class SetFill(Value, frozen=True, kw_only=True, tag="set_fill"):
    node: str
    count: int
    why: FillWhy
    number: int = 0
    """Tells this order from every other one, so that an answer is taken for the right one."""


class RequeueJob(Value, frozen=True, kw_only=True, tag="requeue_job"):
    job: int
    why: RequeueWhy
    number: int = 0


Instruction = SetFill | RequeueJob


class Told(Value, frozen=True, kw_only=True):
    """An expectation: what was asked of Slurm and has not been seen yet."""

    count: int
    number: int
    asked_ms: float
    answered_ms: float | None = None


class AskedToLeave(Value, frozen=True, kw_only=True):
    """The same for a requeue, of one run of a job."""

    started_ms: float
    number: int
    asked_ms: float
    answered_ms: float | None = None


class FillState(Value, frozen=True, kw_only=True):
    """What is remembered between plans. Start with `FillState()`: nothing told, nothing trusted."""

    told: dict[str, Told] = msgspec.field(default_factory=dict)
    """By node."""
    settled: dict[str, int] = msgspec.field(default_factory=dict)
    """By node: the last count that was asked for and then seen."""
    leaving: dict[int, AskedToLeave] = msgspec.field(default_factory=dict)
    """By job."""
    bare: dict[str, float] = msgspec.field(default_factory=dict)
    """Nodes that have a job and no lane at all: since when they have been seen so without a break."""
    orphans: dict[int, float] = msgspec.field(default_factory=dict)
    """Jobs whose own lane is not among the lanes (its replica ended): since when, without a break."""
    strays: dict[int, float] = msgspec.field(default_factory=dict)
    """Jobs without a lane on a node where none serves their model: since when, without a break."""
    issued: int = 0
    """Number of the last instruction."""
