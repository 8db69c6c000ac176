"""The processes of one pass: engines, workers, policy worker and load. Started, and seen ready."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from redis.asyncio import Redis

from hybridsched.core.values import Value
from hybridsched.demo.supervisor import ChildError, ChildSpec, Supervisor
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.store.keys import Keys
from hybridsched.store.telemetry import TelemetryStore

READY_S = 60.0
"""How long everything may take to come up."""
LOOK_EVERY_S = 0.05
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
KV_TOKENS = 400_000
"""vLLM's defaults, and about the KV cache that an 80 GB A100 has beside an 8B model (128 KiB a token)."""
PROFILE = "a100-llama3-8b"


class Stack(Value, frozen=True, kw_only=True):
    """What the processes of a pass have in common."""

    label: str
    """baseline or together: names the files of the pass."""
    redis_url: str
    pool: str
    model: str
    ports: dict[str, int]
    """Port of each replica's engine on the loopback."""
    speed: float
    folder: Path
    max_model_len: int
    real: bool = False
    """The engines are real ones, which run already: what they do is seen by their requests."""

    def iteration_log(self, replica: str) -> Path:
        return self.folder / "engines" / f"{self.label}-{replica}.jsonl"

    def request_log(self, replica: str) -> Path:
        """What the workers of a replica sent to a real engine."""
        return self.folder / "engines" / f"{self.label}-{replica}.requests.jsonl"

    def online_log(self) -> Path:
        return self.folder / "load" / f"{self.label}.jsonl"

    def begin_file(self) -> Path:
        return self.folder / "load" / f"{self.label}.begin"

    def url(self, replica: str) -> str:
        return f"http://127.0.0.1:{self.ports[replica]}"

    def _spec(self, name: str, *argv: str, restart: bool = True) -> ChildSpec:
        log = self.folder / "logs" / f"{self.label}-{name}.log"
        return ChildSpec(name=name, argv=(sys.executable, "-m", *argv), log=log, restart=restart)

    def _worker(self, kind: str, *rest: str, name: str) -> ChildSpec:
        return self._spec(
            name,
            *("hybridsched", "worker", kind, "--redis", self.redis_url, "--pool", self.pool),
            *("--speed", str(self.speed)),
            *rest,
        )

    def engine(self, replica: str) -> ChildSpec:
        return self._spec(
            f"engine-{replica}",
            *("hybridsched.engines.simulated", "--host", "127.0.0.1", "--port", str(self.ports[replica])),
            *("--served-model-name", self.model, "--speed", str(self.speed)),
            *self.engine_options(replica),
        )

    def engine_options(self, replica: str) -> tuple[str, ...]:
        """What the simulated engine is like, and where it logs."""
        return (
            *("--profile", PROFILE, "--max-num-seqs", str(MAX_NUM_SEQS)),
            *("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)),
            *("--kv-tokens", str(max(KV_TOKENS, self.max_model_len + 16))),
            *("--max-model-len", str(self.max_model_len)),
            *("--iteration-log", str(self.iteration_log(replica)), "--enable-prompt-tokens-details"),
        )

    def online(self, replica: str) -> ChildSpec:
        return self._worker("online", *self._beside(replica), name=f"online-{replica}")

    def offline(self, replica: str) -> ChildSpec:
        return self._worker("offline", *self._beside(replica), name=f"offline-{replica}")

    def _beside(self, replica: str) -> tuple[str, ...]:
        """What both workers of a replica are told."""
        log = ("--request-log", str(self.request_log(replica))) if self.real else ()
        return ("--replica", replica, "--model", self.model, "--engine", self.url(replica), *log)

    def policy(self) -> ChildSpec:
        return self._worker("policy", name="policy")

    def load(self, *, trace: Path, start_s: float, duration_s: float, timeout_s: float) -> ChildSpec:
        return self._spec(
            "load",
            *("hybridsched.demo.load", "--redis", self.redis_url, "--pool", self.pool),
            *("--model", self.model, "--trace", str(trace), "--start", str(start_s)),
            *("--duration", str(duration_s), "--speed", str(self.speed), "--timeout", str(timeout_s)),
            *("--salt", self.label, "--out", str(self.online_log()), "--begin", str(self.begin_file())),
            restart=False,
        )


async def start_stack(
    children: Supervisor, stack: Stack, load: ChildSpec, client: Redis, *, offline: bool
) -> None:
    """Start everything at once and wait until it is ready: engines healthy, workers registered.

    Raises:
        ChildError: a process ended while it was starting, or something is not ready in time.
    """
    specs = [stack.policy(), load]
    for replica in stack.ports:
        specs += [] if stack.real else [stack.engine(replica)]
        specs.append(stack.online(replica))
        if offline:
            specs.append(stack.offline(replica))
    for spec in specs:
        children.start(spec)
    names = [spec.name for spec in specs]
    engines = {replica: VllmHttpEngine(stack.url(replica)) for replica in stack.ports}
    try:
        for replica, engine in () if stack.real else engines.items():
            await wait_ready(children, names, f"engine-{replica}", engine.healthy)
    finally:
        for engine in engines.values():
            await engine.close()
    telemetry = TelemetryStore(client, stack.pool)

    async def online_there() -> bool:
        known = (await telemetry.read_all()).replicas
        found = [known.get(replica) for replica in stack.ports]
        return all(one is not None and one.engine.healthy == 1.0 for one in found)

    async def offline_there() -> bool:
        known = (await telemetry.read_all()).lanes
        return all(known.get(replica) is not None for replica in stack.ports)

    async def policy_there() -> bool:
        return bool(await client.exists(Keys(stack.pool).policy_worker))

    async def load_there() -> bool:
        return stack.online_log().exists()

    first = next(iter(stack.ports))
    await wait_ready(children, names, f"online-{first}", online_there)
    if offline:
        await wait_ready(children, names, f"offline-{first}", offline_there)
    await wait_ready(children, names, "policy", policy_there)
    await wait_ready(children, names, "load", load_there)


async def wait_ready(
    children: Supervisor, names: list[str], name: str, ready: Callable[[], Awaitable[bool]]
) -> None:
    """Wait for `ready`, while all of `names` run; `name` is the child whose log says why it takes so long.

    Raises:
        ChildError: it is not ready in time, or one of `names` has ended.
    """
    deadline = time.monotonic() + READY_S
    while not await ready():
        children.ensure_running(names)
        if time.monotonic() > deadline:
            raise ChildError(
                f"{name} was not ready within {READY_S:g} s; the end of its log:\n{children.tail(name)}"
            )
        await asyncio.sleep(LOOK_EVERY_S)
