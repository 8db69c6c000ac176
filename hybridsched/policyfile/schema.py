"""What a policy file may hold: every key with its unit, limits and default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from hybridsched.core.policy import Autonomy, PolicyKind, PoolPolicy, Rung

_Ms = Annotated[float, Field(gt=0, le=86_400_000)]
_MsOrZero = Annotated[float, Field(ge=0, le=86_400_000)]
_Share = Annotated[float, Field(gt=0, le=1)]


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class CycleTable(Table):
    interval_ms: _Ms = Field(
        default=250.0, description="ms: longest time between two cycles of the policy worker"
    )
    lease_ms: _Ms = Field(default=1000.0, description="ms: life of a published gate without renewal")


class IdleTable(Table):
    window_ms: _MsOrZero = Field(
        default=150.0, description="ms: online must show idle this long before a gate opens"
    )
    max_telemetry_age_ms: _Ms = Field(
        default=1500.0, description="ms: a worker's record older than this is stale"
    )
    max_metric_age_ms: _Ms = Field(default=2000.0, description="ms: engine metrics older than this are stale")
    frozen_after_ms: _Ms = Field(
        default=3000.0,
        description="ms: counters that stand still this long while requests are held are frozen",
    )
    metric_lag_ms: _MsOrZero = Field(
        default=100.0, description="ms: an engine's gauges lag by up to this (about one iteration)"
    )
    foreign_tolerance: int = Field(
        default=0, ge=0, description="requests: engine load beyond our own that is not yet called foreign"
    )
    queue_wait_ms: _MsOrZero = Field(
        default=50.0,
        description="ms: a queued online request that waits longer closes every lane of its model",
    )
    max_gpu_activity: _Share | None = Field(
        default=None,
        description="0..1: GPU activity allowed while none of our work runs; unset: not looked at",
    )


class PauseTable(Table):
    ladder: Annotated[tuple[Annotated[Rung, Field(strict=False)], ...], Field(strict=False)] = Field(
        default=(Rung.BOUNDARY, Rung.ITERATION), description="rungs that may be used: boundary, iteration"
    )
    grace_ms: _MsOrZero = Field(
        default=0.0, description="ms: after a close, work in flight may end by itself within this"
    )


class OfflineTable(Table):
    max_inflight: int = Field(default=64, ge=1, description="requests: offline sequences on one lane")
    slots_for_online: int = Field(
        default=32, ge=0, description="sequence slots of the engine that offline never fills"
    )
    kv_share: _Share = Field(
        default=0.85, description="0..1: share of the KV cache that offline may plan to fill"
    )
    slice_tokens: int = Field(
        default=512,
        ge=0,
        description="tokens: offline prompt tokens per engine iteration; 0 sends prompts whole",
    )
    chunk_target_ms: _Ms = Field(
        default=5000.0, description="ms: a chunk's boundary should come this long after its start"
    )
    chunk_first_lines: int = Field(
        default=32, ge=1, description="lines: a lane's first chunk, before it was measured"
    )
    chunk_first_tokens: int = Field(default=131_072, ge=1, description="tokens: the same")
    chunk_min_lines: int = Field(default=1, ge=1, description="lines: no chunk is smaller")
    chunk_max_lines: int = Field(default=256, ge=1, description="lines: no chunk is larger")
    chunks_ahead: int = Field(
        default=4, ge=1, description="chunks of a batch queued ahead of the workers, per lane"
    )


class OnlineTable(Table):
    max_inflight: int = Field(
        default=64, ge=1, description="requests: online requests one replica may hold at once"
    )
    default_timeout_ms: _Ms = Field(default=60_000.0, description="ms: deadline of a request that names none")


class SloTable(Table):
    ttft_ms: _Ms = Field(default=1000.0, description="ms: objective for the time to the first token")
    tpot_ms: _Ms = Field(default=50.0, description="ms: objective for the time per further token")


class EngineTable(Table):
    max_num_seqs: int = Field(
        default=256, ge=1, description="sequence slots of each engine, as started (--max-num-seqs)"
    )
    kv_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="tokens: KV cache of an engine that does not report its own; unset: offline waits",
    )


_SlurmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}$")]


class ReplicasTable(Table):
    model: str = Field(
        pattern=r"^[!-z|~]{1,120}$", description="model that they serve, as requests name it (no blanks)"
    )
    name: str = Field(
        default="",
        pattern=r"^[!-z|~]{0,120}$",
        description="tells several kinds of one model apart; empty: the model's name",
    )
    count: int = Field(default=1, ge=0, le=10_000, description="replicas that serve at once")
    surge: int = Field(default=1, ge=1, le=1000, description="replicas beyond count while successors warm up")
    gres: str = Field(
        default="gpu:1",
        pattern=r"^[A-Za-z][A-Za-z0-9_]*(:[A-Za-z0-9_.+-]+){0,2}$",
        description="GRES of each job, as --gres takes it: gpu:TYPE:COUNT",
    )
    time_limit_s: int = Field(
        default=86_400, ge=60, le=31_536_000, description="s: time limit of each job, rounded up to minutes"
    )
    script: str = Field(
        default="workers/online.sbatch", min_length=1, description="batch script that starts one replica"
    )
    arguments: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="arguments of the script"
    )
    warm_ms: _Ms = Field(
        default=120_000.0, description="ms: from submission until a replica serves, when a GPU is free"
    )


class SlurmTable(Table):
    enabled: bool = Field(default=False, description="whether the policy worker steers Slurm")
    partition_online: _SlurmName = Field(default="online", description="partition of online replicas")
    partition_offline: _SlurmName = Field(default="offline", description="partition of offline jobs")
    fill_gres: _SlurmName = Field(
        default="hsfill", description="GRES without device files: its live count is a node's open lanes"
    )
    requeue_after_ms: _Ms = Field(
        default=120_000.0, description="ms: an offline job whose lane stays closed this long is requeued"
    )
    fill_hysteresis_ms: _MsOrZero = Field(
        default=2000.0, description="ms: a count is lowered only after its lane was closed this long"
    )
    reassert_ms: _Ms = Field(
        default=5000.0, description="ms: the counts are compared with Slurm's at least this often"
    )
    observe_ms: _Ms = Field(default=2000.0, description="ms: between two looks at Slurm's jobs and nodes")
    max_age_ms: _Ms = Field(
        default=30_000.0,
        description="ms: waiting jobs count as a lane's work this long after Slurm was last seen",
    )
    notice_s: int = Field(
        default=60, ge=0, le=3600, description="s: notice that a replica's job gets before its time limit"
    )
    stop_ms: _Ms = Field(
        default=60_000.0, description="ms: a replica told to stop has this long, then its job is cancelled"
    )
    silent_ms: _Ms = Field(
        default=60_000.0, description="ms: a running replica that does not serve this long is replaced"
    )
    max_drained_nodes: int = Field(
        default=1, ge=0, description="nodes that stand drained for a lost GPU at once, at most"
    )
    replicas: Annotated[tuple[ReplicasTable, ...], Field(strict=False)] = Field(
        default=(), description="online replicas kept running as Slurm jobs, a table [[slurm.replicas]] each"
    )


class PolicyTable(Table):
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="name of the policy: letters, digits, dot, dash and underscore, at most 64",
    )
    kind: PolicyKind = Field(
        strict=False, description="decision function: idle-window, unprotected or online-only"
    )
    floor_gpus: int = Field(
        default=0, ge=0, description="GPUs (replicas) that offline may never take from online"
    )
    autonomy: Autonomy = Field(
        default=Autonomy.AUTO,
        strict=False,
        description="suggest, approve or auto: whether gates open by themselves",
    )
    cycle: CycleTable = Field(default=CycleTable(), description="the policy worker's cycle")
    idle: IdleTable = Field(default=IdleTable(), description="when a lane's engine counts as idle")
    pause: PauseTable = Field(default=PauseTable(), description="how a lane is paused")
    offline: OfflineTable = Field(
        default=OfflineTable(), description="what an open gate permits, and chunk sizes"
    )
    online: OnlineTable = Field(default=OnlineTable(), description="limits of online requests")
    slo: SloTable = Field(default=SloTable(), description="objectives that reports measure against")
    engine: EngineTable = Field(default=EngineTable(), description="what engines do not say of themselves")
    slurm: SlurmTable = Field(default=SlurmTable(), description="how the pool stands on Slurm")


@dataclass(frozen=True)
class Problem:
    """One mistake of a policy file."""

    key: str
    """Dotted path such as idle.window_ms; empty when the file as a whole is wrong."""
    message: str
    line: int | None = None

    def text(self, source: str) -> str:
        place = source if self.line is None else f"{source}:{self.line}"
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


def keys() -> dict[str, str]:
    """Every key a policy file may hold, dotted, with its meaning and unit."""
    out: dict[str, str] = {}
    for name, field in PolicyTable.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, Table):
            out |= {f"{name}.{key}": sub.description or "" for key, sub in table.model_fields.items()}
        else:
            out[name] = field.description or ""
    return out


def replica_keys() -> dict[str, str]:
    """The keys of one table [[slurm.replicas]], each dotted as in `keys`, with its meaning and unit."""
    fields = ReplicasTable.model_fields.items()
    return {f"slurm.replicas.{key}": field.description or "" for key, field in fields}


def to_policy(table: PolicyTable) -> PoolPolicy:
    """The checked table as the value that decisions use."""
    return msgspec.convert(table.model_dump(mode="json"), PoolPolicy)
