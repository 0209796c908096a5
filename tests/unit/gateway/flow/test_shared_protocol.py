"""Messages of a gateway to its pool, and its handling of the answers. Without Redis: answers are made
here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from engine.entry import QueueEntry
from engine.messages import TenantShare
from gateway.flow.controller import Ticket
from gateway.flow.shared import codec
from gateway.flow.shared.codec import GivenTurn, PoolReply, PoolRule, QueueRefusal
from gateway.flow.shared.mirror import Mirror
from gateway.flow.shared.protocol import PoolMessage, PoolSession
from gateway.flow.window import Replica
from tests.support.builders import flow_controller

REPLICAS = [Replica("engine-0", 4, 1000)]


def make_session() -> PoolSession:
    mirror = flow_controller(kind=Mirror)
    return PoolSession(mirror, PoolRule.of(mirror.settings, 10**7), 100)


def arrive(session: PoolSession, name: str, now_s: float = 0.0) -> None:
    ticket = Ticket(QueueEntry(name, "acme", now_s, 10, 10), 1, 20)
    assert session.mirror.enqueue(ticket, now_s) is None
    session.arrived(ticket)


def turn(name: str, life: int, number: int = 1) -> GivenTurn:
    return GivenTurn(name, life, "engine-0", 1, False, number, 0, 30_000_000, 31_000_000)


def answer(
    *turns: GivenTurn, status: str = "ok", refused: tuple[QueueRefusal, ...] = (), **more: Any
) -> bytes:
    fields = {"counters": [], "queued": [0] * 6, "falls": 0, "order": "vtc", "held_us": 0} | more
    return msgspec.msgpack.encode(
        PoolReply(status=status, epoch="e1", now_us=1, turns=list(turns), refused=list(refused), **fields)
    )


def said(message: PoolMessage | None) -> list[Any]:
    """Replicas, confirmed turns, acts but for replicas' lives, and the passage where there is one."""
    assert message is not None
    words: list[Any] = msgspec.msgpack.decode(message.packed)
    words[2] = [act for act in words[2] if act[0] != "lives"]
    return words


def joined(session: PoolSession) -> int:
    """It belongs to the pool; returns its life."""
    message = session.message(0.0, REPLICAS)
    assert message is not None
    session.answered(answer(), 0.0)
    return message.life


def asking(*names: str) -> tuple[PoolSession, int]:
    """These arrived, the pool was told of them and has not answered yet; and the session's life."""
    session = make_session()
    life = joined(session)
    for name in names:
        arrive(session, name)
    session.message(0.0, REPLICAS)
    return session, life


def test_the_first_word_is_to_join_with_all_that_waits() -> None:
    session = make_session()
    arrive(session, "r1", 1.0)
    assert session.is_urgent
    message = session.message(3.5, REPLICAS)
    replicas, confirmed, acts, passage = said(message)
    assert replicas == [{"id": "engine-0", "max_sequences": 4, "kv_tokens": 1000, "pauses": True}]
    assert confirmed == []
    assert [(act[0], act[1], act[2]["waited_us"]) for act in acts] == [("arrive", "r1", 2_500_000)]
    assert passage["order"] == "vtc"
    assert passage["returns"] is False
    assert session.message(3.5, REPLICAS) is None, "one message is out at a time"


def test_what_was_not_answered_is_repeated_as_it_was() -> None:
    session = make_session()
    joined(session)
    arrive(session, "r1")
    first = session.message(0.0, REPLICAS)
    session.failed()
    arrive(session, "r2")
    assert session.message(1.0, REPLICAS) == first
    session.answered(answer(), 1.0)
    second = session.message(1.0, REPLICAS)
    assert [act[1] for act in said(second)[2]] == ["r2"]
    assert first is not None
    assert second is not None
    assert second.number == first.number + 1


def test_who_does_not_belong_any_more_joins_under_another_life_with_all_that_it_has() -> None:
    session, life = asking("runs", "waits")
    session.answered(answer(turn("runs", life)), 0.0)
    session.message(1.0, REPLICAS)
    session.answered(answer(status="lost"), 1.0)
    message = session.message(2.0, REPLICAS)
    assert message is not None
    assert message.life == life + 1
    _, _, acts, passage = said(message)
    assert [(act[0], act[1]) for act in acts] == [("run", "runs"), ("arrive", "waits")]
    assert acts[0][2]["running"]["replica"] == "engine-0"
    assert passage["returns"] is True


def test_a_turn_is_heard_once_confirmed_and_void_in_another_life() -> None:
    session, life = asking("r1", "r2")
    heard = session.answered(answer(turn("r1", life), turn("r2", life - 1)), 0.0)
    assert [(each.ticket.entry.entry_id, each.replica_id) for each in heard.turns] == [("r1", "engine-0")]
    assert heard.turns[0].counter == 31_000_000
    assert session.published(msgspec.msgpack.encode([turn("r1", life)]), 0.0) == []
    assert said(session.message(0.0, REPLICAS))[1] == ["r1"]
    assert not session.has_news or session.is_out


def test_counters_that_fell_in_the_pool_are_whole_here_in_both_views_of_a_turn() -> None:
    session, life = asking("r1")
    given = structs.replace(turn("r1", life), falls=2, had=5, heard=11, engine_life="engine/1")
    (dispatch,) = session.answered(answer(given, counters=[("acme", 7)], falls=2), 0.0).turns
    assert (dispatch.counter, dispatch.had) == (31_000_000 + 2 * codec.FALL, 5 + 2 * codec.FALL)
    assert (dispatch.heard, dispatch.engine_life) == (11, "engine/1")
    assert session.mirror.counters.value("acme") == 7 + 2 * codec.FALL


def test_a_turn_for_who_left_is_confirmed_and_ends_with_the_cancellation() -> None:
    session, life = asking("r1")
    assert session.mirror.cancel("r1", 0.0)
    session.left("r1")
    assert session.answered(answer(turn("r1", life)), 0.0).turns == []
    _, confirmed, acts = said(session.message(0.0, REPLICAS))
    assert confirmed == ["r1"]
    assert acts == [["cancel", "r1"]]


def test_only_progress_that_changes_the_books_is_said_and_only_the_latest() -> None:
    session, life = asking("r1")
    session.answered(answer(turn("r1", life)), 0.0)
    session.progressed("r1", 10, 1)
    assert not session.has_news, "as was predicted"
    for emitted in (11, 12, 13):
        session.progressed("r1", emitted, 1)
    assert not session.is_urgent
    assert said(session.message(0.0, REPLICAS))[2] == [["progress", "r1", 13, 1]]
    session.answered(answer(), 0.0)
    session.progressed("r1", 14, 1)
    session.finished("r1", 10, 14)
    assert said(session.message(0.0, REPLICAS))[2] == [["finish", "r1", 38]]


def test_service_that_is_heard_of_goes_with_the_next_words_and_once() -> None:
    session, life = asking("runs")
    session.answered(answer(turn("runs", life)), 0.0)
    for serial in (7, 9):
        share = {"acme": TenantShare(3, 1, dict.fromkeys(range(3), serial), {1: 500})}
        session.mirror.heard("engine-0", "engine/1", share)
    assert not session.has_news, "no news by itself"
    _, _, acts = said(session.message(1.0, REPLICAS))
    serials = {"engine-0": ["engine/1", 9, 9, 9]}
    assert acts == [["had", "acme", 10_000_000, serials], ["lift", "acme", 1, 1000]]
    session.answered(answer(), 1.0)
    _, _, acts = said(session.message(2.0, REPLICAS))
    assert acts == []


def test_who_joins_again_says_what_running_requests_had() -> None:
    session, life = asking("runs")
    session.answered(answer(turn("runs", life)), 0.0)
    session.mirror.heard("engine-0", "", {"acme": TenantShare(3, 1, dict.fromkeys(range(3), 7))})
    session.message(1.0, REPLICAS)
    session.answered(answer(status="lost"), 1.0)
    _, _, acts, _ = said(session.message(2.0, REPLICAS))
    assert acts[1] == ["had", "acme", 5_000_000, {"engine-0": ["", 7, 7, 7]}]


def test_what_is_put_back_ends_and_waits_in_one_act_and_its_turn_of_before_is_void() -> None:
    session, life = asking("r1")
    session.answered(answer(turn("r1", life, 7)), 0.0)
    rest = session.mirror.put_back("r1", 4, 2, 1.0)
    session.finished("r1", 4, 2, rest)
    assert session.is_urgent
    _, confirmed, [act] = said(session.message(1.0, REPLICAS))
    assert confirmed == ["r1"]
    assert act[:3] == ["put_back", "r1", 8]
    assert (act[3]["cost"], act[3]["predicted"]) == (6 + 2 * 8, 8)
    assert session.published(msgspec.msgpack.encode([turn("r1", life, 7)]), 1.0) == []
    heard = session.answered(answer(turn("r1", life, 8)), 1.0)
    assert [each.ticket for each in heard.turns] == [rest]
    assert said(session.message(1.0, REPLICAS))[1] == ["r1"]


def test_without_an_engine_what_is_put_back_has_only_ended_and_comes_last_to_the_front_with_one() -> None:
    session, life = asking("r1", "r2", "waits")
    session.answered(answer(turn("r1", life, 1), turn("r2", life, 2)), 0.0)
    session.message(0.5, [])
    session.answered(answer(), 0.5)
    for name in ("r2", "r1"):
        rest = session.mirror.put_back(name, 0, 0, 1.0 + (name == "r1"))
        session.finished(name, 0, 0, rest)
    assert said(session.message(2.0, []))[2] == [["finish", "r2", 0], ["finish", "r1", 0]]
    session.answered(answer(), 2.0)
    acts = said(session.message(3.0, REPLICAS))[2]
    assert [(act[1], "front" in act[2]) for act in acts] == [("waits", False), ("r2", True), ("r1", True)]


def test_members_that_go_and_come_back_are_said_once_first_and_again_to_who_lost_all() -> None:
    session = make_session()
    session.member("engine-0", is_out=False)
    joined(session)
    session.member("engine-0", is_out=False)
    assert not session.has_news
    session.member("engine-1", is_out=True)
    session.member("engine-1", is_out=True)
    arrive(session, "r1")
    assert session.is_urgent
    for status in ("lost", "ok"):
        out, arrives = said(session.message(0.0, REPLICAS))[2]
        assert (out, arrives[:2]) == (["member", "engine-1", True], ["arrive", "r1"])
        session.answered(answer(status=status), 0.0)
    session.member("engine-1", is_out=False)
    assert said(session.message(0.0, REPLICAS))[2] == [["member", "engine-1", False]]


def test_another_life_of_an_engine_ends_the_one_before_and_a_lost_link_does_not() -> None:
    session = make_session()
    one, other = (replace(REPLICAS[0], life=life) for life in ("one", "other"))
    for replicas, expected in (
        ([one], [["lives", {"engine-0": "one"}]]),
        ([one], []),
        ([one, Replica("engine-1", 1, 10)], [["lives", {"engine-0": "one", "engine-1": ""}]]),
        ([other], [["lives", {"engine-0": "other"}], ["member", "engine-0", True, "one"]]),
    ):
        assert session.sees_others(replicas) is bool(expected)
        message = session.message(0.0, replicas)
        assert message is not None
        assert msgspec.msgpack.decode(message.packed)[2] == expected
        session.answered(answer(), 0.0)


def test_turns_are_taken_in_the_order_in_which_they_were_given() -> None:
    session, life = asking("a", "b", "c")
    # The pool lists them by name. Each charges its tenant, and an engine goes by the last word that it hears.
    given = [turn("a", life, 3), turn("b", life, 1), turn("c", life, 2)]
    heard = session.answered(answer(*given), 0.0).turns
    assert [each.ticket.entry.entry_id for each in heard] == ["b", "c", "a"]


def test_without_an_engine_nothing_of_it_waits_in_the_pool() -> None:
    session = make_session()
    joined(session)
    arrive(session, "r1")
    assert session.sees_others([])
    assert said(session.message(0.0, []))[2] == []
    session.answered(answer(), 0.0)
    arrive(session, "r2")
    assert said(session.message(0.0, []))[2] == []
    session.answered(answer(), 0.0)
    assert [act[1] for act in said(session.message(1.0, REPLICAS))[2]] == ["r1", "r2"]


def test_a_refusal_ends_the_wait() -> None:
    session, _ = asking("r1")
    heard = session.answered(answer(refused=(QueueRefusal("r1", True, 10, 2.5),)), 0.0)
    [(name, full)] = heard.refused
    assert (name, full.of_tenant, full.limit, full.retry_after_s) == ("r1", True, 10, 2.5)
    assert len(session.mirror) == 0


def test_a_pools_keys_share_one_hash_tag() -> None:
    names = codec.keys("fairgate", "p1")
    assert len(set(names)) == codec.NUM_KEYS
    assert all("{p1}" in name for name in names)
    assert "{p1}" in codec.channel("fairgate", "p1", "gateway")
