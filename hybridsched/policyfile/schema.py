"""What a policy file may hold: every key with its unit, limits and default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import msgspec
from pydantic import Field
from pydantic.fields import FieldInfo

from hybridsched.core.policy import Autonomy, PolicyKind, PoolPolicy, Rung
from hybridsched.policyfile import modes_schema
from hybridsched.policyfile.fields import Ms, MsOrZero, Share, Table, why
from hybridsched.policyfile.health_table import HealthTable
from hybridsched.policyfile.modes_schema import ModesTable
from hybridsched.policyfile.schema_pack import HeadroomTable, PackTable


class CycleTable(Table):
    interval_ms: float = Field(
        default=250.0,
        description="ms: longest time between two cycles of the policy worker",
        ge=10,
        le=10_000,
        json_schema_extra=why(
            "a cycle below 10 ms costs more than it finds, and after 10 s an idle stretch is over"
        ),
    )
    lease_ms: float = Field(
        default=1000.0,
        description="ms: life of a published gate without renewal",
        ge=20,
        le=60_000,
        json_schema_extra=why("when the policy worker dies, open gates stay open for this long"),
    )


class IdleTable(Table):
    window_ms: float = Field(
        default=150.0,
        description="ms: online must show idle this long before a gate opens",
        ge=1,
        le=3_600_000,
        json_schema_extra=why(
            "below 1 ms nothing was observed; kind unprotected is the one that does not look"
        ),
    )
    max_telemetry_age_ms: float = Field(
        default=1500.0,
        description="ms: a worker's record older than this is stale",
        ge=100,
        le=60_000,
        json_schema_extra=why("workers publish every 200 ms, and what is a minute old says nothing of now"),
    )
    max_metric_age_ms: float = Field(
        default=2000.0,
        description="ms: engine metrics older than this are stale",
        ge=100,
        le=60_000,
        json_schema_extra=why("engines are read every 150 ms, and what is a minute old says nothing of now"),
    )
    frozen_after_ms: float = Field(
        default=3000.0,
        description="ms: counters that stand still this long while requests are held are frozen",
        ge=100,
        le=600_000,
        json_schema_extra=why(
            "below 100 ms one long iteration looks frozen; after 10 min nobody waits for an engine"
        ),
    )
    metric_lag_ms: float = Field(
        default=100.0,
        description="ms: an engine's gauges lag by up to this (about one iteration)",
        ge=0,
        le=60_000,
        json_schema_extra=why("no iteration takes a minute"),
    )
    foreign_tolerance: int = Field(
        default=0,
        description="requests: engine load beyond our own that is not yet called foreign",
        ge=0,
        le=65_536,
        json_schema_extra=why("no engine has more sequence slots"),
    )
    queue_wait_ms: float = Field(
        default=50.0,
        description="ms: a queued online request that waits longer closes every lane of its model",
        ge=0,
        le=600_000,
        json_schema_extra=why("a request that has waited 10 min is overdue whatever closes"),
    )
    max_gpu_activity: Share | None = Field(
        default=None,
        description="0..1: GPU activity allowed while none of our work runs; unset: not looked at",
    )


class PauseTable(Table):
    ladder: Annotated[tuple[Annotated[Rung, Field(strict=False)], ...], Field(strict=False)] = Field(
        default=(Rung.BOUNDARY, Rung.ITERATION),
        description="rungs that may be used: boundary, iteration, sleep",
    )
    grace_ms: float = Field(
        default=0.0,
        description="ms: after a close, work in flight may end by itself within this",
        ge=0,
        le=600_000,
        json_schema_extra=why("online shares its engine with offline work for this long"),
    )
    keep_ms: float = Field(
        default=20_000.0,
        description="ms: an engine of the lane's own holds its requests for this long while it is paused",
        ge=0,
        le=25_000,
        json_schema_extra=why("after 30 s closed a lane's chunks go to others, with their tokens"),
    )
    sleep_after_ms: Ms = Field(
        default=60_000.0, description="ms: a lane that is closed this long has its own engine sleep"
    )


class OfflineTable(Table):
    max_inflight: int = Field(
        default=64,
        description="requests: offline sequences on one lane",
        ge=1,
        le=65_536,
        json_schema_extra=why("no engine has more sequence slots"),
    )
    slots_for_online: int = Field(
        default=32,
        description="sequence slots of the engine that offline never fills",
        ge=0,
        le=65_536,
        json_schema_extra=why("no engine has more sequence slots"),
    )
    kv_share: Share = Field(
        default=0.85, description="0..1: share of the KV cache that offline may plan to fill"
    )
    slice_tokens: int = Field(
        default=512,
        description="tokens: offline prompt tokens per engine iteration; 0 sends prompts whole",
        ge=0,
        le=1_000_000,
        json_schema_extra=why("no engine takes more in one iteration"),
    )
    chunk_target_ms: float = Field(
        default=5000.0,
        description="ms: a chunk's boundary should come this long after its start",
        ge=1,
        le=3_600_000,
        json_schema_extra=why("what a chunk has not acknowledged is looked at again after a crash"),
    )
    chunk_first_lines: int = Field(
        default=32,
        description="lines: a lane's first chunk, before it was measured",
        ge=1,
        le=1_000_000,
        json_schema_extra=why("a worker holds the lines of its chunk in memory"),
    )
    chunk_first_tokens: int = Field(
        default=131_072,
        description="tokens: the same",
        ge=1,
        le=1_000_000_000,
        json_schema_extra=why("a worker holds the lines of its chunk in memory"),
    )
    chunk_min_lines: int = Field(
        default=1,
        description="lines: no chunk is smaller",
        ge=1,
        le=1_000_000,
        json_schema_extra=why("a worker holds the lines of its chunk in memory"),
    )
    chunk_max_lines: int = Field(
        default=256,
        description="lines: no chunk is larger",
        ge=1,
        le=1_000_000,
        json_schema_extra=why("a worker holds the lines of its chunk in memory"),
    )
    chunks_ahead: int = Field(
        default=4,
        description="chunks of a batch queued ahead of the workers, per lane",
        ge=1,
        le=1_000,
        json_schema_extra=why("each stands in Redis as a job"),
    )


class OnlineTable(Table):
    max_inflight: int = Field(
        default=64,
        description="requests: online requests one replica may hold at once",
        ge=1,
        le=65_536,
        json_schema_extra=why("no engine has more sequence slots"),
    )
    default_timeout_ms: Ms = Field(default=60_000.0, description="ms: deadline of a request that names none")


class SloTable(Table):
    ttft_ms: Ms = Field(default=1000.0, description="ms: objective for the time to the first token")
    tpot_ms: Ms = Field(default=50.0, description="ms: objective for the time per further token")


class EngineTable(Table):
    max_num_seqs: int = Field(
        default=256,
        description="sequence slots of each engine, as started (--max-num-seqs)",
        ge=1,
        le=65_536,
        json_schema_extra=why("no engine has more sequence slots"),
    )
    kv_tokens: Annotated[int, Field(ge=1, le=10_000_000_000)] | None = Field(
        default=None,
        json_schema_extra=why("no node has the memory for more"),
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
    warm_ms: Ms = Field(
        default=120_000.0, description="ms: from submission until a replica serves, when a GPU is free"
    )


class SlurmTable(Table):
    enabled: bool = Field(default=False, description="whether the policy worker steers Slurm")
    partition_online: _SlurmName = Field(default="online", description="partition of online replicas")
    partition_offline: _SlurmName = Field(default="offline", description="partition of offline jobs")
    fill_gres: _SlurmName = Field(
        default="hsfill", description="GRES, not consumed: its live count is a node's free open lanes"
    )
    place_gres: _SlurmName = Field(
        default="hslane",
        description="GRES that each job takes one of: a place on its node, never changed live",
    )
    parked_node: _SlurmName = Field(
        default="hspark", description="node that is no machine and keeps waiting jobs valid"
    )
    requeue_after_ms: Ms = Field(
        default=120_000.0, description="ms: an offline job whose lane stays closed this long is requeued"
    )
    wrong_node_ms: Ms = Field(
        default=10_000.0,
        description="ms: an offline job is requeued from a node without its model after this long",
    )
    fill_hysteresis_ms: MsOrZero = Field(
        default=2000.0, description="ms: a count is lowered only after its lane was closed this long"
    )
    reassert_ms: Ms = Field(
        default=5000.0, description="ms: the counts are compared with Slurm's at least this often"
    )
    observe_ms: Ms = Field(default=2000.0, description="ms: between two looks at Slurm's jobs and nodes")
    max_age_ms: Ms = Field(
        default=30_000.0,
        description="ms: waiting jobs count as a lane's work this long after Slurm was last seen",
    )
    notice_s: int = Field(
        default=60, ge=0, le=3600, description="s: notice that a replica's job gets before its time limit"
    )
    stop_ms: Ms = Field(
        default=60_000.0, description="ms: a replica told to stop has this long, then its job is cancelled"
    )
    silent_ms: Ms = Field(
        default=60_000.0, description="ms: a running replica that does not serve this long is replaced"
    )
    max_drained_nodes: int = Field(
        default=1,
        description="nodes that stand drained for a lost GPU at once, at most",
        ge=0,
        le=10_000,
        json_schema_extra=why("a faulty probe must not take the cluster"),
    )
    replicas: Annotated[tuple[ReplicasTable, ...], Field(strict=False)] = Field(
        default=(), description="online replicas kept running as Slurm jobs, a table [[slurm.replicas]] each"
    )


class PolicyTable(Table):
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="name of the policy: letters, digits, dot, dash and underscore, at most 64",
    )
    kind: PolicyKind = Field(strict=False, description=f"decision function: {', '.join(PolicyKind)}")
    floor_gpus: int = Field(
        default=0,
        description="GPUs (replicas) that offline may never take from online",
        ge=0,
        le=1_000_000,
        json_schema_extra=why("no pool has more"),
    )
    autonomy: Autonomy = Field(
        default=Autonomy.AUTO,
        strict=False,
        description="suggest, approve or auto: whether gates open by themselves",
    )
    modes: ModesTable | None = Field(
        default=None, description="how GPUs are cut and when, a table [modes]; see docs/modes.md"
    )
    cycle: CycleTable = Field(default=CycleTable(), description="the policy worker's cycle")
    idle: IdleTable = Field(default=IdleTable(), description="when a lane's engine counts as idle")
    pause: PauseTable = Field(default=PauseTable(), description="how a lane is paused")
    offline: OfflineTable = Field(
        default=OfflineTable(), description="what an open gate permits, and chunk sizes"
    )
    online: OnlineTable = Field(default=OnlineTable(), description="limits of online requests")
    slo: SloTable = Field(default=SloTable(), description="objectives that reports measure against")
    pack: PackTable = Field(default=PackTable(), description="online packed onto the fewest replicas")
    headroom: HeadroomTable = Field(
        default=HeadroomTable(), description="offline beside online, for kind headroom"
    )
    engine: EngineTable = Field(default=EngineTable(), description="what engines do not say of themselves")
    health: HealthTable = Field(
        default=HealthTable(), description="when an engine that answers its health check is taken out"
    )
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


def _fields() -> dict[str, FieldInfo]:
    """The field of every dotted key, those of a replica's table as `slurm.replicas.KEY`."""
    out: dict[str, FieldInfo] = {}
    for name, field in PolicyTable.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, Table):
            out |= {f"{name}.{key}": sub for key, sub in table.model_fields.items()}
        else:
            out[name] = field
    return out | {f"slurm.replicas.{key}": sub for key, sub in ReplicasTable.model_fields.items()}


def reasons() -> dict[str, str]:
    """Why the values of a key are bounded as they are, for the keys whose meaning does not say it."""
    out: dict[str, str] = {}
    for key, field in _fields().items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and "why" in extra:
            out[key] = str(extra["why"])
    return out


def limits() -> dict[str, tuple[float, float]]:
    """The least and the greatest value of the keys that `reasons` has."""
    out: dict[str, tuple[float, float]] = {}
    for key in reasons():
        least, most = 1.0, math.inf
        for rule in _rules(_fields()[key]):
            least = float(getattr(rule, "ge", least))
            most = float(getattr(rule, "le", most))
        out[key] = least, most
    return out


def _rules(field: FieldInfo) -> list[Any]:
    """What bounds a field's values; for an optional number the bounds stand inside its type."""
    inner = [rule for part in get_args(field.annotation) for rule in getattr(part, "__metadata__", ())]
    return [*field.metadata, *(rule for info in inner for rule in getattr(info, "metadata", ()))]


def nested_keys() -> dict[str, str]:
    """The keys of tables in lists of tables, each dotted without the tables' numbers."""
    return replica_keys() | modes_schema.mode_keys()


def replica_keys() -> dict[str, str]:
    """The keys of one table [[slurm.replicas]], each dotted as in `keys`, with its meaning and unit."""
    fields = ReplicasTable.model_fields.items()
    return {f"slurm.replicas.{key}": field.description or "" for key, field in fields}


def to_policy(table: PolicyTable) -> PoolPolicy:
    """The checked table as the value that decisions use."""
    values = table.model_dump(mode="json")
    if table.modes is not None:
        values["modes"] = modes_schema.to_builtins(table.modes)
    return msgspec.convert(values, PoolPolicy)
