"""The budget of an open gate."""

from __future__ import annotations

from hybridsched.core.admission import offline_slots
from hybridsched.core.chunking import next_chunk_tokens
from hybridsched.core.policies._proposal import LaneFacts
from hybridsched.core.policy import PoolPolicy
from hybridsched.core.values import Budget


def lane_budget(facts: LaneFacts, policy: PoolPolicy) -> Budget:
    """What the lane may have in flight: the least of the policy's cap, the slots left and the KV cache left.

    KV use is the engine's, our own offline work included. Above `kv_share` the lane may keep what it runs and
    admit no more; a lane that runs nothing then has no room at all. A policy that opens without knowing what
    online holds (only `unprotected` does) leaves it the slots for online and no others. In an engine of the
    lane's own online holds nothing and needs no slot, and its worker alone knows its KV cache.
    """
    offline, lane, replica = policy.offline, facts.lane, facts.replica
    age = policy.idle.max_telemetry_age_ms
    shared = None if lane.own else replica
    online = (shared.online_inflight.within(age) if shared is not None else None) or 0.0
    inflight = offline_slots(
        max_num_seqs=policy.engine.max_num_seqs,
        slots_for_online=0 if lane.own else offline.slots_for_online,
        online_inflight=int(online),
    )
    if inflight > offline.max_inflight:
        inflight = offline.max_inflight
    if _kv_full(facts, policy):
        inflight = min(inflight, int(lane.offline_inflight.within(age) or 0.0))
    rate = lane.tokens_per_s.within(age)
    return Budget(
        max_inflight=inflight,
        chunk_tokens=next_chunk_tokens(offline, rate, kv_tokens=policy.engine.kv_tokens),
        slice_tokens=offline.slice_tokens,
    )


def _kv_full(facts: LaneFacts, policy: PoolPolicy) -> bool:
    """Whether KV use is above the share, as far as the scrape can be believed.

    A scrape from before our last requests ended shows their blocks as used, together with the requests. So
    for a lane that now runs nothing the number counts only if the same scrape shows an empty engine.
    """
    replica, lane = facts.replica, facts.lane
    if replica is None or lane.own:
        return False
    age = policy.idle.max_metric_age_ms
    if (replica.kv_use.within(age) or 0.0) <= policy.offline.kv_share:
        return False
    held = (replica.engine_running.within(age) or 0.0) + (replica.engine_waiting.within(age) or 0.0)
    return (lane.offline_inflight.within(policy.idle.max_telemetry_age_ms) or 0.0) > 0 or held <= 0
