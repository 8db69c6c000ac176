"""An engine that answers its health check and nothing else: its lines wait, and none of them pays for it."""

from __future__ import annotations

from typing import Any

import pytest

from hybridsched.core.policy import PolicyKind, PoolPolicy
from hybridsched.engines.protocol import Completion, EngineError
from hybridsched.workers.offline_engine import EngineWatch, LaneAdmission, LaneEngine
from hybridsched.workers.offline_lines import KILLS, LineExecutor
from tests.helpers import await_until
from tests.unit.line_machine import BUDGET, FAST, Sink, admits, finish, machine, prompt_of
from tests.unit.step_engine import StepEngine

POLICY = PoolPolicy(name="test", kind=PolicyKind.IDLE_WINDOW)
MISSING = {
    "error": {
        "message": "The model `m` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
}
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")


def error_500() -> EngineError:
    return EngineError("answered 500", code="engine_died", retryable=True, status=500)


def garbage() -> EngineError:
    return EngineError("<html>", code="engine_bad_answer", retryable=True, status=200)


def body_of(path: str, i: int) -> dict[str, Any]:
    if path == PATHS[0]:
        return {"model": "m", "prompt": prompt_of(i, 20), "max_tokens": 3}
    if path == PATHS[1]:
        return {"model": "m", "messages": [{"role": "user", "content": f"hello {i}"}], "max_tokens": 3}
    return {"model": "m", "input": f"hello {i}"}


class Broken:
    """Fails every request while `on`, and counts them."""

    def __init__(self, engine: StepEngine, make: Any, *, on: bool = True) -> None:
        self.on, self.calls, self._make = on, 0, make
        engine.fault = self

    def __call__(self, path: str, body: dict[str, Any]) -> Completion | None:
        if not self.on:
            return None
        self.calls += 1
        made = self._make()
        if isinstance(made, EngineError):
            raise made
        return made  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [error_500, garbage, lambda: ValueError("odd")])
async def test_an_engines_bad_minute_ends_no_line(make: Any, path: str) -> None:
    engine, sink = StepEngine(), Sink()

    def fail() -> Any:
        made = make()
        if isinstance(made, ValueError):
            raise made  # what our own reading of an answer may run into
        return made

    broken = Broken(engine, fail)
    async with machine(engine) as executor:
        executor.submit(sink.run(i, body_of(path, i), path) for i in range(20))
        executor.admit(BUDGET)
        await await_until(lambda: broken.calls > 20 * KILLS, what="more failures than all lines may have")
        assert sink.results == {}
        assert executor.proof.problem.startswith("engine_")
        assert executor.inflight <= 1, "while it fails there is one small request at a time"
        broken.on = False
        await finish(sink, 20)
        assert executor.proof.problem == ""
    assert all(result.body is not None for result in sink.results.values())


@pytest.mark.parametrize(("make", "code"), [(error_500, "engine_failed"), (garbage, "engine_bad_answer")])
async def test_a_line_that_fails_at_an_engine_that_works_ends_and_its_neighbours_live(
    make: Any, code: str
) -> None:
    engine, sink = StepEngine(), Sink()

    def fault(path: str, body: dict[str, Any]) -> Completion | None:
        if body.get("prompt") == [4242, 1]:
            raise make()
        return None

    engine.fault = fault
    async with machine(engine) as executor:
        lines = [sink.run(i, {"prompt": prompt_of(i, 20), "max_tokens": 4}) for i in range(12)]
        lines.insert(5, sink.run(99, {"prompt": [4242, 1], "max_tokens": 4}))
        executor.submit(lines)
        executor.admit(BUDGET)
        await finish(sink, 13)
    assert sink.results[99].error_code == code
    assert f"{KILLS} times" in sink.results[99].error_message
    assert all(sink.results[i].body is not None for i in range(12))


async def test_a_single_line_that_fails_at_an_engine_that_works_ends_too() -> None:
    engine, sink = StepEngine(), Sink()

    def fault(path: str, body: dict[str, Any]) -> Completion | None:
        if body.get("prompt") == [4242, 1]:
            raise error_500()
        return None

    engine.fault = fault
    async with machine(engine) as executor:
        executor.submit([sink.run(1, {"prompt": [4242, 1], "max_tokens": 4})])
        executor.admit(BUDGET)
        await finish(sink, 1)
        assert sink.results[1].error_code == "engine_failed"


async def test_a_closed_gate_ends_the_proof_and_the_next_opening_tries_it_again() -> None:
    engine, sink = StepEngine(), Sink()
    broken = Broken(engine, error_500)
    async with machine(engine, interval_s=0.002) as executor:
        executor.submit([sink.run(1, {"prompt": prompt_of(1, 20), "max_tokens": 4})])
        executor.admit(BUDGET)
        await await_until(lambda: broken.calls > 2)
        await executor.end_inflight()
        sent = len(engine.sent)
        await executor.end_inflight()
        assert len(engine.sent) == sent, "nothing is sent through a closed gate, not even a proof"
        assert executor.inflight == 0
        broken.on = False
        executor.admit(BUDGET)
        await finish(sink, 1)
    assert sink.results[1].body is not None


async def test_an_engine_that_has_lost_its_model_is_at_fault_and_not_the_lines() -> None:
    engine, sink = StepEngine(), Sink()
    broken = Broken(engine, lambda: Completion(status=404, body=MISSING))
    async with machine(engine) as executor:
        executor.model = "m"
        executor.submit(sink.run(i, body_of(PATHS[0], i)) for i in range(20))
        executor.admit(BUDGET)
        await await_until(lambda: broken.calls > 20)
        assert sink.results == {}
        assert executor.proof.problem.startswith("engine_wrong_model: ")
        broken.on = False
        await finish(sink, 20)
    assert all(result.body is not None for result in sink.results.values())


async def test_a_line_that_names_another_model_fails_alone() -> None:
    engine, sink = StepEngine(), Sink()

    def fault(path: str, body: dict[str, Any]) -> Completion | None:
        return Completion(status=404, body=MISSING) if body["model"] == "other" else None

    engine.fault = fault
    async with machine(engine) as executor:
        executor.model = "m"
        executor.submit(
            [sink.run(1, body_of(PATHS[0], 1)), sink.run(2, body_of(PATHS[0], 2) | {"model": "other"})]
        )
        executor.admit(BUDGET)
        await finish(sink, 2)
    assert sink.results[1].body is not None
    assert (sink.results[2].error_code, sink.results[2].status_code) == ("NotFoundError", 404)


def watched(engine: StepEngine, **options: Any) -> tuple[LineExecutor, EngineWatch]:
    executor = LineExecutor(engine, admits=admits, settings=FAST)
    return executor, EngineWatch(engine, executor, LaneAdmission(POLICY), **options)


async def test_an_engine_of_another_model_never_comes_up() -> None:
    engine = StepEngine()
    executor, watch = watched(engine, model="ours")
    assert not await watch._healthy()
    assert not watch.up
    assert watch.problem.startswith("engine_wrong_model: ")
    assert "serves m, not ours" in watch.problem

    engine.models = ("ours", "an-alias")
    lane = LaneEngine(engine, engine, POLICY, model="ours", settings=FAST)
    await watch._healthy()
    await lane.watch._healthy()
    assert [one.up for one in (watch, lane.watch)] == [True, True]
    assert [one.problem for one in (watch, lane)] == ["", ""]
    assert executor.model == "ours"
    await lane.executor.close()


async def test_an_engine_that_was_replaced_between_two_health_checks_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybridsched.workers.offline_engine.MODEL_CHECK_S", 0.0)
    engine = StepEngine()
    _, watch = watched(engine, model="m")
    assert await watch._healthy()
    engine.models = ("another",)
    assert not await watch._healthy()
    assert watch.problem.startswith("engine_wrong_model: ")


@pytest.mark.parametrize(("likely", "bound"), [("m", "m"), ("elsewhere", None), (None, None)])
async def test_a_local_run_holds_the_engine_to_the_model_that_it_served_at_first(
    likely: str | None, bound: str | None
) -> None:
    engine = StepEngine()
    executor, watch = watched(engine, likely=likely)
    assert await watch._healthy()
    assert executor.model == bound
    watch.trouble(error_500())
    engine.models = ("another",)
    assert (await watch._healthy()) == (bound is None)


async def test_the_lane_says_why_it_waits() -> None:
    engine = StepEngine()
    lane = LaneEngine(engine, engine, POLICY, model="ours", settings=FAST)
    assert lane.problem == ""
    await lane.watch._healthy()
    assert lane.problem.startswith("engine_wrong_model: ")
    await lane.executor.close()
