"""What crosses the border to Slurm: jobs, nodes, partitions, reservations, and what can go wrong.

Times are milliseconds of the Unix epoch on slurmctld's clock, spans are milliseconds; Slurm itself counts in
whole seconds. None means that Slurm did not say it.
"""

from __future__ import annotations

import msgspec

from hybridsched.core.values import Value


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ENDED = _words(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT"
)
"""Base states of a job that will not run again under this record."""

JOB_FLAGS = _words(
    "COMPLETING CONFIGURING EXPEDITING LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL REQUEUED REQUEUE_FED "
    "REQUEUE_HOLD RESIZING RESV_DEL_HOLD SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED UPDATE_DB"
)
"""States that stand beside a base state. Slurm before 23.02 shows the flag in place of the base."""

_RUNNING = _words("RUNNING CONFIGURING RESIZING SIGNALING")

UNUSABLE = _words(
    "DOWN DRAIN DRAINED DRAINING ERROR FAIL FAILING FUTURE INVAL INVALID INVALID_REG MAINT MAINTENANCE "
    "NOT_RESPONDING NO_RESPOND POWERED_DOWN POWERING_DOWN POWER_DOWN REBOOT_ISSUED UNKNOWN"
)
"""Node states and flags under which no job starts there."""

_SHUT = _words("DOWN DRAIN DRAINED DRAINING ERROR FAIL FAILING INVAL INVALID_REG")


class ClusterError(Exception):
    """Slurm did not do what was asked. The message says what was asked, what came back, what to do."""

    def __init__(self, message: str, *, code: str, retryable: bool) -> None:
        super().__init__(message)
        self.code = code
        """One of `CODES`."""
        self.retryable = retryable
        """Whether the same call may succeed later, with nothing changed by hand."""


CODES: dict[str, str] = {
    "timeout": "Slurm gave no answer in time; whether it acted is not known",
    "unreachable": "no slurmctld answers",
    "missing": "the command or module is not installed, or its version does not fit",
    "died": "the process that talks to Slurm ended in the middle of a call",
    "not_found": "there is no such job, node or partition",
    "denied": "this user may not do that",
    "refused": "Slurm said no: the request makes no sense to it, or not in this state",
    "no_effect": "Slurm said yes, and nothing changed",
    "unsupported": "this adapter cannot do it; the message names another way",
    "unreadable": "the answer was not understood",
    "invalid": "the call itself is wrong; Slurm was not asked",
    "differs": "what stands is not what should stand; nothing was changed",
    "fenced": "another policy worker leads; Slurm was not asked",
}
"""The closed set of error codes."""


class Gres(Value, frozen=True, kw_only=True):
    """One generic resource of a node or a job: `gpu:a100:4`."""

    name: str
    type: str | None = None
    count: int = 1
    index: str | None = None
    """Which devices, as Slurm writes it (`0-1,3`); None where it does not say."""

    def spec(self) -> str:
        """As `--gres=` and `gres=` take it."""
        return ":".join([self.name, *([self.type] if self.type else []), str(self.count)])


def total(gres: tuple[Gres, ...], name: str, kind: str | None = None) -> int:
    """How many of GRES `name` there are, of type `kind` or of any. An entry that is not there counts 0:
    Slurm drops an entry from a node's list when its live count is set to 0."""
    return sum(g.count for g in gres if g.name == name and kind in (None, g.type))


class Job(Value, frozen=True, kw_only=True):
    """A batch job, as far as decisions need it."""

    id: int
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str = ""
    """Base state in capitals: PENDING, RUNNING, COMPLETED, …; Slurm before 23.02 hides it behind COMPLETING,
    CONFIGURING, RESIZING, SIGNALING or STOPPED while these last."""
    flags: tuple[str, ...] = ()
    reason: str = ""
    """Why it waits or ended, in Slurm's words; empty for none."""
    nodes: tuple[str, ...] = ()
    gres: tuple[Gres, ...] = ()
    """Asked for on each node."""
    excluded: tuple[str, ...] = ()
    """Nodes that it must not run on (`--exclude`)."""
    required: tuple[str, ...] = ()
    """Nodes that it must run on (`--nodelist`)."""
    comment: str = ""
    restarts: int | None = None
    priority: int | None = None
    submit_ms: float | None = None
    """When it was submitted, or last put back in the queue."""
    begin_ms: float | None = None
    """While a begin time keeps it waiting (`BeginTime`): that time. None otherwise."""
    start_ms: float | None = None
    """When it (last) started; None while it waits, whatever start Slurm forecasts."""
    end_ms: float | None = None
    """When it ended; None before that."""
    time_limit_ms: float | None = None
    """None: no limit."""
    array_job: int | None = None
    array_task: int | None = None
    array_waiting: str = ""
    """Tasks of an array that this record stands for while they wait (`3-9%2`)."""

    @property
    def address(self) -> tuple[int, int | None]:
        """Job and task to name it by: the bare id of one task of an array is that of the whole array too."""
        if self.array_job is None or self.array_task is None:
            return self.id, None
        return self.array_job, self.array_task

    @property
    def pending(self) -> bool:
        return self.state == "PENDING" and "COMPLETING" not in self.flags

    @property
    def running(self) -> bool:
        """Holding its nodes with its script started or about to; not one that is being ended."""
        return self.state in _RUNNING and "COMPLETING" not in self.flags

    @property
    def suspended(self) -> bool:
        """Stopped by hand where it stands, by `scontrol suspend` or SIGSTOP. It keeps its nodes' GRES."""
        return self.state in ("SUSPENDED", "STOPPED")

    @property
    def leaving(self) -> bool:
        """Being ended; its nodes are not free yet."""
        return self.state == "COMPLETING" or "COMPLETING" in self.flags

    @property
    def ended(self) -> bool:
        return self.state in ENDED and not self.leaving

    @property
    def held(self) -> bool:
        return self.pending and self.priority == 0


class JobSpec(Value, frozen=True, kw_only=True):
    """A batch job to be submitted. Exactly one of `script` and `script_path` is given."""

    name: str
    script: str | None = None
    """The text of a batch script, from its `#!` on."""
    script_path: str | None = None
    arguments: tuple[str, ...] = ()
    partition: str | None = None
    gres: tuple[Gres, ...] = ()
    nodes: tuple[str, ...] = ()
    """Names of the nodes it must run on; empty: Slurm's choice."""
    excluded: tuple[str, ...] = ()
    """Names of nodes that it must not run on."""
    time_limit_min: int | None = None
    cpus_per_task: int | None = None
    memory_mb: int | None = None
    comment: str | None = None
    signal: str | None = None
    """As `--signal` takes it: `B:USR2@60`."""
    requeue: bool | None = None
    append: bool = False
    """Whether a restart appends to the output files."""
    output: str | None = None
    error: str | None = None
    chdir: str | None = None
    array: str | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    """Set for the job beside what the submitting process has."""
    hold: bool = False
    account: str | None = None
    qos: str | None = None
    user: str | None = None
    """Submit for another user; root only."""


class JobChange(Value, frozen=True, kw_only=True):
    """What to change of a job that waits or runs. None leaves a thing as it is."""

    comment: str | None = None
    time_limit_min: int | None = None
    start_now: bool = False
    """Skip the wait that Slurm gives a requeued job."""
    held: bool | None = None
    requeue: bool | None = None
    excluded: tuple[str, ...] | None = None
    """All nodes that it must not run on, in place of those before. Only of a job that waits."""


class Node(Value, frozen=True, kw_only=True):
    """One node record. Several may stand for one host."""

    name: str
    host: str = ""
    states: tuple[str, ...] = ()
    """Base state first, then flags, in capitals."""
    gres: tuple[Gres, ...] = ()
    """Live counts."""
    gres_used: tuple[Gres, ...] = ()
    reason: str = ""
    partitions: tuple[str, ...] = ()
    booted_ms: float | None = None
    """Start of its machine, ms of the epoch; None: Slurm does not know it now."""
    started_ms: float | None = None
    """Start of its slurmd."""

    @property
    def usable(self) -> bool:
        """Whether Slurm could start a job there, resources permitting."""
        return bool(self.states) and UNUSABLE.isdisjoint(self.states)

    @property
    def shut(self) -> bool:
        """Whether `resume` would change it: drained, down or refused.

        Not one that is merely silent for a moment, as Slurm shows a node that it has just resumed.
        """
        return not _SHUT.isdisjoint(self.states)

    @property
    def draining(self) -> bool:
        return not {"DRAIN", "DRAINED", "DRAINING"}.isdisjoint(self.states)


class Partition(Value, frozen=True, kw_only=True):
    name: str
    up: bool = True
    nodes: tuple[str, ...] = ()
    priority_tier: int | None = None
    preempt_mode: str = ""
    """In capitals, comma-separated; empty where Slurm does not say."""
    grace_s: int | None = None
    default: bool = False
    max_time_ms: float | None = None
    """None: no limit."""


class Reservation(Value, frozen=True, kw_only=True):
    name: str
    nodes: tuple[str, ...] = ()
    start_ms: float | None = None
    end_ms: float | None = None
    flags: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    active: bool = False
