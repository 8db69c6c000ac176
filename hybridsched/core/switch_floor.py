"""The floor while hosts change: who would serve without one, and what has to serve elsewhere first."""

from __future__ import annotations

from collections.abc import Mapping

from hybridsched.core.calendar import floor_between
from hybridsched.core.modes import ModesPolicy
from hybridsched.core.switch_values import HostSeen, HostState, MakeRoom, Seen, Step
from hybridsched.core.values import Value


class Lack(Value, frozen=True, kw_only=True):
    """A model of which too few would serve without the replicas of a host."""

    model: str
    floor: int
    serving: int
    """Replicas that serve without it."""
    wanted: int
    """As many are wanted on without it: what serves beyond them is stopped as too many."""

    def __str__(self) -> str:
        stay = min(self.serving, self.wanted)
        return f"the floor: {stay} of {self.floor} replicas of {self.model} would serve"


def lacking(
    name: str, goal: str, hosts: Mapping[str, HostState], seen: Seen, policy: ModesPolicy
) -> tuple[Lack, ...]:
    """The models of which too few would serve without the replicas of a host that goes to a mode.

    What serves counts only as far as it is wanted on: with each host that leaves, fewer replicas of its mode
    are, and Slurm may have put all of them on one host.
    """
    floors = floor_between(policy.named(hosts[name].mode), policy.named(goal))
    serving = dict(seen.elsewhere)
    wanted = dict(seen.elsewhere)
    for mode in policy.mode:
        for engine in mode.engines:
            stray = seen.strays.get(mode.group(engine), 0)
            wanted[engine.model] = wanted.get(engine.model, 0) - stray
    views = {view.host: view for view in seen.hosts}
    for other, state in hosts.items():
        # What only warms up may have to go back. Of several that have to be cut anew one goes after another.
        waits = state.step is Step.DRAINING and state.unsure and not state.told
        if other == name or not (state.step is Step.SERVING or waits):
            continue
        mode_now = policy.named(state.mode)
        for engine in () if mode_now is None else mode_now.engines:
            wanted[engine.model] = wanted.get(engine.model, 0) + engine.per_host
        view = views.get(other)
        for job in view.jobs if view is not None else ():
            if job.serving:
                serving[job.model] = serving.get(job.model, 0) + 1
    found = (
        Lack(model=model, floor=floor, serving=serving.get(model, 0), wanted=wanted.get(model, 0))
        for model, floor in floors.items()
    )
    return tuple(lack for lack in found if min(lack.serving, lack.wanted) < lack.floor)


def room(
    name: str, lacks: tuple[Lack, ...], hosts: Mapping[str, HostState], seen: Seen, policy: ModesPolicy
) -> MakeRoom | None:
    """What has to come to serve on other hosts for a host to be able to leave; None: nothing would help.

    As few as the floor lacks: each is a replica more than wanted until the host has left.
    """
    mode = policy.named(hosts[name].mode)
    if mode is None or not lacks or any(lack.wanted < lack.floor for lack in lacks):
        return None
    view = next((view for view in seen.hosts if view.host == name), HostSeen(host=name))
    groups: dict[str, int] = {}
    for lack in lacks:
        ours = [
            mode.group(engine) for engine in mode.engines if engine.model == lack.model and engine.per_host
        ]
        here = {group: sum(job.group == group and job.serving for job in view.jobs) for group in ours}
        if not ours:
            return None
        groups[max(ours, key=lambda group: here[group])] = lack.floor - lack.serving
    return MakeRoom(host=name, groups=groups)
