"""Starts the simulated vLLM for tests, and keeps it while the tests of a module need it."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from pathlib import Path

MODEL = "m"


class SimulatedServer:
    """One server process on a free port."""

    def __init__(self, *flags: str, speed: float = 10.0, model: str = MODEL) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "hybridsched.engines.simulated",
                "--port",
                "0",
                "--served-model-name",
                model,
                "--speed",
                str(speed),
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.process.kill()
            raise AssertionError(f"the server did not start: {self.process.communicate()[1]!r}")
        self.url: str = json.loads(line)["url"]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill_core(self) -> None:
        """The engine dies and the API lives on for a while."""
        self.process.send_signal(signal.SIGUSR1)

    def stop(self) -> bytes:
        """Kill it; what it wrote on stderr."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.communicate(timeout=10)[1]


class Servers:
    """Servers by their flags."""

    def __init__(self) -> None:
        self._by_flags: dict[tuple[str, ...], SimulatedServer] = {}

    def get(self, *flags: str) -> SimulatedServer:
        server = self._by_flags.get(flags)
        if server is None or server.process.poll() is not None:
            server = self._by_flags[flags] = SimulatedServer(*flags)
        return server

    def stop(self) -> None:
        for server in self._by_flags.values():
            server.stop()


def log_lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
