"""How much memory does an admission leave for output that is yet to come?

Reserving nothing (prompt only) admits most and pays with evictions and recomputation under pressure;
reserving the full `max_tokens` leaves memory unused whenever answers are shorter; a part of the predicted
remainder does neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.scheduling.admit import Batch, Hold
from engine.scheduling.claims import ALL
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PredictedReserve:
    """Anyone may join; sets aside a part of the predicted remaining output, of all who run."""

    permille: int = 500
    name: str = "predicted-reserve"
    claims: frozenset[str] = ALL
    longest_wait_s: float = 0.0

    def joins(self, candidate: Sequence, batch: Batch) -> Hold | None:
        """Always."""
        return None

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        """Its known tokens and its reserve, and what the running ones are still promised."""
        promised = batch.memo.get(self.name)
        if promised is None:
            promised = batch.memo[self.name] = self._still_wanted(batch.running, batch.block_tokens)
        return int(promised) + self._still_wanted([candidate], batch.block_tokens)

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        """Nobody."""
        return []

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        """Its reserve is promised from now on."""
        if self.name in batch.memo:
            batch.memo[self.name] += self._still_wanted([candidate], batch.block_tokens)

    def preempted(self) -> None:
        """The reserve is fixed."""

    def stepped(self) -> None:
        """The reserve is fixed."""

    def _still_wanted(self, sequences: Iterable[Sequence], block_tokens: int) -> int:
        """Blocks for known tokens and reserve, less those held."""
        wanted = 0
        # One plain loop without calls: it runs over all that run in each step in which somebody waits.
        for sequence in sequences:
            known = len(sequence.token_ids)
            tokens = known
            ahead = sequence.prompt_tokens + sequence.predicted_output_tokens - known
            if ahead > 0:
                most = sequence.prompt_tokens + sequence.submit.max_tokens - 1
                tokens += ahead * self.permille // 1000
                tokens = max(known, tokens if tokens < most else most)
            missing = -(-tokens // block_tokens) - len(sequence.block_table)
            if missing > 0:
                wanted += missing
        return wanted


def prompt_only() -> PredictedReserve:
    """Sets nothing aside: the most concurrency, paid for with evictions."""
    return PredictedReserve(permille=0, name="prompt-only")
