"""The policy worker as a process: killed, told to stop, started twice, without its Redis."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState
from hybridsched.store.embedded import EmbeddedValkey
from hybridsched.store.keys import Keys
from hybridsched.store.leader import term
from tests.helpers import await_until
from tests.integration.policy_pool import POOL, lane, policy, replica, scripted

OPEN, CLOSED = GateState.OPEN, GateState.CLOSED
KEYS = Keys(POOL)


@contextmanager
def process(url: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "hybridsched", "worker", "policy", "--redis", url, "--pool", POOL]
    started = subprocess.Popen(
        [*command, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate(timeout=10)


def valkey_ms(url: str) -> float:
    client = redis.Redis.from_url(url)
    seconds, micros = client.time()
    client.close()
    return float(seconds * 1000 + micros / 1000)


async def ended(started: subprocess.Popen[bytes]) -> int:
    await await_until(lambda: started.poll() is not None, timeout_s=15, what="the end of the process")
    return int(started.returncode)


async def test_killed_its_gates_die_by_their_lease_and_another_takes_over(
    valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool:
        with process(valkey_url) as first:
            await pool.say(replica(), lane())
            async with pool.gates.watch("r0") as watch:
                await await_until(lambda: watch.current.state is OPEN, timeout_s=15, what="the opening")
                led = watch.current.by
                first.kill()
                await await_until(lambda: watch.current.state is CLOSED, what="the close by the lease")
                assert watch.current.reason is Reason.LEASE_EXPIRED
                assert (await pool.gate()).gate is None
                with process(valkey_url) as second:
                    await await_until(lambda: watch.current.state is OPEN, timeout_s=15, what="take-over")
                    assert int(term(watch.current.by)) > int(term(led))
                    second.send_signal(signal.SIGTERM)
                    assert await ended(second) == 0


async def test_sigterm_closes_at_once_and_exits_0(valkey: redis.Redis, valkey_url: str) -> None:
    slow = policy()
    async with scripted(valkey_url, given=slow) as pool:
        with process(valkey_url) as worker:
            await pool.say(replica(), lane())
            await pool.sees(OPEN, Reason.IDLE)
            worker.send_signal(signal.SIGTERM)
            assert await ended(worker) == 0
        seen = await pool.gate()
        assert seen.gate is None or seen.gate.state is CLOSED
        assert valkey.get(KEYS.leader) is None


async def test_a_second_worker_that_may_not_stand_by_says_so(valkey: redis.Redis, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()):
        with process(valkey_url):
            await await_until(lambda: valkey.get(KEYS.leader), timeout_s=15, what="a leader")
            with process(valkey_url, "--no-standby") as second:
                assert await ended(second) == 1
                assert second.stderr is not None
                said = second.stderr.read().decode()
    assert "led by another policy worker" in said
    assert "Traceback" not in said


async def test_an_outage_of_redis_is_waited_out(tmp_path: Path) -> None:
    with EmbeddedValkey(tmp_path, appendonly=False) as server:
        async with scripted(server.url, given=policy()) as pool:
            with process(server.url) as worker:
                await pool.say(replica(), lane())
                await pool.sees(OPEN, Reason.IDLE)
                server.kill()
                server.start()
                assert worker.poll() is None
                # Nothing was kept: no policy, no hold, no leader, no gate.
                back = valkey_ms(server.url)

                async def again(state: GateState, reason: Reason) -> bool:
                    try:
                        await pool.say(replica(), lane())
                        gate = (await pool.gate()).gate
                    except (redis.RedisError, OSError):
                        return False
                    return (
                        gate is not None
                        and (gate.state, gate.reason) == (state, reason)
                        and gate.at_ms > back
                    )

                await await_until(
                    lambda: again(CLOSED, Reason.POLICY_MISSING),
                    timeout_s=15,
                    what="the close without a policy",
                )
                await pool.policies.set(policy())
                await await_until(
                    lambda: again(OPEN, Reason.IDLE), timeout_s=15, what="the gate after the outage"
                )
                worker.send_signal(signal.SIGTERM)
                assert await ended(worker) == 0
