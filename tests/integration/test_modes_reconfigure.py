"""Hosts with one record for all modes (`way = "reconfigure"`) on real Slurm daemons: their GRES are written
anew, and slurmctld is restarted, or reconfigured where that is enough.

What is written is what `hybridsched slurm install --policy` put there; the hand is the testbed's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import redis

from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_values import HostState, Step
from hybridsched.slurmfiles.modes import gpu_counts
from hybridsched.store.connection import async_client
from hybridsched.store.policy import PolicyStore
from tests.helpers import await_until
from tests.integration.mode_files_rig import HOSTS, ModeSite
from tests.integration.modes_faults import Faults
from tests.integration.modes_rig import BIN, HAND, SLURM, ModesPool
from tests.integration.online_rig import POOL
from tests.integration.policy_pool import policy
from tests.slurm import Testbed, new_state, require_slurm, sweep

GPUS = {"day": {"3g.40gb": 4}, "night": {"a100": 2}}


class OneRecordTestbed(Testbed):
    """Two hosts, each with one record, by day."""

    def __init__(self, state: Path, folder: Path) -> None:
        super().__init__(state, "--type", "3g.40gb", nodes=HOSTS, gpus=4)
        self.up("--prepare")
        self.env["HYBRIDSCHED_BIN"] = str(BIN)
        self.site = ModeSite(self, folder, "reconfigure")
        answer = self.site.invoke("install", "--devices", str(self.site.devices), "--yes")
        assert answer.exit_code == 0, answer.output

    def hand(self, *words: str) -> None:
        self.run(str(HAND), *words, timeout_s=60)

    def counts(self, node: str) -> dict[str, int]:
        return gpu_counts(self.node(node)["Gres"])

    def by_day(self) -> None:
        """Whatever a test left."""
        self.up("--controller-only")
        away = [node for node in self.nodes if self.counts(node) != GPUS["day"]]
        for node in away:
            self.hand(node, "slurmd-stop", node)
            self.hand(node, "configure", node, "day")
        if away:
            self.hand("-", "slurmctld-restart")
        for node in self.nodes:
            self.hand(node, "slurmd-start", node)
        self.clear()

    def nothing_invalid(self) -> None:
        """No node was ever refused for its GRES."""
        assert not re.search(r"count (reported lower|changed)|INVALID_REG", self.log())


class OneRecordPool(ModesPool):
    slurm: OneRecordTestbed  # type: ignore[assignment]

    async def at_rest(self, mode: str, hosts: int, timeout_s: float = 90) -> None:
        """The first `hosts` hosts stand in a mode, and Slurm says the same."""
        names = self.slurm.nodes[:hosts]

        def there(found: dict[str, HostState]) -> bool:
            return all(
                name in found and found[name].mode == mode and found[name].step is Step.SERVING
                for name in names
            )

        await self.until(there, f"{names} in {mode}", timeout_s)
        for name in names:
            assert self.slurm.counts(name) == GPUS[mode]
            await await_until(
                lambda name=name: re.match("IDLE|MIXED|ALLOC", self.slurm.node(name)["State"]),
                timeout_s=20,
                what=f"{name} in use",
            )


@pytest.fixture(scope="module")
def one_record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRecordTestbed]:
    require_slurm()
    sweep()
    testbed = OneRecordTestbed(new_state(), tmp_path_factory.mktemp("site"))
    try:
        testbed.up()
        yield testbed
    finally:
        testbed.down()


@pytest.fixture
def day_record(one_record: OneRecordTestbed) -> OneRecordTestbed:
    one_record.by_day()
    return one_record


@asynccontextmanager
async def pool_of(
    slurm: OneRecordTestbed, url: str, folder: Path, *, hand: Path = HAND, **changes: object
) -> AsyncIterator[OneRecordPool]:
    """The pool with a policy worker, until the end."""
    modes: ModesPolicy = msgspec.structs.replace(slurm.site.modes, act_ms=60_000.0)
    modes = msgspec.structs.replace(modes, **changes)  # type: ignore[arg-type]
    client = async_client(url)
    await PolicyStore(client, POOL).set(policy(slurm=SLURM, modes=modes))
    made = OneRecordPool(slurm, client, url, folder)  # type: ignore[arg-type]
    made.environment["HYBRIDSCHED_HAND"] = str(hand)
    made.start()
    try:
        await made.at_rest("day", HOSTS)
        yield made
    finally:
        await asyncio.to_thread(made.stop)
        await asyncio.to_thread(slurm.by_day)
        await client.aclose()


class HalfHand(Faults):
    """Held up in the middle of a word: one file of two is written, or slurmctld has ended and not started."""

    def __init__(self, folder: Path, slurm: OneRecordTestbed) -> None:
        super().__init__(folder)
        gres, pid = slurm.state / "etc" / "hybridsched-gres.conf", slurm.state / "run" / "slurmctld.pid"
        self._program(
            self.hand,
            f'if [[ -e "{folder}/hold-$2" ]]; then\n'
            "  case $2 in\n"
            f'    configure) cp "{gres}" "{folder}/gres"; "{HAND}" "$@"; mv "{folder}/gres" "{gres}" ;;\n'
            "    slurmctld-restart)\n"
            f'      read -r pid < "{pid}" && kill "$pid" &&\n'
            "        while [[ -d /proc/$pid ]]; do sleep 0.05; done ;;\n"
            "  esac\n"
            "fi\n"
            f'while [[ -e "{folder}/hold-$2" ]]; do echo $$ > "{folder}/at-$2"; sleep 0.05; done\n'
            f'exec "{HAND}" "$@"\n',
        )


@pytest.mark.timeout(180)
async def test_there_and_back_while_a_job_on_another_host_goes_on(
    day_record: OneRecordTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    slurm = day_record
    async with pool_of(slurm, valkey_url, tmp_path) as pool:
        ticks = tmp_path / "ticks"
        script = f"#!/bin/bash\nwhile :; do date +%s >> {ticks}; sleep 0.5; done\n"
        job = slurm.sbatch("-p", "online", "-w", "n2", "--gres=gpu:3g.40gb:1", script=script)
        before = await asyncio.to_thread(slurm.wait_job, job, "RUNNING")
        for mode in ("night", "day"):
            await pool.store.order(mode, ("n1",), by="the test")
            await pool.at_rest(mode, 1)
            kind, count = next(iter(GPUS[mode].items()))
            words = ["srun", "-p", "online", "-w", "n1", f"--gres=gpu:{kind}:{count}", "true"]
            await asyncio.to_thread(slurm.run, *words)
            checked = await asyncio.to_thread(slurm.site.invoke, "check")
            assert checked.exit_code == 0, checked.output
            now = slurm.job(job)
            assert (now["JobState"], now["StartTime"], now["Restarts"]) == (
                "RUNNING",
                before["StartTime"],
                "0",
            )
            seen = len(ticks.read_text().split())
            await await_until(lambda seen=seen: len(ticks.read_text().split()) > seen, what="the job at work")
        assert slurm.counts("n2") == GPUS["day"]
        slurm.nothing_invalid()


@pytest.mark.timeout(180)
async def test_a_policy_worker_killed_in_the_middle_of_a_word_is_followed_by_one_that_completes(
    day_record: OneRecordTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """Both hosts change at once: the same files, the same slurmctld."""
    hand = HalfHand(tmp_path, day_record)
    async with pool_of(day_record, valkey_url, tmp_path, hand=hand.hand, max_unavailable=2) as pool:
        pool.start()  # a standby
        for mode, word in (("night", "configure"), ("day", "slurmctld-restart")):
            hand.hold(word)
            await pool.store.order(mode, (), by="the test")
            await hand.at(word)
            assert Step.CONFIGURING in {host.step for host in (await pool.state()).hosts.values()}
            if word == "slurmctld-restart":
                assert not day_record.attempt("scontrol", "ping").stdout.count("is UP"), "nobody started it"
            await pool.kill_leader()
            await hand.left(word)
            hand.release(word)
            await pool.at_rest(mode, HOSTS)
        day_record.nothing_invalid()


@pytest.mark.timeout(180)
async def test_a_configuration_with_which_slurmctld_does_not_start_is_taken_back(
    day_record: OneRecordTestbed, valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    conf = day_record.state / "etc" / "slurm.conf"
    broken = tmp_path / "broken-hand"
    broken.write_text(
        "#!/bin/bash\n"
        f'if [[ $2 == configure ]]; then sed -i /^Spoiled/d "{conf}"; fi\n'
        f'if [[ $2 == configure && $4 == night ]]; then echo Spoiled=1 >> "{conf}"; fi\n'
        f'exec "{HAND}" "$@"\n'
    )
    broken.chmod(0o755)
    async with pool_of(day_record, valkey_url, tmp_path, hand=broken, act_ms=6_000.0) as pool:
        await pool.store.order("night", ("n1",), by="the test")
        found = await pool.until(lambda hosts: hosts["n1"].failures == 1, "a change that failed", 60)
        assert "enter failed" in found["n1"].why
        await pool.at_rest("day", 1)
        assert "slurmctld did not start" in (await pool.state()).hosts["n1"].why
