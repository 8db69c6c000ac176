"""Any program on a lane: started when the lane opens, told by a signal when it closes, then started again.

The program saves its own state at the signal and exits; a status of 0 always means that its work is done. A
program that neither saves nor exits within the grace is not stopped where it stands (SIGSTOP would keep its
GPU memory): the job leaves the lane and goes back to Slurm's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence

import msgspec
from redis import RedisError

from hybridsched import notice
from hybridsched.log import get_logger
from hybridsched.process import die_with_parent
from hybridsched.store.connection import async_client, explain
from hybridsched.store.lane_holders import LaneHolders, Place
from hybridsched.store.tasks import end_tasks
from hybridsched.workers.lane_claim import Seeker, owner_name
from hybridsched.workers.lane_keeper import LaneKeeper
from hybridsched.workers.slurm_env import HELD_VARIABLE, LEAVE_STATUS, JobPlace, held_by, requeue

_log = get_logger("lane")

_TERM_S = 5.0
"""Between SIGTERM and SIGKILL for a program that has to go."""

_LOOK_S = 0.5


class LaneRunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may want otherwise. Seconds."""

    lane: str | None = None
    """This lane and no other."""
    model: str | None = None
    """Only a lane of this model's engine."""
    signal: signal.Signals = signal.SIGUSR2
    """What the program is told with."""
    grace_s: float = 30.0
    """How long it may take to save and exit."""
    pauses_itself: bool = False
    """It calls `lane.checkpoint()`: tell it nothing when the lane closes, only when the job has to leave."""
    give_back_s: float = 10.0
    """A lane that has been closed this long, with no program on it, is changed for another if one is open."""
    leave_after_s: float = 1800.0
    """With no open lane for this long the job goes back to Slurm's queue."""


class LaneRun:
    """One run of the command."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        redis_url: str,
        pool: str,
        place: JobPlace | None,
        options: LaneRunOptions,
    ) -> None:
        self._command = list(command)
        self._url = redis_url
        self._pool = pool
        self._place = place
        self._options = options
        self._news = asyncio.Event()
        self._leave = False
        self._end = False
        self._owner = owner_name()

    def leave(self) -> None:
        """Slurm wants the GPU back, or the time limit is near."""
        self._leave = True
        self._news.set()

    def end(self) -> None:
        """The job is ended: nothing is to run again."""
        self._end = True
        self._news.set()

    async def run(self) -> int:
        """Until the program is done or has failed, or the job has to go. Returns the exit status.

        0: done; 75: it goes on in another run; 128 + n: ended by signal n; else what the program ended with.

        Raises:
            StoreRefused: Redis does not take the login, or its user lacks a right.
        """
        client = async_client(self._url, name="lane-run")
        owner, place = self._owner, self._place
        seeker = Seeker(
            LaneHolders(client, self._pool),
            owner=owner,
            job=place.job if place else "",
            node=place.node if place and self._options.lane is None else None,
            lane=self._options.lane,
            model=self._options.model,
        )
        keeper = self._keeper = LaneKeeper(
            client, self._pool, owner=owner, seeker=seeker, changed=self._news.set
        )
        stop = asyncio.Event()
        keeping = asyncio.create_task(keeper.run(stop), name="lane-keeper")
        keeping.add_done_callback(lambda _: self._news.set())
        try:
            status = await self._visits(keeping)
        except RedisError as error:
            raise explain(error, self._url, "looking for a lane") from error
        finally:
            stop.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TERM_S):
                    await asyncio.wait([keeping])
            await end_tasks(keeping)
            await client.aclose()
        if status == LEAVE_STATUS and place is not None and not self._end:
            await asyncio.to_thread(requeue, place)
        return status

    async def _visits(self, keeping: asyncio.Task[None]) -> int:
        """Run the program each time the lane is open, until there is a status to end with."""
        while True:
            if not await self._until_open(keeping):
                return 128 + signal.SIGTERM if self._end else LEAVE_STATUS
            status = await self._visit()
            if status is not None:
                return status

    async def _until_open(self, keeping: asyncio.Task[None]) -> bool:
        """Wait for an open lane. False: the job has to go."""
        while not (self._leave or self._end):
            if keeping.done():
                keeping.result()
                return False
            if self._keeper.is_open:
                return True
            closed_s = self._closed_s()
            if closed_s > self._options.leave_after_s:
                _log.info("No lane has been open for long; the job goes back to the queue.", key="lane_leave")
                return False
            if closed_s > self._options.give_back_s and self._options.lane is None:
                await self._keeper.move_if_better()
            await self._look(_LOOK_S)
        return False

    async def _visit(self) -> int | None:
        """Run the program once. Returns the status to end with; None: run it again when the lane is open."""
        place = self._keeper.place
        program = await self._start(place)
        ended = asyncio.create_task(program.wait(), name="program")
        ended.add_done_callback(lambda _: self._news.set())
        told = False
        try:
            while not ended.done():
                gone = self._keeper.place != place
                closed = gone or not (self._keeper.is_open or self._options.pauses_itself)
                if self._end:
                    break
                if self._leave or closed:
                    told = True
                    if not await self._tell(program, ended):
                        self._leave = True
                    break
                if self._options.pauses_itself and self._closed_s() > self._options.leave_after_s:
                    self._leave = True
                    continue
                await self._look(_LOOK_S)
        finally:
            await self._make_end(program, ended)
        status = _status(ended.result())
        if self._end:
            return 128 + signal.SIGTERM
        if status == 0:
            return 0
        if self._leave:
            return LEAVE_STATUS
        if told or status == LEAVE_STATUS:
            _log.info(
                "The program has left the lane; it is started again when the lane is open.", key="lane_again"
            )
            return None
        return status

    async def _tell(self, program: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> bool:
        """Tell the program to save and exit. False: it has not within the grace."""
        options = self._options
        _log.info(
            "The program is told to save and exit.",
            key="lane_tell",
            signal=options.signal.name,
            why="the job has to leave" if self._leave else "the lane has closed",
        )
        _send(program, options.signal)
        await asyncio.wait([ended], timeout=options.grace_s)
        if ended.done():
            return True
        _log.warning(
            "The program did not exit in time; it is ended, and the job goes back to the queue. What it had "
            "not saved is lost: save at the signal, or give a longer --grace.",
            key="lane_grace_over",
            grace_s=options.grace_s,
        )
        return False

    async def _start(self, place: Place | None) -> asyncio.subprocess.Process:
        environment = dict(os.environ)
        environment |= {
            "HYBRIDSCHED_REDIS_URL": self._url,
            "HYBRIDSCHED_POOL": self._pool,
        }
        if place is not None:
            environment |= {
                HELD_VARIABLE: held_by(self._place, self._owner, place).text(),
                "HYBRIDSCHED_LANE": place.lane,
                "HYBRIDSCHED_MODEL": place.model,
                "HYBRIDSCHED_ENGINE_URL": place.url,
            }
        _log.info(
            "The lane is open; the program starts.", key="lane_start", lane=place.lane if place else None
        )
        return await asyncio.create_subprocess_exec(
            *self._command, env=environment, process_group=0, preexec_fn=die_with_parent()
        )

    async def _make_end(self, program: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        """Nothing of the program is left on the lane: SIGTERM, then SIGKILL, to all of its group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not _group_alive(program.pid):
                break
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program.pid, number)
            until_s = time.monotonic() + _TERM_S
            while _group_alive(program.pid) and time.monotonic() < until_s:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
        await asyncio.wait([ended])

    def _closed_s(self) -> float:
        since_s = self._keeper.closed_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def _look(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()
        self._news.clear()


def _send(program: asyncio.subprocess.Process, number: signal.Signals) -> None:
    # To the program alone: a shell around it should `exec` it, as in a batch script.
    with contextlib.suppress(ProcessLookupError):
        program.send_signal(number)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _status(returncode: int) -> int:
    """As a shell says it."""
    return returncode if returncode >= 0 else 128 - returncode


async def run_on_lane(run: LaneRun) -> int:
    """Run it with its signals: USR2 leaves, TERM and INT end."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, run.leave)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, run.end)
    if notice.came():
        run.leave()
    return await run.run()
