"""Skip-join multi-level feedback queue: lines of doubling quanta, joined where the prompt fits.

FastServe (Wu et al., arXiv 2305.05920): level k has a quantum of `Q0_TOKENS` x 2^k. A newcomer's first piece
of work, its prompt, is known, so it joins the first level whose quantum covers it instead of being demoted
through those that do not. After its quantum of service it drops a level. An entry of a higher level (a
smaller number) interrupts one of a lower level. Service is prompt tokens computed once plus tokens emitted,
so the level follows from the entry itself.

Who has waited until others got `starved_cost` cost tokens is promoted: it stands in level 0 with those that
joined that one at the time, and begins there anew, with a quantum of its own before it can be interrupted.

Guarantee: a waiting entry is served at the latest when others got `starved_cost` plus what stood in level 0
then; each such turn is at least `Q0_TOKENS` long. Needs no predictor; good where lengths are heavy-tailed.
Loses when all are alike, and holds KV for many half-done entries.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.base import ServiceCountersLike, SizeKey
from engine.scheduling.order.recent import Recent

LEVELS = 16
Q0_TOKENS = 64
STARVED_COST = 32_768


class Mlfq:
    name = "mlfq"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    interrupts = True
    size_key: SizeKey = "cost"
    starved_cost = STARVED_COST

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._counters = counters
        self._lines: list[OrderedDict[str, tuple[QueueEntry, int]]] = [OrderedDict() for _ in range(LEVELS)]
        self._levels: dict[str, int] = {}
        self._promoted: Recent[int] = Recent()
        """Service that an entry had had when it was promoted."""
        self.operations = 0

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        entry_id = entry.entry_id
        if entry_id in self._levels:
            raise ValueError(f"entry {entry_id!r} waits already")
        level = self._level_by_service(entry)
        line = self._lines[level]
        joined_cost = self._counters.served_cost
        if front and line:
            # It stands before the head, so it must not hide how long that one has waited.
            joined_cost = min(joined_cost, next(iter(line.values()))[1])
        line[entry_id] = (entry, joined_cost)
        if front:
            line.move_to_end(entry_id, last=False)
        self._levels[entry_id] = level
        self.operations += 1

    def peek(self, now_s: float) -> QueueEntry | None:
        """Of level 0 and the promoted, the one that joined first; else the head of the first level."""
        return self._next()

    def pop(self, now_s: float) -> QueueEntry:
        entry = self._next()
        if entry is None:
            raise IndexError("pop from an empty order")
        return self._take(entry.entry_id)

    def remove(self, entry_id: str) -> QueueEntry | None:
        return self._take(entry_id) if entry_id in self._levels else None

    def entries(self) -> Iterator[QueueEntry]:
        for line in self._lines:
            for entry, _ in line.values():
                yield entry

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        return (self.level(entry),)

    def level(self, entry: QueueEntry) -> int:
        level = self._levels.get(entry.entry_id)
        if level is None:
            return self._level_by_service(entry)
        return 0 if self._is_starved(self._lines[level][entry.entry_id][1]) else level

    def outranks(self, waiting: QueueEntry, running: QueueEntry, now_s: float) -> bool:
        return self.level(waiting) < self.level(running)

    def clone(self, counters: ServiceCountersLike) -> Mlfq:
        copy = type(self)(counters)
        copy._lines = [line.copy() for line in self._lines]
        copy._levels = self._levels.copy()
        copy._promoted = self._promoted.copy()
        copy.operations = self.operations
        return copy

    def __len__(self) -> int:
        return len(self._levels)

    def _is_starved(self, joined_cost: int) -> bool:
        return self._counters.served_cost - joined_cost >= self.starved_cost

    def _level_by_service(self, entry: QueueEntry) -> int:
        promoted_at = self._promoted.get(entry.entry_id)
        if promoted_at is not None:
            first, used = 0, max(0, entry.attained_tokens - promoted_at)
        else:
            prompt = max(1, entry.input_tokens - entry.cached_tokens)
            # The smallest k with q0 x 2^k >= prompt.
            first = min(LEVELS - 1, (-(-prompt // Q0_TOKENS) - 1).bit_length())
            used = entry.attained_tokens
        # Quanta of the levels first .. k add up to q0 x (2^(k + 1) - 2^first).
        spent = used // Q0_TOKENS + (1 << first)
        return min(LEVELS - 1, spent.bit_length() - 1)

    def _next(self) -> QueueEntry | None:
        """Heads only: in one level, who stands first has waited longest."""
        best: QueueEntry | None = None
        best_joined_0: int | None = None
        for level, line in enumerate(self._lines):
            self.operations += 1
            if not line:
                continue
            entry, joined_cost = next(iter(line.values()))
            if level == 0:
                joined_0 = joined_cost
            elif self._is_starved(joined_cost):
                joined_0 = joined_cost + self.starved_cost
            else:
                best = best or entry
                continue
            if best_joined_0 is None or joined_0 < best_joined_0:
                best, best_joined_0 = entry, joined_0
        return best

    def _take(self, entry_id: str) -> QueueEntry:
        level = self._levels.pop(entry_id)
        entry, joined_cost = self._lines[level].pop(entry_id)
        if level > 0 and self._is_starved(joined_cost):
            self._promoted.note(entry_id, entry.attained_tokens)
        self.operations += 1
        return entry
