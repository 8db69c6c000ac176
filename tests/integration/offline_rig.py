"""An offline worker's surroundings: a simulated engine, a batch on disk, and a gate in the test's hand."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from redis.asyncio import Redis

from hybridsched.batches.layout import local_batch_id, plan_files
from hybridsched.batches.work import WorkFolder
from hybridsched.core.policy import EnginePolicy, OfflinePolicy, PolicyKind, PoolPolicy
from hybridsched.core.reasons import Reason
from hybridsched.core.values import Budget, Gate, GateState
from hybridsched.store.batches import BatchStore
from hybridsched.store.connection import async_client
from hybridsched.store.gates import GateStore, Outcome
from hybridsched.store.keys import Keys
from hybridsched.store.policy import PolicyStore
from hybridsched.workers.offline_file import run_file
from hybridsched.workers.offline_submit import submit_file

MODEL = "tiny"
POOL = "off"
LANE = "r0"
LEADER = "test-leader"

POLICY = PoolPolicy(
    name="test",
    kind=PolicyKind.IDLE_WINDOW,
    offline=OfflinePolicy(
        chunk_first_lines=6, chunk_first_tokens=6000, chunk_target_ms=2000.0, chunks_ahead=3
    ),
    engine=EnginePolicy(max_num_seqs=64),
)
BUDGET = Budget(max_inflight=24, chunk_tokens=50_000, slice_tokens=256)


@contextmanager
def simulated_engine(
    folder: Path, *flags: str, speed: float = 20.0, port: int = 0, model: str = MODEL
) -> Iterator[str]:
    """A simulated vLLM in a process of its own; yields its URL."""
    process = subprocess.Popen(
        [
            *[sys.executable, "-m", "hybridsched.engines.simulated", "--port", str(port)],
            *["--served-model-name", model, "--speed", str(speed), "--kv-tokens", "100000"],
            *["--max-num-seqs", "64", "--max-model-len", "4096", "--enable-prompt-tokens-details"],
            *["--iteration-log", str(folder / "iterations.jsonl"), *flags],
        ],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        started = json.loads(process.stdout.readline())
        assert started["ready"]
        yield started["url"]
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def write_batch(path: Path, lines: int, *, seed: int = 1) -> None:
    """A batch of token-id completions, texts and chats of many lengths, with a bad line among them."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for i in range(lines):
            most = rng.randint(5, 120)
            body: dict[str, Any] = {"model": MODEL, "max_tokens": most, "temperature": 0, "ignore_eos": True}
            url = "/v1/completions"
            if i % 5 == 3:
                url = "/v1/chat/completions"
                body["messages"] = [{"role": "user", "content": f"word {i} " * rng.randint(2, 200)}]
            elif i % 5 == 4:
                body["prompt"] = f"text {i} " * rng.randint(2, 300)
            else:
                body["prompt"] = [rng.randrange(30_000) for _ in range(rng.randint(10, 1500))]
            if i == 7:
                body["max_tokens"] = -1
            if i == 11:
                body |= {"temperature": 0.7, "seed": 1}  # cannot be continued exactly: it runs whole
            line = {"custom_id": f"id-{i}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")


def answers(output: Path, errors: Path) -> dict[str, Any]:
    """custom_id -> what the user got, without what differs from run to run. No id may come twice."""
    found: dict[str, Any] = {}
    for path in (output, errors):
        for text in path.read_text().splitlines():
            record = json.loads(text)
            assert record["custom_id"] not in found, f"{record['custom_id']} comes twice"
            if record["error"]:
                found[record["custom_id"]] = record["error"]["code"]
                continue
            body = record["response"]["body"]
            usage = {k: v for k, v in body["usage"].items() if k.endswith("_tokens")}
            choices = [
                (c.get("text") or c["message"]["content"], c["finish_reason"], c["index"])
                for c in body["choices"]
            ]
            found[record["custom_id"]] = (body["object"], choices, usage)
    return found


def results(source: Path) -> dict[str, Any]:
    """What the user got for a batch, by the name of its input."""
    stem = source.name.removesuffix(".jsonl")
    return answers(source.with_name(f"{stem}.output.jsonl"), source.with_name(f"{stem}.errors.jsonl"))


class Door:
    """The gate of the lane, published as the policy worker would."""

    def __init__(self, client: Redis, lane: str = LANE) -> None:
        self._client = client
        self._lane = lane
        self._keys = Keys(POOL)
        self.gates = GateStore(client, POOL)
        self.want: GateState = GateState.CLOSED
        self.grace_ms = 0.0

    async def set(self, state: GateState) -> None:
        self.want = state
        await self._publish()

    async def _publish(self) -> None:
        await self._client.set(self._keys.leader, LEADER)
        epoch = (await self.gates.read(self._lane)).epoch
        is_open = self.want is GateState.OPEN
        gate = Gate(
            lane=self._lane,
            state=self.want,
            reason=Reason.IDLE if is_open else Reason.ONLINE_ACTIVE,
            grace_ms=self.grace_ms,
            **({"budget": BUDGET} if is_open else {}),
        )
        outcome = await self.gates.publish(gate, leader_token=LEADER, expected_epoch=epoch, lease_ms=1500)
        assert outcome in (Outcome.CHANGED, Outcome.RENEWED)

    async def renew(self) -> None:
        while True:
            await self._publish()
            await asyncio.sleep(0.2)


@asynccontextmanager
async def door(url: str, *, lane: str = LANE) -> AsyncIterator[Door]:
    """A gate that is renewed until the end."""
    client = async_client(url)
    made = Door(client, lane)
    renewing = asyncio.create_task(made.renew())
    try:
        yield made
    finally:
        renewing.cancel()
        with suppress(asyncio.CancelledError):
            await renewing
        await client.aclose()


async def publish_policy(url: str, policy: PoolPolicy = POLICY) -> None:
    client = async_client(url)
    await PolicyStore(client, POOL).set(policy)
    await client.aclose()


def submit(client: redis.Redis, source: Path) -> tuple[BatchStore, str]:
    """Submit a batch; returns the store and its id."""
    store = BatchStore(client, POOL)
    return store, submit_file(store, source, model=MODEL).batch.id


def worker_process(
    url: str, engine_url: str, log: Path, *flags: str, lane: str = LANE, model: str = MODEL
) -> subprocess.Popen[bytes]:
    """An offline worker in a process of its own."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [
                *[sys.executable, "-m", "hybridsched", "worker", "offline", "--redis", url, "--pool", POOL],
                *["--replica", lane, "--model", model, "--engine", engine_url, "--speed", "20", *flags],
            ],
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONWARNINGS": "default"},
        )


async def undisturbed(folder: Path, source: Path, engine_url: str) -> dict[str, Any]:
    """What the batch gives when nothing interrupts it."""
    output = folder / "plain.jsonl"
    work = WorkFolder.create(plan_files(source, local_batch_id(output), output=output))
    progress = await run_file(work, [engine_url])
    assert progress.at_end
    work.remove()
    return answers(output, folder / "plain.errors.jsonl")
