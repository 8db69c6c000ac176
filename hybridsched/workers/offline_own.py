"""An engine that a lane has to itself: stopped and let go, put to sleep and woken, as `core.lane` orders.

One order is carried out at a time, and none is left half done: a resume that overtakes a later pause would
let offline work run beside online.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
from redis import RedisError

from hybridsched.core import lane as machine
from hybridsched.engines.protocol import Engine, EngineError
from hybridsched.engines.waking import Proof, check, take_proof
from hybridsched.log import get_logger
from hybridsched.store.lane_proofs import LaneProofs
from hybridsched.store.tasks import end_tasks

_log = get_logger("offline")

PROMPT = list(range(10, 26))
"""Token ids of the question: every vocabulary has them."""

_ANSWER_S = 60.0
_SLEEP_S = 300.0
"""The weights of a large model go to the host's memory and come back."""
_RELEASE_S = 5.0
_BACK_OFF_S = (0.1, 10.0)
_SAY_EVERY_S = 30.0
_LOOK_S = 0.5
_STILL_S = 5.0
"""Between two looks whether an engine that should work stands still."""
_NO_SLEEP = "it was started without --enable-sleep-mode, its platform has none, or it does not say"
_ABSENT = ("not_found", "bad_request", "not_supported")
"""Codes of an engine that has no such endpoint."""


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A proof as it stands in Redis."""

    model: str
    url: str
    proof: Proof


class OwnEngine:
    """Carries out the orders, and says what came of them to `tell`. Everything happens on one event loop."""

    def __init__(
        self,
        engine: Engine,
        *,
        lane: str,
        model: str,
        proofs: LaneProofs,
        losses: Callable[[], int],
        held: Callable[[bool], None],
        can_sleep: Callable[[bool], None],
        back_off_s: tuple[float, float] = _BACK_OFF_S,
        still_s: float = _STILL_S,
    ) -> None:
        """`losses` counts the health checks that failed so far. `held` is told when the engine stands still
        and when it goes on, `can_sleep` whether it has that rung, where the policy asks for it."""
        self._engine = engine
        self._lane = lane
        self._model = model
        self._proofs = proofs
        self._losses = losses
        self._held = held
        self._can_sleep = can_sleep
        self._back_off_s = back_off_s
        self._still_s = still_s
        self.tell: Callable[[machine.Event], None] = lambda event: None
        self.problem = ""
        """Why the engine cannot be given work though it is there, as code and sentence; empty: it can."""
        self.refusal = ""
        """Which rung the engine does not have, and why; empty: none is missing, as far as is known."""
        self.stands = ""
        """`paused` or `asleep` while the engine stands still; empty: it goes, as far as is known."""
        self._lock = asyncio.Lock()
        self._turn = 0
        self._given_up = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._orders: set[asyncio.Task[None]] = set()
        self._proof: Proof | None = None
        self._proof_losses = 0
        self._read = False
        self._said_s = float("-inf")

    # -- what the engine is asked ------------------------------------------------------------------------

    async def run(
        self, *, wants_sleep: Callable[[], bool], found: Callable[[bool], None], works: Callable[[], bool]
    ) -> None:
        """Until cancelled: ask the engine how a worker before this one has left it, which `found` is told,
        whether it can sleep, once for each process of it that the policy wants to, and, as long as it `works`
        (its lane is open), whether somebody else has stopped it."""
        asked_still = False
        looked_s = time.monotonic()
        asked_sleep: int | None = None
        while True:
            with suppress(EngineError):  # its watch says so, and it is asked again
                if not asked_still:
                    found(await self._found())
                    asked_still = True
                losses = self._losses()
                if wants_sleep() and asked_sleep != losses:
                    if await self._engine.can_sleep():
                        self.refusal = ""
                        self._can_sleep(True)
                    else:
                        self._no_sleep(_NO_SLEEP)
                    asked_sleep = losses
                if works() and time.monotonic() - looked_s >= self._still_s:
                    looked_s = time.monotonic()
                    if await self._engine.stands_still():
                        await self._go_on(works)
            await asyncio.sleep(_LOOK_S)

    async def _found(self) -> bool:
        stands = await self._engine.stands_still()
        if stands:
            self.stands = "paused"
            _log.info(
                "The lane's engine stands still or sleeps, as a worker before this one has left it. It goes "
                "on when the gate opens.",
                key="engine_found_still",
                lane=self._lane,
                engine=self._engine.url,
            )
        return stands

    async def _go_on(self, works: Callable[[], bool]) -> None:
        async with self._lock:
            if not works():
                return  # it was closed meanwhile: the order to stop may have been carried out
            _log.warning(
                "The lane's engine stands still though its gate is open, by somebody else's order; it is "
                "told to go on. Hold the lane to keep it still (`hybridsched pool hold --lane`).",
                key="engine_stopped_elsewhere",
                lane=self._lane,
                engine=self._engine.url,
            )
            await self._engine.resume()

    # -- orders -----------------------------------------------------------------------------------------

    def hold(self, pause: int) -> None:
        """See `HoldEngine`."""
        self._order(self._hold(pause), "hold")

    def let_go(self, turn: int, *, check: bool) -> None:
        """See `LetGo`."""
        self._turn = turn
        self._given_up.clear()
        self._order(self._go(turn, check=check), "let-go")

    def cancel(self) -> None:
        """See `CancelLetGo`."""
        self._turn = 0
        self._given_up.set()
        if self._asking is not None:
            self._asking.cancel()

    def sleep(self, pause: int) -> None:
        """See `PutToSleep`."""
        self._order(self._sleep(pause), "sleep")

    def release(self) -> None:
        """See `Release`."""
        self._order(self._release(), "release")

    async def settled(self) -> None:
        """Wait until every order has been carried out."""
        while self._orders:
            await asyncio.wait(self._orders)

    async def close(self) -> None:
        """Give up what is still under way."""
        self.cancel()
        await end_tasks(*self._orders)

    def _order(self, doing: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(doing, name=f"engine-{name}-{self._lane}")
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    async def _hold(self, pause: int) -> None:
        async with self._lock:
            self._held(True)
            try:
                await self._engine.pause()
            except EngineError as error:
                self._held(False)
                never = error.code in _ABSENT
                _log.warning(
                    "The lane's engine could not be stopped; its requests are ended instead, with their "
                    "tokens kept.",
                    key="engine_hold_failed",
                    lane=self._lane,
                    engine=self._engine.url,
                    error=str(error),
                )
                if never:
                    self.refusal = (
                        f"engine_cannot_pause: engine {self._engine.url} has no endpoint to pause it (start "
                        "it with VLLM_SERVER_DEV_MODE=1), so its requests are ended at a pause"
                    )
                self.tell(machine.HoldFailed(pause=pause, never=never))
                return
            self.stands = "paused"
            self.tell(machine.EngineHeld(pause=pause))

    async def _go(self, turn: int, *, check: bool) -> None:
        async with self._lock:
            wait_s = self._back_off_s[0]
            while self._turn == turn:
                try:
                    await self._awake(maybe_asleep=check)
                    self.stands = ""
                    if self._turn != turn:
                        return
                    self._held(False)
                    if check:
                        await self._ask()
                except EngineError as error:
                    self._trouble(error)
                except asyncio.CancelledError:
                    if self._turn == turn:
                        raise
                    return
                else:
                    self.problem = ""
                    self.tell(machine.EngineGoes(turn=turn))
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._given_up.wait()
                wait_s = min(wait_s * 2, self._back_off_s[1])

    async def _awake(self, *, maybe_asleep: bool) -> None:
        try:
            if maybe_asleep and await self._engine.stands_still():
                await self._engine.wake(timeout_s=_SLEEP_S)
            else:
                await self._engine.resume()
        except EngineError as error:
            if error.code not in _ABSENT:
                raise  # without those endpoints nobody can have stopped it by them

    async def _ask(self) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._prove(), name="engine-proof")
        try:
            await self._asking
        finally:
            self._asking = None

    async def _prove(self) -> None:
        """Have the engine answer as it did before; or keep its answer, where nobody knows how it did."""
        proof = await self._known()
        if proof is not None:
            await check(self._engine, proof, timeout_s=_ANSWER_S)
            return
        losses = self._losses()
        try:
            taken = await take_proof(self._engine, self._model, PROMPT, timeout_s=_ANSWER_S)
        except EngineError as error:
            if error.retryable:
                raise
            self._no_sleep(f"it does not answer the question by which a wake is checked ({error})")
            return
        self._proof, self._proof_losses = taken, losses
        kept = _Kept(model=self._model, url=self._engine.url, proof=taken)
        try:
            await self._proofs.write(self._lane, msgspec.json.encode(kept))
        except (RedisError, OSError) as error:
            _log.debug("A proof stays in this process alone.", lane=self._lane, error=str(error))

    async def _known(self) -> Proof | None:
        if self._proof is None and not self._read:
            self._read = True
            with suppress(RedisError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
                raw = await self._proofs.read(self._lane)
                kept = None if raw is None else msgspec.json.decode(raw, type=_Kept)
                if kept is not None and (kept.model, kept.url) == (self._model, self._engine.url):
                    self._proof, self._proof_losses = kept.proof, self._losses()
        if self._proof is not None and self._losses() != self._proof_losses:
            self._proof = None  # it was away: another process may answer now, and rightly so in its own way
        return self._proof

    async def _sleep(self, pause: int) -> None:
        async with self._lock:
            asleep = False
            try:
                if await self._engine.can_sleep():
                    await self._engine.resume()  # it holds nothing; a sleep is told of an engine that goes
                    self.stands = ""
                    await self._engine.sleep(1, timeout_s=_SLEEP_S)
                    asleep, self.stands = True, "asleep"
                else:
                    self._no_sleep(_NO_SLEEP)
            except EngineError as error:
                _log.warning(
                    "The lane's engine was not put to sleep; it is checked before it gets work again.",
                    key="engine_sleep_failed",
                    lane=self._lane,
                    engine=self._engine.url,
                    error=str(error),
                )
            done = machine.EngineAsleep if asleep else machine.SleepFailed
            self.tell(done(pause=pause))

    async def _release(self) -> None:
        try:
            async with asyncio.timeout(_RELEASE_S), self._lock:
                await self._engine.resume()
                self.stands = ""
        except (EngineError, TimeoutError) as error:
            _log.warning(
                "The lane's engine stands still and could not be told to go on; the lane's next worker does "
                "that, or POST /resume.",
                key="engine_left_still",
                lane=self._lane,
                engine=self._engine.url,
                error=str(error),
            )

    # -- words ------------------------------------------------------------------------------------------

    def _no_sleep(self, why: str) -> None:
        if not self.refusal.startswith("engine_cannot_sleep"):
            self.refusal = (
                f"engine_cannot_sleep: the policy's ladder has the rung sleep, and engine {self._engine.url} "
                f"cannot take it: {why}. It stands still with its memory kept"
            )
            _log.warning(
                "The lane's engine cannot sleep; its pauses end at the rung below.",
                key="engine_cannot_sleep",
                lane=self._lane,
                engine=self._engine.url,
                why=why,
            )
        self._can_sleep(False)

    def _trouble(self, error: EngineError) -> None:
        code = "engine_wrong_answer" if error.code == "engine_bad_answer" else "engine_unhealthy"
        self.problem = (
            f"{code}: {error}; it gets no work until it goes on and answers rightly, start it again"
        )
        if time.monotonic() - self._said_s > _SAY_EVERY_S:
            self._said_s = time.monotonic()
            _log.error(
                "The lane's engine does not go on as it was before the pause; it gets no work. It is tried "
                "again; start it again if that lasts.",
                key="engine_not_back",
                lane=self._lane,
                engine=self._engine.url,
                error=str(error),
            )
