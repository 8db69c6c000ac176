"""Who waits for a sequence: a whole answer, or a stream that may merge tokens."""

from __future__ import annotations

import asyncio

from hybridsched.engines.simulated import tokens
from hybridsched.engines.simulated.sequence import Seq


class Answer:
    """What one HTTP request waits for: all its sequences, their tokens, or a reason why none will come."""

    def __init__(self, *, streaming: bool) -> None:
        self.streaming = streaming
        self.open = 0
        self.gone = False
        """The client left."""
        self.died = False
        """The engine died."""
        self.changed: dict[int, ChoiceSink] = {}
        """Choices with something new to send, by index."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def over(self) -> bool:
        return self.gone or self.died or self.open == 0

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def leave(self) -> None:
        self.gone = True
        self.changed.clear()
        self.wake()

    async def wait(self) -> None:
        """Until something changed or all is over."""
        if self.over or (self.streaming and self.changed):
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class ChoiceSink:
    """One sequence of an answer."""

    def __init__(self, answer: Answer, index: int, stop: tuple[str, ...]) -> None:
        self.answer = answer
        self.index = index
        self.streaming = answer.streaming
        self.stop = stop
        self.stop_reason: str | int | None = None
        self.seq: Seq | None = None
        self.fresh: list[int] = []
        """Token ids not sent yet. A late reader finds several and sends them as one event."""
        self._text = ""
        self._sent = 0
        answer.open += 1

    def token(self, seq: Seq) -> str | None:
        if self.answer.gone:
            return None
        token = seq.output[-1]
        reason: str | None = None
        if self.stop:
            self._text += tokens.decode((token,))
            for stop in self.stop:
                at = self._text.find(stop) if stop else -1
                if at >= 0:
                    self._text = self._text[:at]
                    self.stop_reason = stop
                    reason = "stop"
                    break
        if self.streaming:
            self.seq = seq
            self.fresh.append(token)
            self.answer.changed[self.index] = self
            self.answer.wake()
        return reason

    def done(self, seq: Seq) -> None:
        self.seq = seq
        if seq.finish_reason == "stop" and self.stop_reason is None and seq.output:
            last = seq.output[-1]
            self.stop_reason = last if last in seq.stop_token_ids else None
        self.answer.open -= 1
        self.answer.changed[self.index] = self
        if self.streaming or self.answer.open == 0:
            self.answer.wake()

    def failed(self) -> None:
        self.answer.died = True
        self.answer.wake()

    def text(self) -> str:
        """The whole text, cut before a stop string."""
        if self.stop:
            return self._text
        return tokens.decode(self.seq.output) if self.seq is not None else ""

    def take(self) -> tuple[str, list[int], str | None]:
        """New text, token ids and finish reason. With stop strings, text that may begin one waits."""
        fresh, self.fresh = self.fresh, []
        reason = self.seq.finish_reason if self.seq is not None else None
        if not self.stop:
            return tokens.decode(fresh), fresh, reason
        upto = len(self._text)
        if reason is None:
            upto = max(self._sent, upto - max(map(len, self.stop)) + 1)
        text = self._text[self._sent : upto]
        self._sent = upto
        return text, fresh, reason
