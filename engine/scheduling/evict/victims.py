"""Choices of the victim among several candidates for eviction."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.scheduling.claims import ALL, NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.step_counters import Standings
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class FairVictim:
    """The lowest tier; in it the tenant that has had most service; of its sequences the one that emitted
    least (least to recompute); of equals the one admitted last."""

    name: str = "fair-victim"
    claims: frozenset[str] = ALL

    def victim(self, candidates: SequenceOf[Sequence], counters: Standings) -> Sequence:
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

    name: str = "latest-victim"
    claims: frozenset[str] = SAFE | {WORK_CONSERVATION, NO_STARVATION}

    def victim(self, candidates: SequenceOf[Sequence], counters: Standings) -> Sequence:
        return max(enumerate(candidates), key=lambda item: (item[1].tier, item[1].submitted_s, item[0]))[1]


@dataclass(frozen=True, slots=True)
class AttainedVictim:
    """The lowest tier; in it the sequence that has had most service (prompt tokens computed and tokens
    emitted): what orders by attained service promise to the others. Of equals the one admitted last."""

    name: str = "attained-victim"
    claims: frozenset[str] = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    """No starvation: a sequence preempted often enough is no candidate."""

    def victim(self, candidates: SequenceOf[Sequence], counters: Standings) -> Sequence:
        return max(
            enumerate(candidates),
            key=lambda item: (item[1].tier, item[1].computed_prompt_tokens + item[1].emitted_tokens, item[0]),
        )[1]
