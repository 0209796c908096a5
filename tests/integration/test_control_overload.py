"""Under overload the control loop keeps most requests in time, with one gateway and with two; advice changes
nothing.

The gateway's own code on virtual time: queue, admission, forecasts, control loops, the scripts of a shared
queue over a real Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import redis

from gateway.flow.control_rules import ControlMode
from gateway.flow.knobs import Knob
from ops.bench.estimates.control import most_reversals
from ops.sandbox.services import Service, start_redis
from ops.simulate.records import Records
from ops.simulate.slo import SloLimits
from tests.support.control_gateways import overload, served

SLO = SloLimits(ttft_s=2.0, tpot_s=0.1)
LEAST_IN_TIME = 0.65
INSTANTS = ("dispatched_s", "first_s", "last_s")


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    # Not the other tests': a run begins with an empty one.
    made = start_redis()
    yield made
    made.stop()


@pytest.fixture
def client(service: Service) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(service.url) as connected:
        yield connected


def in_time(records: Records) -> float:
    return sum(SLO.met(records, row) for row in range(len(records))) / len(records)


#: One for both numbers of gateways.
loaded = cache(partial(overload, SLO))


@cache
def fixed(limit: int) -> Records:
    """What one gateway without a loop makes of it."""
    return served(loaded(limit), ControlMode.OFF, 1, None)[0].records


@pytest.mark.parametrize("gateways", [1, 2])
def test_acting_serves_most_of_what_came_in_time(client: redis.Redis, gateways: int) -> None:
    off = fixed(500)
    load = max(off.last_s) / max(off.arrival_s)
    assert load > 1.2, "it is no overload"
    assert in_time(off) < 0.16
    pool, loops = served(loaded(500), ControlMode.ACTING, gateways, client)
    assert len(pool.records) == 500
    assert in_time(pool.records) >= LEAST_IN_TIME
    assert all(loop.moves for loop in loops)
    assert {loop.admission.strictness for loop in loops} == {max(loop.admission.strictness for loop in loops)}
    if gateways == 2:
        first, second = (_told(loop) for loop in loops)
        assert second == first[-len(second) :], "one decides, and the other knows of it"


def _told(loop: Any) -> list[tuple[Knob, float, float, str]]:
    return [(move.knob, move.before, move.after, move.reason) for move in loop.moves]


@pytest.mark.parametrize("gateways", [1, 2])
def test_advice_changes_nothing(client: redis.Redis, gateways: int) -> None:
    case = loaded(150)
    off = fixed(150) if gateways == 1 else served(case, ControlMode.OFF, gateways, client)[0].records
    advice, loops = served(case, ControlMode.ADVICE, gateways, client)
    for name in INSTANTS:
        assert getattr(advice.records, name) == getattr(off, name)
    advised = [move for loop in loops for move in loop.moves]
    assert advised, "nothing was at stake"
    assert not any(move.is_made for move in advised)


@pytest.mark.long
@pytest.mark.parametrize("gateways", [1, 2])
def test_over_the_whole_published_setting(client: redis.Redis, gateways: int) -> None:
    case = overload(SLO)
    runs = {mode: served(case, mode, gateways, client) for mode in ControlMode}
    records = {mode: pool.records for mode, (pool, _) in runs.items()}
    off, acting = records[ControlMode.OFF], records[ControlMode.ACTING]
    for name in INSTANTS:
        assert getattr(records[ControlMode.ADVICE], name) == getattr(off, name)
    assert in_time(acting) >= LEAST_IN_TIME
    assert in_time(acting) > 4 * in_time(off)
    moves = runs[ControlMode.ACTING][1][0].moves
    assert moves
    assert most_reversals(moves) <= 1
