"""Evict decision: which sequence gives way when memory runs out, and how.

Which sequences are candidates is the scheduler's rule; who of them gives way is the policy's choice. How goes
by predicted cost for every choice: *pause* keeps the KV (where only a place is wanted, or where memory comes
free sooner than it could be brought back), *swap* moves it to host memory, *recompute* drops it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf
from typing import Protocol

from engine.messages import StepTime
from engine.scheduling.step_counters import Standings
from engine.sequence import Sequence
from engine.step_time.model import predict_decodes_s


@dataclass(frozen=True, slots=True)
class KvCosts:
    """What it costs to bring a sequence's KV back."""

    step_time: StepTime
    block_tokens: int
    swap_block_s: float
    """Seconds to copy one more block to host memory and back, measured."""
    swap_base_s: float = 0.0

    def swap_s(self, tokens: int) -> float:
        """Out and in again."""
        return self.swap_base_s + -(-tokens // self.block_tokens) * self.swap_block_s

    def swaps(self, tokens: int) -> bool:
        """Whether moving KV to host memory, given room, brings it back sooner than recomputing it."""
        return self.swap_s(tokens) < self.recompute_s(tokens)

    def pauses(self, tokens: int, free_in_s: float, *, has_host_room: bool) -> bool:
        """Whether waiting `free_in_s` for memory, with the KV kept, is quicker than giving it up."""
        back_s = self.recompute_s(tokens)
        if has_host_room:
            back_s = min(back_s, self.swap_s(tokens))
        return free_in_s <= back_s

    def recompute_s(self, tokens: int) -> float:
        """What computing `tokens` tokens once more adds to steps that run anyway."""
        attended = tokens * (tokens + 1) // 2
        return self.step_time.per_token_s * tokens + self.step_time.per_context_token_s * attended


def memory_free_in_s(runners: SequenceOf[Sequence], costs: KvCosts) -> float:
    """Predicted seconds until one of the `runners` ends without asking for another block; infinite where none
    does. One that was predicted wrongly asks when its last block is full: nothing waits longer for it."""
    steps = [
        left
        for runner in runners
        if runner.computed_tokens >= runner.prompt_tokens
        and (left := runner.predicted_output_tokens - runner.emitted_tokens) > 0
        # The last token's own keys and values are never needed.
        and runner.total_tokens + left - 1 <= len(runner.block_table) * costs.block_tokens
    ]
    if not steps:
        return inf
    context_tokens = sum(runner.total_tokens for runner in runners)
    return min(steps) * predict_decodes_s(costs.step_time, len(runners), context_tokens)


class Evict(Protocol):
    """Picks one of several candidates (never empty), given in order of admission."""

    @property
    def name(self) -> str: ...

    @property
    def claims(self) -> frozenset[str]:
        """See `engine.scheduling.claims`."""
        ...

    def victim(self, candidates: SequenceOf[Sequence], counters: Standings) -> Sequence: ...
