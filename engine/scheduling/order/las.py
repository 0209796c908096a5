"""Least attained service: the entry with the fewest tokens so far goes first.

Needs no prediction (Nuijens and Wierman, 2008; Autellix, arXiv 2502.13965). Attained service is prompt tokens
computed for the first time plus tokens emitted; equals go by arrival. An entry interrupts a running one that
is `QUANTUM_TOKENS` ahead of it.

Guarantee: the least mean response time without knowing sizes, if they have a decreasing hazard rate. An
endless stream of newcomers starves those that have had something. Loses when all sizes are alike. Holds KV
for every half-done entry.
"""

from __future__ import annotations

from engine.entry import QueueEntry
from engine.scheduling.claims import SAFE, WORK_CONSERVATION
from engine.scheduling.order.keyed import Keyed, Terms

QUANTUM_TOKENS = 256


class Las(Keyed):
    name = "las"
    claims = SAFE | {WORK_CONSERVATION}
    interrupts = True

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        return waiting.attained_tokens + QUANTUM_TOKENS <= running.attained_tokens

    def _key(self, entry: QueueEntry, terms: Terms) -> float:
        return entry.attained_tokens
