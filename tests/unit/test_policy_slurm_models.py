"""Which model a job needs, and from which nodes it is kept."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridsched.cluster.values import Gres, Job
from hybridsched.store.job_models import commented_model, job_comment
from hybridsched.workers.policy_slurm_models import LONGEST, job_models, keep_away

REAL = ("n1", "n2", "n3")
NODES = {*REAL, "hspark"}
JOB = Job(
    id=5,
    partition="offline",
    state="PENDING",
    restarts=0,
    gres=(Gres(name="hsfill"),),
    comment="hybridsched b1 model=big",
)


def follow(job: Job, wrong: set[str], nodes: set[str] = NODES) -> Job:
    """The job when Slurm has done what is wanted; nothing more is wanted then."""
    change = keep_away(job, wrong, nodes)
    assert change is not None
    after = msgspec.structs.replace(job, excluded=change.excluded, comment=change.comment)
    assert keep_away(after, wrong, nodes) is None, "it is set once"
    return after


@pytest.mark.parametrize("model", ["big", "org/Big-7B:v2.1", "a model = of [mine], ü", "model=x"])
def test_a_comment_gives_back_its_model(model: str) -> None:
    for batch in ("b1", None):
        said = job_comment(batch, model)
        assert said is not None
        assert commented_model(said) == model
        assert commented_model(f"{said} [hybridsched keeps it from n1,n2]") == model
    assert commented_model(job_comment("b1", None) or "") is None
    assert commented_model("my model=big") is None
    assert job_comment(None, None) is None


def test_what_the_job_said_counts_once_it_has_run() -> None:
    """After a loss of Slurm's state numbers come again: a job that never ran has said nothing."""
    assert job_models([JOB], {"5": "old"}) == {5: "big"}
    again = msgspec.structs.replace(JOB, restarts=1)
    assert job_models([again], {"5": "new"}) == {5: "new"}
    running = msgspec.structs.replace(JOB, state="RUNNING", comment="")
    assert job_models([running], {"5": "new"}) == {5: "new"}
    task = msgspec.structs.replace(running, id=9, array_job=7, array_task=2)
    assert job_models([task], {"7_2": "new"}) == {9: "new"}
    assert job_models([running], {}) == {}


def test_it_is_kept_from_nodes_and_let_back() -> None:
    kept = follow(JOB, {"n1", "n3"})
    assert kept.excluded == ("n1", "n3")
    fewer = follow(kept, {"n1"})
    assert fewer.excluded == ("n1",)
    free = follow(fewer, set())
    assert (free.excluded, free.comment) == ((), JOB.comment)


def test_what_the_user_excluded_stays() -> None:
    theirs = msgspec.structs.replace(JOB, excluded=("n3",), comment="mine, not yours")
    kept = follow(theirs, {"n1", "n3"})
    assert set(kept.excluded) == {"n1", "n3"}
    free = follow(kept, set())
    assert (free.excluded, free.comment) == (("n3",), "mine, not yours")
    changed = msgspec.structs.replace(kept, excluded=("n2",))  # by the user, while ours were there
    assert keep_away(changed, set(), NODES) is None
    assert set(follow(changed, {"n1"}).excluded) == {"n1", "n2"}


def test_a_node_that_the_user_asked_for_is_never_excluded() -> None:
    """Slurm would hold the job for good."""
    asked = msgspec.structs.replace(JOB, required=("n1",))
    assert keep_away(asked, {"n1"}, NODES) is None
    assert follow(asked, {"n1", "n2"}).excluded == ("n2",)


def test_one_node_is_always_left() -> None:
    assert follow(JOB, set(REAL)).excluded == REAL, "the parked one"
    assert keep_away(JOB, set(REAL), set(REAL)) is None
    theirs = msgspec.structs.replace(JOB, excluded=("hspark",))
    assert keep_away(theirs, set(REAL), NODES) is None


def test_a_comment_that_would_be_too_long_keeps_nobody_away() -> None:
    many = {f"node-{n:05}" for n in range(0, LONGEST // 4, 2)}
    assert keep_away(JOB, many, many | NODES) is None
    assert keep_away(JOB, {"a" * LONGEST}, {"a" * LONGEST, *NODES}) is None


NAMES = st.sets(st.from_regex(r"[a-z]{1,2}(-|1-)?[0-9]{0,3}", fullmatch=True), min_size=1, max_size=30)


@given(NAMES)
def test_names_that_were_folded_come_back(names: set[str]) -> None:
    kept = follow(JOB, names, names | NODES)
    assert set(kept.excluded) == names
    free = follow(kept, set(), names | NODES)
    assert (free.excluded, free.comment) == ((), JOB.comment)


def test_many_nodes_with_numbers_are_few_characters() -> None:
    many = {f"node{n:04}" for n in range(1, 2001)} | {f"n{n}" for n in range(8, 12)}
    kept = follow(JOB, many, many | NODES)
    assert kept.comment == f"{JOB.comment} [hybridsched keeps it from n8:11,node0001:2000]"
    forged = msgspec.structs.replace(JOB, comment="[hybridsched keeps it from n1:999999999]")
    assert keep_away(forged, set(), NODES) is None
