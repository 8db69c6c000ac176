"""Request bodies with a trace's lengths: prompts of an exact length, and batches made of them."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

from hybridsched.traces import TraceRow

_TOKEN_IDS = [str(i) for i in range(300, 500)]
"""Token ids that prompts are made of: in every vocabulary, and three digits keep the JSON short."""
_OWN = 32
"""Tokens at the start of a prompt that are its own: two KV blocks, after which a prefix is never shared."""
_TAIL = 4096
"""Tokens of the text that the rest of every prompt is cut from (over and over)."""


@functools.cache
def _tail() -> str:
    source = random.Random("tail")  # noqa: S311 - must be repeatable, guards no secret
    return ",".join(source.choices(_TOKEN_IDS, k=_TAIL)) + ","


def prompt_json(salt: str, index: int, length: int) -> str:
    """A prompt of exactly `length` token ids as a JSON array.

    The same salt and index give the same prompt; two of them share no prefix worth caching. Each token takes
    four characters, so most of a prompt is cut out of one long text: drawing millions takes seconds.
    """
    source = random.Random(f"{salt}/{index}")  # noqa: S311 - must be repeatable, guards no secret
    own = ",".join(source.choices(_TOKEN_IDS, k=min(_OWN, length)))
    rest = length - _OWN
    if rest <= 0:
        return f"[{own}]"
    start = source.randrange(_TAIL)
    text = _tail() * ((start + rest) // _TAIL + 1)
    return f"[{own},{text[4 * start : 4 * (start + rest) - 1]}]"


def completion_body(model: str, row: TraceRow, *, salt: str, index: int, stream: bool) -> bytes:
    """Body of `/v1/completions` with exactly the row's prompt and output lengths. `model` is plain ASCII."""
    tail = ',"stream":true,"stream_options":{"include_usage":true}' if stream else ""
    return (
        f'{{"model":"{model}","prompt":{prompt_json(salt, index, row.prompt_tokens)},'
        f'"max_tokens":{row.output_tokens},"ignore_eos":true,"temperature":0{tail}}}'
    ).encode()


def write_batch(path: Path, lengths: Sequence[TraceRow], *, lines: int, model: str, salt: str) -> None:
    """Write a batch file in the OpenAI format whose lines have the lengths of `lengths`, in turn."""
    with path.open("wb") as file:
        for number, row in enumerate(itertools.islice(itertools.cycle(lengths), lines)):
            body = completion_body(model, row, salt=salt, index=number, stream=False)
            file.write(
                f'{{"custom_id":"line-{number:06d}","method":"POST","url":"/v1/completions","body":'.encode()
                + body
                + b"}\n"
            )


def write_trace(path: Path, rows: Sequence[TraceRow]) -> None:
    """Write a trace as the CSV that `hybridsched.traces` reads."""
    with path.open("w", encoding="ascii") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n")
        for row in rows:
            file.write(f"{row.arrival_s!r},{row.prompt_tokens},{row.output_tokens}\n")


_WORDS = ("the", "gate", "of", "a", "lane", "opens", "when", "engine", "idle", "has", "been", "for", "window")
_MIXED_PROMPT = (40, 300)
_MIXED_OUTPUT = (40, 160)
"""Least and most tokens of a line of a mixed batch."""


def write_mixed_batch(path: Path, *, lines: int, model: str, salt: str) -> None:
    """Write a batch of all the ways to ask for text (token ids, a text, a chat), greedy, of modest lengths.

    The same arguments give the same file.
    """
    with path.open("w", encoding="utf-8") as file:
        for number in range(lines):
            source = random.Random(f"{salt}/mixed/{number}")  # noqa: S311 - must be repeatable
            length = source.randint(*_MIXED_PROMPT)
            body: dict[str, object] = {
                "model": model,
                "max_tokens": source.randint(*_MIXED_OUTPUT),
                "ignore_eos": True,
                "temperature": 0,
            }
            url = "/v1/completions"
            text = f"{number} " + " ".join(source.choices(_WORDS, k=length // 4))
            match number % 5:
                case 3:
                    body["prompt"] = text
                case 4:
                    url = "/v1/chat/completions"
                    body["messages"] = [{"role": "user", "content": text}]
                case _:
                    body["prompt"] = json.loads(prompt_json(salt, number, length))
            line = {"custom_id": f"line-{number:06d}", "method": "POST", "url": url, "body": body}
            file.write(json.dumps(line) + "\n")
