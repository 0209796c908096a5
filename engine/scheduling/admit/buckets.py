"""Length-bucket admission: only prompts of like length are computed together (BucketServe, arXiv 2507.17120).

What a padded step pads is its prompts, each to the longest. So prompts are computed together whose tokens to
compute lie within one ratio: the length by which the order sorts (`engine/scheduling/order/buckets.py`). A
head of another length waits until the prompts in progress are through.

A short one that has waited `suspend_after_s` suspends prompts in progress that are at least two buckets
longer. What was suspended keeps its KV and returns between the short ones, or goes before them when
`longest_pause_s` has passed. A sequence is suspended at most `MOST_SUSPENSIONS` times, and at most once in
`REST_STEPS` steps. Where nothing is padded it loses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from typing import Self

from engine.scheduling.admit.base import Batch, Defer, QuietAdmit
from engine.scheduling.admit.batch_gate import has_prompt_left
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.claims import NO_STARVATION, SAFE
from engine.sequence import Sequence, SequenceStatus
from engine.sizes import blocks_for

REST_STEPS = 64
MOST_SUSPENSIONS = 2
NONE = -1


@dataclass(slots=True)
class LengthBuckets(QuietAdmit):
    ratio: float = 2.0
    suspend_after_s: float = 0.5
    longest_pause_s: float = 5.0
    memory: PredictedReserve = field(default_factory=PredictedReserve)
    name: str = "buckets"
    claims: frozenset[str] = SAFE | {NO_STARVATION}
    longest_wait_s: float = 0.0
    suspensions: int = 0
    _rest: int = 0
    """Steps until the next suspension may be."""
    _suspended: dict[Sequence, int] = field(default_factory=dict)
    """How often; of those that live."""

    def bucket(self, sequence: Sequence) -> int:
        """By the prompt tokens that there were to compute when it came: a bucket is for life."""
        return int(log(_size(sequence)) / log(self.ratio) + 1e-9)

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        if not batch.running:
            return None
        if not candidate.is_suspended and self._is_due_back(batch.now_s):
            return Defer("suspended ones go first")
        longest = self._longest(batch)
        return None if longest in (NONE, self.bucket(candidate)) else Defer(f"bucket {longest} runs")

    def turned(self, fresh: Self) -> Self:
        self.memory = fresh.memory
        return self

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        return self.memory.blocks_wanted(candidate, batch)

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        if (
            self._rest > 0
            or candidate.is_suspended
            or batch.now_s - candidate.submitted_s < self.suspend_after_s
            or self._is_due_back(batch.now_s)
            or batch.free_blocks < blocks_for(candidate.total_tokens, batch.block_tokens)
        ):
            return []
        own = self.bucket(candidate)
        longer: list[Sequence] = []
        for sequence in batch.running:
            if not has_prompt_left(sequence):
                continue
            bucket = self.bucket(sequence)
            if bucket == own:
                continue
            if bucket < own + 2 or not self._may_pause(sequence, candidate):
                return []
            longer.append(sequence)
        self._suspended = {
            sequence: count
            for sequence, count in self._suspended.items()
            if sequence.state is not SequenceStatus.FINISHED
        }
        if not longer:
            return []
        for sequence in longer:
            self._suspended[sequence] = self._suspended.get(sequence, 0) + 1
        self.suspensions += len(longer)
        self._rest = REST_STEPS
        return longer

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        if self.name in batch.memo and has_prompt_left(candidate):
            batch.memo[self.name] = max(batch.memo[self.name], self.bucket(candidate))
        self.memory.admitted(candidate, batch)

    def stepped(self) -> None:
        self._rest = max(0, self._rest - 1)

    def _longest(self, batch: Batch) -> int:
        longest = batch.memo.get(self.name)
        if longest is None:
            prompts = (self.bucket(sequence) for sequence in batch.running if has_prompt_left(sequence))
            longest = batch.memo[self.name] = max(prompts, default=NONE)
        return int(longest)

    def _may_pause(self, sequence: Sequence, candidate: Sequence) -> bool:
        """One of its tier that has begun, and has more to compute than the whole short one."""
        return (
            sequence.tier == candidate.tier
            and (sequence.computed_tokens > 0 or sequence.emitted_tokens > 0)
            and self._suspended.get(sequence, 0) < MOST_SUSPENSIONS
            and sequence.total_tokens - sequence.computed_tokens > _size(candidate)
        )

    def _is_due_back(self, now_s: float) -> bool:
        return any(
            sequence.is_suspended and now_s - sequence.paused_since_s >= self.longest_pause_s
            for sequence in self._suspended
        )


def _size(sequence: Sequence) -> int:
    return max(1, sequence.prompt_tokens - sequence.found_tokens)
