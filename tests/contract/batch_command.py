"""`hybridsched batch` for tests, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HS = [sys.executable, "-m", "hybridsched.cli.main"]


class Done:
    """How a command ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr
        assert "Traceback" not in self.err, self.err

    @property
    def json(self) -> object:
        return json.loads(self.out)


def hs(*args: object, url: str = "", cwd: Path | None = None) -> Done:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDSCHED_")}
    if url:
        environment["HYBRIDSCHED_REDIS_URL"] = url
    command = [*HS, "batch", *map(str, args)]
    return Done(subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60))
