"""States and transitions of the circuit breaker."""

from __future__ import annotations

from gateway.upstream.health.breaker import Breaker, BreakerRule, BreakerState

RULE = BreakerRule(failures=3, first_open_s=2.0, longest_open_s=7.0, trials=2)


def opened(at_s: float = 0.0) -> Breaker:
    breaker = Breaker(RULE)
    for _ in range(RULE.failures):
        breaker.failed(breaker.begin(at_s), at_s)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker(RULE)
    for _ in range(RULE.failures - 1):
        breaker.failed(breaker.begin(0.0), 0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.succeeded(breaker.begin(0.0))
    for _ in range(RULE.failures - 1):
        breaker.failed(breaker.begin(0.0), 0.0)
    assert breaker.allows(0.0), "a success between them starts the count anew"
    breaker.failed(breaker.begin(0.0), 0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.allows(1.99)
    assert breaker.retry_in_s(0.5) == 1.5


def test_half_open_it_lets_few_through_and_the_first_success_closes_it() -> None:
    breaker = opened()
    assert breaker.state(2.0) is BreakerState.HALF_OPEN
    trials = []
    while breaker.allows(2.0) and len(trials) <= RULE.trials:
        trials.append(breaker.begin(2.0))
    assert len(trials) == RULE.trials
    breaker.succeeded(trials[0])
    assert breaker.state(2.0) is BreakerState.CLOSED
    breaker.failed(trials[1], 2.0)
    breaker.failed(trials[1], 2.0)
    breaker.failed(trials[1], 2.0)
    assert breaker.state(2.0) is BreakerState.CLOSED, "a call of before says nothing about now"


def test_a_failed_trial_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breaker = opened()
    now_s, pauses = 0.0, [breaker.retry_in_s(0.0)]
    for _ in range(4):
        now_s += breaker.retry_in_s(now_s)
        breaker.failed(breaker.begin(now_s), now_s)
        pauses.append(breaker.retry_in_s(now_s))
    assert pauses == [2.0, 4.0, 7.0, 7.0, 7.0]
    now_s += 7.0
    breaker.succeeded(breaker.begin(now_s))
    for _ in range(RULE.failures):
        breaker.failed(breaker.begin(now_s), now_s)
    assert breaker.retry_in_s(now_s) == 2.0, "after a success it begins with the short pause again"


def test_an_abandoned_call_gives_its_trial_back() -> None:
    breaker = opened()
    first, _ = breaker.begin(2.0), breaker.begin(2.0)
    assert not breaker.allows(2.0)
    breaker.abandoned(first)
    assert breaker.allows(2.0)


def test_a_success_of_a_call_begun_before_it_opened_does_not_close_it() -> None:
    breaker = Breaker(RULE)
    early = breaker.begin(0.0)
    for _ in range(RULE.failures):
        breaker.failed(breaker.begin(0.0), 0.0)
    breaker.succeeded(early)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_an_answer_that_fails_later_is_a_failure_of_now() -> None:
    breaker = opened()
    later = breaker.succeeded(breaker.begin(2.0))
    for _ in range(RULE.failures):
        breaker.failed(later, 3.0)
    assert breaker.state(3.0) is BreakerState.OPEN
