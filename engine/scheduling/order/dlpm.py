"""Deficit longest prefix match: drr between tenants, longest prefix match inside each.

Cao et al., "Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312; here prefixes are salted by
tenant, so none is matched across tenants. Guarantee: as `drr.py` between tenants, as `locality.py` inside
one.
"""

from __future__ import annotations

from engine.scheduling.order.base import Order
from engine.scheduling.order.drr import Drr
from engine.scheduling.order.locality import Locality


class Dlpm(Drr):
    """As `Drr`, with lines of `Locality`."""

    name = "dlpm"

    def _new_line(self) -> Order:
        return Locality(self._counters)
