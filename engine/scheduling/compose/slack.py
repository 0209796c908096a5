"""Deadline-slack composition: sequences ahead of their deadline lend tokens to late prompts.

After FairBatching (arXiv 2510.14392): token j of an answer is due at arrival + TTFT target + j * TPOT target.
A decoding sequence that is ahead of its deadline has slack; a step may last as long as the least slack of
those that are in it, which lets prompts take larger chunks than a fixed target would. When a prompt would
be late otherwise, decoding sequences that can afford to miss this step and the next one lend it their tokens.

A sequence that lends comes closer to its deadline with every step and is then served: no sequence lends for
long. The targets are the sequence's own where it has any, else this choice's. Of the first token none above
`LONGEST_TARGET_S` counts, so that no prompt waits behind an endless stream of more urgent ones; one without a
target stands there. Without a TTFT target a prompt asks for nothing, without a TPOT target a sequence lends
nothing and limits no step: where no sequence has a target, this is decode-first.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self

from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.compose.decode_first import DecodeFirst
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.room import Room
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS

LONGEST_TARGET_S = 60.0

Due = tuple[float, Sequence]
"""Seconds until a sequence's next token is due, and the sequence."""


@dataclass(slots=True)
class DeadlineSlack:
    """One object an engine. A prompt's chunk is bounded by `limits`, whose time budget is replaced by the
    slack of the sequences in the step."""

    ttft_target_s: float = 0.0
    """Of sequences without one; 0: none."""
    tpot_target_s: float = 0.0
    limits: PromptLimits = field(default_factory=PromptLimits)
    name: str = "slack"
    claims: frozenset[str] = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    """Work conservation: a step is never empty while something runs; slack leaves tokens over."""
    serves_all: bool = False
    prompts_last: bool = False
    lent_tokens: int = 0
    """Decode tokens put off for a prompt that would have been late."""
    urgent_steps: int = 0
    _room: Room | None = None
    _allowed_s: float | None = None

    def floor_holds(self, decoding: SequenceOf[Sequence], room: Room, steps: int = 1) -> bool:
        return False

    def shares(self, running: SequenceOf[Sequence], room: Room) -> list[tuple[Sequence, int]]:
        if not any(self._has_target(sequence) for sequence in running):
            return DecodeFirst(self.limits).shares(running, room)
        now_s = room.now_s
        decoding: list[Due] = []
        prompts: list[Due] = []
        for sequence in running:
            due_s = self.due_s(sequence)
            if len(sequence.token_ids) - sequence.computed_tokens > DECODE_TOKENS:
                late_s = sequence.submitted_s + LONGEST_TARGET_S if due_s is None else due_s
                prompts.append((late_s - now_s, sequence))
            else:
                decoding.append((0.0 if due_s is None else due_s - now_s, sequence))
        prompts.sort(key=_by_tier)
        kept = decoding
        lent: list[Due] = []
        asking = next((due for due in prompts if self.due_s(due[1]) is not None), None)
        if asking is not None and decoding:
            kept, lent = self._lend(decoding, asking, room)
        if len(kept) > room.decodes_left:
            kept = sorted(kept, key=_by_tier)[: room.decodes_left]
        if room is not self._room:
            self._room, self._allowed_s = room, self._allowed(kept, lent, room)
        shares = [(sequence, DECODE_TOKENS) for _, sequence in kept]
        if prompts:
            step = room.draft()
            step.take_decodes([sequence for _, sequence in kept])
            shares += self.limits.shares([sequence for _, sequence in prompts], step, self._allowed_s)
        return shares

    def turned(self, fresh: Self) -> Self:
        self.limits = fresh.limits
        return self

    def first_chunk(self, sequence: Sequence, room: Room) -> int:
        allowed_s = self._allowed_s if room is self._room else None
        return self.limits.first_chunk(sequence, room, allowed_s)

    def due_s(self, sequence: Sequence) -> float | None:
        """When its next token is due, by the engine's clock; None: it has no target."""
        ttft_s, tpot_s = self._ttft_s(sequence), self._tpot_s(sequence)
        if not (tpot_s if sequence.emitted_tokens else ttft_s):
            return None
        if ttft_s or sequence.first_token_s is None:
            return sequence.submitted_s + ttft_s + sequence.emitted_tokens * tpot_s
        return sequence.first_token_s + sequence.emitted_tokens * tpot_s

    def _has_target(self, sequence: Sequence) -> bool:
        return bool(self._ttft_s(sequence) or self._tpot_s(sequence))

    def _ttft_s(self, sequence: Sequence) -> float:
        return min(sequence.submit.ttft_target_s or self.ttft_target_s, LONGEST_TARGET_S)

    def _tpot_s(self, sequence: Sequence) -> float:
        return min(sequence.submit.tpot_target_s or self.tpot_target_s, LONGEST_TARGET_S)

    def _allowed(self, kept: list[Due], lent: list[Due], room: Room) -> float | None:
        """The least slack in the step, half of that of those left out. One that is late whatever is done
        counts with its pace: it must not hold up prompts as well. None: none of them has a target."""
        paced = [(slack_s, self._tpot_s(sequence)) for slack_s, sequence in kept if self._tpot_s(sequence)]
        if not paced and not lent:
            return None
        step = room.draft()
        step.take_decodes([sequence for _, sequence in kept])
        least_s = step.predicted_s()
        slacks = [slack_s if slack_s > least_s else tpot_s for slack_s, tpot_s in paced]
        return min(slacks + [slack_s / 2 for slack_s, _ in lent])

    def _lend(self, decoding: list[Due], prompt: Due, room: Room) -> tuple[list[Due], list[Due]]:
        """Those of `decoding` that are in this step, and those that lend it their tokens."""
        slack_s, sequence = prompt
        step = room.draft()
        step.take_decodes([decoder for _, decoder in decoding])
        left = sequence.total_tokens - sequence.computed_tokens
        if slack_s > step.predicted_s() + room.predicted_s(sequence, left):
            return decoding, []
        self.urgent_steps += 1
        longest_s = step.predicted_s(sequence, min(left, room.tokens))
        kept: list[Due] = []
        lent: list[Due] = []
        for due in decoding:
            may_lend = due[0] >= 2 * longest_s and due[1].submit.tier >= sequence.submit.tier
            (lent if may_lend else kept).append(due)
        self.lent_tokens += DECODE_TOKENS * len(lent)
        return kept, lent


def _by_tier(due: Due) -> tuple[int, float]:
    return due[1].submit.tier, due[0]
