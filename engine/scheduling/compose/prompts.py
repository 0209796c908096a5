"""Division of a step's remaining tokens among unfinished prompts. Used by every composition.

- At most `max_num_partial_prefills` prompts stay unfinished after a step in which they advanced, at most
  `max_long_partial_prefills` of them long ones. A prompt that a step can complete needs no such place.
- A prompt is long while more than `long_prefill_token_threshold` of its tokens are left; a step takes at most
  that many of them (or `long_chunk_permille` of that).
- With `target_step_s`, prompts get only what keeps the step's predicted time below it, but together at least
  `least_chunk_tokens`.

Higher tiers first. Within a tier the prompts that advance together share by water-filling. A long newcomer
that finds the long ones' places taken starts all the same, with as few tokens as a decode: at the head of the
line it would hold up every short one behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.scheduling.room import Room
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS

LONG_PERMILLE = 40
"""Share of the model's length above which a prompt is long, where several may advance and nothing is said."""
UNFELT_STEP_S = 0.025
"""Where long prompts get small chunks so that short ones hardly feel them, a chunk need not be smaller than
what leaves the step's predicted time below this: on a fast engine small chunks only cost throughput."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """See above; the numbers are checked by `PolicyOptions`."""

    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    """0: with one partial prompt at a time no prompt is long; with several, 4 % of the model's length."""
    target_step_s: float = 0.0
    """0: no time budget."""
    least_chunk_tokens: int = 16
    long_chunk_permille: int = 1000

    def shares(
        self, prompts: Iterable[Sequence], step: Room, target_step_s: float | None = None
    ) -> list[tuple[Sequence, int]]:
        """Chunks for `prompts`, in the order given within a tier. `step` is a draft, in which each chunk is
        noted; `target_step_s` replaces the time budget."""
        target_s = self.target_step_s if target_step_s is None else target_step_s
        shares: list[tuple[Sequence, int]] = []
        tiers: dict[int, list[Sequence]] = {}
        for sequence in prompts:
            tiers.setdefault(sequence.submit.tier, []).append(sequence)
        for tier in sorted(tiers):
            line = tiers[tier]
            while line and step.tokens_of(tier) > 0:
                chosen, line = self._with_place(line, step)
                if not chosen:
                    break
                self._fill(chosen, step, target_s, shares)
            for sequence in line:
                if step.tokens_of(tier) == 0:
                    break
                tokens = self._completing(sequence, step, target_s)
                if tokens:
                    shares.append((sequence, tokens))
                    step.take(sequence, tokens)
        return shares

    def first_chunk(self, sequence: Sequence, room: Room, target_step_s: float | None = None) -> int:
        """The first chunk of a newcomer; 0 where the limits or the time budget leave nothing for it."""
        target_s = self.target_step_s if target_step_s is None else target_step_s
        left = _left(sequence)
        if not self._has_place(left, room):
            if self._is_long(left, room):
                return min(DECODE_TOKENS, room.tokens_of(sequence.submit.tier))
            return self._completing(sequence, room, target_s)
        most = min(self._most(sequence, room), room.tokens_of(sequence.submit.tier))
        return self._within(sequence, most, room, target_s)

    def threshold(self, room: Room) -> int:
        """Tokens above which a prompt is long; 0: none is."""
        if self.long_prefill_token_threshold:
            return self.long_prefill_token_threshold
        if self.max_num_partial_prefills > 1:
            return max(1, room.context_tokens * LONG_PERMILLE // 1000)
        return 0

    def _is_long(self, left: int, room: Room) -> bool:
        threshold = self.threshold(room)
        return 0 < threshold < left

    def _most(self, sequence: Sequence, room: Room) -> int:
        left = _left(sequence)
        if not self._is_long(left, room):
            return left
        chunk = max(1, self.threshold(room) * self.long_chunk_permille // 1000)
        if self.long_chunk_permille == 1000:
            return chunk
        return max(chunk, room.tokens_within(sequence, min(left, room.tokens), UNFELT_STEP_S))

    def _has_place(self, left: int, room: Room) -> bool:
        if len(room.unfinished) >= self.max_num_partial_prefills:
            return False
        return not self._is_long(left, room) or self._long_places(room) > 0

    def _long_places(self, room: Room) -> int:
        return self.max_long_partial_prefills - sum(
            self._is_long(left, room) for left in room.unfinished.values()
        )

    def _with_place(self, line: SequenceOf[Sequence], step: Room) -> tuple[list[Sequence], list[Sequence]]:
        """Those of `line` that may stay unfinished, and the rest."""
        places = self.max_num_partial_prefills - len(step.unfinished)
        long_places = self._long_places(step)
        chosen: list[Sequence] = []
        rest: list[Sequence] = []
        for sequence in line:
            is_long = self._is_long(_left(sequence), step)
            if len(chosen) < places and (not is_long or long_places > 0):
                chosen.append(sequence)
                long_places -= is_long
            else:
                rest.append(sequence)
        return chosen, rest

    def _fill(
        self, chosen: list[Sequence], step: Room, target_s: float, shares: list[tuple[Sequence, int]]
    ) -> None:
        """Water-filling: from the one that needs least, each an equal part of what is left."""
        may_come = self.max_num_partial_prefills - len(step.unfinished) - len(chosen)
        sharers = len(chosen) + max(0, min(may_come, step.num_waiting))
        for sequence in sorted(chosen, key=_left):
            tokens = step.tokens_of(sequence.submit.tier)
            most = min(self._most(sequence, step), max(1, tokens // sharers), tokens)
            tokens = self._within(sequence, most, step, target_s, sharers)
            sharers -= 1
            if tokens:
                shares.append((sequence, tokens))
                step.take(sequence, tokens)

    def _completing(self, sequence: Sequence, step: Room, target_s: float) -> int:
        """All that is left of the prompt, if this step can take it; else 0."""
        left = _left(sequence)
        if left > step.tokens_of(sequence.submit.tier) or self._is_long(left, step):
            return 0
        return left if self._within(sequence, left, step, target_s) == left else 0

    def _within(self, sequence: Sequence, most: int, step: Room, target_s: float, sharers: int = 1) -> int:
        """Up to `most` tokens, in one of `sharers` equal parts of the time that is left."""
        if target_s <= 0 or most <= 0:
            return most
        now_s = step.predicted_s()
        tokens = step.tokens_within(sequence, most, now_s + (target_s - now_s) / sharers)
        if tokens < self.least_chunk_tokens and step.prefills == 0:
            return min(most, self.least_chunk_tokens)
        return tokens


def _left(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.computed_tokens
