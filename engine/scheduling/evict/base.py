"""Evict decision: which sequence is preempted when memory runs out, and how.

Which sequences are candidates at all (never a higher tier than the one in need, never one preempted too
often, never the last runner) is the scheduler's rule. How they are preempted is a ladder: *pause* keeps the
KV (enough when only a place is wanted), *swap* moves it to host memory, *recompute* drops it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from engine.messages import StepTime
from engine.scheduling.step_counters import Standings
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KvCosts:
    """What it costs to bring a sequence's KV back."""

    step_time: StepTime
    block_tokens: int
    swap_block_s: float
    """Seconds to copy one more block to host memory and back, measured."""
    swap_base_s: float = 0.0
    """What any such copying takes besides, measured."""

    def swap_s(self, tokens: int) -> float:
        """Out and in again."""
        return self.swap_base_s + -(-tokens // self.block_tokens) * self.swap_block_s

    def recompute_s(self, tokens: int) -> float:
        """What computing `tokens` tokens once more adds to steps that run anyway."""
        attended = tokens * (tokens + 1) // 2
        return self.step_time.per_token_s * tokens + self.step_time.per_context_token_s * attended


class Evict(Protocol):
    """Picks one of several candidates (never empty), given in order of admission."""

    @property
    def name(self) -> str: ...

    @property
    def claims(self) -> frozenset[str]:
        """See `engine.scheduling.claims`."""
        ...

    def victim(self, candidates: SequenceOf[Sequence], counters: Standings) -> Sequence: ...

    def swaps(self, victim: Sequence, costs: KvCosts) -> bool:
        """Whether its KV moves to host memory (if there is room) rather than being dropped."""
        ...
