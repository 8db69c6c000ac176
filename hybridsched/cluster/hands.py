"""What has to be done on a host itself when it changes its mode: its slurmd, and the cutting of its GPUs.

The policy worker runs elsewhere. It reaches hosts through one program of the site, named on its own command
line, never in a policy: whoever may publish a policy must not be able to run anything else.

    PROGRAM HOST slurmd-stop NODE     end the slurmd of node record NODE; 0 when none runs
    PROGRAM HOST slurmd-start NODE    start it; 0 when it runs already
    PROGRAM HOST mig-apply            cut the GPUs as the layout on stdin says; 0 when they are cut so
    PROGRAM HOST mig-assert           0 when they are cut so, 1 when not, with the difference on stderr
    PROGRAM HOST configure NODE MODE  write the node's GRES in a mode into slurm.conf and gres.conf
    PROGRAM - slurmctld-restart       restart slurmctld

`HYBRIDSCHED_TERM` in its environment is the number of the policy worker's term. What a frozen worker had
asked for may come when another leads: hosts refuse words of an earlier term than the last one they heard.

The last two are asked for only where hosts have one record for all modes (`modes.way`). Exit status: 0 done,
2 it cannot be done that way (it is not tried again), anything else: it failed this time. What is still at
work when the policy worker is killed is killed with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hybridsched.cluster.run import run
from hybridsched.cluster.values import ClusterError

TERM = "HYBRIDSCHED_TERM"

WRONG = 2
"""Exit status of a hand that cannot do it that way."""


class Hands(Protocol):
    """Acts on hosts. All of them may be repeated without harm; they raise `ClusterError`."""

    def in_term(self, term: str) -> Hands:
        """The same for the leader's term of that number; empty: its number is not known."""
        ...

    async def stop_slurmd(self, host: str, node: str) -> None:
        """End the slurmd of a node record. None running is no error."""
        ...

    async def start_slurmd(self, host: str, node: str) -> None:
        """Start it. One that runs is no error."""
        ...

    async def cut(self, host: str, layout: bytes) -> None:
        """Cut the GPUs of a host as a document of mig-parted's form says."""
        ...

    async def differs(self, host: str, layout: bytes) -> str:
        """Empty: the GPUs are cut so. Else in what they differ."""
        ...

    async def configure(self, host: str, node: str, mode: str) -> None:
        """Write a node's GRES in a mode into Slurm's configuration."""
        ...

    async def restart_controller(self) -> None:
        """Restart slurmctld."""
        ...


class CommandHands:
    """`Hands` by the site's program."""

    def __init__(
        self, program: Path, *, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0
    ) -> None:
        self._program = program
        self._environment = dict(os.environ if environment is None else environment)
        self._timeout_s = timeout_s

    def in_term(self, term: str) -> Hands:
        environment = {k: v for k, v in self._environment.items() if k != TERM}
        if term:
            environment[TERM] = term
        return CommandHands(self._program, environment=environment, timeout_s=self._timeout_s)

    async def stop_slurmd(self, host: str, node: str) -> None:
        await self._do(host, "slurmd-stop", node)

    async def start_slurmd(self, host: str, node: str) -> None:
        await self._do(host, "slurmd-start", node)

    async def cut(self, host: str, layout: bytes) -> None:
        await self._do(host, "mig-apply", stdin=layout)

    async def differs(self, host: str, layout: bytes) -> str:
        status, said = await self._ask(host, "mig-assert", stdin=layout)
        if status == 0:
            return ""
        if status == 1:
            return said
        raise _failed(host, "mig-assert", status, said)

    async def configure(self, host: str, node: str, mode: str) -> None:
        await self._do(host, "configure", node, mode)

    async def restart_controller(self) -> None:
        await self._do("-", "slurmctld-restart")

    async def _do(self, host: str, word: str, *more: str, stdin: bytes | None = None) -> None:
        status, said = await self._ask(host, word, *more, stdin=stdin)
        if status:
            raise _failed(host, word, status, said)

    async def _ask(self, host: str, word: str, *more: str, stdin: bytes | None = None) -> tuple[int, str]:
        argv = [str(self._program), host, word, *more]
        # What a dead policy worker had asked for must not take effect after its successor has gone on.
        said = await run(
            argv, timeout_s=self._timeout_s, environment=self._environment, stdin=stdin, dies_with_us=True
        )
        return said.status, said.complaint


def _failed(host: str, word: str, status: int, said: str) -> ClusterError:
    return ClusterError(
        f"{word} on host {host} ended with {status}: {said}",
        code="refused" if status == WRONG else "died",
        retryable=status != WRONG,
    )


class NoHands:
    """Where the policy worker was given no program: nothing can be done on hosts, and the error says so."""

    def in_term(self, term: str) -> Hands:
        return self

    async def stop_slurmd(self, host: str, node: str) -> None:
        raise self._missing(host)

    async def start_slurmd(self, host: str, node: str) -> None:
        raise self._missing(host)

    async def cut(self, host: str, layout: bytes) -> None:
        raise self._missing(host)

    async def differs(self, host: str, layout: bytes) -> str:
        raise self._missing(host)

    async def configure(self, host: str, node: str, mode: str) -> None:
        raise self._missing(host)

    async def restart_controller(self) -> None:
        raise self._missing("slurmctld's")

    @staticmethod
    def _missing(host: str) -> ClusterError:
        return ClusterError(
            f"host {host} cannot be reached: the policy worker was started without --hand PROGRAM",
            code="missing",
            retryable=False,
        )
