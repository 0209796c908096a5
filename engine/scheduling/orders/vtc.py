"""Virtual token counter: the backlogged tenant with the least service per weight goes next.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. While two tenants are both backlogged
their service per weight differs by at most 2U, U = max(input cost of the longest prompt, output cost of the
tokens in the running batch), for however long.

- **Select**: smallest counter among tenants with a waiting entry (ties: the earliest arrival), its oldest
  entry. Whoever runs the order stops where that one does not fit, and does not look for one that does:
  skipping would void the bound.
- **Lift**, when a tenant without a waiting entry adds one: to the smallest counter of the waiting tenants; if
  nobody waits, to the counter of the tenant that left the queue last. So idle time earns nothing. Both
  branches only raise.
- A preempted entry (`front`) goes back to the head of its tenant's line and lifts nothing: its tenant was not
  idle, its work was taken away.
- Fair by tenant: keys, projects and connections of one tenant share one line and one counter.

Within a tenant: first come, first served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.scheduling.order import Entry, ServiceCountersLike


class Vtc:
    """One line a tenant, ranked by `counters`, which somebody else charges."""

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._counters = counters
        self._lines: dict[str, OrderedDict[str, Entry]] = {}
        self._tenants: dict[str, str] = {}
        """Entry id -> tenant id."""
        self._left_last: str | None = None
        """The tenant whose line emptied most recently."""

    def add(self, entry: Entry, *, front: bool = False) -> None:
        """Joins its tenant's line, at the end or at the head. Raises ValueError if it waits already."""
        if entry.entry_id in self._tenants:
            raise ValueError(f"entry {entry.entry_id!r} waits already")
        line = self._lines.get(entry.tenant_id)
        if line is None:
            if not front:
                self._lift(entry.tenant_id)
            line = self._lines[entry.tenant_id] = OrderedDict()
        line[entry.entry_id] = entry
        if front:
            line.move_to_end(entry.entry_id, last=False)
        self._tenants[entry.entry_id] = entry.tenant_id

    def peek(self, now_s: float) -> Entry | None:
        """The oldest entry of the waiting tenant with the smallest counter."""
        tenant_id = self._next_tenant()
        return None if tenant_id is None else next(iter(self._lines[tenant_id].values()))

    def pop(self, now_s: float) -> Entry:
        """Takes what `peek` names. Raises IndexError when nobody waits."""
        tenant_id = self._next_tenant()
        if tenant_id is None:
            raise IndexError("pop from an empty order")
        entry = next(iter(self._lines[tenant_id].values()))
        self._take(entry.entry_id)
        return entry

    def remove(self, entry_id: str) -> Entry | None:
        """Takes an entry out wherever it stands; None when it does not wait."""
        return self._take(entry_id) if entry_id in self._tenants else None

    def entries(self) -> Iterator[Entry]:
        """All waiting entries."""
        for line in self._lines.values():
            yield from line.values()

    def clone(self, counters: ServiceCountersLike) -> Vtc:
        """An independent copy that ranks by `counters`."""
        copy = Vtc(counters)
        copy._lines = {tenant_id: OrderedDict(line) for tenant_id, line in self._lines.items()}
        copy._tenants = dict(self._tenants)
        copy._left_last = self._left_last
        return copy

    def __len__(self) -> int:
        return len(self._tenants)

    def _next_tenant(self) -> str | None:
        value = self._counters.value
        best: tuple[int, float] | None = None
        chosen: str | None = None
        for tenant_id, line in self._lines.items():
            rank = (value(tenant_id), next(iter(line.values())).arrived_s)
            if best is None or rank < best:
                best, chosen = rank, tenant_id
        return chosen

    def _take(self, entry_id: str) -> Entry:
        tenant_id = self._tenants.pop(entry_id)
        line = self._lines[tenant_id]
        entry = line.pop(entry_id)
        if not line:
            del self._lines[tenant_id]
            self._left_last = tenant_id
        return entry

    def _lift(self, tenant_id: str) -> None:
        value = self._counters.value
        if self._lines:
            self._counters.lift(tenant_id, min(value(waiting) for waiting in self._lines))
        elif self._left_last is not None:
            self._counters.lift(tenant_id, value(self._left_last))
