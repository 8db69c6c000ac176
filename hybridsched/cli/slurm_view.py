"""Slurm's part of a pool, as `pool status`, `top` and `why` show it: what the policy worker last saw."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from hybridsched.cli.words import span
from hybridsched.store.found import read_json
from hybridsched.store.keys import Keys
from hybridsched.store.lane_holders import LaneHolders
from hybridsched.workers.policy_slurm_view import SlurmStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from redis.asyncio import Redis

    from hybridsched.core.policy import SlurmPolicy

_STATUS = msgspec.json.Decoder(SlurmStatus)

OLD_MS = 15_000.0
"""What was said longer ago than this is said to be old: several times the interval of looking at Slurm."""

_NODES = 12


async def look_at_slurm(
    client: Redis, pool: str, now_ms: float, policy: SlurmPolicy | None
) -> dict[str, Any] | None:
    """What the policy worker says of Slurm; None: the pool's policy does not steer it. `now_ms`: wall clock.

    When it is steered and nothing is there, `reachable` is None.
    """
    status = await _read(client, pool)
    if status is not None:
        name = "hsfill" if policy is None else policy.fill_gres
        age_ms = max(0.0, now_ms - status.at_ms)
        return {**msgspec.to_builtins(status), "age_ms": age_ms, "fill_gres": name}
    return {"reachable": None} if policy is not None and policy.enabled else None


async def _read(client: Redis, pool: str) -> SlurmStatus | None:
    raw: Any = await client.get(Keys(pool).slurm_status)
    return read_json(_STATUS, raw, "what is known of Slurm")


async def jobs_on(client: Redis, pool: str, lanes: Sequence[str]) -> dict[str, dict[str, str]]:
    """The Slurm job that has each lane, and its node; lanes without one are absent."""
    holders = await LaneHolders(client, pool).read_many(lanes)
    return {
        lane: {"job": holder.job, "node": holder.node}
        for lane, holder in holders.items()
        if holder is not None and holder.job
    }


def slurm_lines(slurm: dict[str, Any] | None) -> list[str]:
    """The lines above the table of lanes."""
    if slurm is None:
        return []
    if slurm["reachable"] is None:
        return ["Slurm: nothing is known of it; a policy worker that leads says so within seconds"]
    if not slurm["reachable"]:
        first = f"Slurm: cannot be reached: {slurm['problem'] or 'no answer yet'}"
    else:
        first = f"Slurm: {slurm['running']} offline jobs run, {slurm['pending']} wait"
        counts = sorted(slurm["fill"].items())
        if counts:
            shown = ", ".join(f"{node} {cell(count)}" for node, count in counts[:_NODES])
            more = f" and {len(counts) - _NODES} more" if len(counts) > _NODES else ""
            first += f"; free open lanes ({slurm['fill_gres']}): {shown}{more}"
    if slurm["age_ms"] > OLD_MS:
        first += f" (seen {span(slurm['age_ms'])} ago)"
    lines = [first]
    if slurm["reachable"] and slurm["problem"]:
        lines.append(f"  {slurm['problem']}")
    if slurm["without_lane"]:
        tasks = slurm["tasks"]
        names = ", ".join(tasks.get(str(job), str(job)) for job in slurm["without_lane"])
        lines.append(f"  started and without a lane: jobs {names}")
    for model, many in sorted(slurm["waiting"].items()):
        lines.append(
            f"  {many} {'job waits' if many == 1 else 'jobs wait'} for {_where(model, slurm['serving'])}"
        )
    for group, counts in sorted(slurm["replicas"].items()):
        told = ", ".join(f"{count} {what}" for what, count in counts.items())
        lines.append(f"  replicas {group}: {told}")
    lines += [f"  {what}: {why}" for what, why in sorted(slurm["troubles"].items())]
    return lines


def cell(count: int | None) -> str:
    """A count as a line shows it."""
    return "?" if count is None else str(count)


async def no_lane_but(client: Redis, pool: str, name: str, lanes: Sequence[str]) -> str | None:
    """What is known of a node or a Slurm job that was asked for in the place of a lane; None: nothing."""
    for lane, job in (await jobs_on(client, pool, lanes)).items():
        if job["job"] == name:
            return f"{name} is a Slurm job that has lane {lane}; see `hybridsched why {lane}`"
    status = await _read(client, pool)
    if status is not None:
        trouble = status.troubles.get(f"node {name}") or status.troubles.get(f"job {name}")
        if name in status.fill:
            said = f"{name} is a Slurm node with {cell(status.fill[name])} free open lanes"
            return f"{said}: {trouble}" if trouble else said
        if trouble:
            return f"{name}: {trouble}"
        model = status.models.get(name)
        if name in {status.tasks.get(str(job), str(job)) for job in status.without_lane}:
            said = f"{name} is a Slurm job that has started and has no lane yet"
            return f"{said}; it waits for {_where(model, status.serving)}" if model else said
        if model is not None:
            return f"{name} is a Slurm job that waits for {_where(model, status.serving)}"
    return None


def _where(model: str, serving: Mapping[str, Sequence[str]]) -> str:
    """A lane of a model, and the nodes that could have one."""
    if not model:
        return "a lane (of which model is not known before it has run)"
    nodes = serving.get(model, ())
    if not nodes:
        return f"a lane of {model}, which no node serves"
    more = f" and {len(nodes) - _NODES} more" if len(nodes) > _NODES else ""
    return f"a lane of {model}, served on {', '.join(nodes[:_NODES])}{more}"
