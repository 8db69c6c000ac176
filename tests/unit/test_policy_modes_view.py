"""What one look at Slurm says of a host: its mode, whether it takes jobs, and which jobs are on it."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.cluster.values import Gres, Job, Node
from hybridsched.core.modes import HostGroup, Mode, ModeEngine, ModesPolicy
from hybridsched.core.policy import SlurmPolicy
from hybridsched.core.replica_values import ReplicaTag
from hybridsched.core.switch_values import HostSeen, HostState, JobKind, Seen, Step, SwitchState
from hybridsched.store.telemetry import EngineRecord, ReplicaRecord, Telemetry
from hybridsched.workers.policy_modes_view import hosts_seen, lacks

SLICES = (Gres(name="gpu", type="1g.10gb", count=4),)
WHOLE = (Gres(name="gpu", type="a100", count=2),)
MODES = ModesPolicy(
    hosts=(HostGroup(names="n1"),),
    mode=(
        Mode(name="day", engines=(ModeEngine(model="m", gres="gpu:1g.10gb:1", per_host=4),)),
        Mode(name="night", node="night-{host}", engines=(ModeEngine(model="m", gres="gpu:a100:2"),)),
    ),
)
ONE_RECORD = msgspec.structs.replace(
    MODES, mode=tuple(msgspec.structs.replace(mode, node="{host}") for mode in MODES.mode)
)


def node(name: str, *states: str, gres: tuple[Gres, ...] = SLICES, reason: str = "") -> Node:
    return Node(name=name, states=states, gres=gres, reason=reason)


def look(
    *nodes: Node,
    jobs: tuple[Job, ...] = (),
    modes: ModesPolicy = MODES,
    known: HostState | None = None,
    telemetry: Telemetry | None = None,
) -> Seen:
    state = SwitchState(hosts={} if known is None else {"n1": known})
    return hosts_seen(modes, state, jobs, nodes, telemetry, SlurmPolicy(), at_ms=1.0, pool="p", user="root")


def host(*nodes: Node, **given: object) -> HostSeen:
    (found,) = look(*nodes, **given).hosts  # type: ignore[arg-type]
    return found


def test_the_mode_is_that_of_the_record_in_service() -> None:
    night = node("night-n1", "DOWN", "NOT_RESPONDING", gres=WHOLE, reason="by day")
    seen = host(node("n1", "IDLE"), night)
    assert (seen.mode, seen.accepts, seen.invalid, seen.reason) == ("day", True, False, "")
    drained = host(node("n1", "IDLE", "DRAIN", reason="why"), night)
    assert (drained.mode, drained.accepts, drained.reason) == ("day", False, "why")
    assert host(node("n1", "DOWN"), night).mode is None
    assert host(night).mode is None


def test_a_record_that_was_left_and_registered_once_more_is_not_taken_for_the_one_in_service() -> None:
    """Its slurmd was ending while it was set down; Slurm shows it as idle until it misses it."""
    late = node("night-n1", "IDLE", "DRAIN", gres=WHOLE, reason="hybridsched: mode x")
    rests = HostState(host="n1", mode="day", goal="day")
    seen = host(node("n1", "IDLE"), late, known=rests)
    assert (seen.mode, seen.accepts) == ("day", True)
    goes = HostState(host="n1", mode="day", goal="night", step=Step.VERIFYING)
    assert host(node("n1", "IDLE", "DRAIN"), late, known=goes).mode == "night"
    # Back so soon that Slurm has not missed it: the record that jobs come to is the one to be drained.
    begins = HostState(host="n1", mode="day", goal="night", step=Step.DRAINING)
    seen = host(node("n1", "IDLE"), late, known=begins)
    assert (seen.mode, seen.accepts) == ("day", True)
    failed = HostState(host="n1", mode="night", goal="night", step=Step.DRAINING, back=True, left=True)
    assert host(node("n1", "IDLE"), late, known=failed).accepts
    # Of a host that nobody remembers it is not known.
    assert host(node("n1", "IDLE"), late).mode is None
    # One that is silent for a moment is still the one.
    assert host(node("n1", "IDLE", "NOT_RESPONDING")).mode == "day"


@pytest.mark.parametrize(("gres", "mode"), [(SLICES, "day"), (WHOLE, "night")])
def test_of_one_record_for_all_modes_its_gres_tell_the_mode(gres: tuple[Gres, ...], mode: str) -> None:
    assert host(node("n1", "MIXED", gres=gres), modes=ONE_RECORD).mode == mode


def test_where_nothing_tells_them_apart_what_is_remembered_does() -> None:
    alike = msgspec.structs.replace(
        ONE_RECORD, mode=tuple(msgspec.structs.replace(mode, engines=()) for mode in ONE_RECORD.mode)
    )
    known = HostState(host="n1", mode="night", goal="night")
    assert host(node("n1", "IDLE"), modes=alike, known=known).mode == "night"
    assert host(node("n1", "IDLE"), modes=alike).mode == "day"


def test_jobs_by_kind_with_what_serves() -> None:
    tag = ReplicaTag(pool="p", token="t", spec="s", group="day.m")
    jobs = (
        Job(id=1, user="root", partition="online", state="RUNNING", nodes=("n1",), comment=tag.text()),
        Job(id=2, user="eve", partition="online", state="RUNNING", nodes=("n1",), comment=tag.text()),
        Job(
            id=3,
            partition="offline",
            state="RUNNING",
            flags=("COMPLETING",),
            nodes=("n1",),
            gres=(Gres(name="hsfill"),),
        ),
        Job(id=4, partition="other", state="PENDING", nodes=()),
        Job(id=5, user="root", partition="online", state="RUNNING", nodes=("n7",)),
        Job(id=6, user="eve", partition="online", state="STOPPED", nodes=("n1",)),
    )
    healthy = EngineRecord(healthy=1.0, health_age_ms=0.0)
    replicas = {
        f"r{job}": ReplicaRecord(
            replica=f"r{job}", model="m", lane="", job=str(job), engine=healthy, at_ms=0.0
        )
        for job in (1, 5)
    }
    telemetry = Telemetry(now_ms=0.0, replicas=replicas, lanes={})
    seen = look(node("n1", "MIXED"), jobs=jobs, telemetry=telemetry)
    found = {job.job: (job.kind, job.model, job.serving) for job in seen.hosts[0].jobs}
    assert found == {
        1: (JobKind.REPLICA, "m", True),
        2: (JobKind.OTHER, "", False),
        3: (JobKind.OFFLINE, "", False),
        6: (JobKind.OTHER, "", False),
    }
    assert seen.elsewhere == {"m": 1}


def test_a_node_that_lacks_what_engines_ask_for_is_named() -> None:
    day, night = MODES.mode
    assert lacks(day, node("n1", "IDLE")) == ""
    said = lacks(night, node("n1", "IDLE"))
    assert said == "node n1 has 0 of gpu:a100, and mode night needs 2"


def test_of_records_that_are_out_of_service_our_own_reason_is_said() -> None:
    down = node("n1", "DOWN", "NOT_RESPONDING", reason="Not responding")
    ours = node("night-n1", "DOWN", "DRAIN", gres=WHOLE, reason="hybridsched: mode night to day")
    assert host(down, ours).reason == "hybridsched: mode night to day"
    assert host(down).reason == "Not responding"
    assert host(node("n1", "IDLE", "DRAIN", reason="fan"), ours).reason == "fan"
