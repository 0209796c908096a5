"""Gateway sessions: which live, which are lost, and which owns a sequence."""

from __future__ import annotations

import pytest

from engine.core.step_service import ServiceShare
from engine.messages import PROTOCOL_VERSION, Hello, TenantService, TenantShare
from engine.process.sessions import GatewaySession, GatewaySessions, HelloRefused, Opened


def open_session(
    gateways: GatewaySessions, identity: bytes, gateway_id: str, now_s: float = 0.0
) -> GatewaySession:
    answer = gateways.hello(identity, Hello(gateway_id), now_s)
    assert isinstance(answer, Opened)
    return answer.session


def test_a_session_is_greeted_once_and_then_only_kept_alive() -> None:
    gateways = GatewaySessions(now_s=0.0)
    open_session(gateways, b"a/1", "a")
    assert gateways.hello(b"a/1", Hello("a"), 1.0) is None
    assert len(gateways.sessions) == 1


def test_a_session_is_lost_when_it_is_silent_too_long_and_any_message_counts_as_life() -> None:
    gateways = GatewaySessions(now_s=0.0, lost_s=3.0)
    session = open_session(gateways, b"a/1", "a")
    gateways.hear(b"a/1", 2.0)
    assert gateways.silent(4.9) == []
    assert gateways.silent(5.0) == []
    assert gateways.silent(6.0) == [session]


def test_a_session_is_kept_alive_by_its_secret_from_any_connection_until_it_ends() -> None:
    gateways = GatewaySessions(now_s=0.0, lost_s=3.0)
    first, second = open_session(gateways, b"a/1", "a"), open_session(gateways, b"b/1", "b")
    assert first.secret != second.secret
    for now_s in (2.0, 4.0, 6.0):
        gateways.alive(first.secret, now_s)
        gateways.alive("a guess", now_s)
        gateways.silent(now_s)
    assert gateways.silent(7.0) == [second]
    gateways.end(first)
    gateways.alive(first.secret, 8.0)
    assert gateways.unheard_s(8.0) == 2.0


def test_what_arrives_after_the_engine_itself_stood_still_counts_before_a_session_is_lost() -> None:
    gateways = GatewaySessions(now_s=0.0, lost_s=3.0)
    session = open_session(gateways, b"a/1", "a")
    assert gateways.silent(60.0) == [], "the engine has not turned for a minute, and looks once more"
    gateways.alive(session.secret, 60.1)
    assert gateways.silent(61.0) == []
    assert gateways.silent(63.5) == []
    assert gateways.silent(64.5) == [session]


def test_a_new_session_of_the_same_gateway_ends_the_older_one_at_once() -> None:
    gateways = GatewaySessions(now_s=0.0)
    older = open_session(gateways, b"a/1", "a")
    gateways.own(older, "one", "acme")
    answer = gateways.hello(b"a/2", Hello("a"), 0.1)
    assert isinstance(answer, Opened)
    assert answer.superseded is older
    assert not gateways.lives(older)
    assert gateways.unread(), "its sequence has no outcome yet"
    assert gateways.release("one") is older
    assert not gateways.unread()


def test_a_superseded_session_does_not_fight_back() -> None:
    gateways = GatewaySessions(now_s=0.0)
    open_session(gateways, b"a/1", "a")
    newer = open_session(gateways, b"a/2", "a")
    answer = gateways.hello(b"a/1", Hello("a"), 1.0)
    assert isinstance(answer, HelloRefused)
    assert answer.code == "superseded"
    assert gateways.lives(newer)
    gateways.end(newer)
    assert isinstance(gateways.hello(b"a/1", Hello("a"), 2.0), Opened), "the other process has gone"
    assert isinstance(gateways.hello(b"a/2", Hello("a"), 3.0), Opened), "and may come back as ever"


def test_sessions_of_different_gateways_live_side_by_side() -> None:
    gateways = GatewaySessions(now_s=0.0)
    open_session(gateways, b"a/1", "a")
    open_session(gateways, b"b/1", "b")
    assert gateways.live_gateway_ids == {"a", "b"}


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello("a", protocol_version=PROTOCOL_VERSION + 1), "protocol_version"),
        (Hello(""), "bad_hello"),
        (Hello("a" * 129), "bad_hello"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused_and_opens_nothing(hello: Hello, code: str) -> None:
    gateways = GatewaySessions(now_s=0.0)
    answer = gateways.hello(b"a/1", hello, 0.0)
    assert isinstance(answer, HelloRefused)
    assert answer.code == code
    assert gateways.sessions == []


def test_the_number_of_gateways_is_bounded_but_a_known_one_may_always_return() -> None:
    gateways = GatewaySessions(now_s=0.0, max_gateways=1)
    open_session(gateways, b"a/1", "a")
    answer = gateways.hello(b"b/1", Hello("b"), 0.0)
    assert isinstance(answer, HelloRefused)
    assert answer.code == "too_many_gateways"
    open_session(gateways, b"a/2", "a")


def test_the_engine_is_an_orphan_from_the_last_word_of_any_gateway_on() -> None:
    gateways = GatewaySessions(now_s=10.0)
    assert gateways.unheard_s(12.0) == 2.0
    session = open_session(gateways, b"a/1", "a", 20.0)
    gateways.end(session)
    assert gateways.unheard_s(21.0) == 1.0
    assert gateways.hear(b"a/1", 25.0) is None
    assert gateways.unheard_s(26.0) == 6.0


def test_each_gateway_is_told_of_its_own_tokens_and_one_of_each_lift() -> None:
    gateways = GatewaySessions(now_s=0.0)
    first = open_session(gateways, b"a/1", "a")
    second = open_session(gateways, b"b/1", "b")
    gateways.own(first, "one", "acme")
    gateways.own(second, "two", "acme")
    gateways.own(second, "three", "globex")
    acme = {"a": TenantService(10, 2), "b": TenantService(0, 1)}
    service = {
        "acme": ServiceShare(acme, serials={1: 16}, lifts={1: 7}),
        "globex": ServiceShare({}, serials={1: 5}, lifts={1: 5}),
        "left": ServiceShare({"c": TenantService(0, 1)}),
    }
    assert gateways.share_service(service) == {
        b"a/1": {"acme": TenantShare(10, 2, {1: 16}, {1: 7})},
        b"b/1": {"acme": TenantShare(0, 1, {1: 16}), "globex": TenantShare(0, 0, {1: 5}, {1: 5})},
    }
