"""Replicas that have to come to serve off the nodes of a host, so that it can change its mode."""

from __future__ import annotations

from hybridsched.core.replica_values import Cancel, Move, Stop, Submit
from tests.unit.test_core_replicas import Site, kinds

OFF = ("n1", "night-n1")
ONE = (Move(group="m", count=1, nodes=OFF),)


def packed() -> Site:
    """Both replicas on n1, where the first has to make room for a change of mode."""
    site = Site().served()
    for job in (1, 2):
        site.change(job, nodes=("n1",))
    site.moves = ONE
    return site


def test_a_successor_is_started_on_another_host_and_the_elder_stays_until_it_serves() -> None:
    site = packed()
    (act,) = site.look()
    assert isinstance(act, Submit)
    assert act.excluded == OFF
    assert [site.look() for _ in range(30)] == [[]] * 30, "as long as it waits, and no second one"
    site.serve(3)
    site.change(3, serving=False, nodes=("n2",))
    assert [site.look() for _ in range(5)] == [[]] * 5, "it loads"
    site.change(3, serving=True)
    (act,) = site.look()
    assert isinstance(act, Stop)
    assert (act.job, act.why) == (1, "its host is to change its mode and enough others serve")


def test_one_that_waits_for_another_node_keeps_nothing_from_being_replaced() -> None:
    """No other node is free: a replica on the host that dies comes again, wherever Slurm has room."""
    site = packed()
    site.look()
    site.jobs.pop(1)
    site.look(10_000.0)
    fresh = [job for job in site.jobs.values() if not job.excluded]
    assert [job.job for job in fresh] == [2, 4]


def test_one_that_waits_for_another_node_goes_when_the_host_stays() -> None:
    site = packed()
    site.look()
    site.moves = ()
    (act,) = site.look()
    assert isinstance(act, Cancel)
    assert (act.job, act.why) == (3, "it waits for a node off a host that stays")
    assert site.look() == []
    # Another host is to leave now.
    site = packed()
    site.look()
    site.moves = (Move(group="m", count=1, nodes=("n2", "night-n2")),)
    acts = site.look()
    assert kinds(acts) == ["Cancel"]
    assert acts[0].job == 3  # type: ignore[union-attr]


def test_what_another_has_excluded_is_no_business_of_ours() -> None:
    """A site's plugin may keep jobs off nodes."""
    site = Site()
    site.look()
    site.change(1, excluded=("n7",))
    assert [site.look() for _ in range(5)] == [[]] * 5


def test_where_nothing_runs_any_more_as_many_as_the_floor_lacks_are_kept_off_the_host() -> None:
    site = packed()
    site.jobs.clear()
    acts = site.look(10_000.0)
    assert [act.excluded for act in acts if isinstance(act, Submit)] == [OFF, ()]
