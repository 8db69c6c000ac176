"""Values of a policy file that are each allowed and cannot go together."""

from __future__ import annotations

from hybridsched.core.policy import PolicyKind, PoolPolicy, Rung
from hybridsched.core.replicas import shortest_limit_s
from hybridsched.policyfile.mode_checks import mode_mistakes
from hybridsched.policyfile.schema import Problem


def contradictions(policy: PoolPolicy) -> list[tuple[Problem, set[str]]]:
    """Values that are each allowed and cannot go together; with the keys that each finding compares."""
    found: list[tuple[Problem, set[str]]] = []

    def say(key: str, message: str, *others: str) -> None:
        found.append((Problem(key, message), {key, *others}))

    cycle, pause, offline, engine = policy.cycle, policy.pause, policy.offline, policy.engine
    if cycle.lease_ms < 2 * cycle.interval_ms:
        say(
            "cycle.lease_ms",
            f"was given {cycle.lease_ms:g}; it must be at least twice cycle.interval_ms "
            f"({cycle.interval_ms:g}), or one late cycle lets every gate die",
            "cycle.interval_ms",
        )
    ladder = [rung.value for rung in pause.ladder]
    if ladder not in (["boundary"], ["boundary", "iteration"], ["boundary", "iteration", "sleep"]):
        say(
            "pause.ladder",
            f'was given {ladder}; it must be ["boundary"], ["boundary", "iteration"] or ["boundary", '
            '"iteration", "sleep"]: a ladder begins with boundary, rungs stand in this order and each once',
        )
    elif pause.grace_ms > 0 and Rung.ITERATION not in pause.ladder:
        say(
            "pause.grace_ms",
            f"was given {pause.grace_ms:g}, but pause.ladder has no rung to use after it; add iteration to "
            "the ladder, or set 0",
            "pause.ladder",
        )
    if offline.chunk_min_lines > offline.chunk_max_lines:
        say(
            "offline.chunk_min_lines",
            f"was given {offline.chunk_min_lines}; it must not exceed offline.chunk_max_lines "
            f"({offline.chunk_max_lines})",
            "offline.chunk_max_lines",
        )
    if offline.slots_for_online >= engine.max_num_seqs:
        say(
            "offline.slots_for_online",
            f"was given {offline.slots_for_online}; it must be below engine.max_num_seqs "
            f"({engine.max_num_seqs}), or no slot is left for offline",
            "engine.max_num_seqs",
        )
    if policy.online.max_inflight > engine.max_num_seqs:
        say(
            "online.max_inflight",
            f"was given {policy.online.max_inflight}; it must not exceed engine.max_num_seqs "
            f"({engine.max_num_seqs}): the rest would wait inside the engine",
            "engine.max_num_seqs",
        )
    if policy.kind is PolicyKind.CONSOLIDATE and not policy.pack.enabled:
        say(
            "pack.enabled",
            'was given false, but kind is "consolidate", which is nothing without it; set true, or take kind '
            "idle-window",
            "kind",
        )
    if policy.pack.enabled and policy.pack.max_inflight > policy.online.max_inflight:
        say(
            "pack.max_inflight",
            f"was given {policy.pack.max_inflight}; it must not exceed online.max_inflight "
            f"({policy.online.max_inflight}), beyond which a replica takes no request",
            "online.max_inflight",
        )
    least = policy.headroom.least_slice_tokens
    if policy.kind is PolicyKind.HEADROOM and 0 < offline.slice_tokens < least:
        say(
            "headroom.least_slice_tokens",
            f"was given {least}; it must not exceed offline.slice_tokens ({offline.slice_tokens}): nothing "
            "would begin beside online, and those that run would have longer slices than that",
            "offline.slice_tokens",
        )
    modes = [(Problem(key, text), {key}) for key, text in mode_mistakes(policy)]
    return found + _replicas(policy) + modes


def _replicas(policy: PoolPolicy) -> list[tuple[Problem, set[str]]]:
    """The same for the online replicas on Slurm."""
    found: list[tuple[Problem, set[str]]] = []
    groups: dict[str, int] = {}
    for i, wanted in enumerate(policy.slurm.replicas):
        where = f"slurm.replicas[{i}]"
        if wanted.group in groups:
            message = (
                f"was given {wanted.group!r}, as slurm.replicas[{groups[wanted.group]}] is called already; "
                "give each a name of its own, or raise the count of one"
            )
            found.append((Problem(f"{where}.name", message), {f"{where}.name", f"{where}.model"}))
        groups.setdefault(wanted.group, i)
        least = shortest_limit_s(wanted, policy.slurm)
        if wanted.time_limit_s < least:
            message = (
                f"was given {wanted.time_limit_s}; with warm_ms {wanted.warm_ms:g} and slurm.notice_s "
                f"{policy.slurm.notice_s} it must be at least {least}, or a replica would be replaced "
                "soon after it serves"
            )
            used = {f"{where}.time_limit_s", f"{where}.warm_ms", "slurm.notice_s"}
            found.append((Problem(f"{where}.time_limit_s", message), used))
    return found
