"""The plan of one step: which sequence gets how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv.host import Copies
from engine.scheduling.admit.base import Defer
from engine.scheduling.room import Room
from engine.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """Work of one step: tokens by sequence."""

    room: Room
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    """Sequences that lost their place; their KV is kept."""
    copies: Copies = field(default_factory=lambda: Copies([], []))
    """KV copies to host memory and back, before the step."""
    hold: Defer | None = None

    @property
    def shares(self) -> dict[Sequence, int]:
        """Tokens handed out, by sequence, in the order of hand-out."""
        return self.room.given

    @property
    def num_tokens(self) -> int:
        return self.room.used_tokens
