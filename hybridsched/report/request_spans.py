"""An engine's use as its requests show it, for engines that log no iterations. Pure.

From one request's coming or going to the next the engine held the same requests: that stretch stands where a
simulated engine has an iteration. So lengths of iterations, and what an iteration is to a pause, are unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybridsched.engines.request_log import RequestRow
from hybridsched.report.record import EngineLog, Iteration


def engine_log(rows: Iterable[RequestRow], replica: str, *, torn: int = 0) -> EngineLog:
    """The stretches of an engine that ran these requests. Tokens count in the stretch that ends as they are
    answered, prompt tokens without those that the prefix cache had."""
    changes: dict[float, list[tuple[int, RequestRow]]] = {}
    for row in rows:
        changes.setdefault(row.s, []).append((1, row))
        changes.setdefault(max(row.s, row.e), []).append((-1, row))
    held = {False: 0, True: 0}
    since, out = 0.0, []
    for at in sorted(changes):
        ending = [row for step, row in changes[at] if step < 0]
        if held[True] or held[False]:
            prompt = {kind: sum(r.prompt - r.cached for r in ending if r.offline is kind) for kind in held}
            made = {kind: sum(r.output for r in ending if r.offline is kind) for kind in held}
            out.append(
                Iteration(
                    s=since,
                    e=at,
                    on=held[False],
                    off=held[True],
                    pon=prompt[False],
                    poff=prompt[True],
                    gon=made[False],
                    goff=made[True],
                )
            )
        for step, row in changes[at]:
            held[row.offline] += step
        since = at
    return EngineLog(replica=replica, iterations=tuple(out), torn_lines=torn)
