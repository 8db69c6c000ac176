"""The least change between any two states of a GPU, carried out on the rules of MIG in memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridsched.core.mig import (
    MODELS,
    Act,
    Gpu,
    MigRefusalError,
    Piece,
    Want,
    back,
    difference,
    fits,
    plan,
    refusal,
)
from hybridsched.mig.fake import FakeMig, fake_gpu

MODEL = st.sampled_from(["a30", "a100-40gb", "a100-80gb", "h100-80gb", "h200"])


@st.composite
def fitting(draw: st.DrawFn, model: str) -> tuple[Piece, ...]:
    """Pieces that fit on one GPU together, in any number."""
    names = draw(st.lists(st.sampled_from([p.name for p in MODELS[model]]), max_size=7))
    kept: list[Piece] = []
    for name in names:
        if fits(MODELS[model], [*kept, Piece(profile=name)]):
            kept.append(Piece(profile=name))
    return tuple(kept)


@st.composite
def standing(draw: st.DrawFn, model: str, on: bool | None) -> Gpu:
    """A GPU as earlier plans, and failures of theirs, may have left it; with processes on some instances."""
    fresh = fake_gpu(0, model)
    fake = FakeMig([msgspec.structs.replace(fresh, enabled=True, pending=True) if on else fresh])
    for _ in range(draw(st.integers(0, 3))):
        want = draw(want_of(model, on))
        if draw(st.booleans()):
            fake.fail_at(draw(st.integers(0, 8)))
        fake.apply(plan(fake.read(), {0: want}), lambda _: None)
    (gpu,) = fake.read()
    used = draw(st.sets(st.integers(0, 7)))
    instances = tuple(
        msgspec.structs.replace(
            instance,
            compute=tuple(
                msgspec.structs.replace(c, pids=draw(st.sampled_from([(100 + number,), None])))
                for c in instance.compute
            ),
        )
        if number in used
        else instance
        for number, instance in enumerate(gpu.instances)
    )
    return msgspec.structs.replace(gpu, instances=instances)


@st.composite
def want_of(draw: st.DrawFn, model: str, on: bool | None) -> Want:
    enabled = draw(st.booleans()) if on is None else on
    return Want(enabled=enabled, pieces=draw(fitting(model)) if enabled else ())


@st.composite
def cases(draw: st.DrawFn, on: bool | None = None) -> tuple[Gpu, Want]:
    """A GPU and a wish; `on`: in MIG mode before and after."""
    model = draw(MODEL)
    return draw(standing(model, on)), draw(want_of(model, on))


def idle(gpu: Gpu) -> Gpu:
    """The same GPU after its processes have ended."""
    instances = tuple(
        msgspec.structs.replace(i, compute=tuple(msgspec.structs.replace(c, pids=()) for c in i.compute))
        for i in gpu.instances
    )
    return msgspec.structs.replace(gpu, instances=instances, pids=())


@given(cases())
def test_a_plan_carried_out_gives_what_was_wanted_and_touches_nothing_that_stays(
    case: tuple[Gpu, Want],
) -> None:
    before, want = case
    fake = FakeMig([idle(before)])
    made = plan(fake.read(), {0: want})
    assert made.blockers == ()
    outcome = fake.apply(made, lambda _: None)  # each step is judged by the rules there
    assert outcome.ok, outcome.lines()
    (after,) = fake.read()
    assert difference(after, want) is None
    for piece in made.gpus[0].stays:
        (old,) = [i for i in before.instances if (i.profile, i.start) == (piece.profile, piece.start)]
        (new,) = [i for i in after.instances if i.start == piece.start]
        assert (new.id, [c.uuid for c in new.compute]) == (old.id, [c.uuid for c in old.compute])
        assert not [s for s in made.steps if s.start == piece.start and s.act is not Act.CREATE]
    assert plan(fake.read(), {0: want}).steps == (), "and nothing is left to do"


@given(cases(on=True))
def test_as_much_stays_as_could(case: tuple[Gpu, Want]) -> None:
    """Against every choice of instances: none keeps more in use, or as many in use and more in all."""
    before, want = case
    (made,) = plan([before], {0: want}).gpus
    gone = {s.start for s in made.steps if s.act is Act.DESTROY}
    kept = [i for i in before.instances if i.start not in gone]
    best = max(
        (sum(i.used for i in chosen), len(chosen))
        for chosen in subsets(list(before.instances))
        if _allowed(before, want, chosen)
    )
    assert (sum(i.used for i in kept), len(kept)) == best


def subsets(items: list) -> list[list]:  # type: ignore[type-arg]
    return [[item for n, item in enumerate(items) if mask >> n & 1] for mask in range(1 << len(items))]


def _allowed(gpu: Gpu, want: Want, chosen: list) -> bool:  # type: ignore[type-arg]
    """Whether a layout with `chosen` where they are and the rest anywhere is possible."""
    rest = [piece.profile for piece in want.pieces]
    for instance in chosen:
        if instance.profile not in rest:
            return False
        rest.remove(instance.profile)
    pinned = [Piece(profile=i.profile, start=i.start) for i in chosen]
    return refusal(gpu.profiles, [*pinned, *(Piece(profile=name) for name in rest)]) is None


@given(cases())
def test_what_is_in_use_and_must_go_is_said_and_nothing_is_begun(case: tuple[Gpu, Want]) -> None:
    before, want = case
    fake = FakeMig([before])
    made = plan([before], {0: want})
    touched = {s.start for s in made.steps if s.act in (Act.DESTROY, Act.DESTROY_COMPUTE)}
    assert bool(made.blockers) == any(i.used for i in before.instances if i.start in touched)
    outcome = fake.apply(made, lambda _: None)
    if made.blockers:
        assert (outcome.code, outcome.done, fake.read()) == ("in_use", (), (before,))
    else:
        assert outcome.ok, outcome.lines()


@given(cases(), st.integers(0, 12))
def test_a_failure_at_any_step_is_reported_exactly_and_the_way_back_leads_back(
    case: tuple[Gpu, Want], step: int
) -> None:
    before, want = idle(case[0]), case[1]
    fake = FakeMig([before])
    made = plan([before], {0: want})
    assume(step < len(made.steps))
    fake.fail_at(step)
    outcome = fake.apply(made, lambda _: None)
    assert outcome.code == "failed"
    assert (*outcome.done, outcome.failed, *outcome.not_done) == made.steps
    assert len(outcome.done) == step
    assert outcome.after == fake.read()
    assert outcome.differs == (difference(fake.read()[0], want),)
    if outcome.back is not None:
        assert fake.apply(outcome.back, lambda _: None).ok
    (now,) = fake.read()
    whole = [i for i in before.instances if i.whole(before.profile(i.profile).slices)]  # type: ignore[union-attr]
    assert now.enabled == before.enabled
    assert {(i.profile, i.start) for i in whole} <= {(i.profile, i.start) for i in now.instances}
    assert len(now.instances) == len(before.instances)


@given(
    MODEL.flatmap(
        lambda m: st.tuples(st.just(m), st.lists(st.sampled_from([p.name for p in MODELS[m]]), max_size=9))
    )
)
@settings(max_examples=50)
def test_what_does_not_fit_is_refused_and_changes_nothing(case: tuple[str, list[str]]) -> None:
    model, names = case
    pieces = tuple(Piece(profile=name) for name in names)
    gpu = fake_gpu(0, model)
    wants = {0: Want(enabled=True, pieces=pieces)}
    if fits(MODELS[model], pieces):
        assert FakeMig([gpu]).apply(plan([gpu], wants), lambda _: None).ok
        return
    with pytest.raises(MigRefusalError) as caught:
        plan([gpu], wants)
    assert gpu.name in str(caught.value)


@given(cases())
def test_back_from_where_it_stands_is_no_step(case: tuple[Gpu, Want]) -> None:
    before = case[0]
    assume(all(i.whole(before.profile(i.profile).slices) for i in before.instances))  # type: ignore[union-attr]
    assume(before.pending == before.enabled)
    assert back([before], [before]).steps == ()
