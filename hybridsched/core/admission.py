"""May one more request go to an engine? Sequence slots and KV cache, for online and for offline.

Unknown capacity is never room: where neither the engine nor the policy says how large the KV cache is,
offline is refused with CAPACITY_UNKNOWN. Online is the service itself: the engine queues what does not fit,
so online is bounded by slots and the policy's own cap, not by an estimate of its KV use.
"""

from __future__ import annotations

from enum import StrEnum

from hybridsched.core.policy import EnginePolicy, OfflinePolicy, OnlinePolicy
from hybridsched.core.values import Budget, Value


class KvModel(Value, frozen=True, kw_only=True):
    """The shape of a model's KV cache.

    With grouped-query attention several query heads share one key and value head, so `kv_heads` (in a model's
    config: num_key_value_heads) counts and not the number of query heads (Ainslie et al. 2023, "GQA",
    arXiv:2305.13245).
    """

    layers: int
    kv_heads: int
    head_dim: int
    kv_bytes: float = 2.0
    """Bytes of one element: 2 for fp16 and bf16, 1 for fp8."""

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "kv_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"KvModel.{name} is {getattr(self, name)}; it must be above 0")


def kv_bytes_per_token(model: KvModel) -> float:
    """Bytes of KV cache for one token: a key and a value vector per layer and KV head.

    2 x layers x kv_heads x head_dim x bytes, as in Kwon et al. 2023 ("PagedAttention", arXiv:2309.06180,
    section 3): OPT-13B, with 40 layers of 40 heads of 128 in fp16, takes 800 KB a token.
    """
    return 2 * model.layers * model.kv_heads * model.head_dim * model.kv_bytes


def kv_capacity_tokens(model: KvModel, free_bytes: float) -> int:
    """Whole tokens that fit in `free_bytes` of GPU memory."""
    return max(0, int(free_bytes // kv_bytes_per_token(model)))


class Denial(StrEnum):
    """Why a request may not go to the engine now."""

    NO_SLOT = "no_slot"
    """All sequence slots that this kind of work may use are taken."""
    NO_KV = "no_kv"
    """It would plan more KV cache than offline may fill."""
    BUDGET = "budget"
    """The gate's budget (or the replica's cap) is used up."""
    CAPACITY_UNKNOWN = "capacity_unknown"
    """Neither the engine nor the policy says how much it can hold."""
    TOO_LONG = "too_long"
    """It can never fit: longer than the model's context or than all the KV cache offline may fill."""


class Admission(Value, frozen=True, kw_only=True):
    ok: bool
    reason: Denial | None = None
    """None when admitted."""
    never: bool = False
    """The request would be refused on an empty engine too: waiting does not help."""
    slots_left: int = 0
    """Sequence slots this kind of work may still use, before this request."""


class Capacity(Value, frozen=True, kw_only=True):
    """What an engine can hold. None: unknown."""

    max_num_seqs: int | None = None
    kv_tokens: int | None = None
    max_model_len: int | None = None

    def or_policy(self, policy: EnginePolicy) -> Capacity:
        """The same, with the policy's word where the engine gave none."""
        return Capacity(
            max_num_seqs=policy.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            kv_tokens=policy.kv_tokens if self.kv_tokens is None else self.kv_tokens,
            max_model_len=self.max_model_len,
        )


class OnlineAdmission(Value, frozen=True, kw_only=True):
    """Online requests of one replica."""

    policy: OnlinePolicy
    capacity: Capacity

    def room(self, *, online_inflight: int) -> int:
        """How many more the replica may hold. Offline never narrows it: it leaves when online comes."""
        cap = self.policy.max_inflight
        if self.capacity.max_num_seqs is not None:
            cap = min(cap, self.capacity.max_num_seqs)
        return max(0, cap - online_inflight)

    def may_admit(self, *, tokens: int, online_inflight: int) -> Admission:
        """`tokens`: prompt plus most output tokens of the request."""
        longest = self.capacity.max_model_len
        if longest is not None and tokens > longest:
            return Admission(ok=False, reason=Denial.TOO_LONG, never=True)
        left = self.room(online_inflight=online_inflight)
        if left > 0:
            return Admission(ok=True, slots_left=left)
        full = self.capacity.max_num_seqs is not None and online_inflight >= self.capacity.max_num_seqs
        return Admission(ok=False, reason=Denial.NO_SLOT if full else Denial.BUDGET)


class OfflineAdmission(Value, frozen=True, kw_only=True):
    """Offline requests of one lane on a shared engine."""

    policy: OfflinePolicy
    capacity: Capacity
    """With the policy's word filled in (`Capacity.or_policy`)."""

    def may_admit(
        self,
        *,
        tokens: int,
        offline_inflight: int,
        offline_tokens: int,
        online_inflight: int,
        budget: Budget,
    ) -> Admission:
        """One more offline request of `tokens` (prompt plus most output)?

        `offline_tokens` is the sum of the same estimate over the lane's requests in flight. Slots:
        offline + online + `slots_for_online` never exceed the engine's `max_num_seqs`, because vLLM does not
        preempt a running request for a more urgent one when its slots are full (vllm issues 40004, 24365).
        """
        seqs, kv = self.capacity.max_num_seqs, self.capacity.kv_tokens
        if seqs is None or kv is None:
            return Admission(ok=False, reason=Denial.CAPACITY_UNKNOWN)
        longest, most_kv = self.capacity.max_model_len, int(kv * self.policy.kv_share)
        if tokens > most_kv or (longest is not None and tokens > longest):
            return Admission(ok=False, reason=Denial.TOO_LONG, never=True)
        slots = offline_slots(
            max_num_seqs=seqs, slots_for_online=self.policy.slots_for_online, online_inflight=online_inflight
        )
        allowed = min(slots, self.policy.max_inflight, budget.max_inflight)
        left = max(0, allowed - offline_inflight)
        if left == 0:
            full = offline_inflight >= slots
            return Admission(ok=False, reason=Denial.NO_SLOT if full else Denial.BUDGET)
        if offline_tokens + tokens > most_kv:
            return Admission(ok=False, reason=Denial.NO_KV, slots_left=left)
        return Admission(ok=True, slots_left=left)


def offline_slots(*, max_num_seqs: int, slots_for_online: int, online_inflight: int) -> int:
    """Sequence slots that offline may fill, its own included."""
    return max(0, max_num_seqs - slots_for_online - online_inflight)
