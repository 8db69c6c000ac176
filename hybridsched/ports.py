"""Loopback TCP ports that are kept for a server from their choice until the server listens.

A port that was only looked up as free may be another process's by the time the server binds it. A socket
that is bound and does not listen keeps it: the kernel gives it to nobody who asks for any, a bind without
SO_REUSEADDR is refused, and a server that sets it (man 7 socket), as servers do, binds the port and listens.
Not for a program that may not set it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Self

LOOPBACK = "127.0.0.1"


def taken(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server listens on `port`: another one that is started there would fail after a
    while, or share its connections with it (vLLM with several API servers sets SO_REUSEPORT)."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Connections that were closed do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


class KeptPorts:
    """Ports that stay ours until `close()`; use it as a context, or keep the object.

    Raises:
        OSError: one of them is in use or kept by somebody else. Then none is kept.
    """

    def __init__(self, ports: Iterable[int]) -> None:
        """`ports`: the numbers; 0 for any that is free."""
        self._sockets: list[socket.socket] = []
        try:
            for port in ports:
                kept = socket.socket()
                self._sockets.append(kept)
                # Without SO_REUSEADDR: of two who want to keep a port one is refused. With it from then on:
                # the server may bind it too.
                kept.bind((LOOPBACK, port))
                kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except BaseException:
            self.close()
            raise

    @property
    def numbers(self) -> list[int]:
        """The ports, in the order in which they were asked for; empty after `close()`."""
        return [int(kept.getsockname()[1]) for kept in self._sockets]

    def close(self) -> None:
        """Let them go. A server that listens on one goes on."""
        for kept in self._sockets:
            kept.close()
        self._sockets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_FIRST_BASE, _BASES, _APART = 18_000, 600, 20


def keep_testbed_ports(nodes: int, *, seed: int) -> tuple[int, KeptPorts]:
    """A port base for slurm/testbed (see `up --help`) with `nodes` nodes, and its ports, kept.

    They lie between 18,000 and 31,000, below the range of outgoing ports (Linux: from 32,768). `seed`: where
    the search begins, so that processes which begin at one time do not all try the same.

    Raises:
        OSError: no such range is free.
    """
    for step in range(_BASES):
        base = _FIRST_BASE + _APART * ((seed * 7 + step) % _BASES)
        try:
            return base, KeptPorts(base + offset for offset in (1, *range(10, 11 + nodes)))
        except OSError:
            continue
    raise OSError("no free range of TCP ports for a private Slurm between 18000 and 30000")


def first_job_id(port_base: int) -> int:
    """Slurm's FirstJobId for a testbed at a base of `keep_testbed_ports`: 40,000 ids that no other one has.

    The largest stays below Slurm's limit of 67,043,328 (slurm.conf, MaxJobId).
    """
    return 2000 * port_base
