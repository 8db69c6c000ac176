"""One contract for the fake, for Slurm's commands on real daemons, and for pyslurm on its stand-in."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hybridsched.cluster.values import ClusterError, Gres, Job, JobChange, Node, total
from hybridsched.workers.policy_slurm_upkeep import SETTLED_S
from tests.contract.cluster_rigs import LANE, FakeRig, RealPyslurmRig, RealRig, Rig, StandinRig, offline
from tests.helpers import await_until

# The real pyslurm needs the Slurm that it was built for: slurm/pyslurm-root.sh makes such a place.
REAL_PYSLURM = ["real-pyslurm"] if os.environ.get("HYBRIDSCHED_REAL_PYSLURM") else []


@pytest.fixture(params=["fake", "pyslurm", "commands", *REAL_PYSLURM])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    made: Rig
    if request.param == "fake":
        made = FakeRig()
    elif request.param == "pyslurm":
        made = StandinRig(tmp_path)
    elif request.param == "real-pyslurm":
        made = RealPyslurmRig(request.getfixturevalue("clean_slurm"))
    else:
        made = RealRig(request.getfixturevalue("clean_slurm"))
    yield made
    await made.close()


async def close_all(rig: Rig) -> None:
    for node in await rig.cluster.nodes():
        if node.usable:
            await rig.cluster.set_gres_count(node.name, "hsfill", 0)


async def the_job(rig: Rig, number: int) -> Job:
    (found,) = await rig.cluster.jobs(ids=[number])
    return found


async def the_node(rig: Rig, name: str) -> Node:
    (found,) = await rig.cluster.nodes([name])
    return found


async def until(rig: Rig, number: int, state: str) -> Job:
    async def there() -> bool:
        return (await the_job(rig, number)).state == state

    await await_until(there, timeout_s=rig.start_wait_s, what=f"job {number} {state}")
    return await the_job(rig, number)


async def running_job(rig: Rig) -> int:
    number = await rig.cluster.submit(offline(rig))
    await until(rig, number, "RUNNING")
    return number


async def test_slurm_starts_a_job_when_the_count_rises(rig: Rig) -> None:
    await close_all(rig)
    number = await rig.cluster.submit(offline(rig, name="a job = of mine"))
    waiting = await the_job(rig, number)
    assert waiting.pending
    assert not waiting.running
    assert (waiting.name, waiting.partition, waiting.user) == ("a job = of mine", "offline", "root")
    assert waiting.comment == "batch=b1 with = and blanks"
    assert waiting.gres == LANE
    assert waiting.nodes == ()
    assert waiting.start_ms is None
    assert waiting.time_limit_ms == 600_000
    assert waiting.restarts == 0

    await rig.cluster.set_gres_count("n2", "hsfill", 1)
    started = await until(rig, number, "RUNNING")
    assert started.running
    assert started.nodes == ("n2",)
    assert started.start_ms is not None
    assert total((await the_node(rig, "n2")).gres_used, "hslane") == 1


async def test_a_lowered_count_leaves_the_running_job_alone(rig: Rig) -> None:
    number = await running_job(rig)
    await close_all(rig)
    assert (await the_job(rig, number)).running
    second = await rig.cluster.submit(offline(rig))
    assert (await the_job(rig, second)).pending


async def test_signal_reaches_the_batch_shell(rig: Rig) -> None:
    number = await running_job(rig)
    if isinstance(rig, RealRig):
        await await_until(lambda: "started" in rig.testbed.output(number), what="the script's first line")
    await rig.cluster.signal(number, "USR2")
    await await_until(lambda: rig.got_signal(number), what="the signal")


async def test_signal_to_a_waiting_job_is_nothing(rig: Rig) -> None:
    await close_all(rig)
    number = await rig.cluster.submit(offline(rig))
    before = time.monotonic()
    await rig.cluster.signal(number, "SIGUSR2")
    assert time.monotonic() - before < 10, "scancel by itself would try for minutes"
    assert (await the_job(rig, number)).pending
    assert not rig.got_signal(number)


async def test_requeue_and_start_again(rig: Rig) -> None:
    number = await running_job(rig)
    await rig.cluster.requeue(number)
    await until(rig, number, "PENDING")
    with pytest.raises(ClusterError) as refused:
        await rig.cluster.requeue(number)
    assert (refused.value.code, refused.value.retryable) == ("refused", False)

    # In the second of its end slurmd would refuse the next run, and slurmctld end the job for good.
    await asyncio.sleep(SETTLED_S)

    async def again() -> bool:
        job = await the_job(rig, number)
        if job.pending:
            try:
                await rig.cluster.update_job(number, JobChange(start_now=True))
            except ClusterError as error:
                if error.code != "refused":  # it has not started in between
                    raise
        return job.running

    await await_until(again, timeout_s=rig.start_wait_s, what="the second run")
    assert (await the_job(rig, number)).restarts == 1


async def test_cancel_ends_and_may_be_repeated(rig: Rig) -> None:
    number = await running_job(rig)
    await rig.cluster.cancel(number)

    async def ended() -> bool:
        return (await the_job(rig, number)).ended

    await await_until(ended, timeout_s=20, what="the end")
    job = await the_job(rig, number)
    assert job.state == "CANCELLED"
    assert job.end_ms is not None
    await rig.cluster.cancel(number)
    await rig.cluster.cancel(99_999)
    with pytest.raises(ClusterError) as gone:
        await rig.cluster.signal(number, "USR2")
    assert gone.value.code == "not_found"


async def test_a_record_that_is_set_down_comes_back_by_resume(rig: Rig) -> None:
    await rig.cluster.down("n3", "hybridsched: mode day to night")
    node = await the_node(rig, "n3")
    assert not node.usable
    assert node.states[0] == "DOWN"
    assert node.reason == "hybridsched: mode day to night"
    await rig.cluster.resume("n3")

    async def back() -> bool:
        return (await the_node(rig, "n3")).usable

    await await_until(back, timeout_s=30, what="node n3")


async def test_a_reservation_is_made_moved_and_removed(rig: Rig) -> None:
    start = (time.time() + 7200) // 60 * 60_000.0
    for moved in (0.0, 600_000.0):
        await rig.cluster.reserve("hs-try", ["n1", "n2"], start + moved, 30)
        (made,) = [r for r in await rig.cluster.reservations() if r.name == "hs-try"]
        assert (made.nodes, made.start_ms) == (("n1", "n2"), start + moved)
        assert made.end_ms == start + moved + 1_800_000
    await rig.cluster.unreserve("hs-try")
    await rig.cluster.unreserve("hs-try")
    assert "hs-try" not in [r.name for r in await rig.cluster.reservations()]
    with pytest.raises(ClusterError) as refused:
        await rig.cluster.reserve("hs-try", [], start, 30)
    assert refused.value.code == "invalid"


async def test_drain_and_resume(rig: Rig) -> None:
    await rig.cluster.drain("n3", "GPU 3 fell off = State=IDLE, Gres=none")
    node = await the_node(rig, "n3")
    assert node.draining
    assert not node.usable
    assert node.reason == "GPU 3 fell off = State=IDLE, Gres=none"
    assert total(node.gres, "gpu", "a100") == 4
    await rig.cluster.resume("n3")
    node = await the_node(rig, "n3")
    assert not node.shut
    assert not node.draining
    await rig.cluster.resume("n3")

    async def usable() -> bool:  # Slurm shows it as not responding until it has pinged it
        return (await the_node(rig, "n3")).usable

    await await_until(usable, timeout_s=45, what="node n3 in use")


async def test_the_count_changes_and_the_other_gres_stay(rig: Rig) -> None:
    before = await the_node(rig, "n1")
    for count in (0, 3, 1, 4):
        await rig.cluster.set_gres_count("n1", "hsfill", count)
        node = await the_node(rig, "n1")
        assert total(node.gres, "hsfill") == count
        assert total(node.gres, "gpu", "a100") == total(before.gres, "gpu", "a100") == 4
        assert total(node.gres, "hslane") == total(before.gres, "hslane") == 4
        assert node.usable


async def test_a_count_is_no_supply_and_places_are(rig: Rig) -> None:
    """With a count of 1 jobs start up to the places: the count has to be lowered as they come."""
    await close_all(rig)
    jobs = [await rig.cluster.submit(offline(rig)) for _ in range(5)]
    await rig.cluster.set_gres_count("n1", "hsfill", 1)

    async def full() -> bool:
        return total((await the_node(rig, "n1")).gres_used, "hslane") == 4

    await await_until(full, timeout_s=rig.start_wait_s, what="every place of n1 taken")
    states = sorted([(await the_job(rig, number)).state for number in jobs])
    assert states == ["PENDING", *["RUNNING"] * 4]


async def test_counts_move_under_running_jobs_and_the_node_stays_in_service(rig: Rig) -> None:
    """`scontrol reconfigure` makes every node register: a consumed count ends in INVAL and DRAIN."""
    await close_all(rig)
    number = await rig.cluster.submit(offline(rig))
    for count in (1, 0, 2, 4, 0):
        await rig.cluster.set_gres_count("n1", "hsfill", count)
        await until(rig, number, "RUNNING")
        rig.reconfigure()

        async def configured() -> bool:
            return total((await the_node(rig, "n1")).gres, "hsfill") == 4

        await await_until(configured, what="the configured count")
        node = await the_node(rig, "n1")
        assert node.usable, (node.states, node.reason)
    assert (await the_job(rig, number)).running


async def test_reconfigure_puts_the_count_back(rig: Rig) -> None:
    await rig.cluster.set_gres_count("n1", "hsfill", 0)
    rig.reconfigure()

    async def open_again() -> bool:
        return total((await the_node(rig, "n1")).gres, "hsfill") == 4

    await await_until(open_again, what="the configured count")


async def test_a_gres_that_is_not_configured_has_no_effect(rig: Rig) -> None:
    with pytest.raises(ClusterError) as error:
        await rig.cluster.set_gres_count("n1", "nosuch", 2)
    assert error.value.code == "no_effect"
    assert total((await the_node(rig, "n1")).gres, "gpu") == 4


async def test_unknown_things_are_told_apart(rig: Rig) -> None:
    for call in (
        rig.cluster.requeue(99_999),
        rig.cluster.signal(99_999, "USR2"),
        rig.cluster.update_job(99_999, JobChange(comment="x")),
        rig.cluster.drain("nosuch", "why not"),
        rig.cluster.set_gres_count("nosuch", "hsfill", 1),
    ):
        with pytest.raises(ClusterError) as error:
            await call
        assert (error.value.code, error.value.retryable) == ("not_found", False), str(error.value)
    assert await rig.cluster.jobs(ids=[99_999]) == ()
    assert await rig.cluster.nodes(["nosuch"]) == ()
    assert [n.name for n in await rig.cluster.nodes(["nosuch", "n1"])] == ["n1"]


async def test_a_wrong_submission_is_refused(rig: Rig) -> None:
    with pytest.raises(ClusterError) as error:
        await rig.cluster.submit(offline(rig, partition="nosuch"))
    assert error.value.code == "refused"
    assert "partition" in str(error.value)


async def test_a_wrong_call_never_reaches_slurm(rig: Rig) -> None:
    for call in (
        rig.cluster.drain("ALL", "everything at once"),
        rig.cluster.drain("n[1-4]", "many"),
        rig.cluster.drain("n1", " "),
        rig.cluster.set_gres_count("n1", "hsfill", -1),
        rig.cluster.set_gres_count("n1", "hs fill", 1),
        rig.cluster.signal(1, "US R2"),
        rig.cluster.cancel(0),
        rig.cluster.submit(offline(rig, script=None)),
        rig.cluster.submit(offline(rig, script="no interpreter")),
        rig.cluster.submit(offline(rig, comment="two\nlines")),
    ):
        with pytest.raises(ClusterError) as error:
            await call
        assert error.value.code == "invalid"


async def test_hold_comment_and_limit(rig: Rig) -> None:
    number = await rig.cluster.submit(offline(rig, hold=True))
    assert (await the_job(rig, number)).held
    await rig.cluster.update_job(number, JobChange(comment="another = one", time_limit_min=20))
    job = await the_job(rig, number)
    assert (job.comment, job.time_limit_ms) == ("another = one", 1_200_000)
    await rig.cluster.update_job(number, JobChange(held=False))
    await until(rig, number, "RUNNING")


async def test_a_waiting_job_is_kept_from_nodes(rig: Rig) -> None:
    await close_all(rig)
    number = await rig.cluster.submit(offline(rig))
    assert (await the_job(rig, number)).excluded == ()
    everywhere = ("n1", "n2", "n3", "n4")
    await rig.cluster.update_job(number, JobChange(excluded=everywhere, comment="kept"))
    job = await the_job(rig, number)
    assert (sorted(job.excluded), job.comment) == (list(everywhere), "kept")
    second = await rig.cluster.submit(offline(rig))
    await rig.cluster.set_gres_count("n1", "hsfill", 1)
    await until(rig, second, "RUNNING")
    job = await the_job(rig, number)
    assert job.pending
    assert not job.held, "the parked node is left to it"
    await rig.cluster.update_job(number, JobChange(excluded=("n1", "n3")))
    assert sorted((await the_job(rig, number)).excluded) == ["n1", "n3"]
    await rig.cluster.update_job(number, JobChange(excluded=()))
    assert (await the_job(rig, number)).excluded == ()
    assert (await until(rig, number, "RUNNING")).nodes == ("n1",)
    with pytest.raises(ClusterError) as late:
        await rig.cluster.update_job(number, JobChange(excluded=("n1",)))
    assert late.value.code == "refused"
    with pytest.raises(ClusterError) as wrong:
        await rig.cluster.update_job(second, JobChange(excluded=("n[1-3]",)))
    assert wrong.value.code == "invalid"


async def test_a_job_is_submitted_so_that_it_keeps_off_nodes(rig: Rig) -> None:
    number = await rig.cluster.submit(offline(rig, excluded=("n1", "n2", "n4")))
    job = await until(rig, number, "RUNNING")
    assert (job.nodes, sorted(job.excluded)) == (("n3",), ["n1", "n2", "n4"])
    with pytest.raises(ClusterError) as wrong:
        await rig.cluster.submit(offline(rig, excluded=("n[1-3]",)))
    assert wrong.value.code == "invalid"
    with pytest.raises(ClusterError) as unknown:
        await rig.cluster.submit(offline(rig, excluded=("n99",)))
    assert not unknown.value.retryable


async def test_jobs_are_picked_by_partition(rig: Rig) -> None:
    await close_all(rig)
    first = await rig.cluster.submit(offline(rig))
    gpu = (Gres(name="gpu", type="a100", count=1),)
    second = await rig.cluster.submit(offline(rig, partition="online", gres=gpu, requeue=None))
    offline_ids = [j.id for j in await rig.cluster.jobs(partitions=["offline"]) if not j.ended]
    online_ids = [j.id for j in await rig.cluster.jobs(partitions=["online"]) if not j.ended]
    assert offline_ids == [first]
    assert online_ids == [second]
    started = await until(rig, second, "RUNNING")
    assert started.gres == gpu


async def test_partitions_reservations_and_config(rig: Rig) -> None:
    found = {p.name: p for p in await rig.cluster.partitions()}
    assert {"n1", "n2", "n3", "n4"} <= set(found["offline"].nodes)
    online, low = found["online"], found["offline"]
    assert online.up
    assert (online.priority_tier or 0) > (low.priority_tier or 0)
    assert (online.preempt_mode, low.preempt_mode) == ("OFF", "REQUEUE")
    assert (low.grace_s or 0) > 0
    parked = await the_node(rig, "hspark")
    assert not parked.usable
    assert await rig.cluster.reservations() == ()
    rig.reserve("night", "n1")
    (night,) = await rig.cluster.reservations()
    assert (night.name, night.nodes, night.active) == ("night", ("n1",), False)
    config = await rig.cluster.config(["SLURM_VERSION", "PreemptType", "NoSuchKey"])
    assert config["PreemptType"] == "preempt/partition_prio"
    assert set(config) == {"SLURM_VERSION", "PreemptType"}


async def test_a_dead_controller_is_told_at_once(rig: Rig) -> None:
    await rig.cluster.ping()
    rig.controller(up=False)
    try:
        before = time.monotonic()
        for call in (rig.cluster.ping(), rig.cluster.jobs(), rig.cluster.set_gres_count("n1", "hsfill", 1)):
            with pytest.raises(ClusterError) as error:
                await call
            assert (error.value.code, error.value.retryable) == ("unreachable", True)
        assert time.monotonic() - before < 14, "Slurm's own commands would try for minutes"
    finally:
        rig.controller(up=True)

    async def back() -> bool:
        try:
            await rig.cluster.ping()
        except ClusterError:
            return False
        return True

    await await_until(back, timeout_s=15, what="slurmctld")
    assert len(await rig.cluster.nodes()) == 5
