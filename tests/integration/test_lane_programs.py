"""Programs of a user's own on a lane: `from hybridsched import lane`, and `hybridsched lane run`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from hybridsched.core.values import GateState
from hybridsched.ports import KeptPorts
from hybridsched.store.connection import EmbeddedValkey, async_client
from hybridsched.store.keys import Keys
from hybridsched.store.tasks import end_tasks
from hybridsched.store.telemetry import ReplicaRecord, TelemetryStore
from tests.helpers import wait_until
from tests.integration.offline_rig import LANE, MODEL, POOL, Door, door

KEYS = Keys(POOL)

LOOP = """
import os, sys, time
from hybridsched import lane
place = sys.argv[1]
done = int(open(place).read()) if os.path.exists(place) else 0
def save():
    open(place, "w").write(str(done))
assert lane.wait_open()
print("begins at", done, lane.engine_url(), lane.max_inflight(), flush=True)
while done < int(sys.argv[2]):
    lane.checkpoint(save)
    time.sleep(0.02)
    done += 1
    print("batch", done, flush=True)
print("done", flush=True)
"""

PROGRAM = """
import signal, sys, time, pathlib
place = pathlib.Path(sys.argv[1])
done = int(place.read_text()) if place.exists() else 0
def told(*_):
    place.write_text(str(done))
    sys.exit(3)
signal.signal(signal.SIGUSR2, told)
print("begins at", done, flush=True)
while done < int(sys.argv[2]):
    time.sleep(0.02)
    done += 1
    print("batch", done, flush=True)
"""


class Program:
    """A process whose output goes to a file."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self.log = folder / "program.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HYBRIDSCHED"))}
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=env | environment
            )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    async def until(self, text: str | Callable[[], object], timeout_s: float = 20) -> None:
        check = text if callable(text) else lambda: text in self.said
        await asyncio.to_thread(wait_until, check, timeout_s=timeout_s, what=f"{text!r} in {self.said}")

    async def ended(self, timeout_s: float = 20) -> int:
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


def batches(said: str) -> list[int]:
    return [int(line.split()[1]) for line in said.splitlines() if line.startswith("batch ")]


@asynccontextmanager
async def pool(url: str, *, node: str = "n1") -> AsyncIterator[Door]:
    client = async_client(url)
    store = TelemetryStore(client, POOL)

    async def replica() -> None:
        while True:
            record = ReplicaRecord(replica=LANE, model=MODEL, lane=LANE, url="http://e:1", node=node)
            await store.publish(record)
            await asyncio.sleep(0.5)

    async with door(url) as gate:
        publishing = asyncio.create_task(replica())
        try:
            yield gate
        finally:
            await end_tasks(publishing)
            await client.aclose()


def environment(url: str, **more: str) -> dict[str, str]:
    return {"HYBRIDSCHED_REDIS_URL": url, "HYBRIDSCHED_POOL": POOL} | more


def record(client: redis.Redis) -> dict[str, Any]:
    raw: Any = client.get(KEYS.lane_telemetry(LANE))
    return dict(json.loads(raw)) if raw else {}


def lane_run(folder: Path, url: str, *words: str, **more: str) -> Program:
    command = [sys.executable, "-m", "hybridsched", "lane", "run", "--lane", LANE, *words]
    return Program(folder, *command, **environment(url, **more))


# --- from hybridsched import lane


async def test_a_loop_waits_pauses_goes_on_and_leaves(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-c", LOOP, str(place), "100000"]
    async with pool(valkey_url) as gate:
        program = Program(tmp_path, *command, **environment(valkey_url, HYBRIDSCHED_LANE=LANE))
        try:
            await program.until(lambda: record(valkey).get("work") == 1)
            assert "begins" not in program.said, "nothing is done before the gate is open"
            await gate.set(GateState.OPEN)
            await program.until("batch 5\n")
            assert "begins at 0 http://e:1 24" in program.said
            await gate.set(GateState.CLOSED)
            quiet = await settled(program)
            await asyncio.sleep(0.5)
            assert len(batches(program.said)) == quiet, "it pauses at its boundary"
            await gate.set(GateState.OPEN)
            await program.until(f"batch {quiet + 3}\n")
            program.process.send_signal(signal.SIGUSR2)
            assert await program.ended() == 75
        finally:
            program.close()
    done = len(batches(program.said))
    assert int(place.read_text()) == done
    assert valkey.get(KEYS.lane_holder(LANE)) is None, "the lane is given back"
    assert record(valkey) == {}


async def settled(program: Program) -> int:
    """Batches done once no more come."""
    count = -1
    while count != (count := len(batches(program.said))):
        await asyncio.sleep(0.3)
    return count


async def test_told_to_leave_while_it_waits(tmp_path: Path, valkey: redis.Redis, valkey_url: str) -> None:
    script = "from hybridsched import lane\nlane.checkpoint(lambda: print('saved', flush=True))\n"
    async with pool(valkey_url):
        env = environment(valkey_url, HYBRIDSCHED_LANE=LANE)
        program = Program(tmp_path, sys.executable, "-c", script, **env)
        try:
            await program.until(lambda: valkey.get(KEYS.lane_holder(LANE)))
            program.process.send_signal(signal.SIGUSR2)
            assert await program.ended() == 75
            assert program.said == "saved\n"
        finally:
            program.close()


async def test_redis_away_is_a_closed_gate_and_nothing_raises(tmp_path: Path) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-c", LOOP, str(place), "100000"]
    folder = tmp_path / "valkey"
    folder.mkdir()
    ports = KeptPorts([0])
    (port,) = ports.numbers
    server = EmbeddedValkey(folder, appendonly=True, port=port)
    server.__enter__()
    try:
        url = server.url
        async with pool(url) as gate:
            await gate.set(GateState.OPEN)
            program = Program(tmp_path, *command, **environment(url, HYBRIDSCHED_LANE=LANE))
            await program.until("batch 5\n")
        server.__exit__(None, None, None)
        quiet = await settled(program)
        await asyncio.sleep(1.0)
        assert program.process.poll() is None, program.said
        assert len(batches(program.said)) == quiet
        server = EmbeddedValkey(folder, appendonly=True, port=port)
        server.__enter__()
        assert server.url == url
        async with pool(url) as gate:
            await gate.set(GateState.OPEN)
            await program.until(f"batch {quiet + 3}\n", timeout_s=40)
    finally:
        program.close()
        server.__exit__(None, None, None)
        ports.close()
    assert "Traceback" not in program.said


def python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HYBRIDSCHED"))}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=clean | env,
        timeout=60,
        check=False,
    )


def test_without_a_pool_nothing_is_waited_for() -> None:
    script = (
        "from hybridsched import lane\n"
        "lane.checkpoint(); assert lane.wait_open() and lane.is_open() and not lane.leaving()\n"
        "assert lane.engine_url() is None and lane.max_inflight() is None\n"
        "lane.leave_soon(); lane.checkpoint()\n"
    )
    for env in ({}, {"HYBRIDSCHED_LANE": "none", "SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n"}):
        done = python(script, **env)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n1"}, "HYBRIDSCHED_REDIS_URL is not"),
        ({"HYBRIDSCHED_REDIS_URL": "redis://localhost:1"}, "name the lane in HYBRIDSCHED_LANE"),
    ],
)
def test_the_first_call_says_what_is_missing(env: dict[str, str], says: str) -> None:
    done = python("from hybridsched import lane\nlane.checkpoint()\n", **env)
    assert done.returncode == 1
    assert "LaneError" in done.stderr
    assert says in done.stderr


async def test_a_forked_child_follows_the_lane_of_its_parent(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    script = (
        "import os, sys\nfrom hybridsched import lane\nlane.wait_open()\n"
        "child = os.fork()\n"
        "if child == 0:\n    print('child', lane.wait_open(20), flush=True); sys.exit(0)\n"
        "_, status = os.waitpid(child, 0)\nprint('parent', status, lane.is_open(), flush=True)\n"
    )
    async with pool(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        env = environment(valkey_url, HYBRIDSCHED_LANE=LANE)
        program = Program(tmp_path, sys.executable, "-W", "ignore", "-c", script, **env)
        try:
            assert await program.ended(40) == 0
        finally:
            program.close()
    assert "child True" in program.said
    assert "parent 0 True" in program.said


# --- hybridsched lane run


async def test_a_program_is_told_when_the_lane_closes_and_started_again(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    place = tmp_path / "place"
    async with pool(valkey_url) as gate:
        program = lane_run(tmp_path, valkey_url, "--", sys.executable, "-c", PROGRAM, str(place), "150")
        try:
            await program.until(lambda: record(valkey).get("work") == 1)
            assert "begins" not in program.said
            await gate.set(GateState.OPEN)
            await program.until("batch 5\n")
            await gate.set(GateState.CLOSED)
            await program.until("lane_again")
            saved = int(place.read_text())
            assert valkey.get(KEYS.lane_holder(LANE)), "the lane is kept"
            await gate.set(GateState.OPEN)
            await program.until(f"begins at {saved}\n")
            assert await program.ended() == 0
        finally:
            program.close()
    assert batches(program.said)[-1] == 150
    assert len(batches(program.said)) == 150, "nothing was done twice"
    assert valkey.get(KEYS.lane_holder(LANE)) is None


async def test_a_program_that_does_not_exit_is_ended_and_the_job_leaves(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    stubborn = "trap '' USR2 TERM; echo up; sleep 600 & while :; do wait; done"
    async with pool(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        program = lane_run(tmp_path, valkey_url, "--grace", "200ms", "--", "bash", "-c", stubborn)
        try:
            await program.until("up\n")
            await gate.set(GateState.CLOSED)
            assert await program.ended() == 75
        finally:
            program.close()
    assert "lane_grace_over" in program.said
    assert "SIGUSR2" in program.said
    assert valkey.get(KEYS.lane_holder(LANE)) is None


async def test_a_program_that_pauses_itself_is_left_alone(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str
) -> None:
    place = tmp_path / "place"
    async with pool(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        command = (sys.executable, "-c", LOOP, str(place), "100000")
        program = lane_run(tmp_path, valkey_url, "--pauses-itself", "--", *command)
        try:
            await program.until("batch 5\n")
            await gate.set(GateState.CLOSED)
            quiet = await settled(program)
            await gate.set(GateState.OPEN)
            await program.until(f"batch {quiet + 3}\n")
            assert program.said.count("begins") == 1
            program.process.send_signal(signal.SIGUSR2)
            assert await program.ended() == 75
        finally:
            program.close()
    assert int(place.read_text()) == len(batches(program.said))


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
async def test_the_status_is_that_of_the_program(
    tmp_path: Path, valkey: redis.Redis, valkey_url: str, script: str, status: int
) -> None:
    async with pool(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        program = lane_run(tmp_path, valkey_url, "--", "bash", "-c", script)
        try:
            assert await program.ended() == status
        finally:
            program.close()


async def test_sigterm_ends_all_of_it(tmp_path: Path, valkey: redis.Redis, valkey_url: str) -> None:
    async with pool(valkey_url) as gate:
        await gate.set(GateState.OPEN)
        program = lane_run(tmp_path, valkey_url, "--", "bash", "-c", "sleep 611 & echo up $!; wait")
        try:
            await program.until("up")
            child = next(int(line.split()[1]) for line in program.said.splitlines() if line.startswith("up"))
            program.process.terminate()
            assert await program.ended() == 143
        finally:
            program.close()
    assert not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridsched", "lane", "run", "--redis", "redis://127.0.0.1:1", "--", "true"],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("SLURM")},
    )
    assert done.returncode == 2
    assert "this is no Slurm job" in done.stderr
