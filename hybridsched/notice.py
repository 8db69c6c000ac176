"""Slurm's notice (SIGUSR2), heard from a program's first moments on.

By default the signal ends a process, and Slurm counts such a job as failed. Handlers that act on it need an
event loop or a lane, whose modules take up to seconds to import on a loaded node. Until then the notice is
only noted. This module imports nothing but the standard library's lightest parts, for the same reason.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType

_came = False


def listen() -> None:
    """Note SIGUSR2 from now on. Does nothing outside a Slurm job, outside the main thread, or where the
    program has a handler of its own. A batch script ignores it (`trap '' USR2`) until somebody listens.
    """
    if not os.environ.get("SLURM_JOB_ID") or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(signal.SIGUSR2, _note)


def listen_as(arguments: Sequence[str]) -> None:
    """The same for a command line of `hybridsched` whose command acts on the notice."""
    words = [word for word in arguments if not word.startswith("-")]
    if {"lane", "worker"} & set(words[:2]):
        listen()


def came() -> bool:
    """Whether the notice has come. Ask after your own handler is set."""
    return _came


def is_free() -> bool:
    """Whether nobody but this module would hear SIGUSR2."""
    return signal.getsignal(signal.SIGUSR2) in (signal.SIG_DFL, signal.SIG_IGN, _note)


def _note(_number: int, _frame: FrameType | None) -> None:
    global _came
    _came = True
