"""The jobs of a host that drains: which is told to leave, how and when, and when the host is given up.

Replicas and offline jobs are told to leave at once, all others are left to end. What was told and stays is
cancelled (a replica) or requeued; after `drain_ms` so is everything that is left. A host that is not empty
`requeue_ms` later goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_steps import failed
from hybridsched.core.switch_values import HostJob, HostState, JobKind, Result, Step, TellJob, jobs_said

LEAVE_MS = 60_000.0
"""Notice of offline work between signal and requeue, as its jobs ask for it (`--signal=B:USR2@60`)."""

TELL_AGAIN_MS = 30_000.0
"""A job that was told something and is still there is told again after this."""

_replace = msgspec.structs.replace


def sent_away(
    host: HostState,
    jobs: Sequence[HostJob],
    short: Mapping[str, str],
    at_ms: float,
    policy: ModesPolicy,
    stop_ms: float,
) -> tuple[HostState, tuple[TellJob, ...]]:
    """The host after a look at its jobs, and what they are told; or the host given up.

    `short`: models of which too few would serve without its replicas, with what they lack. `stop_ms`: what a
    replica may take to leave before it is cancelled.
    """
    waited = at_ms - host.since_ms
    stays = host.unsure and bool(short)  # nothing to go back to, and the floor stands on its jobs
    if waited >= policy.drain_ms + policy.requeue_ms and jobs and not stays:
        words = (*_refusals(host, jobs), *short.values())
        why = "; ".join([f"it did not become empty: {jobs_said(jobs)}", *words])
        return failed(host, why, at_ms, policy), ()
    here = {str(job.job) for job in jobs}
    host = _replace(host, told={k: at for k, at in host.told.items() if k.partition(" ")[2] in here})
    out: list[TellJob] = []
    waits = []
    for job in jobs:
        needed = job.kind is JobKind.REPLICA and job.model in short
        if needed and "leave " + str(job.job) not in host.told:
            waits.append(short[job.model])
        elif waited >= policy.drain_ms:
            word = "cancel" if job.kind is JobKind.REPLICA else "requeue"
            why = "the host changes its mode and the time for that is over"
            host = _tell(host, job, word, why, at_ms, out)
        elif job.kind is JobKind.REPLICA:
            host = _tell(host, job, "leave", "the host changes its mode", at_ms, out)
            if _told_for(host, job, "leave", at_ms) >= stop_ms:
                host = _tell(host, job, "cancel", "it did not leave in time", at_ms, out)
        elif job.kind is JobKind.OFFLINE:
            host = _tell(host, job, "leave", "the host changes its mode", at_ms, out)
            if _told_for(host, job, "leave", at_ms) >= LEAVE_MS:
                host = _tell(host, job, "requeue", "it did not leave in time", at_ms, out)
    if not waits and jobs:
        waits = ["; ".join([f"{jobs_said(jobs)} to leave", *_refusals(host, jobs)])]
    return _replace(host, wait=waits[0] if waits else ""), tuple(out)


def _tell(host: HostState, job: HostJob, how: str, why: str, at_ms: float, out: list[TellJob]) -> HostState:
    key = f"{how} {job.job}"
    last = host.told.get(key)
    if last is not None and (how == "leave" or at_ms - last < TELL_AGAIN_MS):
        return host
    out.append(TellJob(host=host.host, job=job.job, how=how, why=why))
    return _replace(host, told={**host.told, key: at_ms})


def _told_for(host: HostState, job: HostJob, how: str, at_ms: float) -> float:
    return at_ms - host.told.get(f"{how} {job.job}", at_ms)


def told(host: HostState, act: TellJob, result: Result) -> HostState:
    """The host after one of its jobs was told to leave, or could not be."""
    refused = {job: why for job, why in host.refused.items() if job != str(act.job)}
    if not result.ok and host.step is Step.DRAINING:
        refused[str(act.job)] = result.error
    return _replace(host, refused=refused)


def _refusals(host: HostState, jobs: Sequence[HostJob]) -> tuple[str, ...]:
    """Why jobs that are there could not be told to leave: each sentence once, three at most."""
    found = (host.refused.get(str(job.job), "") for job in jobs)
    return tuple(dict.fromkeys(why for why in found if why))[:3]
