"""What the workers of one port count together."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.errors import ApiError
from gateway.http.connection_table import ConnectionLimits, ConnectionTable
from gateway.requests.inputs.large_bodies import LargeBodies
from gateway.workers.tally import Counts, Tally


def seats(directory: Path, what: str, count: int = 3) -> tuple[Tally, list[Counts]]:
    """The supervisor's tally, and each seat's counts of its own mapping."""
    kept = Tally.create(directory / "tally", count)
    return kept, [Tally(directory / "tally").of(number, what) for number in range(count)]


def test_others_counts_are_seen_by_key_and_kind_and_a_dead_seats_are_forgotten(tmp_path: Path) -> None:
    kept, (first, second, third) = seats(tmp_path, "streams")
    assert [first.add("ada", 2), second.add("ada", 3), third.add("ada", 0)] == [0, 2, 5]
    assert third.add("grace", 0) == 0
    assert Tally(tmp_path / "tally").of(2, "connections").add("ada", 0) == 0
    kept.clear(1)
    assert (third.add("ada", 0), second.add("ada", 0)) == (2, 2)
    # Keys that share a row of one half are told apart by the other.
    for number in range(5_000):
        first.add(number, 1)
    assert sum(second.add(f"new {number}", 0) > 0 for number in range(1_000)) < 80


def test_connections_of_an_address_and_in_all_are_bounded_over_all_workers(tmp_path: Path) -> None:
    _, counts = seats(tmp_path, "connections", 2)
    limits = ConnectionLimits(5, 3, 10.0, 30.0)
    here, there = (ConnectionTable[str](limits, each) for each in counts)
    here.enter("a1", "a", 30.0)
    there.enter("a2", "a", 30.0)
    here.enter("a3", "a", 30.0)
    for place in (here, there):
        with pytest.raises(ApiError) as refused:
            place.enter("a4", "a", 30.0)
        assert refused.value.status == 429
    there.leave("a2")
    there.enter("a5", "a", 30.0)
    there.enter("b", "b", 30.0)
    there.enter("c", "c", 30.0)
    # Full: what rests here gives way; where nothing rests here, it is refused.
    assert there.enter("d", "d", 30.0) == "a5"
    here.work("a1")
    here.work("a3")
    with pytest.raises(ApiError) as refused:
        here.enter("e", "e", 30.0)
    assert refused.value.status == 503
    here.leave("a1")
    assert here.enter("e", "e", 30.0) is None


def test_large_bodies_share_one_room(tmp_path: Path) -> None:
    _, counts = seats(tmp_path, "large bodies", 2)
    here, there = (LargeBodies(1_000, each) for each in counts)
    here.take("a", 300)
    for tenant, num_bytes, status in (("a", 201, 429), ("b", 500, 0), ("c", 201, 503), ("c", 200, 0)):
        if status:
            with pytest.raises(ApiError) as refused:
                there.take(tenant, num_bytes)
            assert refused.value.status == status
        else:
            there.take(tenant, num_bytes)
