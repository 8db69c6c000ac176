"""What the user asked of a demo, checked before anything starts."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from hybridsched.batches.files import BatchFileError
from hybridsched.batches.layout import open_input
from hybridsched.batches.scan import scan
from hybridsched.core.policy import Autonomy, PolicyKind, PoolPolicy
from hybridsched.core.values import Value
from hybridsched.demo.trace import (
    SHIPPED_LENGTHS,
    SHIPPED_TRACE,
    TraceError,
    TraceRow,
    cut,
    read_trace,
    shipped,
    write_batch,
)
from hybridsched.policyfile import PolicyError, load_policy

MODEL = "demo-8b"
LINES_PER_ENGINE_S = 4.0
"""Lines of the generated batch for each engine second of the trace. An engine that does nothing else and
takes 512 prompt tokens an iteration finishes about 3.8 a second: 2,582 prompt tokens are 5 iterations of
about 52 ms (profile a100-llama3-8b). So the work outlasts the trace however idle it is."""
LIVELY_START_S = 1140.0
"""Where the shipped trace is lively: the default start there, which says nothing about another trace."""
OURS = "demo.json"
"""File that says that a folder is a report of the demo."""


class DemoUsageError(Exception):
    """The options cannot be used; the message says which and what is allowed."""


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
    slurm: bool = False
    """On a private Slurm: engines as online jobs, the batch as offline jobs."""
    slurm_state: Path | None = None
    """The folder of its daemons; None: a temporary one."""

    @property
    def begin_s(self) -> float:
        """Second of the trace at which the slice begins."""
        if self.start_s is not None:
            return self.start_s
        return LIVELY_START_S if self.trace is None else 0.0


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
        rows = cut(read_trace(trace), options.begin_s, options.duration_s)
    except TraceError as error:
        raise DemoUsageError(str(error)) from None
    try:
        policy = load_policy(options.policy).policy
    except PolicyError as error:
        raise DemoUsageError(str(error)) from None
    if options.slurm:
        _check_opens(policy, options)
    model = MODEL if options.batch is None else _model_of(options.batch)
    folder = options.report.absolute()
    _prepare_folder(folder, ours=options.batch is None)
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
        rows=tuple(rows),
        policy=policy,
        model=model,
        batch=batch,
        generated=options.batch is None,
        # the simulated engines must take every request of the trace; vLLM wants room for one token more
        max_model_len=max(16_384, longest + 1),
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


_RESULTS = (
    *("summary.json", "report.html", "requests.csv", "decisions.jsonl", "events.jsonl"),
    *("batch.jsonl", "batch.output.jsonl", "batch.errors.jsonl"),
)
_FOLDERS = ("engines", "logs", "load", "valkey")


def _prepare_folder(folder: Path, *, ours: bool) -> None:
    """Make the folder, or clear an earlier report out of it. Nothing that is not the demo's is touched.

    Raises:
        DemoUsageError: something else is there, or the results of a batch of the user's own.
    """
    mark = folder / OURS
    try:
        if mark.exists():
            if not msgspec.json.decode(mark.read_bytes(), type=_Mark).generated:
                raise DemoUsageError(
                    f"report folder {folder} holds the results of your own batch; "
                    "choose another with --report, or remove it"
                )
            _clear(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DemoUsageError(
                f"report folder {folder} is not empty and no report of the demo; choose another with --report"
            )
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(msgspec.json.encode(_Mark(generated=ours)))
    except (OSError, msgspec.MsgspecError) as error:
        raise DemoUsageError(f"report folder {folder} cannot be used: {error}") from None


class _Mark(msgspec.Struct):
    generated: bool


def _clear(folder: Path) -> None:
    for name in _RESULTS:
        (folder / name).unlink(missing_ok=True)
    for part in (*_FOLDERS, *(path.name for path in folder.glob(".hybridsched-*"))):
        _remove_files(folder / part)


def _remove_files(folder: Path) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_files(path)
        else:
            path.unlink()
    folder.rmdir()
