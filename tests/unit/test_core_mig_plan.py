"""Choices of the least change that chance seldom meets."""

from __future__ import annotations

import msgspec
import pytest

from hybridsched.core.mig import Act, Gpu, MigRefusalError, Piece, Want, back, plan
from hybridsched.mig.fake import FakeMig, fake_gpu


def standing(*pieces: tuple[str, int], used: tuple[int, ...] = ()) -> Gpu:
    """An A100 with instances at these places; processes run on those at `used`."""
    fake = FakeMig([fake_gpu(0, "a100-80gb")])
    want = Want(enabled=True, pieces=tuple(Piece(profile=name, start=start) for name, start in pieces))
    assert fake.apply(plan(fake.read(), {0: want}), lambda _: None).ok
    gpu = fake.read()[0]
    instances = tuple(
        msgspec.structs.replace(i, compute=(msgspec.structs.replace(i.compute[0], pids=(1,)),))
        if i.start in used
        else i
        for i in gpu.instances
    )
    return msgspec.structs.replace(gpu, instances=instances)


def want(*names: str) -> Want:
    return Want(enabled=True, pieces=tuple(Piece(profile=name) for name in names))


def stays(gpu: Gpu, wanted: Want) -> set[int | None]:
    (made,) = plan([gpu], {0: wanted}).gpus
    return {piece.start for piece in made.stays}


SMALL = (("1g.10gb", 0), ("1g.10gb", 4), ("1g.10gb", 5))


def test_one_instance_in_use_is_worth_more_than_two_idle_ones() -> None:
    wanted = want("3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb")
    assert stays(standing(*SMALL), wanted) == {4, 5}
    assert stays(standing(*SMALL, used=(0,)), wanted) == {0}
    assert plan([standing(*SMALL, used=(0,))], {0: wanted}).blockers == ()


def test_of_as_many_the_larger_stays() -> None:
    """The 3g stands in the way of the one or of the other."""
    wanted = want("3g.40gb", "2g.20gb", "1g.10gb")
    assert stays(standing(("2g.20gb", 0), ("1g.10gb", 6)), wanted) == {0}
    assert stays(standing(("2g.20gb", 0), ("1g.10gb", 6), used=(6,)), wanted) == {6}


def test_a_place_that_is_asked_for_is_kept_to() -> None:
    gpu = standing(("1g.10gb", 0), ("1g.10gb", 1))
    pinned = Want(enabled=True, pieces=(Piece(profile="1g.10gb", start=1), Piece(profile="1g.10gb", start=6)))
    (made,) = plan([gpu], {0: pinned}).gpus
    assert [(s.act, s.start) for s in made.steps] == [
        (Act.DESTROY_COMPUTE, 0),
        (Act.DESTROY, 0),
        (Act.CREATE, 6),
        (Act.CREATE_COMPUTE, 6),
    ]


def test_the_way_back_leaves_gpus_alone_that_are_gone_or_have_no_mig() -> None:
    gpu, without = standing(*SMALL), fake_gpu(1, "none")
    assert back([gpu, without], [gpu, without]).steps == ()
    assert back([gpu, without], [without]).gpus == ()


def test_a_gpu_of_unknown_profiles_can_be_put_in_mig_mode_and_nothing_more() -> None:
    gpu = msgspec.structs.replace(fake_gpu(0, "a100-80gb"), name="NVIDIA X1", profiles=())
    assert [s.act for s in plan([gpu], {0: want()}).steps] == [Act.MODE_ON]
    with pytest.raises(
        MigRefusalError, match=r"GPU 0 \(NVIDIA X1\) are unknown here.*put it in MIG mode first"
    ):
        plan([gpu], {0: want("1g.10gb")})


def test_steps_read_as_sentences() -> None:
    gpu = standing(("1g.10gb", 3))
    assert [str(step) for step in plan([gpu], {0: Want(enabled=False)}).steps] == [
        "GPU 0: destroy compute instance 0 of 1g.10gb at 3",
        "GPU 0: destroy 1g.10gb at 3",
        "GPU 0: MIG mode off",
    ]
