"""The online load of a run, in a process of its own: an open loop, each request at the time the trace says.

`python -m hybridsched.demo.load` prepares every prompt first and creates the file of results, which says that
it is ready; it begins at the time that the file named by `--begin` holds, once that file is there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from hybridsched import log
from hybridsched.client import AsyncClient, Cancelled, Expired, Failed, RequestError
from hybridsched.demo.trace import prompt_json
from hybridsched.report.record import OnlineRow
from hybridsched.store.connection import StoreError
from hybridsched.traces import TraceRow, cut, read_trace

PATH = "/v1/completions"
_LOOK_EVERY_S = 0.01
_log = log.get_logger("load")


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, where, and how fast."""

    redis_url: str
    pool: str
    model: str
    speed: float
    timeout_s: float
    """Deadline of a request, wall seconds."""
    salt: str
    """Makes the prompts of one run differ from those of another."""


class _Load:
    def __init__(self, options: LoadOptions, rows: Sequence[TraceRow], out: IO[bytes]) -> None:
        self._options = options
        self._rows = rows
        self._out = out
        self._encode = msgspec.json.Encoder().encode
        self._bodies: list[dict[str, Any]] = [self._body(index, row) for index, row in enumerate(rows)]
        self._begin = 0.0

    def _body(self, index: int, row: TraceRow) -> dict[str, Any]:
        return {
            "model": self._options.model,
            "prompt": json.loads(prompt_json(self._options.salt, index, row.prompt_tokens)),
            "max_tokens": row.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }

    async def run(self, begin: float) -> None:
        """Send every request at its time and wait for all answers. `begin`: on the monotonic clock."""
        self._begin = begin
        async with AsyncClient(self._options.redis_url, self._options.pool) as client:
            await client.cancel("connects-before-the-first-request-is-due")
            async with asyncio.TaskGroup() as sent:
                for index, row in enumerate(self._rows):
                    await asyncio.sleep(max(0.0, begin + self._due(row) - time.monotonic()))
                    sent.create_task(self._one(client, index, row))

    def _due(self, row: TraceRow) -> float:
        return row.arrival_s / self._options.speed

    async def _one(self, client: AsyncClient, index: int, row: TraceRow) -> None:
        body, self._bodies[index] = self._bodies[index], {}
        name = f"{self._options.salt}-{index}"
        sent = time.monotonic()
        first: float | None = None
        last: float | None = None
        tokens = 0
        status, code = "ok", ""
        try:
            async with client.stream(
                body, path=PATH, timeout_s=self._options.timeout_s, request_id=name
            ) as chunks:
                async for chunk in chunks:
                    if chunk.get("choices"):
                        last = time.monotonic()
                        first = last if first is None else first
            tokens = int((chunks.usage or {}).get("completion_tokens") or 0)
        except RequestError as error:
            status, code = _outcome(error)
        except StoreError as error:
            status, code = "failed", type(error).__name__
        done = OnlineRow(
            index=index,
            id=name,
            scheduled_s=self._due(row),
            sent_s=sent - self._begin,
            first_s=None if first is None else first - self._begin,
            last_s=None if last is None else last - self._begin,
            end_s=time.monotonic() - self._begin,
            prompt_tokens=row.prompt_tokens,
            max_tokens=row.output_tokens,
            tokens=tokens,
            status=status,
            code=code,
        )
        self._out.write(self._encode(done) + b"\n")


def _outcome(error: RequestError) -> tuple[str, str]:
    if isinstance(error, Expired):
        return "expired", "expired"
    if isinstance(error, Cancelled):
        return "cancelled", "cancelled"
    return "failed", error.code if isinstance(error, Failed) else type(error).__name__


async def replay(options: LoadOptions, rows: Sequence[TraceRow], *, out: Path, begin: Path) -> None:
    """Prepare, say so by creating `out`, wait for `begin`, run. SIGTERM ends it with the rows so far."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb", buffering=0) as file:
        load = _Load(options, rows, file)
        gc.collect()
        gc.freeze()  # the prompts are millions of objects: a collection over them would delay a request
        while not begin.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(_LOOK_EVERY_S)
        await load.run(float(begin.read_text(encoding="ascii")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hybridsched.demo.load", description=__doc__)
    for name, kind in (
        ("--redis", str),
        ("--pool", str),
        ("--model", str),
        ("--trace", Path),
        ("--start", float),
        ("--duration", float),
        ("--speed", float),
        ("--timeout", float),
        ("--salt", str),
        ("--out", Path),
        ("--begin", Path),
    ):
        parser.add_argument(name, type=kind, required=True)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process. Exit status 0: every request ended, whatever became of it."""
    args = _parser().parse_args(argv)
    log.configure()
    rows = cut(read_trace(args.trace), args.start, args.duration)
    options = LoadOptions(
        redis_url=args.redis,
        pool=args.pool,
        model=args.model,
        speed=args.speed,
        timeout_s=args.timeout,
        salt=args.salt,
    )
    try:
        asyncio.run(replay(options, rows, out=args.out, begin=args.begin))
    except asyncio.CancelledError:
        _log.warning("The load was stopped before its end; the rows so far are written.", key="load_stopped")
        return 1
    except StoreError as error:
        _log.error(str(error), key="load_failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
