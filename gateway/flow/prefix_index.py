"""Approximate index of the prompt blocks in each replica's prefix cache.

Kept by the dispatching side: what was sent to a replica is assumed to be in its cache until it is older than
`max_age_s` or until as many younger blocks went there as it can hold. The replica's own tree is the truth; a
wrong guess costs time, never correctness.

Blocks are known by a chain of hashes: each covers its block and all before it, and the first one the tenant's
salt, so that a hit of one prefix tells nothing of another tenant's.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

BLOCK_TOKENS = 64
"""Coarser than an engine's blocks: precise enough to choose by, at a quarter of the work."""
MAX_BLOCKS = 512
"""Of one prompt; later blocks are assumed to be in no cache."""


def prefix_hashes(
    token_ids: Sequence[int], salt: str, *, block_tokens: int = BLOCK_TOKENS, most: int = MAX_BLOCKS
) -> tuple[int, ...]:
    """64-bit hash chain of the prompt's full blocks (at most `most`), without its last token. O(tokens)."""
    blocks = min(most, (len(token_ids) - 1) // block_tokens)
    if blocks <= 0:
        return ()
    tokens = memoryview(array("q", token_ids[: blocks * block_tokens])).cast("B")
    width = block_tokens * 8
    chain: list[int] = []
    parent = blake2b(salt.encode(), digest_size=8).digest()
    for start in range(0, blocks * width, width):
        digest = blake2b(parent, digest_size=8)
        digest.update(tokens[start : start + width])
        parent = digest.digest()
        chain.append(int.from_bytes(parent, "big"))
    return tuple(chain)


class PrefixIndex:
    """The blocks of one replica, least recently used first. O(blocks of the prompt) an operation."""

    def __init__(self, max_blocks: int, max_age_s: float) -> None:
        self._used_s: OrderedDict[int, float] = OrderedDict()
        self._max_blocks = max_blocks
        self._max_age_s = max_age_s

    def held(self, hashes: Sequence[int], now_s: float) -> int:
        oldest_s = now_s - self._max_age_s
        for number, block_hash in enumerate(hashes):
            used_s = self._used_s.get(block_hash)
            if used_s is None or used_s < oldest_s:
                return number
        return len(hashes)

    def note(self, hashes: Sequence[int], now_s: float) -> None:
        """Notes a prompt sent there. Its deepest blocks are forgotten first, as the replica evicts them."""
        for block_hash in reversed(hashes):
            self._used_s[block_hash] = now_s
            self._used_s.move_to_end(block_hash)
        while len(self._used_s) > self._max_blocks:
            self._used_s.popitem(last=False)

    def __len__(self) -> int:
        return len(self._used_s)
