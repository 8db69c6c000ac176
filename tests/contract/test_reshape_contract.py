"""Both ways of taking a node record out of service and bringing another in: fake, and on real daemons."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hybridsched.cluster.commands import CommandCluster
from hybridsched.cluster.fake import FakeCluster, FakeNode, FakeSlurm
from hybridsched.cluster.fake_hands import FakeHands
from hybridsched.cluster.hands import CommandHands, Hands, NoHands
from hybridsched.cluster.protocol import Cluster
from hybridsched.cluster.reshape import ReconfigureWay, RecordsWay, Way, in_service, invalid
from hybridsched.cluster.values import ClusterError, Gres, Node, Partition, total
from hybridsched.slurmfiles.render import part_names
from tests.helpers import await_until
from tests.integration.modes_rig import BIN, HAND, SLICES, WHOLE, ModesTestbed, day_slurm, modes_slurm

__all__ = ["day_slurm", "modes_slurm"]

DAY = (Gres(name="gpu", type="1g.10gb", count=SLICES), Gres(name="hsfill", count=SLICES))
NIGHT = (Gres(name="gpu", type="a100", count=WHOLE), Gres(name="hsfill", count=SLICES))
REASON = "hybridsched: mode day to night"


class Rig:
    """One host `n1`: its records and what they are called in each mode."""

    cluster: Cluster
    hands: Hands
    way: Way
    day: str
    night: str

    @property
    def records(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.day, self.night)))

    async def node(self, name: str) -> Node:
        (found,) = await self.cluster.nodes([name])
        return found


def fake(way: str) -> Rig:
    rig = Rig()
    rig.day, rig.night = ("n1", "night-n1") if way == "records" else ("n1", "n1")
    nodes = {
        rig.night: FakeNode(name=rig.night, configured=NIGHT, live=NIGHT, states=("DOWN",), reason="by day"),
        rig.day: FakeNode(name=rig.day, configured=DAY, live=DAY),
    }
    slurm = FakeSlurm(nodes=nodes, partitions=(Partition(name="online", nodes=tuple(nodes), default=True),))
    rig.cluster = FakeCluster(slurm)
    rig.hands = FakeHands(slurm, modes={("n1", "day"): DAY, ("n1", "night"): NIGHT})
    _choose(rig, way)
    return rig


def _choose(rig: Rig, way: str) -> None:
    if way == "records":
        rig.way = RecordsWay(rig.cluster, rig.hands)
    else:
        rig.way = ReconfigureWay(rig.cluster, rig.hands, release=lambda: (22, 5))


def real(way: str, slurm: ModesTestbed) -> Rig:
    rig = Rig()
    rig.day, rig.night = ("n1", "night-n1") if way == "records" else ("n1", "n1")
    rig.cluster = CommandCluster(environment=slurm.env)
    rig.hands = CommandHands(HAND, environment={**slurm.env, "HYBRIDSCHED_BIN": str(BIN)})
    _choose(rig, way)
    folder = slurm.state / "etc"
    conf = slurm.conf.read_text().splitlines()
    gres = (slurm.state / "etc" / "gres.conf").read_text().splitlines()
    for mode, name in (("day", "n1"), ("night", "night-n1")):
        (line,) = [text for text in conf if text.startswith(f"NodeName={name} ")]
        port = next(text for text in conf if text.startswith("NodeName=n1 ")).split("Port=")[1].split()[0]
        words = [w for w in line.split() if not w.startswith("Port=")]
        record = " ".join([*words, f"Port={port}"]).replace(f"NodeName={name} ", "NodeName=n1 ")
        lines = [t.replace(f"NodeName={name} ", "NodeName=n1 ") for t in gres if f"NodeName={name} " in t]
        for file, text in zip(part_names(mode), (record, "\n".join(lines)), strict=True):
            (folder / file).write_text(text + "\n")
    return rig


RIGS = ["fake-records", "fake-reconfigure", "real-records", "real-reconfigure"]


@pytest.fixture(params=RIGS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    kind, way = request.param.split("-")
    if kind == "fake":
        yield fake(way)
        return
    slurm: ModesTestbed = request.getfixturevalue("day_slurm")
    kept = [slurm.conf, slurm.state / "etc" / "gres.conf"]
    for path in kept:
        shutil.copy(path, tmp_path / path.name)
    made = real(way, slurm)
    yield made
    if way == "reconfigure":  # as it was written at first
        await made.hands.stop_slurmd("n1", "n1")
        for path in kept:
            shutil.copy(tmp_path / path.name, path)
        await made.hands.restart_controller()
        slurm.hand("n1", "slurmd-start", "n1")


async def settled(rig: Rig, name: str, check: Any, what: str) -> Node:
    async def there() -> bool:
        return bool(check(await rig.node(name)))

    await await_until(there, timeout_s=20, what=what)
    return await rig.node(name)


async def test_there_and_back_again_without_an_invalid_moment(rig: Rig) -> None:
    for mode, name, kind, count in (
        ("night", rig.night, "a100", WHOLE),
        ("day", rig.day, "1g.10gb", SLICES),
    ):
        for record in rig.records:
            if in_service(await rig.node(record)):
                await rig.cluster.drain(record, REASON)
        await rig.way.leave("n1", rig.records, REASON)
        for record in rig.records:
            assert not in_service(await rig.node(record))
        await rig.way.enter("n1", name, mode, REASON)
        node = await rig.node(name)
        assert in_service(node)
        assert not invalid(node)
        assert not node.usable, "Slurm may not use it before it was verified"
        assert total(node.gres, "gpu", kind) == count
        for other in set(rig.records) - {name}:
            assert not in_service(await rig.node(other))
        await rig.cluster.resume(name)
        await settled(rig, name, lambda n: n.usable, f"{name} in use")


@pytest.mark.parametrize("rig", RIGS[:3], indirect=True)
async def test_each_act_may_be_done_twice(rig: Rig) -> None:
    await rig.cluster.drain(rig.day, REASON)
    await rig.way.leave("n1", rig.records, REASON)
    await rig.way.leave("n1", rig.records, REASON)
    await rig.way.enter("n1", rig.night, "night", REASON)
    await rig.way.enter("n1", rig.night, "night", REASON)
    node = await rig.node(rig.night)
    assert in_service(node)
    assert not node.usable
    assert node.reason == REASON


async def test_with_one_record_a_host_leaves_though_no_slurmctld_answers() -> None:
    """What was written may be why it is away."""
    rig = fake("reconfigure")
    hands: FakeHands = rig.hands  # type: ignore[assignment]
    hands.slurm.down = True
    await rig.way.leave("n1", rig.records, REASON)
    assert hands.calls == [("slurmd-stop", "n1", "n1")]


async def test_with_a_record_for_each_mode_nobody_leaves_while_no_slurmctld_answers() -> None:
    rig = fake("records")
    hands: FakeHands = rig.hands  # type: ignore[assignment]
    hands.slurm.down = True
    with pytest.raises(ClusterError) as away:
        await rig.way.leave("n1", rig.records, REASON)
    assert (away.value.code, hands.calls) == ("unreachable", [])


@pytest.mark.parametrize("release", [(22, 5), (23, 11), (0, 0)])
async def test_a_slurmctld_that_does_not_hear_reconfigure_is_restarted(release: tuple[int, int]) -> None:
    rig = fake("reconfigure")
    hands: FakeHands = rig.hands  # type: ignore[assignment]
    for down in (False, True):
        hands.slurm.down, before = down, len(hands.calls)
        way = ReconfigureWay(rig.cluster, hands, release=lambda: release, register_s=0.2)
        with contextlib.suppress(ClusterError):  # this one does not come up by a restart
            await way.enter("n1", "n1", "night", REASON)
        words = [call[0] for call in hands.calls[before:]]
        restarts = down or release < (23, 11)
        assert words[:2] == ["slurmd-stop", "configure"]
        assert ("slurmctld-restart" in words) is restarts
        assert ("slurmd-start" in words) is not down


@pytest.mark.parametrize("way", ["records", "reconfigure"])
async def test_a_record_that_slurm_does_not_have_is_named(way: str) -> None:
    rig = fake(way)
    with pytest.raises(ClusterError) as refused:
        await rig.way.enter("n1", "nosuch", "night", REASON)
    assert refused.value.code in ("not_found", "refused", "died")


async def test_without_a_hand_the_error_says_what_to_do() -> None:
    made = fake("records")
    way = RecordsWay(made.cluster, NoHands())
    with pytest.raises(ClusterError, match="without --hand PROGRAM") as refused:
        await way.leave("n1", made.records, REASON)
    assert (refused.value.code, refused.value.retryable) == ("missing", False)


@pytest.mark.parametrize(
    ("status", "code", "again"), [(2, "refused", False), (1, "died", True), (75, "died", True)]
)
async def test_a_hands_exit_status_says_whether_it_is_tried_again(
    tmp_path: Path, status: int, code: str, again: bool
) -> None:
    hand = tmp_path / "hand"
    hand.write_text(f"#!/bin/bash\necho GPU 0 is in use >&2\nexit {status}\n")
    hand.chmod(0o755)
    hands = CommandHands(hand)
    with pytest.raises(ClusterError, match=r"mig-apply on host n1 ended with .*: GPU 0 is in use") as failed:
        await hands.cut("n1", b"{}")
    assert (failed.value.code, failed.value.retryable) == (code, again)
    if status == 1:
        assert await hands.differs("n1", b"{}") == "GPU 0 is in use"


async def test_a_hand_gets_the_layout_on_stdin(tmp_path: Path) -> None:
    hand = tmp_path / "hand"
    hand.write_text(f'#!/bin/bash\n{{ echo "$@"; cat; }} > "{tmp_path}/said"\n')
    hand.chmod(0o755)
    await CommandHands(hand).cut("n1", b'{"version": "v1"}')
    assert (tmp_path / "said").read_text() == 'n1 mig-apply\n{"version": "v1"}'
