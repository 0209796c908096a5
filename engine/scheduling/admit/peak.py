"""Peak-memory admission: fits the worst future moment of KV use.

LightLLM's admission (Past-Future scheduler, arXiv 2507.10150). Every running sequence grows by a token a
step until it ends and frees what it holds; so the need peaks at the end of one of them. With the sequences
sorted by remaining output r, the longest first, sequence i ends when it and the i - 1 longer ones have each
grown by r_i:

    peak = max over i of ( r_i * i + sum of used_j for j <= i )

Exact when the remaining lengths are. In blocks, each sequence counts as if it had block_tokens - 1 tokens
more: the last block of each may be nearly empty.

How long the rest of an answer will be is a quantile of its forecast. The quantile rises when a sequence lost
its memory, because too much had been let in, and returns to its base over `DECAY_STEPS` steps (as SGLang's
new-token ratio does).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, count
from operator import mul, sub

from engine.scheduling.admit.base import Batch, Defer, QuietAdmit
from engine.scheduling.claims import ALL
from engine.sequence import Sequence

DECAY_STEPS = 600
MEDIAN_PERMILLE = 500
HIGH_PERMILLE = 900
"""Quantiles that a forecast names."""
UNKNOWN_SPREAD = 2
"""High quantile over median, where only the median is known."""


@dataclass(slots=True)
class PeakAdmit(QuietAdmit):
    """A candidate joins if the worst moment with it fits. One object an engine."""

    quantile_permille: int = 600
    jump_permille: int = 200
    """By how much a step with a preemption raises the quantile."""
    headroom_permille: int = 0
    """Share of the cache to leave free beyond the peak, beside others."""
    name: str = "peak"
    claims: frozenset[str] = ALL
    longest_wait_s: float = 0.0
    jumps: int = 0
    _raised: int = 0
    """Above the base, in permille x DECAY_STEPS."""
    _has_jumped: bool = False

    @property
    def level_permille(self) -> int:
        return min(1000, self.quantile_permille + self._raised // DECAY_STEPS)

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        return None

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        """The peak with the candidate, less what the running ones hold already."""
        peaks, held = self._running(batch)
        [(remaining, used)] = self.needs([candidate], batch.block_tokens)
        peak_blocks = peaks.with_one_more(remaining, used) // batch.block_tokens
        headroom = batch.num_blocks * self.headroom_permille // 1000 if batch.running else 0
        return peak_blocks - held + headroom

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        if self.name in batch.memo:
            peaks, held = batch.memo[self.name]
            [(remaining, used)] = self.needs([candidate], batch.block_tokens)
            peaks.insert(remaining, used)
            batch.memo[self.name] = (peaks, held + len(candidate.block_table))

    def preempted(self) -> None:
        if not self._has_jumped:
            self._has_jumped = True
            self.jumps += 1
            most = (1000 - self.quantile_permille) * DECAY_STEPS
            self._raised = min(most, self._raised + self.jump_permille * DECAY_STEPS)

    def stepped(self) -> None:
        self._has_jumped = False
        self._raised = max(0, self._raised - self.jump_permille)

    def needs(self, sequences: Iterable[Sequence], block_tokens: int) -> list[tuple[int, int]]:
        """(Tokens to come at most, by the quantile in force; tokens used, in whole blocks) of each; one that
        is immune to preemption holds all blocks that it can need."""
        level = self.level_permille
        above_median = max(0, min(level, HIGH_PERMILLE) - MEDIAN_PERMILLE)
        above_high = max(0, level - HIGH_PERMILLE)
        spare = block_tokens - 1
        needs: list[tuple[int, int]] = []
        # One plain loop without calls: it visits every running sequence in each step with a waiting one.
        for sequence in sequences:
            submit = sequence.submit
            known = len(sequence.token_ids)
            median = sequence.predicted_output_tokens
            high = sequence.predicted_high_tokens or median * UNKNOWN_SPREAD
            output = median
            if high > median:
                output += (high - median) * above_median // (HIGH_PERMILLE - MEDIAN_PERMILLE)
            if above_high and output < submit.max_tokens:
                output += (submit.max_tokens - output) * above_high // (1000 - HIGH_PERMILLE)
            ahead = sequence.prompt_tokens + output - known
            if ahead < 1:
                ahead = 1
            # The last token of an answer is never fed back.
            most = sequence.prompt_tokens + submit.max_tokens - 1 - known
            used = known + spare
            held = len(sequence.block_table) * block_tokens
            needs.append(((ahead if ahead < most else max(0, most)), (used if used > held else held)))
        return needs

    def _running(self, batch: Batch) -> tuple[Peaks, int]:
        known = batch.memo.get(self.name)
        if known is None:
            peaks = Peaks(self.needs(batch.running, batch.block_tokens))
            held = sum([len(sequence.block_table) for sequence in batch.running])
            known = batch.memo[self.name] = (peaks, held)
        peaks, held = known
        return peaks, held


class Peaks:
    """The worst moment of a changing set of (remaining, used), without sorting it anew. Kept sorted by
    remaining, the longest first, with running sums and maxima: one more is asked for in O(log n), and added
    in one pass."""

    def __init__(self, needs: Iterable[tuple[int, int]]) -> None:
        ordered = sorted([(-remaining, used) for remaining, used in needs])
        self._negative = [negative for negative, _ in ordered]
        """Remaining tokens, negated: ascending, for bisect."""
        self._used = [used for _, used in ordered]
        self._sum_up()

    def with_one_more(self, remaining: int, used: int) -> int:
        place = bisect_left(self._negative, -remaining)
        own = remaining * (place + 1) + used + (self._sums[place - 1] if place else 0)
        before = self._highest_before[place - 1] if place else 0
        # A sequence that ends sooner than the new one has it beside it then, grown as much.
        after = self._highest_after[place] + used if place < len(self._used) else 0
        return max(before, own, after)

    def insert(self, remaining: int, used: int) -> None:
        place = bisect_left(self._negative, -remaining)
        self._negative.insert(place, -remaining)
        self._used.insert(place, used)
        self._sum_up()

    def _sum_up(self) -> None:
        self._sums = list(accumulate(self._used))
        # What is used when each one ends: its rank times its remaining tokens, and the sum up to it.
        grown = map(mul, self._negative, count(1))
        at_end = list(map(sub, self._sums, grown))
        self._highest_before = list(accumulate(at_end, max))
        with_one_more = list(map(sub, at_end, self._negative))
        with_one_more.reverse()
        self._highest_after = list(accumulate(with_one_more, max))
        self._highest_after.reverse()


def plain_peak(needs: Iterable[tuple[int, int]]) -> int:
    """The formula as it stands, in tokens: the twin of `Peaks`."""
    peak = total = 0
    for rank, (remaining, used) in enumerate(sorted(needs, key=lambda need: -need[0]), 1):
        total += used
        peak = max(peak, remaining * rank + total)
    return peak
