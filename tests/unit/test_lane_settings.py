"""Whose lane a program runs on, by its environment, and Slurm's notice before anybody acts on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hybridsched.store.lane_holders import Place
from hybridsched.workers.lane_settings import LaneError, lane_settings
from hybridsched.workers.slurm_env import HELD_VARIABLE, HeldMark, JobPlace, held_by, held_mark

OUTER = JobPlace(job="7", node="n1", restarts=1)
PLACE = Place(lane="r-0", replica="r", model="tiny", url="http://127.0.0.1:1")
MARK = held_by(OUTER, "host:1:ab", PLACE)

INSIDE = {
    "HYBRIDSCHED_REDIS_URL": "redis://r",
    "HYBRIDSCHED_LANE": "r-0",
    "HYBRIDSCHED_MODEL": "tiny",
    "HYBRIDSCHED_ENGINE_URL": "http://127.0.0.1:1",
    HELD_VARIABLE: MARK.text(),
    "SLURM_JOB_ID": "7",
    "SLURMD_NODENAME": "n1",
    "SLURM_RESTART_COUNT": "1",
}
"""The environment of a program below `lane run`."""


def test_the_program_of_lane_run_follows_its_lane() -> None:
    found = lane_settings(INSIDE)
    assert found is not None
    assert (found.held, found.lane, found.model, found.engine) == (MARK, "r-0", "tiny", PLACE.url)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_JOB_ID": "8"},  # submitted from inside
        {"SLURM_RESTART_COUNT": "2"},  # and run again
        {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"},
    ],
)
def test_another_jobs_lane_is_not_taken_for_ones_own(change: dict[str, str]) -> None:
    """It ran on that job's lane, held nothing, and was not requeued."""
    found = lane_settings(INSIDE | change)
    assert found is not None
    assert (found.held, found.lane, found.model, found.engine) == (None, None, None, None)


def test_what_the_user_says_besides_still_counts() -> None:
    given = {"SLURM_JOB_ID": "8", "HYBRIDSCHED_LANE": "r-1", "HYBRIDSCHED_MODEL": "large"}
    found = lane_settings(INSIDE | given)
    assert found is not None
    assert (found.held, found.lane, found.model) == (None, "r-1", "large")
    assert lane_settings(INSIDE | {"HYBRIDSCHED_LANE": "none"}) is None
    named = lane_settings(INSIDE | {"HYBRIDSCHED_LANE": "r-1"})
    assert named is not None
    assert named.held is None, "another lane than the one that is kept"


@pytest.mark.parametrize("raw", ["1", "{", "[]", '{"job": 7}', "\ud800"])
def test_a_mark_that_cannot_be_read_holds_nothing(raw: str) -> None:
    assert held_mark({HELD_VARIABLE: raw}) == HeldMark()
    found = lane_settings(INSIDE | {HELD_VARIABLE: raw})
    assert found is not None
    assert found.held is None


def test_a_job_with_gpus_of_its_own_is_told_at_once() -> None:
    """It held its GPU and waited for a lane that its node does not have."""
    alone = {name: value for name, value in INSIDE.items() if name.startswith(("SLURM", "HYBRIDSCHED_REDIS"))}
    with pytest.raises(LaneError, match="HYBRIDSCHED_LANE=none"):
        lane_settings(alone | {"SLURM_JOB_GPUS": "0"})
    assert lane_settings(alone | {"SLURM_JOB_GPUS": "0", "HYBRIDSCHED_LANE": "none"}) is None
    assert lane_settings(alone | {"SLURM_JOB_GPUS": "0", "HYBRIDSCHED_LANE": "r-0"}) is not None


def python(
    script: str, *arguments: str, env: dict[str, str], ignored: bool = False
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "HYBRIDSCHED"))}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=clean | env,
        timeout=60,
        check=False,
        preexec_fn=(lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN)) if ignored else None,
    )


TOLD = "import os, signal\nos.kill(os.getpid(), signal.SIGUSR2)\n"
JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize("ignored", [False, True])
def test_a_notice_after_the_import_of_lane_is_kept(ignored: bool) -> None:
    script = "from hybridsched import lane, notice\n" + TOLD + "print(notice.came(), notice.is_free())\n"
    assert python(script, ignored=ignored, env=JOB).stdout == "True True\n"
    off = python(script, env=JOB | {"HYBRIDSCHED_LANE": "none"})
    assert off.returncode == -signal.SIGUSR2, "who takes no part keeps the default"


def test_a_handler_of_ones_own_stays() -> None:
    script = (
        "import signal\nsignal.signal(signal.SIGUSR2, lambda *_: print('mine'))\n"
        "from hybridsched import lane, notice\n" + TOLD + "print(notice.came(), notice.is_free())\n"
    )
    assert python(script, env=JOB).stdout == "mine\nFalse False\n"


@pytest.mark.parametrize(
    ("words", "heard"), [(["lane", "run"], True), (["--log-level=debug", "worker"], True), (["batch"], False)]
)
def test_the_commands_that_act_on_it_hear_it_from_the_start(words: list[str], heard: bool) -> None:
    script = "import hybridsched.cli, sys\nassert 'click' not in sys.modules\n" + TOLD + "print('alive')\n"
    done = python(script, *words, env=JOB)
    assert (done.stdout == "alive\n") is heard
    assert python(script, *words, env={}).returncode == -signal.SIGUSR2, "outside Slurm nothing is taken"
