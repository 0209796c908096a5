"""The plan of one step: which sequence gets how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv.host import Copies
from engine.scheduling.admit.base import Defer
from engine.scheduling.room import Room
from engine.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """One step's work: how many tokens for whom."""

    room: Room
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    """Gave up their blocks."""
    paused: list[Sequence] = field(default_factory=list)
    """Lost their place to another; their KV is kept."""
    copies: Copies = field(default_factory=lambda: Copies([], []))
    """KV that moves to host memory and back before the step."""
    hold: Defer | None = None
    """Why the head of the line may not join yet."""

    @property
    def shares(self) -> dict[Sequence, int]:
        """Tokens handed out, by sequence, in the order in which they were."""
        return self.room.given

    @property
    def num_tokens(self) -> int:
        """Tokens handed out."""
        return self.room.used_tokens
