"""The mutants of `tests.mutants` can still be made; `make mutants` says whether all are noticed."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, problem


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_has_its_place(mutant: Mutant) -> None:
    assert problem(mutant) == ""
    for path in mutant.tests:
        assert (ROOT / path).exists(), path


def test_names_are_unlike() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
