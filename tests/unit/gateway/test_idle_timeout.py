"""The moving deadline: when it passes, and with how few timers."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, cast

import pytest

from gateway.asyncio_helpers import LOOK_S, IdleTimeout


class _Handle:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clockwork:
    """An event loop of timers alone, in virtual time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.set = 0
        self._timers: list[tuple[float, int, _Handle, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, work: Callable[[], None]) -> _Handle:
        self.set += 1
        handle = _Handle()
        heapq.heappush(self._timers, (when_s, self.set, handle, work))
        return handle

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._timers and self._timers[0][0] <= until_s:
            self.now_s, _, handle, work = heapq.heappop(self._timers)
            if not handle.is_cancelled:
                work()
        self.now_s = until_s


@pytest.fixture
def clock() -> Clockwork:
    return Clockwork()


def patience(clock: Clockwork, seconds: float) -> tuple[IdleTimeout, list[float]]:
    late: list[float] = []
    return IdleTimeout(cast(Any, clock), seconds, lambda: late.append(clock.now_s)), late


@pytest.mark.parametrize("seconds", [0.5, LOOK_S, 60.0])
def test_it_is_late_at_the_deadline_and_once(clock: Clockwork, seconds: float) -> None:
    _, late = patience(clock, seconds)
    clock.advance(seconds - 0.01)
    assert late == []
    clock.advance(100.0)
    assert late == [100.0 + seconds]


@pytest.mark.parametrize("seconds", [0.25, 2.0, LOOK_S + 1, 30.0])
def test_a_deadline_that_comes_nearer_is_kept(clock: Clockwork, seconds: float) -> None:
    waiting, late = patience(clock, 60.0)
    clock.advance(1.0)
    waiting.wait(seconds)
    clock.advance(200.0)
    assert late == [pytest.approx(101.0 + seconds)]


def test_what_comes_moves_the_deadline(clock: Clockwork) -> None:
    waiting, late = patience(clock, 5.0)
    for _ in range(10):
        clock.advance(4.5)
        waiting.wait(5.0)
    assert late == []
    clock.advance(5.5)
    assert late == [pytest.approx(100.0 + 10 * 4.5 + 5.0)]


def test_who_has_ended_is_never_late(clock: Clockwork) -> None:
    waiting, late = patience(clock, 5.0)
    waiting.end()
    clock.advance(50.0)
    assert late == []


def test_a_deadline_that_moves_often_takes_few_timers(clock: Clockwork) -> None:
    waiting, late = patience(clock, 60.0)
    for number in range(1_000):
        waiting.wait(60.0 if number % 2 else 10.0)
        clock.advance(0.01)
    assert late == []
    assert clock.set <= 1 + 10.0 / LOOK_S
