"""Membership of a batch that runs to completion.

The gate opens for a number when nothing runs, lets that number in (over several steps) and stays shut until
all have finished. A member that lost its memory on the way may come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from engine.scheduling.admit.base import Batch, Defer, QuietAdmit
from engine.scheduling.admit.reserve import PredictedReserve
from engine.scheduling.claims import NO_STARVATION, SAFE
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS

RUNS = Defer("the batch runs to completion")


class BatchGate:
    """State of one admit choice; told of every admission and every step."""

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self._may_come = 0
        self._came = False
        self._stands_still = False
        self._since_s: float | None = None

    def lets_in(self, candidate: Sequence, batch: Batch) -> bool:
        if not batch.running:
            return False
        if self._stands_still and not any(has_prompt_left(sequence) for sequence in batch.running):
            # All prompts that there was room for are through: later ones do not belong to this batch.
            self._may_come = 0
        return self._may_come > 0 or (candidate.preemptions > 0 and candidate in self.members)

    def waits_since(self, candidate: Sequence, now_s: float) -> float:
        """Since when the next batch is waited for; called for every candidate that is not let in."""
        # The head of the line need not be the one that waits longest.
        earliest_s = min(candidate.submitted_s, now_s)
        self._since_s = earliest_s if self._since_s is None else min(self._since_s, earliest_s)
        return self._since_s

    def open(self, count: int) -> None:
        """For a new batch of up to `count`; nothing runs. Asking again changes nothing."""
        self._may_come = count

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        if len(batch.running) == 1 and candidate not in self.members:
            self.members = []
        if candidate not in self.members:
            self.members.append(candidate)
            self._may_come -= 1
        self._came = True
        self._since_s = None

    def stepped(self) -> None:
        self._stands_still = not self._came
        self._came = False


@dataclass(slots=True, kw_only=True)
class RunToCompletion(QuietAdmit):
    """Base of choices whose batches run to completion; memory as `memory` says."""

    memory: PredictedReserve = field(default_factory=PredictedReserve)
    claims: frozenset[str] = SAFE | {NO_STARVATION}
    _gate: BatchGate = field(default_factory=BatchGate)

    def turned(self, fresh: Self) -> Self:
        self.memory = fresh.memory
        return self

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        return self.memory.blocks_wanted(candidate, batch)

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        self._gate.admitted(candidate, batch)
        self.memory.admitted(candidate, batch)

    def stepped(self) -> None:
        self._gate.stepped()


def has_prompt_left(sequence: Sequence) -> bool:
    """Whether more tokens are still to be computed than a decode has."""
    return sequence.total_tokens - sequence.computed_tokens > DECODE_TOKENS
