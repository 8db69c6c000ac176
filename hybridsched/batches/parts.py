"""A batch whose lines name several models: each line is of one part, and each part is run by its own workers.

The parts are cut into chunks one by one, over the same file. Chunks are numbered so that the number modulo
how many parts there are says the part: those of part 1 of 3 are 1, 4, 7 and so on. Journals, leases, fences
and jobs are those of any batch, and what differs is which lines of its span a chunk has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from hybridsched.batches.cut import Owns
from hybridsched.batches.journal import Final, JournalState
from hybridsched.batches.progress import PartPlace, Progress
from hybridsched.batches.scan import InputIndex
from hybridsched.batches.validate import BatchLine, LineError
from hybridsched.core.values import is_model_name


def models_apart(index: InputIndex) -> tuple[str, ...]:
    """The models whose lines are to be run apart, the most frequent one first; empty: there is one at most.

    Lines that name none of them, and bad ones, are of the first part. A name that no worker can have is none
    of them: its lines would wait for ever.
    """
    named = _named(index)
    return named if len(named) > 1 else ()


def main_model(index: InputIndex) -> str | None:
    """The model that most lines name; None: none names one that a worker can be of."""
    return next(iter(_named(index)), None)


def _named(index: InputIndex) -> tuple[str, ...]:
    names = filter(is_model_name, index.models)
    return tuple(sorted(names, key=lambda name: -index.models[name]))


def owner_of(models: Sequence[str], part: int) -> Owns:
    """Says of a line whether it is of that part."""
    places = {model: place for place, model in enumerate(models)}

    def owns(verdict: BatchLine | LineError) -> bool:
        model = verdict.model if isinstance(verdict, BatchLine) else None
        return (0 if model is None else places.get(model, 0)) == part

    return owns


def owner_of_chunk(progress: Progress, chunk_no: int) -> Owns | None:
    """Says of a line of a chunk's span whether it is the chunk's; None: they all are."""
    models = progress.models
    return owner_of(models, chunk_no % len(models)) if models else None


def first_chunk(next_chunk: int, parts: int) -> int:
    """The number of the first chunk of part 0, above all that have been given out before `next_chunk`."""
    return -(-next_chunk // parts) * parts


def begin_parts(progress: Progress, models: Sequence[str]) -> tuple[PartPlace, ...]:
    """The parts of a batch that is cut anew from where its files are."""
    first = first_chunk(progress.next_chunk, len(models)) if models else 0
    return tuple(PartPlace(model, first + place) for place, model in enumerate(models))


class PartsDamagedError(ValueError):
    """The chunks of a part do not follow each other, or lack lines."""


class Merge:
    """The finished chunks of all parts, brought into the order of their lines."""

    def __init__(self, read: Callable[[int], JournalState | None]) -> None:
        """`read(number)`: what the journals of a chunk say; None: it has none."""
        self._read = read
        self._at: dict[int, JournalState] = {}
        """The next chunk of each part, where it is finished."""

    def step(self, progress: Progress) -> tuple[Progress, list[Final]] | None:
        """Go on to the end of the chunk that ends first: the places then, and the results up to there.

        None: some part's next chunk is not finished, so nobody knows the line that follows.

        Raises:
            PartsDamagedError: see there.
        """
        for place, part in enumerate(progress.parts):
            if place not in self._at:
                state = self._read(part.next_chunk)
                if state is None or not state.sealed:
                    return None
                self._check(state, part.next_chunk, progress)
                self._at[place] = state
        ends = {place: _end(state) for place, state in self._at.items()}
        offset, line = min(ends.values())
        over = [place for place, end in ends.items() if end[0] == offset]
        found: dict[int, Final] = {}
        for state in self._at.values():
            for number, final in state.finals.items():
                if progress.line <= number < line:
                    if number in found:
                        raise PartsDamagedError(f"line {number} is in two chunks")
                    found[number] = final
        at_end = len(over) == len(progress.parts) and all(_at_end(self._at[place]) for place in over)
        parts = list(progress.parts)
        for place in over:
            del self._at[place]
            part = parts[place]
            parts[place] = msgspec.structs.replace(part, next_chunk=part.next_chunk + len(parts))
        reached = msgspec.structs.replace(
            progress,
            offset=offset,
            line=line,
            at_end=at_end,
            parts=tuple(parts),
            next_chunk=max(progress.next_chunk, *(part.next_chunk for part in parts)),
        )
        return reached, [found[number] for number in sorted(found)]

    def _check(self, state: JournalState, number: int, progress: Progress) -> None:
        span = state.span
        if span is None or not span.start <= progress.offset <= span.end:
            begins = "nowhere" if span is None else f"at byte {span.start}"
            raise PartsDamagedError(
                f"chunk {number} begins {begins}, and the files are at byte {progress.offset}"
            )
        if len(state.finals) != span.lines:
            raise PartsDamagedError(f"chunk {number} lacks lines")


def _end(state: JournalState) -> tuple[int, int]:
    return (0, 0) if state.span is None else (state.span.end, state.span.next_line)


def _at_end(state: JournalState) -> bool:
    return state.span is not None and state.span.at_end
