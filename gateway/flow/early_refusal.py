"""Is it any use to put this request in line?

A request that cannot be answered in time only makes others wait, and its client hears of it late. So it is
refused at the gate when the forecast says that its turn would come after it expires in the queue, or its
answer after its deadline.

Judged by the median (p50): it is refused when it would miss more likely than not. By the 90th percentile up
to nine of ten that are refused would have been served in time; besides, the median is the replay itself,
while the p90 adds the spread of lengths to it. A saturated forecast is a lower bound: what misses by it
misses.
Pure: time is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class TimesAhead(Protocol):
    """What a forecast or an estimate says: (p50, p90) in seconds from its making."""

    @property
    def wait_s(self) -> tuple[float, float]: ...

    @property
    def e2e_s(self) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class TooLate:
    """Refused: it would not be in time. Carries what was promised and what is to be expected."""

    what: str
    """`wait`: its turn would come too late; `answer`: its last token would."""
    allowed_s: float
    """Seconds from now that there were; 0 for an instant that has passed."""
    expected_s: float
    """Median of what it would have taken."""
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
    """Why a request is refused at once; None: it may get in line.

    `expires_s` (its turn) and `deadline_s` (its complete answer) are instants of the clock of `now_s`. An
    instant that has passed refuses by itself; without a forecast (`ahead` None) nothing else does. What is
    expected is taken `factor` times: above 1 it refuses earlier.
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
