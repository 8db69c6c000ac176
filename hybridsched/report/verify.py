"""Count what became of a batch from its files: input, output, errors, journals. No counter is trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hybridsched.batches.folder import Folder
from hybridsched.batches.journal import read_all
from hybridsched.batches.layout import BatchFiles
from hybridsched.batches.lines import iter_lines
from hybridsched.batches.records import record_id
from hybridsched.report.record import BatchCheck


class _Limits(msgspec.Struct):
    max_tokens: int | None = None
    ignore_eos: bool = False


class _Line(msgspec.Struct):
    body: _Limits


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body | None = None


class _Result(msgspec.Struct):
    id: str
    response: _Response | None = None


class _Kept(msgspec.Struct):
    """What a worker keeps of an unfinished line; other fields are its own."""

    token_ids: list[int] = []
    body: _Body | None = None
    """The engine's answer to the first part, which says how long the prompt is."""


_RESULT = msgspec.json.Decoder(_Result)
_LINE = msgspec.json.Decoder(_Line)


def verify_batch(files: BatchFiles) -> BatchCheck:
    """Read the files of a batch and count.

    A line is finished when its result stands in the output file, the error file, or, while the batch has not
    ended, a journal. While the batch has its work folder every other line is remaining, except one that
    stands before a line that the files already hold: output is in input order, so that one is missing. When
    the folder is gone the batch has ended and every line without a result is missing.

    Raises:
        BatchFileError, OSError: a file cannot be read.
    """
    work = Path(files.work)
    open_still = work.is_dir()
    out, err = (_results(Path(name)) for name in (files.output, files.errors))
    held = read_all(Folder.open(work)) if open_still else None
    seen = Counter(result.id for result in (*out, *err))
    completed = {result.id: result for result in reversed(out)}
    failed = {result.id for result in err}
    kept_prompt = kept = assembled_to = 0
    numbers: dict[str, int] = {}
    limits: dict[str, int] = {}
    for number, limit in _input(Path(files.input)):
        name = record_id(files.batch_id, number)
        numbers[name] = number
        if limit is not None:
            limits[name] = limit
        if name in seen:
            assembled_to = number
        elif held is not None and number in held.finals:
            final = held.finals[number]
            if final.failed:
                failed.add(name)
            else:
                completed[name] = _RESULT.decode(final.record)
        elif held is not None and number in held.kept:
            state = msgspec.json.decode(held.kept[number], type=_Kept)
            kept_prompt += _usage(state).prompt_tokens
            kept += len(state.token_ids)
    done = completed.keys() | failed
    without = [number for name, number in numbers.items() if name not in done]
    unfinished = sum(number > assembled_to for number in without) if open_still else 0
    usage = [_usage(result.response) for name, result in completed.items() if name in numbers]
    wrong_length = sum(
        name in limits and _usage(result.response).completion_tokens != limits[name]
        for name, result in completed.items()
    )
    known = {name: count for name, count in seen.items() if name in numbers}
    return BatchCheck(
        lines=len(numbers),
        completed=sum(name in numbers for name in completed),
        failed=sum(name in numbers for name in failed - completed.keys()),
        remaining=unfinished,
        missing=len(without) - unfinished,
        # a result that belongs to no line is one too many as well
        duplicates=sum(count - 1 for count in known.values()) + sum(seen.values()) - sum(known.values()),
        prompt_tokens=sum(one.prompt_tokens for one in usage),
        output_tokens=sum(one.completion_tokens for one in usage),
        wrong_length=wrong_length,
        kept_prompt_tokens=kept_prompt,
        kept_tokens=kept,
    )


def _usage(part: _Response | _Kept | None) -> _Usage:
    body = part.body if part else None
    return (body.usage if body else None) or _Usage()


def _results(path: Path) -> list[_Result]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [_RESULT.decode(line) for line in file if line.endswith(b"\n")]


def _input(path: Path) -> Iterator[tuple[int, int | None]]:
    """Number of each line that is not blank, and the exact output length that it asks for, if it does."""
    with path.open("rb") as file:
        for line in iter_lines(file):
            yield line.number, None if line.data is None else _exact_length(line.data)


def _exact_length(data: bytes) -> int | None:
    try:
        body = _LINE.decode(data).body
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # a bad line has its own verdict in the error file
    return body.max_tokens if body.ignore_eos else None
