"""Back-off of tenants whose requests keep failing, on virtual time."""

from __future__ import annotations

import pytest

from gateway.dispatch.failing_tenants import BackOffRule, FailingTenants, TenantHeldOff

RULE = BackOffRule(free=3, first_s=1.0, longest_s=5.0, forget_after_s=60.0, most_tenants=2)
WHY = "it answered with status 500"


def held_off(at_s: float = 0.0) -> FailingTenants:
    failing = FailingTenants(RULE)
    assert [failing.failed("a", WHY, at_s) for _ in range(RULE.free)] == [False, False, True]
    return failing


def wait_s(failing: FailingTenants, tenant: str, now_s: float) -> float:
    """0: a request of it is let in."""
    try:
        failing.check(tenant, now_s)
    except TenantHeldOff as refused:
        return refused.retry_after_s
    return 0.0


def test_only_the_tenant_itself_waits_and_only_after_several_failures_in_a_row() -> None:
    failing = FailingTenants(RULE)
    for _ in range(5):
        failing.failed("a", WHY, 0.0)
        failing.failed("a", WHY, 0.0)
        failing.succeeded("a")
    assert wait_s(failing, "a", 0.0) == 0.0
    failing = held_off()
    assert (wait_s(failing, "a", 0.25), wait_s(failing, "b", 0.25)) == (0.75, 0.0)


def test_one_request_is_let_in_after_each_pause_and_its_failure_doubles_it() -> None:
    failing, now_s, pauses = held_off(), 0.0, []
    for _ in range(4):
        pause_s = wait_s(failing, "a", now_s)
        pauses.append(pause_s)
        now_s += pause_s
        assert wait_s(failing, "a", now_s) == 0.0
        assert wait_s(failing, "a", now_s) == pause_s, "the others wait for what becomes of it"
        assert not failing.failed("a", WHY, now_s), "told once"
    assert pauses == [1.0, 2.0, 4.0, 5.0]
    failing.succeeded("a")
    assert (wait_s(failing, "a", now_s), len(failing)) == (0.0, 0)


def test_failures_of_what_came_before_the_pause_do_not_lengthen_it() -> None:
    failing = held_off()
    for _ in range(50):
        failing.failed("a", WHY, 0.5)
    assert wait_s(failing, "a", 0.5) == 0.5


def test_it_is_forgotten_after_a_while_and_few_are_remembered() -> None:
    failing = held_off()
    assert (wait_s(failing, "a", 61.0), len(failing)) == (0.0, 0)
    failing = FailingTenants(RULE)
    for now_s in (0.0, 61.0, 122.0):
        assert not failing.failed("a", WHY, now_s), "long apart they are not in a row"
    failing = held_off()
    failing.failed("b", WHY, 0.0)
    failing.failed("c", WHY, 0.0)
    assert (wait_s(failing, "a", 0.0), len(failing)) == (0.0, 2)


def test_a_refusal_says_how_many_and_why() -> None:
    with pytest.raises(TenantHeldOff) as refused:
        held_off().check("a", 0.0)
    assert (refused.value.failures, refused.value.why) == (RULE.free, WHY)
