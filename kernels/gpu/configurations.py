"""AttentionLaunch configurations of the attention kernels, as data; nothing is tuned at run time.

For bfloat16 and head dims of 64 and 128 they are an H200's best; the others are what compiles without spills.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_PARTS = 32
WIDTHS = (32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """How a program attends: for `rows` query heads times tokens, to `keys` tokens at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    """Of the loop over keys; the load of the block table counts as one."""
    goal: int = 0
    """Most programs of decodes: contexts are cut into the power of two of parts that keeps to it; 0: none."""
    least: int = 64
    """Tokens of a part; a multiple of `keys`."""

    def parts(self, programs: int) -> int:
        """Into how many, at most, contexts are cut where `programs` would attend to whole ones."""
        return 1 << (min(MOST_PARTS, max(1, self.goal // programs)).bit_length() - 1)


_DECODES = (
    (32, AttentionLaunch(16, 64, 4, 5, 256)),
    (128, AttentionLaunch(16, 64, 2, 5, 512, 256)),
    (384, AttentionLaunch(16, 64, 2, 5, 1024, 1024)),
    (1 << 40, AttentionLaunch(16, 64, 2, 3)),
)
_FLOAT_DECODES = ((384, AttentionLaunch(16, 16, 4, 2, 512, 256)), (1 << 40, AttentionLaunch(16, 16, 4, 2)))
DECODES = {
    **dict.fromkeys([(2, width) for width in WIDTHS[:3]], _DECODES),
    (2, 256): ((384, AttentionLaunch(16, 32, 4, 3, 512, 256)), (1 << 40, AttentionLaunch(16, 32, 4, 3))),
    **dict.fromkeys([(4, width) for width in WIDTHS], _FLOAT_DECODES),
}
"""By bytes of a number and the head dim's next power of two: the most rows times key/value heads, and how."""
TILES = {
    (2, 32): AttentionLaunch(64, 64, 4, 3),
    (2, 64): AttentionLaunch(128, 64, 8, 3),
    (2, 128): AttentionLaunch(64, 64, 4, 2),
    (2, 256): AttentionLaunch(64, 32, 8, 2),
    **dict.fromkeys([(4, width) for width in WIDTHS[:3]], AttentionLaunch(32, 16, 8, 2)),
    (4, 256): AttentionLaunch(16, 16, 8, 2),
}
TILES_BEFORE_90 = TILES | {(2, 128): AttentionLaunch(64, 32, 4, 3)}
"""Before compute capability 9.0, where 64 keys at once spill."""


def power_of_two(number: int, least: int = 1) -> int:
    """The next one, from `number` and from `least` on."""
    return max(least, 1 << (number - 1).bit_length())


def decode_launch(programs: int, head_dim: int, dtype: torch.dtype) -> AttentionLaunch:
    """`programs`: rows times key/value heads. Raises `KeyError` for a head dim above 256."""
    choices = DECODES[dtype.itemsize, power_of_two(head_dim, 32)]
    return next(launch for most, launch in choices if programs <= most)


def tile_launch(head_dim: int, dtype: torch.dtype, capability: int) -> AttentionLaunch:
    """For prompts, chunks and mixed steps; `capability` as 90. Raises `KeyError` for a head dim above 256."""
    return (TILES if capability >= 90 else TILES_BEFORE_90)[dtype.itemsize, power_of_two(head_dim, 32)]


def tile_tokens(group: int, head_dim: int) -> int:
    """Of `PackedBatch.tiles`, at most, where `group` query heads share a key/value head of `head_dim`."""
    return max(1, TILES[2, power_of_two(head_dim, 32)].rows // power_of_two(group))
