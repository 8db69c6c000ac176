"""Replicas that are away for a while: cold starts, changes of mode, jobs that end before their successors."""

from __future__ import annotations

import math

from hybridsched.core.values import Value


class Absence(Value, frozen=True, kw_only=True):
    """From `from_s` on a replica claims nothing more and ends what it holds; its lane is closed, as of an
    engine that is not healthy. It serves again, with an empty cache, from `to_s` on: that is when its engine
    has loaded, so a cold start is an absence from 0 on."""

    replica: int
    from_s: float
    to_s: float

    def __post_init__(self) -> None:
        if self.replica < 0:
            raise ValueError(f"replica {self.replica} is none; they are numbered from 0")
        if not (0.0 <= self.from_s < self.to_s and math.isfinite(self.to_s)):
            raise ValueError(
                f"an absence from {self.from_s:g} s to {self.to_s:g} s is none; it begins at 0 or later and "
                "ends after that"
            )


def parse_absence(given: str) -> Absence:
    """An absence as `REPLICA@FROM-TO`, in seconds.

    Raises:
        ValueError: it is none; the message says what is allowed.
    """
    replica, _, span = given.partition("@")
    begin, _, end = span.partition("-")
    try:
        number, from_s, to_s = int(replica.removeprefix("r")), float(begin), float(end)
    except ValueError:
        raise ValueError(f"{given!r} is no absence; give REPLICA@FROM-TO, such as r0@0-47") from None
    return Absence(replica=number, from_s=from_s, to_s=to_s)
