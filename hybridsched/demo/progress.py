"""The live line at a terminal: time, load, gates, and what was harvested so far. Silent in a pipe."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from hybridsched.core.values import GateState
from hybridsched.demo.batch import RunningBatch
from hybridsched.demo.stack import Stack
from hybridsched.report.record import Iteration, OnlineRow
from hybridsched.store.gates import GateReading


class Tail:
    """New whole lines of a growing JSON lines file."""

    def __init__(self, path: Path, kind: type[Any]) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._at = 0

    def read(self) -> list[Any]:
        """Rows since the last call; lines that are no whole JSON are passed over."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            block = file.read()
        whole = block[: block.rfind(b"\n") + 1]
        self._at += len(whole)
        rows = []
        for line in whole.splitlines():
            try:
                rows.append(self._decoder.decode(line))
            except msgspec.MsgspecError:
                continue  # torn by a kill; the report counts these
        return rows


class Progress:
    """What a pass has shown so far. `update` reads the new lines of its logs."""

    def __init__(self, stack: Stack, total: int, duration_s: float) -> None:
        self._stack = stack
        self._total = total
        self._duration_s = duration_s
        self._engines = {name: Tail(stack.iteration_log(name), Iteration) for name in stack.ports}
        self._rows = Tail(stack.online_log(), OnlineRow)
        self._recent: deque[float] = deque()
        self._online = dict.fromkeys(stack.ports, 0.0)
        self._offline = dict.fromkeys(stack.ports, 0.0)
        self._now: dict[str, str] = dict.fromkeys(stack.ports, "idle")
        self.ended = self.ok = 0

    def update(self, elapsed_s: float) -> None:
        """Take up what the logs have new. `elapsed_s`: wall seconds since the trace began."""
        for row in self._rows.read():
            self.ended += 1
            self.ok += row.status == "ok"
            self._recent.append(row.end_s)
        while self._recent and self._recent[0] < elapsed_s - 5:
            self._recent.popleft()
        for name, tail in self._engines.items():
            new = tail.read()
            self._now[name] = "idle"
            for it in new:
                online = it.on > 0 or it.won > 0
                into = self._online if online else self._offline
                into[name] += it.e - it.s
                self._now[name] = "online" if online else "offline"

    def harvested(self, elapsed_s: float) -> float | None:
        """Share of the idle engine seconds so far in which offline work ran; None where no engine logs it."""
        if self._stack.real:
            return None
        idle = elapsed_s * len(self._engines) - sum(self._online.values())
        return min(1.0, sum(self._offline.values()) / idle) if idle > 0 else None

    def table(self, elapsed_s: float, gates: Mapping[str, GateReading], batch: RunningBatch | None) -> Table:
        """The picture for a terminal."""
        speed = self._stack.speed
        table = Table(title=self._title(), title_justify="left", expand=False)
        for name in ("trace time", "online", "answers/s", *self._engines):
            table.add_column(name)
        share = min(elapsed_s * speed, self._duration_s)
        table.add_row(
            f"{share:.0f} / {self._duration_s:.0f} s",
            f"{self.ok} ok of {self.ended} / {self._total}",
            f"{len(self._recent) / 5 / speed:.1f}",
            *(self._cell(name, gates.get(name)) for name in self._engines),
        )
        if batch is not None:
            done = batch.progress()
            ratio = self.harvested(elapsed_s)
            table.caption = (
                f"offline: {done.done} of {done.batch.lines} lines; idle seconds harvested so far: "
                + ("–" if ratio is None else f"{ratio:.1%}")
            )
        return table

    def _title(self) -> str:
        return "online alone (baseline)" if self._stack.label == "baseline" else "online with offline work"

    def _cell(self, name: str, reading: GateReading | None) -> str:
        gate = reading.gate if reading is not None else None
        state = "closed" if gate is None else gate.state.value
        colour = "green" if gate is not None and gate.state is GateState.OPEN else "dim"
        now = "gate" if self._stack.real else self._now[name]
        return f"{now} [{colour}]({state})[/]"


def display(enabled: bool) -> Live | None:
    """The live display on stderr; None when that is no terminal or `enabled` is false."""
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        return None
    return Live(console=console, auto_refresh=False, transient=True)
