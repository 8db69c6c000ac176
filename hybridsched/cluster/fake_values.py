"""What a `FakeSlurm` is made of."""

from __future__ import annotations

import msgspec

from hybridsched.cluster.values import Gres, Job, JobSpec, Partition


class FakeNode(msgspec.Struct, kw_only=True):
    name: str
    configured: tuple[Gres, ...]
    """What slurm.conf says; `reconfigure` comes back to it."""
    live: tuple[Gres, ...]
    not_consumed: tuple[str, ...] = ("hsfill",)
    """Names of GRES that slurm.conf calls `no_consume`: jobs need them and take nothing away."""
    states: tuple[str, ...] = ("IDLE",)
    reason: str = ""
    booted_ms: float | None = None
    started_ms: float | None = None


class FakeJob(msgspec.Struct, kw_only=True):
    value: Job
    spec: JobSpec
    eligible_ms: float = 0.0
    """Not started before this, as after a requeue."""


def default_nodes() -> dict[str, FakeNode]:
    gres = (
        Gres(name="gpu", type="a100", count=4),
        Gres(name="hsfill", count=4),
        Gres(name="hslane", count=4),
    )
    nodes = {f"n{i}": FakeNode(name=f"n{i}", configured=gres, live=gres) for i in range(1, 5)}
    nodes["hspark"] = FakeNode(
        name="hspark", configured=gres, live=gres, states=("DOWN",), reason="hybridsched parked node"
    )
    return nodes


def default_partitions() -> tuple[Partition, ...]:
    real = ("n1", "n2", "n3", "n4")
    return (
        Partition(name="online", nodes=real, priority_tier=100, preempt_mode="OFF", grace_s=0),
        Partition(
            name="offline",
            nodes=(*real, "hspark"),
            priority_tier=1,
            preempt_mode="REQUEUE",
            grace_s=120,
            default=True,
        ),
    )
