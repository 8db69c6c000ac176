"""Changes of mode that lose what they stand on: the policy's modes, the journal, the hand, the worker."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from hybridsched.cluster.hands import NoHands
from hybridsched.core.autonomy import Autonomy
from hybridsched.core.modes import Window
from hybridsched.core.switch_values import Step
from hybridsched.store.keys import Keys
from hybridsched.workers.policy_modes import ModeTask
from tests.integration.policy_pool import policy
from tests.integration.test_modes_driver import MODES, POOL, Host, gpus, host

__all__ = ["gpus", "host"]


async def successor(host: Host) -> None:
    """Another policy worker takes the place of the first, which was killed."""
    await host.task.close()
    host.task = host.begun()


async def until(host: Host, step: Step) -> None:
    for _ in range(40):
        if host.state.step is step:
            return
        await host.look()
    raise AssertionError(host.state)


@pytest.mark.parametrize("found", [None, b"{\xff", b'{"hosts": {"n1": {"host": "n2"}}}', ["a list"]])
@pytest.mark.parametrize("step", [Step.DRAINING, Step.VERIFYING])
async def test_a_host_whose_journal_is_lost_comes_into_service_again(
    host: Host, step: Step, found: bytes | list[str] | None
) -> None:
    await until(host, step)
    await host.look()
    await host.store.withdraw()
    key = Keys(POOL).mode_journal
    await host.client.delete(key)
    if isinstance(found, list):
        await host.client.lpush(key, *found)
    elif found is not None:
        await host.client.set(key, found)
    await successor(host)
    await host.look()
    await host.settle()
    host.nothing_half()


@pytest.mark.parametrize(("step", "mode"), [(Step.DRAINING, "day"), (Step.VERIFYING, "night")])
async def test_a_host_that_a_person_drains_in_the_middle_stays_drained(
    host: Host, step: Step, mode: str
) -> None:
    record = "n1" if mode == "day" else "night-n1"
    await until(host, Step.DRAINING)
    if step is Step.VERIFYING:  # while it is read back
        verify = host.hands.differs

        async def differs(name: str, layout: bytes) -> str:
            if host.state.step is Step.VERIFYING:
                host.slurm.drain(record, "a fan is broken")
            return await verify(name, layout)

        host.hands.differs = differs  # type: ignore[method-assign]
    else:
        host.slurm.drain(record, "a fan is broken")
    for _ in range(30):
        await host.look()
    node = host.slurm.nodes[record]
    assert ("DRAIN" in node.states, node.reason) == (True, "a fan is broken")
    assert (host.state.step, host.state.mode) == (Step.SERVING, mode)
    assert "a fan is broken" in host.state.wait
    host.slurm.resume(record)
    await host.look()
    await host.settle()
    assert host.nothing_half() == "night"


async def test_an_order_brings_back_a_host_of_which_no_record_is_in_service(host: Host) -> None:
    await until(host, Step.CUTTING)
    await host.client.delete(Keys(POOL).mode_journal)
    await host.store.withdraw()
    await successor(host)
    await host.look()
    assert host.task.state.hosts == {}
    assert "no node record of it is in service" in host.task.troubles["n1"]
    await host.store.order("day", (), by="the test")
    await host.look()
    await host.settle()
    assert host.nothing_half() == "day"


async def test_nothing_begins_with_a_policy_worker_that_has_no_hand(host: Host) -> None:
    host.task._handless = True  # as it is with NoHands, see below
    for _ in range(10):
        await host.look()
    assert (host.state.step, host.task.troubles["hand"]) == (Step.SERVING, host.state.wait)
    assert "--hand" in host.state.wait
    assert not any("DRAIN" in node.states for node in host.slurm.nodes.values())
    none = ModeTask(host.cluster, NoHands(), host.client, host.events, pool=POOL, user="root")
    assert none._handless


async def test_a_change_goes_on_when_the_policy_has_its_modes_again(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    await until(host, Step.CUTTING)
    before = host.policy
    host.policy = policy()
    for _ in range(3):
        await host.look()
    assert "".join(capsys.readouterr()).count("modes_left") == 1
    host.policy = before
    await host.look()
    await host.settle()
    assert host.nothing_half() == "night"


async def test_the_reservation_of_a_worker_that_was_killed_is_removed_by_the_next(host: Host) -> None:
    await host.store.withdraw()
    night = msgspec.structs.replace(MODES.mode[1], windows=(Window(start="22:00", end="06:00"),))
    modes = msgspec.structs.replace(
        MODES, reservation=True, autonomy=Autonomy.AUTO, default="day", mode=(MODES.mode[0], night)
    )
    host.policy = policy(modes=modes)
    host.now_ms = datetime(2026, 11, 30, 21, 30, tzinfo=UTC).timestamp() * 1000.0
    await host.look()
    assert len(host.slurm.reservations) == 1
    await successor(host)
    host.policy = policy(modes=msgspec.structs.replace(modes, reservation=False))
    await host.look()
    assert host.slurm.reservations == ()


async def test_looks_count_also_after_a_worker_was_killed(host: Host) -> None:
    """The journal says when somebody looked last, also where nothing else has changed."""
    await until(host, Step.DRAINING)
    host.task.state = msgspec.structs.replace(
        host.task.state, hosts={"n1": msgspec.structs.replace(host.state, asked="drain")}
    )
    for _ in range(60):
        await host.look()
    known = await host.store.journal()
    assert known is not None
    assert known.seen_ms is not None
    assert host.now_ms - known.seen_ms <= 11_000.0


async def test_no_lane_opens_on_a_host_in_the_middle_of_a_change_though_modes_are_switched_off(
    host: Host,
) -> None:
    await until(host, Step.DRAINING)
    host.policy = policy(modes=msgspec.structs.replace(MODES, enabled=False))
    assert set(host.task.shut_nodes(host.policy)) == {"n1", "night-n1"}
    await host.settle()
    assert host.nothing_half() == "night"
    assert host.task.shut_nodes(host.policy) == {}
