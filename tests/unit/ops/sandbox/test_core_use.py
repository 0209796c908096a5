"""How busy a machine was, from readings worked out by hand."""

from __future__ import annotations

import os

from ops.sandbox.core_use import CoreUse, core_use, longest_waited_share


def readings(*shares: float) -> list[CoreUse]:
    """One a second; in each second a core was wanted for half a second, and `share` of that waited for."""
    found = [CoreUse(100.0, 7.0, 3.0)]
    for share in shares:
        last = found[-1]
        found.append(CoreUse(last.at_s + 1, last.ran_s + 0.5 * (1 - share), last.waited_s + 0.5 * share))
    return found


def test_the_worst_window_counts_and_not_the_mean() -> None:
    uses = readings(0, 0, 0, 0.5, 0.75, 0.25, 0, 0, 0)
    assert longest_waited_share(uses, 3.0) == 0.5
    assert longest_waited_share(uses, 9.0) == 1.5 / 9


def test_shorter_than_a_window_says_nothing() -> None:
    assert longest_waited_share([]) is None
    assert longest_waited_share(readings(1, 1), 3.0) is None


def test_a_process_that_wanted_no_core_waited_for_none() -> None:
    idle = [CoreUse(float(at_s), 1.0, 1.0) for at_s in range(10)]
    assert longest_waited_share(idle, 3.0) is None


def test_a_process_that_is_gone_has_no_reading() -> None:
    assert core_use(2**22 + 1, 0.0) is None
    mine = core_use(os.getpid(), 5.0)
    assert mine is None or mine.ran_s >= 0.0, "None where the system does not count it"
