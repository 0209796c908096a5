"""Minutes of tenants and engines, of one gateway and of two that share a queue."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from engine.entry import QueueEntry
from engine.messages import Ready, Snapshot, StepTime, TenantService
from gateway.explain.fluid_share import Job
from gateway.explain.ideal_share import FairTerms
from gateway.explain.load_log import LoadLog
from gateway.explain.minutes.engine_meter import EngineMeter
from gateway.explain.minutes.flow_meter import FlowMeter, whole_parts
from gateway.explain.pool_load import KNOWN_AFTER_S, MAX_ENDS, SILENT_S, PoolLoadShare
from tenants.counts.minute_store import MINUTE_US, EngineMinute, FlowKey, FlowMinute

WALL_S = 1_700_000_040.0
MINUTE = int(WALL_S) // 60 * 60_000_000
FAIR = FairTerms()


def _meter(lag_s: float = 0.0) -> FlowMeter:
    meter = FlowMeter("pool", lag_s=lag_s)
    meter.sample(0.0, WALL_S, {}, ())
    return meter


def _line_up(meter: FlowMeter, tenant: str, cost: int, at_s: float = 0.0, before_s: float = 0.25) -> None:
    meter.lined_up(f"{tenant}{at_s}", tenant, 1, cost, FAIR, at_s, before_s)


def test_a_minute_says_what_was_had_what_was_due_and_how_it_waited() -> None:
    meter = _meter()
    _line_up(meter, "flood", 1000)
    _line_up(meter, "light", 1000, before_s=0.5)
    meter.sample(1.0, WALL_S + 1, {("flood", 1): 101}, [(("flood", 1), 900), (("light", 1), 1000)])

    assert meter.take(MINUTE + MINUTE_US - 1) == {}, "the minute is not over"
    meter.sample(61.0, WALL_S + 61, {}, ())
    meter.sample(62.0, WALL_S + 62, {}, ())
    assert meter.take(MINUTE + MINUTE_US) == {
        FlowKey(MINUTE, "pool", "standard", "flood"): FlowMinute(101, 51, 900, 1, 250_000),
        FlowKey(MINUTE, "pool", "standard", "light"): FlowMinute(0, 50, 1000, 1, 500_000),
    }
    assert meter.take(MINUTE + 2 * MINUTE_US) == {}, "it is written once"


def test_tenants_without_anything_have_no_row() -> None:
    meter = _meter()
    _line_up(meter, "one", 10)
    meter.ended("one0.0", 0.5, 10)
    meter.sample(1.0, WALL_S + 1, {("one", 1): 10}, ())
    for second in range(2, 300):
        meter.sample(second, WALL_S + second, {}, ())

    rows = meter.take(None)
    assert list(rows) == [FlowKey(MINUTE, "pool", "standard", "one")]


def test_whole_parts_add_up() -> None:
    parts = {("a", 1): 1 / 3, ("b", 1): 1 / 3, ("c", 0): 10 + 1 / 3, ("d", 0): -2.0}
    assert whole_parts(parts, 9) == {("a", 1): 0, ("b", 1): 0, ("c", 0): 11, ("d", 0): -2}
    assert whole_parts({}, 0) == {}


class Side:
    """One of two gateways that share a queue."""

    def __init__(self, name: str, life: str = "1") -> None:
        self.log, self.meter = LoadLog(), _meter(lag_s=2.0)
        self.share = PoolLoadShare(name, life, self.log, self.meter)

    def arrive(self, request_id: str, tenant: str, at_s: float, output_tokens: int = 500) -> None:
        entry = QueueEntry(request_id, tenant, at_s, 0, output_tokens, 1, 1.0)
        self.share.arrived(entry, 1, FAIR)
        self.meter.lined_up(request_id, tenant, 1, entry.predicted_cost, FAIR, at_s, 0.1)

    def end(self, request_id: str, tenant: str, at_s: float) -> None:
        self.share.ended(Job(request_id, tenant, 1, 1.0, 0.0, 0, 500), at_s, 1000, is_complete=True)
        self.meter.ended(request_id, at_s, 1000)


def sides_of_one_request() -> tuple[Side, Side]:
    """East, where it arrived, and west, which knows nothing of it yet."""
    east = Side("east")
    east.arrive("e1", "a", 0.0)
    return east, Side("west")


def _tell(side: Side, other: Side, now_s: float) -> bytes:
    packed = side.share.tell(now_s)
    assert packed is not None
    other.share.hear(packed, now_s)
    side.share.told()
    return packed


def test_two_gateways_divide_the_pools_service_and_count_each_its_own_part() -> None:
    east, west = Side("east"), Side("west")
    east.arrive("e1", "flood", 0.0)
    west.arrive("w1", "light", 0.0)
    # The flood, all of it at one gateway, had three quarters of what the pool gave.
    for second in (1.0, 2.0, 3.0, 4.0):
        east.meter.sample(second, WALL_S + second, {("flood", 1): 150}, ())
        west.meter.sample(second, WALL_S + second, {("light", 1): 50}, ())
        _tell(east, west, second)
        _tell(west, east, second)

    rows = [side.meter.take(None) for side in (east, west)]
    assert [
        {key.tenant_id: (row.served_tokens, row.fair_tokens, row.arrivals) for key, row in each.items()}
        for each in rows
    ] == [
        {"flood": (600, 300, 1), "light": (0, 300, 0)},
        {"flood": (0, 100, 0), "light": (200, 100, 1)},
    ]


def test_the_first_service_of_another_gateway_which_lasted_no_time_counts_when_it_was() -> None:
    meter = _meter(lag_s=1.5)
    _line_up(meter, "a", 100)
    meter.served_elsewhere(2.0, 2.0, 40)
    for second in range(1, 6):
        meter.sample(float(second), WALL_S + second, {("a", 1): 10}, ())
    [counts] = meter.take().values()
    assert (counts.served_tokens, counts.fair_tokens) == (50, 50)
    assert not meter._elsewhere, "it is counted"


def test_a_batch_that_is_told_twice_counts_once() -> None:
    east, west = sides_of_one_request()
    east.end("e1", "a", 0.4)
    first = east.share.tell(0.5)
    again = east.share.tell(1.0)  # its answer was lost
    assert first is not None
    assert again is not None
    west.share.hear(first, 0.5)
    west.share.hear(again, 1.0)

    (job,) = west.log.jobs(math.inf)
    assert (job.arrived_s, west.share.open_elsewhere().total()) == (0.0, 0)
    assert west.meter._ideal._changes[2:] == []
    east.share.told()
    assert east.share.tell(1.5) is None, "there is nothing left to say"


def test_a_gateway_hears_nothing_of_itself_and_a_silent_one_has_nothing_left() -> None:
    east, west = sides_of_one_request()
    packed = _tell(east, west, 0.5)
    east.share.hear(packed, 0.5)
    assert east.share.open_elsewhere() == {}
    assert west.share.open_elsewhere() == {"east": 1}

    west.share.forget_silent(0.5 + SILENT_S)
    assert west.share.open_elsewhere() == {"east": 1}
    west.share.forget_silent(0.6 + SILENT_S)
    assert west.share.open_elsewhere() == {}
    (job,) = west.log.jobs(math.inf)
    assert job.left_s == 0.5, "it was there until it was last heard of"


def test_a_gateway_that_is_late_is_waited_for_while_it_has_requests() -> None:
    east, west = Side("east"), Side("west")
    assert west.share.known_until_s(100.0) == 100.0 - KNOWN_AFTER_S
    east.arrive("e1", "a", 0.0)
    _tell(east, west, 0.5)
    assert west.share.known_until_s(1.0) == 1.0 - KNOWN_AFTER_S
    assert west.share.known_until_s(8.0) == 0.5, "what it had since is not told yet"
    west.share.forget_silent(0.6 + SILENT_S)
    assert west.share.known_until_s(11.1) == 11.1 - KNOWN_AFTER_S
    east.end("e1", "a", 11.0)
    _tell(east, west, 11.5)
    assert west.share.known_until_s(20.0) == 20.0 - KNOWN_AFTER_S, "it has nothing to tell"


def test_another_life_of_a_gateway_has_none_of_the_earlier_ones_requests() -> None:
    east, west = sides_of_one_request()
    _tell(east, west, 0.5)
    reborn = Side("east", life="2")
    reborn.arrive("e2", "a", 1.0)
    _tell(reborn, west, 1.5)

    assert west.share.open_elsewhere() == {"east": 1}
    assert {job.job_id: job.left_s for job in west.log.jobs(math.inf)} == {"e1": 0.5, "e2": math.inf}


def test_a_gateway_that_cannot_tell_anything_begins_anew() -> None:
    east, west = sides_of_one_request()
    _tell(east, west, 0.5)
    for number in range(MAX_ENDS + 1):
        east.end(f"lost{number}", "a", 1.0)
    east.arrive("e2", "a", 2.0)
    _tell(east, west, 2.5)

    assert west.share.open_elsewhere() == {}, "what was open may have ended meanwhile"
    assert east.share.tell(3.0) is not None


@dataclass
class Seen:
    """A replica as the gateway sees it."""

    replica_id: str = "engine-0"
    is_up: bool = True
    ready: Ready | None = None
    snapshot: Snapshot | None = None


def _snapshot(
    steps: int,
    *,
    step_us: int = 0,
    referenced: int = 0,
    computed: int = 0,
    emitted: int = 0,
    batch_sum: int = 0,
    recomputed_tokens: int = 0,
) -> Snapshot:
    return Snapshot(
        "engine-0", steps, 0.0, [], [], 0, 0, referenced, 100, StepTime(0.01, 0.0, 0.0, 0.0, 1, 0.0),
        {"a": TenantService(computed, emitted)}, step_us=step_us, batch_sum=batch_sum,
        recomputed_tokens=recomputed_tokens,
    )  # fmt: skip


def test_an_engines_minute_has_what_it_did_since_the_last_look() -> None:
    meter, seen = EngineMeter("pool"), Seen()
    seen.snapshot = _snapshot(1000, step_us=9_000_000, computed=5, emitted=7, batch_sum=4000)
    meter.sample(0.0, WALL_S, [seen])
    seen.snapshot = _snapshot(
        1010, step_us=9_400_000, referenced=50, computed=25, emitted=57, batch_sum=4080, recomputed_tokens=3
    )
    meter.sample(1.0, WALL_S + 1, [seen])

    (row,) = meter.take(None).values()
    assert row == EngineMinute(
        "up", 1_000_000, 1_000_000, 600_000, 10, 400_000, 80, 20, 50, 3, 0, kv_permille_s=500
    )
    assert row.as_json()["mean_batch"] == 8.0


def test_an_engine_that_restarts_counts_from_nothing_and_one_that_is_down_counts_nothing() -> None:
    meter, seen = EngineMeter("pool"), Seen(snapshot=_snapshot(1000, emitted=900))
    meter.sample(0.0, WALL_S, [seen])
    seen.is_up = False
    meter.sample(1.0, WALL_S + 1, [seen])
    seen.is_up, seen.snapshot = True, _snapshot(4, step_us=100_000, emitted=8)
    meter.sample(2.0, WALL_S + 2, [seen])

    (row,) = meter.take(None).values()
    assert (row.seen_us, row.up_us, row.steps, row.emitted_tokens) == (2_000_000, 1_000_000, 4, 8)
    assert meter.take(None) == {}


@pytest.mark.parametrize("now_us", [MINUTE, MINUTE + MINUTE_US - 1])
def test_a_minute_of_an_engine_is_written_when_it_is_over(now_us: int) -> None:
    meter, seen = EngineMeter("pool"), Seen(snapshot=_snapshot(1))
    meter.sample(0.0, WALL_S, [seen])
    meter.sample(1.0, WALL_S + 1, [seen])
    assert meter.take(now_us) == {}
    assert len(meter.take(MINUTE + MINUTE_US)) == 1
