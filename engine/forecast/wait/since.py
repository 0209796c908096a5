"""What has come since a replay, as requests that are forecast between two replays count it.

A request counts from its own estimate on: of a burst each one's estimate contains those before it. Pure; sums
by tier and tenant.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.entry import QueueEntry


class Since(msgspec.Struct, frozen=True, gc=False):
    """What has come and left since a replay, for one request of some line."""

    more: int
    """Requests of its tier and above that have come, less those that have left."""
    ahead: float
    """Of `more`, those that go before it by the queue's order."""
    own_cost: int = 0
    others_cost: int = 0
    higher_cost: int = 0
    """Cost tokens of those that came and go before it: its tenant's, others' of its tier, higher tiers'."""
    input_tokens: int = 0
    """Prompt tokens of all of its tier and above that came."""
    mean_input_tokens: int = 0
    mean_output_tokens: tuple[int, int] = (0, 0)
    """Of those that came, p50 and p90 of an answer; 0 where none came."""
    quoted: int = 0
    """Of `more`, its tenant's outstanding quotes: they decode beside it where they are redeemed together."""


NOTHING_SINCE = Since(0, 0.0)


class _Came(msgspec.Struct):
    """Requests of one tenant, or of all, in one tier."""

    requests: int = 0
    cost: int = 0
    weight: float = 0.0
    """Of all tenants together."""
    input_tokens: int = 0
    output_tokens: int = 0
    high_tokens: int = 0


class ComingSince:
    """Requests that came since the last replay. One writer: the code that makes estimates."""

    def __init__(self) -> None:
        self._by_tier: dict[int, _Came] = {}
        self._by_line: dict[tuple[str, int], _Came] = {}

    def __bool__(self) -> bool:
        return bool(self._by_tier)

    def note(self, entry: QueueEntry) -> None:
        """A request comes."""
        tier = self._by_tier.setdefault(entry.tier, _Came())
        line = self._by_line.get((entry.tenant_id, entry.tier))
        if line is None:
            line = self._by_line[entry.tenant_id, entry.tier] = _Came(weight=entry.weight)
            tier.weight += entry.weight
        output = entry.predicted_output_tokens
        for came in (tier, line):
            came.requests += 1
            came.cost += entry.predicted_cost
            came.input_tokens += entry.input_tokens
            came.output_tokens += output
            came.high_tokens += max(output, entry.predicted_high_tokens)

    def with_quoted(self, entries: Sequence[QueueEntry]) -> ComingSince:
        """A copy that contains these as well."""
        both = ComingSince()
        both._by_tier = {tier: msgspec.structs.replace(came) for tier, came in self._by_tier.items()}
        both._by_line = {line: msgspec.structs.replace(came) for line, came in self._by_line.items()}
        for entry in entries:
            both.note(entry)
        return both

    def ahead_of(
        self, tenant_id: str, weight: float, tier: int, *, more: int, own_waiting: int | None, quoted: int = 0
    ) -> Since:
        """For a request of this line. `more`: requests of its tier and above that came, less those that left;
        `own_waiting`: its tenant's requests in line where tenants take turns; None: they do not; `quoted`:
        those of `more` that are outstanding quotes.

        Of other tenants as much goes first as their turns bring before its own: by weight, for each of its
        tenant's requests and this one.
        """
        band, line = self._by_tier.get(tier, _NONE), self._by_line.get((tenant_id, tier), _NONE)
        above = [came for rank, came in self._by_tier.items() if rank < tier]
        others = others_ahead = float(band.requests - line.requests)
        if own_waiting is not None and others:
            turns = max(line.requests, own_waiting) + 1
            others_ahead = min(others, turns * (band.weight - line.weight) / weight)
        higher = sum(came.requests for came in above)
        came_in_all = higher + band.requests
        left = came_in_all - more
        count = came_in_all or 1
        inputs = band.input_tokens + sum(came.input_tokens for came in above)
        outputs = band.output_tokens + sum(came.output_tokens for came in above)
        highs = band.high_tokens + sum(came.high_tokens for came in above)
        return Since(
            more=more,
            ahead=higher + line.requests + others_ahead - left,
            own_cost=line.cost,
            others_cost=round((band.cost - line.cost) * others_ahead / (others or 1.0)),
            higher_cost=sum(came.cost for came in above),
            input_tokens=inputs,
            mean_input_tokens=inputs // count,
            mean_output_tokens=(outputs // count, highs // count),
            quoted=quoted,
        )


_NONE = _Came()
