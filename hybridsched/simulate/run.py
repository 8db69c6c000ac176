"""Run the twin as a plan says, and write the report: the summary, the page, the requests, for each policy."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.core.codec import DecisionRecord, encode
from hybridsched.core.policy import (
    CyclePolicy,
    HeadroomPolicy,
    IdlePolicy,
    OfflinePolicy,
    PausePolicy,
    PoolPolicy,
)
from hybridsched.demo.errors import DemoUsageError
from hybridsched.demo.report_folder import held, prepare
from hybridsched.report.record import Ceiling, PassRecord, RunRecord
from hybridsched.report.summary import summarise
from hybridsched.report.write import write_report
from hybridsched.simulate.compare_page import write_comparison
from hybridsched.simulate.models import ModelPlan, total
from hybridsched.simulate.options import SimulatePlan, SimulateUsageError, baseline_of
from hybridsched.simulate.record import batch_check, pass_record, policy_stats
from hybridsched.simulate.repeats import moved, spread_of
from hybridsched.twin.baselines import BaselineKind
from hybridsched.twin.ceiling import offline_alone, online_needs_s
from hybridsched.twin.clock import Loop
from hybridsched.twin.lengths import Length
from hybridsched.twin.pool import Pool, PoolSpec

BINS = 600
"""Parts of the run that the figures show."""

Progress = Callable[[str, float], None]
"""Told of (what is being run, share of it from 0 to 1)."""


def simulate(
    plan: SimulatePlan,
    report: Path | None,
    *,
    decisions: bool = False,
    progress: Progress = lambda what, share: None,
) -> list[dict[str, Any]]:
    """Run every policy of the plan; returns their summaries in that order.

    With `report` the files go there; with several policies into a folder for each, beside the page of all of
    them. `decisions` adds the decision log.

    Raises:
        SimulateUsageError: the report folder cannot be used.
    """
    if report is None:
        return [_one(plan, policy, None, decisions, progress) for policy in plan.policies]
    folder = report.absolute()
    try:
        with held(folder):
            prepare(folder, generated=True)
            if len(plan.policies) == 1:
                return [_one(plan, plan.policies[0], folder, decisions, progress)]
            summaries = []
            for policy in plan.policies:
                part = folder / policy.name
                part.mkdir(exist_ok=True)
                summaries.append(_one(plan, policy, part, decisions, progress))
            write_comparison(summaries, folder)
            return summaries
    except DemoUsageError as error:
        raise SimulateUsageError(str(error)) from None


def simulate_models(
    parts: Sequence[ModelPlan],
    report: Path | None,
    *,
    decisions: bool = False,
    progress: Progress = lambda what, share: None,
) -> list[dict[str, Any]]:
    """Run each model with its first policy; returns their summaries in that order.

    With `report` each has a folder there, and `total.json` holds the sums. Models share no engine, so none
    of them touches another. Raises as `simulate`.
    """

    def one(part: ModelPlan, folder: Path | None) -> dict[str, Any]:
        def told(what: str, share: float) -> None:
            progress(f"{part.name}: {what}", share)

        return _one(part.plan, part.plan.policies[0], folder, decisions, told)

    if report is None:
        return [one(part, None) for part in parts]
    folder = report.absolute()
    try:
        with held(folder):
            prepare(folder, generated=True)
            summaries = []
            for part in parts:
                (folder / part.name).mkdir(exist_ok=True)
                summaries.append(one(part, folder / part.name))
            (folder / "total.json").write_bytes(
                msgspec.json.format(msgspec.json.encode(total(summaries)), indent=2) + b"\n"
            )
            return summaries
    except DemoUsageError as error:
        raise SimulateUsageError(str(error)) from None


def _one(
    plan: SimulatePlan, policy: PoolPolicy, folder: Path | None, decisions: bool, progress: Progress
) -> dict[str, Any]:
    began = time.monotonic()
    # Objects by the million and none of them in cycles: walking them for garbage would take most of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _decision_log(folder if decisions else None) as log:
            record = run_record(plan, policy, log=log, progress=progress)
        extra: dict[str, Any] = {}
        if plan.options.repeat > 1:
            others = [
                summarise(run_record(moved(plan, number), policy, ceiling=record.ceiling, progress=progress))
                for number in range(1, plan.options.repeat)
            ]
            extra["repeats"] = spread_of([summarise(record), *others])
        record = msgspec.structs.replace(record, wall_s=time.monotonic() - began)
        return summarise(record) | extra if folder is None else write_report(record, folder, extra)
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _decision_log(folder: Path | None) -> Iterator[Callable[[DecisionRecord], None] | None]:
    """Writes decisions into the folder, one line for each change of a gate; None: nobody wants them."""
    if folder is None:
        yield None
        return
    with (folder / "decisions.jsonl").open("wb") as file:

        def write(record: DecisionRecord) -> None:
            file.write(encode(record) + b"\n")

        yield write


def spec_of(plan: SimulatePlan, policy: PoolPolicy, *, offline: bool = True) -> PoolSpec:
    """The pool that a plan asks for, under one policy."""
    options = plan.options
    return PoolSpec(
        engines=options.gpus,
        policy=policy,
        limits=plan.limits,
        profile=plan.profile,
        latencies=options.latencies,
        offline=offline,
        absences=options.absences,
        slurm=options.slurm,
        baseline=plan.baselines.get(policy.name) if offline else None,
        bin_s=max(0.05, options.duration_s / BINS),
    )


def run_record(
    plan: SimulatePlan,
    policy: PoolPolicy,
    *,
    ceiling: Ceiling | None = None,
    baseline: PassRecord | None = None,
    log: Callable[[DecisionRecord], None] | None = None,
    progress: Progress = lambda what, share: None,
) -> RunRecord:
    """One policy: online alone, online with the batch, and the ceiling of both.

    `ceiling` and `baseline` are worked out unless they are given, the latter only if the plan asks for it.
    """
    options = plan.options
    spec = spec_of(plan, policy)
    if options.baseline and baseline is None:
        baseline = alone_record(plan, policy, progress=progress)
    pool = _run(plan, spec, plan.batch, f"with offline work ({policy.name})", progress, log=log)
    if ceiling is None:
        progress("ceiling", 0.0)
        ceiling = ceiling_of(plan, policy)
        progress("ceiling", 1.0)
    return RunRecord(
        speed=1.0,
        gpus=options.gpus,
        duration_s=options.duration_s,
        trace=plan.trace,
        policy=policy_stats(pool),
        batch=batch_check(pool),
        together=pass_record(pool, "together"),
        baseline=baseline,
        simulated=True,
        ceiling=ceiling,
    )


def alone_record(
    plan: SimulatePlan, policy: PoolPolicy, *, progress: Progress = lambda what, share: None
) -> PassRecord:
    """The trace with no offline work, routed as the policy routes it."""
    alone = spec_of(plan, baseline_of(policy), offline=False)
    return pass_record(_run(plan, alone, (), "online alone", progress), "baseline")


def baseline_key(policy: PoolPolicy) -> PoolPolicy:
    """Policies of equal keys have the same run of online alone: offline's own settings do not touch it."""
    key = msgspec.structs.replace(
        baseline_of(policy),
        version=0,
        pause=PausePolicy(),
        offline=OfflinePolicy(),
        headroom=HeadroomPolicy(),
        floor_gpus=0,
    )
    if policy.pack.enabled:
        return key  # when the order of replicas is decided depends on the cycles
    return msgspec.structs.replace(key, cycle=CyclePolicy(), idle=IdlePolicy())


def ceiling_of(plan: SimulatePlan, policy: PoolPolicy) -> Ceiling:
    """The bound on what any scheduler could do with the plan's load and batch."""
    spec = spec_of(plan, policy)
    best, by_policy = offline_alone(spec, plan.batch)
    return Ceiling(
        alone_tokens_per_s=best,
        policy_tokens_per_s=by_policy,
        online_needs_s=online_needs_s(plan.rows, plan.profile, plan.limits, tpot_ms=policy.slo.tpot_ms),
    )


def _run(
    plan: SimulatePlan,
    spec: PoolSpec,
    batch: tuple[Length, ...],
    what: str,
    progress: Progress,
    *,
    log: Callable[[DecisionRecord], None] | None = None,
) -> Pool:
    duration_s = plan.options.duration_s
    no_online = spec.baseline is not None and spec.baseline.kind is BaselineKind.OFFLINE_ALONE
    rows = () if no_online else plan.rows
    pool = Pool(Loop(seed=plan.options.seed), spec, rows, batch, log=log)
    pool.run(duration_s, progress=lambda now_s: progress(what, min(1.0, now_s / duration_s)))
    return pool
