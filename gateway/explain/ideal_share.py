"""What tenants would have had of a pool's real service under an ideal fair share.

An ideal queue gets the same requests and the same service: reservations first, then tier by tier, within a
tier by weighted max-min among the tenants with something left. What each is due over time is the service of
generalised processor sharing (Parekh and Gallager 1993); the parts of any stretch add up to the service given
in it. In cost tokens (input + 2 x output); the shape of engine steps is in `fluid_share.py`.

A request's cost is as predicted until it ends, then as counted. Service within a stretch counts as even, cut
at arrivals that make a tenant backlogged, at most `MAX_CUTS` times. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from gateway.explain.fluid_share import max_min
from gateway.explain.shares import TenantTier
from gateway.flow.window import NUM_RANKS

MAX_CUTS = 20
MAX_WORK = 5_000
"""Cuts of one stretch, and the most of them times tenants that have something left: a cut looks at each."""
MAX_TENANTS = 10_000
"""Tenants that are remembered while nothing of theirs waits or runs."""
MAX_CHANGES = 50_000
"""Arrivals and ends that wait for their stretch; later ones count at once."""
NOTHING = 1e-6
"""Cost tokens: less counts as nothing."""


class FairTerms(msgspec.Struct, frozen=True):
    """What a tenant is entitled to."""

    weight: float = 1.0
    reserved_per_s: float = 0.0
    """Cost tokens a second that go first."""
    reserved_tier: int | None = None
    """The rank of the tier that they are for; None: all."""


class _Change(msgspec.Struct, frozen=True):
    """A request arrived (`open` 1), or has ended (-1), which changes what is left by `cost`."""

    at_s: float
    tenant_id: str
    rank: int
    cost: float
    open: int
    terms: FairTerms | None = None


@dataclass(slots=True)
class _IdealLine:
    """One tenant in the ideal queue."""

    terms: FairTerms
    left: list[float] = field(default_factory=lambda: [0.0] * NUM_RANKS)
    """Of what it sent, by tier, what it would not have had yet. Negative: it had more than was predicted."""
    open: int = 0
    """Its requests that wait or run in the real queue."""

    def reserved_left(self) -> float:
        """What its reservation is for."""
        tier = self.terms.reserved_tier
        return sum(max(0.0, each) for each in self.left) if tier is None else max(0.0, self.left[tier])


class IdealShare:
    """The ideal queue of one pool. One writer."""

    def __init__(self) -> None:
        self._lines: dict[str, _IdealLine] = {}
        self._changes: list[_Change] = []
        self._at_s: float | None = None
        self._due: dict[TenantTier, float] = {}

    def arrived(self, at_s: float, tenant_id: str, rank: int, cost: float, terms: FairTerms) -> None:
        """A request could run from now on."""
        self._change(_Change(at_s, tenant_id, rank, cost, 1, terms))

    def ended(self, at_s: float, tenant_id: str, rank: int, predicted: float, cost: float) -> None:
        self._change(_Change(at_s, tenant_id, rank, cost - predicted, -1))

    def _change(self, change: _Change) -> None:
        if len(self._changes) < MAX_CHANGES:
            self._changes.append(change)
        else:
            self._apply(change)

    def advance(
        self, until_s: float, had: Mapping[TenantTier, int], elsewhere: int = 0
    ) -> dict[TenantTier, float]:
        """What each was due of the service since the last call: `had`, and `elsewhere` of unknown owner."""
        first_s = min((each.at_s for each in self._changes), default=until_s)
        since_s = min(until_s, first_s if self._at_s is None else self._at_s)
        self._at_s, self._due = until_s, {}
        total = float(sum(had.values()) + elsewhere)
        left = self._divide_up_to(since_s, until_s, total)
        taken = self._take_back()
        left = self._divide(left + sum(taken.values()), 0.0)
        if left > NOTHING:
            # Nothing more was asked for, as far as is known: so it went where it should.
            if total:
                self._give_back(left * (total - elsewhere) / total, had)
            else:
                self._give_back(left, taken)
        self._forget()
        return self._due

    def _forget(self) -> None:
        """Keeps tenants with something open or left. With nothing open at all nothing is left for anyone."""
        if not self._changes and not any(line.open for line in self._lines.values()):
            self._lines.clear()
            return
        is_full = len(self._lines) > MAX_TENANTS
        self._lines = {
            tenant_id: line
            for tenant_id, line in self._lines.items()
            if line.open or (not is_full and any(abs(left) > NOTHING for left in line.left))
        }

    def _divide_up_to(self, since_s: float, until_s: float, total: float) -> float:
        """Divides `total`, cut where a tenant becomes backlogged; returns what was left."""
        self._changes.sort(key=lambda change: change.at_s)
        per_s = total / (until_s - since_s) if until_s > since_s else 0.0
        cuts = max(1, min(MAX_CUTS, MAX_WORK // max(1, len(self._lines))))
        shortest_s = (until_s - since_s) / cuts
        left = 0.0 if per_s else total
        applied = 0
        for change in self._changes:
            if change.at_s > until_s:
                break
            applied += 1
            line = self._lines.get(change.tenant_id)
            is_news = line is None or line.left[change.rank] <= NOTHING
            if is_news and change.at_s - since_s >= shortest_s > 0:
                left = self._divide(left + per_s * (change.at_s - since_s), change.at_s - since_s)
                since_s = change.at_s
            self._apply(change)
        del self._changes[:applied]
        return self._divide(left + per_s * (until_s - since_s), until_s - since_s)

    def _apply(self, change: _Change) -> None:
        line = self._lines.get(change.tenant_id)
        if line is None:
            line = self._lines[change.tenant_id] = _IdealLine(change.terms or FairTerms())
        line.terms = change.terms or line.terms
        line.left[change.rank] += change.cost
        line.open = max(0, line.open + change.open)

    def _divide(self, amount: float, seconds: float) -> float:
        """Gives `amount` to those who have something left; returns what is left over."""
        if amount <= NOTHING:
            return amount
        amount = self._divide_reserved(amount, seconds)
        for rank in range(NUM_RANKS):
            asking = [(each, line) for each, line in self._lines.items() if line.left[rank] > NOTHING]
            if asking and amount > NOTHING:
                wanted = [line.left[rank] for _, line in asking]
                parts = max_min(wanted, [line.terms.weight for _, line in asking], amount)
                for (tenant_id, line), part in zip(asking, parts, strict=True):
                    self._give(tenant_id, line, rank, part)
                amount -= sum(parts)
        return amount

    def _divide_reserved(self, amount: float, seconds: float) -> float:
        reserving = [
            (each, line)
            for each, line in self._lines.items()
            if line.terms.reserved_per_s > 0 and line.reserved_left() > NOTHING
        ]
        if not reserving or seconds <= 0:
            return amount
        rates = [line.terms.reserved_per_s for _, line in reserving]
        wanted = [
            min(rate * seconds, line.reserved_left())
            for rate, (_, line) in zip(rates, reserving, strict=True)
        ]
        parts = max_min(wanted, rates, amount)
        for (tenant_id, line), part in zip(reserving, parts, strict=True):
            left = part
            for rank in range(NUM_RANKS):
                if line.terms.reserved_tier in (None, rank):
                    given = min(left, max(0.0, line.left[rank]))
                    self._give(tenant_id, line, rank, given)
                    left -= given
        return amount - sum(parts)

    def _give(self, tenant_id: str, line: _IdealLine, rank: int, amount: float) -> None:
        if not amount:
            return
        line.left[rank] -= amount
        self._due[tenant_id, rank] = self._due.get((tenant_id, rank), 0.0) + amount

    def _take_back(self) -> dict[TenantTier, float]:
        """What tenants without open requests were given beyond their real cost."""
        taken: dict[TenantTier, float] = {}
        for tenant_id, line in self._lines.items():
            for rank, left in enumerate(line.left):
                if left < -NOTHING and not line.open:
                    taken[tenant_id, rank] = -left
                    self._give(tenant_id, line, rank, left)
        return taken

    def _give_back(self, amount: float, to: Mapping[TenantTier, float]) -> None:
        total = sum(to.values())
        for (tenant_id, rank), part in to.items() if total else ():
            line = self._lines.setdefault(tenant_id, _IdealLine(FairTerms()))
            self._give(tenant_id, line, rank, amount * part / total)
