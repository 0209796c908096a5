"""The long lane's share, displacement by a jump, and room that is kept."""

from __future__ import annotations

import math

import pytest

from engine.entry import QueueEntry
from gateway.flow.controller import Dispatch, Displaced, FlowController, Ticket
from gateway.flow.lanes import LONG, ORDINARY, LaneRule, long_tokens_of
from gateway.flow.shared.mirror import Mirror
from gateway.flow.types import Reason
from gateway.flow.window import Replica, ReplicaLoad
from tests.support.builders import flow_controller

INTERACTIVE, STANDARD, BATCH = 0, 1, 2

ONE_LANE = LaneRule()


class Queue:
    """A controller over replicas of 4 places and 1,000 KV tokens."""

    def __init__(
        self,
        lanes: LaneRule = ONE_LANE,
        names: str = "a",
        lookahead: int = 0,
        policy: str = "vtc",
        ageing_s: tuple[float, ...] = (math.inf,) * 3,
        controller: type[FlowController] = FlowController,
    ) -> None:
        self.replicas = [Replica(name, 4, 1000) for name in names]
        self.flow = flow_controller(
            policy, lookahead=lookahead, kind=controller, lanes=lanes, ageing_s=ageing_s
        )
        self.now_s = 0.0

    def arrive(
        self,
        name: str,
        tier: int,
        tokens: int,
        tenant: str = "t",
        sequences: int = 1,
        reserved: float = 0.0,
        reserved_tier: int | None = None,
    ) -> None:
        self.now_s += 1.0
        entry = QueueEntry(name, tenant, self.now_s, tokens // 2, tokens - tokens // 2, tier)
        ticket = Ticket(entry, sequences, tokens, reserved_cost_per_s=reserved, reserved_tier=reserved_tier)
        assert self.flow.enqueue(ticket, self.now_s) is None

    def go(self) -> list[Dispatch]:
        turns = self.flow.dispatch(self.now_s, self.replicas)
        self.flow.check(self.now_s)
        return turns

    def names(self) -> list[str]:
        return [turn.ticket.entry.entry_id for turn in self.go()]

    def end(self, name: str) -> None:
        self.flow.finish(name, 1, 1, self.now_s)


@pytest.mark.parametrize(
    ("context_tokens", "long_tokens"),
    [(2048, 1536), (1, 1), (16_384, 12_288), (2**20, 16_384), (None, 16_384)],
)
def test_long_is_three_quarters_of_the_context_where_no_setting_says_so(
    context_tokens: int | None, long_tokens: int
) -> None:
    assert long_tokens_of(context_tokens) == long_tokens


def test_another_length_counts_for_requests_that_come_from_then_on() -> None:
    queue = Queue(LaneRule(long_tokens=100))
    assert [
        queue.flow.queue.lane_rule.lane(QueueEntry("a", "t", 0.0, 50, more, STANDARD)) for more in (50, 51)
    ] == [0, 1]
    queue.arrive("before", STANDARD, 80)
    queue.flow.queue.lane_rule = LaneRule(50)
    queue.arrive("after", STANDARD, 80)
    assert queue.flow.queue.lane_rule.long_tokens == 50
    assert queue.names() == ["before", "after"]


def test_long_is_what_is_longer_and_all_of_batch() -> None:
    rule = LaneRule(long_tokens=100)
    assert rule.lane(QueueEntry("a", "t", 0.0, 50, 50, STANDARD)) == ORDINARY
    assert rule.lane(QueueEntry("a", "t", 0.0, 50, 51, INTERACTIVE)) == LONG
    assert rule.lane(QueueEntry("a", "t", 0.0, 1, 1, BATCH)) == LONG


@pytest.mark.parametrize("field", ["share_sequences", "share_kv", "batch_share"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be above 0 and at most 1"):
        LaneRule(**{field: value})  # type: ignore[arg-type]


def test_the_share_counts_its_tier_and_above_and_one_may_always_go() -> None:
    rule = LaneRule(100, share_sequences=0.5, share_kv=0.5, batch_share=0.25)
    replica, load = Replica("a", 4, 1000), ReplicaLoad()
    assert rule.has_room(replica, load, STANDARD, 9, 9999)
    load.add(STANDARD, 1, 200)
    assert rule.has_room(replica, load, STANDARD, 1, 300)
    assert not rule.has_room(replica, load, STANDARD, 2, 300)
    assert not rule.has_room(replica, load, STANDARD, 1, 301)
    assert rule.has_room(replica, load, INTERACTIVE, 9, 9999), "lower tiers are not counted"
    assert not rule.has_room(replica, load, BATCH, 1, 10)


def test_a_full_lane_is_left_out_everywhere_below_too() -> None:
    queue = Queue(LaneRule(100, share_sequences=0.25))
    queue.arrive("long 1", STANDARD, 150)
    queue.arrive("long 2", STANDARD, 150)
    queue.arrive("short", STANDARD, 50)
    queue.arrive("batch", BATCH, 50)
    assert queue.names() == ["long 1", "short", "batch"]
    queue.end("long 1")
    assert queue.names() == ["long 2"]


def test_room_is_kept_for_a_long_one_on_one_replica_and_others_go_on_beside_it() -> None:
    queue = Queue(LaneRule(100), names="ab")
    for name in "12345678":
        queue.arrive(name, STANDARD, 90, tenant="flood")
    assert len(queue.go()) == 8
    queue.arrive("long", STANDARD, 900, tenant="quiet")
    for name in ("x", "y", "z"):
        queue.arrive(name, STANDARD, 90, tenant="flood")
    assert queue.names() == []
    on_a = [each.ticket.entry.entry_id for each in queue.flow.in_flight if each.replica_id == "a"]
    on_b = [each.ticket.entry.entry_id for each in queue.flow.in_flight if each.replica_id == "b"]
    queue.end(on_a[0])
    queue.end(on_b[0])
    turns = queue.go()
    assert len(turns) == 1, "one goes on, the other place is kept"
    kept_for = "a" if turns[0].replica_id == "b" else "b"
    for name in on_a[1:] if kept_for == "a" else on_b[1:]:
        queue.end(name)
    turns = queue.go()
    assert turns[0].ticket.entry.entry_id == "long"
    assert turns[0].replica_id == kept_for


def test_a_jump_names_whose_places_it_takes_the_last_of_the_lowest_tier_first() -> None:
    queue = Queue()
    queue.arrive("standard", STANDARD, 100, tenant="office")
    for name in ("batch 1", "batch 2", "batch 3"):
        queue.arrive(name, BATCH, 100, tenant="night")
    assert len(queue.go()) == 4
    queue.arrive("jump", INTERACTIVE, 100, tenant="day")
    (turn,) = queue.go()
    assert turn.tier == INTERACTIVE
    assert turn.displaced == (Displaced("batch 3", "night", BATCH, 100),)
    queue.arrive("large jump", INTERACTIVE, 800, tenant="day")
    (turn,) = queue.go()
    # 1,300 tokens of 1,000 are wanted now, and two places more than there are.
    assert [each.entry_id for each in turn.displaced] == ["batch 3", "batch 2", "batch 1"]


def test_the_lowest_tier_gives_way_before_who_came_last() -> None:
    queue = Queue()
    queue.arrive("batch", BATCH, 100)
    assert queue.names() == ["batch"]
    for number in range(3):
        queue.arrive(f"standard {number}", STANDARD, 100)
    assert len(queue.go()) == 3
    queue.arrive("jump", INTERACTIVE, 100)
    (turn,) = queue.go()
    assert [each.entry_id for each in turn.displaced] == ["batch"]


def test_nobody_is_displaced_where_there_is_room_or_by_its_own_tier() -> None:
    queue = Queue(lookahead=2)
    for number in range(3):
        queue.arrive(f"batch {number}", BATCH, 100)
    queue.arrive("jump", INTERACTIVE, 100)
    assert all(turn.displaced == () for turn in queue.go())
    queue = Queue(lookahead=2)
    for number in range(6):
        queue.arrive(f"batch {number}", BATCH, 100)
    turns = queue.go()
    assert len(turns) == 6
    assert all(turn.displaced == () for turn in turns)


def test_reserved_service_is_let_in_beyond_a_window_full_of_its_own_tier() -> None:
    queue = Queue()
    for number in range(6):
        queue.arrive(f"flood {number}", STANDARD, 100, tenant="flood")
    assert len(queue.go()) == 4
    queue.arrive("paid", STANDARD, 100, tenant="paid", reserved=50.0)
    (turn,) = queue.go()
    assert turn.ticket.entry.entry_id == "paid"
    assert (turn.tier, turn.by_reservation) == (INTERACTIVE, True)
    assert [each.tenant_id for each in turn.displaced] == ["flood"]


def test_a_due_tenant_whose_long_request_finds_its_lane_full_sends_its_next_one() -> None:
    queue = Queue(LaneRule(100, share_sequences=0.25))
    queue.arrive("long 1", INTERACTIVE, 150, tenant="paid", reserved=1000.0)
    assert queue.names() == ["long 1"]
    queue.arrive("long 2", INTERACTIVE, 150, tenant="paid", reserved=1000.0)
    queue.arrive("short", BATCH, 10, tenant="paid", reserved=1000.0)
    queue.arrive("short of others", STANDARD, 10)
    queue.flow.move("short", STANDARD, queue.now_s)
    turns = queue.go()
    assert [turn.ticket.entry.entry_id for turn in turns] == ["short", "short of others"]
    assert [turn.by_reservation for turn in turns] == [True, False]


def test_room_that_is_kept_for_one_is_not_kept_for_the_next() -> None:
    queue = Queue()
    for number in range(2):
        queue.arrive(f"running {number}", INTERACTIVE, 300, tenant="other")
    assert len(queue.go()) == 2
    queue.arrive("first", STANDARD, 600, tenant="a", reserved=1.0)
    queue.arrive("second", STANDARD, 450, tenant="b", reserved=1.0)
    queue.arrive("small", INTERACTIVE, 50, tenant="other")
    assert queue.names() == []
    queue.end("running 0")
    assert queue.names() == ["first"], "not the second, which needs less"


@pytest.mark.parametrize("policy", ["vtc", "fcfs", "drr"])
def test_who_ages_at_the_same_look_joins_by_arrival(policy: str) -> None:
    """The standard one's time had come first, but the batch one arrived first."""
    queue = Queue(LaneRule(100), policy=policy, ageing_s=(math.inf, 4.0, 7.0))
    queue.now_s = 2.0
    queue.arrive("batch", BATCH, 150)
    queue.now_s = 5.5
    queue.arrive("standard", STANDARD, 150)
    queue.now_s = 17.5
    assert queue.names() == ["batch", "standard"]


def test_a_turn_that_was_decided_elsewhere_has_the_same_books() -> None:
    queue = Queue(controller=Mirror)
    queue.arrive("one", STANDARD, 100)
    queue.arrive("two", STANDARD, 100)
    assert isinstance(queue.flow, Mirror)
    for is_first in (True, False):
        turn = queue.flow.admit("two", queue.replicas[0], INTERACTIVE, 5.0, reason=Reason.ORDER)
        assert (turn is not None) == is_first
    assert "two" in queue.flow.in_flight
    assert "one" not in queue.flow.in_flight
    queue.flow.check(5.0)
    assert queue.flow.placement.load("a").sequences == [1, 0, 0]
    queue.end("two")
    assert queue.names() == ["one"]


def test_who_is_moved_keeps_its_arrival_and_changes_the_lane_with_the_tier() -> None:
    queue = Queue(LaneRule(batch_share=0.25))
    for name in ("a", "b", "c"):
        queue.arrive(name, BATCH, 100)
    assert queue.names() == ["a"]
    moved = queue.flow.move("c", STANDARD, queue.now_s)
    assert moved is not None
    assert moved.entry.arrived_s == 3.0
    assert queue.flow.queue.queued_by_tier() == [0, 1, 1]
    assert queue.names() == ["c"]
    assert queue.flow.move("c", BATCH, queue.now_s) is None, "it runs"
    assert queue.flow.queue.place("b")[0] == BATCH


def test_a_reservation_for_a_tier_passes_over_requests_that_aged_into_its_band() -> None:
    """By the tier that was asked for, of which a move makes another one."""
    queue = Queue(ageing_s=(math.inf, math.inf, 10.0))
    for number in range(4):
        queue.arrive(f"running {number}", INTERACTIVE, 100, "other")
    assert len(queue.go()) == 4
    for name in ("aged", "moved"):
        queue.arrive(name, BATCH, 100, reserved=1e6, reserved_tier=INTERACTIVE)
    queue.now_s += 30.0
    assert queue.names() == []
    assert queue.flow.queue.place("aged")[0] == INTERACTIVE
    queue.flow.move("moved", INTERACTIVE, queue.now_s)
    queue.arrive("other", INTERACTIVE, 1, "other")
    queue.end("running 0")
    (turn,) = queue.go()
    assert (turn.ticket.entry.entry_id, turn.by_reservation) == ("moved", True)
    queue.end("running 1")
    queue.now_s += 30.0
    turns = {turn.ticket.entry.entry_id: turn.by_reservation for turn in queue.go()}
    assert turns["aged"] is False
