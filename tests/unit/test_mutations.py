"""The mutations of `make mutants` name code and tests that exist, and the documents all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutations import Mutation
from tests.mutants.run import EVERY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", EVERY, ids=lambda each: each.name)
def test_a_mutation_has_its_place_its_test_and_its_line(mutation: Mutation) -> None:
    assert (ROOT / mutation.path).read_text().count(mutation.before) == 1
    path, _, test = mutation.tests.partition("::")
    assert f"def {test}(" in (ROOT / path).read_text() if test else (ROOT / path).exists()
    assert f"| {mutation.name} | `{mutation.tests}` |" in (ROOT / "docs/invariants.md").read_text()


def test_there_are_at_least_ten() -> None:
    assert len({each.name for each in EVERY}) == len(EVERY) >= 10
