"""How a host's node record goes out of service and another comes in: two ways, one protocol.

`records`: a host has a node record for each mode, and one slurmd of it is up at a time; Slurm's configuration
never changes. It needs a build with multiple slurmd (`scontrol show config` says MULTIPLE_SLURMD).
`reconfigure`: a host has one record; its GRES are written anew between the end of its slurmd and its start.
From Slurm 23.11 on `scontrol reconfigure` applies them, before that a restart of slurmctld does: with slurmd
down meanwhile, so that it never registers with other GRES than slurmctld expects.

There the restart itself may leave no slurmctld behind (a hand that was killed, a configuration with which it
does not start), so this way's acts do without one as far as they can.

Either way the record that comes in is drained before its slurmd starts: Slurm must not use it unverified.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol

from hybridsched.cluster.hands import Hands
from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.values import ClusterError, Node

REGISTER_S = 30.0
"""From slurmd's start until slurmctld shows the node."""

LOOK_S = 0.1

RECONFIGURES = (23, 11)
"""From this release `scontrol reconfigure` applies GRES."""

_AWAY = ("unreachable", "timeout")
"""Codes of errors that say that no slurmctld answers."""

_OUT = frozenset({"DOWN", "FUTURE", "UNKNOWN", "ERROR"})
_REFUSED = frozenset({"INVAL", "INVALID", "INVALID_REG"})


def in_service(node: Node) -> bool:
    """Whether a slurmd of the record has registered, drained or not."""
    return bool(node.states) and node.states[0] not in _OUT and "POWERED_DOWN" not in node.states


def invalid(node: Node) -> bool:
    """Whether Slurm refuses what the node reports of itself."""
    return not _REFUSED.isdisjoint(node.states)


class Way(Protocol):
    """Acts that may be repeated without harm; they raise `ClusterError`."""

    async def leave(self, host: str, nodes: Collection[str], reason: str) -> None:
        """Take the node records of a host out of service. Nothing runs on them."""
        ...

    async def enter(self, host: str, node: str, mode: str, reason: str) -> None:
        """Bring one of them into service, drained. `refused` where Slurm does not take it as it is."""
        ...


class RecordsWay:
    """One node record for each mode."""

    def __init__(self, cluster: Cluster, hands: Hands, *, register_s: float = REGISTER_S) -> None:
        self._cluster, self._hands, self._register_s = cluster, hands, register_s

    async def leave(self, host: str, nodes: Collection[str], reason: str) -> None:
        await _leave(self._cluster, self._hands, host, nodes, reason)

    async def enter(self, host: str, node: str, mode: str, reason: str) -> None:
        await _come_in(self._cluster, self._hands, host, node, reason, self._register_s)


class ReconfigureWay:
    """One record; `release` is Slurm's (major, minor), (0, 0) where it is not known."""

    def __init__(
        self,
        cluster: Cluster,
        hands: Hands,
        *,
        release: Callable[[], tuple[int, int]],
        register_s: float = REGISTER_S,
    ) -> None:
        self._cluster, self._hands, self._release = cluster, hands, release
        self._register_s = register_s

    async def leave(self, host: str, nodes: Collection[str], reason: str) -> None:
        try:
            await _leave(self._cluster, self._hands, host, nodes, reason)
        except ClusterError as error:
            if error.code not in _AWAY:
                raise
            # Nothing starts while no slurmctld is there, and the record was drained before.
            for node in nodes:
                await self._hands.stop_slurmd(host, node)

    async def enter(self, host: str, node: str, mode: str, reason: str) -> None:
        await self._hands.stop_slurmd(host, node)
        await self._hands.configure(host, node, mode)
        await self._take_up()
        await _answers(self._cluster, self._register_s)
        await _come_in(self._cluster, self._hands, host, node, reason, self._register_s)

    async def _take_up(self) -> None:
        """Have slurmctld read its configuration. A restart does that on every release."""
        if self._release() >= RECONFIGURES:
            try:
                await self._cluster.reconfigure()
            except ClusterError as error:
                if error.code not in _AWAY:
                    raise
            else:
                return
        await self._hands.restart_controller()


async def _leave(cluster: Cluster, hands: Hands, host: str, nodes: Collection[str], reason: str) -> None:
    found = await cluster.nodes(nodes)
    for node in found:
        await hands.stop_slurmd(host, node.name)
    for node in found:
        if in_service(node):
            await cluster.down(node.name, reason)
    # What a slurmd said with its last breath brings its record back (ReturnToService=2).
    back = [node.name for node in await cluster.nodes(nodes) if in_service(node)]
    if back:
        raise ClusterError(
            f"node {back[0]} is up again after it was set down; does its slurmd still run on {host}?",
            code="no_effect",
            retryable=True,
        )


async def _answers(cluster: Cluster, limit_s: float) -> None:
    """Wait for a slurmctld that has just been told to start, or to read its configuration."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            await cluster.ping()
        except ClusterError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
            await asyncio.sleep(LOOK_S)
        else:
            return


async def _come_in(
    cluster: Cluster, hands: Hands, host: str, node: str, reason: str, register_s: float
) -> None:
    await cluster.drain(node, reason)
    await hands.start_slurmd(host, node)
    deadline = time.monotonic() + register_s
    while True:
        found = next(iter(await cluster.nodes([node])), None)
        if found is None:
            raise ClusterError(
                f"Slurm has no node {node!r}; slurm.conf needs a NodeName line for each mode of host {host}",
                code="not_found",
                retryable=False,
            )
        if invalid(found):
            raise ClusterError(
                f"Slurm refuses node {node} ({found.reason}): gres.conf and slurm.conf have other GRES than "
                "the host",
                code="refused",
                retryable=False,
            )
        if in_service(found) and "NOT_RESPONDING" not in found.states:
            return
        if time.monotonic() > deadline:
            raise ClusterError(
                f"node {node} did not register within {register_s:g} s after its slurmd was started "
                f"({'+'.join(found.states)}); see slurmd's log on {host}",
                code="timeout",
                retryable=True,
            )
        await asyncio.sleep(LOOK_S)
