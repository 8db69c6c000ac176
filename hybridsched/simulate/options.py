"""What the user asked of a simulation, checked before anything runs."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.core.values import Value
from hybridsched.demo.options import LINES_PER_ENGINE_S, LIVELY_START_S
from hybridsched.engines.simulated.perf import DEFAULT_PROFILE, Profile, load_profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.policyfile import PolicyError, load_policy
from hybridsched.traces import SHIPPED_LENGTHS, SHIPPED_TRACE, TraceError, TraceRow, shipped
from hybridsched.twin.absence import Absence
from hybridsched.twin.baselines import Baseline, baseline_named
from hybridsched.twin.jobs import SlurmDelays
from hybridsched.twin.latencies import Latencies
from hybridsched.twin.lengths import Length, read_lengths, repeated
from hybridsched.twin.trace import Waves, load_trace, make_waves

KV_TOKENS = 400_000
"""KV cache of an engine, as in the demo."""

MOST_LINES = 5_000_000
"""Lines of a batch that are simulated at most: each takes some hundred bytes."""


class SimulateUsageError(Exception):
    """The options cannot be used; the message says which and what is allowed."""


class SimulateOptions(Value, frozen=True, kw_only=True):
    """The options of `hybridsched simulate`."""

    trace: Path | None = None
    waves: Waves | None = None
    """A made load in the place of a trace."""
    start_s: float | None = None
    """None: the beginning of a trace of one's own, a lively part of the shipped one."""
    duration_s: float = 300.0
    load: float = 1.0
    batch: Path | None = None
    lines: int | None = None
    """None: those of a JSONL file, or enough to last for the trace."""
    gpus: int = 4
    policies: tuple[str, ...] = ("idle-window",)
    profile: str = DEFAULT_PROFILE
    seed: int = 0
    baseline: bool = True
    repeat: int = 1
    """Runs, with the arrivals moved by milliseconds in each but the first."""
    latencies: Latencies = Latencies()
    absences: tuple[Absence, ...] = ()
    slurm: SlurmDelays | None = None
    """Lanes are Slurm jobs; None: a worker stands at each from the start."""

    @property
    def begin_s(self) -> float:
        """Second of the trace at which the slice begins."""
        if self.start_s is not None:
            return self.start_s
        return LIVELY_START_S if self.trace is None else 0.0


class SimulatePlan(Value, frozen=True, kw_only=True):
    """A simulation whose inputs are read and found good."""

    options: SimulateOptions
    trace: str
    """Its name in reports."""
    rows: tuple[TraceRow, ...]
    batch: tuple[Length, ...]
    policies: tuple[PoolPolicy, ...]
    baselines: dict[str, Baseline]
    """Those of them, by name, that are no policies but baselines of the twin."""
    profile: Profile
    limits: Limits
    notes: tuple[str, ...] = ()
    """What the user should know of the inputs."""


def make_plan(options: SimulateOptions) -> SimulatePlan:
    """Read trace, batch, policies and profile.

    Raises:
        SimulateUsageError: one of them cannot be used.
    """
    notes: list[str] = []
    try:
        name, rows = _online(options)
        lengths = read_lengths(options.batch or shipped(SHIPPED_LENGTHS), notes.append)
        policies, baselines = _policies(options.policies)
        profile = load_profile(options.profile)
    except (TraceError, PolicyError, ValueError) as error:
        raise SimulateUsageError(str(error)) from None
    gone = next((one.replica for one in options.absences if one.replica >= options.gpus), None)
    if gone is not None:
        raise SimulateUsageError(
            f"replica {gone} cannot be away: there are {options.gpus} engines, so r0 to r{options.gpus - 1}"
        )
    wide = next((name for name, one in baselines.items() if (one.online_engines or 0) > options.gpus), None)
    if wide is not None:
        raise SimulateUsageError(f"{wide} has more engines serve online than there are ({options.gpus})")
    open_ = next((policy.name for policy in policies if policy.kind is PolicyKind.UNPROTECTED), None)
    if options.absences and open_ is not None:
        raise SimulateUsageError(
            f"{open_} closes no gate, so offline would run on engines that are away: give it without --away"
        )
    names = [policy.name for policy in policies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SimulateUsageError(f"two of the policies to compare are called {twice!r}; rename one of them")
    batch = tuple(repeated(lengths, _lines(options, len(lengths))))
    longest = max(
        *(row.prompt_tokens + row.output_tokens for row in rows),
        *(one.prompt_tokens + one.output_tokens for one in lengths),
    )
    if longest >= KV_TOKENS - 16:
        raise SimulateUsageError(
            f"a request or a line of the batch has {longest:,} tokens, prompt and output; the KV cache of an "
            f"engine holds {KV_TOKENS:,} tokens: leave it out"
        )
    # The engines must take every request of the trace; vLLM wants room for one token more.
    length = max(16_384, longest + 1)
    return SimulatePlan(
        options=options,
        trace=name if options.load == 1.0 else f"{name} at load {options.load:g}",
        rows=tuple(rows),
        batch=batch,
        policies=policies,
        baselines=baselines,
        profile=profile,
        limits=Limits(max_model_len=length, kv_tokens=KV_TOKENS),
        notes=tuple(notes),
    )


def _policies(names: tuple[str, ...]) -> tuple[tuple[PoolPolicy, ...], dict[str, Baseline]]:
    """The policies by name or file, and which of them are baselines: those have the objectives of the first
    that is none."""
    baselines = {name: found for name in names if (found := baseline_named(name)) is not None}
    loaded = {name: load_policy(name).policy for name in names if name not in baselines}
    like = next(iter(loaded.values()), PoolPolicy(name="default", kind=PolicyKind.IDLE_WINDOW))
    policies = tuple(loaded.get(name) or baselines[name].policy(name, like) for name in names)
    return policies, baselines


def _online(options: SimulateOptions) -> tuple[str, list[TraceRow]]:
    """The online load, and what it is called."""
    if options.waves is not None:
        rows = make_waves(options.waves, options.duration_s, factor=options.load, seed=options.seed)
        return options.waves.name, rows
    trace = options.trace or shipped(SHIPPED_TRACE)
    rows = load_trace(
        trace,
        start_s=options.begin_s,
        duration_s=options.duration_s,
        factor=options.load,
        seed=options.seed,
    )
    return trace.name, rows


def _lines(options: SimulateOptions, given: int) -> int:
    if options.lines is not None:
        lines = options.lines
    elif options.batch is not None and options.batch.suffix == ".jsonl":
        lines = given
    else:
        lines = math.ceil(LINES_PER_ENGINE_S * options.gpus * options.duration_s)
    if lines > MOST_LINES:
        raise SimulateUsageError(
            f"a batch of {lines:,} lines was asked for (--lines, or engines x duration); at most "
            f"{MOST_LINES:,} are simulated: give fewer with --lines"
        )
    return lines


def baseline_of(policy: PoolPolicy) -> PoolPolicy:
    """The same policy with every gate closed, so that online is routed alike."""
    return msgspec.structs.replace(policy, name="online-only", kind=PolicyKind.ONLINE_ONLY)
