"""Releases by their order."""

from __future__ import annotations

import pytest

from tenants.storage.release import apart, is_older


@pytest.mark.parametrize(
    ("release", "than", "older"),
    [
        ("0.9.0", "0.10.0", True),
        ("0.10.0", "0.9.0", False),
        ("0.2", "0.2.0", False),
        ("0.2.0", "0.2", False),
        ("0.2.0rc1", "0.2.0", False),
        ("0.1.9+local", "0.2.0", True),
        ("", "0.1.0", True),
        ("0+unknown", "0.1.0", True),
    ],
)
def test_releases_are_ordered_by_their_numbers(release: str, than: str, older: bool) -> None:
    assert is_older(release, than) is older


@pytest.mark.parametrize(
    ("one", "other", "number"),
    [
        ("0.1.0", "0.1.9", 0),
        ("0.3.0", "0.2.1", 1),
        ("0.1", "0.3.0", 2),
        ("0.9.2", "1.0", 1),
        ("1.1", "0.9", 2),
    ],
)
def test_releases_are_apart_by_their_first_two_numbers(one: str, other: str, number: int) -> None:
    assert apart(one, other) == number
