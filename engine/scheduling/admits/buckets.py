"""Is the next one of the length that runs?

Homogeneous batches (BucketServe, arXiv 2507.17120): sequences run together whose predicted total lengths lie
within one ratio, so that a padded shape wastes at most that. A batch takes in its like; when the head of the
line is of another length the batch runs dry, and then the other length has its turn.

Long ones need not hold up short ones for so long: a short one that has waited `suspend_after_s` suspends a
running batch that is at least two buckets longer. What was suspended keeps its KV and returns when the short
ones are through, or when `longest_pause_s` has passed and those still running are through. A sequence is
suspended at most `most_suspensions` times, and there is at most one suspension in `rest_steps` steps.

Where nothing is padded there is nothing to save, and waiting for a batch to run dry is a loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

from engine.scheduling.admit import Batch, Hold, blocks_for
from engine.scheduling.admits.reserve import PredictedReserve
from engine.scheduling.claims import NO_STARVATION, SAFE
from engine.sequence import Sequence, State


@dataclass(slots=True)
class LengthBuckets:
    """One object an engine."""

    ratio: float = 2.0
    """Longest to shortest within a bucket."""
    suspend_after_s: float = 0.5
    longest_pause_s: float = 5.0
    rest_steps: int = 64
    most_suspensions: int = 2
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
        """By the total length that was predicted when it came: a bucket is for life."""
        output = min(max(1, sequence.submit.predicted_output_tokens), sequence.submit.max_tokens)
        return int(log(sequence.prompt_tokens + output) / log(self.ratio) + 1e-9)

    def joins(self, candidate: Sequence, batch: Batch) -> Hold | None:
        """Its like."""
        if not batch.running:
            return None
        if not candidate.is_suspended and self._is_due_back(batch.now_s):
            return Hold("suspended ones go first")
        longest = self._longest(batch)
        return None if self.bucket(candidate) == longest else Hold(f"bucket {longest} runs")

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        """As `memory` says."""
        return self.memory.blocks_wanted(candidate, batch)

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        """The long ones that run, for a short one that has waited long enough."""
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
            bucket = self.bucket(sequence)
            if bucket == own:
                continue
            if bucket < own + 2 or not self._may_pause(sequence, candidate):
                return []
            longer.append(sequence)
        self._suspended = {
            sequence: count
            for sequence, count in self._suspended.items()
            if sequence.state is not State.FINISHED
        }
        if not longer:
            return []
        for sequence in longer:
            self._suspended[sequence] = self._suspended.get(sequence, 0) + 1
        self.suspensions += len(longer)
        self._rest = self.rest_steps
        return longer

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        """It is of the bucket that runs."""
        batch.memo.setdefault(self.name, self.bucket(candidate))
        self.memory.admitted(candidate, batch)

    def preempted(self) -> None:
        """The reserve is fixed."""

    def stepped(self) -> None:
        """A step of rest."""
        self._rest = max(0, self._rest - 1)

    def _longest(self, batch: Batch) -> int:
        longest = batch.memo.get(self.name)
        if longest is None:
            longest = batch.memo[self.name] = max(self.bucket(sequence) for sequence in batch.running)
        return int(longest)

    def _may_pause(self, sequence: Sequence, candidate: Sequence) -> bool:
        """One of its tier that has begun to answer, and has more before it than the whole short one."""
        left = max(1, sequence.predicted_output_tokens - sequence.emitted_tokens)
        return (
            sequence.tier == candidate.tier
            and sequence.emitted_tokens > 0
            and self._suspended.get(sequence, 0) < self.most_suspensions
            and left > candidate.predicted_output_tokens
        )

    def _is_due_back(self, now_s: float) -> bool:
        return any(
            sequence.is_suspended and now_s - sequence.paused_since_s >= self.longest_pause_s
            for sequence in self._suspended
        )
