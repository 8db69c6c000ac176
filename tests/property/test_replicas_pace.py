"""Online replicas on a Slurm that works: with any allowed policy, successors come at a bounded pace."""

from __future__ import annotations

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridsched.core.policy import ReplicasPolicy, SlurmPolicy
from hybridsched.core.replica_values import Cancel, Fleet, Phase, Result, Seen, SeenJob, Stop, Submit
from hybridsched.core.replicas import note, shortest_limit_s, step

LOOK_MS = 2000.0


class Slurm:
    """Starts every job at its submission; each serves after `warm_ms`, and ends `leave_ms` after its stop."""

    def __init__(self, wanted: ReplicasPolicy, policy: SlurmPolicy, leave_ms: float, apart_ms: float) -> None:
        self.wanted, self.policy = wanted, msgspec.structs.replace(policy, replicas=(wanted,))
        self.leave_ms, self.apart_ms = leave_ms, apart_ms
        self.fleet, self.now = Fleet(born="w"), 0.0
        self.jobs: dict[int, SeenJob] = {}
        self.serves_ms: dict[int, float] = {}
        self.leaves_ms: dict[int, float] = {}
        self.submitted_ms: list[float] = []

    def look(self) -> None:
        self.now += LOOK_MS
        for number, job in self.jobs.items():
            over = min(job.ends_ms or 0.0, self.leaves_ms.get(number, float("inf"))) <= self.now
            if job.phase is Phase.RUNNING:
                serving = self.serves_ms[number] <= self.now
                phase = Phase.ENDED if over else Phase.RUNNING
                self.jobs[number] = msgspec.structs.replace(job, serving=serving and not over, phase=phase)
        alive = {number: job for number, job in self.jobs.items() if job.phase is Phase.RUNNING}
        self.jobs = alive
        seen = Seen(at_ms=self.now, jobs=tuple(alive.values()))
        self.fleet, acts = step(self.fleet, seen, self.policy)
        for act in acts:
            number: int | None = None
            match act:
                case Submit():
                    number = self.start(act)
                case Stop(job=told) | Cancel(job=told):
                    self.leaves_ms.setdefault(told, self.now + self.leave_ms)
            self.fleet = note(self.fleet, act, Result(at_ms=self.now, ok=True, job=number))

    def start(self, act: Submit) -> int:
        number = len(self.submitted_ms) + 1
        self.submitted_ms.append(self.now)
        # The first ones find their GPUs one after the other.
        begins_ms = self.now + (self.apart_ms * number if number <= self.wanted.count else 0.0)
        self.serves_ms[number] = begins_ms + self.wanted.warm_ms
        self.jobs[number] = SeenJob(
            job=number,
            group=act.group,
            token=act.token,
            spec=act.spec,
            phase=Phase.RUNNING,
            serving=False,
            ends_ms=begins_ms + self.wanted.time_limit_s * 1000.0,
        )
        return number


@given(
    count=st.integers(1, 5),
    surge=st.integers(1, 3),
    warm_s=st.integers(1, 120),
    stop_s=st.integers(0, 90),
    notice_s=st.sampled_from([0, 30, 60]),
    beyond_s=st.sampled_from([0, 1, 30, 600]),
    leave_share=st.sampled_from([0.0, 0.5, 1.0]),
    apart_s=st.sampled_from([0, 5, 20, 60]),
)
@example(count=2, surge=1, warm_s=20, stop_s=60, notice_s=60, beyond_s=0, leave_share=0.0, apart_s=0)
@example(count=1, surge=1, warm_s=20, stop_s=60, notice_s=60, beyond_s=0, leave_share=0.0, apart_s=0)
@example(count=5, surge=1, warm_s=1, stop_s=4, notice_s=0, beyond_s=0, leave_share=0.0, apart_s=60)
@settings(max_examples=60, deadline=None)
def test_a_place_is_replaced_about_twice_within_a_time_limit_at_most(
    count: int,
    surge: int,
    warm_s: int,
    stop_s: int,
    notice_s: int,
    beyond_s: int,
    leave_share: float,
    apart_s: int,
) -> None:
    policy = SlurmPolicy(enabled=True, notice_s=notice_s, stop_ms=stop_s * 1000.0)
    wanted = ReplicasPolicy(model="m", count=count, surge=surge, warm_ms=warm_s * 1000.0)
    limit_s = shortest_limit_s(wanted, policy) + beyond_s
    wanted = msgspec.structs.replace(wanted, time_limit_s=limit_s)
    slurm = Slurm(wanted, policy, leave_share * stop_s * 1000.0, apart_s * 1000.0)
    while slurm.now < 6 * limit_s * 1000.0:
        slurm.look()
    limit_ms = limit_s * 1000.0
    times = slurm.submitted_ms[count:]  # the first ones replace nobody

    def most_within_a_limit(times: list[float]) -> int:
        return max((sum(0.0 <= at - first < limit_ms for at in times) for first in times), default=0)

    # Where the first ones came one after the other, their successors are warmed in waves, some of them early.
    assert most_within_a_limit(times) <= 3 * count
    assert most_within_a_limit([at for at in times if at >= 2 * limit_ms]) <= 2 * count + surge
    assert len(times) >= 2 * count, "successors come"
