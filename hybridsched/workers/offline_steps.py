"""One line on its way: its prompt by slices, its own request, and what its answer means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from hybridsched.core.pacing import Grant, slice_step
from hybridsched.engines.protocol import Completion, Detokenizes, EngineError, EngineInfo
from hybridsched.log import get_logger
from hybridsched.workers import offline_plan as plan
from hybridsched.workers.offline_run import DEFAULT_BLOCK, LineResult, LineRun, refusal
from hybridsched.workers.offline_wire import LaneWire

_log = get_logger("offline")

_NEWS_S = 0.05
"""Whoever stands beside the engine ends the requests of a worker that was frozen. When it wakes, the answer
may be heard this long before the news that the gate has shut."""

_CACHE_TRUST = 0.5
"""Below this share of expected prefix hits after pauses, prompts are fed by slices again."""


class SuspendedError(Exception):
    """No failure: the line waits for the gate, and goes on from where it is."""


class LineSteps:
    """What is done with one line, and what is learnt of the engine by that."""

    def __init__(
        self,
        wire: LaneWire,
        *,
        may_send: Callable[[], bool],
        finish: Callable[[LineRun, LineResult], None],
    ) -> None:
        self._wire = wire
        self._may_send = may_send
        self._finish = finish
        self.info: EngineInfo | None = None
        self.model: str | None = None
        self.tokenizes = True
        """Whether the engine has /tokenize, as far as is known."""
        self.detokenizes = True
        """Whether it has /detokenize."""
        self._alone: dict[int, str] = {}  # how a token reads by itself, by its id
        """Tokens of the engine's vocabulary, and whether each reads as whole characters by itself."""
        self.ended_tokens = 0
        """Tokens that ended requests have brought back since this was set to 0."""
        self._cache_share = 1.0

    @property
    def block(self) -> int:
        return (self.info.block_size if self.info else None) or DEFAULT_BLOCK

    @property
    def cache_trusted(self) -> bool:
        """Whether a paused line's prefix may be taken to be in the engine's cache still."""
        return self._cache_share >= _CACHE_TRUST

    async def advance(self, run: LineRun) -> None:
        """Bring a line to its end: to a result, given to `finish`.

        Raises:
            SuspendedError: it was ended or may not be sent now; called again, it goes on.
            EngineError: what the engine raises, and what it does not own up to (see `refusal`).
        """
        longest = self.info.max_model_len if self.info else None
        remaining = None
        if run.kept is not None and self.detokenizes:
            await self._to_whole_character(run)
        if run.kept is not None:
            remaining = plan.remaining_tokens(run.shape, run.kept, longest)
            if remaining == 0:
                self._deliver(run, None)
                return
            if remaining is None:
                run.drop_kept()
        await self._feed(run, longest)
        known = run.prompt_now()
        cost = max(1, (len(known) if known is not None else run.prompt_estimate) - run.fed)
        if run.kept is not None and remaining is not None:
            path, body = plan.COMPLETIONS, plan.continuation_request(run.body, run.kept, remaining)
        else:
            path, body = run.path, plan.own_request(run.shape, run.body)
        grant = await self._grant(run, cost)
        answer = await self._wire.send(run, path, body, grant)
        if answer.status >= 400:
            self._refused(run, answer)
            return
        await self._check_end(run, answer, run.shape.max_tokens if run.kept is None else remaining)
        self._account(run, answer)
        if answer.aborted:
            before = len(run.kept.token_ids) if run.kept else 0
            run.kept = plan.keep(run.shape, answer.body, run.kept, run.prompt_ids)
            if run.kept is not None:
                run.prompt_ids = run.kept.prompt_ids
                self.ended_tokens += len(run.kept.token_ids) - before
            lost = plan.completion_tokens(answer.body) - (len(run.kept.token_ids) if run.kept else 0) + before
            run.recomputed += max(0, lost)
            run.computed -= max(0, lost)
            raise SuspendedError
        self._deliver(run, answer)

    async def _to_whole_character(self, run: LineRun) -> None:
        """Give up kept tokens behind the last whole character: the engine has held back their text."""
        engine = self._wire.engine
        if not isinstance(engine, Detokenizes):
            return
        model = run.body.get("model")
        try:
            while run.kept is not None:
                half = await self._half(engine, model, run.kept)
                if half == 0:
                    return
                for _ in range(half):
                    run.kept = run.kept and plan.one_token_less(run.kept)
                    run.recomputed += 1
        except EngineError as error:
            if error.retryable:
                raise
            self.detokenizes = False
            _log.warning(
                "The engine has no /detokenize: a character that a pause cuts through may be lost.",
                key="detokenize_missing",
                url=engine.url,
            )

    async def _half(self, engine: Detokenizes, model: str | None, kept: plan.Kept) -> int:
        """How many of the last tokens are the first part of a character, and what follows it unseen; 0: none.

        A special token does not show in the text, so that the one before it may be such a part.
        """

        async def alone(token: int) -> str:
            if token not in self._alone:
                self._alone[token] = await engine.detokenize(model, [token])
            return self._alone[token]

        last = kept.token_ids[-plan.SEAM_TOKENS :]
        # A token that is whole by itself ends with a whole character whatever stands before it.
        if plan.ends_with(kept.text, await alone(last[-1])):
            return 0
        shown = [at for at, token in enumerate(last) if plan.shows(kept.text, await alone(token))]
        if not shown or plan.ends_with(kept.text, await alone(last[shown[-1]])):
            return 0
        if plan.whole_characters(await engine.detokenize(model, [last[at] for at in shown])):
            return 0
        return len(last) - shown[-1]

    async def _feed(self, run: LineRun, longest: int | None) -> None:
        """Bring a long prompt into the prefix cache by slices, up to its last one."""
        most = self._wire.pacer.slice_tokens
        if most <= 0 or not run.shape.sliceable:
            return
        if run.prompt_ids is None and run.prompt_estimate > most and self.tokenizes:
            await self._tokenize(run)
        prompt = run.prompt_now()
        if prompt is None or (longest is not None and len(prompt) >= longest):
            return  # too long: the engine says so at once, and nothing is computed for it
        step = slice_step(most, self.block)
        while len(prompt) - run.fed > step:
            upto = run.fed + step
            grant = await self._grant(run, step)
            body = plan.slice_request(run.body, prompt, upto)
            answer = await self._wire.send(run, plan.COMPLETIONS, body, grant, is_slice=True)
            if answer.status >= 400:
                return  # the line's own request tells the user what is wrong
            await self._check_end(run, answer, 1)
            self._account(run, answer)
            if answer.aborted:
                raise SuspendedError
            run.fed = upto

    async def _check_end(self, run: LineRun, answer: Completion, most: int | None) -> None:
        """An answer that was ended early must have been ended by us, with tokens that can be: nothing else
        would keep the same request from being sent again for ever.

        Raises:
            EngineError: it is the engine's fault.
        """
        if not answer.aborted:
            return
        if not run.told_to_end and self._may_send():
            await asyncio.sleep(_NEWS_S)
            if self._may_send():
                raise self._fault(
                    "it ended a request with finish_reason abort that nobody had asked it to end"
                )
        if problem := plan.kept_problem(answer.body, most):
            raise self._fault(f"a request that was ended came back with {problem}")

    def _fault(self, problem: str) -> EngineError:
        return EngineError(
            f"engine {self._wire.engine.url}: {problem}; see its own log",
            code="engine_bad_answer",
            retryable=True,
            status=200,
        )

    async def _tokenize(self, run: LineRun) -> None:
        try:
            run.learn_prompt(await self._wire.engine.tokenize(run.path, run.body))
        except EngineError as error:
            if error.retryable:
                raise
            if error.code == "not_found":
                self.tokenizes = False
                _log.warning(
                    "The engine has no /tokenize, so long text prompts go in whole.",
                    key="tokenize_missing",
                    url=self._wire.engine.url,
                )

    async def _grant(self, run: LineRun, tokens: int) -> Grant:
        grant = await self._wire.pacer.acquire((-run.deaths, *run.order), tokens)
        if grant is None:
            raise SuspendedError
        if not self._may_send():
            self._wire.pacer.answered(grant)
            raise SuspendedError
        return grant

    def _account(self, run: LineRun, answer: Completion) -> None:
        share = run.account(answer.body, block=self.block)
        if share is not None:
            self._cache_share += 0.2 * (share - self._cache_share)
        if not answer.aborted:
            run.paused = False

    # -- ends

    def _refused(self, run: LineRun, answer: Completion) -> None:
        result = refusal(run, answer, self.model)
        if run.kept is not None:
            # The user's request was taken before: what is refused is our continuation of it.
            run.drop_kept()
            run.shape = msgspec.structs.replace(run.shape, continuable=False, why_not=result.error_message)
            raise SuspendedError
        self._finish(run, result)

    def _deliver(self, run: LineRun, answer: Completion | None) -> None:
        body = plan.final_body(run.body, run.kept, answer.body if answer else None)
        usage = body.get("usage") or {}
        self._finish(
            run,
            LineResult(
                request_id=run.request_id,
                status_code=200,
                body=body,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                output_tokens=int(usage.get("completion_tokens") or 0),
            ),
        )
