"""Puts requests that were refused as late back into recorded traffic: all that was submitted is there then.

A recording has what was served. Where admission refused what would have missed its target, a replay without
that would have too little to do. How many were refused is counted exactly, by minute and tenant; when in its
minute each came, and how long its prompt and answer would have been, is not known: they come at equal
distances, and their lengths are those of answers of their tenant (else of anyone), drawn with a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ops.simulate.recorded import Recorded, RecordedAnswer

CODES = ("target_unreachable", "deadline_unreachable")
"""Of errors that say a request would have been late."""
MOST_PER_SERVED = 3.0
"""Beyond that the most of them are repetitions of clients that are refused again and again."""


@dataclass(frozen=True, slots=True)
class RefusedCount:
    """Requests of one tenant that were refused as late."""

    since_us: int
    span_us: int
    """A minute, or an hour where minutes were added up."""
    tenant: str
    """Its name."""
    count: int

    def arrivals_us(self) -> list[int]:
        """At equal distances."""
        return [
            self.since_us + self.span_us * (2 * number + 1) // (2 * self.count)
            for number in range(self.count)
        ]


def with_refused(
    recorded: Recorded, counts: Iterable[RefusedCount], since_us: int, until_us: int
) -> Recorded:
    """The recording with the refused requests of that time in it; unchanged where they are more than
    `MOST_PER_SERVED` for each that was served."""
    rng = random.Random("refused")
    by_tenant: dict[str, list[RecordedAnswer]] = {}
    for each in recorded.served:
        by_tenant.setdefault(each.tenant, []).append(each)
    added = [
        _refused(rng.choice(alike), count.tenant, at_us, bool(by_tenant.get(count.tenant)))
        for count in sorted(counts, key=lambda each: (each.since_us, each.tenant))
        if (alike := by_tenant.get(count.tenant) or recorded.served)
        for at_us in count.arrivals_us()
        if since_us <= at_us < until_us
    ]
    if len(added) > MOST_PER_SERVED * len(recorded.served):
        return recorded
    together: Sequence[RecordedAnswer] = sorted([*recorded.served, *added], key=lambda each: each.arrived_us)
    return replace(recorded, served=tuple(together))


def _refused(alike: RecordedAnswer, tenant: str, at_us: int, is_its_own: bool) -> RecordedAnswer:
    """A request like that one, of which nothing came."""
    terms = alike.terms if is_its_own else structs.replace(alike.terms, limits=())
    return replace(
        alike,
        tenant=tenant,
        terms=terms,
        arrived_us=at_us,
        in_line_us=at_us,
        first_us=0,
        last_us=0,
        preemptions=0,
        dispatched_us=0,
        is_refused=True,
    )
