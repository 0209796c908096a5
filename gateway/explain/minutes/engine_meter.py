"""Counts, by minute, what the engines of a pool did. Pure.

From load reports, once a second; totals restart with an engine. Other servers report only what they hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.messages import Ready, Snapshot
from tenants.counts.minute_store import MINUTE_US, EngineKey, EngineMinute


class SeenReplica(Protocol):
    @property
    def replica_id(self) -> str: ...
    @property
    def is_up(self) -> bool: ...
    @property
    def ready(self) -> Ready | None: ...
    @property
    def snapshot(self) -> Snapshot | None: ...


@dataclass(frozen=True, slots=True)
class EngineTotals:
    steps: int = 0
    step_us: int = 0
    batch_sum: int = 0
    computed_tokens: int = 0
    emitted_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0

    @staticmethod
    def of(snapshot: Snapshot) -> EngineTotals:
        service = snapshot.service.values()
        return EngineTotals(
            snapshot.step,
            snapshot.step_us,
            snapshot.batch_sum,
            sum(row.computed_tokens for row in service),
            sum(row.emitted_tokens for row in service),
            snapshot.recomputed_tokens,
            snapshot.preemptions,
        )


class EngineMeter:
    """One pool's replicas. One writer: the gateway's event loop."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self._minutes: dict[EngineKey, EngineMinute] = {}
        self._seen: dict[str, EngineTotals] = {}
        self._last_s: float | None = None

    def sample(self, now_s: float, wall_s: float, replicas: Iterable[SeenReplica]) -> None:
        """The first call only starts the count."""
        since_s, self._last_s = self._last_s, now_s
        elapsed_us = 0 if since_s is None else round((now_s - since_s) * 1e6)
        minute_us = (int(wall_s * 1e6) - elapsed_us) // MINUTE_US * MINUTE_US
        for replica in replicas:
            snapshot = replica.snapshot
            before = self._seen.get(replica.replica_id)
            totals = None if snapshot is None else EngineTotals.of(snapshot)
            if totals is not None:
                self._seen[replica.replica_id] = totals
            if not elapsed_us:
                continue
            key = EngineKey(minute_us, self.pool, replica.replica_id)
            minute = self._minutes.setdefault(key, EngineMinute())
            minute.state = "up" if replica.is_up else "down"
            minute.seen_us += elapsed_us
            if not replica.is_up or snapshot is None:
                continue
            minute.up_us += elapsed_us
            minute.kv_permille_s += round(kv_permille(replica.ready, snapshot) * elapsed_us / 1e6)
            if totals is not None and before is not None:
                since = EngineTotals() if before.steps > totals.steps else before
                _add(minute, totals, since)
                minute.idle_us += _idle_us(totals, since, snapshot, elapsed_us)

    def take(self, now_us: int | None = None) -> dict[EngineKey, EngineMinute]:
        """Removes and returns the minutes that were over at `now_us`; None: all."""
        over = [key for key in self._minutes if now_us is None or key.minute_us + MINUTE_US <= now_us]
        return {key: self._minutes.pop(key) for key in over}


def _add(minute: EngineMinute, totals: EngineTotals, since: EngineTotals) -> None:
    for name in EngineTotals.__dataclass_fields__:
        more: int = getattr(totals, name) - getattr(since, name)
        setattr(minute, name, getattr(minute, name) + max(0, more))


def _idle_us(totals: EngineTotals, since: EngineTotals, snapshot: Snapshot, elapsed_us: int) -> int:
    if not totals.steps:  # it reports none
        return 0 if snapshot.running else elapsed_us
    return max(0, elapsed_us - max(0, totals.step_us - since.step_us))


def kv_permille(ready: Ready | None, snapshot: Snapshot) -> float:
    """Thousandths of the KV cache held by sequences; of other servers, what theirs have come to so far."""
    if snapshot.step or ready is None:
        return 1000 * snapshot.referenced_blocks / max(1, snapshot.num_blocks)
    held = sum(sequence.computed_tokens + sequence.emitted_tokens for sequence in snapshot.running)
    return min(1000.0, 1000 * held / max(1, ready.num_blocks * ready.block_tokens))
