"""What the heartbeat of another process with the same id says of it."""

from __future__ import annotations

import pytest

from gateway.cluster.identity import RivalWatch
from tenants.directory.gateways import GatewaySeen, Instance

BEAT_S = 3.0


def row(heartbeat_s: float, silent_s: float = 0.0, instance_id: str = "other") -> GatewaySeen:
    return GatewaySeen("gw", "", frozenset(), silent_s, instance_id, "there", round(heartbeat_s * 1e6))


def test_a_heartbeat_that_moves_on_is_of_a_live_process() -> None:
    watch = RivalWatch(BEAT_S)
    assert watch.look(row(100), 50.0) == "watch"
    assert watch.look(row(100), 50.0 + 2 * BEAT_S) == "watch"
    assert watch.look(row(100.001), 50.0 + 2 * BEAT_S) == "lives"


def test_one_that_stands_still_for_two_beats_is_of_a_dead_process() -> None:
    watch = RivalWatch(BEAT_S)
    # The time before it was first seen counts, too.
    assert watch.look(row(100, silent_s=2.0), 50.0) == "watch"
    assert watch.look(row(100, silent_s=6.0), 54.0) == "watch"
    assert watch.look(row(100, silent_s=6.1), 54.1) == "still"
    assert RivalWatch(BEAT_S).look(row(100, silent_s=7.0), 50.0) == "still"


@pytest.mark.parametrize(
    ("own", "seen", "follows"),
    [
        (Instance("a", "boot:1:2"), Instance("b", "boot:1:2"), True),
        (Instance("a", "boot:1:2"), Instance("b", "boot:1:3"), False),
        (Instance("a", "boot:1:2"), Instance("b", "other:1:2"), False),
        (Instance("a", "boot:1:2"), Instance("a", "else"), True),
        (Instance("a", ""), Instance("b", ""), False),
    ],
)
def test_only_the_lock_of_the_very_directory_proves_that_the_other_has_ended(
    own: Instance, seen: Instance, follows: bool
) -> None:
    found = GatewaySeen("gw", "", frozenset(), 0.0, seen.instance_id, seen.runs_in, 1)
    assert own.follows(found) is follows
