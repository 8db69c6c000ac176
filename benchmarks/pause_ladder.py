"""What each rung of the pause ladder costs on the real vLLM: time to quiet, work lost, beside one iteration.

    make vllm-setup && .venv/bin/python -m benchmarks.pause_ladder [--repeats N] [--json]

Starts one real engine (CPU build, a tiny model, made on the spot) and runs offline lines on it through
the offline worker's own executor: prompts of 200 token ids, 400 output tokens, four at a time. Once they
run, one rung is taken:

- boundary: nothing more is sent, and what is in flight comes to its own end;
- abort: the requests are ended by /abort_requests and keep their tokens (lanes that share an engine);
- pause: /pause?mode=keep as vLLM does it by itself, which drops the cache; and the pause that our
  adapter uses, which keeps it (lanes that have the engine to themselves);
- sleep 1: refused where the platform frees no memory by it, as here;
- requeue: abort, then SIGTERM to the engine until its process is gone; it comes back by a start.

Time to quiet runs from the decision to the moment at which the rung says that it is done. Lost tokens
are those that the engine computes a second time for the same lines (prompt and output), counted by the
engine's own metrics against a run that nothing interrupts. The yardstick is one iteration of the same
run: no scheduler above an engine can stop it within one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from hybridsched.core.values import Budget
from hybridsched.engines.protocol import EngineError
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.workers.offline_lines import LineExecutor
from hybridsched.workers.offline_run import LineResult, LineRun
from tests.vllm.engines import MODEL, RealVllm, make_model, vllm_python

LINES, PROMPT, OUTPUT = 4, 200, 400
BUDGET = Budget(max_inflight=LINES, chunk_tokens=1_000_000, slice_tokens=0)
FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "16", "--enable-prompt-tokens-details")
RUNNING_TOKENS = 200
"""Output tokens of all lines after which the rung is taken."""


class Sink:
    def __init__(self) -> None:
        self.results: list[LineResult] = []

    def finished(self, run: LineRun, result: LineResult) -> None:
        self.results.append(result)


class Bench:
    """One engine and lines that never come twice, so that no cache of an earlier run helps."""

    def __init__(self, engine: VllmHttpEngine) -> None:
        self.engine = engine
        self.held: float | None = None
        """Output tokens that the engine had made when it was paused so that it dropped its cache."""
        self._number = 0

    async def lines(self) -> tuple[LineExecutor, Sink]:
        """Fresh lines in a fresh executor, of which `RUNNING_TOKENS` have been produced."""
        sink = Sink()
        executor = LineExecutor(self.engine, admits=lambda _tokens, running, *_: running < LINES)
        executor.info = await self.engine.info()
        runs = []
        for _ in range(LINES):
            self._number += 1
            n = self._number
            prompt = [20 + (n * 7919 + i * 31 + i * i * 17) % 480 for i in range(PROMPT)]
            body = {
                "model": MODEL, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True,
            }  # fmt: skip
            runs.append(
                LineRun(
                    batch="b",
                    number=n,
                    custom_id=str(n),
                    path="/v1/completions",
                    body=body,
                    sink=sink,
                    order=(n,),
                )
            )
        made = await self.made()
        executor.submit(runs)
        executor.admit(BUDGET)
        while await self.made() < made + RUNNING_TOKENS:
            await asyncio.sleep(0.002)
        return executor, sink

    async def made(self) -> float:
        return (await self.engine.stats()).generation_tokens_total or 0.0

    async def computed(self) -> float:
        """Prompt and output tokens that the engine has computed, cached ones left out."""
        stats = await self.engine.stats()
        prompt, made = stats.prompt_tokens_total or 0.0, stats.generation_tokens_total or 0.0
        return prompt + made - (stats.prefix_hits_total or 0.0)

    async def finish(self, executor: LineExecutor, sink: Sink) -> None:
        executor.admit(BUDGET)
        while len(sink.results) < LINES:
            await asyncio.sleep(0.005)
        await executor.close()
        wrong = [result.error_message for result in sink.results if result.body is None]
        if wrong:
            raise SystemExit(f"a line failed: {wrong[0]}")

    async def iteration_s(self) -> float:
        """Seconds of one iteration while the lines run, from the engine's own count."""
        executor, sink = await self.lines()
        before, began = await self.engine.stats(), time.perf_counter()
        await asyncio.sleep(0.4)
        after, ended = await self.engine.stats(), time.perf_counter()
        await self.finish(executor, sink)
        return (ended - began) / max(1.0, (after.iterations_total or 0) - (before.iterations_total or 0))


async def boundary(bench: Bench, executor: LineExecutor) -> float:
    executor.stop_admitting()
    began = time.perf_counter()
    while executor.inflight:
        await asyncio.sleep(0.001)
    return time.perf_counter() - began


async def abort(bench: Bench, executor: LineExecutor) -> float:
    began = time.perf_counter()
    await executor.end_inflight()
    return time.perf_counter() - began


async def pause_of_vllm(bench: Bench, executor: LineExecutor) -> float:
    began = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{bench.engine.url}/pause?mode=keep") as response:
            await response.read()
        took = time.perf_counter() - began
        bench.held = await bench.made()
        async with session.post(f"{bench.engine.url}/resume") as response:
            await response.read()
    return took


async def pause_of_ours(bench: Bench, executor: LineExecutor) -> float:
    began = time.perf_counter()
    await bench.engine.pause()
    took = time.perf_counter() - began
    await bench.engine.resume()
    return took


RUNGS = {
    "boundary": boundary,
    "abort, tokens kept": abort,
    "pause?mode=keep": pause_of_vllm,
    "pause, cache kept": pause_of_ours,
}


async def measure(bench: Bench, repeats: int) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    needed = float(LINES * (PROMPT + OUTPUT))
    for name, rung in RUNGS.items():
        times, lost, preempted = [], [], []
        for _ in range(repeats):
            before, counted = await bench.computed(), await bench.engine.stats()
            bench.held = None
            executor, sink = await bench.lines()
            times.append(await rung(bench, executor))
            await bench.finish(executor, sink)
            after = await bench.engine.stats()
            preempted.append((after.preemptions_total or 0) - (counted.preemptions_total or 0))
            # vLLM does not count what a preempted request computes again: all that it had until then.
            again = 0.0
            if bench.held is not None and preempted[-1]:
                again = LINES * PROMPT + bench.held - (counted.generation_tokens_total or 0)
            lost.append(await bench.computed() - before - needed + again)
        out[name] = {
            "quiet_ms": {"p50": statistics.median(times) * 1e3, "max": max(times) * 1e3},
            "lost_tokens": statistics.mean(lost),
            "preempted": statistics.mean(preempted),
        }
    return out


async def refused_sleep(bench: Bench) -> str:
    try:
        await bench.engine.sleep(1, timeout_s=60)
    except EngineError as error:
        return str(error)
    await bench.engine.wake(timeout_s=60)
    return ""


async def requeue(bench: Bench, server: RealVllm) -> dict[str, float]:
    executor, _ = await bench.lines()
    began = time.perf_counter()
    await executor.end_inflight()
    await executor.close()
    await bench.engine.close()
    server.signal(signal.SIGTERM)
    while server.alive:
        await asyncio.sleep(0.01)
    return {"gone_ms": (time.perf_counter() - began) * 1e3, "start_s": server.start_s}


async def run(server: RealVllm, repeats: int) -> dict[str, Any]:
    bench = Bench(VllmHttpEngine(server.url))
    iteration_s = await bench.iteration_s()
    rungs = await measure(bench, repeats)
    sleep = await refused_sleep(bench)
    return {
        "iteration_ms": iteration_s * 1e3,
        "rungs": rungs,
        "sleep_refused": sleep,
        "requeue": await requeue(bench, server),
    }


def show(found: dict[str, Any], repeats: int) -> None:
    iteration_ms = found["iteration_ms"]
    print(f"One iteration with {LINES} lines: {iteration_ms:.1f} ms. Each rung {repeats} times.\n")
    print(f"{'rung':<20} {'quiet p50':>12} {'largest':>12} {'iterations':>11} {'lost':>6} {'preempted':>10}")
    for name, row in found["rungs"].items():
        p50, largest = row["quiet_ms"]["p50"], row["quiet_ms"]["max"]
        print(
            f"{name:<20} {p50:>9.1f} ms {largest:>9.1f} ms {p50 / iteration_ms:>11.1f} "
            f"{row['lost_tokens']:>6.1f} {row['preempted']:>10.1f}"
        )
    gone = found["requeue"]
    print(f"requeue: {gone['gone_ms']:.0f} ms until the engine is gone, {gone['start_s']:.0f} s to come back")
    print(f"sleep, level 1: {found['sleep_refused'] or 'done and woken'}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Time to quiet and work lost of each rung, on the real vLLM."
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    python = vllm_python()
    if python is None:
        sys.stderr.write("error: the real vLLM is not there; run: make vllm-setup\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        server = RealVllm(python, make_model(python, Path(folder) / "model", "grouped-query"), *FLAGS)
        try:
            found = asyncio.run(run(server, given.repeats))
        finally:
            server.stop()
    if given.json:
        print(json.dumps(found))
    else:
        show(found, given.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
