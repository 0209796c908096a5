"""Has a replica room for one more request of this tier?

Late dispatch: a request leaves the queue only when the engine can soon run it, so that the queue, which
sees all tenants, decides who is next, and not the engine's backlog. A tier's window counts only work of
that tier and above: a window full of batch never keeps an interactive request out (the engine then makes
room by itself).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import TIER_RANKS

NUM_RANKS = len(TIER_RANKS)


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine's size, as it announced it."""

    replica_id: str
    max_sequences: int
    kv_tokens: int


@dataclass(slots=True)
class Load:
    """What is dispatched to one replica and has not finished, by tier rank."""

    sequences: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    kv_tokens: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """Predicted: prompt and predicted output of every sequence."""

    def add(self, rank: int, sequences: int, kv_tokens: int) -> None:
        """Adds work (negative: it left)."""
        self.sequences[rank] += sequences
        self.kv_tokens[rank] += kv_tokens

    def ahead_of(self, rank: int) -> tuple[int, int]:
        """Sequences and KV tokens of tier `rank` and above."""
        return sum(self.sequences[: rank + 1]), sum(self.kv_tokens[: rank + 1])


@dataclass(frozen=True, slots=True)
class WindowRule:
    """`lookahead_sequences` beyond what runs at once; `kv_window` as a share of the KV capacity."""

    lookahead_sequences: int
    kv_window: float

    def has_room(self, replica: Replica, load: Load, rank: int, sequences: int, kv_tokens: int) -> bool:
        """A request larger than the whole window may go when nothing of its tier or above is there:
        otherwise it would wait for ever."""
        sequences_ahead, kv_ahead = load.ahead_of(rank)
        if sequences_ahead == 0:
            return True
        return (
            sequences_ahead + sequences <= replica.max_sequences + self.lookahead_sequences
            and kv_ahead + kv_tokens <= replica.kv_tokens * self.kv_window
        )
