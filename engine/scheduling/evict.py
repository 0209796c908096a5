"""Evict: who gives way when memory runs out?

A choice ranks candidates; which sequences are candidates at all (never a higher tier than the one in need,
never one that gave way too often, never the last runner) is the scheduler's rule.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.order import ServiceCountersLike
from engine.sequence import Sequence


class Evict(Protocol):
    """Picks one of several candidates (never empty), given in order of admission."""

    def victim(self, candidates: SequenceOf[Sequence], counters: ServiceCountersLike) -> Sequence: ...


@dataclass(frozen=True, slots=True)
class FairVictim:
    """The lowest tier; in it the tenant that has had most service; of its sequences the one that emitted
    least (least to recompute); of equals the one admitted last.
    """

    def victim(self, candidates: SequenceOf[Sequence], counters: ServiceCountersLike) -> Sequence:
        """See `Evict`."""
        return max(
            enumerate(candidates),
            key=lambda item: (
                item[1].tier,
                counters.value(item[1].tenant_id),
                -item[1].emitted_tokens,
                item[0],
            ),
        )[1]


@dataclass(frozen=True, slots=True)
class LatestVictim:
    """The lowest tier; in it the last to arrive: what first come, first served promises."""

    def victim(self, candidates: SequenceOf[Sequence], counters: ServiceCountersLike) -> Sequence:
        """See `Evict`."""
        return max(enumerate(candidates), key=lambda item: (item[1].tier, item[1].submitted_s, item[0]))[1]
