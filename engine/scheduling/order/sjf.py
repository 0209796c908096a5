"""Shortest job first, by predicted length, with ageing.

Key: predicted remaining tokens (prompt not yet computed + output, between median and 90th percentile) -
`ageing` x service that others got while it waited, in cost tokens. Time stands still when nothing is served,
so the balance of size against age does not depend on how fast the machine is. Lengths as a reason to rank:
S3 (NeurIPS 2023); vLLM-LTR (NeurIPS 2024); Clairvoyant (arXiv 2606.07248) measures how good ranks are.

Guarantee, with `ageing` > 0: an entry that joins after others got size / `ageing` cost tokens cannot pass, so
none starves, whatever arrives and however overloaded the engine is. Known sizes and a single server: the
least mean wait of all orders that do not interrupt.

Loses when lengths are predicted badly (about half of the pairs ranked right outside the distribution that
was learned): then it is first come, first served with noise, and ageing bounds the noise. No fairness
between tenants: a tenant with short requests gets more.
"""

from __future__ import annotations

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.keyed import Keyed, Terms
from engine.scheduling.order.sizes import CAUTION, remaining_tokens

AGEING = 3 / 32
"""A request of 500 predicted tokens gives way until others got 5,300 cost tokens. A binary fraction, so that
keys are exact."""


class Sjf(Keyed):
    """One heap by size, aged."""

    name = "sjf"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    ageing = AGEING
    """Predicted tokens per cost token served to others."""
    caution = CAUTION
    """0: the median counts, 1: the 90th percentile."""

    def _terms(self, entry: QueueEntry) -> Terms:
        return (self._counters.served_cost,)

    def _key(self, entry: QueueEntry, terms: Terms) -> float:
        return remaining_tokens(entry, self.caution) + self.ageing * terms[0]
