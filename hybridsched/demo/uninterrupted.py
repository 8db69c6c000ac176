"""Lines of the batch that were interrupted, run again without a pause: is what they wrote the same?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hybridsched.batches.layout import BatchFiles
from hybridsched.engines.protocol import EngineError
from hybridsched.engines.request_log import RequestRow
from hybridsched.engines.vllm_http import VllmHttpEngine
from hybridsched.report.record import Interrupted

AT_ONCE = 4
"""Lines that run again beside each other on one engine."""
TIMEOUT_S = 300.0
_NAMED = 10


def interrupted_ids(rows: Iterable[RequestRow]) -> list[str]:
    """custom_ids of lines whose request a pause ended when it had tokens, in the order of their first one."""
    return list(dict.fromkeys(row.id for row in rows if row.offline and row.end == "abort" and row.output))


async def compare(files: BatchFiles, ids: Sequence[str], urls: Sequence[str]) -> Interrupted:
    """Run the lines `ids` again, undisturbed, on the engines `urls`, and compare what they wrote.

    Only finished lines of temperature 0 are compared: others have no answer that must come twice.

    Raises:
        OSError: a file cannot be read.
        EngineError: an engine does not answer.
    """
    wanted = set(ids)
    before = {one["custom_id"]: one for one in _lines(files.output) if one["custom_id"] in wanted}
    again = [
        line
        for line in _lines(files.input)
        if line.get("custom_id") in before and line["body"].get("temperature") == 0
    ]
    different: list[str] = []
    engines = [VllmHttpEngine(url) for url in urls]
    places = asyncio.Semaphore(AT_ONCE * len(engines))

    async def one(number: int, line: dict[str, Any]) -> None:
        async with places:
            answer = await engines[number % len(engines)].complete(
                line["url"], line["body"], request_id=f"hsagain-{number}", timeout_s=TIMEOUT_S
            )
        if answer.status != 200:
            raise EngineError(
                f"line {line['custom_id']} was refused when it was run again: {answer.body}",
                code="bad_request",
                retryable=False,
            )
        if _written(answer.body) != _written(before[line["custom_id"]]["response"]["body"]):
            different.append(line["custom_id"])

    try:
        await asyncio.gather(*(one(number, line) for number, line in enumerate(again)))
    finally:
        for engine in engines:
            await engine.close()
    return Interrupted(
        lines=len(ids),
        compared=len(again),
        identical=len(again) - len(different),
        different=tuple(sorted(different)[:_NAMED]),
    )


def _written(body: dict[str, Any]) -> tuple[Any, ...]:
    """Text, finish reason and tokens of each choice."""
    choices = [
        (choice["message"]["content"] if "message" in choice else choice["text"], choice["finish_reason"])
        for choice in body["choices"]
    ]
    usage = body["usage"]
    return (*choices, usage["prompt_tokens"], usage["completion_tokens"])


def _lines(path: str) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a batch's input may hold lines that are none."""
    found = []
    for text in Path(path).read_bytes().splitlines():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("body") or value.get("response"), dict):
            found.append(value)
    return found
