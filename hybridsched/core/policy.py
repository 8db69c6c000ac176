"""The policy of a pool as values. `hybridsched.policyfile` reads and checks the TOML form."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.values import Value


class PolicyKind(StrEnum):
    """Which decision function a policy uses."""

    IDLE_WINDOW = "idle-window"
    UNPROTECTED = "unprotected"
    ONLINE_ONLY = "online-only"


class Rung(StrEnum):
    """The rungs of the pause ladder that exist so far, cheapest first."""

    BOUNDARY = "boundary"
    ITERATION = "iteration"


class Autonomy(StrEnum):
    SUGGEST = "suggest"
    APPROVE = "approve"
    AUTO = "auto"


class CyclePolicy(Value, frozen=True, kw_only=True):
    interval_ms: float = 250.0
    """Longest time between two cycles; events bring one forward."""
    lease_ms: float = 1000.0
    """Life of a published gate without renewal."""


class IdlePolicy(Value, frozen=True, kw_only=True):
    window_ms: float = 150.0
    """Span over which every online signal must show idle before a gate opens."""
    max_telemetry_age_ms: float = 1500.0
    """A replica's record older than this is stale."""
    max_metric_age_ms: float = 2000.0
    """Engine metrics older than this are stale."""
    frozen_after_ms: float = 3000.0
    """Counters that stand still this long while requests are held count as frozen."""
    metric_lag_ms: float = 100.0
    """An engine's gauges speak of its last finished iteration: they lag by up to this."""
    foreign_tolerance: int = 0
    """Requests in the engine beyond all of our own that are not yet called foreign load."""
    queue_wait_ms: float = 50.0
    """A queued online request that has waited less is being pulled now, and closes its puller's gate only."""
    max_gpu_activity: float | None = None
    """Share of time, 0..1, that the GPU may be active with none of our work on it; None: not looked at."""


class PausePolicy(Value, frozen=True, kw_only=True):
    ladder: tuple[Rung, ...] = (Rung.BOUNDARY, Rung.ITERATION)
    grace_ms: float = 0.0
    """After a close, work in flight may end within this; then the iteration rung ends it."""


class OfflinePolicy(Value, frozen=True, kw_only=True):
    max_inflight: int = 64
    """Offline sequences on one lane."""
    slots_for_online: int = 32
    """Sequence slots of the engine that offline never fills."""
    kv_share: float = 0.85
    """Share of the engine's KV cache that offline may plan to fill."""
    slice_tokens: int = 512
    """Offline prompt tokens per engine iteration; 0 sends prompts whole."""
    chunk_target_ms: float = 5000.0
    """A chunk is sized so that its boundary comes about this long after it starts."""
    chunk_first_lines: int = 32
    """Lines of a lane's first chunk, before its throughput has been measured."""
    chunk_first_tokens: int = 131_072
    """Tokens of a lane's first chunk, for the same reason."""
    chunk_min_lines: int = 1
    chunk_max_lines: int = 256
    chunks_ahead: int = 4
    """Chunks of a batch that stand in the queue ahead of the workers, per lane at the pool."""


class EnginePolicy(Value, frozen=True, kw_only=True):
    """What the engines do not say of themselves, or may not."""

    max_num_seqs: int = 256
    """Sequence slots of each engine, as it was started (`--max-num-seqs`); vLLM does not report it."""
    kv_tokens: int | None = None
    """KV cache capacity in tokens of an engine that does not report its own; None: then offline waits."""


class OnlinePolicy(Value, frozen=True, kw_only=True):
    max_inflight: int = 64
    """Online requests one replica may hold at once."""
    default_timeout_ms: float = 60_000.0


class SloPolicy(Value, frozen=True, kw_only=True):
    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0


class ReplicasPolicy(Value, frozen=True, kw_only=True):
    """Online replicas of one kind that the policy worker keeps running as Slurm jobs."""

    model: str
    name: str = ""
    """Tells several kinds of one model apart; empty: the model's name."""
    count: int = 1
    """Replicas that serve at once."""
    surge: int = 1
    """Replicas beyond `count` for a while: successors that warm up before others reach their time limit."""
    gres: str = "gpu:1"
    """Asked for on the job's node, as `--gres` takes it."""
    time_limit_s: int = 86_400
    """Time limit of each job; Slurm counts in whole minutes, so it is rounded up to one."""
    script: str = "workers/online.sbatch"
    """Batch script that starts the engine and the online worker."""
    arguments: tuple[str, ...] = ()
    """Given to the script."""
    warm_ms: float = 120_000.0
    """From a job's submission until its replica serves, when a GPU is free: successors start this early."""

    @property
    def group(self) -> str:
        return self.name or self.model


class SlurmPolicy(Value, frozen=True, kw_only=True):
    """How the pool stands on Slurm. Durations are those of the wall clock, at any speed of the engines."""

    enabled: bool = False
    partition_online: str = "online"
    partition_offline: str = "offline"
    fill_gres: str = "hsfill"
    """The GRES without device files whose live count on a node is the number of its open lanes."""
    requeue_after_ms: float = 120_000.0
    """The last rung: a job whose lanes have been closed without a break for this long is requeued."""
    fill_hysteresis_ms: float = 2000.0
    """A node's count is lowered only after its lanes have been closed for this long: bursts are shorter."""
    reassert_ms: float = 5000.0
    """The counts are compared with Slurm's at least this often: `scontrol reconfigure` resets them."""
    observe_ms: float = 2000.0
    """Between two looks at Slurm's jobs and nodes."""
    max_age_ms: float = 30_000.0
    """Jobs that wait count as a lane's work for this long after Slurm was last seen."""
    notice_s: int = 60
    """Notice that a replica's job gets before its time limit (`--signal=B:USR2@`)."""
    stop_ms: float = 60_000.0
    """What a replica that is told to stop may take to finish its requests; then its job is cancelled."""
    silent_ms: float = 60_000.0
    """A running replica that has not served for this long is replaced."""
    max_drained_nodes: int = 1
    """Nodes that may stand drained by us for a lost GPU at once: a faulty probe must not take the cluster."""
    replicas: tuple[ReplicasPolicy, ...] = ()


class PoolPolicy(Value, frozen=True, kw_only=True):
    """A whole policy. Durations are milliseconds of the pool's clock."""

    name: str
    kind: PolicyKind
    version: int = 0
    """Given by the store when the policy is published; 0 before that."""
    cycle: CyclePolicy = CyclePolicy()
    idle: IdlePolicy = IdlePolicy()
    pause: PausePolicy = PausePolicy()
    offline: OfflinePolicy = OfflinePolicy()
    online: OnlinePolicy = OnlinePolicy()
    slo: SloPolicy = SloPolicy()
    engine: EnginePolicy = EnginePolicy()
    slurm: SlurmPolicy = SlurmPolicy()
    floor_gpus: int = 0
    autonomy: Autonomy = Autonomy.AUTO

    def at_speed(self, speed: float) -> PoolPolicy:
        """The same policy for engines whose clock runs `speed` times faster than the wall clock.

        Spans that are compared with the load shrink with it. Leases, cycle and metric ages belong to the
        control plane, and Slurm's to Slurm; neither is faster, and they stay.
        """
        return msgspec.structs.replace(
            self,
            idle=msgspec.structs.replace(
                self.idle,
                window_ms=self.idle.window_ms / speed,
                metric_lag_ms=self.idle.metric_lag_ms / speed,
            ),
            pause=msgspec.structs.replace(self.pause, grace_ms=self.pause.grace_ms / speed),
            offline=msgspec.structs.replace(
                self.offline, chunk_target_ms=self.offline.chunk_target_ms / speed
            ),
            online=msgspec.structs.replace(
                self.online, default_timeout_ms=self.online.default_timeout_ms / speed
            ),
        )
