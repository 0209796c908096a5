"""What has happened in a KV cache since it was made?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KvCounts:
    """What has happened since the cache was made."""

    hit_tokens: int = 0
    """Tokens that a sequence found in the cache when it started or came back."""
    adopted_tokens: int = 0
    """Tokens that another one computed while a sequence was running."""
    deferrals: int = 0
    """Steps that a sequence waited for another's blocks."""
    published_blocks: int = 0
    revived_blocks: int = 0
    """Cached blocks that were wanted again."""
    duplicate_blocks: int = 0
    """Blocks computed though an equal one had been published meanwhile."""
    evicted_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
