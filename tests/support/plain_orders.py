"""Every order in its plainest form: a list, scanned whole for each pick.

The twins that the fast orders of `engine.scheduling.orders` are compared with. `scanned` counts what a pick
looks at, so a test can show that its bound on work would notice a scan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from engine.entry import COUNTER_SCALE, QueueEntry
from engine.scheduling.order import buckets, drr, edf, hrrn, hybrid, locality, mlfq, priority, sizes, sjf
from engine.scheduling.order.base import ServiceCountersLike


@dataclass(frozen=True)
class Waiting:
    entry: QueueEntry
    number: int
    """Of its arrival; the smaller the earlier, negative for those who came back to the front."""
    joined_cost: int
    """The clock when it joined for the first time."""


class Plain:
    """A list of those who wait, in no order, and what the clock said when each joined."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        self.counters = counters
        self.waiting: dict[str, Waiting] = {}
        self.first_joined: dict[str, int] = {}
        self.added = 0
        self.added_front = 0
        self.scanned = 0

    @property
    def clock(self) -> int:
        return self.counters.served_cost

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        if front:
            self.added_front += 1
            joined = self.first_joined.get(entry.entry_id, self.clock)
            joined = min([joined, *self.hidden_by(entry)])
            self.waiting[entry.entry_id] = Waiting(entry, -self.added_front, joined)
        else:
            self.added += 1
            self.waiting[entry.entry_id] = Waiting(entry, self.added, self.clock)
        self.first_joined[entry.entry_id] = self.waiting[entry.entry_id].joined_cost

    def hidden_by(self, entry: QueueEntry) -> list[int]:
        """When the one joined before which `entry` returns, where only the first of a line is looked at."""
        return []

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        if not self.waiting:
            return None
        return min(self.waiting.values(), key=lambda each: (self.key(each), each.number)).entry

    def key(self, waiting: Waiting) -> float:
        return 0

    def take(self, entry_id: str) -> QueueEntry:
        return self.waiting.pop(entry_id).entry

    def of_tenant(self, tenant_id: str) -> list[Waiting]:
        return [each for each in self.waiting.values() if each.entry.tenant_id == tenant_id]


class PlainSjf(Plain):
    """Ageing said as it is meant: size minus a share of the wait until now."""

    def key(self, waiting: Waiting) -> float:
        waited = self.clock - waiting.joined_cost
        return sizes.remaining_tokens(waiting.entry) - sjf.AGEING * waited


class PlainLas(Plain):
    def key(self, waiting: Waiting) -> float:
        return waiting.entry.attained_tokens


class PlainByDeadline(Plain):
    """Positions belong to tenants; who takes a tenant's first one goes by what clients ask for."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self.terms: dict[str, tuple[float, float]] = {}
        """What is fixed of the key, and what a token of what is left adds; kept by those that left."""
        self.positions: dict[str, tuple[float, int]] = {}
        """By who holds it."""
        self.own: dict[str, tuple[float, int]] = {}
        self.swaps = 0

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        if not (front and entry.entry_id in self.terms):
            self.terms[entry.entry_id] = self.new_terms(entry)
        super().add(entry, front=front)
        fixed, each_token = self.terms[entry.entry_id]
        key = fixed + each_token * sizes.remaining_tokens(entry)
        self.positions[entry.entry_id] = (key, self.waiting[entry.entry_id].number)
        self.own[entry.entry_id] = (self.own_key(entry, key), self.waiting[entry.entry_id].number)

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        if not self.waiting:
            return None
        tenant_id = self.waiting[self.first_position()].entry.tenant_id
        return min(self.of_tenant(tenant_id), key=lambda each: self.own[each.entry.entry_id]).entry

    def first_position(self) -> str:
        return min(self.waiting, key=lambda entry_id: self.positions[entry_id])

    def take(self, entry_id: str) -> QueueEntry:
        picked, holder = self.pick(), self.first_position()
        if picked is not None and picked.entry_id == entry_id != holder:
            self.positions[entry_id], self.positions[holder] = (
                self.positions[holder],
                self.positions[entry_id],
            )
            for each in (entry_id, holder):
                each_token = self.terms[each][1]
                left = sizes.remaining_tokens(self.waiting[each].entry)
                self.terms[each] = (self.positions[each][0] - each_token * left, each_token)
            self.swaps += 1
        del self.positions[entry_id]
        return super().take(entry_id)

    def new_terms(self, entry: QueueEntry) -> tuple[float, float]:
        raise NotImplementedError

    def own_key(self, entry: QueueEntry, key: float) -> float:
        raise NotImplementedError


class PlainEdf(PlainByDeadline):
    def new_terms(self, entry: QueueEntry) -> tuple[float, float]:
        if entry.deadline_s is None:
            return (entry.arrived_s + edf.DEFAULT_S, 0.0)
        return (min(max(entry.deadline_s, entry.arrived_s), entry.arrived_s + edf.HORIZON_S), 0.0)

    def own_key(self, entry: QueueEntry, key: float) -> float:
        if entry.own_deadline_s is None:
            return key
        wish_s = max(entry.own_deadline_s, entry.arrived_s)
        return wish_s if entry.deadline_s is None else min(key, wish_s)


class PlainPriority(PlainByDeadline):
    def new_terms(self, entry: QueueEntry) -> tuple[float, float]:
        tenants = {each.entry.tenant_id for each in self.waiting.values()}
        least = min((self.counters.value(each) for each in tenants), default=None)
        mine = self.counters.value(entry.tenant_id)
        ahead = 0.0 if least is None else max(0, mine - least) / COUNTER_SCALE
        return (
            priority.TIER_TOKENS * entry.tier
            + self.urgency(entry, entry.deadline_s)
            + priority.HISTORY_WEIGHT * min(priority.HISTORY_CAP_COST, ahead)
            + priority.AGEING * self.clock,
            min(1.0, len(self.waiting) / priority.BUSY_ENTRIES),
        )

    def urgency(self, entry: QueueEntry, deadline_s: float | None) -> float:
        slack_s = priority.HORIZON_S
        if deadline_s is not None:
            slack_s = min(slack_s, max(0.0, deadline_s - entry.arrived_s))
        return priority.URGENCY_TOKENS_PER_S * slack_s

    def own_key(self, entry: QueueEntry, key: float) -> float:
        if entry.own_deadline_s is None:
            return key
        wished = priority.URGENCY_TOKENS_PER_S * max(0.0, entry.own_deadline_s - entry.arrived_s)
        more = self.urgency(entry, entry.deadline_s) - wished
        return key - (more if entry.deadline_s is None else max(0.0, more))


def first_of_class(waiting: list[Waiting]) -> dict[int, Waiting]:
    """By class of sizes, who came first."""
    firsts: dict[int, Waiting] = {}
    for each in sorted(waiting, key=lambda each: -each.number):
        firsts[hrrn.size_class(each.entry.uncached_tokens)] = each
    return firsts


def best_ratio(waiting: list[Waiting], clock: int) -> Waiting:
    """The highest response ratio among the firsts of each class of sizes."""

    def rank(each: Waiting) -> tuple[Fraction, int]:
        return (-Fraction(max(0, clock - each.joined_cost), each.entry.uncached_tokens), each.number)

    return min(first_of_class(waiting).values(), key=rank)


def hidden_in_class(entry: QueueEntry, waiting: list[Waiting]) -> list[int]:
    first = first_of_class(waiting).get(hrrn.size_class(entry.uncached_tokens))
    return [] if first is None else [first.joined_cost]


class PlainHrrn(Plain):
    def hidden_by(self, entry: QueueEntry) -> list[int]:
        return hidden_in_class(entry, list(self.waiting.values()))

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        return best_ratio(list(self.waiting.values()), self.clock).entry if self.waiting else None


class PlainVtc(Plain):
    """Select and lift as in the paper."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self.begun = 0
        self.line_begun: dict[str, int] = {}
        """When each waiting tenant's line began."""
        self.left_last: str | None = None

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        if entry.tenant_id not in self.line_begun:
            if not front:
                self.lift(entry.tenant_id)
            self.begun += 1
            self.line_begun[entry.tenant_id] = self.begun
        super().add(entry, front=front)

    def lift(self, tenant_id: str) -> None:
        value = self.counters.value
        if self.line_begun:
            self.counters.lift(tenant_id, min(value(waiting) for waiting in self.line_begun))
        elif self.left_last is not None:
            self.counters.lift(tenant_id, value(self.left_last))

    def take(self, entry_id: str) -> QueueEntry:
        entry = super().take(entry_id)
        if not self.of_tenant(entry.tenant_id):
            del self.line_begun[entry.tenant_id]
            self.left_last = entry.tenant_id
        return entry

    def head(self, tenant_id: str) -> Waiting:
        return min(self.of_tenant(tenant_id), key=lambda each: each.number)

    def standing(self, tenant_id: str) -> tuple[float, ...]:
        return (
            self.counters.value(tenant_id),
            self.head(tenant_id).entry.arrived_s,
            self.line_begun[tenant_id],
        )

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        if not self.waiting:
            return None
        return self.head(min(self.line_begun, key=self.standing)).entry


class PlainHybrid(PlainVtc):
    """Two lanes; who goes first is found out by looking at all that wait."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self.lane_begun: dict[tuple[str, bool], int] = {}
        """When each waiting tenant's line in each lane began."""
        self.contested = 0
        self.large_first = 0

    def line_of(self, tenant_id: str, large: bool) -> list[Waiting]:
        return [each for each in self.of_tenant(tenant_id) if bool(each.entry.yields_cost) == large]

    def hidden_by(self, entry: QueueEntry) -> list[int]:
        return hidden_in_class(entry, self.line_of(entry.tenant_id, bool(entry.yields_cost)))

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        line = (entry.tenant_id, bool(entry.yields_cost))
        is_new = not self.line_of(*line)
        super().add(entry, front=front)
        if is_new:
            self.lane_begun[line] = self.added + self.added_front

    def first_of_lane(self, large: bool) -> Waiting | None:
        tenants = [tenant for tenant in self.line_begun if self.line_of(tenant, large)]
        if not tenants:
            return None
        value = self.counters.value
        lowest = min(tenants, key=lambda tenant: (value(tenant), self.lane_begun[tenant, large]))
        return best_ratio(self.line_of(lowest, large), self.clock)

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        small, large = self.first_of_lane(False), self.first_of_lane(True)
        if small is None or large is None:
            first = small or large
            return None if first is None else first.entry
        yields = large.entry.yields_cost
        # Scaled as every cost at its weight is.
        ahead = self.counters.value(small.entry.tenant_id) - self.counters.value(large.entry.tenant_id)
        waited = max(0, self.clock - large.joined_cost)
        if waited < hybrid.PATIENCE * yields:
            goes_first = ahead <= round(yields * COUNTER_SCALE / large.entry.weight)
        elif small.entry.tenant_id == large.entry.tenant_id:
            goes_first = self.ratio(small) >= self.ratio(large)
        else:
            goes_first = ahead < 0
        self.contested += 1
        self.large_first += not goes_first
        return small.entry if goes_first else large.entry

    def ratio(self, waiting: Waiting) -> float:
        return (max(0, self.clock - waiting.joined_cost) + waiting.entry.uncached_tokens) / (
            waiting.entry.uncached_tokens
        )


class PlainDrr(Plain):
    """Credit kept by name and refilled round by round."""

    def __init__(self, counters: ServiceCountersLike, quantum_cost: int = drr.QUANTUM_COST) -> None:
        super().__init__(counters)
        self.quantum = quantum_cost * COUNTER_SCALE
        self.granted: dict[str, int] = {}
        """Up to which value its counter may rise."""
        self.round = 0
        self.round_left: dict[str, int] = {}
        self.begun = 0
        self.line_begun: dict[str, int] = {}

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        tenant_id = entry.tenant_id
        if tenant_id not in self.line_begun:
            self.begun += 1
            self.line_begun[tenant_id] = self.begun
            if tenant_id not in self.granted:
                self.granted[tenant_id] = self.counters.value(tenant_id) + self.quantum
            else:
                for _ in range(self.round - self.round_left[tenant_id]):
                    if self.credit(tenant_id, self.granted) <= 0:
                        self.granted[tenant_id] += self.quantum
        super().add(entry, front=front)

    def credit(self, tenant_id: str, granted: dict[str, int]) -> int:
        return granted[tenant_id] - self.counters.value(tenant_id)

    def turn(self) -> tuple[str, dict[str, int], int]:
        """Whose turn it is, and the grants and the round after the refills that were needed."""
        granted, number = dict(self.granted), self.round
        while True:
            for tenant_id in sorted(self.line_begun, key=lambda each: self.line_begun[each]):
                if self.credit(tenant_id, granted) > 0:
                    return tenant_id, granted, number
            for tenant_id in self.line_begun:
                granted[tenant_id] += self.quantum
            number += 1

    def head(self, tenant_id: str) -> Waiting:
        return min(self.of_tenant(tenant_id), key=lambda each: each.number)

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        return self.head(self.turn()[0]).entry if self.waiting else None

    def take(self, entry_id: str) -> QueueEntry:
        tenant_id, granted, number = self.turn()
        if self.waiting[entry_id].entry.tenant_id == tenant_id:
            self.granted, self.round = granted, number
        entry = super().take(entry_id)
        if not self.of_tenant(entry.tenant_id):
            del self.line_begun[entry.tenant_id]
            self.round_left[entry.tenant_id] = self.round
        return entry


class PlainDlpm(PlainDrr):
    def __init__(self, counters: ServiceCountersLike, quantum_cost: int = drr.QUANTUM_COST) -> None:
        super().__init__(counters, quantum_cost)
        self.last_group: dict[str, int] = {}
        self.passes: dict[str, int] = {}

    def oldest(self, tenant_id: str) -> Waiting:
        return min(self.of_tenant(tenant_id), key=lambda each: each.number)

    def head(self, tenant_id: str) -> Waiting:
        line = sorted(self.of_tenant(tenant_id), key=lambda each: each.number)
        if line[0].number < 0 or self.passes.get(tenant_id, 0) >= locality.MAX_PASSES:
            return line[0]
        last = self.last_group.get(tenant_id, 0)
        group = [each for each in line if last and each.entry.locality == last]
        if group:
            return group[0]
        # Of those who came back, each is the oldest before anybody else is looked at.
        return max(line, key=lambda each: (each.entry.cached_tokens if each.number > 0 else 0, -each.number))

    def take(self, entry_id: str) -> QueueEntry:
        tenant_id = self.waiting[entry_id].entry.tenant_id
        is_turn = self.head(tenant_id).entry.entry_id == entry_id
        is_oldest = self.oldest(tenant_id).entry.entry_id == entry_id
        entry = super().take(entry_id)
        if is_turn:
            self.last_group[tenant_id] = entry.locality
        if is_oldest:
            self.passes[tenant_id] = 0
        elif is_turn:
            self.passes[tenant_id] = self.passes.get(tenant_id, 0) + 1
        if not self.of_tenant(tenant_id):
            self.last_group.pop(tenant_id, None)
            self.passes.pop(tenant_id, None)
        return entry


class PlainMlfq(Plain):
    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self.promoted_at: dict[str, int] = {}

    def level(self, entry: QueueEntry) -> int:
        if entry.entry_id in self.promoted_at:
            level, left = 0, entry.attained_tokens - self.promoted_at[entry.entry_id]
        else:
            level, left = 0, entry.attained_tokens
            prompt = entry.input_tokens - entry.cached_tokens
            while level < mlfq.LEVELS - 1 and mlfq.Q0_TOKENS * 2**level < prompt:
                level += 1
        while level < mlfq.LEVELS - 1 and left >= mlfq.Q0_TOKENS * 2**level:
            left -= mlfq.Q0_TOKENS * 2**level
            level += 1
        return level

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        # What counts is how long it has not run: the wait begins anew whenever it joins.
        self.first_joined.pop(entry.entry_id, None)
        super().add(entry, front=front)

    def hidden_by(self, entry: QueueEntry) -> list[int]:
        line = [each for each in self.waiting.values() if self.level(each.entry) == self.level(entry)]
        return [min(line, key=lambda each: each.number).joined_cost] if line else []

    def is_starved(self, waiting: Waiting) -> bool:
        return self.clock - waiting.joined_cost >= mlfq.STARVED_COST

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        heads: dict[int, Waiting] = {}
        for each in sorted(self.waiting.values(), key=lambda each: -each.number):
            heads[self.level(each.entry)] = each
        in_0 = {
            level: each.joined_cost + (mlfq.STARVED_COST if level else 0)
            for level, each in heads.items()
            if level == 0 or self.is_starved(each)
        }
        if in_0:
            return heads[min(in_0, key=lambda level: (in_0[level], level))].entry
        return heads[min(heads)].entry if heads else None

    def take(self, entry_id: str) -> QueueEntry:
        entry = self.waiting[entry_id].entry
        if self.level(entry) > 0 and self.is_starved(self.waiting[entry_id]):
            self.promoted_at[entry_id] = entry.attained_tokens
        return super().take(entry_id)


class PlainBuckets(Plain):
    """Edges in a list; who lies where is found out anew each time."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        super().__init__(counters)
        self.edges = [0, buckets.LONGEST_TOKENS]
        self.current: tuple[int, int] | None = None
        self.taken = 0

    def inside(self, low: int, high: int) -> list[Waiting]:
        return [each for each in self.waiting.values() if low <= buckets.bucket_size(each.entry) < high]

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self.edges, self.edges[1:], strict=False))

    def range_of(self, entry: QueueEntry) -> tuple[int, int]:
        size = buckets.bucket_size(entry)
        return next((low, high) for low, high in self.ranges() if low <= size < high)

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        super().add(entry, front=front)
        low, high = self.range_of(entry)
        while True:
            full, middle = len(self.inside(low, high)), (low + high) // 2
            if (
                full < 2 * buckets.BATCH_ENTRIES
                or 2 * len(self.inside(low, middle)) <= full
                or high - low < 2 * buckets.NARROWEST_TOKENS
                or len(self.edges) > buckets.MAX_BUCKETS
            ):
                return
            self.edges = sorted([*self.edges, middle])
            self.current = None
            high = middle

    def turn(self) -> tuple[int, int]:
        if self.current is not None and self.taken < buckets.RUN_ENTRIES:
            return self.current
        oldest = min(self.waiting.values(), key=lambda each: each.number)
        return self.range_of(oldest.entry)

    def pick(self) -> QueueEntry | None:
        self.scanned += len(self.waiting)
        if not self.waiting:
            return None
        return min(self.inside(*self.turn()), key=lambda each: each.number).entry

    def take(self, entry_id: str) -> QueueEntry:
        picked = self.pick()
        if picked is not None and picked.entry_id == entry_id:
            turn = self.turn()
            goes_on = turn == self.current and self.taken < buckets.RUN_ENTRIES
            self.taken = self.taken + 1 if goes_on else 1
            self.current = turn
        entry = super().take(entry_id)
        if self.current is not None and not self.inside(*self.current):
            self.current = None
        if len(self.waiting) < buckets.BATCH_ENTRIES and len(self.edges) > 2:
            self.edges = [0, buckets.LONGEST_TOKENS]
            self.current = None
        return entry


PLAIN: dict[str, Callable[[ServiceCountersLike], Plain]] = {
    "fcfs": Plain, "hrrn": PlainHrrn, "sjf": PlainSjf, "srpt": PlainSjf, "las": PlainLas,
    "mlfq": PlainMlfq, "priority": PlainPriority, "edf": PlainEdf, "drr": PlainDrr, "dlpm": PlainDlpm,
    "vtc": PlainVtc, "hybrid": PlainHybrid, "buckets": PlainBuckets,
}  # fmt: skip
