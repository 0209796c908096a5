"""Admission with a memory reserve for a part of the predicted output.

Reserving nothing (prompt only) admits most and pays with evictions; reserving `max_tokens` leaves memory
unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from engine.scheduling.admit.base import Batch, Defer, QuietAdmit
from engine.scheduling.claims import ALL
from engine.sequence import Sequence

HELD, PROMISED = "held by small ones", "promised to large ones"
"""What a step's memo holds beside the whole promise."""


@dataclass(frozen=True, slots=True)
class PredictedReserve(QuietAdmit):
    """Any candidate may join; reserves a part of all running sequences' predicted remaining output."""

    permille: int = 500
    small_permille: int = 0
    """The lane of small ones (`room.py`), as part of the cache: large ones leave so much free, at most what
    running small ones hold, and small ones may take as much of what large ones are promised for later."""
    name: str = "predicted-reserve"
    claims: frozenset[str] = ALL
    longest_wait_s: float = 0.0

    def turned(self, fresh: Self) -> Self:
        return fresh

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        return None

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        """Its known tokens and reserve, and what the running ones are still promised (`room.py`); where there
        is memory for all that they can ever take, that, without a look at each."""
        own = self._still_wanted([candidate], batch.block_tokens)
        lane = batch.num_blocks * self.small_permille // 1000
        if batch.most_promised_blocks is not None:
            most = own + batch.most_promised_blocks + (lane if candidate.yields_cost else 0)
            if most + batch.kept_blocks <= batch.free_blocks:
                return most
        promised = batch.memo.get(self.name)
        if promised is None:
            promised = batch.memo[self.name] = self._still_wanted(batch.running, batch.block_tokens)
        wanted = int(promised) + own
        if not lane:
            return wanted
        if candidate.yields_cost:
            return wanted + min(lane, self._once_a_step(HELD, batch, _held_by_small))
        return wanted - min(lane, self._once_a_step(PROMISED, batch, self._promised_to_large))

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        if not batch.memo:
            return
        wanted = self._still_wanted([candidate], batch.block_tokens)
        added = {self.name: wanted}
        if candidate.yields_cost:
            added[PROMISED] = wanted
        else:
            added[HELD] = len(candidate.block_table)
        for key, blocks in added.items():
            if key in batch.memo:
                batch.memo[key] += blocks

    def _promised_to_large(self, batch: Batch) -> int:
        large = [sequence for sequence in batch.running if sequence.yields_cost]
        return self._still_wanted(large, batch.block_tokens)

    def _once_a_step(self, key: str, batch: Batch, count: Callable[[Batch], int]) -> int:
        if key not in batch.memo:
            batch.memo[key] = count(batch)
        return int(batch.memo[key])

    def _still_wanted(self, sequences: Iterable[Sequence], block_tokens: int) -> int:
        wanted = 0
        permille = self.permille
        # One plain loop without calls: it visits every running sequence in each step with a waiting one.
        for sequence in sequences:
            tokens = len(sequence.token_ids)
            ahead = sequence.prompt_tokens + sequence.predicted_output_tokens - tokens
            if ahead > 0:
                reserve = ahead * permille // 1000
                # A prediction is at most `max_tokens`, and the last token's KV is never computed.
                tokens += reserve if reserve < ahead else ahead - 1
            missing = -(-tokens // block_tokens) - len(sequence.block_table)
            if missing > 0:
                wanted += missing
        return wanted


def _held_by_small(batch: Batch) -> int:
    return sum([len(sequence.block_table) for sequence in batch.running if not sequence.yields_cost])


def prompt_only() -> PredictedReserve:
    """Sets nothing aside: the most concurrency, paid for with evictions."""
    return PredictedReserve(permille=0, name="prompt-only")
