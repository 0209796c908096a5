"""Checks a forecast against deadlines and targets before a request is queued.

A request that cannot be answered in time only makes others wait. It is refused on arrival when by the
forecast its turn would come after it expires in the queue, or its answer after its deadline; and, where the
control loop says so, when it would miss a target (`out_of_reach`).

Deadlines are judged by the median (p50): a request is refused when it would miss more likely than not. By the
p90 up to nine of ten that are refused would have been served in time; besides, it adds the spread of lengths
to the replay. A saturated forecast is a lower bound: what misses by it misses. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

LENIENT = 0.5
"""Strictness that refuses only those whose 90th percentile is twice their target."""
FIRM = 1.1
"""Strictness under overload: room for the forecast's error; above it the engine begins to idle."""
STRICT = 1.5
"""The most that a learned table or the control loop may ask for."""
TRIED_ONE_IN = 20
"""One in this many refused by a target is admitted all the same, to keep the forecast tested."""

DOUBTED_ONE_IN = 8
"""As above, where the median keeps the target: a burst keeps the p90 high, and its end must be noticed."""


class TimesAhead(Protocol):
    """Times of a forecast or an estimate: (p50, p90) in seconds from its making."""

    @property
    def wait_s(self) -> tuple[float, float]: ...

    @property
    def ttft_s(self) -> tuple[float, float]: ...

    @property
    def e2e_s(self) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class TooLate:
    """A request would be late: what was allowed and what is expected."""

    what: str
    """`wait`: its turn would come too late; `first token` and `answer`: that would."""
    allowed_s: float
    """Seconds from now that there were; 0 for an instant that has passed. Of a target, the target."""
    expected_s: float
    """What it would have taken: of a deadline the median, of a target the 90th percentile."""
    retry_after_s: float
    """When it is worth another try, if nothing more arrives."""


def early_refusal(
    ahead: TimesAhead | None,
    *,
    now_s: float,
    expires_s: float = math.inf,
    deadline_s: float | None = None,
    factor: float = 1.0,
) -> TooLate | None:
    """Why a request is refused on arrival; None: it may be queued.

    `expires_s` (its turn) and `deadline_s` (its complete answer) are instants of the clock of `now_s`; one
    that has passed refuses even without a forecast (`ahead` None). `factor` multiplies what is expected.
    """
    limits = [("wait", expires_s)] + ([("answer", deadline_s)] if deadline_s is not None else [])
    for what, until_s in limits:
        allowed_s = until_s - now_s
        expected_s = 0.0
        if ahead is not None:
            expected_s = factor * (ahead.wait_s[0] if what == "wait" else ahead.e2e_s[0])
        if allowed_s <= 0 or expected_s > allowed_s:
            retry_after_s = max(1.0, expected_s - max(0.0, allowed_s))
            return TooLate(what, max(0.0, allowed_s), expected_s, retry_after_s)
    return None


def out_of_reach(
    ahead: TimesAhead | None, targets_s: Mapping[str, float], strictness: float
) -> TooLate | None:
    """The target that a request is expected to miss: `strictness` times the 90th percentile of what is
    expected is beyond it. None at 0, and without a forecast.

    Not by the median: under overload the queue grows to its limit, and a request at its end needs room for
    the forecast's error. `targets_s`: seconds by metric; only `ttft` and `e2e` are looked at.
    """
    if ahead is None or strictness <= 0:
        return None
    for metric, what, (_, expected_s) in (
        ("ttft", "first token", ahead.ttft_s),
        ("e2e", "answer", ahead.e2e_s),
    ):
        target_s = targets_s.get(metric, math.inf)
        if strictness * expected_s > target_s:
            return TooLate(what, target_s, expected_s, max(1.0, expected_s - target_s / strictness))
    return None


def is_doubtful(ahead: TimesAhead, targets_s: Mapping[str, float]) -> bool:
    """By the median a request would keep its targets."""
    return ahead.ttft_s[0] <= targets_s.get("ttft", math.inf) and ahead.e2e_s[0] <= targets_s.get(
        "e2e", math.inf
    )
