"""The record of a run: what was measured, as values, and the readers of the logs that it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hybridsched.core.policy import SloPolicy
from hybridsched.core.values import Value

_Row = TypeVar("_Row")


class RecordError(ValueError):
    """A log of the run cannot be read. The message names the file and the line."""


class OnlineRow(Value, frozen=True, kw_only=True):
    """One online request as its client saw it. Times are wall seconds from the start of the trace."""

    index: int
    id: str
    scheduled_s: float
    """When the trace wanted it sent."""
    sent_s: float
    """When it was sent."""
    first_s: float | None
    """When its first token arrived."""
    last_s: float | None
    """When its last token arrived."""
    end_s: float
    """When its last answer, of whatever kind, arrived."""
    prompt_tokens: int
    max_tokens: int
    tokens: int
    """Tokens that the engine says it produced."""
    status: str
    """ok, expired, failed or cancelled."""
    code: str = ""
    """Why it is not ok."""


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of an engine, from its log. Fields that it does not know are ignored."""

    s: float
    """Start and end, seconds of the host's monotonic clock."""
    e: float
    on: int = 0
    """Online sequences in the engine's batch."""
    off: int = 0
    pon: int = 0
    """Online prompt tokens computed."""
    poff: int = 0
    won: int = 0
    """Online requests waiting."""
    woff: int = 0
    gon: int = 0
    """Online tokens generated."""
    goff: int = 0
    kv: float = 0.0
    """Share of the KV cache in use, 0..1."""
    late: float = 0.0
    """How late the engine's process woke for the end of this iteration, wall seconds (fidelity)."""


class EngineCounts(Value, frozen=True, kw_only=True):
    """What an engine's iterations have come to, where they were counted and not logged.

    Seconds are wall seconds, as in the logs. Bins lie side by side from the pass's start.
    """

    online_s: float
    """An online request ran or waited."""
    idle_s: float
    """None did, while offline work remained."""
    harvested_s: float
    mixed_s: float
    mixed_iterations: int
    prompt_tokens: int
    output_tokens: int
    """Offline tokens computed: of prompts, and generated."""
    lengths_online: dict[float, int]
    lengths_offline: dict[float, int]
    """Iterations by their length in wall milliseconds: of online work alone, and with offline work."""
    bin_s: float
    online_bins: tuple[float, ...]
    offline_bins: tuple[float, ...]
    mixed_bins: tuple[float, ...]
    """Seconds of each bin in which online work, offline work, both in one iteration were there."""
    token_bins: tuple[float, ...]
    """Offline tokens generated."""
    gate_bins: tuple[str, ...]
    """The gate in the middle of each bin: "open", or why it is closed; empty before the first decision."""
    away_s: float = 0.0
    """The engine was not there."""


class EngineLog(Value, frozen=True, kw_only=True):
    replica: str
    iterations: tuple[Iteration, ...] = ()
    """In order of time."""
    counts: EngineCounts | None = None
    """In the place of the iterations."""
    torn_lines: int = 0
    """Lines of the log that are no whole JSON: the engine was killed while it wrote."""


class Event(Value, frozen=True, kw_only=True):
    """Something that a worker did: signal, quiet, resume, chunk, gate. `data` holds its other fields."""

    t: str
    mono_s: float
    lane: str = ""
    data: dict[str, Any] = msgspec.field(default_factory=dict)


class Pause(Value, frozen=True, kw_only=True):
    """One signal that found offline work on a lane, wall seconds."""

    lane: str
    at_s: float
    quiet_s: float
    """From the signal to the end of the last iteration that ran offline work; 0 if none ended after it."""
    iteration_s: float
    """Length of the last iteration that ran offline work: the one that the engine could not be kept from."""
    found_work: bool
    """Whether an iteration with offline work ended after the signal and before the lane resumed."""

    @property
    def path_s(self) -> float:
        """What the signal itself took: how long after it an iteration with offline work could still begin.

        It is `quiet_s` less that one iteration; 0 when that iteration ran already at the signal. An iteration
        that begins while the signal is under way cannot be stopped, whether another ran before it or not.
        """
        return max(0.0, self.quiet_s - self.iteration_s)


class PauseCounts(Value, frozen=True, kw_only=True):
    """The pauses of a pass, where they were counted and not logged as events."""

    pauses: tuple[Pause, ...] = ()
    """Every signal."""
    by_rung: dict[str, int] = msgspec.field(default_factory=dict)
    ended: int = 0
    kept_tokens: int = 0


class Ceiling(Value, frozen=True, kw_only=True):
    """What offline work could have come to at most. See docs/simulate.md."""

    alone_tokens_per_s: float
    """Prompt and output tokens a second of one engine that runs the batch alone, at its best."""
    policy_tokens_per_s: float
    """The same within the policy's own budgets and slices."""
    online_needs_s: float
    """Engine seconds that the online requests take at least, within the objective for time per token."""


class BatchCheck(Value, frozen=True, kw_only=True):
    """The offline batch, counted from its files."""

    lines: int = 0
    """Lines of the input file that are not blank."""
    completed: int = 0
    failed: int = 0
    remaining: int = 0
    """Lines not finished when the run stopped, which a later run would take up."""
    missing: int = 0
    """Lines that are in no file and not remaining either."""
    duplicates: int = 0
    """Results beyond the first of their line."""
    prompt_tokens: int = 0
    """Prompt tokens of the completed lines."""
    output_tokens: int = 0
    """Tokens in the output of completed lines."""
    wrong_length: int = 0
    """Completed lines whose output is not as long as they asked for with `ignore_eos`."""
    kept_prompt_tokens: int = 0
    """Prompt tokens of the unfinished lines that have kept output."""
    kept_tokens: int = 0
    """Output tokens of unfinished lines that are kept for their continuation."""
    worker_recomputed: int = 0
    """Tokens that the offline workers themselves count as computed again."""


class PolicyStats(Value, frozen=True, kw_only=True):
    name: str
    version: int = 0
    slo: SloPolicy = SloPolicy()
    cycles: int = 0
    cycle_ms: dict[str, float | None] = msgspec.field(default_factory=dict)
    """p50 and p99 of the recent cycles, as the policy worker measured them, wall time."""


class PassRecord(Value, frozen=True, kw_only=True):
    """One replay of the trace."""

    start_s: float
    """Start of the trace on the host's monotonic clock."""
    end_s: float
    """When the last online request had ended (and the trace its duration), the same clock."""
    online: tuple[OnlineRow, ...] = ()
    engines: tuple[EngineLog, ...] = ()
    events: tuple[Event, ...] = ()
    restarts: dict[str, int] = msgspec.field(default_factory=dict)
    """Child processes that died and were started again, by name."""
    work_end_s: float | None = None
    """Until when offline work remained, where that was counted; the clock of `start_s`."""
    pauses: PauseCounts | None = None
    """In the place of the events."""
    by_requests: bool = False
    """The engines log no iterations: theirs are stretches between requests (`report.request_spans`)."""


class JobRun(Value, frozen=True, kw_only=True):
    """One run of a job, or its wait for one. Times are seconds of the host's monotonic clock, as they were
    seen: each is late by up to the time between two looks."""

    id: int
    name: str
    partition: str
    run: int
    """1 for the first; one more after each requeue."""
    node: str = ""
    submit_s: float
    """When it was submitted; of a later run: when the job was back in the queue."""
    start_s: float | None = None
    end_s: float | None = None
    state: str = ""
    """As Slurm showed it last; REQUEUED for a run that another follows."""


class Reclaim(Value, frozen=True, kw_only=True):
    """An extra online job that wanted a GPU that an offline job held."""

    online_job: int
    offline_job: int
    node: str
    submit_s: float
    running_s: float | None = None
    """When it ran; None: it did not."""


class SlurmRecord(Value, frozen=True, kw_only=True):
    """What was seen of Slurm in the together pass."""

    version: str = ""
    nodes: int = 0
    lanes: dict[str, str] = msgspec.field(default_factory=dict)
    """Node of each lane."""
    look_s: float = 0.0
    """Between two looks while jobs come up or a GPU is given back; they are rarer at other times."""
    jobs: tuple[JobRun, ...] = ()
    reclaims: tuple[Reclaim, ...] = ()
    partition_offline: str = "offline"


class Interrupted(Value, frozen=True, kw_only=True):
    """Lines that pauses interrupted, run again without one."""

    lines: int
    """Lines of which a pause ended a request that had tokens."""
    compared: int
    """Those of them that are finished and greedy (temperature 0)."""
    identical: int
    """Those of them whose text, finish reason and tokens are the same."""
    different: tuple[str, ...] = ()
    """custom_ids of some that are not."""


class RunRecord(Value, frozen=True, kw_only=True):
    """A whole run of the demo."""

    speed: float
    """How much faster than the wall clock trace and engines ran."""
    gpus: int
    duration_s: float
    """Length of the slice of the trace, trace seconds."""
    trace: str = ""
    policy: PolicyStats
    batch: BatchCheck
    together: PassRecord
    baseline: PassRecord | None = None
    wall_s: float = 0.0
    slurm: SlurmRecord | None = None
    """None: a run without Slurm."""
    engine: str = ""
    """The real engine that ran; empty: simulated ones."""
    engines_start_s: float | None = None
    """Wall seconds until real engines were healthy."""
    interrupted: Interrupted | None = None
    simulated: bool = False
    """A run of the twin: nothing was measured, all was worked out."""
    ceiling: Ceiling | None = None


def read_online(path: Path) -> tuple[OnlineRow, ...]:
    """Rows of a load generator's log, by index.

    Raises:
        RecordError: a line is not a row.
    """
    rows, _ = _read(path, OnlineRow)
    return tuple(sorted(rows, key=lambda row: row.index))


def read_engine(path: Path, replica: str) -> EngineLog:
    """The iteration log of one engine, which may have been killed and started again in between.

    Raises:
        RecordError: a line is not an iteration.
    """
    rows, torn = _read(path, Iteration)
    return EngineLog(replica=replica, iterations=tuple(sorted(rows, key=lambda row: row.s)), torn_lines=torn)


def _read(path: Path, kind: type[_Row]) -> tuple[list[_Row], int]:
    """Rows of a JSON lines file, and how many lines are torn. A missing file has none of either."""
    decoder = msgspec.json.Decoder(kind)
    rows: list[_Row] = []
    torn = 0
    if not path.exists():
        return rows, torn
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                rows.append(decoder.decode(line))
            except msgspec.ValidationError as error:
                raise RecordError(f"{path}, line {number}: {error}") from None
            except msgspec.DecodeError:
                torn += 1
    return rows, torn


def event_of(fields: dict[str, Any]) -> Event | None:
    """An event of the pool's event log; None for one without a type or a time."""
    kind, mono = fields.get("t"), fields.get("mono_s")
    if not isinstance(kind, str) or not isinstance(mono, int | float):
        return None
    rest = {key: value for key, value in fields.items() if key not in {"t", "mono_s", "lane"}}
    return Event(t=kind, mono_s=float(mono), lane=str(fields.get("lane") or ""), data=rest)
