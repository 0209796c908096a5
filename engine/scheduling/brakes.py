"""Brakes: what an operator lets a tier hold for a while, as a share of an engine.

A hard cap, also where capacity stays idle, on places, the KV cache (as predicted) and each step's tokens; one
request of a braked tier may always run. What runs above its share when a brake is set runs on, with fewer
tokens from the next step on. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Brakes:
    """Shares by tier rank; a tier without one is not braked. Raises ValueError for a share outside (0, 1]."""

    shares: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, share in self.shares.items():
            if not 0 < share <= 1:
                raise ValueError(f"a brake's share is above 0 and at most 1, not {share!r} (tier {rank})")

    def most(self, rank: int, whole: int) -> int:
        """What a tier may hold of `whole`, at least 1."""
        share = self.shares.get(rank)
        return whole if share is None else max(1, int(whole * share))

    def has_room(self, rank: int, held: tuple[int, int], more: tuple[int, int], of: tuple[int, int]) -> bool:
        """Whether a tier holding `held` sequences and KV tokens may hold `more`; always if it holds none."""
        if rank not in self.shares or not held[0]:
            return True
        return all(
            have + wanted <= self.most(rank, whole)
            for have, wanted, whole in zip(held, more, of, strict=True)
        )


NO_BRAKES = Brakes()
