"""A host's change of mode over the real NVML binding and its test double: an error at each of its calls.

Slurm is the fake in memory here; the journal is in a real Valkey.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
import redis

from hybridsched.cluster.fake import FakeCluster, FakeNode, FakeSlurm
from hybridsched.cluster.fake_hands import FakeHands
from hybridsched.cluster.values import ClusterError, Gres, Partition
from hybridsched.core.autonomy import Autonomy
from hybridsched.core.mig import LayoutEntry, difference, plan, wants
from hybridsched.core.modes import HostGroup, Mode, ModesPolicy, Window
from hybridsched.core.switch_values import HostState, Step
from hybridsched.mig.files import parse_text
from hybridsched.mig.nvml import NvmlMig
from hybridsched.mig.protocol import MigError
from hybridsched.store.connection import async_client
from hybridsched.store.events import EventLog
from hybridsched.store.keys import Keys
from hybridsched.store.modes import ModeStore
from hybridsched.store.telemetry import TelemetryStore
from hybridsched.workers.policy_modes import ModeTask
from tests.integration.policy_pool import policy
from tests.nvml_double import Double, double

POOL = "driver"
TOKEN = "1:test"
DAY = (Gres(name="gpu", type="1g.10gb", count=7),)
NIGHT = (Gres(name="gpu", type="7g.80gb", count=1),)
MODES = ModesPolicy(
    enabled=True,
    act_ms=3_000.0,
    mig_configs={
        "slices": (LayoutEntry(mig_enabled=True, mig_devices={"1g.10gb": 7}),),
        "whole": (LayoutEntry(mig_enabled=True, mig_devices={"7g.80gb": 1}),),
    },
    hosts=(HostGroup(names="n1", gpu="h100-80gb"),),
    mode=(Mode(name="day", layout="slices"), Mode(name="night", layout="whole", node="night-{host}")),
)
FAILING = [
    "nvmlDeviceGetGpuInstances",
    "nvmlGpuInstanceGetComputeInstances",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
    "nvmlDeviceCreateGpuInstance",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
]
UNKNOWN = 999
"""NVML_ERROR_UNKNOWN of nvml.h."""


class DriverHands(FakeHands):
    """The fake's slurmd, and the real driver's cutting."""

    def __init__(self, slurm: FakeSlurm, gpus: Double) -> None:
        super().__init__(slurm)
        self.driver = NvmlMig(load=lambda: gpus.nvml)

    async def cut(self, host: str, layout: bytes) -> None:
        self.calls.append(("mig-apply", host))
        try:
            gpus = self.driver.read()
        except MigError as error:
            raise ClusterError(str(error), code="died", retryable=True) from error
        outcome = self.driver.apply(plan(gpus, wants(_layout(layout), gpus)), lambda _: None)
        if not outcome.ok:
            raise ClusterError("; ".join(outcome.lines()), code="died", retryable=True)

    async def differs(self, host: str, layout: bytes) -> str:
        try:
            return self.stands(_layout(layout))
        except MigError as error:
            raise ClusterError(str(error), code="died", retryable=True) from error

    def stands(self, layout: tuple[LayoutEntry, ...]) -> str:
        """Empty: the GPUs are cut so."""
        gpus = self.driver.read()
        wanted = wants(layout, gpus)
        return "; ".join(d for gpu in gpus if (d := difference(gpu, wanted[gpu.index])) is not None)


def _layout(document: bytes) -> tuple[LayoutEntry, ...]:
    layouts, selected = parse_text(document.decode())
    return layouts[selected or ""]


ACT_S = 10.0
"""Longer than any act here takes."""


class Host:
    """One host with its pool, and a policy worker's modes that look as often as the test says."""

    def __init__(self, gpus: Double, url: str) -> None:
        records = {
            "n1": FakeNode(name="n1", configured=DAY, live=DAY),
            "night-n1": FakeNode(name="night-n1", configured=NIGHT, live=NIGHT, states=("DOWN",)),
        }
        partition = Partition(name="online", nodes=tuple(records), default=True)
        self.slurm = FakeSlurm(nodes=records, partitions=(partition,))
        self.cluster = FakeCluster(self.slurm)
        self.hands = DriverHands(self.slurm, gpus)
        self.policy = policy(modes=MODES)
        self.client = async_client(url)
        self.telemetry = TelemetryStore(self.client, POOL)
        self.store = ModeStore(self.client, POOL)
        self.events = EventLog(self.client, POOL)
        self.now_ms = 1_000_000.0
        self.task = self.begun()

    def begun(self) -> ModeTask:
        """That of a policy worker that has just begun."""
        return ModeTask(
            self.cluster,
            self.hands,
            self.client,
            self.events,
            pool=POOL,
            user="root",
            clock_ms=lambda: self.now_ms,
        )

    async def look(self) -> None:
        self.now_ms += 500.0
        await self.client.set(Keys(POOL).leader, TOKEN)
        telemetry = await self.telemetry.read_all()
        await self.task.look(
            self.policy, TOKEN, await self.cluster.jobs(), await self.cluster.nodes(), telemetry
        )
        await asyncio.sleep(0)
        # The acts are tasks; what they wait for is the store, which is asked before each command.
        acts = [task for task in asyncio.all_tasks() if task.get_name().startswith("mode-")]
        if acts:
            await asyncio.wait(acts, timeout=ACT_S)

    @property
    def state(self) -> HostState:
        return self.task.state.hosts["n1"]

    async def settle(self, looks: int = 60) -> HostState:
        """Until the host is at rest."""
        for _ in range(looks):
            await self.look()
            if self.state.step in (Step.SERVING, Step.HELD) and not self.moves:
                break
        return self.state

    @property
    def moves(self) -> bool:
        decision = self.task.decision
        target = decision.targets.get("n1") if decision is not None else None
        waits = target is not None and target.mode != self.state.mode and not self.state.failures
        return waits and self.state.step is Step.SERVING

    def nothing_half(self) -> str:
        """The mode in which the host stands, whole: GPUs, record and what is said of it."""
        host = self.state
        assert host.step is Step.SERVING, host
        mode = MODES.named(host.mode)
        assert mode is not None
        assert self.hands.stands(MODES.mig_configs[mode.layout]) == ""
        up = "n1" if host.mode == "day" else "night-n1"
        for name, node in self.slurm.nodes.items():
            assert ("DOWN" in node.states) is (name != up), (name, node.states)
            assert "INVAL" not in node.states
        assert "DRAIN" not in self.slurm.nodes[up].states
        return host.mode


@pytest.fixture
def gpus(tmp_path: Path) -> Iterator[Double]:
    with double(tmp_path / "gpus", "h100-80gb") as made:
        driver = NvmlMig(load=lambda: made.nvml)
        found = driver.read()
        assert driver.apply(plan(found, wants(MODES.mig_configs["slices"], found)), lambda _: None).ok
        yield made


@pytest.fixture
async def host(gpus: Double, valkey: redis.Redis, valkey_url: str) -> AsyncIterator[Host]:
    """By day, and ordered into the night."""
    made = Host(gpus, valkey_url)
    try:
        await made.look()
        await made.store.order("night", (), by="the test")
        yield made
    finally:
        await made.task.close()
        await made.events.close()
        await made.client.aclose()


async def test_an_error_at_each_call_that_changes_something_ends_in_a_whole_mode(
    gpus: Double, host: Host
) -> None:
    """Once at each call in turn: it is tried again, and the change completes."""
    await host.settle()
    assert host.nothing_half() == "night"
    # A whole to take away and seven slices to make, instance and compute instance each; and back.
    for at in range(17):
        for mode in ("day", "night"):
            gpus.fail_change(at, UNKNOWN)
            await host.store.order(mode, (), by="the test")
            await host.settle()
            assert host.nothing_half() == mode
            assert gpus.failed() is (at < 16)
            gpus.fail_change(10_000, UNKNOWN)


async def test_an_error_at_each_call_whatever_it_does_ends_in_a_whole_mode(gpus: Double, host: Host) -> None:
    """Those that only read as well, there and back: each twenty-first of the first thousand of a change."""
    for n, at in enumerate(range(0, 1_000, 21)):
        mode = ("night", "day")[n % 2]
        gpus.fail_any(at, UNKNOWN)
        await host.store.order(mode, (), by="the test")
        await host.settle()
        assert gpus.failed()
        gpus.fail_any(100_000, UNKNOWN)
        assert host.nothing_half() == mode


@pytest.mark.parametrize("call", FAILING)
async def test_a_call_that_always_fails_leaves_the_old_mode_or_holds_the_host(
    gpus: Double, host: Host, call: str
) -> None:
    gpus.fail_call(call, UNKNOWN)
    state = await host.settle()
    gpus.fail_call("", 0)
    if state.step is Step.HELD:
        assert "cut failed" in state.why
        assert not any(name.usable for name in await host.cluster.nodes()), "nothing may run there"
        assert host.task.troubles["n1"] == state.why
        # An operator orders a mode: it is taken out of the hold.
        await host.store.order("day", (), by="the test")
        await host.settle()
        assert host.nothing_half() == "day"
    else:
        assert host.nothing_half() == ("night" if not state.failures else "day")
        assert state.why == "" or "cut failed" in state.why


async def test_a_reservation_keeps_jobs_out_of_a_switch_that_is_near(host: Host) -> None:
    """Made while the switch is ahead, of the records that will go; gone when it has begun."""
    await host.store.withdraw()
    night = Window(start="22:00", end="06:00")
    modes = msgspec.structs.replace(
        MODES,
        reservation=True,
        autonomy=Autonomy.AUTO,
        default="day",
        mode=(MODES.mode[0], msgspec.structs.replace(MODES.mode[1], windows=(night,))),
    )
    host.policy = policy(modes=modes)
    at = datetime(2026, 11, 30, 17, 0, tzinfo=UTC).timestamp() * 1000.0
    host.now_ms = at
    await host.look()
    assert host.slurm.reservations == (), "five hours ahead"
    host.now_ms = at + 2 * 3_600_000
    await host.look()
    (made,) = host.slurm.reservations
    assert (made.nodes, made.start_ms) == (("n1",), at + 5 * 3_600_000)
    host.now_ms = at + 5 * 3_600_000
    await host.settle()
    assert host.state.mode == "night"
    assert host.slurm.reservations == ()


@pytest.mark.parametrize("approved", [False, True])
@pytest.mark.parametrize("autonomy", ["suggest", "approve", "auto"])
async def test_the_calendar_switches_as_far_as_it_may(host: Host, autonomy: str, approved: bool) -> None:
    await host.store.withdraw()
    night = msgspec.structs.replace(MODES.mode[1], windows=(Window(start="22:00", end="06:00"),))
    modes = msgspec.structs.replace(
        MODES, autonomy=Autonomy(autonomy), default="day", mode=(MODES.mode[0], night)
    )
    host.policy = policy(modes=modes)
    host.now_ms = datetime(2026, 11, 30, 21, 50, tzinfo=UTC).timestamp() * 1000.0
    await host.look()
    decision = host.task.decision
    assert decision is not None
    assert decision.proposal is not None
    assert (decision.proposal.mode, decision.targets) == ("night", {})
    if approved:
        await host.store.approve(decision.proposal.id, by="the test")
    host.now_ms += 600_000.0
    for _ in range(30):
        await host.look()
    goes = autonomy == "auto" or (autonomy == "approve" and approved)
    assert host.nothing_half() == ("night" if goes else "day")


@pytest.mark.parametrize("word", ["slurmd-stop", "slurmd-start"])
@pytest.mark.parametrize("again", [True, False])
async def test_a_hand_that_fails_is_tried_again_or_the_host_goes_back(
    host: Host, word: str, again: bool
) -> None:
    error = ClusterError("no way in", code="died" if again else "refused", retryable=again)
    host.hands.fail[word] = [error]
    state = await host.settle()
    assert host.nothing_half() == ("night" if again else "day")
    assert ("no way in" in state.why) is not again


async def test_an_act_that_ends_in_an_error_of_our_own_leaves_no_host_waiting_for_ever(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    with monkeypatch.context() as patched:
        patched.setattr(host.hands, "cut", broken)
        for _ in range(12):
            await host.look()
            if host.state.tries:
                break
        assert (host.state.step, host.state.wait) == (Step.CUTTING, "RuntimeError: nobody foresaw this")
    await host.settle()
    assert host.nothing_half() == "night"


async def test_a_worker_that_leads_no_more_does_nothing(host: Host) -> None:
    """Its journal is refused, so no act follows."""
    asked = len(host.hands.calls)
    before = host.task.state
    for _ in range(3):
        await host.client.set(Keys(POOL).leader, "2:another")
        telemetry = await host.telemetry.read_all()
        nodes = await host.cluster.nodes()
        await host.task.look(host.policy, TOKEN, (), nodes, telemetry)
        await asyncio.sleep(0)
    assert len(host.hands.calls) == asked
    assert (await host.store.journal()) == before
    assert not any("DRAIN" in node.states for node in host.slurm.nodes.values())
