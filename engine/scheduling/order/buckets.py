"""Length buckets: prompts of like length one after the other (BucketServe, arXiv 2507.17120).

A bucket in which most entries lie below the midpoint of its range is split there once it is full enough; when
fewer wait than fill a batch, all are merged. The order stays with one bucket until its line is empty or `run`
of its entries were taken, then goes to the bucket whose head has waited longest.

Guarantee: an entry behind n others is served after at most (n + 1) x `run` turns. Loses where nothing is
padded, and under sparse load.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.entry import QueueEntry
from engine.scheduling.claims import NO_STARVATION, SAFE, WORK_CONSERVATION
from engine.scheduling.order.base import NeverInterrupts, ServiceCountersLike

BATCH_ENTRIES = 16
"""Fewer than these are one bucket; twice as many in one bucket may be split."""
RUN_ENTRIES = 32
LONGEST_TOKENS = 32_768
"""Where the last bucket ends at first; longer ones are in it, too."""
NARROWEST_TOKENS = 32
MAX_BUCKETS = 32


@dataclass(slots=True, eq=False)
class _Bucket:
    """Entries of `low` <= size < `high`, with their numbers, in order of arrival."""

    low: int
    high: int
    line: OrderedDict[str, tuple[QueueEntry, int]] = field(default_factory=OrderedDict)
    num_below: int = 0

    @property
    def midpoint(self) -> int:
        return (self.low + self.high) // 2

    @property
    def head_number(self) -> int:
        """The smaller, the longer its head has waited."""
        return next(iter(self.line.values()))[1]

    def put(self, entry: QueueEntry, number: int) -> None:
        self.line[entry.entry_id] = (entry, number)
        self.num_below += bucket_size(entry) < self.midpoint

    def copy(self) -> _Bucket:
        return _Bucket(self.low, self.high, self.line.copy(), self.num_below)


def bucket_size(entry: QueueEntry) -> int:
    return min(entry.uncached_tokens, LONGEST_TOKENS - 1)


class Buckets(NeverInterrupts):
    """A line for each range of lengths; the ranges follow the load."""

    name = "buckets"
    claims = SAFE | {WORK_CONSERVATION, NO_STARVATION}
    batch_entries = BATCH_ENTRIES
    run_entries = RUN_ENTRIES

    def __init__(self, counters: ServiceCountersLike) -> None:
        self._buckets = [_Bucket(0, LONGEST_TOKENS)]
        self._lows = [0]
        self._bucket_of: dict[str, _Bucket] = {}
        self._current: _Bucket | None = None
        self._taken = 0
        self._added = 0
        self._added_front = 0
        self.operations = 0

    def add(self, entry: QueueEntry, *, front: bool = False) -> None:
        entry_id = entry.entry_id
        if entry_id in self._bucket_of:
            raise ValueError(f"entry {entry_id!r} waits already")
        bucket = self._bucket_for(entry)
        if front:
            self._added_front += 1
            bucket.put(entry, -self._added_front)
            bucket.line.move_to_end(entry_id, last=False)
        else:
            self._added += 1
            bucket.put(entry, self._added)
        self._bucket_of[entry_id] = bucket
        self.operations += len(self._buckets).bit_length()
        self._split(bucket)

    def peek(self, now_s: float) -> QueueEntry | None:
        bucket = self._next()
        return None if bucket is None else next(iter(bucket.line.values()))[0]

    def pop(self, now_s: float) -> QueueEntry:
        bucket = self._next()
        if bucket is None:
            raise IndexError("pop from an empty order")
        return self._take(next(iter(bucket.line)))

    def remove(self, entry_id: str) -> QueueEntry | None:
        return self._take(entry_id) if entry_id in self._bucket_of else None

    def entries(self) -> Iterator[QueueEntry]:
        for bucket in self._buckets:
            for entry, _ in bucket.line.values():
                yield entry

    def edges(self) -> list[int]:
        return [bucket.high for bucket in self._buckets]

    def rank(self, entry: QueueEntry, now_s: float) -> tuple[float, ...]:
        """0 in the bucket whose run it is, else 1; then when it arrived."""
        return (0 if self._bucket_for(entry) is self._next() else 1, entry.arrived_s)

    def clone(self, counters: ServiceCountersLike) -> Buckets:
        copy = type(self)(counters)
        copy._buckets = [bucket.copy() for bucket in self._buckets]
        copy._lows = self._lows.copy()
        copy._bucket_of = {entry_id: bucket for bucket in copy._buckets for entry_id in bucket.line}
        if self._current is not None:
            copy._current = copy._buckets[self._buckets.index(self._current)]
        copy._taken = self._taken
        copy._added = self._added
        copy._added_front = self._added_front
        copy.operations = self.operations
        return copy

    def __len__(self) -> int:
        return len(self._bucket_of)

    def _bucket_for(self, entry: QueueEntry) -> _Bucket:
        return self._buckets[bisect_right(self._lows, bucket_size(entry)) - 1]

    def _next(self) -> _Bucket | None:
        if self._current is not None and self._taken < self.run_entries:
            return self._current
        self.operations += len(self._buckets)
        waiting = [bucket for bucket in self._buckets if bucket.line]
        return min(waiting, key=lambda bucket: bucket.head_number, default=None)

    def _take(self, entry_id: str) -> QueueEntry:
        turn = self._next()
        bucket = self._bucket_of.pop(entry_id)
        if bucket is turn and entry_id == next(iter(bucket.line)):
            goes_on = bucket is self._current and self._taken < self.run_entries
            self._taken = self._taken + 1 if goes_on else 1
            self._current = bucket
        entry, _ = bucket.line.pop(entry_id)
        bucket.num_below -= bucket_size(entry) < bucket.midpoint
        if bucket is self._current and not bucket.line:
            self._current = None
        if len(self) < self.batch_entries and len(self._buckets) > 1:
            self._merge()
        return entry

    def _split(self, bucket: _Bucket) -> None:
        """In two at the midpoint, and so on, while most of what is in it lies below."""
        while (
            len(bucket.line) >= 2 * self.batch_entries
            and 2 * bucket.num_below > len(bucket.line)
            and bucket.high - bucket.low >= 2 * NARROWEST_TOKENS
            and len(self._buckets) < MAX_BUCKETS
        ):
            lower = _Bucket(bucket.low, bucket.midpoint)
            upper = _Bucket(bucket.midpoint, bucket.high)
            for entry_id, (entry, number) in bucket.line.items():
                half = lower if bucket_size(entry) < bucket.midpoint else upper
                half.put(entry, number)
                self._bucket_of[entry_id] = half
            self.operations += len(bucket.line)
            place = self._buckets.index(bucket)
            self._buckets[place : place + 1] = [lower, upper]
            self._lows.insert(place + 1, upper.low)
            self._current = None
            bucket = lower

    def _merge(self) -> None:
        waiting = [item for bucket in self._buckets for item in bucket.line.values()]
        merged = _Bucket(0, LONGEST_TOKENS)
        for entry, number in sorted(waiting, key=lambda item: item[1]):
            merged.put(entry, number)
            self._bucket_of[entry.entry_id] = merged
        self.operations += len(waiting)
        self._buckets, self._lows = [merged], [0]
        self._current = None
