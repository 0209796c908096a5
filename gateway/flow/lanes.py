"""The long lane: long requests and the batch tier, and the share of a replica that they may hold.

Each tier has an ordinary and a long lane, so that a long request without a place holds up only long ones. The
long lane may hold a share of one replica's sequences and KV cache; only work of its tier and above counts, so
a lane full of batch never keeps a long interactive request out. One request may always go.

The lowest tier has a share of its own, by default all of a replica: it does not count in the windows above.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from engine.entry import QueueEntry
from gateway.flow.window import NUM_RANKS, Replica, ReplicaLoad

ORDINARY = 0
LONG = 1
LOWEST_RANK = NUM_RANKS - 1
LONG_CONTEXT_SHARE = 0.75
MOST_LONG_TOKENS = 16_384


def long_tokens_of(context_tokens: int | None) -> int:
    """Default: 3/4 of the pool's context, at most 16,384 tokens. None: no replica announced itself yet."""
    if context_tokens is None:
        return MOST_LONG_TOKENS
    return max(1, min(MOST_LONG_TOKENS, int(context_tokens * LONG_CONTEXT_SHARE)))


@dataclass(frozen=True, slots=True)
class LaneRule:
    """Raises ValueError for a share outside (0, 1] or a length below 1."""

    long_tokens: int = sys.maxsize
    share_sequences: float = 1.0
    share_kv: float = 1.0
    batch_share: float = 1.0

    def __post_init__(self) -> None:
        if self.long_tokens < 1:
            raise ValueError(f"long_tokens must be at least 1, not {self.long_tokens}")
        for name in ("share_sequences", "share_kv", "batch_share"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, not {share!r}")

    def lane(self, entry: QueueEntry) -> int:
        """By its own tier and size."""
        is_long = entry.input_tokens + entry.predicted_output_tokens > self.long_tokens
        return LONG if is_long or entry.tier >= LOWEST_RANK else ORDINARY

    def has_room(
        self, replica: Replica, load: ReplicaLoad, rank: int, sequences: int, kv_tokens: int
    ) -> bool:
        """Whether tier `rank`'s long lane may hold this much more; `load`: of the long lanes there."""
        sequences_ahead, kv_ahead = load.ahead_of(rank)
        if sequences_ahead == 0:
            return True
        share_sequences, share_kv = (
            (self.batch_share, self.batch_share)
            if rank >= LOWEST_RANK
            else (self.share_sequences, self.share_kv)
        )
        # All of it is what the window allows, which may exceed the engine's places.
        fits_sequences = share_sequences == 1 or (
            sequences_ahead + sequences <= max(1, int(replica.max_sequences * share_sequences))
        )
        return fits_sequences and (share_kv == 1 or kv_ahead + kv_tokens <= replica.kv_tokens * share_kv)
