"""Hosts that change their mode where the world is not as the plan had it: replicas that Slurm put somewhere
else, a policy that was changed meanwhile, a journal that is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hybridsched.core.mig import LayoutEntry
from hybridsched.core.modes import HostGroup, Mode, ModeEngine, ModesPolicy
from hybridsched.core.switch import REASON, note, step
from hybridsched.core.switch_values import (
    Cut,
    DrainHost,
    EnterRecord,
    HostJob,
    HostSeen,
    HostState,
    Instruction,
    JobKind,
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
)

REPLACE = msgspec.structs.replace
ENGINE = ModeEngine(model="m", warm_ms=20_000.0, floor=1)


def modes(hosts: str = "n[1-3]", **changes: Any) -> ModesPolicy:
    given: dict[str, Any] = {
        "enabled": True,
        "max_unavailable": 2,
        "drain_ms": 60_000.0,
        "requeue_ms": 30_000.0,
        "mig_configs": {
            "slices": (LayoutEntry(mig_enabled=True, mig_devices={"1g.10gb": 7}),),
            "whole": (LayoutEntry(mig_enabled=False),),
        },
        "hosts": (HostGroup(names=hosts),),
        "mode": (
            Mode(name="day", layout="slices", engines=(ENGINE,)),
            Mode(name="night", layout="whole", node="night-{host}", engines=(ENGINE,)),
        ),
    }
    return ModesPolicy(**(given | changes))


def with_floor(floor: int) -> ModesPolicy:
    policy = modes()
    engine = REPLACE(ENGINE, floor=floor)
    return REPLACE(policy, mode=tuple(REPLACE(mode, engines=(engine,)) for mode in policy.mode))


def at_rest(*names: str) -> SwitchState:
    return SwitchState(
        hosts={name: HostState(host=name, mode="day", goal="day") for name in names}, seen_ms=0.0
    )


def replica(job: int, group: str = "day.m", *, serving: bool = True) -> HostJob:
    return HostJob(job=job, kind=JobKind.REPLICA, model="m", group=group, serving=serving)


def to(mode: str, *hosts: str, ordered: bool = True, name: str = "order") -> dict[str, Target]:
    return {host: Target(mode=mode, id=name, ordered=ordered) for host in hosts}


def run(
    state: SwitchState,
    look: Callable[[float, SwitchState], Seen],
    targets: dict[str, Target],
    policy: ModesPolicy,
    *,
    seconds: int = 200,
    fails: str = "",
) -> tuple[SwitchState, list[Instruction]]:
    """A look each second; every act succeeds but `fails`."""
    done: list[Instruction] = []
    for i in range(1, seconds):
        at_ms = i * 1000.0
        state, acts = step(state, look(at_ms, state), targets, policy)
        for act in acts:
            done.append(act)
            ok = act.word != fails
            state = note(state, act, Result(at_ms=at_ms, ok=ok, error="it failed"), policy)
    return state, done


# -- the floor -------------------------------------------------------------------------------------------


def test_as_many_hosts_leave_as_the_floor_wants_where_slurm_put_all_replicas_on_one() -> None:
    """Fewer replicas are wanted with each host that leaves, and those that are too many are stopped."""

    def look(at_ms: float, _: SwitchState) -> Seen:
        packed = tuple(replica(job) for job in (1, 2, 3))
        return Seen(
            at_ms=at_ms,
            hosts=tuple(
                HostSeen(host=name, mode="day", accepts=True, jobs=packed if name == "n1" else ())
                for name in ("n1", "n2", "n3")
            ),
        )

    policy = with_floor(2)
    state, _ = run(at_rest("n1", "n2", "n3"), look, to("night", "n1", "n2", "n3"), policy, seconds=3)
    away = [name for name, host in state.hosts.items() if host.step is not Step.SERVING]
    assert away == ["n2"]
    assert "the floor" in state.hosts["n3"].wait


def test_room_is_made_for_a_host_on_which_the_floor_stands_alone() -> None:
    """Replicas come to serve on others; only while nothing else goes on that may bring them."""
    policy = modes("n[1-2]")

    def look(*strangers: HostJob, at_ms: float = 1000.0, here: tuple[HostJob, ...] = (replica(1),)) -> Seen:
        hosts = (
            HostSeen(host="n1", mode="day", accepts=True, jobs=here),
            HostSeen(host="n2", mode="day", accepts=True, jobs=strangers),
        )
        return Seen(at_ms=at_ms, hosts=hosts)

    state, acts = step(at_rest("n1", "n2"), look(), to("night", "n1"), policy)
    assert (acts, state.room) == ((), MakeRoom(host="n1", groups={"day.m": 1}))
    assert state.hosts["n1"].wait.endswith("; 1 of day.m to serve on another host first")
    # It serves elsewhere: the host begins.
    after, _ = step(state, look(replica(2), at_ms=2000.0), to("night", "n1"), policy)
    assert (after.hosts["n1"].step, after.room) == (Step.DRAINING, None)
    # The order is withdrawn; nobody asks; another host is under way; it would not help.
    assert step(state, look(), {}, policy)[0].room is None
    both = step(at_rest("n1", "n2"), look(), to("night", "n1", "n2"), policy)[0]
    assert (both.hosts["n2"].step, both.room) == (Step.DRAINING, None)
    assert step(at_rest("n1", "n2"), look(), to("night", "n1"), with_floor(2))[0].room is None
    alone = REPLACE(policy, hosts=(HostGroup(names="n1"),))
    assert step(at_rest("n1"), look(), to("night", "n1"), alone)[0].room is None


def test_replicas_that_serve_outside_the_modes_count_for_the_floor_as_long_as_they_are_wanted() -> None:
    """One on a node of no host: a mode's own is wanted no more when its hosts leave, another one is."""

    def begun(strays: dict[str, int]) -> list[str]:
        def look(at_ms: float, _: SwitchState) -> Seen:
            hosts = (HostSeen(host="n1", mode="day", accepts=True),)
            return Seen(at_ms=at_ms, hosts=hosts, elsewhere={"m": 1}, strays=strays)

        policy = REPLACE(with_floor(1), hosts=(HostGroup(names="n1"),))
        state, _ = run(at_rest("n1"), look, to("night", "n1"), policy, seconds=3)
        return [name for name, host in state.hosts.items() if host.step is not Step.SERVING]

    assert begun({"day.m": 1}) == []
    assert begun({}) == ["n1"]


def test_a_replica_that_the_floor_needs_stays_when_the_time_of_the_drain_is_over() -> None:
    """The other host's replica dies when the first has begun: it goes back, and its replica serves on."""

    def look(at_ms: float, state: SwitchState) -> Seen:
        drained = state.hosts["n1"].step is Step.DRAINING
        return Seen(
            at_ms=at_ms,
            hosts=(
                HostSeen(host="n1", mode="day", accepts=not drained or at_ms < 3000.0, jobs=(replica(1),)),
                HostSeen(host="n2", mode="day", accepts=True, jobs=(replica(2, serving=at_ms < 2000.0),)),
            ),
        )

    policy = modes("n[1-2]")
    state, done = run(at_rest("n1", "n2"), look, to("night", "n1"), policy, seconds=110)
    assert any(isinstance(act, DrainHost) for act in done)
    assert not [act for act in done if isinstance(act, TellJob)]
    assert state.hosts["n1"].step is Step.SERVING
    assert "the floor: 0 of 1 replicas of m would serve" in state.hosts["n1"].why


def test_a_host_has_come_when_the_replicas_of_its_mode_serve_wherever_slurm_put_them() -> None:
    warming = HostState(host="n1", mode="day", goal="night", step=Step.WARMING)
    seen = Seen(at_ms=1000.0, hosts=(HostSeen(host="n1", mode="night", accepts=True),), strays={"night.m": 1})
    state, _ = step(SwitchState(hosts={"n1": warming}), seen, {}, modes("n1"))
    assert (state.hosts["n1"].mode, state.hosts["n1"].step) == ("night", Step.SERVING)


# -- what nobody remembers, what the policy has no more ---------------------------------------------------


def test_a_host_that_was_found_drained_by_us_without_jobs_is_brought_into_its_mode_once_more() -> None:
    """The journal is lost in the middle of a change: its slurmd may have ended, and Slurm not know it."""

    def look(at_ms: float, state: SwitchState) -> Seen:
        resumed = state.hosts.get("n1") is not None and state.hosts["n1"].step in (Step.WARMING, Step.SERVING)
        view = HostSeen(host="n1", mode="day", accepts=resumed, reason=f"{REASON}day to night")
        return Seen(at_ms=at_ms, hosts=(view,), strays={"day.m": 1})

    state, done = run(SwitchState(), look, {}, modes("n1"), seconds=20)
    assert [type(act) for act in done[:5]] == [LeaveRecords, Cut, EnterRecord, Verify, ResumeHost]
    assert (state.hosts["n1"].step, state.hosts["n1"].mode) == (Step.SERVING, "day")
    held, _ = run(SwitchState(), look, {}, modes("n1"), seconds=40, fails="cut")
    assert (held.hosts["n1"].step, "no journal says why" in held.hosts["n1"].why) == (Step.HELD, True)


def test_a_host_that_was_found_drained_by_us_with_a_job_is_read_back_and_comes_into_service() -> None:
    """The journal is lost in the middle of a change."""

    def look(at_ms: float, state: SwitchState) -> Seen:
        resumed = state.hosts.get("n1") is not None and state.hosts["n1"].step in (Step.WARMING, Step.SERVING)
        return Seen(
            at_ms=at_ms,
            hosts=(
                HostSeen(
                    host="n1",
                    mode="day",
                    accepts=resumed,
                    reason=f"{REASON}day to night",
                    jobs=(HostJob(job=7),),
                ),
                HostSeen(host="n2", mode="day", reason="a fan is broken"),
            ),
            strays={"day.m": 2},
        )

    state, done = run(SwitchState(), look, {}, modes("n[1-2]"), seconds=20)
    assert [(type(act), act.host) for act in done if isinstance(act, Verify | ResumeHost)] == [
        (Verify, "n1"),
        (ResumeHost, "n1"),
    ]
    assert state.hosts["n1"].step is Step.SERVING
    assert "no journal says why" in state.hosts["n1"].why
    held, _ = run(SwitchState(), look, {}, modes("n[1-2]"), seconds=20, fails="verify")
    assert held.hosts["n1"].step is Step.HELD  # jobs may run there


def test_an_order_brings_a_host_into_service_of_which_no_record_is() -> None:
    def look(at_ms: float, state: SwitchState) -> Seen:
        host = state.hosts.get("n1")
        up = host is not None and host.step in (Step.VERIFYING, Step.WARMING, Step.SERVING)
        seen = HostSeen(host="n1", mode="day" if up else None, accepts=up and host.step is not Step.VERIFYING)
        return Seen(at_ms=at_ms, hosts=(seen,), strays={"day.m": 1})

    policy = modes("n1")
    assert run(SwitchState(), look, to("day", "n1", ordered=False), policy)[0].hosts == {}
    state, done = run(SwitchState(), look, to("day", "n1"), policy)
    assert state.hosts["n1"].step is Step.SERVING
    assert any(isinstance(act, Cut) for act in done)  # nobody knows how its GPUs are cut


def test_a_held_host_is_cut_also_for_the_mode_that_it_stood_in() -> None:
    held = HostState(host="n1", mode="day", goal="day", step=Step.HELD, why="cut failed")

    def look(at_ms: float, _: SwitchState) -> Seen:
        return Seen(at_ms=at_ms, hosts=(HostSeen(host="n1"),))

    _, done = run(SwitchState(hosts={"n1": held}), look, to("day", "n1"), modes("n1"), seconds=12)
    assert [act.word for act in done[:3]] == ["leave", "cut", "enter"]


def test_a_host_that_is_held_and_will_not_become_empty_is_held_again() -> None:
    """Its record must not be taken away under the jobs that run there."""
    held = HostState(host="n1", mode="day", goal="day", step=Step.HELD, why="cut failed")

    def look(at_ms: float, _: SwitchState) -> Seen:
        return Seen(at_ms=at_ms, hosts=(HostSeen(host="n1", jobs=(HostJob(job=7),)),))

    policy = REPLACE(with_floor(0), hosts=(HostGroup(names="n1"),))
    state, done = run(SwitchState(hosts={"n1": held}), look, to("night", "n1"), policy, seconds=120)
    assert not [act for act in done if isinstance(act, LeaveRecords)]
    assert state.hosts["n1"].step is Step.HELD
    assert "did not become empty: job 7" in state.hosts["n1"].why


def test_why_a_job_could_not_be_made_to_leave_is_said_as_long_as_it_is_there() -> None:
    """Slurm requeues no job that was submitted with --no-requeue, and only the log said so."""
    moving = HostState(host="n1", mode="day", goal="night", step=Step.DRAINING, began_ms=0.0, drained_ms=0.0)
    state = SwitchState(hosts={"n1": moving})
    policy = REPLACE(with_floor(0), hosts=(HostGroup(names="n1"),))
    both = HostSeen(host="n1", mode="day", jobs=(HostJob(job=7), HostJob(job=8)))
    late = policy.drain_ms + 1.0
    state, acts = step(state, Seen(at_ms=late, hosts=(both,)), to("night", "n1"), policy)
    asked = [act for act in acts if isinstance(act, TellJob)]
    assert [act.job for act in asked] == [7, 8]
    no = Result(at_ms=late, ok=False, error="Slurm refused to requeue job 7")
    state = note(state, asked[0], no, policy)
    state = note(state, asked[1], Result(at_ms=late, ok=True), policy)
    seven = HostSeen(host="n1", mode="day", jobs=(HostJob(job=7),))
    state, _ = step(state, Seen(at_ms=late + 1.0, hosts=(seven,)), to("night", "n1"), policy)
    assert state.hosts["n1"].wait == "job 7 to leave; Slurm refused to requeue job 7"
    over = late + policy.requeue_ms
    gone = HostSeen(host="n1", mode="day", jobs=(HostJob(job=8),))
    after, _ = step(state, Seen(at_ms=over, hosts=(gone,)), to("night", "n1"), policy)
    assert after.hosts["n1"].why == "it did not become empty: job 8"
    state, _ = step(state, Seen(at_ms=over, hosts=(seven,)), to("night", "n1"), policy)
    assert state.hosts["n1"].why == "it did not become empty: job 7; Slurm refused to requeue job 7"


def test_of_several_hosts_that_have_to_be_cut_anew_one_leaves_after_another() -> None:
    """All were rebooted: each waited for the others to serve, and the replicas on them do."""
    anew = HostState(
        host="n1", mode="day", goal="day", step=Step.DRAINING, unsure=True, drained_ms=1.0, why="it differs"
    )
    names = ("n1", "n2", "n3")
    state = SwitchState(hosts={name: REPLACE(anew, host=name) for name in names})
    views = [HostSeen(host=n, mode="day", jobs=(replica(i),)) for i, n in enumerate(names, start=1)]
    policy = with_floor(2)
    state, acts = step(state, Seen(at_ms=1000.0, hosts=tuple(views)), {}, policy)
    assert [act.host for act in acts if isinstance(act, TellJob)] == ["n1"]
    # The time of the drain does not end that: there is nothing to go back to, and the floor stands on them.
    state = REPLACE(state, seen_ms=None)
    late = Seen(at_ms=10_000_000.0, hosts=tuple(views[1:]))
    state, acts = step(state, late, {}, policy)
    assert [state.hosts[name].step for name in names] == [Step.EMPTY, Step.DRAINING, Step.DRAINING]
    assert not [act for act in acts if isinstance(act, TellJob)]


def test_slurm_says_of_a_held_host_that_it_is_held() -> None:
    held = HostState(host="n1", mode="day", goal="day", step=Step.HELD, why="cut failed")

    def acts(reason: str) -> tuple[Instruction, ...]:
        seen = Seen(at_ms=1000.0, hosts=(HostSeen(host="n1", reason=reason),))
        return step(SwitchState(hosts={"n1": held}), seen, {}, modes("n1"))[1]

    assert acts(f"{REASON}day to night") == (DrainHost(host="n1", reason=f"{REASON}held: cut failed"),)
    assert acts(f"{REASON}held: cut failed") == ()
    assert acts("a fan is broken") == ()  # a person's reason stays


def test_a_mode_that_the_policy_loses_in_the_middle_of_a_change_sends_the_host_back() -> None:
    policy = modes("n1")
    without = REPLACE(policy, mode=(policy.mode[0],))
    empty = HostState(host="n1", mode="day", goal="night", step=Step.EMPTY, left=True)
    seen = Seen(at_ms=1000.0, hosts=(HostSeen(host="n1", mode="day"),))
    state, acts = step(SwitchState(hosts={"n1": empty}), seen, {}, without)
    assert (state.hosts["n1"].goal, state.hosts["n1"].back, acts) == ("day", True, ())
    assert "has no mode night any more" in state.hosts["n1"].why
    # What is under way is waited for.
    asked = SwitchState(hosts={"n1": REPLACE(empty, asked="leave")})
    assert step(asked, seen, {}, without)[0].hosts["n1"].goal == "night"
    # When the policy has neither, the host is held, and an order takes it out of there.
    neither = REPLACE(policy, mode=(REPLACE(policy.mode[0], name="noon"),))
    for _ in range(2):
        state, _ = step(state, seen, to("gone", "n1"), neither)
    assert state.hosts["n1"].step is Step.HELD
    state, _ = step(state, seen, to("noon", "n1"), neither)
    assert (state.hosts["n1"].step, state.hosts["n1"].goal) == (Step.DRAINING, "noon")


def test_a_host_that_the_policy_loses_in_the_middle_of_a_change_is_remembered_and_keeps_none_waiting() -> (
    None
):
    cutting = HostState(host="n1", mode="day", goal="night", step=Step.CUTTING, left=True)
    rest = at_rest("n2")
    seen = Seen(
        at_ms=1000.0,
        hosts=(HostSeen(host="n2", mode="day", accepts=True),),
        elsewhere={"m": 1},
    )
    policy = modes("n2", max_unavailable=1)
    state, acts = step(SwitchState(hosts={"n1": cutting, **rest.hosts}), seen, to("night", "n2"), policy)
    assert acts == ()
    assert (state.hosts["n1"].step, state.hosts["n2"].step) == (Step.CUTTING, Step.DRAINING)
    assert "the policy names the host no more" in state.hosts["n1"].wait
    held = REPLACE(cutting, step=Step.HELD)
    assert "n1" in step(SwitchState(hosts={"n1": held}), seen, {}, policy)[0].hosts


def test_nothing_begins_where_nothing_can_be_done_on_hosts() -> None:
    def look(at_ms: float, _: SwitchState) -> Seen:
        seen = HostSeen(host="n1", mode="day", accepts=True)
        return Seen(at_ms=at_ms, hosts=(seen,), elsewhere={"m": 1}, cannot="no hand")

    state, done = run(at_rest("n1"), look, to("night", "n1"), modes("n1"))
    assert (done, state.hosts["n1"].step, state.hosts["n1"].wait) == ([], Step.SERVING, "no hand")
    begun = SwitchState(hosts={"n1": HostState(host="n1", mode="day", goal="night", step=Step.EMPTY)})
    state, done = run(begun, look, {}, modes("n1"))
    assert not [act for act in done if isinstance(act, LeaveRecords)]
    assert state.hosts["n1"].step is Step.EMPTY  # it waits for a worker that has one
    draining = REPLACE(begun.hosts["n1"], step=Step.DRAINING, drained_ms=1.0)
    seen = HostSeen(host="n1", mode="day", jobs=(HostJob(job=7, kind=JobKind.OFFLINE),))
    looked = Seen(at_ms=1e9, hosts=(seen,), cannot="no hand")
    state, acts = step(SwitchState(hosts={"n1": draining}), looked, {}, modes("n1"))
    assert (acts, state.hosts["n1"].step, state.hosts["n1"].wait) == ((), Step.DRAINING, "no hand")


def test_the_jobs_that_a_host_waits_for_are_named() -> None:
    def waits(*jobs: int) -> str:
        draining = HostState(host="n1", mode="day", goal="night", step=Step.DRAINING, drained_ms=1.0)
        seen = HostSeen(host="n1", mode="day", jobs=tuple(HostJob(job=job) for job in jobs))
        look = Seen(at_ms=2000.0, hosts=(seen,))
        return step(SwitchState(hosts={"n1": draining}), look, {}, modes("n1"))[0].hosts["n1"].wait

    assert waits(39) == "job 39 to leave"
    assert waits(*range(1, 8)) == "jobs 1, 2, 3, 4, 5 and 2 more to leave"


def rewritten(step_: Step, **changes: Any) -> tuple[ModesPolicy, SwitchState]:
    """A host with one record for all modes, which is written anew, at a step of that."""
    policy = modes("n1", way="reconfigure", act_ms=20_000.0)
    policy = REPLACE(policy, mode=tuple(REPLACE(mode, node="{host}") for mode in policy.mode))
    host = HostState(host="n1", mode="day", goal="night", step=step_, left=True)
    return policy, SwitchState(hosts={"n1": REPLACE(host, **changes)}, seen_ms=0.0)


def test_a_host_whose_record_is_written_anew_goes_on_without_slurmctld_and_back_when_it_stays_away() -> None:
    """What was written may be what slurmctld does not start with: no look at Slurm would ever say so."""
    policy, state = rewritten(Step.CONFIGURING)
    away: dict[str, bool] = {"enter night": False, "leave": True, "cut day": True, "enter day": True}
    done: list[str] = []
    for second in range(2, 80, 2):
        at_ms = second * 1000.0
        state, acts = step(state, Seen(at_ms=at_ms, reachable=False), {}, policy)
        for act in acts:
            name = f"{act.word} {act.mode}" if isinstance(act, EnterRecord | Cut) else act.word
            done.append(name)
            result = Result(at_ms=at_ms, ok=away[name], error="no slurmctld answers", passing=True)
            state = note(state, act, result, policy)
    assert list(dict.fromkeys(done)) == list(away)
    assert done.count("enter night") > 1, "it is tried again before"
    host = state.hosts["n1"]
    assert (host.step, host.goal) == (Step.VERIFYING, "day"), "the rest needs a Slurm"
    assert "no slurmctld answers" in host.why


def test_without_slurmctld_nothing_else_is_done_to_such_a_host() -> None:
    for at in set(Step) - {Step.CONFIGURING}:
        policy, state = rewritten(at)
        assert step(state, Seen(at_ms=1000.0, reachable=False), {}, policy)[1] == (), at
    policy, state = rewritten(Step.CONFIGURING)
    records = REPLACE(policy, way="records")
    assert step(state, Seen(at_ms=1000.0, reachable=False), {}, records)[1] == ()
    nobody_looked = Seen(at_ms=1_000_000.0, reachable=False)
    state, acts = step(state, nobody_looked, {}, policy)
    assert acts == ()
    assert state.hosts["n1"].since_ms == 1_000_000.0, "that time counts for no limit"
