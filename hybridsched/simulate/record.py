"""From a pool of the twin to the record that the report is made of."""

from __future__ import annotations

from hybridsched.report.record import (
    BatchCheck,
    EngineCounts,
    EngineLog,
    OnlineRow,
    PassRecord,
    Pause,
    PauseCounts,
    PolicyStats,
)
from hybridsched.twin.meter import PER_MS
from hybridsched.twin.online import OnlineRequest
from hybridsched.twin.pool import Pool


def pass_record(pool: Pool, label: str) -> PassRecord:
    """What a run of the pool has come to. The twin's clock is the wall's here, from 0."""
    end_s = pool.end_s
    until_s = end_s if pool.work_end_s is None else min(pool.work_end_s, end_s)
    return PassRecord(
        start_s=0.0,
        end_s=end_s,
        online=tuple(_row(request, label) for request in pool.requests),
        engines=tuple(_engine(pool, number, until_s) for number in range(pool.spec.engines)),
        work_end_s=until_s,
        pauses=PauseCounts(
            pauses=tuple(
                Pause(
                    lane=one.lane,
                    at_s=one.at_s,
                    quiet_s=one.quiet_s,
                    iteration_s=one.iteration_s,
                    found_work=one.found_work,
                )
                for meter in pool.meters
                for one in meter.pauses
            ),
            by_rung=dict(pool.pauses.by_rung),
            ended=pool.pauses.ended,
            kept_tokens=pool.pauses.kept_tokens,
        ),
    )


def _row(request: OnlineRequest, label: str) -> OnlineRow:
    ok = request.status == "ok"
    return OnlineRow(
        index=request.index,
        id=f"{label}-{request.index}",
        scheduled_s=request.arrival_s,
        sent_s=request.arrival_s,
        first_s=request.first_s,
        last_s=request.last_s,
        end_s=request.end_s or 0.0,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.output_tokens,
        tokens=request.output_tokens if ok else 0,
        status=request.status,
        code="" if ok else request.status,
    )


def _engine(pool: Pool, number: int, until_s: float) -> EngineLog:
    meter, replica = pool.meters[number], pool.replicas[number]
    totals = replica.engine.totals
    online_until_s = meter.online_s if pool.work_end_s is None else pool.online_at_work_end[number]
    return EngineLog(
        replica=meter.lane,
        counts=EngineCounts(
            online_s=meter.online_s,
            idle_s=max(0.0, until_s - online_until_s - replica.away_s(until_s)),
            harvested_s=meter.harvested_s,
            mixed_s=meter.mixed_s,
            mixed_iterations=meter.mixed_iterations,
            prompt_tokens=totals.prefill_offline,
            output_tokens=totals.output_offline,
            lengths_online=_lengths(meter.lengths_online),
            lengths_offline=_lengths(meter.lengths_offline),
            bin_s=meter.width_s,
            online_bins=tuple(meter.online_bins),
            offline_bins=tuple(meter.offline_bins),
            mixed_bins=tuple(meter.mixed_bins),
            token_bins=tuple(meter.token_bins),
            gate_bins=tuple(meter.gate_bins),
            away_s=replica.away_s(pool.end_s),
        ),
    )


def _lengths(tenths: dict[int, int]) -> dict[float, int]:
    return {key / PER_MS: count for key, count in sorted(tenths.items())}


def batch_check(pool: Pool) -> BatchCheck:
    """The batch, counted line by line from what has become of each."""
    lines = pool.feed.lines
    done = [line for line in lines if line.results]
    unfinished = [line for line in lines if not line.results]
    held = pool.unfinished()
    kept = [line for line in unfinished if line.kept]
    return BatchCheck(
        lines=len(lines),
        completed=len(done),
        remaining=sum(1 for line in unfinished if line.number in held),
        missing=sum(1 for line in unfinished if line.number not in held),
        duplicates=sum(line.results - 1 for line in done),
        prompt_tokens=sum(line.prompt_tokens for line in done),
        output_tokens=sum(line.kept for line in done),
        wrong_length=sum(1 for line in done if line.kept != line.output_tokens),
        kept_prompt_tokens=sum(line.prompt_tokens for line in kept),
        kept_tokens=sum(line.kept for line in kept),
        worker_recomputed=sum(line.recomputed for line in lines),
    )


def policy_stats(pool: Pool) -> PolicyStats:
    """The policy worker's part. Its cycles take no time that could be measured."""
    policy = pool.spec.policy
    return PolicyStats(name=policy.name, version=policy.version, slo=policy.slo, cycles=pool.worker.cycles)
