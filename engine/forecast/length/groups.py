"""Sketches of a tenant's end users and conversations: further layers of the length forecast.

A group with few samples borrows from its tenant. A conversation is the longest known beginning of the prompt,
by the hashes of its leading blocks, and goes on from what was learned there. In memory only, without names or
texts. Bounded: the groups seen longest ago are forgotten first; a tenant that makes up groups without end
forgets its own. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.forecast.length.histograms import Sketch

MAX_GROUPS = 4096
MOST_OF_ONE = 16
"""One in this many places may be a tenant's own; with more it makes room by itself."""
BORROWS = 4.0
"""Samples that the tenant's distribution is worth in a group's."""
CARRIED = 2.0
"""Samples that count at most of what was learned at a conversation's beginning."""

Group = tuple[str, str, int]


class GroupSketches:
    """Sketches by group. One writer: the code that sees answers end."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._max_groups = max_groups
        self._sketches: dict[Group, Sketch] = {}
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sketches)

    def find(self, tenant_id: str, model_id: str, hashes: Iterable[int]) -> Sketch | None:
        """The first of the groups that is known."""
        for group in hashes:
            sketch = self._sketches.get((tenant_id, model_id, group))
            if sketch is not None:
                return sketch
        return None

    def observe(
        self, tenant_id: str, model_id: str, group: int, output_tokens: int, begun: Sketch | None = None
    ) -> None:
        """An answer of `group` had `output_tokens`; `begun`: what a new group goes on from."""
        key = (tenant_id, model_id, group)
        # Taken out and put back: the dictionary's order is that of the last observations.
        sketch = self._sketches.pop(key, None)
        if sketch is None:
            sketch = Sketch() if begun is None else begun.carried(CARRIED)
            self._held[tenant_id] += 1
        sketch.observe(output_tokens)
        self._sketches[key] = sketch
        if len(self._sketches) > self._max_groups:
            self._forget_one(tenant_id)

    def _forget_one(self, newcomer: str) -> None:
        own = self._held[newcomer] > self._max_groups // MOST_OF_ONE
        oldest = next(key for key in self._sketches if not own or key[0] == newcomer)
        del self._sketches[oldest]
        self._held[oldest[0]] -= 1
        if not self._held[oldest[0]]:
            del self._held[oldest[0]]
