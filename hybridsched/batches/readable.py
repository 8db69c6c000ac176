"""Whether a stranger's JSON can be read and written again: how deep it nests, where a number is too large.

What reads and writes JSON recurses once a level, here and in the engines, and holds numbers as doubles.
"""

from __future__ import annotations

import re

import msgspec

MAX_DEPTH = 200
"""Levels of objects and arrays that a line may have, itself included. Readers of JSON give up
somewhere between 200 and 1,000; no request needs a tenth of it."""

_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_whole = msgspec.json.Decoder()


def may_be_deep(data: bytes) -> bool:
    """Whether JSON has brackets enough to nest more than `MAX_DEPTH` deep; cheap, and False for most."""
    return data.count(b"[") + data.count(b"{") > MAX_DEPTH


def is_deep(value: object, most: int) -> bool:
    """Whether objects and arrays are nested more than `most` deep in decoded JSON."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return bool(level)


def nests_deeper(data: bytes, most: int) -> bool:
    """The same for text that may be no JSON: by its brackets outside of strings, without recursion."""
    depth = 0
    for found in _STRUCTURE.finditer(data):
        mark = found[0]
        if mark in (b"[", b"{"):
            depth += 1
            if depth > most:
                return True
        elif mark in (b"]", b"}"):
            depth -= 1
    return False


def number_place(line: bytes) -> str:
    """Which field of a batch line holds a number that cannot be read, in words."""
    try:
        body = _fields.decode(_fields.decode(line).get("body", b"{}"))
    except msgspec.DecodeError:
        return "the line"
    for name, field in body.items():
        try:
            _whole.decode(field)
        except msgspec.DecodeError:
            return f"body.{name[:80]}"
    return "a field beside the body"
