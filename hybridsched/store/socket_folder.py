"""The short temporary folders in which sockets of embedded servers lie, and the end of those left behind.

Each names its owner, process id and start time, so that a folder whose owner was killed is told from one in
use and is removed by whoever makes the next one. Only folders of the same user that name an owner are
touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import msgspec
import psutil

from hybridsched.store.errors import StoreError

PREFIX = "hs-"
SOCKET = "s"
"""Name of the socket in the folder."""
OWNER = "owner.json"

_SOCKET_LIMIT = 100
"""Longest path of a unix socket that we use; the kernel takes 107 bytes (man 7 unix)."""


class _Owner(msgspec.Struct):
    pid: int
    started: float
    """Seconds since the epoch, as psutil has it: tells the process from a later one of the same number."""


_OWNER = msgspec.json.Decoder(_Owner)


def make_folder() -> Path:
    """A private folder whose path is short enough for a socket. Removes those that dead owners have left.

    Raises:
        StoreError: there is no such place.
    """
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108 - mkdtemp makes a private one there
        remove_left(Path(base))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        if len(os.fsencode(folder / SOCKET)) <= _SOCKET_LIMIT:
            me = psutil.Process()
            (folder / OWNER).write_bytes(msgspec.json.encode(_Owner(pid=me.pid, started=me.create_time())))
            return folder
        folder.rmdir()
    raise StoreError(
        "no temporary folder has a path short enough for a unix socket; set TMPDIR to a short one"
    )


def remove_left(base: Path) -> list[Path]:
    """Remove the folders below `base` whose owners are dead and whose servers do not answer; returns them."""
    removed = []
    with contextlib.suppress(OSError):
        for folder in sorted(base.glob(f"{PREFIX}*")):
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_left(folder: Path) -> bool:
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        owner = _OWNER.decode((folder / OWNER).read_bytes())
        if abs(psutil.Process(owner.pid).create_time() - owner.started) < 1.0:
            return False
    except psutil.NoSuchProcess:
        pass
    except (OSError, msgspec.MsgspecError, psutil.Error):
        # Not ours, or not known whose: it stays.
        return False
    return not _answers(folder / SOCKET)


def _answers(path: Path) -> bool:
    """Whether a server listens there still: it may outlive its owner, or the owner be another container's."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fsencode(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True
