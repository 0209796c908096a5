"""Two-lane composition: a step advances prompts or answers, not both, so that all steps of a lane are alike.

The load switches, with hysteresis. The prompt lane opens when there are enough unfinished prompts for the
answers that wait for it, or when prompts have waited long enough; it closes when few are left or when answers
have waited long enough. Each lane stays open for a minimum of steps. In the answer lane a newcomer starts
with as few tokens of its prompt as a decode has, and counts in the load by which the lanes are switched.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self

from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.room import Room
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS

OPEN_PERMILLE = 125
"""Unfinished prompts per 1,000 decoding sequences that open the prompt lane."""
CLOSE_PERMILLE = 30
"""The prompt lane closes at this number of unfinished prompts or fewer."""
LEAST_DECODE_STEPS = 4
MOST_DECODE_STEPS = 16
"""Longest wait of unfinished prompts."""
MOST_PREFILL_STEPS = 4
"""Longest wait of answers."""


@dataclass(slots=True)
class Lanes:
    limits: PromptLimits = field(default_factory=PromptLimits)
    name: str = "lanes"
    claims: frozenset[str] = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    """Work conservation: a step is never empty while something runs; the closed lane leaves tokens over."""
    serves_all: bool = False
    prompts_last: bool = False
    prefill_steps: int = 0
    decode_steps: int = 0
    switches: int = 0
    _is_prefill: bool = False
    _steps_in_lane: int = 0
    _places: int = 0
    """Newcomers that this step of the answer lane may still start."""
    _turn: int = 0
    _room: Room | None = None

    def floor_holds(self, decoding: SequenceOf[Sequence], room: Room, steps: int = 1) -> bool:
        return False

    def shares(self, running: SequenceOf[Sequence], room: Room) -> list[tuple[Sequence, int]]:
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in running:
            if len(sequence.token_ids) - sequence.computed_tokens > DECODE_TOKENS:
                prompts.append(sequence)
            else:
                decoding.append(sequence)
        if room is not self._room:
            self._room = room
            self._switch(len(prompts), len(decoding))
        if self._is_prefill:
            return self.limits.shares(prompts, room.draft())
        return [(sequence, DECODE_TOKENS) for sequence in self._in_turn(decoding, room.decodes_left)]

    def turned(self, fresh: Self) -> Self:
        self.limits = fresh.limits
        return self

    def first_chunk(self, sequence: Sequence, room: Room) -> int:
        """A chunk in the prompt lane; in the other as little as a decode, for as many as would open it."""
        if room is not self._room or self._is_prefill:
            return self.limits.first_chunk(sequence, room)
        is_free = room.prefills < self._places and room.tokens_of(sequence.submit.tier) >= DECODE_TOKENS
        return DECODE_TOKENS if is_free else 0

    def _switch(self, num_prompts: int, num_decoding: int) -> None:
        if num_decoding == 0 or num_prompts == 0:
            wanted = num_decoding == 0
        elif self._is_prefill:
            is_over = num_prompts * 1000 <= CLOSE_PERMILLE * num_decoding
            wanted = not is_over and self._steps_in_lane < MOST_PREFILL_STEPS
        else:
            is_due = num_prompts * 1000 >= OPEN_PERMILLE * num_decoding
            wanted = self._steps_in_lane >= MOST_DECODE_STEPS or (
                is_due and self._steps_in_lane >= LEAST_DECODE_STEPS
            )
        if wanted != self._is_prefill:
            self._is_prefill, self._steps_in_lane = wanted, 0
            self.switches += 1
        self._steps_in_lane += 1
        self.prefill_steps += wanted
        self.decode_steps += not wanted
        self._places = max(1, OPEN_PERMILLE * num_decoding // 1000) - num_prompts

    def _in_turn(self, decoding: list[Sequence], most: int) -> list[Sequence]:
        """All of them, or `most`, from where the last such step ended."""
        if len(decoding) <= most:
            return decoding
        start = self._turn % len(decoding)
        self._turn = start + most
        return (decoding[start:] + decoding[:start])[:most]
