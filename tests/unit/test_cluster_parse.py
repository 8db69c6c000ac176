"""Slurm's outputs into values: recordings of 22.05, shapes of later versions, what people type into them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridsched.cluster import parse_json, parse_text
from hybridsched.cluster.parse_words import (
    job_state,
    minutes_ms,
    node_states,
    parse_gres,
    single_host,
    with_count,
)
from hybridsched.cluster.run import refusal
from hybridsched.cluster.values import ClusterError, Gres, Job, Node, total

DATA = Path(__file__).resolve().parents[1] / "data" / "slurm"
A100 = Gres(name="gpu", type="a100", count=4)


def text(name: str) -> str:
    return (DATA / "22.05" / name).read_text()


def jobs(version: str, name: str) -> dict[int, tuple[Job, str]]:
    return {j.id: (j, nodes) for j, nodes in parse_json.parse_jobs((DATA / version / name).read_bytes())}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("gpu:a100:4,hsfill:2", (A100, Gres(name="hsfill", count=2))),
        ("gpu:a100:4(S:0-1),hsfill:2", (A100, Gres(name="hsfill", count=2))),
        ("gpu:(null):4(IDX:0-3)", (Gres(name="gpu", count=4, index="0-3"),)),
        (
            "gpu:a100:2(IDX:0,3),hsfill:0",
            (Gres(name="gpu", type="a100", count=2, index="0,3"), Gres(name="hsfill", count=0)),
        ),
        ("gpu:a100:0(IDX:N/A)", (Gres(name="gpu", type="a100", count=0),)),
        (
            "gpu:a100:1(IDX:0),hsfill(CNT:1)",
            (Gres(name="gpu", type="a100", count=1, index="0"), Gres(name="hsfill")),
        ),
        ("gres:gpu:a100:1,gres:hsfill:1", (Gres(name="gpu", type="a100"), Gres(name="hsfill"))),
        ("gres/gpu:a100:1,gres/hsfill:1", (Gres(name="gpu", type="a100"), Gres(name="hsfill"))),
        (
            "cpu=4,mem=64G,gres/gpu=2,gres/gpu:a100=2",
            (Gres(name="gpu", count=2), Gres(name="gpu", type="a100", count=2)),
        ),
        ("gpu:1g.10gb:7", (Gres(name="gpu", type="1g.10gb", count=7),)),
        ("bandwidth:lustre:no_consume:4G", (Gres(name="bandwidth", type="lustre", count=4 * 1024**3),)),
        ("gpu", (Gres(name="gpu"),)),
        ("gpu:a100", (Gres(name="gpu", type="a100"),)),
        ("(null)", ()),
        ("", ()),
        ("N/A", ()),
    ],
)
def test_gres(said: str, expected: tuple[Gres, ...]) -> None:
    assert parse_gres(said) == expected


@pytest.mark.parametrize("said", ["gpu:a:b:c", ":4", "a:b:c:4"])
def test_gres_that_is_none(said: str) -> None:
    with pytest.raises(ClusterError) as error:
        parse_gres(said)
    assert error.value.code == "unreadable"


def test_the_other_gres_are_repeated_unchanged() -> None:
    gres = parse_gres("gpu:a100:2,hsfill:1,gpu:1g.10gb:7(S:0),shard:8")
    assert with_count(gres, "hsfill", 3) == "gpu:a100:2,gpu:1g.10gb:7,shard:8,hsfill:no_consume:3"
    assert with_count(parse_gres("gpu:4"), "hsfill", 0) == "gpu:4,hsfill:no_consume:0"
    assert (total(gres, "gpu"), total(gres, "gpu", "a100"), total(gres, "nosuch")) == (9, 2, 0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("IDLE+DRAIN", ("IDLE", "DRAIN")),
        ("idle*", ("IDLE", "NOT_RESPONDING")),
        ("DOWN*+DRAIN", ("DOWN", "NOT_RESPONDING", "DRAIN")),
        ("MIXED+PLANNED+CLOUD", ("MIXED", "PLANNED", "CLOUD")),
        ("mix-", ("MIXED", "PLANNED")),
        ("ALLOCATED#", ("ALLOCATED", "POWERING_UP")),
        ("IDLE+NOT_RESPONDING", ("IDLE", "NOT_RESPONDING")),
    ],
)
def test_node_states(said: str, expected: tuple[str, ...]) -> None:
    assert node_states(said) == expected


def test_usable_nodes() -> None:
    for said, usable, shut in [
        ("IDLE", True, False),
        ("MIXED+PLANNED", True, False),
        ("IDLE+DRAIN", False, True),
        ("IDLE*", False, False),
        ("IDLE+INVALID_REG", False, True),
        ("DOWN", False, True),
    ]:
        node = Node(name="n1", states=node_states(said))
        assert (node.usable, node.shut) == (usable, shut), said
    assert not Node(name="n1").usable


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("10:00", 600),
        ("1:00:00", 3_600),
        ("1-02:30:00", 95_400),
        ("365-00:00:00", 31_536_000),
        ("5", 300),
        ("2-12", 216_000),
        ("0:30", 30),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_spans(said: str, seconds: int | None) -> None:
    assert minutes_ms(said) == (None if seconds is None else seconds * 1000.0)


def test_words_of_jobs() -> None:
    assert job_state(["RUNNING"]) == ("RUNNING", ())
    assert job_state(["COMPLETED", "COMPLETING"]) == ("COMPLETED", ("COMPLETING",))
    assert job_state(["COMPLETING"]) == ("COMPLETING", ())
    leaving = Job(id=1, state="COMPLETING")
    assert leaving.leaving
    assert not leaving.running
    assert not leaving.ended
    for flag in ("CONFIGURING", "RESIZING", "SIGNALING"):
        assert Job(id=1, state=flag).running
    # `scancel -s STOP`: 22.05 shows the flag in place of RUNNING.
    assert Job(id=1, state="STOPPED").suspended
    with pytest.raises(ClusterError):
        job_state([])
    assert single_host("n1")
    assert not single_host("n[1-2]")
    assert not single_host("n1,n2")


def test_jobs_of_2205() -> None:
    found = jobs("22.05", "squeue.json")
    first, where = found[1]
    assert (first.name, first.comment) == ("a name with = and spaces", "hs batch=b1 Partition=x State=y")
    assert (first.state, first.partition, first.user, where) == ("RUNNING", "offline", "root", "n1")
    assert first.gres == (Gres(name="gpu", type="a100"), Gres(name="hsfill"))
    assert (first.restarts, first.time_limit_ms, first.start_ms) == (0, 600_000, 1_795_994_475_000)
    array, where = found[2]
    assert (array.array_job, array.array_task, array.array_waiting, where) == (2, None, "1-4%2", "")
    assert array.start_ms is None, "a forecast is no start"
    assert found[3][0].held
    assert found[3][0].time_limit_ms is None
    assert found[5][0].reason == "ReqNodeNotAvail, UnavailableNodes:hspark"
    after = jobs("22.05", "squeue_after.json")
    assert after[1][0].ended
    assert after[1][0].end_ms == 1_795_994_511_000
    assert (after[6][0].array_job, after[6][0].array_task) == (2, 1)
    assert after[8][0].state == "FAILED"
    assert jobs("22.05", "squeue_multi.json")[3][1] == "n[1-2]"


def test_jobs_of_2411() -> None:
    found = {k: v[0] for k, v in jobs("24.11", "squeue.json").items()}
    assert found[1].gres == (Gres(name="gpu", type="a100"), Gres(name="hsfill"))
    assert (found[1].state, found[1].restarts, found[1].time_limit_ms) == ("RUNNING", 2, 600_000)
    assert (found[2].array_job, found[2].array_task, found[2].array_waiting) == (2, None, "1-4%2")
    assert found[3].pending
    assert found[3].flags == ("REQUEUED",)
    assert found[4].held
    assert found[4].time_limit_ms is None
    assert found[5].leaving
    assert not found[5].ended
    assert (found[6].array_job, found[6].array_task) == (2, 0)
    assert found[7].running
    assert found[8].ended
    assert found[1].array_job is None


def test_jobs_of_2605() -> None:
    found = jobs("26.05", "squeue.json")
    again = found[1][0]
    assert (again.state, again.reason, again.restarts) == ("PENDING", "BeginTime", 1)
    assert (again.name, again.comment) == ("a name with = and spaces", "batch=b1 State=x")
    assert again.gres == (Gres(name="hsfill"),)
    assert again.start_ms is None
    assert (again.submit_ms, again.begin_ms) == (1_795_997_641_000, 1_795_997_648_000)
    assert found[3][0].begin_ms is None
    assert (found[2][0].array_job, found[2][0].array_waiting) == (2, "1-3%1")
    assert (found[7][0].array_job, found[7][0].array_task, found[7][1]) == (2, 0, "n1")
    assert found[3][0].held
    assert (found[4][0].gres, found[4][1]) == ((Gres(name="gpu", type="a100", count=2),), "n[1-2]")


def test_2605_reads_the_same_as_text_and_json() -> None:
    as_json = {
        n.name: n for n in parse_json.parse_nodes((DATA / "26.05" / "scontrol_node.json").read_bytes())
    }
    as_text = {n.name: n for n in parse_text.parse_nodes((DATA / "26.05" / "scontrol_node.txt").read_text())}
    assert set(as_json) == set(as_text) == {"hspark", "n1", "n2", "n3", "n4"}
    for name, node in as_text.items():
        other = as_json[name]
        assert (node.gres, node.gres_used, node.partitions) == (other.gres, other.gres_used, other.partitions)
        assert (set(node.states), node.reason, node.host) == (set(other.states), other.reason, other.host)
    assert as_json["n4"].draining
    assert as_json["n4"].reason == "GPU 3 fell off = State=IDLE"
    assert total(as_json["n2"].gres, "hsfill") == 0
    ((night, nodes),) = parse_text.parse_reservations(
        (DATA / "26.05" / "scontrol_reservation.txt").read_text()
    )
    assert (night.users, nodes) == (("root",), "n[1-2]")
    found = {
        p.name: p
        for p, _ in parse_text.parse_partitions((DATA / "26.05" / "scontrol_partition.txt").read_text())
    }
    assert (found["offline"].grace_s, found["offline"].max_time_ms) == (30, 86_400_000)
    assert found["online"].default


def test_nodes_of_2411() -> None:
    nodes = {n.name: n for n in parse_json.parse_nodes((DATA / "24.11" / "scontrol_node.json").read_bytes())}
    assert nodes["n1"].gres == (A100, Gres(name="hsfill"))
    assert nodes["n1"].usable
    assert nodes["n2"].draining
    assert total(nodes["n2"].gres, "hsfill") == 0
    assert not nodes["n3"].usable
    assert nodes["n4"].gres_used[0] == Gres(name="gpu", count=4, index="0-3")
    assert nodes["n4"].shut


def test_nodes_of_2205_read_the_same_as_text_and_json() -> None:
    as_text = {n.name: n for n in parse_text.parse_nodes(text("scontrol_node_flags.txt"))}
    as_json = {n.name: n for n in parse_json.parse_nodes((DATA / "22.05" / "sinfo_flags.json").read_bytes())}
    assert set(as_text) == set(as_json) == {"hspark", "n1", "n2", "n3", "n4"}
    for name, node in as_text.items():
        other = as_json[name]
        assert (node.gres, node.gres_used, node.partitions) == (other.gres, other.gres_used, other.partitions)
        assert (set(node.states), node.reason, node.host) == (set(other.states), other.reason, other.host)
    assert as_text["n1"].states == ("MIXED", "DRAIN")
    assert as_text["n3"].reason == "GPU 3 fell off = State=IDLE, Gres=none"
    assert as_text["hspark"].reason == "hybridsched parked node"


def test_what_an_administrator_typed_changes_no_field() -> None:
    nodes = {n.name: n for n in parse_text.parse_nodes(text("scontrol_node_texts.txt"))}
    assert nodes["n1"].reason == "because of [this] Comment=z"
    assert "DOWN" not in nodes["n1"].states
    assert nodes["n1"].partitions
    newer = "NodeName=n1 State=IDLE Partitions=a,b NewKey=some thing Gres=gpu:4 Comment=Gres=gpu:9 Reason=x"
    (node,) = parse_text.parse_nodes(newer)
    assert (node.partitions, node.gres) == (("a", "b"), (Gres(name="gpu", count=4),))
    with pytest.raises(ClusterError):
        parse_text.parse_nodes("NodeName=n1 Gres=gpu:4")


def test_jobs_as_text_cannot_be_forged() -> None:
    found = {j.id: (j, n) for j, n in parse_text.parse_jobs(text("squeue_marked.txt"), "MARK")}
    assert found[1][0].name == "two\nlines|x"
    assert found[1][0].comment == "c|d State=RUNNING"
    assert found[1][0].held
    assert (found[2][0].array_job, found[2][0].array_waiting, found[2][0].time_limit_ms) == (
        2,
        "0-3%1",
        95_400_000,
    )
    assert found[2][0].excluded == ("n[3-4]",)
    assert found[3][0].running
    assert found[3][1] == "n[1-2]"
    assert (found[3][0].excluded, found[3][0].required) == ((), ())
    assert found[3][0].restarts is None
    for number, (job, _) in jobs("22.05", "squeue_multi.json").items():
        same = found[number][0]
        assert (job.state, job.gres, job.array_job, job.partition) == (
            same.state,
            same.gres,
            same.array_job,
            same.partition,
        )
    assert parse_text.parse_jobs("", "MARK") == []
    for broken in (
        "slurm_load_jobs error\n",
        "MARK|1|1|N/A|pMARKcMARKnMARK",
        "MARK|" + "x|" * 16 + "MARKcMARKnMARK",
    ):
        with pytest.raises(ClusterError):
            parse_text.parse_jobs(broken, "MARK")


def test_partitions_reservations_config_ping_version() -> None:
    found = {p.name: (p, n) for p, n in parse_text.parse_partitions(text("scontrol_partition.txt"))}
    low, nodes = found["offline"]
    assert (low.priority_tier, low.preempt_mode, low.grace_s, low.default, nodes) == (
        1,
        "REQUEUE",
        120,
        True,
        "hspark,n[1-4]",
    )
    assert found["online"][0].max_time_ms is None
    ((night, nodes),) = parse_text.parse_reservations(text("scontrol_reservation.txt"))
    assert (night.name, nodes, night.users, night.active) == ("night", "n[1-2]", ("root",), False)
    assert "DAILY" in night.flags
    assert night.start_ms == 1_795_998_074_000
    assert parse_text.parse_reservations("No reservations in the system\n") == []
    config = parse_text.parse_config(text("scontrol_config.txt"))
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["GresTypes"] == "gpu,hsfill"
    assert config["MULTIPLE_SLURMD"] == "Yes"
    assert parse_text.parse_ping(text("scontrol_ping.txt"))[0]
    assert not parse_text.parse_ping("Slurmctld(primary) at ctl is DOWN\n*****\n")[0]
    assert parse_text.parse_ping("Slurmctld(primary) at a is DOWN\nSlurmctld(backup1) at b is UP\n")[0]
    assert parse_text.parse_version("slurm-wlm 22.05.8") == (22, 5)
    assert parse_text.parse_version("slurm 26.05.5-1") == (26, 5)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"jobs": [1]}',
        b'{"jobs": [{"job_id": null}]}',
        b'{"jobs": [{"job_id": 1}]}',
        b'{"jobs": [{"job_id": 1, "job_state": 3}]}',
        b'{"jobs": [{"job_id": true, "job_state": ["RUNNING"]}]}',
        b'{"jobs": [{"job_id": 1, "job_state": ["RUNNING"], "name": ["x"]}]}',
    ],
)
def test_shapes_never_seen_are_no_guess(raw: bytes) -> None:
    with pytest.raises(ClusterError) as error:
        parse_json.parse_jobs(raw)
    assert (error.value.code, error.value.retryable) == ("unreadable", False)


def test_numbers() -> None:
    assert parse_json.number({"set": True, "infinite": False, "number": 7}) == 7
    assert parse_json.number({"set": False, "infinite": False, "number": 7}) is None
    assert parse_json.number({"set": True, "infinite": True, "number": 7}) is None
    assert parse_json.number(0) == 0
    assert parse_json.number(4294967295) is None
    assert parse_json.number(4294967294) is None
    assert parse_json.number(None) is None


@pytest.mark.parametrize(
    ("words", "code", "retryable"),
    [
        ("slurm_update error: Invalid node name specified", "not_found", False),
        ("Invalid job id specified for job 999", "not_found", False),
        ("Node n9 not found", "not_found", False),
        ("scancel: error: Kill job error on job id 1: Access/permission denied", "denied", False),
        ("slurm_update error: Invalid user id", "denied", False),
        ("Unable to contact slurm controller (connect failure)", "unreachable", True),
        ("Zero Bytes were transmitted or received", "unreachable", True),
        ("scontrol: fatal: Unable to process configuration file", "unreachable", True),
        ("scontrol: unrecognized option '--json'", "missing", False),
        ("Slurm temporarily unable to accept job, sleeping and retrying", "refused", True),
        ("Job is pending execution for job 3", "refused", False),
        ("sbatch: error: Invalid generic resource (gres) specification", "refused", False),
    ],
)
def test_slurm_s_words(words: str, code: str, retryable: bool) -> None:
    error = refusal("do it", words)
    assert (error.code, error.retryable) == (code, retryable)
    assert words in str(error)
