"""`hybridsched mode` on what a policy worker has published."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import msgspec
import pytest
import redis
from click.testing import CliRunner, Result

from hybridsched.cli.main import cli
from hybridsched.core.autonomy import Autonomy
from hybridsched.core.calendar import Durations
from hybridsched.core.mode_plan import Order, Proposal, decide
from hybridsched.core.modes import Window
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.switch_values import HostJob, HostSeen, HostState, JobKind, Seen, Step, SwitchState
from hybridsched.workers.policy_modes_view import ModeStatus
from tests.integration.modes_rig import two_modes
from tests.integration.policy_pool import policy

POOL = "cli"


class Pool:
    def __init__(self, client: redis.Redis, url: str) -> None:
        self.client, self.url = client, url
        self.modes = two_modes(2)
        self.hosts = {
            f"n{i}": HostState(host=f"n{i}", mode="day", goal="day", since_ms=self.now()) for i in (1, 2)
        }

    @staticmethod
    def now() -> float:
        return time.time() * 1000.0

    def publish(self, **changes: Any) -> None:
        given = policy(slurm=SlurmPolicy(enabled=True), modes=self.modes)
        self.client.set(f"hs:{{{POOL}}}:policy:current", msgspec.json.encode(given))
        jobs = (HostJob(job=11, kind=JobKind.REPLICA, model="m"), HostJob(job=12))
        seen = Seen(at_ms=self.now(), hosts=(HostSeen(host="n1", mode="day", accepts=True, jobs=jobs),))
        state = SwitchState(hosts=self.hosts)
        given_status: dict[str, Any] = {"at_ms": self.now(), "seen": seen, "scheduled": "", "since_ms": 0.0}
        status = ModeStatus(state=state, **({"proposal": None} | given_status | changes))
        self.client.set(f"hs:{{{POOL}}}:mode-status", msgspec.json.encode(status))

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(cli, ["mode", *words, "--redis", self.url, "--pool", POOL])

    def data(self, *words: str) -> Any:
        result = self.run(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def orders(self) -> list[Order]:
        raw = self.client.hgetall(f"hs:{{{POOL}}}:mode-orders")
        return [msgspec.json.decode(value, type=Order) for value in raw.values()]  # type: ignore[union-attr]


@pytest.fixture
def pool(valkey: redis.Redis, valkey_url: str) -> Pool:
    made = Pool(valkey, valkey_url)
    made.publish()
    return made


def test_a_plan_says_what_changes_how_long_and_which_jobs_leave(pool: Pool) -> None:
    spans = Durations().with_span("drain day", 4000.0).with_span("load night", 6000.0)
    pool.client.set(f"hs:{{{POOL}}}:mode-durations", msgspec.json.encode(spans))
    data = pool.data("plan", "--to", "night")
    first, second = data["hosts"]
    assert (first["from"], first["to"], first["wave"], second["wave"]) == ("day", "night", 1, 2)
    assert (first["node_from"], first["node_to"]) == ("n1", "night-n1")
    assert (first["layout_from"], first["layout_to"]) == ("slices", "whole")
    assert [job["job"] for job in first["jobs"]] == [11, 12]
    assert first["expected_ms"]["drain_ms"] == 4000.0
    assert data["took_ms"] == first["total_ms"] + second["total_ms"]
    text = pool.run("plan", "--to", "night").output
    assert "11 (replica), 12 (other)" in text
    assert "n1 > night-n1" in text
    assert "2 hosts, at most 1 at once" in text


def test_switch_does_what_plan_showed(pool: Pool) -> None:
    planned = pool.data("plan", "--to", "night", "--node", "n2")
    dry = pool.data("switch", "--to", "night", "--node", "n2", "--dry-run")
    assert pool.orders() == []
    done = pool.data("switch", "--to", "night", "--node", "n2", "--yes")
    assert dry == planned | {"ordered": False}
    assert done == planned | {"ordered": True}
    (order,) = pool.orders()
    assert (order.mode, order.hosts, order.until_ms) == ("night", ("n2",), None)
    # The worker follows exactly these targets.
    from zoneinfo import ZoneInfo

    state = SwitchState(hosts=pool.hosts)
    targets = decide(pool.modes, ZoneInfo("UTC"), pool.now(), state, Durations(), orders=[order]).targets
    assert {h: t.mode for h, t in targets.items()} == {
        row["host"]: row["to"] for row in planned["hosts"] if row["changes"]
    }


def test_a_later_order_for_the_same_hosts_takes_the_place_of_the_earlier(pool: Pool) -> None:
    pool.run("switch", "--to", "night", "--node", "n2", "--yes")
    pool.run("switch", "--to", "night", "--yes", "--for", "2h")
    (order,) = pool.orders()
    assert order.hosts == ()
    assert order.until_ms is not None
    assert abs(order.until_ms - pool.now() - 7_200_000) < 60_000
    assert "1 order withdrawn" in pool.run("switch", "--to", "calendar", "--yes").output
    assert pool.orders() == []


def test_status_names_the_step_and_what_is_waited_for(pool: Pool) -> None:
    pool.hosts["n1"] = msgspec.structs.replace(
        pool.hosts["n1"], goal="night", step=Step.DRAINING, wait="the floor: 1 of 2 replicas of m would serve"
    )
    pool.hosts["n2"] = msgspec.structs.replace(pool.hosts["n2"], step=Step.HELD, why="cut failed: no room")
    pool.publish(troubles={"calendar": "mode night will be 40 s late: n1 not there yet"})
    text = pool.run("status").output
    assert "day to night" in text
    assert "draining" in text
    assert "the floor: 1 of 2" in text
    assert "cut failed: no room" in text
    assert "40 s late" in text
    assert [h["step"] for h in pool.data("status")["hosts"]] == ["draining", "held"]


def test_status_says_what_comes_next_and_what_helps(pool: Pool) -> None:
    """A host that fails showed the error alone: neither until when it is tried nor what to do then."""
    old = msgspec.structs.replace
    now = pool.now()
    pool.modes = old(pool.modes, drain_ms=600_000.0, attempts=3)
    pool.hosts["n1"] = old(
        pool.hosts["n1"], goal="night", step=Step.DRAINING, since_ms=now - 540_000.0, wait="job 7 to leave"
    )
    pool.hosts["n2"] = old(pool.hosts["n2"], step=Step.HELD, why="no room", mode="night")
    pool.publish()
    text = pool.run("status").output
    assert "waits for, or why" in text
    assert "job 7 to leave; requeued in " in text
    assert "none, was night" in text
    assert "no room; `hybridsched mode switch --to MODE --node n2` brings it back" in text
    wait = "tried again later: no room"
    blocked = old(pool.hosts["n1"], goal="day", step=Step.SERVING, failures=1, why="no room", wait=wait)
    pool.hosts["n1"] = old(blocked, blocked_ms=now + 3_600_000.0)
    pool.hosts["n2"] = old(
        pool.hosts["n2"], step=Step.SERVING, mode="day", why="it did not become empty: job 2"
    )
    pool.publish()
    text = pool.run("status").output
    assert re.search(r"try 2 of 3 in (59 min|1 h).*: no room", text)
    assert "its last change went back: it did not become empty: job 2" in text
    assert pool.data("status")["hosts"][1]["says"].startswith("its last change went back")


def test_times_name_their_offset(pool: Pool) -> None:
    """On the night on which the clocks are set back an hour comes twice."""
    pool.modes = msgspec.structs.replace(pool.modes, time_zone="Europe/Berlin")
    for due_s, name, offset in ((1792888200, "CEST", "+0200"), (1792891800, "CET", "+0100")):
        due_ms = due_s * 1000.0
        one = Proposal(
            id="night@7", mode="night", due_ms=due_ms, begin_ms=due_ms, ready_ms=due_ms, hosts=("n1",)
        )
        pool.publish(proposal=one)
        assert f"2026-10-25 02:30:00 {name}" in pool.run("status").output
        assert pool.data("status")["proposal"]["due"] == f"2026-10-25T02:30:00{offset}"


def test_an_approval_that_no_host_would_follow_is_refused(pool: Pool) -> None:
    """A host that is held follows orders only; `approved` was said and nothing came of it."""
    pool.hosts["n1"] = msgspec.structs.replace(pool.hosts["n1"], step=Step.HELD, why="no room")
    at_ms = pool.now() - 1000.0
    one = Proposal(
        id="night@7",
        mode="night",
        due_ms=at_ms,
        begin_ms=at_ms,
        ready_ms=at_ms,
        hosts=("n1",),
        approved=False,
    )
    pool.publish(proposal=one)
    result = pool.run("approve")
    assert result.exit_code == 1
    assert "`hybridsched mode switch --to night --node n1`" in result.output
    text = pool.run("status").output
    assert "taken along by an order only: n1" in text
    assert "mode approve" not in text
    pool.publish(proposal=msgspec.structs.replace(one, hosts=("n1", "n2")))
    text = pool.run("status").output
    assert "should have begun" in text
    assert "Not approved: `hybridsched mode approve night@7`" in text
    assert pool.data("approve") == {"approved": "night@7"}


def test_a_plan_of_the_calendar_says_which_change_it_is_of(pool: Pool) -> None:
    """`switch --to calendar` said that no host changes, and nothing of the approval that it waits for."""
    windows = (Window(start="00:00", end="00:00"),)
    night = msgspec.structs.replace(pool.modes.mode[1], windows=windows)
    pool.modes = msgspec.structs.replace(
        pool.modes, mode=(pool.modes.mode[0], night), autonomy=Autonomy.APPROVE
    )
    pool.publish()
    text = pool.run("plan").output
    assert text.startswith("To night (night@")
    assert "n1, n2: " in text
    assert "Not approved: `hybridsched mode approve night@" in text
    pool.run("switch", "--to", "day", "--yes")
    withdrawn = pool.run("switch", "--to", "calendar", "--yes").output
    assert "Not approved: `hybridsched mode approve night@" in withdrawn
    assert pool.data("plan")["proposal"]["approved"] is False


def test_list_shows_modes_with_what_stands_on_them(pool: Pool) -> None:
    data = pool.data("list")
    assert [mode["name"] for mode in data["modes"]] == ["day", "night"]
    assert "1 x tiny on gpu:a100:1, floor 1" in pool.run("list").output


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("plan", "--to", "nihgt"), 2, "there are day, night, and calendar"),
        (("switch", "--to", "night", "--node", "n9", "--yes"), 2, "no host of the policy: n1, n2"),
        (("switch", "--yes"), 2, "--to"),
        (("approve",), 1, "no change ahead"),
        (("approve", "night@1"), 1, "is not the change that is ahead"),
    ],
)
def test_wrong_usage_says_what_there_is(pool: Pool, words: tuple[str, ...], status: int, says: str) -> None:
    result = pool.run(*words)
    assert result.exit_code == status
    assert says in result.output


def test_without_a_policy_worker_or_modes_it_says_so(pool: Pool) -> None:
    pool.client.delete(f"hs:{{{POOL}}}:mode-status")
    result = pool.run("status")
    assert result.exit_code == 1
    assert "start one with" in result.output
    pool.client.delete(f"hs:{{{POOL}}}:policy:current")
    result = pool.run("plan", "--to", "night")
    assert "no policy" in result.output


def test_without_modes_it_is_said_who_stands_in_the_middle_of_a_change(pool: Pool) -> None:
    given = policy(slurm=SlurmPolicy(enabled=True))
    pool.client.set(f"hs:{{{POOL}}}:policy:current", msgspec.json.encode(given))
    cutting = msgspec.structs.replace(pool.hosts["n1"], goal="night", step=Step.CUTTING)
    state = SwitchState(hosts={**pool.hosts, "n1": cutting})
    pool.client.set(f"hs:{{{POOL}}}:mode-journal", msgspec.json.encode(state))
    result = pool.run("status")
    assert result.exit_code == 1
    assert "without a section [modes]" in result.output
    assert "In the middle of a change, and carried on when it has: n1 (cutting)" in result.output


def test_what_others_put_into_redis_is_passed_over(pool: Pool) -> None:
    order = Order(id="o", mode="night", hosts=("n1",), by="me", until_ms=1e300)
    pool.client.hset(f"hs:{{{POOL}}}:mode-orders", "o", msgspec.json.encode(order))
    pool.client.set(f"hs:{{{POOL}}}:mode-approvals", "no hash")
    pool.client.lpush(f"hs:{{{POOL}}}:mode-durations", "no string")
    result = pool.run("status")
    assert result.exit_code == 0, result.output
    assert "until no date (1e+300 ms)" in result.output
    pool.client.delete(f"hs:{{{POOL}}}:mode-orders")
    pool.client.set(f"hs:{{{POOL}}}:mode-orders", "no hash")
    assert pool.run("plan", "--to", "night").exit_code == 0
    pool.client.set(f"hs:{{{POOL}}}:mode-status", b'{"x":' + b"[" * 200_000)
    result = pool.run("status")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "no policy worker" in result.output


def test_what_is_old_is_not_shown_as_if_it_were_now(pool: Pool) -> None:
    assert "old" not in pool.run("status").output
    assert pool.data("status")["reachable"] is True
    seen = Seen(at_ms=pool.now(), reachable=False)
    pool.publish(at_ms=pool.now() - 45_000.0, seen=seen)
    text = pool.run("status").output
    assert "This is 45" in text
    assert "Slurm could not be read" in text
    assert pool.data("status")["reachable"] is False


def test_nothing_is_ordered_or_approved_that_nobody_would_follow(pool: Pool) -> None:
    at_ms = pool.now() + 3_600_000.0
    one = Proposal(id="night@7", mode="night", due_ms=at_ms, begin_ms=at_ms, ready_ms=at_ms, hosts=("n1",))
    waits = msgspec.structs.replace(one, approved=False)
    pool.modes = msgspec.structs.replace(pool.modes, autonomy=Autonomy.SUGGEST)
    pool.publish(proposal=waits)
    result = pool.run("approve")
    assert result.exit_code == 1
    assert "approvals are not followed" in result.output
    assert "Only suggested: `hybridsched mode switch --to night` orders it" in pool.run("status").output
    pool.modes = msgspec.structs.replace(pool.modes, enabled=False)
    pool.publish()
    result = pool.run("switch", "--to", "night", "--yes")
    assert result.exit_code == 1
    assert "modes.enabled is false" in result.output
    assert pool.orders() == []
    assert pool.run("switch", "--to", "night", "--dry-run").exit_code == 0
    assert "no host begins to change" in pool.run("status").output


def test_the_change_after_the_current_one_is_approved_before_its_time(pool: Pool) -> None:
    at_ms = pool.now()
    now = Proposal(id="night@1", mode="night", due_ms=at_ms, begin_ms=at_ms, ready_ms=at_ms, hosts=("n1",))
    then = msgspec.structs.replace(now, id="day@2", mode="day", approved=False)
    pool.modes = msgspec.structs.replace(pool.modes, autonomy=Autonomy.APPROVE)
    pool.publish(proposal=now, ahead=then)
    assert pool.data("status")["ahead"]["id"] == "day@2"
    assert "Not approved: `hybridsched mode approve day@2`" in pool.run("status").output
    assert pool.data("approve") == {"approved": "day@2"}
    assert pool.client.hkeys(f"hs:{{{POOL}}}:mode-approvals") == [b"day@2"]


def test_a_plan_of_the_calendar_shows_the_hosts_that_were_asked_for(pool: Pool) -> None:
    assert [row["host"] for row in pool.data("plan", "--node", "n2")["hosts"]] == ["n2"]


def test_an_order_for_all_hosts_is_not_withdrawn_for_one_and_that_is_said(pool: Pool) -> None:
    pool.run("switch", "--to", "night", "--yes")
    (order,) = pool.orders()
    output = pool.run("switch", "--to", "calendar", "--node", "n1", "--yes").output
    assert f"0 orders withdrawn; {order.id} for all hosts stands" in output
    assert pool.orders() == [order]
