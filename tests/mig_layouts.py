"""Layouts that Slurm's files are written for in tests, cut on the shipped fake."""

from __future__ import annotations

from collections.abc import Sequence

from hybridsched.core.mig import Gpu, Piece, Want, plan
from hybridsched.mig.fake import FakeMig, fake_gpu


def slices(**names: int) -> Want:
    pieces = tuple(Piece(profile=name) for name, count in names.items() for _ in range(count))
    return Want(enabled=True, pieces=pieces)


OFF = Want(enabled=False)
LAYOUTS: dict[str, list[tuple[str, Want]]] = {
    # model and wish of each GPU of the node
    "whole": [("a100-80gb", OFF), ("a100-80gb", OFF)],
    "sevenths": [("a100-80gb", slices(**{"1g.10gb": 7}))] * 2,
    "mixed": [("a100-80gb", slices(**{"3g.40gb": 1, "1g.10gb": 4}))],
    "beside": [("a100-80gb", OFF), ("a100-80gb", slices(**{"2g.20gb": 3, "1g.10gb+me": 1}))],
}


def cut_gpus(name: str) -> tuple[Gpu, ...]:
    """The node's GPUs, cut."""
    fake = FakeMig([fake_gpu(i, model) for i, (model, _) in enumerate(LAYOUTS[name])])
    wants = {i: want for i, (_, want) in enumerate(LAYOUTS[name])}
    outcome = fake.apply(plan(fake.read(), wants), lambda _: None)
    assert outcome.ok, outcome.lines()
    return fake.read()


def minors_of(gpus: Sequence[Gpu]) -> str:
    """A table such as the driver's: all GPU and compute instances that could be, in order.

    The order and numbers are ours; the driver of each release has its own.
    """
    lines = ["config 1", "monitor 2"]
    minor = 3
    for gpu in gpus:
        for gi in range(15):
            for key in (f"gi{gi}/access", *(f"gi{gi}/ci{ci}/access" for ci in range(8))):
                lines.append(f"gpu{gpu.minor}/{key} {minor}")
                minor += 1
    return "\n".join(lines) + "\n"
