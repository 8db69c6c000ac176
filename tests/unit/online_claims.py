"""Claimed requests for tests."""

from __future__ import annotations

from hybridsched.store.online_values import Claimed


def claimed(request_id: str = "q") -> Claimed:
    return Claimed(
        id=request_id,
        model="m",
        priority=1,
        entry="1-0",
        consumer="r0:x",
        attempt=1,
        path="/v1/completions",
        body=b"{}",
        stream=True,
        reply="reply",
        deadline_ms=0.0,
        accepted_ms=0.0,
        cost=1,
        prompt_tokens=1,
        age_ms=0.0,
        left_ms=1000.0,
    )
