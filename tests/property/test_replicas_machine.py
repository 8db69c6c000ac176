"""Online replicas over random histories of a Slurm that is slow, forgets answers and loses jobs."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hybridsched.core.codec import decode, encode
from hybridsched.core.policy import ReplicasPolicy, SlurmPolicy
from hybridsched.core.replica_values import (
    Cancel,
    Drain,
    Fleet,
    LostGpu,
    Move,
    Phase,
    Result,
    Seen,
    SeenJob,
    Stop,
    Submit,
    Withheld,
)
from hybridsched.core.replicas import SETTLE_MS, note, step

LIMIT_MS = 3_600_000.0
LIVE = (Phase.PENDING, Phase.RUNNING)
ANSWERS = st.sampled_from(["ok", "ok", "ok", "refused", "lost but done", "lost", "done later"])


CHANGES = [
    *("begin", "begin all", "serve", "serve all", "silent", "silent all", "unknown all", "near", "near all"),
    *("die", "forget", "lose a GPU", "mend"),
]


class Cluster(RuleBasedStateMachine):
    """Slurm's side. What the policy worker may know is only what a look shows."""

    @initialize(count=st.sampled_from([1, 2, 3, 1, 2, 3, 0]), surge=st.integers(1, 2))
    def start(self, count: int, surge: int) -> None:
        self.wanted = ReplicasPolicy(model="m", count=count, surge=surge, warm_ms=20_000.0, time_limit_s=3600)
        self.policy = SlurmPolicy(enabled=True, replicas=(self.wanted,), max_drained_nodes=2)
        self.fleet = Fleet(born="w")
        self.now = 0.0
        self.jobs: dict[int, SeenJob] = {}
        self.late: list[tuple[float, Submit]] = []
        self.submissions = 0
        self.tokens: set[str] = set()
        self.lost: tuple[LostGpu, ...] = ()
        self.drained: set[str] = set()
        self.drains: list[int] = []
        self.moves: tuple[Move, ...] = ()
        self.most = 0

    def live(self) -> list[SeenJob]:
        return [job for job in self.jobs.values() if job.phase in LIVE]

    def take(self, act: Submit) -> int:
        self.submissions += 1
        number = self.submissions
        self.jobs[number] = SeenJob(
            job=number,
            group=act.group,
            token=act.token,
            spec=act.spec,
            phase=Phase.PENDING,
            excluded=act.excluded,
        )
        return number

    def change(self, number: int, **values: object) -> None:
        self.jobs[number] = msgspec.structs.replace(self.jobs[number], **values)

    @rule(after=st.sampled_from([2000.0, 8000.0, 20_000.0]), answer=ANSWERS)
    def looks(self, after: float, answer: str) -> None:
        self.look(after, answer)

    def look(self, after: float, answer: str) -> None:
        self.now += after
        for due, act in [*self.late]:
            if due <= self.now:
                self.late.remove((due, act))
                self.take(act)
        for job in self.live():
            if job.ends_ms is not None and job.ends_ms <= self.now:
                self.change(job.job, phase=Phase.ENDED, serving=False)
        seen = Seen(
            at_ms=self.now,
            jobs=tuple(self.jobs.values()),
            lost=self.lost,
            moves=self.moves,
            drained=tuple(sorted(self.drained)),
        )
        before = self.fleet
        self.fleet, acts = step(before, seen, self.policy)
        assert step(before, seen, self.policy) == (self.fleet, acts), "not deterministic"
        assert decode(encode(self.fleet), Fleet) == self.fleet
        told: set[int] = set()
        for act in acts:
            self.now += 1.0
            match act:
                case Submit():
                    assert act.token not in self.tokens, "a token was used twice"
                    self.tokens.add(act.token)
                    known = len(self.live()) + len(self.late)
                    assert known < self.wanted.count + self.wanted.surge, "one job too many was asked for"
                case Stop(job=number) | Cancel(job=number):
                    assert number not in told, "two orders for one job in one step"
                    told.add(number)
                    assert seen.jobs, "an order for a job that no look has shown"
                    assert self.jobs[number].phase in LIVE
                case Drain(node=node) | Withheld(node=node):
                    assert node not in self.drained
            self.fleet = note(self.fleet, act, self.carry_out(act, answer))

    def carry_out(self, act: object, answer: str) -> Result:
        done = answer in ("ok", "lost but done")
        number = None
        match act:
            case Submit():
                if done:
                    number = self.take(act)
                elif answer == "done later":
                    self.late.append((self.now + SETTLE_MS / 2, act))
            case Stop(job=job) | Cancel(job=job) if done:
                self.change(job, phase=Phase.LEAVING, serving=False)
            case Drain(node=node, job=job) if done:
                self.drained.add(node)
                self.drains.append(job)
                assert len(self.drained) <= self.policy.max_drained_nodes
        if answer == "ok":
            return Result(at_ms=self.now, ok=True, job=number)
        return Result(at_ms=self.now, ok=False, error=answer, sure=answer == "refused")

    @rule(change=st.sampled_from(CHANGES), which=st.integers(0, 5), left=st.floats(20_000, 300_000))
    def changes(self, change: str, which: int, left: float) -> None:
        """Something happens to one job, to all jobs, or to a node."""
        live = self.live()
        jobs = live if change.endswith("all") else live[which % len(live) :][:1] if live else []
        for job in jobs:
            running = job.phase is Phase.RUNNING
            match change.split()[0]:
                case "begin" if not running:
                    ends = self.now + (left if which % 2 else LIMIT_MS)
                    where = next(node for node in ("n1", "n2", "n3") if node not in job.excluded)
                    self.change(job.job, phase=Phase.RUNNING, serving=which > 3, ends_ms=ends, nodes=(where,))
                case "serve" if running:
                    self.change(job.job, serving=True)
                case "silent" if running:
                    self.change(job.job, serving=False)
                case "unknown" if running:
                    self.change(job.job, serving=None)
                case "near" if running:
                    self.change(job.job, ends_ms=self.now + left)
                case "die":
                    self.change(job.job, phase=(Phase.LEAVING, Phase.ENDED)[which % 2], serving=False)
        node = f"n{which % 3}"
        if change == "forget":  # as Slurm does after MinJobAge
            self.jobs = {job.job: job for job in live}
        elif change == "lose a GPU" and len(self.lost) < 5:
            self.lost = (*self.lost, LostGpu(job=1000 + len(self.lost), node=node, why="gone"))
        elif change == "mend":
            self.drained.discard(node)

    @rule(count=st.integers(0, 3), node=st.sampled_from(["n1", "n2"]))
    def a_host_wants_to_leave(self, count: int, node: str) -> None:
        self.moves = (Move(group="m", count=count, nodes=(node,)),) if count else ()

    @invariant()
    def never_too_many(self) -> None:
        if hasattr(self, "jobs"):
            assert len(self.live()) + len(self.late) <= self.wanted.count + self.wanted.surge

    @invariant()
    def one_drain_for_each_report(self) -> None:
        if hasattr(self, "drains"):
            assert len(self.fleet.orders) <= self.wanted.count + self.wanted.surge
            assert set(self.drains) <= {lost.job for lost in self.lost}

    def teardown(self) -> None:
        """A Slurm that works again comes to rest: as many serve as are wanted, and nothing more is asked."""
        if not hasattr(self, "jobs"):
            return
        self.policy = msgspec.structs.replace(self.policy, max_drained_nodes=100)
        self.moves = ()
        for _ in range(700):
            for job in self.live():
                ends = self.now + LIMIT_MS if job.ends_ms is None else job.ends_ms
                self.change(job.job, phase=Phase.RUNNING, serving=True, ends_ms=ends)
            self.look(after=2000.0, answer="ok")
        for job in self.live():
            self.change(job.job, serving=True, ends_ms=self.now + LIMIT_MS)
        asked = self.submissions
        for _ in range(20):
            self.look(after=2000.0, answer="ok")
        assert self.submissions == asked
        assert len(self.live()) == self.wanted.count


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
