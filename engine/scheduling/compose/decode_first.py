"""Decode-first composition: every decode, then prompts in chunks (Sarathi-Serve, OSDI 2024).

Prompts take what the step's budget of tokens and of predicted time leaves.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Self

from engine.scheduling.claims import ALL
from engine.scheduling.compose.prompts import PromptLimits
from engine.scheduling.room import Room
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """All decoding sequences, then prompts, by tier and by admission. Claims work conservation: a step is
    never empty while something runs, and it leaves tokens over only where a limit of `limits` says so."""

    limits: PromptLimits = field(default_factory=PromptLimits)
    name: str = "decode-first"
    claims: frozenset[str] = ALL
    serves_all: bool = True
    prompts_last: bool = False

    def floor_holds(self, decoding: SequenceOf[Sequence], room: Room, steps: int = 1) -> bool:
        return len(decoding) <= room.decodes_left

    def shares(self, running: SequenceOf[Sequence], room: Room) -> list[tuple[Sequence, int]]:
        shares: list[tuple[Sequence, int]] = []
        prompts: list[Sequence] = []
        for sequence in running:
            if len(sequence.token_ids) - sequence.computed_tokens > DECODE_TOKENS:
                prompts.append(sequence)
            else:
                shares.append((sequence, DECODE_TOKENS))
        del shares[room.decodes_left :]
        if prompts:
            step = room.draft()
            step.take_decodes([sequence for sequence, _ in shares])
            shares += self.limits.shares(prompts, step)
        return shares

    def turned(self, fresh: Self) -> Self:
        return fresh

    def first_chunk(self, sequence: Sequence, room: Room) -> int:
        return self.limits.first_chunk(sequence, room)
