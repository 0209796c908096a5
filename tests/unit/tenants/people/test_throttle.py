"""Log-ins are slowed by name and by address, within bounds."""

from __future__ import annotations

import pytest

from tenants.people.throttle import (
    FORGET_S,
    FREE_BY_ADDRESS,
    FREE_BY_NAME,
    LONGEST_WAIT_S,
    LogInThrottle,
    network_of_address,
)

NOW_S = 1_000.0
ADDRESS = "192.0.2.1"


def fail(throttle: LogInThrottle, times: int, name: str = "ada", address: str = ADDRESS) -> float:
    """Attempts at one instant; how long the last of them is told to wait."""
    return [throttle.begin(name, address, NOW_S) for _ in range(times)][-1]


def test_some_are_free_and_each_further_one_waits_twice_as_long() -> None:
    throttle, now_s, waits = LogInThrottle(), NOW_S, []
    for _ in range(FREE_BY_NAME):
        assert throttle.begin("ada", ADDRESS, now_s) == 0
    for _ in range(9):
        wait_s = throttle.begin("ada", ADDRESS, now_s)
        waits.append(wait_s)
        assert throttle.begin("ada", ADDRESS, now_s + wait_s / 2) == pytest.approx(wait_s / 2)
        now_s += wait_s
        assert throttle.begin("ada", ADDRESS, now_s) == 0
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]


def test_of_a_hundred_at_once_five_are_let_through() -> None:
    throttle = LogInThrottle()
    waits = [throttle.begin("ada", ADDRESS, NOW_S) for _ in range(100)]
    assert waits.count(0) == FREE_BY_NAME
    assert max(waits) == 1.0, "those refused do not prolong the wait"


def test_an_address_is_slowed_over_many_names_and_a_name_over_many_addresses() -> None:
    throttle = LogInThrottle()
    waits = [throttle.begin(f"name-{each}", ADDRESS, NOW_S) for each in range(100)]
    assert waits.count(0) == FREE_BY_ADDRESS
    assert throttle.begin("new", "192.0.2.2", NOW_S) == 0
    waits = [throttle.begin("ada", f"198.51.100.{each}", NOW_S) for each in range(100)]
    assert waits.count(0) == FREE_BY_NAME


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("192.0.2.1", "192.0.2.1"),
        ("", ""),
        ("x" * 500, "x" * 128),
    ],
)
def test_an_ipv6_customer_is_one_address(address: str, network: str) -> None:
    assert network_of_address(address) == network


def test_a_good_log_in_frees_the_name_and_gives_the_address_one_back() -> None:
    throttle = LogInThrottle()
    assert fail(throttle, FREE_BY_NAME + 1) > 0
    throttle.succeeded("ada", ADDRESS)
    assert fail(throttle, 1) == 0, "the name begins anew"
    for each in range(FREE_BY_ADDRESS - FREE_BY_NAME):
        assert throttle.begin(f"guessed-{each}", ADDRESS, NOW_S) == 0
    assert throttle.begin("guessed", ADDRESS, NOW_S) > 0, "one good account opens no address for guesses"


def test_an_attempt_that_was_not_checked_does_not_count() -> None:
    throttle = LogInThrottle()
    for _ in range(10 * FREE_BY_ADDRESS):
        assert throttle.begin("ada", ADDRESS, NOW_S) == 0
        throttle.not_judged("ada", ADDRESS)
    assert throttle.entries == 0


def test_an_hour_later_all_is_forgotten() -> None:
    throttle = LogInThrottle()
    fail(throttle, 50)
    later_s = NOW_S + FORGET_S + 1
    assert [throttle.begin("ada", ADDRESS, later_s) for _ in range(FREE_BY_NAME)] == [0] * FREE_BY_NAME


def test_memory_is_bounded_and_a_flood_of_names_does_not_free_a_name_that_is_under_attack() -> None:
    throttle = LogInThrottle(most=100)
    fail(throttle, FREE_BY_NAME + 1)
    for each in range(5_000):
        throttle.begin("x" * 10_000 + str(each), f"10.0.{each // 256}.{each % 256}", NOW_S + 0.5)
        throttle.begin(f"name-{each}", f"10.1.{each // 256}.{each % 256}", NOW_S + 0.5)
        assert throttle.entries <= 200
    assert throttle.begin("ada", "192.0.2.77", NOW_S + 0.5) > 0
