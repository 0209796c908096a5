"""Service differences between tenants while they waited.

Service is prompt tokens computed + 2 x output tokens, per weight. Looked at every `PERIOD_S` of virtual time:
two tenants count between two looks if each had a request waiting at the gateway throughout.

- *Service gap* (Sheng et al., OSDI 2024): the largest |W_f - W_g| over all intervals in which f and g both
  waited throughout; it should stay within 2U / min(weight), U the larger of the longest prompt and of twice
  the tokens that run at once.
- *Jain index* (Jain, Chiu and Hawe, 1984) of what each tenant got in those intervals over an equal part per
  weight of what all those got who waited: 1 where all get alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from ops.reporting import jain_index
from ops.simulate.pool import SimulatedPool

PERIOD_S = 0.25
MOST_TENANTS = 64
"""Of those that wait at one time: more are not compared (the work grows with the square)."""


@dataclass(slots=True)
class Fairness:
    """Watches one run: `look` is called after every decision."""

    period_s: float = PERIOD_S
    widest_gap: float = 0.0
    got: dict[str, float] = field(default_factory=dict)
    """Cost tokens per weight, by tenant, in intervals in which it and another waited throughout."""
    due: dict[str, float] = field(default_factory=dict)
    _next_s: float = 0.0
    _before: dict[str, float] = field(default_factory=dict)
    """Service per weight at the last look, of those that waited then."""
    _stretches: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    """The lowest and the highest difference of two tenants since both have waited."""

    def look(self, pool: SimulatedPool) -> None:
        if pool.now_s < self._next_s:
            return
        self._next_s = pool.now_s + self.period_s
        waiting = sorted(tenant for tenant, count in pool.queued.items() if count)[:MOST_TENANTS]
        if len(waiting) < 2:
            self._before, self._stretches = {}, {}
            pool.emptied.clear()
            return
        weights = pool.records.weights
        service = pool.service_by_now()
        now = {tenant: service.get(tenant, 0) / weights[tenant] for tenant in waiting}
        throughout = [tenant for tenant in waiting if tenant in self._before and tenant not in pool.emptied]
        pool.emptied.clear()
        self._divide(throughout, now, weights)
        self._compare(throughout, now)
        self._before = now

    def _divide(self, throughout: Sequence[str], now: dict[str, float], weights: dict[str, float]) -> None:
        if len(throughout) < 2:
            return
        gained = {tenant: now[tenant] - self._before[tenant] for tenant in throughout}
        total = sum(gained[tenant] * weights[tenant] for tenant in throughout)
        equal = total / sum(weights[tenant] for tenant in throughout)
        for tenant in throughout:
            self.got[tenant] = self.got.get(tenant, 0.0) + gained[tenant]
            self.due[tenant] = self.due.get(tenant, 0.0) + equal

    def _compare(self, throughout: Sequence[str], now: dict[str, float]) -> None:
        stretches: dict[tuple[str, str], tuple[float, float]] = {}
        for left, right in combinations(throughout, 2):
            difference, before = now[left] - now[right], self._before[left] - self._before[right]
            lowest, highest = self._stretches.get((left, right), (before, before))
            lowest, highest = min(lowest, difference), max(highest, difference)
            self.widest_gap = max(self.widest_gap, highest - lowest)
            stretches[left, right] = lowest, highest
        self._stretches = stretches

    @property
    def jain_index(self) -> float | None:
        """None: no two tenants ever waited together."""
        return jain_index([self.got[tenant] / due for tenant, due in self.due.items() if due > 0])


def service_bound(
    *, longest_input: int, longest_output: int, kv_tokens: int, sequences: int, least_weight: float
) -> float:
    """2U / min(weight) in cost tokens, of all replicas together."""
    at_once = min(kv_tokens, sequences * (longest_input + longest_output))
    return 2 * max(INPUT_TOKEN_COST * longest_input, OUTPUT_TOKEN_COST * at_once) / least_weight
