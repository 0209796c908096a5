"""Shortest remaining processing time: sjf that also interrupts.

A waiting entry takes the place of a running one whose key is larger, unless that one has emitted
`PROTECTED_SHARE` of its prediction (TRAIL, arXiv 2410.01035, limits preemption alike).

Guarantee: known sizes, a single server and free preemption: the least mean response time of all orders; with
ageing none starves. Loses when KV is scarce and when predictions are bad.
"""

from __future__ import annotations

from engine.entry import QueueEntry
from engine.scheduling.order.sizes import predicted_output_tokens
from engine.scheduling.order.sjf import Sjf

PROTECTED_SHARE = 0.8
"""Of its predicted output; who has emitted so much is not interrupted."""


class Srpt(Sjf):
    """As `Sjf`, and interrupts."""

    name = "srpt"
    interrupts = True

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        predicted = predicted_output_tokens(running, self.caution)
        if running.emitted_tokens >= PROTECTED_SHARE * predicted:
            return False
        return self._key_of(waiting) < self._key_of(running)
