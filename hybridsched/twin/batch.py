"""The running requests of one engine: a request that decodes is known by the iteration that ends it.

All of them gain one token in every iteration, so nothing is written per token: what a request has made, how
long it is and how many blocks it holds follow from the number of iterations done.
"""

from __future__ import annotations

from heapq import heappop, heappush

from hybridsched.engines.simulated.kv import BLOCK_SIZE
from hybridsched.engines.simulated.perf import Profile
from hybridsched.engines.simulated.sequence import Status
from hybridsched.twin.blocks import CountedBlocks
from hybridsched.twin.request import TwinRequest

_PHASE = BLOCK_SIZE - 1
_RUNNING = Status.RUNNING


class Batch:
    """Requests in order of admission, with the blocks they hold.

    `partial` is the one whose prompt is computed in part; all others decode, but for those that were admitted
    for the iteration that is going on.
    """

    __slots__ = (
        "_entries",
        "_phases",
        "blocks",
        "context",
        "decoding",
        "decoding_offline",
        "done",
        "ending",
        "offline",
        "partial",
        "requests",
    )

    def __init__(self, blocks: CountedBlocks) -> None:
        self.blocks = blocks
        self.done = 0
        """Iterations that have ended."""
        self.requests: dict[int, TwinRequest] = {}
        """By order of arrival."""
        self.offline = 0
        self.partial: TwinRequest | None = None
        self.decoding = 0
        self.decoding_offline = 0
        self.context = 0
        """Sum of the lengths of those that decode."""
        self.ending: list[tuple[int, int, TwinRequest]] = []
        """By the iteration that ends them; entries of those that stopped decoding before are passed over."""
        self._entries = 0
        self._phases = [0] * BLOCK_SIZE
        """How many need a new block in an iteration, by its number modulo the block's size."""

    def made(self, request: TwinRequest) -> int:
        """Output tokens of a request."""
        finish_at = request.finish_at
        return request.goal - (finish_at - self.done) if finish_at else request.made

    def computed(self, request: TwinRequest) -> int:
        """Tokens of a request that are in the KV cache."""
        if request.finish_at:
            return request.prompt_tokens + self.made(request) - 1
        return request.computed

    def need(self) -> int:
        """Blocks that the decoding requests need for the next iteration."""
        return self._phases[self.done & _PHASE]

    def admit(self, request: TwinRequest) -> None:
        request.status = _RUNNING
        self.requests[request.order] = request
        if request.offline:
            self.offline += 1

    def decode(self, request: TwinRequest) -> None:
        """From the next iteration on this request, whose tokens are all computed but the last, decodes."""
        finish_at = self.done + request.goal - request.made
        request.finish_at = finish_at
        self._entries += 1
        heappush(self.ending, (finish_at, self._entries, request))
        self._phases[(finish_at - request.prompt_tokens - request.goal + 1) & _PHASE] += 1
        self.decoding += 1
        self.context += request.total
        if request.offline:
            self.decoding_offline += 1

    def leave(self, request: TwinRequest) -> None:
        """Take a request out; from here on its own numbers hold. Its blocks are the caller's to release."""
        del self.requests[request.order]
        if request.offline:
            self.offline -= 1
        finish_at = request.finish_at
        if finish_at:
            request.made = request.goal - (finish_at - self.done)
            request.total = total = request.prompt_tokens + request.made
            request.computed = total - 1
            request.finish_at = 0
            self._phases[(finish_at - request.prompt_tokens - request.goal + 1) & _PHASE] -= 1
            self.decoding -= 1
            self.context -= total
            if request.offline:
                self.decoding_offline -= 1
        elif request is self.partial:
            self.partial = None

    def preempt(self, request: TwinRequest, held: int | None = None) -> None:
        """Take a request out with its blocks, all of which it computes again unless they stay cached."""
        self.leave(request)
        computed = request.computed
        if computed > request.known:
            request.known = computed
        request.preemptions += 1
        request.computed = 0
        self.blocks.release(blocks_of(computed) if held is None else held, computed, key_of(request))

    def steps_unchanged(self, given: int) -> int:
        """Iterations until the first of the decoding requests ends, or until there is no block for one.

        Args:
            given: how many of them have got their blocks, 0 or 1. There are enough for the first.
        """
        ending = self.ending
        finish_at, _, request = ending[0]
        while request.finish_at != finish_at:
            heappop(ending)
            finish_at, _, request = ending[0]
        steps = finish_at - self.done
        free = self.blocks.free
        if self.decoding * ((steps - given + _PHASE) // BLOCK_SIZE) <= free:
            return steps
        rounds, free = divmod(
            free, self.decoding
        )  # in as many iterations as a block has tokens each takes one
        fitting = given + rounds * BLOCK_SIZE
        while fitting < steps and (need := self._phases[(self.done + fitting) & _PHASE]) <= free:
            free -= need
            fitting += 1
        return min(fitting, steps)

    def grow(self, first: int, upto: int) -> None:
        """Give out the blocks that the decoding requests need in some of the next iterations.

        From `first` up to `upto`, which is left out; 0 is the next one.
        """
        count = upto - first
        need = count // BLOCK_SIZE * self.decoding
        rest = count & _PHASE
        if rest:
            start = (self.done + first) & _PHASE
            end = start + rest
            if end > BLOCK_SIZE:
                need += sum(self._phases[start:]) + sum(self._phases[: end - BLOCK_SIZE])
            else:
                need += sum(self._phases[start:end])
        if need:
            self.blocks.allocate(need)

    def place(self, budget: int, *, by_priority: bool) -> tuple[int, list[TwinRequest]]:
        """Give the requests their blocks for the next iteration, within `budget` tokens.

        Returns the tokens for the prompt that is computed in part (0 if there is none), and whom it has
        preempted for want of blocks, in order.
        """
        partial = self.partial
        need = self.need() if self.decoding else 0
        tokens = 0
        if partial is not None:
            computed = partial.computed
            tokens = min(partial.total - computed, budget - self.decoding)
            need += blocks_of(computed + tokens) - blocks_of(computed)
        if need > self.blocks.free:
            tokens, victims = self._make_room(budget, by_priority=by_priority)
            return (0 if self.partial is None else tokens), victims
        if need:
            self.blocks.allocate(need)
        return tokens, []

    def _make_room(self, budget: int, *, by_priority: bool) -> tuple[int, list[TwinRequest]]:
        """As `place`, one by one, as long as they last."""
        blocks = self.blocks
        running = list(self.requests.values())
        planned: dict[int, tuple[int, int]] = {}  # order -> blocks held, tokens
        victims: list[TwinRequest] = []
        partial_tokens = 0
        at = 0
        while at < len(running):
            request = running[at]
            computed = self.computed(request)
            tokens = 1
            if not request.finish_at:
                tokens = partial_tokens = min(request.total - computed, budget)
            held = blocks_of(computed)
            short = blocks_of(computed + tokens) - held
            while short > blocks.free:
                victim = max(running, key=_urgency) if by_priority else running[-1]
                place = running.index(victim)
                del running[place]
                victims.append(victim)
                if place < at:
                    at -= 1
                    victim_held, used = planned[victim.order]
                    self.preempt(victim, victim_held)
                    budget += used
                    continue
                self.preempt(victim)
                if victim is request:
                    break
            else:
                if short:
                    blocks.allocate(short)
                planned[request.order] = (held + short, tokens)
                budget -= tokens
                at += 1
        return partial_tokens, victims


Work = list[tuple[TwinRequest, int]]
"""Prompt slices of an iteration: whose, and how many tokens."""


def measure(work: Work, batch: Batch, profile: Profile) -> tuple[float, tuple[int, int, int]]:
    """Milliseconds of an iteration with prompt slices in it, beside what decodes.

    Also the tokens in the slices: online, offline, and those of both that had been computed before.
    """
    decoding, context = batch.decoding, batch.context
    prefill = offline = pairs = again = 0
    for request, tokens in work:
        computed = request.computed
        if tokens == 1 and request.made and computed + 1 == request.total:
            decoding += 1  # all the others of its tokens were cached: it decodes again
            context += request.total
        else:
            prefill += tokens
            pairs += tokens * (tokens + 2 * computed)
            if request.offline:
                offline += tokens
        if request.known > computed:
            again += min(request.known, computed + tokens) - computed
    ms = profile.iteration_ms(
        prefill_tokens=prefill, batch_decode=decoding, total_context=context, prefill_pairs=pairs
    )
    return ms, (prefill - offline, offline, again)


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


def key_of(request: TwinRequest) -> object:
    """What a request's prefix is found by: itself, if nobody else will ask."""
    return request if request.cache_key is None else request.cache_key


def _urgency(request: TwinRequest) -> tuple[int, float, int]:
    return (request.priority, request.arrival, request.order)
