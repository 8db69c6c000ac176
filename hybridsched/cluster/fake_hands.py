"""Hosts in memory, for tests: their slurmd bring node records of a `FakeSlurm` in and out of service.

A record's configured GRES come back when its slurmd registers, as Slurm does it; `modes` says what
`configure` writes for a record in a mode. `fail` takes errors by word, the next first.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridsched.cluster.fake import FakeNode, FakeSlurm
from hybridsched.cluster.values import ClusterError, Gres


class FakeHands:
    """`Hands` over a `FakeSlurm`. `calls` says what was asked, `cuts` how each host's GPUs are cut."""

    def __init__(
        self, slurm: FakeSlurm, *, modes: Mapping[tuple[str, str], tuple[Gres, ...]] | None = None
    ) -> None:
        self.slurm = slurm
        self.modes = dict(modes or {})
        self.calls: list[tuple[str, ...]] = []
        self.cuts: dict[str, bytes] = {}
        self.fail: dict[str, list[ClusterError]] = {}
        self.term = ""

    def in_term(self, term: str) -> FakeHands:
        self.term = term
        return self

    async def stop_slurmd(self, host: str, node: str) -> None:
        self._reach("slurmd-stop", host, node)
        found = self.slurm.nodes.get(node)
        if found is not None and found.states[0] != "DOWN":
            found.states = (*found.states, "NOT_RESPONDING")

    async def start_slurmd(self, host: str, node: str) -> None:
        self._reach("slurmd-start", host, node)
        found = self._node(host, "slurmd-start", node)
        flags = tuple(s for s in found.states[1:] if s != "NOT_RESPONDING")
        found.states = ("IDLE", *flags)
        self.slurm.register(node)
        self.slurm.schedule()

    async def cut(self, host: str, layout: bytes) -> None:
        self._reach("mig-apply", host)
        self.cuts[host] = layout

    async def differs(self, host: str, layout: bytes) -> str:
        self._reach("mig-assert", host)
        return "" if self.cuts.get(host) == layout else f"the GPUs of {host} are cut otherwise"

    async def configure(self, host: str, node: str, mode: str) -> None:
        self._reach("configure", host, node, mode)
        found = self._node(host, "configure", node)
        found.configured = self.modes[node, mode]

    async def restart_controller(self) -> None:
        self._reach("slurmctld-restart", "-")

    def _node(self, host: str, word: str, node: str) -> FakeNode:
        found = self.slurm.nodes.get(node)
        if found is None:
            raise ClusterError(f"{word} on host {host}: no {node}", code="refused", retryable=False)
        return found

    def _reach(self, word: str, *more: str) -> None:
        self.calls.append((word, *more))
        errors = self.fail.get(word)
        if errors:
            raise errors.pop(0)
