"""Real vLLM engines for the demo: started once, for both passes and for the look at interrupted lines."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from hybridsched.core.values import Value
from hybridsched.demo.errors import DemoUsageError
from hybridsched.demo.supervisor import ChildError, ChildSpec, Supervisor
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.traces import TraceRow

READY_S = 600.0
"""How long an engine may take until it is healthy: it loads its weights, and two do so on the same cores."""
LOOK_EVERY_S = 0.2
SHORT_START_S = 1960.0
TIME_SHARE = 3
KEEP_EVERY = 6
LENGTH_SHARE = 16
LONGEST_OUTPUT = 48
"""The shipped trace is one of a large model on many GPUs. For a small one on a CPU: from where bursts are
many, its times and prompt lengths divided by these, one request of so many, and no long outputs."""

_CONTROL = {"VLLM_SERVER_DEV_MODE": "1"}
"""With it vLLM has `/abort_requests`. The engines listen on the loopback only."""


class VllmLaunch(Value, frozen=True, kw_only=True):
    """How the demo's engines are started."""

    program: str
    """`vllm`, or the path of one."""
    model: Path
    served_as: str
    arguments: tuple[str, ...] = ()
    """Further ones of `vllm serve`."""
    max_model_len: int

    def spec(self, replica: str, port: int, place: int, log: Path) -> ChildSpec:
        """The engine of a replica; `place` is its number, and that of its GPU where there are any."""
        given = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        device = given[place] if place < len(given) else str(place)
        return ChildSpec(
            name=f"engine-{replica}",
            argv=(
                *(self.program, "serve", str(self.model), "--served-model-name", self.served_as),
                *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(self.max_model_len)),
                # what the prefix cache had is needed to tell what was computed twice
                *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log", *self.arguments),
            ),
            log=log,
            env=_CONTROL | {"CUDA_VISIBLE_DEVICES": device},
        )


def longest_context(model: Path) -> int | None:
    """Tokens that the model takes at most, by its config.json; None where that does not say.

    Raises:
        DemoUsageError: there is no model.
    """
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise DemoUsageError(
            f"--model {model} holds no model that can be read ({error}); give the folder with its "
            "config.json and weights"
        ) from None
    found = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return found if isinstance(found, int) and found > 0 else None


def shorten(rows: list[TraceRow]) -> list[TraceRow]:
    """A few of the shipped trace's requests, closer together and with lengths for a small model on a CPU."""
    return [
        TraceRow(
            arrival_s=row.arrival_s / TIME_SHARE,
            prompt_tokens=max(1, row.prompt_tokens // LENGTH_SHARE),
            output_tokens=max(1, min(LONGEST_OUTPUT, row.output_tokens)),
        )
        for row in rows[::KEEP_EVERY]
    ]


class VllmEngines:
    """The engines, running. Use it as a context; entering waits until all are healthy.

    Raises (when entered):
        ChildError: one does not come up; with the end of its log.
    """

    def __init__(self, launch: VllmLaunch, ports: Mapping[str, int], folder: Path) -> None:
        self.children = Supervisor()
        self.launch = launch
        self.ports = dict(ports)
        self._folder = folder
        self.version = ""
        self.start_s = 0.0
        """Seconds until all were healthy."""

    async def __aenter__(self) -> Self:
        began = time.monotonic()
        try:
            for place, (replica, port) in enumerate(self.ports.items()):
                log = self._folder / "logs" / f"engine-{replica}.log"
                self.children.start(self.launch.spec(replica, port, place, log))
            for replica in self.ports:
                await self._healthy(replica, began + READY_S)
        except BaseException:
            self.children.stop()
            raise
        self.start_s = time.monotonic() - began
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.children.stop()

    def url(self, replica: str) -> str:
        """The engine's address."""
        return f"http://127.0.0.1:{self.ports[replica]}"

    async def _healthy(self, replica: str, deadline_s: float) -> None:
        engine, name = VllmHttpEngine(self.url(replica)), f"engine-{replica}"
        try:
            while not await engine.healthy():
                self.children.ensure_running([name])
                if time.monotonic() > deadline_s:
                    raise ChildError(
                        f"{name} was not healthy within {READY_S:g} s; the end of its log:\n"
                        f"{self.children.tail(name)}"
                    )
                await asyncio.sleep(LOOK_EVERY_S)
            self.version = self.version or await engine.version()
        finally:
            await engine.close()
