"""A timer of an event loop that is on time.

asyncio's own rounds up to whole milliseconds (epoll's unit), which at `--speed 10` is as long as a short
iteration. Linux's timerfd wakes the same epoll to the microsecond; elsewhere the loop's timer has to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "timerfd_create") and hasattr(libc, "timerfd_settime") else None


class PreciseTimer:
    """Calls `callback` in the event loop once `time.monotonic()` has reached the time given to `at`."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._fd: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handle: asyncio.Handle | None = None
        self._spec = _Itimerspec()
        self._ref = ctypes.byref(self._spec)
        self._libc = _libc()
        self._armed = False

    def start(self) -> None:
        """Attach to the running event loop."""
        self._loop = asyncio.get_running_loop()
        if self._libc is not None:
            fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
            if fd >= 0:
                self._fd = fd
                self._loop.add_reader(fd, self._readable)

    def at(self, when: float) -> None:
        """Fire at `when` (`time.monotonic()` seconds), replacing an earlier request. The past fires soon."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("the timer was not started")
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if when <= time.monotonic():
            self._handle = loop.call_soon(self._fire)
        elif self._fd is not None and self._libc is not None:
            seconds = int(when)
            self._spec.value.sec = seconds
            self._spec.value.nsec = min(999_999_999, int((when - seconds) * 1e9) + 1)
            self._libc.timerfd_settime(self._fd, _ABSTIME, self._ref, None)
            self._armed = True
        else:
            self._handle = loop.call_at(when, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if self._fd is not None and self._libc is not None:
            self._spec.value.sec = self._spec.value.nsec = 0
            self._libc.timerfd_settime(self._fd, _ABSTIME, self._ref, None)

    def close(self) -> None:
        self.cancel()
        if self._fd is not None and self._loop is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _readable(self) -> None:
        """The time has come. Setting a new time makes the descriptor unreadable again: that saves a read."""
        self._armed = False
        self._callback()
        if not self._armed and self._fd is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 8)

    def _fire(self) -> None:
        self._handle = None
        self._callback()
