"""Which pool and lane a program of a user's own belongs to, by its environment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hybridsched.workers.slurm_env import HeldMark, JobPlace, held_mark, job_place, own_gpus


class LaneError(RuntimeError):
    """It cannot be told which lane this program belongs to. Raised by the first call that
    needs to know, never once the program has had a lane."""


class LaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The pool, the job and the lane of a program."""

    url: str
    pool: str
    job: JobPlace | None
    lane: str | None
    model: str | None
    held: HeldMark | None
    """Who keeps the lane for this process: `hybridsched lane run`, or the parent of a forked child."""
    engine: str | None


def lane_settings(env: Mapping[str, str]) -> LaneSettings | None:
    """What this program belongs to; None: to no pool.

    Raises:
        LaneError: it cannot be told.
    """
    url, lane, job = env.get("HYBRIDSCHED_REDIS_URL"), env.get("HYBRIDSCHED_LANE") or None, job_place(env)
    model, engine = env.get("HYBRIDSCHED_MODEL") or None, env.get("HYBRIDSCHED_ENGINE_URL") or None
    mark = held_mark(env)
    if mark is not None and not (mark.holds_in(job) and lane == mark.lane):
        # Another job's, which has submitted this one: what was said there of its lane says nothing here.
        lane = None if lane == mark.lane else lane
        model = None if model == mark.model else model
        engine = None if engine == mark.url else engine
        mark = None
    if lane == "none" or (not url and lane is None and job is None):
        return None
    if not url:
        raise LaneError(
            "this is a Slurm job or HYBRIDSCHED_LANE is set, but HYBRIDSCHED_REDIS_URL is not: set it to the "
            "pool's Redis, or set HYBRIDSCHED_LANE=none to run without regard to online work"
        )
    if lane is None and job is None:
        raise LaneError(
            "it is not known which lane this program runs on: submit it as a Slurm job, name the lane in "
            "HYBRIDSCHED_LANE, or set HYBRIDSCHED_LANE=none to take no part"
        )
    if lane is None and (gpus := own_gpus(env)):
        raise LaneError(
            f"this job has GPUs of its own ({gpus}), and a lane is a place on an engine of online's: submit "
            "it with --gres=hsfill:1,hslane:1 and no GPU to run on a lane, or set HYBRIDSCHED_LANE=none to "
            "use your GPUs and take SIGUSR2 by yourself"
        )
    return LaneSettings(
        url=url,
        pool=env.get("HYBRIDSCHED_POOL") or "default",
        job=job,
        lane=lane,
        model=model,
        held=mark,
        engine=engine,
    )
