"""A program of your own takes part in the pool: it runs while its lane is open, and pauses at its boundaries.

    from hybridsched import lane

    lane.wait_open()             # before the model is loaded
    for batch in batches:
        lane.checkpoint(save)    # at your batch boundary: goes on at once, or waits while the lane is closed
        run(batch)

Inside a Slurm job the program takes a free lane of its node (`HYBRIDSCHED_LANE` names one instead; `none`:
take no part); under `hybridsched lane run` it follows the lane of that. Told to leave (SIGUSR2, or
`leave_soon()`), the next `checkpoint` calls `save`, puts the job back in Slurm's queue and ends the program
with status 75.

A program that waits at a closed lane changes to another of its node that opens, and goes back to Slurm's
queue when none has opened for half an hour.

Outside a Slurm job, with no pool configured (`HYBRIDSCHED_REDIS_URL` unset), nothing is ever waited for.
While Redis is away the lane counts as closed: nothing here raises for that. A login
that Redis refuses before the program has had a lane is a `LaneError`: no waiting would help.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from hybridsched import notice
from hybridsched.store.errors import StoreRefused
from hybridsched.workers.lane_settings import LaneError, LaneSettings, lane_settings
from hybridsched.workers.slurm_env import HELD_VARIABLE, LEAVE_STATUS, held_by, requeue

if TYPE_CHECKING:
    from hybridsched.workers.lane_keeper import LaneKeeper

__all__ = [
    "LaneError",
    "LeaveLane",
    "checkpoint",
    "engine_url",
    "is_open",
    "leave_soon",
    "leaving",
    "max_inflight",
    "wait_open",
]

_LOOK_S = 0.2
"""How often a wait looks by itself; changes wake it up at once."""

_MOVE_AFTER_S = 10.0
"""A lane that has been closed this long is changed for another if one is open, while the program waits."""

_LEAVE_AFTER_S = 1800.0
"""With no open lane for this long, of waiting, the job goes back to Slurm's queue."""

_MIND_S = 0.5
_SAY_AFTER_S = 5.0
_GOODBYE_S = 5.0
_AGAIN_S = 1.0
_REFUSED_AGAIN_S = 60.0

_log = logging.getLogger("hybridsched.lane")


class LeaveLane(SystemExit):
    """The program was told to leave, and its place is kept. Uncaught, it ends the program with status 75."""

    def __init__(self) -> None:
        super().__init__(LEAVE_STATUS)


def checkpoint(save: Callable[[], object] | None = None) -> None:
    """Call this at a batch boundary. Returns when the lane is open: at once, or after the wait.

    `save` is called when the program has to leave: put down what the next run needs to go on from here.

    Raises:
        LeaveLane: the program was told to leave.
        LaneError: see there.
    """
    taking_part = _get()
    if taking_part is None:
        return
    if not taking_part.wait(None):
        if save is not None:
            save()
        taking_part.leave()
        raise LeaveLane


def wait_open(timeout_s: float | None = None) -> bool:
    """Wait until the lane is open. False: `timeout_s` is over.

    Raises:
        LeaveLane: the program was told to leave. What follows would have loaded a model.
        LaneError: see there.
    """
    taking_part = _get()
    if taking_part is None or taking_part.wait(timeout_s):
        return True
    if not taking_part.leaving:
        return False
    taking_part.leave()
    raise LeaveLane


def is_open() -> bool:
    """Whether the lane is open at this moment. Does not wait."""
    taking_part = _get()
    return True if taking_part is None else taking_part.is_open


def leaving() -> bool:
    """Whether the program was told to leave; the next `checkpoint` ends it."""
    taking_part = _get()
    return taking_part is not None and taking_part.leaving


def leave_soon() -> None:
    """Tell the program to leave at its next `checkpoint`, as SIGUSR2 does. For a handler of your own."""
    taking_part = _taking_part if _known else _get()
    if taking_part is not None:
        taking_part.leave_soon()


def engine_url() -> str | None:
    """Address of the lane's engine, for a program that sends requests to it; None while there is no lane."""
    taking_part = _get()
    return None if taking_part is None else taking_part.engine_url


def max_inflight() -> int | None:
    """Requests that the program may have in the lane's engine at once: 0 while the lane is closed, None where
    no lane limits it. More would be taken for somebody else's load, and close the lane."""
    taking_part = _get()
    return None if taking_part is None else taking_part.max_inflight


class _TakingPart:
    """This process and its lane, which a thread of its own looks after."""

    def __init__(self, settings: LaneSettings) -> None:
        self._settings = settings
        self._news = threading.Condition(threading.RLock())
        self._keeper: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ending = threading.Event()
        self.leaving = notice.came()
        self._had_lane = False
        self._refused = ""
        """Why Redis will never give this program a lane; known before it has had one."""
        self._waiting_since_s: float | None = None
        self._thread = threading.Thread(target=self._look_after, name="hybridsched-lane", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        keeper = self._keeper
        return keeper is not None and keeper.is_open and not self.leaving

    @property
    def max_inflight(self) -> int:
        keeper = self._keeper
        return 0 if keeper is None else int(keeper.max_inflight)

    @property
    def engine_url(self) -> str | None:
        keeper = self._keeper
        place = None if keeper is None else keeper.place
        return self._settings.engine if place is None else str(place.url)

    def wait(self, timeout_s: float | None) -> bool:
        began_s = time.monotonic()
        self._waiting_since_s = began_s
        try:
            return self._wait(began_s, timeout_s)
        finally:
            self._waiting_since_s = None

    def _wait(self, began_s: float, timeout_s: float | None) -> bool:
        said = False
        with self._news:
            while not self.leaving:
                if self._refused:
                    raise LaneError(self._refused)
                if self.is_open:
                    if said:
                        _log.warning("the lane is open again after %.0f s", time.monotonic() - began_s)
                    return True
                waited_s = time.monotonic() - began_s
                if timeout_s is not None and waited_s >= timeout_s:
                    return False
                if waited_s >= _SAY_AFTER_S and not said:
                    said = True
                    _log.warning("waiting: the lane is closed (`hybridsched why` says for what reason)")
                left_s = _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s - waited_s)
                self._news.wait(left_s)
        return False

    def leave_soon(self) -> None:
        # A signal handler calls this: no lock is taken that the interrupted code may hold. Waits look by
        # themselves.
        self.leaving = True

    def leave(self) -> None:
        """Give the lane back, and the job to Slurm."""
        self.end()
        job = self._settings.job
        if job is not None and self._settings.held is None:
            requeue(job)

    def end(self) -> None:
        """Give the lane back."""
        self._ending.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            # The loop may have ended by itself meanwhile.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        self._thread.join(_GOODBYE_S)

    def _changed(self) -> None:
        keeper = self._keeper
        self._had_lane = self._had_lane or (keeper is not None and keeper.place is not None)
        with self._news:
            self._news.notify_all()

    def _look_after(self) -> None:
        """The thread. Whatever happens in it, the program waits as at a closed gate."""
        while not self._ending.is_set():
            try:
                asyncio.run(self._session())
            except StoreRefused as error:
                if not self._had_lane:
                    self._refused = str(error)
                    self._changed()
                    return
                # It may have much to lose by now: it waits, and can be told to leave.
                _log.warning("the lane counts as closed: %s", error)
                self._keeper = None
                self._ending.wait(_REFUSED_AGAIN_S)
                continue
            except Exception:  # noqa: BLE001 - the user's program must not die of it
                _log.exception("the lane cannot be followed; it counts as closed, and is tried again")
            self._keeper = None
            self._ending.wait(_AGAIN_S)

    async def _session(self) -> None:
        from redis import RedisError

        from hybridsched.store.connection import async_client, explain
        from hybridsched.store.lane_holders import LaneHolders
        from hybridsched.store.tasks import end_tasks
        from hybridsched.workers.lane_claim import Seeker, owner_name
        from hybridsched.workers.lane_keeper import LaneKeeper

        _configure_logs()
        settings, owner = self._settings, owner_name()
        client = async_client(settings.url, name="hybridsched-lane")
        seeker = None
        if settings.held is None:
            seeker = Seeker(
                LaneHolders(client, settings.pool),
                owner=owner,
                job=settings.job.job if settings.job else "",
                node=settings.job.node if settings.job and settings.lane is None else None,
                lane=settings.lane,
                model=settings.model,
            )
        keeper = LaneKeeper(
            client,
            settings.pool,
            owner=owner,
            seeker=seeker,
            lane=settings.lane,
            holder=settings.held.owner if settings.held else "",
            changed=self._changed,
        )
        self._loop, self._stop, self._keeper = asyncio.get_running_loop(), asyncio.Event(), keeper
        if self._ending.is_set():
            return
        minding = asyncio.create_task(self._mind(keeper), name="lane-mind")
        try:
            await keeper.run(self._stop)
        except RedisError as error:
            raise explain(error, settings.url, "looking for a lane") from error
        finally:
            await end_tasks(minding)
            await client.aclose()

    async def _mind(self, keeper: LaneKeeper) -> None:
        """While the program waits: take a better lane, or give up. Between its checkpoints it may be using
        the lane's engine, and is left alone."""
        settings = self._settings
        while settings.held is None:
            await asyncio.sleep(_MIND_S)
            waiting_s, closed_s = self._waiting_since_s, keeper.closed_since_s
            if waiting_s is None or closed_s is None:
                continue
            now_s = time.monotonic()
            if settings.job is not None and now_s - max(waiting_s, closed_s) > _LEAVE_AFTER_S:
                _log.warning("no lane has been open for long: the job goes back to Slurm's queue")
                self.leave_soon()
                self._changed()
                return
            if settings.lane is None and now_s - closed_s > _MOVE_AFTER_S:
                await keeper.move_if_better()


def _configure_logs() -> None:
    """Messages of the package go to stderr, unless the program has set structlog up by itself."""
    import structlog

    from hybridsched import log

    if not structlog.is_configured():
        log.configure(level="warning")


_lock = threading.RLock()
_taking_part: _TakingPart | None = None
_known = False


def _get() -> _TakingPart | None:
    global _taking_part, _known
    with _lock:
        if not _known:
            settings = lane_settings(os.environ)
            if settings is not None:
                _listen()
                _taking_part = _TakingPart(settings)
            _known = True
        return _taking_part


def _listen() -> None:
    """Take SIGUSR2, unless the program has a handler of its own or this is not its main thread."""
    if threading.current_thread() is not threading.main_thread():
        _log.warning(
            "first used outside the main thread: SIGUSR2 is not taken, call lane.leave_soon() for it"
        )
        return
    if notice.is_free():
        signal.signal(signal.SIGUSR2, _told)


def _told(_number: int, _frame: FrameType | None) -> None:
    if _taking_part is not None:
        _taking_part.leave_soon()


def _goodbye() -> None:
    if _taking_part is not None:
        _taking_part.end()


def _forked() -> None:
    """A forked child has no thread: it begins anew, and follows the lane that its parent keeps."""
    global _taking_part, _known, _lock
    _lock = threading.RLock()
    before, _taking_part, _known = _taking_part, None, False
    keeper = None if before is None else before._keeper
    place = None if keeper is None else keeper.place
    if before is None or keeper is None or place is None:
        return
    mark = held_by(before._settings.job, keeper.owner, place)
    os.environ |= {
        "HYBRIDSCHED_LANE": place.lane,
        "HYBRIDSCHED_ENGINE_URL": place.url,
        HELD_VARIABLE: mark.text(),
    }


if os.environ.get("HYBRIDSCHED_LANE") != "none":
    # From the import on: by default the signal would end the program, and Slurm count its job as failed.
    notice.listen()
atexit.register(_goodbye)
os.register_at_fork(after_in_child=_forked)
