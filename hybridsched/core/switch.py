"""The change of hosts from one mode to another: a state machine for each, and the waves that they go in.

`step(state, seen, targets, policy, stop_ms)` after each look gives the next state and what to do; `note`
feeds back what came of each act. The caller writes the state to the journal *before* it acts. Acts may be
repeated without harm, so whoever comes after a crash calls `taken_over(state)` and goes on.

    serving -> draining -> empty -> cutting -> configuring -> verifying -> warming -> serving

Rules, in the order of their weight:

- Jobs are not there when GPUs or node records change: a host is empty when a look that began after it was
  seen drained shows no job.
- Replicas are told to leave only while the others serve as many as the floor wants; a host begins to change
  only then, and only while fewer than `max_unavailable` are out of service. While hosts change, the lower of
  the two modes' floors counts. A host that warms up counts as out of service until its engines serve.
- What fails for a while is tried again for `act_ms`. What fails for good, or for that long, sends the host
  back to the mode it came from. When that fails as well it is held: out of service, with the reason, until an
  operator orders a mode.
- Where Slurm cannot be read, nothing is done and no time passes for any limit; but see `rewritten`.
- A host that would not become empty (`drain_ms`, then everything is requeued, then `requeue_ms`) goes back
  without having been touched. It is tried again after `retry_ms`, twice that, ... `attempts` times.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from hybridsched.core.calendar import DRAIN, LOAD
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_floor import lacking, room
from hybridsched.core.switch_jobs import sent_away, told
from hybridsched.core.switch_rest import HELD, REASON, adopted, doubtful, rested, settled, taken_out, unused
from hybridsched.core.switch_steps import (
    again,
    anew,
    enter,
    failed,
    later,
    moved,
    rewritten,
    span,
    started,
    succeeded,
)
from hybridsched.core.switch_values import (
    AGAIN_MS,
    MOVING,
    STRANGER,
    Check,
    Cut,
    DrainHost,
    EnterRecord,
    Finished,
    HostSeen,
    HostState,
    Instruction,
    LeaveRecords,
    MakeRoom,
    Result,
    ResumeHost,
    Seen,
    Step,
    SwitchState,
    Target,
    TellJob,
    Verify,
    counts,
)

WARM_PATIENCE = 3.0
"""Engines may take this many times their `warm_ms`."""

GAP_MS = 30_000.0
"""Between two looks that are further apart nobody looked: Slurm was away, or there was no policy worker."""

_replace = msgspec.structs.replace


def taken_over(state: SwitchState) -> SwitchState:
    """The state for a policy worker that did not write it: what was under way may have been done or not."""
    hosts = {name: _replace(host, asked="", again_ms=0.0) for name, host in state.hosts.items()}
    return _replace(state, hosts=hosts)


def step(
    state: SwitchState,
    seen: Seen,
    targets: Mapping[str, Target],
    policy: ModesPolicy,
    stop_ms: float = 60_000.0,
) -> tuple[SwitchState, tuple[Instruction, ...]]:
    """One look at the hosts. `stop_ms`: what a replica may take to leave before it is cancelled."""
    passed = 0.0 if state.seen_ms is None else seen.at_ms - state.seen_ms
    if passed < 0:  # a worker before this one had another clock
        hosts = {name: moved(host, passed) for name, host in state.hosts.items()}
        state, passed = _replace(state, hosts=hosts), 0.0
    goes_on = set() if seen.reachable or passed > GAP_MS else rewritten(state, policy)
    if not seen.reachable or passed > GAP_MS:
        hosts = {name: h if name in goes_on else later(h, passed) for name, h in state.hosts.items()}
        state = _replace(state, hosts=hosts)
    pool = _Pool(state, seen, targets, policy, stop_ms)
    if not seen.reachable:
        for name in (known for known in pool.known if known in goes_on):
            pool.one(name)
        return _replace(state, hosts=pool.hosts, seen_ms=seen.at_ms), tuple(pool.out)
    for host in policy.all_hosts():
        pool.one(host)
    pool.begin()
    kept = {name: host for name, host in pool.hosts.items() if name in pool.known}
    for name, left in pool.hosts.items():
        if name not in kept and left.step is not Step.SERVING:  # never forgotten: it may be put back
            kept[name] = _replace(left, wait=STRANGER)
    return SwitchState(hosts=kept, seen_ms=seen.at_ms, room=pool.room), tuple(pool.out)


def note(state: SwitchState, act: Instruction, result: Result, policy: ModesPolicy) -> SwitchState:
    """What came of an act of an earlier step."""
    host = state.hosts.get(act.host)
    if host is not None and isinstance(act, TellJob):
        return _replace(state, hosts={**state.hosts, act.host: told(host, act, result)})
    if host is None or isinstance(act, Finished) or host.asked != act.word:
        return state
    host = _replace(host, asked="")
    if result.ok:
        host = succeeded(host, act, result.at_ms, policy)
    elif result.differs and (host.checks or isinstance(act, Check)):
        host = anew(host, f"{host.checks or 'Slurm does not use it'}: {result.error}", result.at_ms)
    elif (
        host.step is Step.HELD
        or host.checks  # what cannot be read is no reason to empty it
        or isinstance(act, Check)
        or (result.passing and result.at_ms - host.since_ms < policy.act_ms)
    ):
        host = again(host, result)
    else:
        host = failed(host, f"{act.word} failed: {result.error}", result.at_ms, policy)
    return _replace(state, hosts={**state.hosts, act.host: host})


# -- all hosts -------------------------------------------------------------------------------------------


class _Pool:
    """One step over all hosts."""

    def __init__(
        self,
        state: SwitchState,
        seen: Seen,
        targets: Mapping[str, Target],
        policy: ModesPolicy,
        stop_ms: float,
    ) -> None:
        self.hosts = dict(state.hosts)
        self.seen, self.targets, self.policy, self.stop_ms = seen, targets, policy, stop_ms
        self.at_ms = seen.at_ms
        self.known = policy.all_hosts()
        self.views = {view.host: view for view in seen.hosts}
        self.out: list[Instruction] = []
        self.room: MakeRoom | None = None

    def one(self, name: str) -> None:
        """Carry one host on."""
        view = self.views.get(name) or HostSeen(host=name)
        host = self.hosts.get(name)
        if host is None:
            self._adopt(name, view)
            return
        if host.step in MOVING and self.policy.named(host.goal) is None:
            gone = f"the policy has no mode {host.goal} any more"
            asked = _replace(host, wait=gone)
            self.hosts[name] = asked if host.asked else failed(host, gone, self.at_ms, self.policy)
            return
        match host.step:
            case Step.SERVING:
                host = self._at_rest(host, view)
            case Step.DRAINING:
                host = self._draining(host, view)
            case Step.EMPTY:
                act = LeaveRecords(host=name, reason=self._reason(host))
                host = self._ask(_replace(host, left=True), act)
            case Step.CUTTING:
                host = self._ask(host, Cut(host=name, mode=host.goal))
            case Step.CONFIGURING:
                host = self._ask(host, EnterRecord(host=name, mode=host.goal, reason=self._reason(host)))
            case Step.VERIFYING:
                host = self._verifying(host, view)
            case Step.WARMING:
                host = self._warming(host, view)
            case Step.HELD:
                host = self._held(host, view)
        self.hosts[name] = host

    def _adopt(self, name: str, view: HostSeen) -> None:
        """A host that nobody remembers: it stands as it is seen."""
        target = self.targets.get(name)
        if view.mode is not None:
            host = adopted(name, view, view.mode, self.at_ms)
        elif target is not None and target.ordered and self.policy.named(target.mode) is not None:
            unknown = HostState(host=name, mode=target.mode, goal=target.mode, step=Step.HELD)
            host = started(unknown, target, self.at_ms)
        else:
            return
        self.hosts[name] = host

    def _at_rest(self, host: HostState, view: HostSeen) -> HostState:
        switched = view.mode is not None and view.mode != host.mode
        if switched and self.at_ms > host.since_ms:  # somebody switched it by hand
            fresh = {"booted_ms": None, "started_ms": None, "checks": ""}
            return _replace(host, mode=view.mode, goal=view.mode, why="", failures=0, blocked_ms=0.0, **fresh)
        mode = self.policy.named(host.mode)
        cuts = mode is not None and bool(mode.layout)
        host = rested(host, view, self.at_ms, cuts=cuts)
        if host.step is Step.VERIFYING:
            return self._verifying(host, view)
        if host.step is not Step.SERVING:
            return host
        target = self.targets.get(host.host)
        if target is not None and target.id != host.target:
            host = _replace(host, target=target.id, failures=0, blocked_ms=0.0, why="", wait="")
        if cuts and doubtful(host, view):
            return self._ask(host, Check(host=host.host, mode=host.mode))
        return settled(host, view, self.at_ms) if target is None or target.mode == host.mode else host

    def _draining(self, host: HostState, view: HostSeen) -> HostState:
        target = self.targets.get(host.host)
        untouched = not host.back and not host.left and not host.unsure
        if untouched and target is not None and target.mode == host.mode:
            # Nothing has been touched, and nobody wants it any more.
            host = _replace(host, back=True, target=target.id, cause=target.cause, why="it is wanted no more")
            return enter(host, Step.VERIFYING, self.at_ms, goal=host.mode, verified=True)
        if host.drained_ms is not None and self.at_ms <= host.drained_ms:
            return host  # the look is older
        taken = taken_out(view, host.mode) if untouched else ""
        if taken and not host.asked:  # whoever did it would find it in service again
            return self._finish(_replace(host, back=True, why=taken), host.mode, {})
        if view.accepts:
            return self._ask(
                _replace(host, drained_ms=None), DrainHost(host=host.host, reason=self._reason(host))
            )
        if host.asked:
            return host
        if host.drained_ms is None:  # by somebody else, or by a worker that is no more
            host = _replace(host, drained_ms=self.at_ms)
        elif not view.jobs:
            spans = host.spans if host.back else span(host, DRAIN, self.at_ms)
            return enter(host, Step.EMPTY, self.at_ms, spans=spans, told={})
        if self.seen.cannot:  # no job leaves for a change that cannot go on
            return _replace(host, wait=self.seen.cannot)
        short = {} if host.back else self._short(host.host)
        host, words = sent_away(host, view.jobs, short, self.at_ms, self.policy, self.stop_ms)
        self.out.extend(words)
        return host

    def _verifying(self, host: HostState, view: HostSeen) -> HostState:
        if not host.asked and view.invalid and self.at_ms - host.since_ms >= AGAIN_MS[1]:
            return failed(host, f"Slurm refuses the node: {view.reason}", self.at_ms, self.policy)
        if host.checks and view.accepts and host.drained_ms is None:  # nothing may start there meanwhile
            return self._ask(host, DrainHost(host=host.host, reason=self._reason(host)))
        if not host.verified:
            standing = bool(host.checks)
            return self._ask(host, Verify(host=host.host, mode=host.goal, standing=standing))
        return self._ask(host, ResumeHost(host=host.host, mode=host.goal))

    def _warming(self, host: HostState, view: HostSeen) -> HostState:
        mode = self.policy.named(host.goal)
        engines = () if mode is None else tuple(e for e in mode.engines if e.per_host)
        there = counts(SwitchState(hosts=self.hosts)).get(host.goal, 0)
        lacking = []
        for engine in engines:
            group = mode.group(engine) if mode is not None else ""
            here = sum(job.serving and job.group == group for job in view.jobs)
            everywhere = self.seen.strays.get(group, 0) + sum(
                job.serving and job.group == group for seen in self.seen.hosts for job in seen.jobs
            )
            if here < engine.per_host and everywhere < engine.per_host * there:
                lacking.append(f"{engine.per_host - here} of {group} to serve")
        if self.at_ms > host.since_ms and taken_out(view, host.goal):  # no engine would come
            return self._finish(host, host.goal, host.spans)
        if not lacking:
            return self._finish(host, host.goal, span(host, LOAD, self.at_ms) if engines else host.spans)
        patience = WARM_PATIENCE * max(engine.warm_ms for engine in engines)
        if self.at_ms - host.since_ms < patience:
            return _replace(host, wait=", ".join(lacking))
        why = f"its engines did not serve within {patience / 1000:g} s: {', '.join(lacking)}"
        if host.back:  # Slurm has it back in the old mode, and whoever keeps replicas running goes on
            return self._finish(
                _replace(host, why=f"{host.why}; on the way back {why}"), host.goal, host.spans
            )
        return failed(host, why, self.at_ms, self.policy)

    def _finish(self, host: HostState, new: str, spans: dict[str, float]) -> HostState:
        took = self.at_ms - (host.began_ms if host.began_ms is not None else self.at_ms)
        why = host.why if host.back else ""
        measured = {} if host.back else spans
        self.out.append(
            Finished(host=host.host, old=host.mode, new=new, why=why, spans=measured, took_ms=took)
        )
        fresh = {} if host.back else {"failures": 0, "blocked_ms": 0.0}
        return enter(
            _replace(host, **fresh),
            Step.SERVING,
            self.at_ms,
            mode=new,
            goal=new,
            why=why,
            back=False,
            left=False,
            unsure=False,
            began_ms=None,
            spans={},
            told={},
            refused={},
            drained_ms=None,
            booted_ms=None,
            started_ms=None,
        )

    def _held(self, host: HostState, view: HostSeen) -> HostState:
        target = self.targets.get(host.host)
        known = target is not None and self.policy.named(target.mode) is not None
        if target is not None and known and target.ordered and target.id != host.target:
            return (
                _replace(host, wait=self.seen.cannot)
                if self.seen.cannot
                else started(host, target, self.at_ms)
            )
        stale = view.reason.startswith(REASON) and not view.reason.startswith(HELD)
        if view.accepts or stale:  # nothing may run on what nobody has verified, and Slurm shall say why
            return self._ask(host, DrainHost(host=host.host, reason=self._reason(host)))
        return host

    def _ask(self, host: HostState, act: Instruction) -> HostState:
        if host.asked or self.at_ms < host.again_ms:
            return host
        if self.seen.cannot and not isinstance(act, DrainHost | ResumeHost):
            return _replace(host, wait=self.seen.cannot)
        self.out.append(act)
        return _replace(host, asked=act.word)

    def _reason(self, host: HostState) -> str:
        """What Slurm shows as the reason of the node: `REASON` begins it."""
        if host.step is Step.HELD:
            return f"{HELD}: {host.why}"[:200]
        if host.checks:
            return f"{REASON}{host.mode} is read back: {host.checks}"[:200]
        return f"{REASON}{host.mode} to {host.goal}" if not host.back else f"{REASON}back to {host.goal}"

    # -- waves

    def begin(self) -> None:
        """Let hosts begin to change, as many as may."""
        for name in self.known:
            host, target = self.hosts.get(name), self.targets.get(name)
            if host is None or target is None or host.step is not Step.SERVING or target.mode == host.mode:
                continue
            known = self.policy.named(target.mode) is not None
            wait = self._may_not(host) if known else f"the policy has no mode {target.mode}"
            if not wait:
                lacks = lacking(name, target.mode, self.hosts, self.seen, self.policy)
                wait = str(lacks[0]) if lacks else ""
                wanting = room(name, lacks, self.hosts, self.seen, self.policy)
                self.room = self.room or wanting
            self.hosts[name] = _replace(host, wait=wait) if wait else started(host, target, self.at_ms)
        self._make_room()

    def _make_room(self) -> None:
        """Replicas are moved for a host only where nothing else goes on: the next host to come back may bring
        what it lacks."""
        if self.room is None:
            return
        if any(name in self.known and host.step in MOVING for name, host in self.hosts.items()):
            self.room = None
            return
        host = self.hosts[self.room.host]
        first = ", ".join(f"{count} of {group}" for group, count in self.room.groups.items())
        self.hosts[host.host] = _replace(host, wait=f"{host.wait}; {first} to serve on another host first")

    def _may_not(self, host: HostState) -> str:
        """Why a host does not begin now; empty: it may, where the floor lets it."""
        if self.seen.cannot:
            return self.seen.cannot
        if host.failures >= self.policy.attempts:
            return f"given up after {host.failures} tries, until it is ordered anew: {host.why}"
        if self.at_ms < host.blocked_ms:
            return f"tried again later: {host.why}"
        view = self.views.get(host.host)
        if view is None or view.mode != host.mode or not view.accepts:
            return unused(view)
        there = self.hosts
        away = [name for name in self.known if name not in there or there[name].step is not Step.SERVING]
        if len(away) >= self.policy.max_unavailable:
            return f"{', '.join(away[:5])} to be back in service"
        return ""

    def _short(self, name: str) -> dict[str, str]:
        """Models of which too few would serve without the replicas of a host; with what they lack."""
        found = lacking(name, self.hosts[name].goal, self.hosts, self.seen, self.policy)
        return {lack.model: str(lack) for lack in found}
