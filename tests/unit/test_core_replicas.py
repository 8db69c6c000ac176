"""Online replicas as Slurm jobs, step by step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from hybridsched.core.codec import decode, encode
from hybridsched.core.policy import ReplicasPolicy, SlurmPolicy
from hybridsched.core.replica_values import (
    Cancel,
    Drain,
    Fleet,
    Instruction,
    LostGpu,
    Move,
    Phase,
    ReplicaTag,
    Result,
    Seen,
    SeenJob,
    Stop,
    Submit,
    Withheld,
    digest,
    read_tag,
)
from hybridsched.core.replicas import ACT_AGAIN_MS, SETTLE_MS, note, shortest_limit_s, step

LOOK = 2000.0


class Site:
    """A Slurm that does what it is told, one look after another."""

    def __init__(self, **changes: Any) -> None:
        self.policy = SlurmPolicy(enabled=True)
        self.set(**changes)
        self.fleet = Fleet(born="w")
        self.now = 0.0
        self.jobs: dict[int, SeenJob] = {}
        self.next = 1
        self.fate = "ok"
        self.lost: tuple[LostGpu, ...] = ()
        self.moves: tuple[Move, ...] = ()
        self.drained: tuple[str, ...] = ()

    def set(self, **changes: Any) -> None:
        given: dict[str, Any] = {"model": "m", "count": 2, "warm_ms": 30_000.0, "time_limit_s": 3600}
        self.wanted = ReplicasPolicy(**(given | changes))
        self.policy = msgspec.structs.replace(self.policy, replicas=(self.wanted,))

    def look(self, after: float = LOOK) -> list[Instruction]:
        self.now += after
        seen = Seen(
            at_ms=self.now,
            jobs=tuple(self.jobs.values()),
            lost=self.lost,
            moves=self.moves,
            drained=self.drained,
        )
        before = self.fleet
        self.fleet, acts = step(before, seen, self.policy)
        assert step(before, seen, self.policy) == (self.fleet, acts)
        assert decode(encode(self.fleet), Fleet) == self.fleet
        for act in acts:
            self.fleet = note(self.fleet, act, self.carry_out(act))
        return list(acts)

    def carry_out(self, act: Instruction) -> Result:
        at_ms = self.now + 10.0
        if self.fate != "ok":
            return Result(at_ms=at_ms, ok=False, error="no", sure=self.fate == "refused")
        if isinstance(act, Submit):
            number, self.next = self.next, self.next + 1
            self.jobs[number] = SeenJob(
                job=number,
                group=act.group,
                token=act.token,
                spec=act.spec,
                phase=Phase.PENDING,
                excluded=act.excluded,
            )
            return Result(at_ms=at_ms, ok=True, job=number)
        if isinstance(act, Stop | Cancel):
            self.change(act.job, phase=Phase.ENDED, serving=False)
        return Result(at_ms=at_ms, ok=True)

    def change(self, job: int, **values: Any) -> None:
        self.jobs[job] = msgspec.structs.replace(self.jobs[job], **values)

    def serve(self, *jobs: int, left_s: float = 3600.0) -> None:
        for job in jobs:
            self.change(job, phase=Phase.RUNNING, serving=True, ends_ms=self.now + left_s * 1000.0)

    def served(self, **changes: Any) -> Site:
        """Two replicas that have served for a while."""
        self.look()
        self.serve(1, 2, **changes)
        for _ in range(40):
            self.look()
        return self


def kinds(acts: list[Instruction]) -> list[str]:
    return [type(act).__name__ for act in acts]


def test_tags_are_read_again_and_others_are_not() -> None:
    tag = ReplicaTag(pool="p", token="7-1", spec="ab", group="org/m:fp8")
    assert read_tag(tag.text()) == tag
    for text in ("", "mine", "hs-replica:p:t", "hs-replica:p::s:g", "other:p:t:s:g"):
        assert read_tag(text) is None


def test_what_is_missing_is_submitted_once() -> None:
    site = Site()
    acts = site.look()
    assert kinds(acts) == ["Submit", "Submit"]
    assert len({act.token for act in acts if isinstance(act, Submit)}) == 2
    assert site.look() == []
    site.serve(1, 2)
    assert site.look() == []
    assert site.fleet.orders == ()


def test_an_answer_that_was_lost_counts_until_slurm_had_time_to_show_the_job() -> None:
    site = Site(count=1)
    site.fate = "timeout"
    (act,) = site.look()
    assert isinstance(act, Submit)
    site.fate = "ok"
    assert site.look() == []
    assert site.look(SETTLE_MS - 1) == []
    # It was taken after all, late: no second one.
    site.jobs[9] = SeenJob(job=9, group="m", token=act.token, spec=act.spec, phase=Phase.PENDING)
    assert site.look() == []
    assert site.look(SETTLE_MS) == []
    assert site.fleet.orders == ()


def test_a_submission_that_never_shows_is_made_again() -> None:
    site = Site(count=1)
    site.fate = "timeout"
    site.look()
    site.fate = "ok"
    site.look()
    assert kinds(site.look(SETTLE_MS)) == ["Submit"]


def test_refused_submissions_wait_longer_and_longer_one_at_a_time() -> None:
    site = Site()
    site.fate = "refused"
    tries = [site.now for _ in range(200) if site.look()]
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps[0] < 10_000
    assert gaps == sorted(gaps)
    assert max(gaps) <= 300_000 + LOOK
    assert "could not be submitted: no" in site.fleet.troubles[0].last
    site.fate = "ok"
    while not site.look():
        pass
    assert len(site.jobs) == 1, "one shows that it can be done before the others follow"
    site.serve(1)
    assert kinds(site.look()) == ["Submit"]


def test_jobs_that_end_before_they_are_seen_are_quick_deaths() -> None:
    site = Site(count=1)
    site.look()
    site.change(1, phase=Phase.ENDED)
    assert site.look() == []
    assert site.fleet.troubles[0].deaths == 1
    site.look(5000.0)
    del site.jobs[2]
    assert site.look() == []
    assert site.fleet.troubles[0].deaths == 2


def test_a_dead_replica_is_replaced_at_once() -> None:
    site = Site().served()
    site.change(1, phase=Phase.LEAVING, serving=False)
    assert kinds(site.look()) == ["Submit"]
    assert site.fleet.troubles == ()


def test_quick_deaths_back_off_and_a_steady_replica_ends_that() -> None:
    site = Site(count=1)
    site.look()
    site.serve(1)
    site.look()
    site.change(1, phase=Phase.ENDED, serving=False)
    assert site.look() == []
    assert site.look(5000.0 - 1) == []
    assert kinds(site.look(1)) == ["Submit"]
    site.serve(2)
    site.look()
    assert site.fleet.troubles
    site.look(60_000.0)
    assert site.fleet.troubles == ()


def test_a_successor_comes_in_time_and_the_elder_goes_when_it_serves() -> None:
    site = Site(count=1)
    site.look()
    site.serve(1)
    lead = site.wanted.warm_ms + (site.policy.notice_s + 60) * 1000.0
    assert site.look(3600_000.0 - lead - 1) == []
    (act,) = site.look(1)
    assert isinstance(act, Submit)
    assert act.why == "successor of one that does not last"
    assert site.look() == []
    site.change(2, phase=Phase.RUNNING, serving=False, ends_ms=site.now + 3600_000.0)
    assert site.look() == [], "the elder serves until the successor does"
    site.serve(2)
    assert site.look() == [Stop(job=1, group="m", why="its time limit is near and enough others serve")]
    assert site.look() == []
    assert site.fleet.troubles == ()


def test_replicas_that_end_together_are_replaced_in_waves_the_first_early_enough() -> None:
    site = Site(count=4, surge=1)
    site.look()
    site.serve(1, 2, 3, 4)
    begins: list[float] = []
    end = site.now + 3600_000.0
    while site.now < end:
        for act in site.look():
            if isinstance(act, Submit):
                begins.append(site.now)
        for job in site.jobs.values():
            if job.phase is Phase.PENDING and begins and site.now - begins[-1] >= site.wanted.warm_ms - LOOK:
                site.serve(job.job)
        alive = [job for job in site.jobs.values() if job.phase is not Phase.ENDED]
        assert len(alive) <= 5
        assert sum(bool(job.serving) for job in alive) >= 4
    assert len(begins) == 4
    assert end - begins[-1] >= site.wanted.warm_ms + (site.policy.notice_s + 60) * 1000.0


def test_a_job_whose_time_was_over_is_no_death() -> None:
    site = Site(count=1)
    site.look()
    site.serve(1, left_s=30.0)
    site.look()
    site.change(1, phase=Phase.ENDED, serving=False)
    site.look()
    assert site.fleet.troubles == ()


def test_a_changed_policy_rolls_over_within_the_surge() -> None:
    site = Site().served()
    site.set(gres="gpu:h100:1")
    assert kinds(site.look()) == ["Submit"]
    site.serve(3)
    assert kinds(site.look()) == ["Stop"]
    assert kinds(site.look()) == ["Submit"]
    site.serve(4)
    assert kinds(site.look()) == ["Stop"]
    assert site.look() == []
    assert {job.spec for job in site.jobs.values() if job.serving} == {digest(site.wanted)}


def test_a_change_of_count_or_timing_restarts_nothing() -> None:
    site = Site().served()
    site.set(count=2, surge=3, warm_ms=60_000.0)
    assert site.look() == []


def test_fewer_wanted_ends_the_cheapest_first() -> None:
    site = Site(count=4)
    site.look()
    site.serve(1, left_s=3000.0)
    site.serve(2, left_s=2000.0)
    site.change(3, phase=Phase.RUNNING, serving=False)
    site.look()
    site.set(count=1)
    acts = site.look()
    assert [(type(a).__name__, a.job) for a in acts if isinstance(a, Stop | Cancel)] == [
        ("Cancel", 4),
        ("Cancel", 3),
        ("Stop", 2),
    ]


def test_a_group_that_left_the_policy_is_ended() -> None:
    site = Site().served()
    site.policy = msgspec.structs.replace(site.policy, replicas=())
    assert kinds(site.look()) == ["Stop", "Stop"]
    assert site.look() == []


def test_a_replica_that_does_not_stop_is_cancelled_and_again() -> None:
    site = Site().served()
    site.set(count=1)
    keep = dict(site.jobs)
    assert kinds(site.look()) == ["Stop"]
    site.jobs = dict(keep)
    assert site.look(site.policy.stop_ms - 1) == []
    assert kinds(site.look(1)) == ["Cancel"]
    site.jobs = dict(keep)
    assert site.look(ACT_AGAIN_MS - 1) == []
    assert kinds(site.look(1)) == ["Cancel"]


def test_a_stop_that_could_not_be_told_is_told_again() -> None:
    site = Site().served()
    site.set(count=1)
    site.fate = "refused"
    assert kinds(site.look()) == ["Stop"]
    site.fate = "ok"
    assert kinds(site.look()) == ["Stop"]


def test_a_silent_replica_gets_a_successor_and_goes_when_that_serves() -> None:
    site = Site().served()
    site.change(1, serving=False)
    site.look()
    while not (acts := site.look()):
        pass
    assert kinds(acts) == ["Submit"]
    assert site.look() == []
    site.serve(3)
    assert site.look() == [Cancel(job=1, group="m", why="it runs and does not serve")]


def test_when_all_fall_silent_at_once_none_is_cancelled_soon() -> None:
    site = Site().served()
    site.change(1, serving=False)
    site.change(2, serving=False)
    start = site.now
    while site.now < start + 4 * site.policy.silent_ms:
        assert not any(isinstance(act, Cancel) for act in site.look())
    acts: list[Instruction] = []
    while site.now < start + 6 * site.policy.silent_ms:
        acts += [act for act in site.look() if isinstance(act, Cancel)]
    assert acts, "at last one is, for its GPU may be what a successor waits for"


def test_unknown_telemetry_is_not_silence() -> None:
    site = Site().served()
    site.change(1, serving=None)
    site.change(2, serving=None)
    for _ in range(300):
        assert site.look() == []


def test_silence_is_counted_anew_after_a_break() -> None:
    site = Site().served()
    site.change(1, serving=False)
    site.look()
    assert site.look(10 * site.policy.silent_ms) == []


def test_a_job_that_slurm_cannot_launch_is_cancelled_and_counts_as_a_death() -> None:
    site = Site(count=1)
    site.look()
    site.change(1, stuck=True)
    assert kinds(site.look()) == ["Cancel"]
    assert site.fleet.troubles[0].last == "job 1 could not be launched"
    assert kinds(site.look(5000.0)) == ["Submit"]


def test_a_standby_takes_over_the_jobs_of_the_leader() -> None:
    site = Site().served()
    site.fleet = Fleet(born="other")
    assert site.look() == []


def test_a_lost_gpu_drains_its_node_once_for_each_report() -> None:
    site = Site(count=0)
    site.lost = (LostGpu(job=5, node="n1", why="GPU 2 is lost"),)
    assert site.look() == [Drain(node="n1", job=5, reason="hybridsched: job 5: GPU 2 is lost")]
    site.drained = ("n1",)
    assert site.look() == []
    site.drained = ()  # mended and resumed by the operator
    assert site.look(ACT_AGAIN_MS) == []
    site.lost = (*site.lost, LostGpu(job=6, node="n1", why="again"))
    assert kinds(site.look()) == ["Drain"]


def test_no_more_nodes_are_drained_than_the_policy_allows() -> None:
    site = Site(count=0)
    site.lost = tuple(LostGpu(job=i, node=f"n{i}", why="gone") for i in (1, 2, 3))
    acts = site.look()
    assert kinds(acts) == ["Drain", "Withheld", "Withheld"]
    assert isinstance(acts[1], Withheld)
    assert "slurm.max_drained_nodes" in acts[1].why
    site.drained = ("n1",)
    assert site.look() == []


def test_a_drain_that_failed_is_asked_again() -> None:
    site = Site(count=0)
    site.lost = (LostGpu(job=5, node="n1", why="gone"),)
    site.fate = "refused"
    assert kinds(site.look()) == ["Drain"]
    site.fate = "ok"
    assert site.look() == []
    assert kinds(site.look(ACT_AGAIN_MS)) == ["Drain"]


@pytest.mark.parametrize(("count", "surge", "least"), [(1, 1, 300), (4, 1, 450), (4, 4, 300), (0, 1, 300)])
def test_the_shortest_time_limit(count: int, surge: int, least: int) -> None:
    wanted = ReplicasPolicy(model="m", count=count, surge=surge, warm_ms=30_000.0)
    assert shortest_limit_s(wanted, SlurmPolicy()) == least
