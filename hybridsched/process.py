"""What the kernel does for us about child processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent ends."""
_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2): whose parent ends becomes a child of this process, not of process 1."""


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel send `signum` to the child when this process ends, however it ends.

    The kernel watches the thread that starts the child, not the process: start children from a thread that
    lives as long as they shall. None where the kernel has no such thing (not Linux).
    """
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(1)

    return prepare


def adopt_orphans() -> None:
    """From here on what a child has started stays a descendant of this process when the child ends. Does
    nothing where the kernel has no such thing (not Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
