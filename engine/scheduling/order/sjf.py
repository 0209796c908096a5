"""Shortest job first, by predicted length, with ageing.

Key: predicted remaining tokens (prompt not yet computed + output, between median and 90th percentile) -
`ageing` x service that others got while it waited, in cost tokens. Lengths as a reason to rank: S3 (NeurIPS
2023); vLLM-LTR (NeurIPS 2024); Clairvoyant (arXiv 2606.07248).

Guarantee, with `ageing` > 0: an entry that joins after others got size / `ageing` cost tokens cannot pass, so
none starves. Known sizes and a single server: the least mean wait of all orders that do not interrupt. Loses
when lengths are predicted badly: then it is first come, first served with noise, which ageing bounds. No
fairness between tenants.
"""

from __future__ import annotations

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.keyed import Keyed, Terms
from engine.scheduling.order.sizes import CAUTION, remaining_tokens

AGEING = 3 / 32
"""500 predicted tokens give way until others got 5,300 cost tokens; a binary fraction keeps keys exact."""


class Sjf(Keyed):
    name = "sjf"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    ageing = AGEING
    caution = CAUTION

    def _terms(self, entry: QueueEntry) -> Terms:
        return (self._counters.served_cost,)

    def _key(self, entry: QueueEntry, terms: Terms) -> float:
        return remaining_tokens(entry, self.caution) + self.ageing * terms[0]
