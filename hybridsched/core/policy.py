"""The policy of a pool as values. `hybridsched.policyfile` reads and checks the TOML form."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hybridsched.core.autonomy import Autonomy as Autonomy
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.values import Value


class PolicyKind(StrEnum):
    """Which decision function a policy uses."""

    IDLE_WINDOW = "idle-window"
    CONSOLIDATE = "consolidate"
    HEADROOM = "headroom"
    UNPROTECTED = "unprotected"
    ONLINE_ONLY = "online-only"


class Rung(StrEnum):
    """The rungs of the pause ladder that an offline worker takes by itself, cheapest first."""

    BOUNDARY = "boundary"
    ITERATION = "iteration"
    SLEEP = "sleep"
    """Only on lanes with an engine of their own."""


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
    keep_ms: float = 20_000.0
    """A lane's own engine keeps the requests that it holds while it stands still for this long; then they
    are ended, with their tokens kept."""
    sleep_after_ms: float = 60_000.0
    """A lane's own engine is put to sleep when the lane has been closed for this long."""


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


class HealthPolicy(Value, frozen=True, kw_only=True):
    """When an engine that answers its health check is taken out all the same (`core.engine_health`)."""

    doubt_ms: float = 5_000.0
    """Requests are held with no counter moving, or the metrics are not read, for this long: it is tested."""
    test_ms: float = 10_000.0
    """A test that is not answered within this, while nothing else moves either, means that it hangs."""
    drain_ms: float = 30_000.0
    """Requests that a working engine holds may take this long before it is started again."""
    memory_growth_mib: float | None = None
    """Its processes may grow by this much beyond what they had when settled; None: not looked at."""
    settle_ms: float = 60_000.0
    """From its first request on an engine's memory settles for this long."""
    restarts: int = 3
    """How often an engine is started again within an hour; after that it stays out."""


class OnlinePolicy(Value, frozen=True, kw_only=True):
    max_inflight: int = 64
    """Online requests one replica may hold at once."""
    default_timeout_ms: float = 60_000.0


class SloPolicy(Value, frozen=True, kw_only=True):
    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0


class PackPolicy(Value, frozen=True, kw_only=True):
    """Online requests packed onto the fewest replicas, in an order; see `core.packing`."""

    enabled: bool = False
    max_inflight: int = 32
    """Online requests of one replica before the next in order is used: decides the time per token."""
    max_wait_tokens: float = 4096.0
    """Load of one replica before the next is used: what a request may find ahead of it, so the TTFT."""
    objective_share: float = 0.7
    """Caps shrink while a mean latency is above this share of its objective."""
    least_fill: float = 0.1
    """Caps never shrink below this share of themselves."""
    adjust_ms: float = 5000.0
    """Between two looks at the measured latency."""
    burst_quantile: float = 0.99
    """Of the quarter seconds of the last five minutes: which counts as the burst to have room for."""
    spare: int = 1
    """Replicas beyond those that a burst reaches which still keep their offline iterations short."""
    gap_window_ms: float = 150.0
    """Idle window of the replicas within reach, whose gaps are short."""
    gap_slice_tokens: int = 64
    """Offline prompt tokens per iteration within reach for `gap_ms` after online left; 0: as later."""
    gap_ms: float = 1000.0
    """Online that has been gone for less is likely to be back soon."""
    far_slice_tokens: int = 2048
    """Offline prompt tokens per iteration on replicas that no burst reaches; 0 sends prompts whole."""


class HeadroomPolicy(Value, frozen=True, kw_only=True):
    """Offline beside online on one engine; see `core.policies.headroom`."""

    tpot_share: float = 0.6
    """Longest iteration with offline work in it, as a share of the objective for time per token."""
    peer_share: float = 0.9
    """The same as a share of the time per token on the first replica of the pack order, which has no offline
    work beside online: nobody is served worse than there. 0: not looked at, and the first has some too."""
    decode_share: float = 0.8
    """Share of that which may be spent without offline prompts; what is left is for them."""
    calm_share: float = 0.8
    """From this share of an objective on, measured latency takes from the longest iteration, up to all."""
    max_backlog_tokens: float = 2048.0
    """Offline leaves while online has more load than this on the replica: prompts that wait decide TTFT."""
    least_slice_tokens: int = 64
    """With room for fewer prompt tokens in an iteration no new offline request begins."""
    max_error: float = 0.3
    """Mean relative error of the fitted iteration times beyond which they are not believed."""
    max_fit_age_ms: float = 600_000.0
    """Iteration times fitted longer ago than this are not believed."""


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
    """The GRES, not consumed by jobs, whose live count says how many free lanes of a node are open."""
    place_gres: str = "hslane"
    """The GRES without device files that each job takes one of on its node; its count never changes."""
    parked_node: str = "hspark"
    """The node that is no machine and keeps waiting jobs valid; its counts stay as they were configured."""
    requeue_after_ms: float = 120_000.0
    """The last rung: a job whose lanes have been closed without a break for this long is requeued."""
    wrong_node_ms: float = 10_000.0
    """A job on a node where no lane serves its model is requeued after this long."""
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
    pack: PackPolicy = PackPolicy()
    headroom: HeadroomPolicy = HeadroomPolicy()
    engine: EnginePolicy = EnginePolicy()
    health: HealthPolicy = HealthPolicy()
    slurm: SlurmPolicy = SlurmPolicy()
    modes: ModesPolicy | None = None
    """None: the pool has no modes."""
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
            slo=msgspec.structs.replace(
                self.slo, ttft_ms=self.slo.ttft_ms / speed, tpot_ms=self.slo.tpot_ms / speed
            ),
            pack=msgspec.structs.replace(
                self.pack,
                gap_window_ms=self.pack.gap_window_ms / speed,
                gap_ms=self.pack.gap_ms / speed,
                adjust_ms=self.pack.adjust_ms / speed,
            ),
        )
