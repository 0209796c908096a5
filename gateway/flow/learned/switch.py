"""Which macro-state a learned policy is in: looks situations up, and holds on to what it took on; and the
trend of arrivals, which a situation has.

Pure. A state is taken on when two looks in a row show it, and then held for a while, so that a load at a
border does not swing. What a table was not fitted on is left at once, to the actions of `hybrid`.
"""

from __future__ import annotations

from collections import deque
from math import floor

from gateway.flow.learned.actions import HYBRID, Actions
from gateway.flow.learned.macro_state import Situation, words
from gateway.flow.learned.table_file import LearnedTable

HOLDS_S = 10.0
"""The least time that a state, or `hybrid`, is held; leaving what was fitted ends it sooner."""
FEATURES = ("queued_per_place", "kv_share", "trend")
"""Those whose most a fit has seen."""
SHORT_S, LONG_S = 10, 60
"""The two times whose rates are compared, in whole seconds."""
LEAST_ARRIVALS = 10
"""In the longer time; with fewer there is too little to tell."""


class MacroStateSwitch:
    """One pool's macro-state. One writer: the caller that looks."""

    def __init__(self, table: LearnedTable) -> None:
        self.table = table
        self.lookups = 0
        self.switches = 0
        self.times_outside = 0
        self._state: int | None = None
        self._is_outside = False
        self._since_s = -float("inf")
        self._seen: int | None = None
        """None: outside, or there was none."""

    @property
    def state(self) -> int | None:
        """None: none yet, or outside of what was fitted."""
        return self._state

    @property
    def is_outside(self) -> bool:
        return self._is_outside

    @property
    def actions(self) -> Actions:
        entry = None if self._state is None else self.table.indexed[self._state]
        return HYBRID if entry is None else entry.actions

    def look(self, situation: Situation, now_s: float) -> tuple[Actions, str] | None:
        """Looks the situation up. The actions from now on and why, in words; None: nothing changed."""
        self.lookups += 1
        state, actions = self.table.look_up(situation)
        before, self._seen = self._seen, state if actions is not None else None
        if actions is None:
            if self._is_outside:
                return None
            self.times_outside += 1
            self._take(None, now_s)
            return (
                HYBRID,
                f"learned: outside of what the table was fitted on ({self._why(situation)}): hybrid",
            )
        if state == self._state or state != before or now_s - self._since_s < HOLDS_S:
            return None
        self._take(state, now_s)
        return actions, f"learned: {words(state)}"

    def _take(self, state: int | None, now_s: float) -> None:
        self._state, self._is_outside, self._since_s = state, state is None, now_s
        self.switches += 1

    def _why(self, situation: Situation) -> str:
        for feature in FEATURES:
            value, most = getattr(situation, feature), getattr(self.table.fitted, feature)
            if not value <= most:
                return f"{feature} {value:.4g}, at most {most:.4g} was"
        state, _ = self.table.look_up(situation)
        return f"it never was in the state: {words(state)}"


class ArrivalTrend:
    """Arrivals a second of the last `SHORT_S` seconds over those of the last `LONG_S`; 1: steady.

    Counts by whole second, the present one once it is over. Times must not go back.
    """

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()
        """Second and arrivals, of those seconds that had any."""
        self._first: int | None = None
        """The second of the very first arrival: before it there was nothing to compare with."""

    def arrived(self, now_s: float, requests: int = 1) -> None:
        second = floor(now_s)
        if self._first is None:
            self._first = second
        self._forget(second)
        if self._seconds and self._seconds[-1][0] >= second:
            last, count = self._seconds.pop()
            self._seconds.append((last, count + requests))
        else:
            self._seconds.append((second, requests))

    def value(self, now_s: float) -> float:
        """1.0 in the first `2 * SHORT_S` seconds, or with fewer than `LEAST_ARRIVALS` in the longer time."""
        second = floor(now_s)
        self._forget(second)
        known_s = 0 if self._first is None else min(LONG_S, second - self._first)
        whole = [(at, count) for at, count in self._seconds if at < second]
        total = sum(count for _, count in whole)
        if known_s < 2 * SHORT_S or total < LEAST_ARRIVALS:
            return 1.0
        recent = sum(count for at, count in whole if at >= second - SHORT_S)
        return (recent / SHORT_S) / (total / known_s)

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - LONG_S:
            self._seconds.popleft()
