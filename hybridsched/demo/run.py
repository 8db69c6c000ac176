"""The demo: the same trace with online alone, then together with a batch, on processes of its own.

Each pass has its own pool and its own engine processes, so that both begin alike: an engine of the first pass
would bring warm prefix caches and counters into the second. They cost about a second to start.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hybridsched.demo import collect
from hybridsched.demo.options import DemoOptions, Plan, make_plan
from hybridsched.demo.passes import Pass
from hybridsched.demo.slurm_pass import SlurmPass
from hybridsched.demo.slurm_testbed import Testbed
from hybridsched.demo.stack import Stack, free_ports
from hybridsched.demo.supervisor import ChildError
from hybridsched.report.record import RunRecord
from hybridsched.report.verify import verify_batch
from hybridsched.store.connection import EmbeddedValkey, async_client, store_errors


async def run_demo(options: DemoOptions, *, live: bool = True) -> dict[str, Any]:
    """Run it all and write the report folder. Returns the summary.

    Raises:
        DemoUsageError: trace, batch, policy or report folder cannot be used.
        StoreError: Redis cannot be reached or refuses.
        ChildError: a process does not come up, or dies again and again; with `slurm`: Slurm does not come up.
    """
    began = time.monotonic()
    plan = make_plan(options)
    folder = options.report.absolute()
    with _redis(options.redis_url, folder) as url, _slurm(options, folder) as testbed:
        await _ping(url)
        name = f"demo-{secrets.token_hex(4)}"
        baseline = None
        if options.baseline:
            alone = msgspec.structs.replace(plan, policy=plan.baseline_policy)
            stack = _stack("baseline", url, f"{name}-alone", plan, folder, testbed)
            baseline = (await _pass(stack, alone, testbed, offline=False, live=live).run()).record
        stack = _stack("together", url, name, plan, folder, testbed)
        together = await _pass(stack, plan, testbed, offline=True, live=live).run()
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
    )
    return collect.write_report(record, folder)


@contextlib.contextmanager
def _redis(url: str | None, folder: Path) -> Iterator[str]:
    """The given server, or a Valkey of the demo's own that dies with it."""
    if url is not None:
        yield url
        return
    with EmbeddedValkey(folder / "valkey", die_with_starter=True) as server:
        yield server.url


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


def _pass(stack: Stack, plan: Plan, testbed: Testbed | None, *, offline: bool, live: bool) -> Pass:
    if testbed is None:
        return Pass(stack, plan, offline=offline, live=live)
    return SlurmPass(stack, plan, testbed, offline=offline, live=live)


def _stack(label: str, url: str, pool: str, plan: Plan, folder: Path, testbed: Testbed | None) -> Stack:
    """On Slurm the replicas are known when their jobs run."""
    names = [f"r{number}" for number in range(plan.options.gpus)] if testbed is None else []
    return Stack(
        label=label,
        redis_url=url,
        pool=pool,
        model=plan.model,
        ports=dict(zip(names, free_ports(len(names)), strict=True)),
        speed=plan.options.speed,
        folder=folder,
        max_model_len=plan.max_model_len,
    )
