"""The commands that show and steer a pool, against a policy worker at work."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli
from hybridsched.core.reasons import Reason
from hybridsched.core.values import GateState
from hybridsched.store.keys import Keys
from tests.helpers import await_until
from tests.integration.policy_pool import POOL, lane, leading, policy, replica, scripted

KEYS = Keys(POOL)


class Shell:
    """Runs commands in a thread of their own: each has its own event loop."""

    def __init__(self, url: str) -> None:
        self._environment = {"HYBRIDSCHED_REDIS_URL": url, "HYBRIDSCHED_POOL": POOL}

    async def run(self, *arguments: str, status: int = 0, given: str | None = None) -> Result:
        result = await asyncio.to_thread(
            CliRunner().invoke, cli, [*arguments], input=given, env=self._environment
        )
        assert result.exit_code == status, result.output
        return result

    async def json(self, *arguments: str) -> Any:
        return json.loads((await self.run(*arguments, "--json")).stdout)


@pytest.fixture
def shell(valkey: redis.Redis, valkey_url: str) -> Shell:
    return Shell(valkey_url)


async def test_status_why_and_decisions_tell_the_same(shell: Shell, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane(), replica("r1", online_inflight=2, online_idle_ms=0.0), lane("r1"))
        await pool.sees(GateState.OPEN, Reason.IDLE)
        await pool.sees(GateState.CLOSED, Reason.ONLINE_ACTIVE, "r1")

        async def alive() -> bool:
            worker = (await shell.json("pool", "status"))["policy_worker"]
            return worker is not None and worker["alive"] and worker["cycles"] > 0

        await await_until(alive, what="the worker's own word")
        seen = await shell.json("pool", "status")
        assert (seen["schema"], seen["pool"], seen["policy"]["name"]) == (1, POOL, "test")
        first, second = seen["lanes"]
        assert (first["lane"], first["state"], first["reason"]) == ("r0", "open", "idle")
        assert (second["state"], second["online_inflight"], second["online_idle_ms"]) == ("closed", 2.0, 0.0)
        assert seen["queues"] == [{"model": "m", "depth": 0.0, "oldest_wait_ms": None}]
        assert [row["lane"] for row in (await shell.json("top"))["lanes"]] == ["r0", "r1"]
        for command in (("pool", "status"), ("top",)):
            assert "online_active" in (await shell.run(*command)).stdout

        said = (await shell.run("why", "r0")).stdout
        assert said.startswith("Lane r0 is open, for ")
        assert "window 100 ms" in said
        answer = await shell.json("why", "r1")
        assert (answer["state"], answer["numbers"]) == ("closed", {"online_inflight": 2.0})
        assert "2 online requests on its engine" in answer["sentence"]
        unknown = await shell.run("why", "r7", status=1)
        assert "its lanes: r0, r1" in unknown.stderr

        listed = (await shell.run("decisions", "--lane", "r1")).stdout.splitlines()
        assert listed[-1].endswith("lane r1 closed online_active online_inflight=2")
        records = (await shell.run("decisions", "--json", "--limit", "3")).stdout
        assert "0 differences" in (await shell.run("decisions", "replay", "-", given=records)).stdout


async def test_a_forged_record_does_not_replay(shell: Shell, valkey_url: str, tmp_path: Path) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(GateState.OPEN, Reason.IDLE)
        line = (await shell.run("decisions", "--json", "--limit", "1")).stdout
    forged = tmp_path / "forged.jsonl"
    forged.write_text(line.replace('"state":"open","reason":"idle"', '"state":"open","reason":"unprotected"'))
    result = await shell.run("decisions", "replay", str(forged), status=1)
    assert "lane r0: reason was" in result.stdout
    forged.write_text("{}\n")
    assert "line 1" in (await shell.run("decisions", "replay", str(forged), status=1)).stderr


async def test_hold_and_release(shell: Shell, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(GateState.OPEN, Reason.IDLE)
        held = await shell.json("pool", "hold", "--lane", "r0", "--why", "new driver", "--for", "1h30m")
        assert held["until_ms"] > 0
        await pool.sees(GateState.CLOSED, Reason.HELD)
        assert "new driver" in (await shell.run("why", "r0")).stdout
        assert "new driver, for 1 h 29 min more" in (await shell.run("pool", "status")).stdout
        await shell.run("pool", "release", "--lane", "r0")
        await pool.sees(GateState.OPEN, Reason.IDLE)
        assert "not held" in (await shell.run("pool", "release", status=1)).stderr


async def test_a_second_hold_is_its_own_and_the_first_still_holds(shell: Shell, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(GateState.OPEN, Reason.IDLE)
        first = await shell.json("pool", "hold", "--why", "GPU repair, do not open")
        second = await shell.run("pool", "hold", "--why", "quick test", "--for", "1h")
        assert "1 hold stands beside it" in second.stdout
        assert "GPU repair" in second.stdout
        refused = await shell.run("pool", "release", status=1)
        assert "2 holds stand on pool" in refused.stderr
        assert first["id"] in refused.stderr
        (timed,) = (h for h in (await shell.json("pool", "status"))["holds"] if h["until_ms"])
        ended = await shell.run("pool", "release", "--id", timed["id"])
        assert "quick test" in ended.stdout.split("1 hold stands")[0]
        assert "GPU repair" in ended.stdout.split("1 hold stands")[1]
        await pool.sees(GateState.CLOSED, Reason.HELD)
        assert "no hold 'zzz'" in (await shell.run("pool", "release", "--id", "zzz", status=1)).stderr
        assert "Nothing holds" in (await shell.run("pool", "release", "--all")).stdout
        await pool.sees(GateState.OPEN, Reason.IDLE)


async def test_a_lane_that_does_not_exist_is_not_held_by_mistake(shell: Shell, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane(), replica("r1"), lane("r1"))
        refused = await shell.run("pool", "hold", "--lane", "r7", "--why", "x", status=1)
        assert "knows no lane 'r7'" in refused.stderr
        assert "its lanes: r0, r1; with --force" in refused.stderr
        assert (await shell.json("pool", "status"))["holds"] == []
        await shell.run("pool", "hold", "--lane", "r7", "--why", "x", "--force")
        assert [hold["lane"] for hold in (await shell.json("pool", "status"))["holds"]] == ["r7"]
        await pool.say(replica("r7"), lane("r7"))
        await pool.sees(GateState.CLOSED, Reason.HELD, "r7")


async def test_since_is_that_of_the_state_and_not_of_the_last_reason(shell: Shell, valkey_url: str) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(online_inflight=2, online_idle_ms=0.0), lane())
        await pool.sees(GateState.CLOSED, Reason.ONLINE_ACTIVE)
        await pool.say(replica(engine={"healthy": 0.0}))
        seen = await pool.sees(GateState.CLOSED, Reason.ENGINE_UNHEALTHY)
        (row,) = (await shell.json("pool", "status"))["lanes"]
        assert seen.gate is not None
        assert row["since_ms"] - row["changed_ms"] == pytest.approx(seen.gate.at_ms - seen.gate.since_ms)
        assert row["since_ms"] > row["changed_ms"] > 0


async def test_a_gone_replica_is_shown_with_its_age_and_dropped_after_ten_minutes(
    shell: Shell, valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool:
        await pool.say(replica(), lane(), replica("r1"), lane("r1"), replica("r2"), lane("r2"))
        for name, ago_s in (("r1", 200), ("r2", 601)):
            del pool.replicas[name], pool.lanes[name]
            await pool.telemetry.withdraw(name)
            await pool.telemetry.withdraw_lane(name)
            at_ms = int(valkey.time()[0]) * 1000.0 - ago_s * 1000.0
            valkey.zadd(KEYS.replica_index, {name: at_ms})
            valkey.zadd(KEYS.lane_index, {name: at_ms})
        # Nobody who publishes clears the indexes.
        pool.replicas.clear()
        pool.lanes.clear()
        rows = {row["lane"]: row["gone_ms"] for row in (await shell.json("pool", "status"))["lanes"]}
        assert rows.keys() == {"r0", "r1"}
        assert rows["r0"] is None
        assert 200_000 <= rows["r1"] < 260_000
        assert " gone " in (await shell.run("top")).stdout


async def test_decisions_of_an_unknown_lane_and_a_reader_that_goes(
    shell: Shell, valkey: redis.Redis, valkey_url: str
) -> None:
    async with scripted(valkey_url, given=policy()) as pool, leading(valkey_url):
        await pool.say(replica(), lane())
        await pool.sees(GateState.OPEN, Reason.IDLE)
        unknown = await shell.run("decisions", "--lane", "r7", status=1)
        assert "knows no lane 'r7'" in unknown.stderr
        assert "its lanes: r0" in unknown.stderr
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "hybridsched", "decisions", "--redis", valkey_url, "--pool", POOL]
        ended = await asyncio.to_thread(
            subprocess.run, command, stdout=writer, stderr=subprocess.PIPE, check=False, text=True
        )
        os.close(writer)
        assert ended.stderr == ""
        assert ended.returncode in (0, 1)


async def test_policies_are_set_listed_and_rolled_back(
    shell: Shell, valkey: redis.Redis, tmp_path: Path
) -> None:
    assert "has no policy" in (await shell.run("pool", "policy", "show", status=1)).stderr
    assert "version 1" in (await shell.run("pool", "policy", "set", "idle-window")).stdout
    text = (await shell.run("pool", "policy", "show")).stdout
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("window_ms = 150.0", "window_ms = 75.0"))
    assert await shell.json("pool", "policy", "set", str(file), "--note", "shorter") == {
        "pool": POOL,
        "name": "idle-window",
        "version": 2,
    }
    assert (await shell.json("pool", "policy", "show"))["idle"]["window_ms"] == 75.0
    assert "version 3" in (await shell.run("pool", "policy", "rollback", "1")).stdout
    versions = await shell.json("pool", "policy", "history")
    assert [(v["version"], v["note"]) for v in versions] == [(3, "rollback to 1"), (2, "shorter"), (1, "")]
    assert "shorter" in (await shell.run("pool", "policy", "history")).stdout
    assert "1 to 3" in (await shell.run("pool", "policy", "rollback", "9", status=1)).stderr
    file.write_text('name = "x"\nkind = "idle-window"\nsurprise = 1\n')
    assert "surprise" in (await shell.run("pool", "policy", "set", str(file), status=2)).stderr
    valkey.set(KEYS.policy_current, b"broken")
    assert "cannot be read" in (await shell.run("pool", "policy", "show", status=1)).stderr
    assert "cannot be read" in (await shell.run("pool", "status")).stdout


async def test_an_empty_pool_and_a_dead_gate_say_what_to_do(shell: Shell, valkey_url: str) -> None:
    status = (await shell.run("pool", "status")).stdout
    assert "hybridsched pool policy set FILE" in status
    assert "hybridsched worker policy" in status
    async with scripted(valkey_url, given=policy()) as pool:
        await pool.say(replica(), lane())
        said = (await shell.run("why", "r0")).stdout
        assert said == (
            "Lane r0 is closed: nobody renewed its gate: the policy worker is dead, stopped or cut off. "
            "Start `hybridsched worker policy`, or look at its log.\n"
        )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pool", "hold"), "--why"),
        (("pool", "hold", "--why", ""), "say why"),
        (("pool", "hold", "--why", "  "), "say why"),
        (("pool", "hold", "--why", "x", "--for", "99999d"), "3660 days"),
        (("pool", "hold", "--why", "x", "--for", "5 parsec"), "1h30m"),
        (("pool", "hold", "--why", "x", "--for", "0s"), "above 0"),
        (("pool", "hold", "--why", "x", "--lane", "a b"), "cannot be used"),
        (("pool", "status", "--pool", "{x}"), "not a name"),
        (("pool", "policy", "set", "nope"), "idle-window"),
        (("decisions", "--limit", "0"), "limit"),
    ],
)
async def test_wrong_usage_exits_2(shell: Shell, arguments: tuple[str, ...], says: str) -> None:
    assert says in (await shell.run(*arguments, status=2)).stderr
