"""The iteration log: one JSON line for each engine step, for reports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

from hybridsched.engines.simulated.iteration import Iteration, Outcome
from hybridsched.engines.simulated.scheduler import Scheduler

FLUSH_EVERY_S = 0.2


class IterationLog:
    """Appends lines to a file, buffered; `flush` writes what has gathered."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab")
        self._lines: list[str] = []

    def add(
        self, it: Iteration, end: float, out: Outcome, scheduler: Scheduler, waiting: tuple[int, int]
    ) -> None:
        """Note one step. `waiting` are the online and offline sequences that waited when it was planned.

        `late` in the line: wall seconds by which this process was behind the engine's clock.
        """
        offline = sum(1 for seq in out.emitted if seq.offline)
        self._lines.append(
            f'{{"s":{it.start:.6f},"e":{end:.6f},"on":{it.online},"off":{it.offline},'
            f'"pon":{it.prefill_online},"poff":{it.prefill_offline},"won":{waiting[0]},"woff":{waiting[1]},'
            f'"gon":{len(out.emitted) - offline},"goff":{offline},"kv":{scheduler.kv.use:.4f},'
            f'"late":{max(0.0, time.monotonic() - end):.6f}}}\n'
        )

    def flush(self) -> None:
        if self._lines:
            self._file.write("".join(self._lines).encode())
            self._file.flush()
            self._lines.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()
