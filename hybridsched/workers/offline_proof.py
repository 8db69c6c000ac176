"""Proof that an engine works: after a failure one small request must be answered before lines are risked.

A health check says only that a process lives. An engine that fails every request and answers its health check
would otherwise use up the few attempts of line after line; so a line's attempt counts only after the engine
has answered something since the line's last one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from hybridsched.engines.protocol import EngineError
from hybridsched.log import get_logger
from hybridsched.workers import offline_plan as plan
from hybridsched.workers.offline_run import LineResult, LineRun

_log = get_logger("offline")

PROOF_TOKENS = 64
"""What a proof may take of the engine's KV cache at most, for the admission."""

_SAY_EVERY_S = 30.0


class Proof:
    """The doubt about one engine and the requests that end it. A `LineSink` of its own requests."""

    def __init__(
        self,
        *,
        ready: Callable[[], None],
        back_off_s: tuple[float, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ready` is called on the event loop when the next proof may be tried. `back_off_s`: the first and
        the longest wait between two."""
        self._ready = ready
        self._back_off_s = back_off_s
        self._clock = clock
        self._wait_s = back_off_s[0]
        self._timer: asyncio.TimerHandle | None = None
        self._out: LineRun | None = None
        self._error: EngineError | None = None
        self._like: tuple[str, Any] = ("", None)
        self._count = 0
        self._failed = 0
        self._since_s = 0.0
        self._said_s = float("-inf")

    @property
    def wanted(self) -> bool:
        """Whether no line may be sent before a proof."""
        return self._error is not None

    @property
    def problem(self) -> str:
        """Why lines wait, once a proof has failed as well; else empty."""
        if self._error is None or not self._failed:
            return ""
        return f"{self._error.code}: {self._error}"

    @property
    def doubted_s(self) -> float:
        """For how long proofs have failed; 0 while none has."""
        return self._clock() - self._since_s if self._error is not None and self._failed else 0.0

    def owns(self, run: LineRun) -> bool:
        """Whether a run is a proof rather than a line."""
        return run.sink is self

    def doubt(self, run: LineRun, error: EngineError, model: str | None) -> None:
        """A request failed in a way that may be the engine's fault: ask for a proof, or for another one."""
        if self._error is None:
            self._failed, self._wait_s, self._since_s = 0, self._back_off_s[0], self._clock()
        self._error = error
        if not self.owns(run):
            self._like = (run.path, model or run.body.get("model"))
            return
        self._failed += 1
        self._out = None
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._again)
        self._wait_s = min(self._wait_s * 2, self._back_off_s[1])
        if self._clock() - self._said_s > _SAY_EVERY_S:
            self._said_s = self._clock()
            _log.warning(
                "The engine answers its health check and fails a small request as well; its lines wait and "
                "none of their attempts is used up. See the engine's own log.",
                key="engine_unproven",
                code=error.code,
                error=str(error),
            )

    def next(self) -> LineRun | None:
        """The request to send now; None while one is out or it is too early."""
        if self._error is None or self._out is not None or self._timer is not None:
            return None
        self._count += 1
        path, model = self._like
        body: dict[str, Any] = {} if model is None else {"model": model}
        if path == plan.COMPLETIONS:
            body |= {"prompt": [1], "max_tokens": 1}
        elif path == plan.CHAT:
            body |= {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        else:
            body |= {"input": "a"}
        self._out = LineRun(
            batch="proof",
            number=self._count,
            custom_id="",
            path=path,
            body=body,
            sink=self,
            order=(-1, self._count),
        )
        return self._out

    def returned(self) -> None:
        """The proof was ended by a pause: it says nothing, and is sent again when lines may run."""
        self._out = None

    def finished(self, run: LineRun, result: LineResult) -> None:
        """The engine has answered (`LineSink`); a refusal of our small request is an answer too."""
        if self._failed:
            _log.info(
                "The engine answers requests again; its lines go on.",
                key="engine_proven",
                after_s=round(self.doubted_s, 1),
            )
        self._out = self._error = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        self._timer = None
        self._ready()
