"""Gateways that share a queue have one control loop: who decides, what is in force, and what a late one may.

Real sessions, the real script and a real Redis; the clocks are virtual, and those of gateways disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import redis
import redis.asyncio

from gateway.dispatch.control_feed import ControlFeed
from gateway.flow.control_rules import REVERSAL_S, Control, ControlMode
from gateway.flow.deadline_check import FIRM
from gateway.flow.knobs import DEFAULT_BOUNDS, Knob
from gateway.flow.shared.control_session import IN_FORCE_S, LOCK_S
from tests.support.control_pool import ControlRoom, LoopGateway, observed
from tests.unit.gateway.pools.test_control_loop import snapshot_of
from tests.unit.gateway.pools.test_knobs_turn import Load

NOON_S = 1_700_136_020.0
LOOK_S = 2.0
FULL = observed(kv=0.99)


@pytest.fixture
def room(redis_url: str) -> Iterator[ControlRoom]:
    with redis.Redis.from_url(redis_url) as client:
        yield ControlRoom(client)


def gateway(room: ControlRoom, name: str, clock_s: float = 0.0, **bounds: float) -> LoopGateway:
    changed = {
        knob: replace(each, highest=bounds.get(knob.value, each.highest))
        for knob, each in DEFAULT_BOUNDS.items()
    }
    return LoopGateway(room, name, Control(ControlMode.ACTING, changed), clock_s)


def pair(room: ControlRoom) -> tuple[LoopGateway, LoopGateway]:
    """Two gateways that have looked once; the first one decides."""
    east, west = gateway(room, "east", -NOON_S), gateway(room, "west", 5_000.0)
    east.look(NOON_S)
    west.look(NOON_S)
    assert (east.session.is_holder, west.session.is_holder) == (True, False)
    return east, west


def test_the_first_decides_by_all_they_see_and_the_other_follows_within_one_look(room: ControlRoom) -> None:
    east, west = pair(room)
    assert east.lines == ["this gateway decides (term 1): it is the first"]
    assert west.lines == ["east decides (term 1), and this gateway follows it"]
    assert west.look(NOON_S + LOOK_S, FULL) == [], "it tells what it sees, and decides nothing"
    moves = east.look(NOON_S + LOOK_S)
    assert {move.knob for move in moves} >= {Knob.LOOKAHEAD, Knob.BATCH_CAP}, "by what the other one sees"
    assert west.control.in_force[Knob.LOOKAHEAD] == 2
    assert west.look(NOON_S + 2 * LOOK_S) == []
    assert west.control.in_force == east.control.in_force
    assert west.control.in_force[Knob.LOOKAHEAD] == 1
    told = [(move.knob, move.before, move.after, move.reason) for move in west.control.moves]
    assert told == [(move.knob, move.before, move.after, move.reason) for move in moves]
    assert all(abs(move.at_s - 5_000.0 - NOON_S - LOOK_S) < 1e-3 for move in west.control.moves), "own clock"


def test_shares_weigh_by_arrivals(room: ControlRoom) -> None:
    east, west = pair(room)
    west.look(NOON_S + 1, observed(late=0.0, arrivals=99.0))
    assert east.look(NOON_S + 2, observed(late=1.0, arrivals=1.0)) == [], "one in a hundred"
    west.look(NOON_S + 3, observed(late=0.2, arrivals=99.0))
    assert [move.knob for move in east.look(NOON_S + 4, observed(arrivals=1.0))] == [Knob.ADMISSION]


def test_a_dead_holder_is_named_and_another_goes_on_from_the_knobs_in_force(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, FULL)
    west.look(NOON_S + 3)
    west.look(NOON_S + 1 + LOCK_S - 0.1)
    assert not west.session.is_holder, "its lock has not ended"
    west.look(NOON_S + 1 + LOCK_S, FULL)
    assert (west.session.is_holder, west.session.term) == (True, 2)
    assert west.lines[-1] == (
        "east, which decided, has said nothing for 6.0 s: this gateway decides (term 2), and goes on from the"
        " knobs in force"
    )
    assert west.control.in_force[Knob.LOOKAHEAD] == 0, "one step further"


def test_a_late_holder_changes_nothing_and_follows(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, FULL)
    west.look(NOON_S + 20)
    in_force = west.control.in_force
    assert west.session.term == 2
    # It hung in the middle of a look: it has decided, and says so now.
    east.control.look(FULL, 21.0)
    late = east.session.words(observed(), 21.0)
    assert late.decided
    answer = room.say(late, NOON_S + 21)
    assert answer is not None
    assert (answer.is_stored, answer.holder, answer.term) == (False, "west", 2)
    assert east.look(NOON_S + 22) == []
    assert east.lines[-1] == "west has decided since this gateway was silent: this one follows it"
    assert east.control.in_force == in_force
    west.look(NOON_S + 23)
    assert west.control.in_force == in_force


def test_a_late_holder_that_is_elected_again_goes_on_from_what_the_other_decided(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, FULL)
    west.look(NOON_S + 8, FULL)
    assert (west.session.term, west.control.in_force[Knob.LOOKAHEAD]) == (2, 0)
    # West dies as well; what east has is older.
    assert east.control.in_force[Knob.LOOKAHEAD] == 1
    east.look(NOON_S + 16)
    assert (east.session.is_holder, east.session.term) == (True, 3)
    assert east.control.in_force == west.control.in_force


def test_what_was_decided_and_not_kept_is_taken_back(room: ControlRoom) -> None:
    east, _ = pair(room)
    before, moves = east.control.in_force, list(east.control.moves)
    assert east.look(NOON_S + 1, FULL, answers=1) == [], "the answer to its decision is lost"
    assert (east.control.in_force, list(east.control.moves)) == (before, moves)
    assert [move.at_s for move in east.look(NOON_S + 3, FULL)] == [3.0] * 4


def test_no_knob_turns_back_sooner_for_a_hand_over(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, observed(kv=0.99, spread=2.0))
    moved = {move.knob for move in east.control.moves}
    back: list[tuple[float, Knob]] = []
    # The one that decides dies at once; what it knew of turning back must not die with it.
    for second in range(8, 400, 2):
        now_s = NOON_S + second
        for each in (west,) if second % 200 < 100 else (east,):
            back += [(second, move.knob) for move in each.look(now_s)]
    assert {knob for _, knob in back} == moved
    turned_s = [at_s for at_s, _ in back]
    assert all(later - earlier >= REVERSAL_S for earlier, later in pairwise(turned_s))
    assert turned_s[0] >= 1 + 2 * REVERSAL_S, "nor before its time"
    assert sum("said nothing" in line for line in west.lines) > 1, "it was handed over and over"


def test_an_overload_lingers_over_a_hand_over(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, observed(late=0.5))
    assert east.control.in_force[Knob.ADMISSION] == FIRM
    for second in range(8, 200, 2):
        west.look(NOON_S + second)
    assert west.control.in_force[Knob.ADMISSION] == FIRM, "bursts come again"


def test_one_that_leaves_is_followed_at_once(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, FULL)
    room.script(keys=room.keys, args=east.session.leaves().arguments(round((NOON_S + 1) * 1e6)))
    west.look(NOON_S + 2)
    assert (west.session.is_holder, west.control.in_force[Knob.LOOKAHEAD]) == (True, 1)


def test_without_redis_knobs_stay_for_a_while_and_rest_then_or_one_decides_alone(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, FULL)
    west.look(NOON_S + 2)
    room.is_away = True
    for second in range(3, 2 + int(IN_FORCE_S), 2):
        assert west.look(NOON_S + second) == []
    assert west.control.in_force[Knob.LOOKAHEAD] == 1
    assert [move.reason for move in west.look(NOON_S + 3 + IN_FORCE_S)][:1] == [
        "Redis has not answered for 30 s"
    ]
    assert west.control.in_force == {knob: each.rest for knob, each in DEFAULT_BOUNDS.items()}
    west.look(NOON_S + 5 + IN_FORCE_S)
    assert [line for line in west.lines if "Redis" in line] == [
        "Redis has not answered for 30 s: all knobs rest"
    ], "once"
    assert {move.knob for move in east.look(NOON_S + 3, FULL, alone=True)} >= {Knob.LOOKAHEAD}
    assert east.lines[-1] == "Redis does not answer: this gateway decides for itself"
    assert east.control.in_force[Knob.LOOKAHEAD] == 0
    room.is_away = False
    east.look(NOON_S + 4, FULL)
    assert (east.session.is_holder, east.session.term) == (True, 2)


def test_a_redis_that_forgot_everything_moves_no_knob(room: ControlRoom) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, FULL)
    west.look(NOON_S + 2)
    in_force = east.control.in_force
    room.client.delete(*room.keys)
    west.look(NOON_S + 3)
    assert (west.session.is_holder, west.session.term) == (True, 1)
    east.look(NOON_S + 4)
    assert east.control.in_force == west.control.in_force == in_force


def test_what_is_too_old_is_not_in_force(room: ControlRoom) -> None:
    east, _ = pair(room)
    east.look(NOON_S + 1, FULL)
    late = gateway(room, "late")
    late.look(NOON_S + 2 + IN_FORCE_S)
    assert late.control.in_force == {knob: each.rest for knob, each in DEFAULT_BOUNDS.items()}
    assert late.lines[-1].endswith("this gateway decides (term 2), and begins at rest")


def test_a_follower_keeps_its_own_bounds(room: ControlRoom) -> None:
    east, west = pair(room)
    narrow = gateway(room, "narrow", prefix_weight=1.0)
    west.look(NOON_S + 1, observed(hits=0.9))
    east.look(NOON_S + 1, observed(hits=0.9))
    narrow.look(NOON_S + 2)
    assert east.control.in_force[Knob.PREFIX_WEIGHT] == 1.5
    assert narrow.control.in_force[Knob.PREFIX_WEIGHT] == 1.0


@pytest.mark.parametrize("word", [b"no state", b"{}", b'{"values": 3}'])
def test_a_word_that_is_not_understood_changes_nothing(room: ControlRoom, word: bytes) -> None:
    east, west = pair(room)
    east.look(NOON_S + 1, FULL)
    west.look(NOON_S + 2)
    room.client.hset(room.keys[0], "word", word)
    assert west.look(NOON_S + 3) == []
    assert west.control.in_force == east.control.in_force
    room.client.hset(room.keys[1], "west", msgspec.msgpack.encode([int((NOON_S + 4) * 1e6), word.decode()]))
    assert east.look(NOON_S + 4, FULL), "by what it sees itself"


def test_a_look_takes_one_round_trip_and_one_more_where_something_is_decided(room: ControlRoom) -> None:
    east, west = pair(room)
    room.words.clear()
    east.look(NOON_S + 1)
    west.look(NOON_S + 1)
    assert len(room.words) == 2
    east.look(NOON_S + 3, FULL)
    assert len(room.words) == 4
    assert max(len(each.decided) + len(each.seen) for each in room.words) < 4_096
    assert room.client.hlen(room.keys[1]) == 2
    west.look(NOON_S + 30)
    assert room.client.hkeys(room.keys[1]) == [b"west"], "of gateways that are gone nothing is kept"


def test_knobs_of_the_queue_stand_where_the_turns_are_given(room: ControlRoom) -> None:
    east, _ = pair(room)
    east.look(NOON_S + 1, FULL)
    packed = room.client.hget(room.keys[2], "knobs")
    knobs = msgspec.msgpack.decode(packed)
    assert knobs.pop("until_us") == round((NOON_S + 1 + IN_FORCE_S) * 1e6)
    assert knobs == {
        "batch_cap": 0.875, "lookahead": 1, "ageing": 1, "batch_share": 1, "prefix_weight": 1,
        "long_share": 0.5,
    }  # fmt: skip


# ---------------------------------------------------------------- whole loops, by the server's clock


async def test_every_gateway_turns_its_own_knobs_and_says_it_again_to_engines(redis_url: str) -> None:
    client: Any = redis.asyncio.Redis.from_url(redis_url)
    feeds = [ControlFeed(client, "fairgate", "pool", name) for name in ("east", "west")]
    east, west = (Load(feed=feed) for feed in feeds)
    for each in (east, west):
        assert await each.loop.turn(0.0) == []
    assert (east.loop.describe()["holder"], west.loop.describe()["holder"]) == ("east", "east")
    assert (east.loop.figures().decides, west.loop.figures().decides) == (True, False)
    west.engine.snapshot = snapshot_of(99)
    assert await west.loop.turn(2.0) == []
    assert {move.knob for move in await east.loop.turn(2.0)} >= {Knob.TOKEN_BUDGET, Knob.BATCH_CAP}
    assert await west.loop.turn(4.0) == []
    for each in (east, west):
        assert (each.flow.placement.window.batch_cap, each.budgets[-1]) == (0.875, 0.875)
    assert (sum(east.loop.moved.values()), sum(west.loop.moved.values())) == (4, 0), "one decided"
    said = len(west.budgets)
    await west.loop.turn(6.0)
    assert west.budgets[said:] == [0.875], "as an engine may have lost who said it"
    # It leaves: no lock has to end first.
    await east.loop.leave()
    assert await east.loop.turn(8.0) == [], "it looks no more"
    await west.loop.turn(8.0)
    assert (west.loop.describe()["holder"], west.loop.describe()["term"]) == ("west", 2)
    assert west.flow.placement.window.batch_cap <= 0.875
    await client.aclose()


@pytest.mark.parametrize("mode", [ControlMode.OFF, ControlMode.ADVICE])
async def test_where_a_table_says_that_knobs_rest_all_have_them_there_without_acting(
    redis_url: str, mode: ControlMode
) -> None:
    client: Any = redis.asyncio.Redis.from_url(redis_url)
    east, west = (
        Load(feed=ControlFeed(client, "fairgate", "pool", name), mode=mode) for name in ("east", "west")
    )
    await east.loop.turn(0.0)
    assert not await client.exists("fairgate:flow:{pool}:control"), "without one there is nothing to agree on"
    for each in (east, west):
        each.loop.learned.is_wanted = True
        await each.loop.turn(2.0)
    east.loop.control.rest_at({Knob.LONG_SHARE: 0.25}, "a table", 3.0)
    east.engine.snapshot = snapshot_of(99)
    advised = await east.loop.turn(4.0)
    assert bool(advised) == (mode is ControlMode.ADVICE)
    assert not any(move.is_made for move in advised)
    await west.loop.turn(4.0)
    for each in (east, west):
        assert each.flow.knobs.long_share == 0.25
        assert (each.flow.placement.window.batch_cap, set(each.budgets)) == (1.0, {1.0}), (
            "advice alone moves nothing"
        )
    await client.aclose()
