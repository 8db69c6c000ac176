"""Clocks that are set in the middle of a change of mode: nothing that is measured or has a limit notices."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
import pytest

from hybridsched.cluster.values import ClusterError
from hybridsched.core.autonomy import Autonomy
from hybridsched.core.modes import HostGroup, ModesPolicy, Window
from hybridsched.core.switch_values import Step
from hybridsched.workers.policy_modes import ModeTask
from tests.integration.policy_pool import policy
from tests.integration.test_modes_driver import MODES, POOL, Host, gpus, host
from tests.integration.test_modes_left import until

__all__ = ["gpus", "host"]

HOUR_MS = 3_600_000.0


class ServersClock:
    """The clock of a host's Redis server, which the test sets."""

    def __init__(self, host: Host, patch: pytest.MonkeyPatch) -> None:
        self.shift_ms = 0.0
        real = host.client.time

        async def said() -> tuple[int, int]:
            seconds, micros = await real()
            at = seconds * 1_000_000 + micros + int(self.shift_ms * 1000)
            return divmod(at, 1_000_000)

        patch.setattr(host.client, "time", said)
        # What this machine's own clock says is of no account.
        patch.setattr(time, "time", lambda: 0.0)


async def by_server(host: Host) -> None:
    """A policy worker's modes by the server's clock, in a term of its own."""
    await host.task.close()
    host.task = ModeTask(host.cluster, host.hands, host.client, host.events, pool=POOL, user="root")
    await host.look()


@pytest.mark.parametrize("shift_ms", [HOUR_MS, -HOUR_MS, 20_000.0, -20_000.0])
@pytest.mark.parametrize("step", [Step.DRAINING, Step.CUTTING, Step.VERIFYING])
async def test_a_clock_that_is_set_in_the_middle_changes_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch, step: Step, shift_ms: float
) -> None:
    clock = ServersClock(host, monkeypatch)
    await by_server(host)
    await until(host, step)
    host.hands.fail["slurmd-start"] = [ClusterError("no way in", code="died", retryable=True)]
    host.now_ms += shift_ms
    clock.shift_ms = shift_ms
    deadline = time.monotonic() + 20
    while host.moves or host.state.step is not Step.SERVING:
        assert time.monotonic() < deadline
        await host.look()
    assert (host.nothing_half(), host.state.failures) == ("night", 0)
    spans = (await host.store.durations()).spans
    assert set(spans) == {"drain day", "cut night", "slurm night"}
    assert max(ms for known in spans.values() for ms in known) < 20_000.0


@pytest.mark.parametrize("shift_ms", [HOUR_MS, -HOUR_MS])
async def test_a_clock_that_was_set_before_another_took_over_changes_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch, shift_ms: float
) -> None:
    clock = ServersClock(host, monkeypatch)
    await by_server(host)
    await until(host, Step.DRAINING)
    await host.look()
    clock.shift_ms = shift_ms
    await by_server(host)
    await host.settle()
    assert (host.nothing_half(), host.state.failures) == ("night", 0)
    spans = (await host.store.durations()).spans
    assert max(ms for known in spans.values() for ms in known) < 20_000.0


async def test_windows_and_orders_go_by_the_servers_clock(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ServersClock(host, monkeypatch)
    await host.store.withdraw()
    night = msgspec.structs.replace(MODES.mode[1], windows=(Window(start="22:00", end="06:00"),))
    modes = msgspec.structs.replace(MODES, autonomy=Autonomy.AUTO, default="day", mode=(MODES.mode[0], night))
    host.policy = policy(modes=modes)
    seconds, _ = await host.client.time()
    noon = datetime.fromtimestamp(seconds, UTC).replace(hour=12)
    clock.shift_ms = (noon.timestamp() - seconds) * 1000.0
    await by_server(host)
    await host.settle()
    assert host.nothing_half() == "day"
    clock.shift_ms += 11 * HOUR_MS
    await host.look()
    await host.settle()
    assert host.nothing_half() == "night"
    # An order ends by the same clock.
    now_ms = noon.timestamp() * 1000.0 + 11 * HOUR_MS
    await host.store.order("day", (), by="the test", until_ms=now_ms + HOUR_MS)
    await host.look()
    await host.settle()
    assert host.nothing_half() == "day"
    clock.shift_ms += 2 * HOUR_MS
    await host.look()
    await host.settle()
    assert host.nothing_half() == "night"


@pytest.mark.parametrize("modes", [None, msgspec.structs.replace(MODES, hosts=(HostGroup(names="n7"),))])
async def test_a_host_at_rest_that_the_policy_names_no_more_leaves_the_journal(
    host: Host, modes: ModesPolicy | None
) -> None:
    await host.store.withdraw()
    await host.look()
    known = await host.store.journal()
    assert known is not None
    assert set(known.hosts) == {"n1"}
    before = host.policy
    host.policy = policy(modes=modes)
    for _ in range(2):
        await host.look()
    gone = await host.store.journal()
    assert gone is not None
    assert gone.hosts == {}
    # Put back, it is taken up as it stands.
    host.policy = before
    await host.look()
    await host.look()
    back = await host.store.journal()
    assert back is not None
    assert set(back.hosts) == {"n1"}


async def test_a_host_in_the_middle_stays_in_the_journal_of_a_pool_without_modes(host: Host) -> None:
    await until(host, Step.CUTTING)
    host.policy = policy()
    for _ in range(3):
        await host.look()
    known = await host.store.journal()
    assert known is not None
    assert known.hosts["n1"].step is Step.CUTTING
