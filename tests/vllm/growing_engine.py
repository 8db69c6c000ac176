"""A leak for vLLM's API server, loaded by its own `--middleware`: it keeps memory for every completion.

It does so while the file that GROW_WHILE names is there. Imported by vLLM's Python, without this package.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

KEPT_BYTES = 40 * 1024 * 1024
kept: list[bytes] = []

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class Grow:
    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        asked = scope["type"] == "http" and scope["path"] == "/v1/completions"
        if asked and Path(os.environ["GROW_WHILE"]).exists():
            kept.append(b"x" * KEPT_BYTES)  # written to, so that it is resident
        await self._app(scope, receive, send)
