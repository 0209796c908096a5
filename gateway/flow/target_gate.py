"""Whom does a target keep out, and was the forecast right about those that it let in?

What the control loop turns and watches (`control.py`): how strict it is, how many would be late, and how many
were late though they were expected in time. Pure; one writer, whoever lets requests in.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.flow.early_refusal import LENIENT, TRIED_ONE_IN, TimesAhead, TooLate, out_of_reach
from gateway.recent_share import RecentShare


class TargetGate:
    """Of one pool."""

    def __init__(self) -> None:
        self.strictness = 0.0
        """Times what is expected, compared with targets; 0: nobody is refused for a target."""
        self.expected_late = RecentShare()
        """Of the last requests with a target, refused or not, those expected to miss it."""
        self.mistaken = RecentShare()
        """Of those that ended and were expected to keep their targets, those that missed one."""
        self._out_of_reach = 0

    def keeps_out(self, ahead: TimesAhead, targets_s: Mapping[str, float]) -> TooLate | None:
        """Why a request that arrives is refused; None: it may get in line."""
        self.expected_late.note(float(out_of_reach(ahead, targets_s, 1.0) is not None))
        late = out_of_reach(ahead, targets_s, self.strictness)
        if late is None:
            return None
        self._out_of_reach += 1
        return late if self._out_of_reach % TRIED_ONE_IN else None

    def learn(self, ahead: TimesAhead, targets_s: Mapping[str, float], *, missed: bool) -> None:
        """A request that was let in has ended, and has `missed` a target or kept all."""
        if out_of_reach(ahead, targets_s, LENIENT) is None:
            self.mistaken.note(float(missed))
