"""Hosts that change their mode, over random histories of a Slurm and of GPUs that fail, or do what they were
told and do not say so, and of policy workers that are killed between any two acts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hybridsched.core.codec import decode
from hybridsched.core.switch import step, taken_over
from hybridsched.core.switch_values import JobKind, Seen, Step, SwitchState
from tests.property.switch_world import ACTS, Driver, pool


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("done", [0, 1])
def test_a_worker_killed_at_each_act_is_followed_by_one_that_completes(act: str, done: int) -> None:
    driver = Driver(pool(1, 1))
    driver.turn()
    driver.want("night")
    for _ in range(60):
        probe = step(driver.state, driver.world.look(driver.now + 1000.0), driver.targets, driver.policy)[1]
        at = next((i for i, one in enumerate(probe) if one.word == act), None)
        driver.turn(kill=None if at is None else 2 * at + done)
        if at is not None:
            break
    else:
        raise AssertionError(f"{act} never came")
    driver.settle(60)
    driver.check()
    assert driver.state.hosts["h1"].mode == "night"


@pytest.mark.parametrize("act", ACTS)
def test_an_act_that_fails_for_good_sends_the_host_back(act: str) -> None:
    driver = Driver(pool(1, 1))
    driver.turn()
    driver.want("night")
    for _ in range(60):
        driver.turn({act: "for good"} if not driver.state.hosts["h1"].back else {})
    driver.check()
    host = driver.state.hosts["h1"]
    assert host.mode == "day"
    first = driver.ended[0]
    assert (first.old, first.new) == ("day", "day")
    assert act in first.why


@pytest.mark.parametrize("act", ["leave", "cut", "enter", "verify", "resume"])
def test_a_way_back_that_fails_as_well_holds_the_host_until_an_order(act: str) -> None:
    driver = Driver(pool(1, 1))
    driver.turn()
    driver.want("night")
    for _ in range(60):
        driver.turn({act: "for good"})
    host = driver.state.hosts["h1"]
    assert host.step is Step.HELD
    assert host.why.count(act) == 2
    assert driver.world.drained["h1"] or driver.world.record["h1"] is None
    driver.want("night")  # the calendar's wish alone releases nothing
    driver.settle(20)
    assert driver.state.hosts["h1"].step is Step.HELD
    driver.want("day", ordered=True)
    driver.settle(60)
    driver.check()
    assert driver.state.hosts["h1"].step is Step.SERVING


def test_a_job_that_will_not_leave_is_requeued_and_then_the_host_stays_as_it_was() -> None:
    driver = Driver(pool(1, 1))
    driver.turn()
    number = driver.world.add("h1", JobKind.OTHER)
    driver.world.stubborn.add(number)
    driver.want("night")
    driver.settle(45)
    assert driver.ended[0].new == "day"
    assert str(number) in driver.ended[0].why
    assert "tried again later" in driver.state.hosts["h1"].wait
    driver.settle(400)
    assert "given up after 3 tries" in driver.state.hosts["h1"].wait
    driver.check()
    driver.world.jobs["h1"].pop(number)
    driver.want("night", ordered=True)
    driver.settle(60)
    assert driver.state.hosts["h1"].mode == "night"


def test_an_order_that_is_withdrawn_before_anything_was_touched_ends_at_once() -> None:
    driver = Driver(pool(1, 1))
    driver.turn()
    number = driver.world.add("h1", JobKind.OTHER)
    driver.world.stubborn.add(number)
    driver.want("night")
    driver.settle(5)
    assert driver.state.hosts["h1"].step is Step.DRAINING
    driver.want("day")
    driver.settle(10)
    driver.check()
    host = driver.state.hosts["h1"]
    assert (host.mode, host.step, host.failures) == ("day", Step.SERVING, 0)


def test_engines_that_do_not_serve_in_the_new_mode_send_the_host_back() -> None:
    driver = Driver(pool(1, 1))
    driver.settle(3)
    driver.want("night")
    for _ in range(80):
        driver.world.engines_work = driver.state.hosts["h1"].goal == "day"
        driver.turn()
        if driver.ended:
            break
    assert driver.ended[0].new == "day"
    assert "did not serve" in driver.ended[0].why
    driver.check()


def test_time_in_which_slurm_cannot_be_read_counts_for_nothing() -> None:
    driver = Driver(pool(1, 1))
    driver.turn()
    number = driver.world.add("h1", JobKind.OTHER)
    driver.world.stubborn.add(number)
    driver.want("night")
    driver.settle(5)
    for _ in range(100):
        driver.now += 10_000.0
        driver.state, acts = step(
            driver.state, Seen(at_ms=driver.now, reachable=False), driver.targets, driver.policy
        )
        assert acts == ()
    driver.settle(3)
    assert driver.state.hosts["h1"].step is Step.DRAINING


@settings(max_examples=40, deadline=None)
@given(hosts=st.integers(2, 5), most=st.integers(1, 5), floor=st.integers(0, 4))
def test_the_floor_holds_at_every_look(hosts: int, most: int, floor: int) -> None:
    """All hosts from day to night and back, the floor alone holding them apart where `most` lets all go.

    The lower floor of both modes is that of the night.
    """
    driver = Driver(pool(hosts, most, floor=floor))
    driver.settle(5)
    least = min(min(m.floors().get("m", 0) for m in driver.policy.mode), hosts)
    for mode in ("night", "day"):
        driver.want(mode)
        for _ in range(60 * hosts):
            driver.turn()
            driver.check()
            assert driver.world.serving() >= least
            if all(h.mode == mode and h.step is Step.SERVING for h in driver.state.hosts.values()):
                break
        else:
            raise AssertionError(f"never came to {mode}: {driver.state}")


ENDS = st.dictionaries(
    st.sampled_from([*ACTS, "tell_job"]),
    st.sampled_from(["passing", "for good", "unheard", "half"]),
    max_size=2,
)


class Hosts(RuleBasedStateMachine):
    @initialize(hosts=st.integers(1, 4), most=st.integers(1, 2), floor=st.integers(0, 2))
    def start(self, hosts: int, most: int, floor: int) -> None:
        self.driver = Driver(pool(hosts, most, floor=floor if hosts > 2 else 0))
        self.driver.settle(3)

    @rule(ends=ENDS, after=st.sampled_from([200.0, 1000.0, 5000.0]), times=st.integers(1, 6))
    def turns(self, ends: dict[str, str], after: float, times: int) -> None:
        for _ in range(times):
            self.driver.turn(ends, after=after)
            self.driver.check()

    @rule(times=st.integers(1, 20))
    def time_passes(self, times: int) -> None:
        for _ in range(times):
            self.driver.turn()
            self.driver.check()

    @rule(kill=st.integers(0, 5))
    def killed(self, kill: int) -> None:
        self.driver.turn(kill=kill)

    @rule()
    def killed_between_turns(self) -> None:
        self.driver.state = taken_over(decode(self.driver.journal, SwitchState))

    @rule(seconds=st.integers(1, 300))
    def outage(self, seconds: int) -> None:
        self.driver.now += seconds * 1000.0
        seen = Seen(at_ms=self.driver.now, reachable=False)
        self.driver.state, acts = step(self.driver.state, seen, self.driver.targets, self.driver.policy)
        assert acts == ()

    @rule(mode=st.sampled_from(["day", "night"]), ordered=st.booleans())
    def wants(self, mode: str, ordered: bool) -> None:
        self.driver.want(mode, ordered=ordered)

    @rule(which=st.integers(0, 3), kind=st.sampled_from(JobKind), stubborn=st.booleans())
    def a_job_starts(self, which: int, kind: JobKind, stubborn: bool) -> None:
        hosts = [
            h for h, record in self.driver.world.record.items() if record and not self.driver.world.drained[h]
        ]
        if hosts and kind is not JobKind.REPLICA:
            number = self.driver.world.add(hosts[which % len(hosts)], kind)
            if stubborn:
                self.driver.world.stubborn.add(number)

    @rule(which=st.integers(0, 3))
    def reboot(self, which: int) -> None:
        """Of a host at rest, whose start has been seen."""
        rest = [
            name
            for name, host in self.driver.state.hosts.items()
            if host.step is Step.SERVING and host.booted_ms is not None
        ]
        if rest:
            self.driver.world.reboot(rest[which % len(rest)])

    @rule(work=st.booleans())
    def engines(self, work: bool) -> None:
        self.driver.world.engines_work = work

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        """When all works again and an operator orders it, every host comes to rest in one mode."""
        if not hasattr(self, "driver"):
            return
        self.driver.world.engines_work = True
        self.driver.world.stubborn.clear()
        for jobs in self.driver.world.jobs.values():
            for number in [n for n, job in jobs.items() if job.kind is not JobKind.REPLICA]:
                del jobs[number]
        self.driver.want("night", ordered=True)
        self.driver.settle(300)
        self.driver.check()
        for host in self.driver.state.hosts.values():
            assert (host.mode, host.step) == ("night", Step.SERVING), host


TestHosts = Hosts.TestCase
TestHosts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
