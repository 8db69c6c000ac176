"""How a lane's own worker has its lane: alone, as long as it lives.

Two workers on one lane would each admit a whole budget, and each undo what the other publishes. A worker that
was killed leaves its hold behind: it is waited for, or taken over where its process is seen to be gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from uuid import uuid4

from redis import RedisError

from hybridsched.log import get_logger
from hybridsched.store.connection import StoreError
from hybridsched.store.lane_holders import HeldLane, Holder, LaneHolders, Place
from hybridsched.workers.lane_claim import Pace, Tenure

PACE = Pace(lease_ms=4_000, beat_s=1.0, margin_s=1.0)
"""A lane's own worker comes back within seconds after a kill; its hold must not keep it waiting longer."""

_LOOK_S = 0.1
_SAY_S = 30.0

_log = get_logger("lane")


class LaneTakenError(StoreError):
    """Another living worker has the lane."""


def owner_here() -> str:
    """A name that no other process has, and from which a process of this machine can be known to be dead."""
    return f"{socket.gethostname()}:{os.getpid()}:{_namespace()}:{uuid4().hex[:8]}"


def _namespace() -> int:
    """Process numbers mean the same only within one PID namespace."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def is_dead(owner: str) -> bool:
    """Whether the process that took this name is certainly gone; False when that cannot be seen from here."""
    parts = owner.split(":")
    if len(parts) != 4 or not parts[1].isdigit() or not _namespace():
        return False
    if parts[0] != socket.gethostname() or parts[2] != str(_namespace()):
        return False
    try:
        os.kill(int(parts[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


class OwnLane:
    """Takes one lane, and takes it again after it was lost."""

    def __init__(self, holders: LaneHolders, place: Place, *, owner: str) -> None:
        self._holders = holders
        self._place = place
        self._owner = owner

    async def take(self, stop: asyncio.Event) -> Tenure | None:
        """Take the lane. None: told to stop meanwhile.

        Waits for Redis as long as it takes, and for a dead holder as long as its hold can last.

        Raises:
            LaneTakenError: a living worker or job has it.
        """
        patience_s: float | None = None
        said_s = float("-inf")
        while not stop.is_set():
            try:
                held = await self._claim()
                if held is not None:
                    return Tenure(self._holders, held, pace=PACE)
                found = await self._holders.read_token(self._place.lane)
                if found is not None:
                    token, holder, left_s = found
                    if holder is not None and is_dead(holder.owner):
                        await self._holders.release_token(self._place.lane, token)
                        continue
                    if patience_s is None:
                        patience_s = time.monotonic() + left_s + 1.0
                    elif time.monotonic() > patience_s:
                        raise LaneTakenError(self._taken(holder))
            except (RedisError, OSError) as error:
                patience_s = None
                if time.monotonic() - said_s > _SAY_S:
                    said_s = time.monotonic()
                    _log.warning(
                        "Redis cannot be reached to take the lane; trying again. Check that the server runs.",
                        key="lane_outage",
                        lane=self._place.lane,
                        error=str(error),
                    )
            await asyncio.sleep(_LOOK_S)
        return None

    async def _claim(self) -> HeldLane | None:
        return await self._holders.claim(
            [self._place], owner=self._owner, open_only=False, lease_ms=PACE.lease_ms
        )

    def _taken(self, holder: Holder | None) -> str:
        if holder is None:
            who = "by something that is not written by a worker of ours"
        elif holder.job:
            who = f"by Slurm job {holder.job} on {holder.node or 'an unknown node'} ({holder.owner})"
        else:
            who = f"by another worker ({holder.owner})"
        return (
            f"lane {self._place.lane} is held {who}; a lane has one worker, on its replica's engine or on "
            "one of its own: stop that one first, or give this one another --replica"
        )
