"""Search for a policy's thresholds in the twin: as much offline work as online's latency leaves room for.

The search is CMA-ES (Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv:1604.00772), from the package
`cmaes`: it asks for points, learns from their order alone, and so bears the steps and the noise of
percentiles. Every point that was tried is kept: the trade-off is made of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import Value
from hybridsched.policyfile import check_policy
from hybridsched.policyfile.schema import Problem
from hybridsched.report.record import Ceiling, PassRecord
from hybridsched.report.summary import summarise
from hybridsched.simulate.knobs import Knob, turned, value_of
from hybridsched.simulate.options import SimulatePlan
from hybridsched.simulate.repeats import moved, spread_of
from hybridsched.simulate.run import alone_record, baseline_key, ceiling_of, run_record

SIGMA = 0.25
"""How far the first points lie from the given policy, in shares of the knobs' ranges."""

EXCESS_WEIGHT = 10.0
"""A tenth above an allowed cost weighs as much as the whole ceiling: kept objectives come first."""


CHECKS, CANDIDATES = 3, 5
"""The best policies found, so many of them, are run again with so many other draws: of dozens of policies one
is best by luck."""


class TuneError(Exception):
    """The search cannot be made; the message says why and what to do."""


class Bounds(Value, frozen=True, kw_only=True):
    """What online may pay."""

    ttft_ratio: float = 1.05
    """p99 with offline work over that of online alone, routed alike."""
    tpot_ratio: float = 1.02
    attainment: float = 0.99
    """Share of requests within the objectives; no more is asked for than online alone reaches."""


class Trial(Value, frozen=True, kw_only=True):
    """One policy that was tried. Of several runs the middle figures."""

    number: int
    """From 0, which is the policy as it was given."""
    values: dict[str, float]
    """By key."""
    policy: PoolPolicy
    ceiling_share: float
    harvested_ratio: float | None
    ttft_p99_ratio: float | None
    tpot_p99_ratio: float | None
    slo_attainment: float
    slo_attainment_alone: float
    offline_tokens_done: int
    excess: float
    """How far the costs lie above what is allowed, as shares of it, added up. 0: all are kept."""

    @property
    def kept(self) -> bool:
        return self.excess <= 0.0

    @property
    def cost(self) -> float:
        """The worse of the two latencies against online alone."""
        return max(self.ttft_p99_ratio or 1.0, self.tpot_p99_ratio or 1.0)


class Tuned(Value, frozen=True, kw_only=True):
    """What the search came to."""

    trials: tuple[Trial, ...]
    best: Trial | None
    """The most offline work of those that keep the bounds in the search and in the check. None: none does."""
    checks: tuple[Trial, ...]
    """The candidates in other draws, best first; the last one is the chosen one, if there is one."""
    ceiling: Ceiling
    knobs: tuple[Knob, ...]
    bounds: Bounds

    @property
    def front(self) -> tuple[Trial, ...]:
        """Those that no other one beats in both: more offline work at no more cost. By cost."""
        found: list[Trial] = []
        for one in sorted(self.trials, key=lambda trial: (trial.cost, -trial.ceiling_share)):
            if not found or one.ceiling_share > found[-1].ceiling_share:
                found.append(one)
        return tuple(found)


def tune(
    plan: SimulatePlan,
    knobs: Sequence[Knob],
    bounds: Bounds,
    *,
    trials: int,
    told: Callable[[int, Trial], None] = lambda done, best: None,
) -> Tuned:
    """Try `trials` policies around the plan's first one, and say which is best.

    `told` gets the number of trials made and the best so far. The same plan gives the same result.

    Raises:
        TuneError: the search's package is missing, or no policy in the knobs' ranges is allowed.
    """
    search = _search(plan, knobs, trials)
    judge = _Judge(plan, bounds)
    base = plan.policies[0]
    known: dict[PoolPolicy, Trial] = {}
    done: list[Trial] = []

    def tried(policy: PoolPolicy) -> Trial:
        trial = known.get(policy)
        if trial is None:
            values = {knob.key: value_of(policy, knob.key) for knob in knobs}
            trial = known[policy] = judge.of(policy, len(done), values)
            done.append(trial)
            told(len(done), min(done, key=loss))
        return trial

    tried(base)
    asked = 0
    refused: Problem | None = None
    # Points that round to the same policy cost nothing, and need not lead anywhere new.
    while len(done) < trials and asked < 20 * trials:
        found: list[tuple[Any, float]] = []
        for _ in range(search.population_size):
            point = search.ask()
            asked += 1
            policy = turned(base, knobs, [float(place) for place in point])
            if problems := check_policy(policy):
                refused = problems[0]
                found.append((point, 1e6))
            elif policy in known or len(done) < trials:
                found.append((point, loss(tried(policy))))
            else:
                break
        else:
            search.tell(found)
            if search.should_stop():
                break
            continue
        break
    if len(done) == 1 and refused is not None:
        raise TuneError(
            f"no other policy in these ranges is allowed ({refused.key}: {refused.message}); give --knob a "
            "range that is"
        )
    checks: list[Trial] = []
    for trial in sorted((one for one in done if one.kept), key=loss)[:CANDIDATES]:
        checks.append(judge.check(trial))
        if checks[-1].kept:
            break
    chosen = checks[-1].number if checks and checks[-1].kept else None
    return Tuned(
        trials=tuple(done),
        best=None if chosen is None else done[chosen],
        checks=tuple(checks),
        ceiling=judge.ceiling,
        knobs=tuple(knobs),
        bounds=bounds,
    )


def loss(trial: Trial) -> float:
    """What the search makes small."""
    return EXCESS_WEIGHT * trial.excess - trial.ceiling_share


def _search(plan: SimulatePlan, knobs: Sequence[Knob], trials: int) -> Any:
    try:
        import numpy
        from cmaes import CMA
    except ImportError:
        raise TuneError(
            "the search needs the package cmaes, which is not installed; install hybridsched with the extra "
            "tune: pip install 'hybridsched[tune]'"
        ) from None
    base = plan.policies[0]
    start = numpy.array([knob.place_of(value_of(base, knob.key)) for knob in knobs])
    # A point on the edge would have half of its neighbours outside.
    return CMA(
        mean=numpy.clip(start, 0.05, 0.95),
        sigma=SIGMA,
        bounds=numpy.array([[0.0, 1.0]] * len(knobs)),
        seed=plan.options.seed,
        population_size=max(4, min(8, trials // 3)),
    )


class _Judge:
    """Runs policies on the plan; what several of them have in common is run once."""

    def __init__(self, plan: SimulatePlan, bounds: Bounds) -> None:
        self._plans = [plan, *(moved(plan, number) for number in range(1, plan.options.repeat))]
        self._searched = len(self._plans)
        for number in range(1, CHECKS + 1):
            options = msgspec.structs.replace(plan.options, seed=plan.options.seed + 1000 + number)
            self._plans.append(moved(msgspec.structs.replace(plan, options=options), number))
        self._bounds = bounds
        self._alone: dict[tuple[int, PoolPolicy], PassRecord] = {}
        self.ceiling = ceiling_of(plan, plan.policies[0])

    def of(self, policy: PoolPolicy, number: int, values: dict[str, float]) -> Trial:
        """A policy on the plan."""
        return self._judged(policy, number, values, range(self._searched))

    def check(self, trial: Trial) -> Trial:
        """The same policy with other draws of what is random."""
        places = range(self._searched, len(self._plans))
        return self._judged(trial.policy, trial.number, trial.values, places)

    def _judged(
        self, policy: PoolPolicy, number: int, values: dict[str, float], places: Sequence[int]
    ) -> Trial:
        summaries = [self._run(place, policy) for place in places]
        figures = spread_of(summaries)

        def middle(name: str) -> float | None:
            return None if figures[name] is None else figures[name]["median"]

        ttft, tpot = middle("ttft_p99_ratio"), middle("tpot_p99_ratio")
        attained = middle("slo_attainment") or 0.0
        alone = sorted(one["online_only"]["slo_attainment"] for one in summaries)[len(summaries) // 2]
        wanted = min(self._bounds.attainment, alone)
        excess = (
            max(0.0, (ttft or 1.0) / self._bounds.ttft_ratio - 1.0)
            + max(0.0, (tpot or 1.0) / self._bounds.tpot_ratio - 1.0)
            + (max(0.0, 1.0 - attained / wanted) if wanted > 0 else 0.0)
        )
        return Trial(
            number=number,
            values=values,
            policy=policy,
            ceiling_share=middle("ceiling_share") or 0.0,
            harvested_ratio=middle("harvested_ratio"),
            ttft_p99_ratio=ttft,
            tpot_p99_ratio=tpot,
            slo_attainment=attained,
            slo_attainment_alone=alone,
            offline_tokens_done=int(middle("offline_tokens_done") or 0),
            excess=excess,
        )

    def _run(self, place: int, policy: PoolPolicy) -> dict[str, Any]:
        plan = self._plans[place]
        key = (place, baseline_key(policy))
        alone = self._alone.get(key)
        if alone is None:
            alone = self._alone[key] = alone_record(plan, policy)
        return summarise(run_record(plan, policy, ceiling=self.ceiling, baseline=alone))


def tuned_policy(tuned: Tuned, name: str) -> PoolPolicy:
    """The best policy under a name of its own.

    Raises:
        TuneError: none of the trials keeps the bounds.
    """
    if tuned.best is None:
        raise TuneError(nothing_kept(tuned))
    return msgspec.structs.replace(tuned.best.policy, name=name)


def nothing_kept(tuned: Tuned) -> str:
    """What came nearest, and what to do."""
    near = min(tuned.checks or tuned.trials, key=lambda trial: trial.excess)
    ttft, tpot = near.ttft_p99_ratio or 1.0, near.tpot_p99_ratio or 1.0
    return (
        f"none of {len(tuned.trials)} policies keeps the bounds{_in_checks(tuned)}; the nearest costs "
        f"×{ttft:.3f} of p99 TTFT and ×{tpot:.3f} of p99 TPOT, with {near.slo_attainment:.2%} of the "
        f"requests in their objectives ({near.slo_attainment_alone:.2%} with online alone): allow more "
        "(--max-ttft, --max-tpot, --slo), give more trials, or a longer slice, whose p99 moves less"
    )


def _in_checks(tuned: Tuned) -> str:
    """Some did in the search, and none of the best of them when it was run again."""
    if not tuned.checks:
        return ""
    return f" (the best {len(tuned.checks)} did in the search, and not in {CHECKS} other draws)"
