"""Waits that requests were told on arrival, and waits that they had, by tenant and tier, for status pages.

Prometheus has neither label. Bounded: the last `MAX_KEPT` requests of the last `MAX_LINES` tenants and tiers.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from gateway.domain.estimate import Seconds

MAX_KEPT = 64
MAX_LINES = 2_000


class KeptWaits(msgspec.Struct, frozen=True):
    """A tenant's last requests in a tier at one gateway: medians told, against quantiles that they had."""

    tenant_id: str
    tier: str
    requests: int
    told_p50_s: float | None
    """None: estimates are off."""
    told_p90_s: float | None
    had_p50_s: float
    had_p90_s: float
    within_told_p90: float | None
    """Share of those that were told a wait."""


class _Wait(NamedTuple):
    had_s: float
    told_s: Seconds | None
    """p50, p90; None: estimates are off."""


class RecentWaits:
    """In the requested tier. Use from one event loop."""

    def __init__(self) -> None:
        self._lines: OrderedDict[tuple[str, str], deque[_Wait]] = OrderedDict()

    def note(self, tenant_id: str, tier: str, told_s: Seconds | None, had_s: float) -> None:
        """Forgets the line that was noted longest ago when there are too many."""
        whose = (tenant_id, tier)
        line = self._lines.get(whose)
        if line is None:
            line = self._lines[whose] = deque(maxlen=MAX_KEPT)
            if len(self._lines) > MAX_LINES:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(whose)
        line.append(_Wait(had_s, told_s))

    def latest(self, tenant_ids: Collection[str] | None, tier: str, most: int) -> list[KeptWaits]:
        """The lines that were noted last. `tenant_ids`: None: of all; `tier`: empty: all."""
        whose = [
            line
            for line in reversed(self._lines)
            if (tenant_ids is None or line[0] in tenant_ids) and tier in ("", line[1])
        ]
        return [KeptWaits(*line, **(self.of(*line) or {})) for line in whose[:most]]

    def of(self, tenant_id: str, tier: str) -> dict[str, Any] | None:
        """JSON: medians told, quantiles of actual waits, share within the told p90. None: unknown."""
        line = self._lines.get((tenant_id, tier))
        if line is None:
            return None
        had = [wait.had_s for wait in line]
        told = [(wait.told_s, wait.had_s) for wait in line if wait.told_s is not None]
        return {
            "requests": len(line),
            "told_p50_s": _quantile([pair[0] for pair, _ in told], 0.5),
            "told_p90_s": _quantile([pair[1] for pair, _ in told], 0.5),
            "had_p50_s": _quantile(had, 0.5),
            "had_p90_s": _quantile(had, 0.9),
            "within_told_p90": sum(had_s <= pair[1] for pair, had_s in told) / len(told) if told else None,
        }


def _quantile(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None
