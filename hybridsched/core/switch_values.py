"""Values of `core.switch`: what is seen of hosts, what is remembered of their changes, what is to be done.

Times are milliseconds of the Unix epoch: the state outlives the policy worker that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from hybridsched.core.values import Value


class Step(StrEnum):
    """Where a host stands. From draining to warming it is out of service."""

    SERVING = "serving"
    DRAINING = "draining"
    """Nothing starts there any more; what runs leaves."""
    EMPTY = "empty"
    """Nothing runs; its node record is taken out of service."""
    CUTTING = "cutting"
    """The GPUs are cut anew."""
    CONFIGURING = "configuring"
    """The node record of the new mode comes into service, drained."""
    VERIFYING = "verifying"
    """GPUs and node record are read back; then Slurm may use them."""
    WARMING = "warming"
    """The engines of the new mode load."""
    HELD = "held"
    """Neither mode could be established. It is out of service until an operator orders a mode."""


STEPS = tuple(Step)
AGAIN_MS = (1_000.0, 15_000.0)
"""First and longest wait before a failed act is tried again; it doubles in between."""

STRANGER = "the policy names the host no more; put it back, and its change goes on"
"""What a host waits for that the policy has lost in the middle of its change."""

MOVING = frozenset(STEPS) - {Step.SERVING, Step.HELD}


class JobKind(StrEnum):
    REPLICA = "replica"
    """A replica that the policy worker keeps running."""
    OFFLINE = "offline"
    """Offline work: it keeps its place and requeues itself when it is told to leave."""
    OTHER = "other"


class HostJob(Value, frozen=True, kw_only=True):
    """A job that holds something of a host."""

    job: int
    kind: JobKind = JobKind.OTHER
    model: str = ""
    group: str = ""
    serving: bool = False
    """Whether its engine is healthy by fresh telemetry."""


def jobs_said(jobs: Sequence[HostJob]) -> str:
    """Some jobs in few words."""
    more = f" and {len(jobs) - 5} more" if len(jobs) > 5 else ""
    return ("job " if len(jobs) == 1 else "jobs ") + ", ".join(str(job.job) for job in jobs[:5]) + more


class HostSeen(Value, frozen=True, kw_only=True):
    """One look at a host through Slurm."""

    host: str
    mode: str | None = None
    """The mode whose node record is in service, drained or not; None: no record is, or several are."""
    accepts: bool = False
    """Slurm could start a job there."""
    invalid: bool = False
    """Slurm refuses what the node reports of itself."""
    reason: str = ""
    """Why it is drained or down, in Slurm's words."""
    down: str = ""
    """Why Slurm has no use for the record of the mode that is remembered: it is down, or refused."""
    booted_ms: float | None = None
    """When the machine of the record in service was started; None: not known now."""
    started_ms: float | None = None
    """The same of its slurmd."""
    jobs: tuple[HostJob, ...] = ()


class Seen(Value, frozen=True, kw_only=True):
    """One look. `at_ms`: when it began."""

    at_ms: float
    cannot: str = ""
    """Why nothing can be done on hosts; empty: it can. Then no host begins, and what has begun waits."""
    reachable: bool = True
    """False: Slurm or Redis could not be read; nothing is done, and no time passes for any limit."""
    hosts: tuple[HostSeen, ...] = ()
    elsewhere: dict[str, int] = msgspec.field(default_factory=dict)
    """Model -> replicas that serve on nodes that belong to no host of the modes."""
    strays: dict[str, int] = msgspec.field(default_factory=dict)
    """Group of a mode's engine -> replicas of it among those: Slurm puts them wherever their GRES are."""


class Target(Value, frozen=True, kw_only=True):
    """What is wanted of a host."""

    mode: str
    id: str
    """Differs for every wish: the calendar's at a boundary, an operator's order."""
    cause: str = "calendar"
    ordered: bool = False
    """By an operator: also a host that is held follows."""


class HostState(Value, frozen=True, kw_only=True):
    """What is remembered of one host. Written to the journal before each act."""

    host: str
    mode: str
    """The mode it stood in last, complete."""
    goal: str
    """The mode it goes to; that of `mode` when it rests or goes back."""
    step: Step = Step.SERVING
    since_ms: float = 0.0
    """When this step began; time in which Slurm could not be read does not count."""
    began_ms: float | None = None
    """When this change of the host began."""
    target: str = ""
    """The wish that it follows, or followed last."""
    cause: str = ""
    back: bool = False
    """It goes back to `mode`."""
    left: bool = False
    """Its node records may be out of service and its GPUs cut otherwise."""
    unsure: bool = False
    """It was held: nobody knows how its GPUs are cut."""
    checks: str = ""
    """Why it is to be read back as it stands: nothing has been done to it."""
    booted_ms: float | None = None
    """When its machine was started, as last seen at rest."""
    started_ms: float | None = None
    """The same of its slurmd."""
    drained_ms: float | None = None
    """When it was drained, or first seen so: only a look that began later tells whether it is empty."""
    verified: bool = False
    asked: str = ""
    """The act that has been asked for and not been answered."""
    again_ms: float = 0.0
    """After a failed act: not before this."""
    tries: int = 0
    told: dict[str, float] = msgspec.field(default_factory=dict)
    """`WORD JOB` -> when a job was told so."""
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    """Job -> why it could not be told to leave, as long as it is there."""
    wait: str = ""
    """What it waits for now, in words."""
    why: str = ""
    """Why it went back, is held, or is left alone."""
    failures: int = 0
    """Changes for `target` that were rolled back."""
    blocked_ms: float = 0.0
    """No further try before this."""
    spans: dict[str, float] = msgspec.field(default_factory=dict)
    """What this change took so far, by part, in ms."""


class MakeRoom(Value, frozen=True, kw_only=True):
    """A host that would leave and may not, because the floor stands on it alone."""

    host: str
    groups: dict[str, int]
    """Group -> replicas of it that have to come to serve on other hosts first."""


class SwitchState(Value, frozen=True, kw_only=True):
    """All hosts. `seen_ms`: the last step's time."""

    hosts: dict[str, HostState] = msgspec.field(default_factory=dict)
    seen_ms: float | None = None
    room: MakeRoom | None = None
    """What keeps the next host from changing, where replicas on other hosts would let it."""


def counts(state: SwitchState) -> dict[str, int]:
    """Mode -> hosts that serve in it or are about to: as many engines of it are wanted."""
    found: dict[str, int] = {}
    for host in state.hosts.values():
        if host.step in (Step.SERVING, Step.WARMING):
            found[host.goal] = found.get(host.goal, 0) + 1
    return found


def leaving(state: SwitchState) -> frozenset[str]:
    """The hosts whose jobs are on their way out."""
    away = MOVING - {Step.WARMING}
    return frozenset(
        name for name, host in state.hosts.items() if host.step in away or host.step is Step.HELD
    )


# -- what is to be done ----------------------------------------------------------------------------------


class Act(Value, frozen=True, kw_only=True):
    """Something to be done on a host. Doing it twice does the same as doing it once."""

    host: str

    @property
    def word(self) -> str:
        return str(self.__struct_config__.tag)


class DrainHost(Act, frozen=True, kw_only=True, tag="drain"):
    """Let Slurm start nothing on any node record of the host."""

    reason: str


class LeaveRecords(Act, frozen=True, kw_only=True, tag="leave"):
    """Take every node record of the host out of service."""

    reason: str


class Cut(Act, frozen=True, kw_only=True, tag="cut"):
    """Cut the GPUs as the mode's layout says, and read them back."""

    mode: str


class EnterRecord(Act, frozen=True, kw_only=True, tag="enter"):
    """Bring the node record of a mode into service, drained."""

    mode: str
    reason: str


class Check(Act, frozen=True, kw_only=True, tag="check"):
    """Read back how the GPUs of a host at rest are cut. Nothing is changed."""

    mode: str


class Verify(Act, frozen=True, kw_only=True, tag="verify"):
    """Read back that GPUs and node record are those of the mode."""

    mode: str
    standing: bool = False
    """Nothing was done to them that might not show yet: a difference is final."""


class ResumeHost(Act, frozen=True, kw_only=True, tag="resume"):
    """Let Slurm use the node record of a mode."""

    mode: str


class TellJob(Act, frozen=True, kw_only=True, tag="tell_job"):
    """Make a job leave: `leave` (its signal), `requeue`, or `cancel`."""

    job: int
    how: str
    why: str


class Finished(Act, frozen=True, kw_only=True, tag="finished"):
    """A change has ended. Nothing is to be done but to say so and to note the measured spans."""

    old: str
    new: str
    """The mode in which the host stands; that of `old` when it went back; empty when it is held."""
    why: str = ""
    spans: dict[str, float] = msgspec.field(default_factory=dict)
    took_ms: float = 0.0


Instruction = DrainHost | LeaveRecords | Cut | EnterRecord | Check | Verify | ResumeHost | TellJob | Finished


class Result(Value, frozen=True, kw_only=True):
    """What came of an act."""

    at_ms: float
    ok: bool
    error: str = ""
    differs: bool = False
    """What was read back is not as the mode says."""
    passing: bool = False
    """It failed, and the same may succeed later with nothing changed by hand."""
