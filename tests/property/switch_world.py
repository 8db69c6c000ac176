"""For tests of hosts that change their mode: a Slurm and GPUs that fail, or do what they were told and do not
say so, and a policy worker on them that may be killed between any two acts."""

from __future__ import annotations

from typing import Any

import msgspec

from hybridsched.core.codec import decode, encode
from hybridsched.core.mig import LayoutEntry
from hybridsched.core.modes import HostGroup, Mode, ModeEngine, ModesPolicy
from hybridsched.core.switch import REASON, note, step, taken_over
from hybridsched.core.switch_values import (
    Act,
    Check,
    Cut,
    DrainHost,
    EnterRecord,
    Finished,
    HostJob,
    HostSeen,
    JobKind,
    LeaveRecords,
    Result,
    ResumeHost,
    Seen,
    Step,
    SwitchState,
    Target,
    TellJob,
    Verify,
    counts,
    leaving,
)

ACTS = ("drain", "leave", "cut", "enter", "verify", "resume")


def pool(hosts: int, most: int, *, floor: int = 0, per_host: int = 2) -> ModesPolicy:
    """Two modes of one model; `floor` replicas in both."""
    cut = (LayoutEntry(mig_enabled=True, mig_devices={"1g.10gb": 7}),)
    engines = {
        "day": ModeEngine(model="m", name="small", per_host=per_host, floor=floor, warm_ms=5_000.0),
        "night": ModeEngine(model="m", name="big", per_host=1, floor=min(floor, 1), warm_ms=5_000.0),
    }
    return ModesPolicy(
        enabled=True,
        max_unavailable=most,
        drain_ms=20_000.0,
        requeue_ms=10_000.0,
        act_ms=10_000.0,
        retry_ms=20_000.0,
        mig_configs={"cut": cut, "whole": (LayoutEntry(mig_enabled=False),)},
        hosts=(HostGroup(names=f"h[1-{hosts}]"),),
        mode=(
            Mode(name="day", layout="cut", engines=(engines["day"],)),
            Mode(name="night", layout="whole", node="{host}night", engines=(engines["night"],)),
        ),
    )


class World:
    """Slurm, the GPUs and the replicas. `plan` says how each act ends: ok, passing, for good, unheard (done,
    and the answer never came), half (not done, and no answer)."""

    def __init__(self, policy: ModesPolicy) -> None:
        self.policy = policy
        names = policy.all_hosts()
        self.record: dict[str, str | None] = dict.fromkeys(names, "day")
        self.drained: dict[str, bool] = dict.fromkeys(names, False)
        self.layout = dict.fromkeys(names, "cut")
        self.booted = dict.fromkeys(names, 1e9)
        self.jobs: dict[str, dict[int, HostJob]] = {name: {} for name in names}
        self.numbers = 0
        self.stubborn: set[int] = set()
        self.gone_at: dict[int, float] = {}
        self.engines_work = True
        self.served_least = 99

    def add(self, host: str, kind: JobKind, **values: Any) -> int:
        self.numbers += 1
        self.jobs[host][self.numbers] = HostJob(job=self.numbers, kind=kind, **values)
        return self.numbers

    def start_replicas(self, wanted: dict[str, int], going: frozenset[str]) -> None:
        """As policy worker and Slurm do: where a record takes jobs and replicas of its mode are lacking."""
        for host, record in self.record.items():
            mode = self.policy.named(record or "")
            if mode is None or self.drained[host] or host in going or not wanted.get(mode.name):
                continue
            for engine in mode.engines:
                have = [j for j in self.jobs[host].values() if j.group == mode.group(engine)]
                for _ in range(engine.per_host - len(have)):
                    self.add(host, JobKind.REPLICA, model=engine.model, group=mode.group(engine))

    def serve(self) -> None:
        if self.engines_work:
            for jobs in self.jobs.values():
                for number, job in jobs.items():
                    if job.kind is JobKind.REPLICA:
                        jobs[number] = msgspec.structs.replace(job, serving=True)

    def reboot(self, host: str) -> None:
        """Its jobs are gone, and so are its slices."""
        self.jobs[host].clear()
        self.booted[host] += 600_000.0
        if self.layout[host] == "cut":
            self.layout[host] = "nothing"

    def differs(self, act: Act) -> bool:
        """Whether what is read back of a host that stands is not as its mode says."""
        if not (isinstance(act, Check) or (isinstance(act, Verify) and act.standing)):
            return False
        found = self.policy.named(act.mode)
        return found is None or self.layout[act.host] != found.layout

    def serving(self) -> int:
        return sum(job.serving for jobs in self.jobs.values() for job in jobs.values())

    def look(self, at_ms: float) -> Seen:
        hosts = tuple(
            HostSeen(
                host=host,
                mode=record,
                accepts=record is not None and not self.drained[host],
                booted_ms=None if record is None else self.booted[host],
                jobs=tuple(self.jobs[host].values()),
            )
            for host, record in self.record.items()
        )
        return Seen(at_ms=at_ms, hosts=hosts)

    def do(self, act: Act) -> None:
        """The act, as it takes effect. Nothing may be cut or reconfigured under a job."""
        host = act.host
        match act:
            case DrainHost(reason=reason):
                assert reason.startswith(REASON)
                self.drained[host] = True
            case LeaveRecords():
                assert not self.jobs[host], "a node record was taken away under jobs"
                self.record[host] = None
            case Cut(mode=mode):
                assert self.record[host] is None
                assert not self.jobs[host], "GPUs were cut under jobs"
                found = self.policy.named(mode)
                assert found is not None
                self.layout[host] = found.layout
            case EnterRecord(mode=mode):
                self.record[host], self.drained[host] = mode, True
            case ResumeHost(mode=mode):
                found = self.policy.named(mode)
                assert found is not None
                assert self.record[host] == mode
                assert self.layout[host] == found.layout, "Slurm got GPUs that are cut otherwise"
                self.drained[host] = False
            case TellJob(job=job, how=how):
                if how == "leave" and job in self.stubborn:
                    return
                if not (how == "requeue" and job in self.stubborn):
                    self.jobs[host].pop(job, None)
            case Verify(mode=mode):
                found = self.policy.named(mode)
                assert found is not None
                assert self.record[host] == mode
                assert self.layout[host] == found.layout
            case _:
                pass


class Driver:
    """A policy worker on the world, that may be killed at any act."""

    def __init__(self, policy: ModesPolicy) -> None:
        self.policy = policy
        self.world = World(policy)
        self.now = 1_000_000.0
        self.state = SwitchState()
        self.journal = encode(self.state)
        self.targets: dict[str, Target] = {}
        self.ended: list[Finished] = []
        self.issued = 0

    def want(self, mode: str, *, ordered: bool = False) -> None:
        self.issued += 1
        one = Target(mode=mode, id=f"{mode}@{self.issued}", ordered=ordered)
        self.targets = dict.fromkeys(self.policy.all_hosts(), one)

    def turn(
        self, ends: dict[str, str] | None = None, *, after: float = 1000.0, kill: int | None = None
    ) -> None:
        """One look. `kill`: the worker dies at that act of this turn, which has or has not been done."""
        self.now += after
        self.world.start_replicas(counts(self.state), leaving(self.state))
        seen = self.world.look(self.now)
        before = self.state
        self.state, acts = step(before, seen, self.targets, self.policy, 5_000.0)
        assert step(before, seen, self.targets, self.policy, 5_000.0) == (self.state, acts), (
            "not deterministic"
        )
        self.journal = encode(self.state)  # written before anything is done
        assert decode(self.journal, SwitchState) == self.state
        for i, act in enumerate(acts):
            self.now += 1.0
            if kill is not None and i == kill // 2:
                if kill % 2 and not self.world.differs(act):
                    self.world.do(act)
                self.state = taken_over(decode(self.journal, SwitchState))
                return
            if isinstance(act, Finished):
                self.ended.append(act)
                continue
            self.state = note(self.state, act, self._end(act, ends or {}), self.policy)
        self.world.serve()

    def _end(self, act: Act, ends: dict[str, str]) -> Result:
        how = ends.get(act.word, "ok")
        if how in ("ok", "unheard") and self.world.differs(act):
            return Result(at_ms=self.now, ok=False, error="it differs", differs=True)
        if how in ("ok", "unheard"):
            self.world.do(act)
        return Result(at_ms=self.now, ok=how == "ok", error=how, passing=how != "for good")

    def settle(self, turns: int = 200) -> None:
        for _ in range(turns):
            self.turn()

    def check(self) -> None:
        """Whatever happens: no more hosts away than allowed, and the world as the state says."""
        for name, host in self.state.hosts.items():
            if host.step is Step.HELD:
                assert host.why, "held without a reason"
            if host.step is Step.SERVING:
                mode = self.policy.named(host.mode)
                assert mode is not None
                assert self.world.record[name] == host.mode
                if host.booted_ms == self.world.booted[name]:  # else a reboot that has not been seen yet
                    assert self.world.layout[name] == mode.layout
                assert not self.world.drained[name], "forgotten"
        # A reboot asks nobody.
        away = [
            h for h in self.state.hosts.values() if h.step is not Step.SERVING and not (h.checks or h.unsure)
        ]
        assert len(away) <= self.policy.max_unavailable
