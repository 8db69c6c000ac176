"""One row that cannot be read spoils itself only, whatever stands in whichever of its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridsched.cluster import parse_json, parse_text
from hybridsched.cluster.parse_words import read_gres
from hybridsched.cluster.pyslurm_calls import Calls
from hybridsched.cluster.rows import Rows
from hybridsched.cluster.values import ClusterError, Gres

DATA = Path(__file__).resolve().parents[1] / "data" / "slurm"

GRES = [
    "gres:",
    "gres:none",
    "gpu:a100:+0",
    "gpu:a100:+1",
    "gpu:a100:-0",
    "gpu:a:b:c",
    "no_consume",
    ":",
    ":4",
]
"""What users got into their jobs on real clusters, and what they might yet."""

WORDS = [
    *GRES,
    "²",
    "٠",
    "9" * 5_000,
    "-1",
    "1e400",
    "\f",
    "\u2028",
    "x=y",
    "((",
    "]",
    "(IDX:",
    "1-²",
    "+",
    "*",
]
"""Words that are hard to read as a number, a span, a state, a list."""

SHAPES: list[Any] = [None, True, -1, 2**40, 1.5, [], ["x", 1], {}, {"number": "x"}, {"set": True}, *WORDS]

LINE = st.text(st.characters(blacklist_characters="\n\r|", blacklist_categories=["Cs"]))
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | LINE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LINE, inner, max_size=3),
    max_leaves=4,
)


def document(version: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / version / name).read_text())
    return found


JOBS = {version: document(version, "squeue.json")["jobs"] for version in ("22.05", "24.11", "26.05")}
NODES = {"22.05": document("22.05", "sinfo_flags.json"), "24.11": document("24.11", "scontrol_node.json")}
READ = ("tres_per_node", "job_state", "name", "comment", "partition", "time_limit", "array_job_id", "nodes")


def among_others(records: list[Any], bad: Any) -> bytes:
    return json.dumps({"jobs": [*records[:1], bad, *records[1:]], "nodes": records}).encode()


def the_others_are_served(version: str, bad: Any) -> None:
    records = JOBS[version]
    alone = parse_json.parse_jobs(json.dumps({"jobs": records}).encode())
    found = parse_json.parse_jobs(among_others(records, bad))
    assert found[:1] == alone[:1]
    assert found[len(found) - len(alone) + 1 :] == alone[1:]


@pytest.mark.parametrize("version", JOBS)
@pytest.mark.parametrize("field", READ)
def test_a_hostile_field_of_one_job(version: str, field: str) -> None:
    for value in SHAPES:
        the_others_are_served(version, {**JOBS[version][0], field: value})


@settings(max_examples=60)
@given(st.sampled_from(sorted(JOBS)), st.sampled_from(sorted(JOBS["26.05"][0])), ANY)
def test_any_field_of_one_job(version: str, field: str, value: Any) -> None:
    the_others_are_served(version, {**JOBS[version][0], field: value})
    the_others_are_served(version, value)


@settings(max_examples=60)
@given(st.sampled_from(sorted(NODES)), st.sampled_from(["name", "state", "gres", "gres_used", "reason"]), ANY)
def test_any_field_of_one_node(version: str, field: str, value: Any) -> None:
    records = NODES[version]["nodes"]
    alone = parse_json.parse_nodes(json.dumps({"nodes": records}).encode())
    bad = {**records[0], field: value}
    found = parse_json.parse_nodes(json.dumps({"nodes": [*records, bad]}).encode())
    assert found[: len(alone)] == alone


@settings(max_examples=60)
@given(st.integers(0, 13), LINE | st.sampled_from([w for w in WORDS if "|" not in w]))
def test_any_field_of_one_job_as_text(at: int, value: str) -> None:
    text = (DATA / "22.05" / "squeue_marked.txt").read_text()
    alone = parse_text.parse_jobs(text, "MARK")
    fields = text.split("MARK")[1].split("|")[1:15]
    fields[at] = value.replace("MARK", "")
    found = parse_text.parse_jobs(text + "MARK|" + "|".join(fields) + "|MARKcMARKnMARK\n", "MARK")
    assert found[: len(alone)] == alone


@pytest.mark.parametrize("at", range(14))
def test_hostile_words_of_one_job_as_text(at: int) -> None:
    text = (DATA / "22.05" / "squeue_marked.txt").read_text()
    alone = parse_text.parse_jobs(text, "MARK")
    fields = text.split("MARK")[1].split("|")[1:15]
    for value in [*WORDS, "a|b", "|"]:
        fields[at] = value
        found = parse_text.parse_jobs(text + "MARK|" + "|".join(fields) + "|MARKcMARKnMARK\n", "MARK")
        assert found[: len(alone)] == alone


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("scontrol_node.txt", parse_text.parse_nodes),
        ("scontrol_partition.txt", parse_text.parse_partitions),
        ("scontrol_reservation.txt", parse_text.parse_reservations),
    ],
)
def test_hostile_words_of_nodes_partitions_and_reservations(name: str, read: Any) -> None:
    text = (DATA / "26.05" / name).read_text()
    alone = list(read(text))
    line = next(line for line in text.split("\n") if line.strip())
    keys = [word.partition("=")[0] for word in line.split(" ") if "=" in word]
    for at in range(len(keys)):
        for value in WORDS:
            words = [f"{k}={value if i == at else 'x'}" for i, k in enumerate(keys)]
            for bad in (" ".join(words), line.replace(f" {keys[at]}=", f" {keys[at]}={value}")):
                assert list(read(text + bad + "\n"))[: len(alone)] == alone
    assert list(read(text + words[0] + "\n"))[: len(alone)] == alone


def test_the_job_of_unreadable_gres_still_counts_and_is_said_once() -> None:
    """Skipped, it would be no running job: its node would seem to be free."""
    rows = Rows()
    bad = {**JOBS["22.05"][0], "tres_per_node": "gres:gpu:a100:1,gres:a:b:c:d"}
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            ((job, _),) = parse_json.parse_jobs(json.dumps({"jobs": [bad]}).encode(), rows)
    assert job.gres == (Gres(name="gpu", type="a100"),)
    assert [(line["event_key"], str(job.id) in line["event"]) for line in logs] == [("cluster.bad_row", True)]
    assert rows.spoiled == 0


@pytest.mark.parametrize(
    ("said", "count"), [("gpu:a100:+1", 1), ("gpu:a100:+0", 0), ("gpu:a100:-0", 0), ("gpu:a100:+2K", 2048)]
)
def test_a_sign_before_a_count_is_slurm_s_number(said: str, count: int) -> None:
    assert read_gres(said) == ((Gres(name="gpu", type="a100", count=count),), ())


@given(LINE)
def test_no_gres_list_raises(text: str) -> None:
    read_gres(text)


def test_a_node_whose_gres_cannot_be_repeated_is_passed_over() -> None:
    """`set_gres_count` would take the entry from the node."""
    rows = Rows()
    line = "NodeName=n9 Gres=gpu:a100:4,a:b:c:d State=IDLE\nNodeName=n1 Gres=gpu:a100:4 State=IDLE\n"
    assert [node.name for node in parse_text.parse_nodes(line, rows)] == ["n1"]
    assert rows.spoiled == 1


def test_a_form_feed_divides_no_record() -> None:
    line = "NodeName=n1 Gres=gpu:4 State=IDLE Reason=x\fNodeName=n2 State=IDLE\u2028NodeName=n3 State=IDLE\n"
    assert [node.name for node in parse_text.parse_nodes(line)] == ["n1"]


class _Bad:
    """A record of pyslurm whose parts raise what a text that it did not foresee gives."""

    id = 7
    name = "bad"
    state = "PENDING"

    @property
    def gres_per_node(self) -> dict[str, int]:
        return {"gpu": ["gres:"][1]}  # type: ignore[dict-item]

    def __getattr__(self, name: str) -> Any:
        return None


class _Worse(_Bad):
    state = ""


class _Module:
    class Jobs:
        @staticmethod
        def load() -> dict[int, Any]:
            return {7: _Bad(), 8: _Worse()}


def test_pyslurm_jobs_one_by_one() -> None:
    ((job, _),) = Calls(_Module).jobs()
    assert (job.id, job.gres) == (7, ())


def test_a_document_that_is_none_is_still_an_error() -> None:
    for raw in (b'{"jobs": [1, 2]}', b'{"jobs": [{"id": 1}]}', b'{"jobs": 3}', b'{"jobs": {"jobs": [1]}}'):
        with pytest.raises(ClusterError):
            parse_json.parse_jobs(raw)
