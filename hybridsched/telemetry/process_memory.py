"""The memory of an engine on this machine: of the process that listens on its port, and of its children."""

from __future__ import annotations

from urllib.parse import urlsplit

import psutil

_HERE = ("127.0.0.1", "localhost", "::1")
_MIB = 1024 * 1024


class ProcessMemory:
    """Resident memory of the engine at `url`; unknown when it does not run here or may not be looked at."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._port = place.port if place.hostname in _HERE else None
        self._process: psutil.Process | None = None

    def mib(self) -> float | None:
        """MiB now, the pages that its processes share counted for each; None: unknown.

        Looking for the process reads what every process has open, so call it from a thread of its own.
        """
        try:
            if self._process is None or not self._process.is_running():
                self._process = self._find()
            if self._process is None:
                return None
            total = self._process.memory_info().rss
        except psutil.Error:
            self._process = None
            return None
        for child in self._children(self._process):
            try:
                total += child.memory_info().rss
            except psutil.Error:
                continue  # it has ended since it was listed
        return float(total) / _MIB

    def _find(self) -> psutil.Process | None:
        if self._port is None:
            return None
        for one in psutil.net_connections(kind="tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == self._port and one.pid is not None:
                return psutil.Process(one.pid)
        return None

    @staticmethod
    def _children(process: psutil.Process) -> list[psutil.Process]:
        try:
            found: list[psutil.Process] = process.children(recursive=True)
        except psutil.Error:
            return []
        return found
