"""When places of engines come free one after the other, while all of them are taken.

For requests that come in a burst between two replays. Their lengths are spread over their distribution, since
the first place that comes free is that of the shortest answer. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import NormalDist

from engine.forecast.wait.replayed_engine import EngineLoad

Z90 = 1.2816
WIDEST = 1.0
"""Of the deviation of a length's logarithm: answers have an end, the tail of a lognormal has none."""
MAX_REMEMBERED = 64
"""Distributions of lengths whose ends are kept."""
_NORMAL = NormalDist()


@dataclass(slots=True)
class EnginePlaces:
    """The places of all engines together, for requests of one tier."""

    count: int
    replicas: int
    dispatched: int
    """Sequences that are there, those included that wait for a place."""
    steps_left: Sequence[int]
    """Of the sequences that hold a place, the next to end first."""
    load: EngineLoad
    """Of one of the engines: they are alike."""
    _ends: dict[tuple[int, int], tuple[list[float], list[float]]] = field(default_factory=dict, repr=False)
    """By p50 and p90 of an answer: the first ends, in order, and a heap of the next one on each place."""

    def free_after_s(self, ends: int, busy: int, input_tokens: int, output_tokens: tuple[int, int]) -> float:
        """Seconds until so many of the sequences have ended, of those that hold places now and of requests
        like these (one prompt's tokens; p50 and p90 of one answer) which take all places that come free.
        `busy`: sequences that hold or want a place."""
        if ends <= 0 or self.count < 1:
            return 0.0
        steps = self._steps_until(ends, output_tokens)
        running = min(busy, self.count) / self.replicas
        context = running * (input_tokens + output_tokens[0] / 2)
        step_s = self.load.token_s(round(running), round(context))
        # Prompts are computed within steps, and make these longer for all.
        prompts = min(max(0, busy - len(self.steps_left)), self.count - len(self.steps_left) + ends)
        return steps * step_s + prompts * input_tokens * self.load.step_time.per_token_s / self.replicas

    def _steps_until(self, ends: int, output_tokens: tuple[int, int]) -> float:
        """Steps until so many sequences have ended. Each place serves a mean answer after its first."""
        p50, p90 = max(1, output_tokens[0]), max(1, *output_tokens)
        spread = min(WIDEST, log(p90 / p50) / Z90)
        found = self._ends.get((p50, p90))
        if found is None:
            if len(self._ends) >= MAX_REMEMBERED:
                self._ends.clear()
            idle = self.count - len(self.steps_left)
            fresh = [p50 * exp(spread * _NORMAL.inv_cdf((index + 0.5) / idle)) for index in range(idle)]
            found = self._ends[p50, p90] = [], sorted([*self.steps_left, *fresh])
        past, coming = found
        while len(past) < ends:
            past.append(coming[0])
            heapq.heapreplace(coming, coming[0] + p50 * exp(spread * spread / 2))
        return past[ends - 1]
