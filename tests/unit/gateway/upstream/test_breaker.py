"""States and transitions of the circuit breaker, on virtual time."""

from __future__ import annotations

from gateway.upstream.health.breaker import Breaker, BreakerRule, BreakerState

RULE = BreakerRule(ask_every_s=1.0, first_open_s=2.0, longest_open_s=7.0)


def ask(breaker: Breaker, now_s: float, *, is_well: bool) -> None:
    assert breaker.ask_in_s(now_s) == 0.0
    breaker.asking(now_s)
    assert breaker.ask_in_s(now_s) is None, "one at a time"
    breaker.answered(is_well, now_s)


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(RULE)
    breaker.suspect()
    ask(breaker, at_s, is_well=False)
    return breaker


def test_failed_requests_alone_never_open_it() -> None:
    breaker = Breaker(RULE)
    assert breaker.ask_in_s(0.0) is None, "without a failure the server is not asked"
    for now_s in range(100):
        breaker.suspect()
        ask(breaker, now_s, is_well=True)
        assert breaker.is_closed
    breaker.suspect()
    assert breaker.state(100.0) is BreakerState.CLOSED


def test_however_many_fail_the_server_is_asked_once_a_second() -> None:
    breaker, asked = Breaker(RULE), []
    for tenth in range(50):
        breaker.suspect()
        if breaker.ask_in_s(tenth / 10) == 0.0:
            ask(breaker, tenth / 10, is_well=True)
            asked.append(tenth / 10)
    assert asked == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_it_opens_where_the_server_does_not_answer_and_waits_twice_as_long_each_time() -> None:
    breaker, now_s = opened(), 0.0
    pauses = [breaker.retry_in_s(0.0)]
    for _ in range(3):
        assert breaker.state(now_s) is BreakerState.OPEN
        now_s += breaker.retry_in_s(now_s)
        ask(breaker, now_s, is_well=False)
        pauses.append(breaker.retry_in_s(now_s))
    assert pauses == [2.0, 4.0, 7.0, 7.0]
    now_s += 7.0
    ask(breaker, now_s, is_well=True)
    breaker.suspect()
    ask(breaker, now_s + 1.0, is_well=False)
    assert breaker.retry_in_s(now_s + 1.0) == 2.0, "once it has answered it begins with the short pause again"


def test_half_open_nothing_passes_until_the_server_has_answered() -> None:
    breaker = opened()
    assert (breaker.state(1.99), breaker.ask_in_s(1.5)) == (BreakerState.OPEN, 0.5)
    assert (breaker.state(2.0), breaker.ask_in_s(2.0)) == (BreakerState.HALF_OPEN, 0.0)
    breaker.asking(2.0)
    assert not breaker.is_closed
    breaker.answered(True, 2.5)
    assert breaker.state(2.5) is BreakerState.CLOSED
    assert breaker.ask_in_s(9.0) is None


def test_what_fails_while_it_is_asked_is_a_suspicion_of_its_own() -> None:
    breaker = Breaker(RULE)
    breaker.suspect()
    breaker.asking(0.0)
    breaker.suspect()
    breaker.answered(True, 0.4)
    assert breaker.ask_in_s(0.4) == 0.6
