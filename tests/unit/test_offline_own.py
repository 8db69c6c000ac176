"""The orders to an engine of a lane's own: what fails, what is given up, and what is remembered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hybridsched.core import lane as machine
from hybridsched.engines.fake import FakeEngine
from hybridsched.engines.protocol import Completion, EngineError
from hybridsched.store.telemetry import LaneRecord, ReplicaRecord, Telemetry
from hybridsched.workers.lane_alone import engine_place, shared_with
from hybridsched.workers.offline_own import OwnEngine
from hybridsched.workers.offline_wire import RequestClock
from tests.helpers import await_until


class Sleeper(FakeEngine):
    """One whose failures the test chooses."""

    def __init__(self) -> None:
        super().__init__(model="m")
        self.log: list[str] = []
        self.fails: dict[str, EngineError] = {}
        self.sleeps = True
        self.wrong = 0
        """A token added to every id that it answers."""
        self.slow = asyncio.Event()
        self.slow.set()

    async def _note(self, what: str) -> None:
        self.log.append(what)
        if what in self.fails:
            raise self.fails[what]

    async def pause(self) -> None:
        await self._note("pause")
        await super().pause()

    async def resume(self) -> None:
        await self._note("resume")
        await super().resume()

    async def can_sleep(self) -> bool:
        return self.sleeps

    async def sleep(self, level: int, *, timeout_s: float) -> None:
        await self._note("sleep")
        await super().sleep(level, timeout_s=timeout_s)

    async def wake(self, *, timeout_s: float) -> None:
        await self._note("wake")
        await super().resume()

    async def complete(
        self, path: str, body: dict[str, Any] | bytes, *, request_id: str, timeout_s: float
    ) -> Completion:
        await self._note("ask")
        await self.slow.wait()
        answer = await super().complete(path, body, request_id=request_id, timeout_s=timeout_s)
        for choice in answer.body.get("choices", ()):
            choice["token_ids"] = [token + self.wrong for token in choice["token_ids"]]
        return answer


class Proofs:
    """Redis, as far as it matters here."""

    def __init__(self) -> None:
        self.kept: bytes | None = None

    async def read(self, lane: str) -> bytes | None:
        return self.kept

    async def write(self, lane: str, proof: bytes) -> None:
        self.kept = proof


class Rig:
    def __init__(self, engine: Sleeper, proofs: Proofs) -> None:
        self.engine = engine
        self.told: list[machine.Event] = []
        self.held: list[bool] = []
        self.can: list[bool] = []
        self.losses = 0
        self.own = OwnEngine(
            engine,
            lane="l",
            model="m",
            proofs=proofs,  # type: ignore[arg-type]
            losses=lambda: self.losses,
            held=self.held.append,
            can_sleep=self.can.append,
            back_off_s=(0.001, 0.01),
            still_s=0.0,
        )
        self.own.tell = self.told.append

    async def goes(self, turn: int, *, check: bool) -> None:
        self.own.let_go(turn, check=check)
        await await_until(lambda: machine.EngineGoes(turn=turn) in self.told, what="the engine's going on")

    async def slept(self, pause: int) -> None:
        self.own.sleep(pause)
        await self.own.settled()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig(Sleeper(), Proofs())
    yield made
    await made.own.close()
    await made.engine.close()


async def test_an_engine_that_woke_with_other_weights_gets_no_work_until_it_is_another(rig: Rig) -> None:
    await rig.goes(1, check=True)
    await rig.slept(1)
    assert rig.told[-1] == machine.EngineAsleep(pause=1)
    assert rig.own.stands == "asleep"
    rig.engine.wrong = 1
    rig.own.let_go(2, check=True)
    await await_until(lambda: rig.own.problem.startswith("engine_wrong_answer"), what="the problem")
    asked = rig.engine.log.count("ask")
    await await_until(lambda: rig.engine.log.count("ask") > asked + 2, what="more tries")
    assert machine.EngineGoes(turn=2) not in rig.told
    rig.losses += 1  # it was started again, and answers in its own way
    await await_until(lambda: machine.EngineGoes(turn=2) in rig.told, what="the engine's going on")
    assert not rig.own.problem
    assert not rig.own.stands


async def test_a_successor_asks_what_its_predecessor_asked(rig: Rig) -> None:
    await rig.goes(1, check=True)
    await rig.slept(1)
    proofs = Proofs()
    proofs.kept = rig.own._proofs.kept  # type: ignore[attr-defined]
    assert proofs.kept is not None
    rig.engine.wrong = 1
    after = Rig(rig.engine, proofs)
    found: list[bool] = []
    asking = asyncio.create_task(
        after.own.run(wants_sleep=lambda: True, found=found.append, works=lambda: False)
    )
    await await_until(lambda: bool(found and after.can), what="the questions")
    asking.cancel()
    assert (found, after.can) == ([True], [True])
    after.own.let_go(1, check=True)
    await await_until(lambda: "answers wrongly" in after.own.problem, what="the problem")
    rig.engine.wrong = 0
    await await_until(lambda: machine.EngineGoes(turn=1) in after.told, what="the engine's going on")
    await after.own.close()


async def test_a_wake_that_is_given_up_ends_its_question_and_says_nothing(rig: Rig) -> None:
    rig.engine.slow.clear()
    rig.own.let_go(1, check=True)
    await await_until(lambda: "ask" in rig.engine.log, what="the question")
    rig.own.cancel()
    await rig.own.settled()
    assert rig.told == []
    rig.engine.slow.set()
    await rig.goes(2, check=True)


async def test_a_pause_waits_until_the_order_before_it_is_carried_out(rig: Rig) -> None:
    rig.own.let_go(1, check=False)
    rig.own.cancel()
    rig.own.hold(1)
    await rig.own.settled()
    assert rig.told == [machine.EngineHeld(pause=1)]
    assert rig.engine.log[-1] == "pause"
    assert rig.held[-1] is True


async def test_an_engine_without_those_endpoints_goes_and_is_not_asked_to_stop_again(rig: Rig) -> None:
    absent = EngineError("no such route", code="not_found", retryable=False, status=404)
    rig.engine.fails = {"pause": absent, "resume": absent}
    await rig.goes(1, check=False)
    rig.own.hold(1)
    await rig.own.settled()
    assert rig.told[-1] == machine.HoldFailed(pause=1, never=True)
    assert rig.own.refusal.startswith("engine_cannot_pause")
    rig.engine.fails["pause"] = EngineError("silence", code="engine_timeout", retryable=True)
    rig.own.hold(2)
    await rig.own.settled()
    assert rig.told[-1] == machine.HoldFailed(pause=2, never=False)
    assert rig.held[-1] is False


async def test_an_engine_that_is_away_is_waited_for(rig: Rig) -> None:
    rig.engine.fails = {"resume": EngineError("gone", code="engine_unreachable", retryable=True)}
    rig.own.let_go(1, check=False)
    await await_until(lambda: rig.engine.log.count("resume") > 2, what="more tries")
    assert rig.own.problem.startswith("engine_unhealthy")
    rig.engine.fails = {}
    await await_until(lambda: machine.EngineGoes(turn=1) in rig.told, what="the engine's going on")


async def test_a_platform_without_sleep_is_said_once_for_each_process_of_the_engine(rig: Rig) -> None:
    rig.engine.sleeps = False
    asking = asyncio.create_task(
        rig.own.run(wants_sleep=lambda: True, found=lambda stands: None, works=lambda: False)
    )
    await await_until(lambda: rig.can == [False], what="the answer")
    assert rig.own.refusal.startswith("engine_cannot_sleep")
    rig.engine.sleeps = True
    rig.losses += 1  # started again, with sleep mode
    await await_until(lambda: rig.can == [False, True], what="the next answer")
    assert not rig.own.refusal
    asking.cancel()


async def test_an_engine_that_cannot_sleep_is_left_standing(rig: Rig) -> None:
    rig.engine.sleeps = False
    rig.own.hold(1)
    await rig.slept(1)
    assert rig.told == [machine.EngineHeld(pause=1), machine.SleepFailed(pause=1)]
    assert rig.can == [False]
    assert await rig.engine.stands_still()


async def test_the_time_limit_of_a_request_stands_still_with_its_engine() -> None:
    clock = RequestClock(0.05, held=False)
    async with clock.running("http://e", "/v1/completions"):
        clock.hold(True)
        await asyncio.sleep(0.2)
        clock.hold(False)


@pytest.mark.parametrize("works", [True, False])
async def test_an_engine_that_somebody_else_has_stopped_goes_on_while_its_lane_is_open(
    rig: Rig, works: bool
) -> None:
    """Its lines stood still until their time was over, ten minutes each, and counted against them."""
    looks: list[bool] = []
    running = asyncio.create_task(
        rig.own.run(wants_sleep=lambda: False, found=looks.append, works=lambda: works)
    )
    await await_until(lambda: looks == [False], what="the first look")
    await FakeEngine.pause(rig.engine)  # not by the worker
    if works:
        await await_until(lambda: rig.engine.log == ["resume"], what="the order to go on")
        assert not await rig.engine.stands_still()
    else:
        await asyncio.sleep(0.7)  # a look later
        assert rig.engine.log == []
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_it_goes_on_where_it_stood() -> None:
    clock = RequestClock(0.05, held=True)

    async def asked_for_ever() -> None:
        async with clock.running("http://e", "/v1/completions"):
            await asyncio.sleep(0.1)
            clock.hold(False)
            await asyncio.sleep(30)

    with pytest.raises(EngineError, match=r"within 0\.05 s") as late:
        await asked_for_ever()
    assert (late.value.code, late.value.retryable) == ("engine_timeout", True)


def pool(*records: ReplicaRecord, lanes: tuple[LaneRecord, ...] = ()) -> Telemetry:
    return Telemetry(
        now_ms=0.0,
        replicas={record.replica: record for record in records},
        lanes={record.lane: record for record in lanes},
    )


def test_one_engine_by_several_names_is_one() -> None:
    front = ReplicaRecord(replica="front", model="m", lane="front", url="http://127.0.0.1:8000", node="n1")
    assert engine_place("http://localhost:8000/") == engine_place("http://127.0.0.1:8000")
    assert "replica front" in shared_with(pool(front), lane="l", url="http://localhost:8000")
    assert "replica front" in shared_with(pool(front), lane="l", url="http://localhost:8000", node="n1")
    assert not shared_with(pool(front), lane="l", url="http://localhost:8000", node="n2")
    assert not shared_with(pool(front), lane="l", url="http://localhost:8001")
    others = (
        LaneRecord(lane="a", engine="http://gpu7:9000"),
        LaneRecord(lane="l", engine="http://gpu8:9000"),
    )
    assert "own engine of lane a" in shared_with(pool(lanes=others), lane="l", url="http://gpu7:9000")
    assert not shared_with(pool(lanes=others), lane="l", url="http://gpu8:9000"), "its own earlier word"


def test_own_lanes_of_two_machines_may_both_use_the_loopback() -> None:
    """`engine launch` has every engine listen on 127.0.0.1: the second machine's worker was refused."""
    url = "http://127.0.0.1:9000"
    for host, said in ((socket.gethostname(), True), ("elsewhere", False), ("", True)):
        worker = f"a@{host}:12" if host else ""
        other = LaneRecord(lane="a", engine="http://localhost:9000", worker=worker)
        assert bool(shared_with(pool(lanes=(other,)), lane="l", url=url)) is said, host
