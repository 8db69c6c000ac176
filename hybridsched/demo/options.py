"""What the user asked of a demo, checked before anything starts."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from hybridsched.batches.errors import BatchFileError
from hybridsched.batches.layout import open_input
from hybridsched.batches.scan import scan
from hybridsched.core.policy import Autonomy, PolicyKind, PoolPolicy
from hybridsched.core.values import Value
from hybridsched.demo.errors import DemoUsageError
from hybridsched.demo.report_folder import SHORT_TRACE, prepare
from hybridsched.demo.trace import write_batch, write_mixed_batch, write_trace
from hybridsched.demo.vllm import SHORT_START_S, TIME_SHARE, VllmLaunch, longest_context, shorten
from hybridsched.policyfile import PolicyError, load_policy
from hybridsched.traces import (
    SHIPPED_LENGTHS,
    SHIPPED_TRACE,
    TraceError,
    TraceRow,
    cut,
    read_trace,
    shipped,
)

MODEL = "demo-8b"
LINES_PER_ENGINE_S = 4.0
"""Lines of the generated batch for each engine second of the trace. An engine that does nothing else and
takes 512 prompt tokens an iteration finishes about 3.8 a second: 2,582 prompt tokens are 5 iterations of
about 52 ms (profile a100-llama3-8b). So the work outlasts the trace however idle it is."""
LIVELY_START_S = 1140.0
"""Where the shipped trace is lively: the default start there, which says nothing about another trace."""


REAL_LINES_PER_ENGINE_S = 4.0
"""The same for a real engine: a tiny model on a CPU, shared with the workers, finishes some a second."""
REAL_MODEL = "demo"
REAL_CONTEXT = 1024
"""Tokens that a real engine must take at least, for a batch of the demo's own."""


class RealEngines(Value, frozen=True, kw_only=True):
    """The wish for real vLLM engines."""

    program: str
    model: Path
    arguments: tuple[str, ...] = ()
    """Of `vllm serve`."""


class DemoOptions(Value, frozen=True, kw_only=True):
    """The options of `hybridsched demo`."""

    trace: Path | None = None
    start_s: float | None = None
    """None: the beginning of a trace of one's own, a lively part of the shipped one."""
    duration_s: float = 100.0
    speed: float = 2.0
    batch: Path | None = None
    gpus: int = 4
    policy: str = "idle-window"
    report: Path = Path("report")
    baseline: bool = True
    finish: bool = False
    redis_url: str | None = None
    keep_keys: bool = False
    """On a Redis of the user's: leave the keys of the run there."""
    slurm: bool = False
    """On a private Slurm: engines as online jobs, the batch as offline jobs."""
    slurm_state: Path | None = None
    """The folder of its daemons; None: a temporary one."""
    real: RealEngines | None = None
    """None: simulated engines."""

    @property
    def begin_s(self) -> float:
        """Second of the trace at which the slice begins."""
        if self.start_s is not None:
            return self.start_s
        if self.trace is not None:
            return 0.0
        return LIVELY_START_S if self.real is None else SHORT_START_S


class Plan(Value, frozen=True, kw_only=True):
    """A demo whose inputs are read and found good."""

    options: DemoOptions
    trace: Path
    rows: tuple[TraceRow, ...]
    policy: PoolPolicy
    model: str
    batch: Path
    generated: bool
    """Whether the batch file is the demo's own."""
    max_model_len: int
    begin_s: float
    """Second of that trace at which the slice begins."""
    launch: VllmLaunch | None = None
    """How real engines are started."""

    @property
    def baseline_policy(self) -> PoolPolicy:
        """The same policy with every gate closed, so that online is routed alike."""
        return msgspec.structs.replace(self.policy, name="online-only", kind=PolicyKind.ONLINE_ONLY)


def make_plan(options: DemoOptions) -> Plan:
    """Read trace, policy and batch, prepare the report folder, and write the batch if none is given.

    Raises:
        DemoUsageError: one of them cannot be used.
    """
    try:
        trace = options.trace or shipped(SHIPPED_TRACE)
        shrunk = options.real is not None and options.trace is None
        length_s = options.duration_s * (TIME_SHARE if shrunk else 1)
        rows = cut(read_trace(trace), options.begin_s, length_s)
    except TraceError as error:
        raise DemoUsageError(str(error)) from None
    try:
        policy = load_policy(options.policy).policy
    except PolicyError as error:
        raise DemoUsageError(str(error)) from None
    if options.slurm:
        _check_opens(policy, options)
    if options.real is not None:
        return _real_plan(options, options.real, trace, rows, policy)
    model = MODEL if options.batch is None else _model_of(options.batch)
    folder = options.report.absolute()
    prepare(folder, generated=options.batch is None)
    batch = folder / "batch.jsonl" if options.batch is None else options.batch.absolute()
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    if options.batch is None:
        lengths = read_trace(shipped(SHIPPED_LENGTHS))
        lines = math.ceil(LINES_PER_ENGINE_S * options.gpus * options.duration_s)
        write_batch(batch, lengths, lines=lines, model=model, salt="offline")
        longest = max([longest, *(row.prompt_tokens + row.output_tokens for row in lengths)])
    return Plan(
        options=options,
        trace=trace,
        begin_s=options.begin_s,
        rows=tuple(rows),
        policy=policy,
        model=model,
        batch=batch,
        generated=options.batch is None,
        # the simulated engines must take every request of the trace; vLLM wants room for one token more
        max_model_len=max(16_384, longest + 1),
    )


def _real_plan(
    options: DemoOptions, real: RealEngines, trace: Path, rows: list[TraceRow], policy: PoolPolicy
) -> Plan:
    """The plan for real engines: load and batch of a size that a small model on a CPU can do."""
    context = longest_context(real.model)
    model = REAL_MODEL if options.batch is None else _model_of(options.batch)
    if options.trace is None:
        rows = shorten(rows)
    longest = max(row.prompt_tokens + row.output_tokens for row in rows) + 1
    needed = max(longest, REAL_CONTEXT)
    if context is not None and (needed if options.batch is None else longest) > context:
        raise DemoUsageError(
            f"model {real.model} takes {context} tokens and {needed} are needed; choose another --model, or "
            "a --trace of shorter requests"
        )
    folder = options.report.absolute()
    prepare(folder, generated=options.batch is None)
    if options.trace is None:
        trace = folder / SHORT_TRACE
        write_trace(trace, rows)
    batch = folder / "batch.jsonl" if options.batch is None else options.batch.absolute()
    if options.batch is None:
        lines = math.ceil(REAL_LINES_PER_ENGINE_S * options.gpus * options.duration_s)
        write_mixed_batch(batch, lines=lines, model=model, salt="offline")
    most = needed if options.batch is None or context is None else context
    return Plan(
        options=options,
        trace=trace,
        begin_s=0.0 if options.trace is None else options.begin_s,
        rows=tuple(rows),
        policy=policy,
        model=model,
        batch=batch,
        generated=options.batch is None,
        max_model_len=most,
        launch=VllmLaunch(
            program=real.program,
            model=real.model.absolute(),
            served_as=model,
            arguments=real.arguments,
            max_model_len=most,
        ),
    )


def _check_opens(policy: PoolPolicy, options: DemoOptions) -> None:
    """On Slurm a batch is registered by its first job, which starts when a gate opens.

    Raises:
        DemoUsageError: no gate would.
    """
    if (
        policy.kind is PolicyKind.ONLINE_ONLY
        or policy.autonomy is not Autonomy.AUTO
        or policy.floor_gpus >= options.gpus
    ):
        raise DemoUsageError(
            f"policy {policy.name} opens no gate (kind {policy.kind.value}, autonomy "
            f"{policy.autonomy.value}, floor_gpus {policy.floor_gpus} of {options.gpus}), so no offline job "
            "would start with --slurm; choose another --policy or leave out --slurm"
        )


def _model_of(batch: Path) -> str:
    """The model that most lines of a batch name: the demo's engines serve it.

    Raises:
        DemoUsageError: the file cannot be read or has no usable line.
    """
    try:
        with open_input(batch) as file:
            index = scan(file)
    except BatchFileError as error:
        raise DemoUsageError(f"batch {error}") from None
    if index.valid == 0:
        first = f" (line {index.samples[0].line}: {index.samples[0].message})" if index.samples else ""
        raise DemoUsageError(f"batch {batch} has no line that can be run{first}")
    return max(index.models, key=lambda name: index.models[name]) if index.models else MODEL
