"""Compose decision: which running sequences get tokens this step, and how many."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol, Self

from engine.scheduling.room import Room
from engine.sequence import Sequence


class Compose(Protocol):
    """Contract: the shares sum to at most `room.tokens`; no sequence appears twice; each share is between 1
    and what the sequence has left to compute; with anything running and room for it, something is shared.

    Neither method hands out tokens of `room`: the scheduler notes what it grants (a share may fail for want
    of memory). They may note there who was held back.
    """

    @property
    def name(self) -> str: ...

    @property
    def claims(self) -> frozenset[str]:
        """See `engine.scheduling.claims`."""
        ...

    @property
    def serves_all(self) -> bool:
        """Every decoding sequence gets a token each step: there must be at least as many tokens as places."""
        ...

    @property
    def prompts_last(self) -> bool:
        """Running prompts share after admissions, with newcomers'; `shares` is asked for decodes first."""
        ...

    def floor_holds(self, decoding: SequenceOf[Sequence], room: Room, steps: int = 1) -> bool:
        """Whether each of `decoding` (all running) gets a token in each of `steps` steps. False: unknown."""
        ...

    def shares(self, running: SequenceOf[Sequence], room: Room) -> list[tuple[Sequence, int]]:
        """Tokens for the running sequences, in the order in which they claim memory."""
        ...

    def turned(self, fresh: Self) -> Self:
        """This choice with the numbers of `fresh` that knobs turn: the same object where it keeps state."""
        ...

    def first_chunk(self, sequence: Sequence, room: Room) -> int:
        """Tokens for a sequence that is just being admitted; 0: not in this step."""
        ...
