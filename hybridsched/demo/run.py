"""The demo: the same trace with online alone, then together with a batch, on processes of its own.

Each pass has its own pool and its own engine processes, so that both begin alike: an engine of the first pass
would bring warm prefix caches and counters into the second. They cost about a second to start.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.batches.layout import BatchFiles
from hybridsched.demo.collect import requests_of
from hybridsched.demo.options import DemoOptions, Plan, make_plan
from hybridsched.demo.passes import Pass
from hybridsched.demo.report_folder import held
from hybridsched.demo.slurm_pass import SlurmPass
from hybridsched.demo.slurm_testbed import Testbed
from hybridsched.demo.stack import Stack
from hybridsched.demo.supervisor import ChildError
from hybridsched.demo.tidy import remove_pools
from hybridsched.demo.uninterrupted import compare, interrupted_ids
from hybridsched.demo.vllm import VllmEngines
from hybridsched.engines.protocol import EngineError
from hybridsched.ports import KeptPorts
from hybridsched.report.record import Interrupted, RunRecord
from hybridsched.report.verify import verify_batch
from hybridsched.report.write import write_report
from hybridsched.store.connection import EmbeddedValkey, async_client, store_errors


async def run_demo(
    options: DemoOptions, *, live: bool = True, tell: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Run it all and write the report folder. Returns the summary. `tell` hears of what takes long.

    Raises:
        DemoUsageError: trace, batch, policy or report folder cannot be used.
        StoreError: Redis cannot be reached or refuses.
        ChildError: a process does not come up, or dies again and again; with `slurm`: Slurm does not come up.
    """
    with held(options.report.absolute()):
        return await _run(options, live=live, tell=tell)


async def _run(options: DemoOptions, *, live: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    began = time.monotonic()
    if options.redis_url is not None:
        await _ping(options.redis_url)  # before anything is written that would have to be taken back
    plan = make_plan(options)
    folder = options.report.absolute()
    name = f"demo-{secrets.token_hex(4)}"
    async with contextlib.AsyncExitStack() as around:
        url = around.enter_context(_redis(options.redis_url, folder))
        around.enter_context(_tidy(options, [name, f"{name}-alone"]))
        testbed = around.enter_context(_slurm(options, folder))
        await _ping(url)
        real = None
        if plan.launch is not None:
            names = [f"r{number}" for number in range(options.gpus)]
            ports = around.enter_context(KeptPorts([0] * len(names)))
            engines = VllmEngines(plan.launch, dict(zip(names, ports.numbers, strict=True)), folder)
            count = f"{len(names)} vLLM engine{'s' if len(names) > 1 else ''}"
            tell(f"starting {count}, which takes a while; logs: {folder / 'logs'}")
            real = await around.enter_async_context(engines)
            passes = "twice, the second time with the batch" if options.baseline else "with the batch"
            tell(f"up after {real.start_s:.0f} s; {options.duration_s:g} s of trace, {passes}")
        baseline = None
        if options.baseline:
            alone = msgspec.structs.replace(plan, policy=plan.baseline_policy)
            with _stack("baseline", url, f"{name}-alone", plan, folder, testbed, real) as stack:
                baseline = (await _pass(stack, alone, testbed, real, offline=False, live=live).run()).record
        with _stack("together", url, name, plan, folder, testbed, real) as stack:
            together = await _pass(stack, plan, testbed, real, offline=True, live=live).run()
        if real is not None:
            tell("running the interrupted lines once more, without a pause")
        interrupted = None if real is None else await _interrupted(real, stack, together.files)
    if together.files is None:
        raise ChildError("the batch was not started")
    record = RunRecord(
        speed=options.speed,
        gpus=options.gpus,
        duration_s=options.duration_s,
        trace=plan.trace.name,
        policy=together.policy,
        batch=msgspec.structs.replace(verify_batch(together.files), worker_recomputed=together.recomputed),
        together=together.record,
        baseline=baseline,
        wall_s=time.monotonic() - began,
        slurm=together.slurm,
        engine="" if real is None else f"vLLM {real.version}".strip(),
        engines_start_s=None if real is None else round(real.start_s, 1),
        interrupted=interrupted,
    )
    return write_report(record, folder)


@contextlib.contextmanager
def _redis(url: str | None, folder: Path) -> Iterator[str]:
    """The given server, or a Valkey of the demo's own that dies with it."""
    if url is not None:
        yield url
        return
    with EmbeddedValkey(folder / "valkey", die_with_starter=True) as server:
        yield server.url


@contextlib.contextmanager
def _tidy(options: DemoOptions, pools: list[str]) -> Iterator[None]:
    """A Redis of the user's is left without a key of this run, however it ends."""
    try:
        yield
    finally:
        if options.redis_url is not None and not options.keep_keys:
            remove_pools(options.redis_url, pools)


def _slurm(options: DemoOptions, folder: Path) -> contextlib.AbstractContextManager[Testbed | None]:
    """A Slurm of the demo's own, if one was asked for."""
    if not options.slurm:
        return contextlib.nullcontext()
    return Testbed(gpus=options.gpus, state=options.slurm_state, logs=folder / "logs" / "slurm")


async def _ping(url: str) -> None:
    client = async_client(url)
    try:
        with store_errors(url, "starting the demo"):
            await client.ping()
    finally:
        await client.aclose()


async def _interrupted(real: VllmEngines, stack: Stack, files: BatchFiles | None) -> Interrupted | None:
    """Interrupted lines, run again on the same engines with nothing beside them."""
    if files is None:
        return None
    rows = [row for name in stack.ports for row in requests_of(stack, name)[0]]
    ids = interrupted_ids(sorted(rows, key=lambda row: row.e))
    try:
        return await compare(files, ids, [real.url(name) for name in stack.ports])
    except EngineError as error:
        raise ChildError(f"interrupted lines could not be run again: {error}") from error


def _pass(
    stack: Stack, plan: Plan, testbed: Testbed | None, real: VllmEngines | None, *, offline: bool, live: bool
) -> Pass:
    if testbed is None:
        engines = None if real is None else real.children
        return Pass(stack, plan, offline=offline, live=live, engines=engines)
    return SlurmPass(stack, plan, testbed, offline=offline, live=live)


@contextlib.contextmanager
def _stack(
    label: str,
    url: str,
    pool: str,
    plan: Plan,
    folder: Path,
    testbed: Testbed | None,
    real: VllmEngines | None,
) -> Iterator[Stack]:
    """On Slurm the replicas are known when their jobs run; real engines run already. The ports of the others
    are kept until the end of the pass."""
    names = [f"r{number}" for number in range(plan.options.gpus)] if testbed is None and real is None else []
    with KeptPorts([0] * len(names)) as ports:
        yield Stack(
            label=label,
            redis_url=url,
            pool=pool,
            model=plan.model,
            ports=dict(zip(names, ports.numbers, strict=True)) if real is None else dict(real.ports),
            speed=plan.options.speed,
            folder=folder,
            max_model_len=plan.max_model_len,
            real=real is not None,
        )
