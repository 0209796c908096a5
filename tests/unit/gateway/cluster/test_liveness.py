"""Which gateways count as dead, and when one that stood still notices."""

from __future__ import annotations

import pytest

from gateway.cluster.liveness import MARGIN_S, Liveness
from tenants.directory.gateways import GatewaySeen
from tenants.errors import DatabaseUnavailable
from tests.support.quota import Clock

STALE_S = 10.0


def seen(gateway_id: str, silent_s: float) -> GatewaySeen:
    return GatewaySeen(gateway_id, "", frozenset(), silent_s)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def liveness(clock: Clock) -> Liveness:
    return Liveness("me", STALE_S, clock)


def beat(liveness: Liveness, clock: Clock, *others: GatewaySeen) -> list[str]:
    return [each.gateway_id for each in liveness.beaten(clock(), [seen("me", 0.0), *others])]


def test_who_is_silent_for_too_long_is_dead_but_never_oneself(liveness: Liveness, clock: Clock) -> None:
    for _ in range(6):
        beat(liveness, clock)
        clock.advance(2)
    silent, quick = seen("silent", STALE_S + 0.1), seen("quick", STALE_S)
    assert beat(liveness, clock, silent, quick, seen("me", 99)) == ["silent"]


def test_no_gateway_is_dead_before_this_one_was_in_touch_long_enough(
    liveness: Liveness, clock: Clock
) -> None:
    silent = seen("silent", 1e9)
    found = []
    for _ in range(7):
        found.append((clock() - 100, beat(liveness, clock, silent)))
        clock.advance(2)
    assert found[:5] == [(second, []) for second in (0, 2, 4, 6, 8)]
    assert found[5:] == [(10, ["silent"]), (12, ["silent"])]
    # The database was away: every gateway gets the time to write its heartbeat.
    clock.advance(STALE_S + 1)
    assert beat(liveness, clock, silent) == []
    clock.advance(STALE_S - 1)
    assert beat(liveness, clock, silent) == []
    clock.advance(1)
    assert beat(liveness, clock, silent) == ["silent"]


def test_who_stood_still_starts_nothing_until_its_next_heartbeat(liveness: Liveness, clock: Clock) -> None:
    with pytest.raises(DatabaseUnavailable):
        liveness.require()
    beat(liveness, clock)
    clock.advance(STALE_S - MARGIN_S)
    liveness.require()
    clock.advance(0.1)
    with pytest.raises(DatabaseUnavailable, match="out of touch"):
        liveness.require()
    beat(liveness, clock)
    liveness.require()


def test_the_last_moment_to_start_something_lies_before_anybody_calls_it_dead(clock: Clock) -> None:
    with pytest.raises(ValueError, match="gateway_stale_s"):
        Liveness("me", MARGIN_S, clock)
