"""Every Redis key and channel of a pool, in one place.

All begin with `hs:{POOL}:`; the braces are the cluster hash tag, so that the keys of one script live on one
node. Owners and contents of the values are documented where they are written; this module only names them.
"""

from __future__ import annotations

import re
from urllib.parse import quote

GROUP = "workers"
"""The consumer group of every online stream."""

PRIORITIES = (0, 1, 2)
"""Priority classes of online requests, most urgent first; 1 is the default."""

_POOL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_NAME = re.compile(r"[!-z|~]{1,200}\Z")


def check_pool(pool: str) -> str:
    """The pool's name, if it may stand in a key.

    Raises:
        ValueError: it is empty, longer than 64, or holds other than letters, digits, '.', '_' and '-'.
    """
    if not _POOL.match(pool):
        raise ValueError(
            f"pool name {pool!r} cannot be used; take 1 to 64 letters, digits, '.', '_' or '-', "
            f"beginning with a letter or digit"
        )
    return pool


def check_name(what: str, name: str) -> str:
    """`name`, if it may stand in a key. `what` says in the error what it names ("model", "request id").

    Raises:
        ValueError: it is empty, longer than 200, or holds spaces, braces, control or non-ASCII characters.
    """
    if not _NAME.match(name):
        raise ValueError(
            f"{what} {name!r} cannot be used in a Redis key; take 1 to 200 printable ASCII characters "
            f"without spaces and braces"
        )
    return name


def _quoted(model: str) -> str:
    return quote(model, safe="/:@+=,", errors="surrogatepass")


class Keys:
    """The keys of one pool. Methods take a name and return a key; properties are single keys.

    Raises:
        ValueError: the pool's name cannot stand in a key (see `check_pool`).
    """

    __slots__ = ("pool", "prefix")

    def __init__(self, pool: str) -> None:
        self.pool = check_pool(pool)
        self.prefix = f"hs:{{{pool}}}:"

    # online requests

    def online(self, model: str, priority: int) -> str:
        """Stream of accepted requests of one model and priority class; consumer group `workers`."""
        return f"{self.prefix}online:{model}:{priority}"

    def online_all(self, model: str) -> list[str]:
        """The model's streams, most urgent first."""
        return [self.online(model, priority) for priority in PRIORITIES]

    def request(self, request_id: str) -> str:
        """Hash: what became of one request; it outlives the answer for a while."""
        return f"{self.prefix}req:{request_id}"

    def reply(self, client: str) -> str:
        """Stream on which one client process reads all its answers."""
        return f"{self.prefix}reply:{client}"

    def replicas(self, model: str) -> str:
        """Hash replica -> "expires_ms load inflight cap woken" of the model's live online workers.

        Where the policy packs online, " until_ms rank most_inflight most_load" follows: a place in the order.
        """
        return f"{self.prefix}replicas:{model}"

    def pack(self, model: str) -> str:
        """String: JSON of `core.values.Pack`, PX; the model's pack order."""
        return f"{self.prefix}pack:{model}"

    def wake(self, replica: str) -> str:
        """Channel: `wake` (there is work for you) or `cancel <request id>`."""
        return f"{self.prefix}wake:{replica}"

    def replica_holder(self, replica: str) -> str:
        """String: JSON of `store.replica_names.NameHolder`, PX; the worker that has the replica's name."""
        return f"{self.prefix}replica-holder:{replica}"

    # gates

    def gate(self, lane: str) -> str:
        """String: JSON of `core.values.Gate`, with a PX lease."""
        return f"{self.prefix}gate:{lane}"

    def gate_epoch(self, lane: str) -> str:
        """Integer without TTL, raised by every claim that must find the lane closed."""
        return f"{self.prefix}gate-epoch:{lane}"

    @property
    def gates(self) -> str:
        """Channel: the JSON of each gate that changes."""
        return f"{self.prefix}gates"

    # telemetry

    def telemetry(self, replica: str) -> str:
        """String: JSON record of one replica, PX."""
        return f"{self.prefix}telemetry:{replica}"

    @property
    def telemetry_channel(self) -> str:
        """Channel: name of a replica that went from busy to idle or back."""
        return f"{self.prefix}telemetry"

    @property
    def replica_index(self) -> str:
        """Sorted set: replicas by the server time (ms) of their last record."""
        return f"{self.prefix}replica-index"

    def lane_telemetry(self, lane: str) -> str:
        """String: JSON record of one lane's offline worker, PX."""
        return f"{self.prefix}lane-telemetry:{lane}"

    @property
    def lane_index(self) -> str:
        """Sorted set: lanes by the server time (ms) of their last record."""
        return f"{self.prefix}lane-index"

    def lane_holder(self, lane: str) -> str:
        """String: JSON of `store.lane_holders.Holder`, PX; the Slurm job that has the lane."""
        return f"{self.prefix}lane-holder:{lane}"

    def lane_job_model(self, job: str) -> str:
        """String: the model that a Slurm job of offline work needs, EX."""
        return f"{self.prefix}lane-job-model:{job}"

    def lane_proof(self, lane: str) -> str:
        """String, EX: how the lane's own engine answered before it slept (`store.lane_proofs`)."""
        return f"{self.prefix}lane-proof:{lane}"

    @property
    def lane_holder_fence(self) -> str:
        """Integer without TTL: raised by every claim of a lane."""
        return f"{self.prefix}lane-holder-fence"

    @property
    def slurm_status(self) -> str:
        """String: JSON of `workers.policy_slurm_view.SlurmStatus`, PX."""
        return f"{self.prefix}slurm-status"

    @property
    def gpu_reports(self) -> str:
        """Hash: Slurm job -> JSON of `store.gpu_reports.GpuReport`: GPUs that a replica's job found gone."""
        return f"{self.prefix}gpu-reports"

    @property
    def engine_profiles(self) -> str:
        """Hash: `MODEL DEVICE GPUS` -> JSON of `store.engine_profiles.EngineProfile`."""
        return f"{self.prefix}engine-profiles"

    # policy, leader, operators, logs

    @property
    def policy_current(self) -> str:
        """String: JSON of `core.policy.PoolPolicy`."""
        return f"{self.prefix}policy:current"

    @property
    def policy_version(self) -> str:
        """Integer: the newest version given out."""
        return f"{self.prefix}policy:version"

    @property
    def policy_history(self) -> str:
        """The published policies, oldest first."""
        return f"{self.prefix}policy:history"

    @property
    def policy_channel(self) -> str:
        """Channel: the version that was just published."""
        return f"{self.prefix}policy"

    @property
    def leader(self) -> str:
        """String: token of the leading policy worker, PX."""
        return f"{self.prefix}leader"

    @property
    def leader_fence(self) -> str:
        """Integer: raised with each change of leader."""
        return f"{self.prefix}leader-fence"

    @property
    def holds(self) -> str:
        """Hash: `ID LANE`, or `ID *` for the pool -> JSON of `core.values.Hold`."""
        return f"{self.prefix}holds"

    @property
    def policy_worker(self) -> str:
        """String: JSON of `workers.policy_stats.WorkerStatus`, PX."""
        return f"{self.prefix}policy-worker"

    @property
    def decisions(self) -> str:
        """Stream: one record a cycle of the policy worker."""
        return f"{self.prefix}decisions"

    @property
    def events(self) -> str:
        """Stream: what happened, for reports; JSON in field `e`."""
        return f"{self.prefix}events"

    @property
    def write_probe(self) -> str:
        """String, PX: somebody has just tried whether the server takes writes."""
        return f"{self.prefix}write-probe"

    # modes

    @property
    def mode_journal(self) -> str:
        """String: JSON of `core.switch_values.SwitchState`: each host, written before each act."""
        return f"{self.prefix}mode-journal"

    @property
    def mode_orders(self) -> str:
        """Hash: id -> JSON of `core.mode_plan.Order`."""
        return f"{self.prefix}mode-orders"

    @property
    def mode_approvals(self) -> str:
        """Hash: id of a change of the calendar -> who approved it."""
        return f"{self.prefix}mode-approvals"

    @property
    def mode_durations(self) -> str:
        """String: JSON of `core.calendar.Durations`: what parts of switches took."""
        return f"{self.prefix}mode-durations"

    @property
    def mode_status(self) -> str:
        """String: JSON of `workers.policy_modes_view.ModeStatus`, PX."""
        return f"{self.prefix}mode-status"

    # batches

    @property
    def batches(self) -> str:
        """Sorted set: batch ids by submit time (server ms)."""
        return f"{self.prefix}batches"

    @property
    def batches_active(self) -> str:
        """Sorted set: the same, only of batches that have not ended."""
        return f"{self.prefix}batches-active"

    @property
    def batches_sweep(self) -> str:
        """String, PX: somebody has just looked over the active batches."""
        return f"{self.prefix}batches-sweep"

    def batch_pace(self, model: str | None) -> str:
        """String, PX: tokens a second that the batches of a model are done at."""
        return f"{self.prefix}batch-pace:{model or ''}"

    def batch(self, batch_id: str) -> str:
        """Hash: one batch."""
        return f"{self.prefix}batch:{batch_id}"

    def batch_chunks(self, batch_id: str) -> str:
        """Hash: chunk number -> JSON."""
        return f"{self.prefix}batch:{batch_id}:chunks"

    def rq_queue(self, model: str | None) -> str:
        """Name of the RQ queue of a model, or of batches without one. No key: RQ keeps its own `rq:` keys.

        No two have the same name, whatever pools and models are called: a pool's name holds no colon, and
        what follows it says what it is. Signs that could be part of a pattern are percent-encoded.
        """
        if model is None:
            return f"{self.prefix}any"
        return f"{self.prefix}model:{_quoted(model)}"

    def rq_queue_of_batch(self, batch_id: str, model: str | None = None) -> str:
        """The same for a batch that only Slurm jobs of its user run; `model`: for its chunks of that model,
        where it has several."""
        name = f"{self.prefix}batch:{batch_id}"
        return name if model is None else f"{name}:{_quoted(model)}"
