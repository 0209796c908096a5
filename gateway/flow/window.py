"""The dispatch window: how much of a tier may be sent to a replica.

Late dispatch: a request leaves the queue only when the engine can soon run it, so that the queue, which
sees all tenants, decides the order, and not the engine's backlog. A tier's window counts only work of that
tier and above: a window full of batch never keeps an interactive request out (the engine then makes room by
itself).

For a request that is owed service in its own tier (`RequestQueue.is_owed`) the window is wider by a part of
the engine's places: the engine pauses a sequence of a tenant that has had more than its share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.messages import TIER_RANKS, StepTime
from engine.step_time.model import PRIOR

NUM_RANKS = len(TIER_RANKS)
OWED_PART = 2
"""One in this many of a replica's places may be taken twice over by requests that are owed service."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine's size, as it announced it."""

    replica_id: str
    max_sequences: int
    kv_tokens: int
    step_time: StepTime = PRIOR
    """As last fitted."""
    max_batched_tokens: int = 512
    pauses: bool = True
    """Its engine pauses a sequence to place a request that is owed service; foreign servers do not."""


@dataclass(slots=True)
class ReplicaLoad:
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
class Kept:
    """Room that is kept on one replica for a request that found none: others of its tier and below may fill
    only what it leaves."""

    rank: int
    sequences: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class WindowRule:
    """`lookahead_sequences` beyond the engine's places; `kv_window` as a share of the KV capacity;
    `batch_cap` as a share of the places, below 1 without any lookahead."""

    lookahead_sequences: int
    kv_window: float
    batch_cap: float = 1.0

    def places(self, max_sequences: int) -> int:
        """Sequences that an engine may have."""
        if self.batch_cap < 1:
            return max(1, int(max_sequences * self.batch_cap))
        return max_sequences + self.lookahead_sequences

    def has_room(
        self,
        replica: Replica,
        load: ReplicaLoad,
        rank: int,
        sequences: int,
        kv_tokens: int,
        kept: Kept | None = None,
        *,
        is_owed: bool = False,
    ) -> bool:
        """A request larger than the whole window may go when nothing of its tier or above is there:
        otherwise it would wait for ever."""
        sequences_ahead, kv_ahead = load.ahead_of(rank)
        if kept is not None and rank >= kept.rank:
            sequences_ahead += kept.sequences
            kv_ahead += kept.kv_tokens
        if sequences_ahead == 0:
            return True
        places = self.places(replica.max_sequences)
        if is_owed and replica.pauses:
            places += replica.max_sequences // OWED_PART
        return (
            sequences_ahead + sequences <= places
            and kv_ahead + kv_tokens <= replica.kv_tokens * self.kv_window
        )
