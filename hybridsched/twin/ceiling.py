"""What offline work could come to at most beside an online load: a bound, not a plan.

    ceiling = tokens a second of offline alone x (engine seconds - engine seconds that online needs)

*Offline alone* is one engine that runs nothing but the batch, at its best: prompts whole, every sequence slot
and all of the KV cache. *What online needs* is the least that its tokens cost when they are packed as densely
as the objective for time per output token allows, all engines taken together and nobody ever waiting for
anybody: every prompt in full iterations, every output token in an iteration with as many others as fit into
the objective. No schedule serves online with less (arrivals, gaps and whole engines are ignored, each of
which only costs more), so none leaves more to offline work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.engines.simulated.perf import Profile
from hybridsched.engines.simulated.scheduler import Limits
from hybridsched.traces import TraceRow
from hybridsched.twin.clock import Loop
from hybridsched.twin.lengths import Length
from hybridsched.twin.pool import Pool, PoolSpec

WARM_S, MEASURED_S = 60.0, 240.0
"""An engine that runs the batch alone is measured over this time, after it has filled up."""


def online_needs_s(rows: Iterable[TraceRow], profile: Profile, limits: Limits, *, tpot_ms: float) -> float:
    """Engine seconds that the requests take at least, with `tpot_ms` of time per output token allowed.

    An iteration full of prompt tokens shares the weights' read among them; the attention of a prompt of p
    tokens costs p squared. A decode iteration shares its constant part among as many sequences as the
    objective, the engine's slots and its KV cache allow; where not even one token a time keeps the
    objective, one it is.
    """
    prompts = squares = outputs = contexts = requests = 0
    for row in rows:
        requests += 1
        prompts += row.prompt_tokens
        squares += row.prompt_tokens * row.prompt_tokens
        # The first output token comes with the prompt.
        decodes = row.output_tokens - 1
        outputs += decodes
        contexts += decodes * row.prompt_tokens + decodes * (decodes + 1) // 2
    if not requests:
        return 0.0
    full = limits.max_num_batched_tokens
    prefill_ms = prompts * profile.iteration_ms(
        prefill_tokens=full, batch_decode=0, total_context=0, prefill_pairs=0
    ) / full + (squares * profile.e)
    if not outputs:
        return prefill_ms / 1e3
    context = contexts / outputs
    batch = _densest(profile, limits, context, tpot_ms)
    each_ms = profile.iteration_ms(prefill_tokens=0, batch_decode=batch, total_context=0) / batch
    return (prefill_ms + outputs * each_ms + contexts * profile.d) / 1e3


def _densest(profile: Profile, limits: Limits, context: float, tpot_ms: float) -> int:
    """Sequences of that mean length that decode together within the objective; at least 1."""
    most = max(1, min(limits.max_num_seqs, int(limits.kv_tokens / max(1.0, context))))
    batch = 1
    while batch < most:
        ms = profile.iteration_ms(
            prefill_tokens=0, batch_decode=batch + 1, total_context=int((batch + 1) * context)
        )
        if ms > tpot_ms:
            break
        batch += 1
    return batch


def offline_alone(spec: PoolSpec, batch: Sequence[Length]) -> tuple[float, float]:
    """Prompt and output tokens a second of one engine with nothing but the batch: at its best, and as the
    policy runs it (its slices, its budgets). A short batch goes on from its beginning."""
    policy, limits = spec.policy, spec.limits
    own = msgspec.structs.replace(policy, kind=PolicyKind.UNPROTECTED, floor_gpus=0)
    free = msgspec.structs.replace(
        own,
        offline=msgspec.structs.replace(
            policy.offline,
            max_inflight=limits.max_num_seqs,
            slots_for_online=0,
            kv_share=1.0,
            slice_tokens=0,
        ),
        engine=msgspec.structs.replace(policy.engine, max_num_seqs=limits.max_num_seqs),
    )
    by_policy = _rate(spec, own, batch)
    return max(by_policy, _rate(spec, free, batch)), by_policy


def _rate(spec: PoolSpec, policy: PoolPolicy, batch: Sequence[Length]) -> float:
    longest_s = WARM_S + MEASURED_S
    # No engine computes more tokens than full iterations without attention would.
    most = longest_s * 1e3 * spec.limits.max_num_batched_tokens / spec.profile.a
    lines: list[Length] = []
    tokens = 0.0
    while batch and tokens < most and len(lines) < 100_000:
        lines.extend(batch)
        tokens += sum(one.prompt_tokens + one.output_tokens for one in batch)
    loop = Loop()
    alone = msgspec.structs.replace(
        spec, engines=1, policy=policy, offline=True, absences=(), slurm=None, baseline=None
    )
    pool = Pool(loop, alone, (), lines)
    pool.start()
    loop.run(WARM_S)
    before = _done(pool)
    loop.run(longest_s)
    return (_done(pool) - before) / MEASURED_S


def _done(pool: Pool) -> int:
    engine = pool.replicas[0].engine
    engine.settle(pool.now_s)
    totals = engine.totals
    return totals.prefill_offline + totals.output_offline - totals.recomputed
