"""Mutants of rules, and the test that has to notice each.

Each mutation replaces a piece of the code that occurs exactly once. `make mutants` applies them one at a time
to a copy of the tree and expects the named tests to fail there; `docs/invariants.md` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One rule, broken."""

    name: str
    path: str
    before: str
    after: str
    tests: str
    """What has to fail: a pytest node or file."""


Broken = tuple[str, str, str, str, str]
"""File, what goes wrong, what stands there, what stands there instead, the test."""


def mutations_of(broken: Sequence[Broken]) -> list[Mutation]:
    """The mutations of a list of broken rules."""
    return [Mutation(name, path, before, after, tests) for path, name, before, after, tests in broken]
