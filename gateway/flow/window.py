"""The dispatch window: how much of a tier may be sent to a replica.

Late dispatch: a request leaves the queue only when the engine can soon run it, so that the queue, which sees
all tenants, decides the order. A tier's window counts only work of that tier and above: a window full of
batch never keeps an interactive request out (the engine makes room).

For a request that is owed service in its own tier the window is wider by a part of the engine's places and KV
cache: the engine pauses a sequence of a tenant that has had more than its share. It is owed service by the
counters (`RequestQueue.is_owed`), or by places: its tenant's live sequences there, its own included, are at
most the tenant's part by weight of the places, among the tenants that wait or run in the tier
(`ReplicaLoad.is_within_share`; max-min fairness). With more tenants than places no part is a whole place, and
the counters alone decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.messages import TIER_RANKS, StepTime
from engine.step_time.model import PRIOR

NUM_RANKS = len(TIER_RANKS)
OWED_PART = 2
"""One in this many of a replica's places may be taken twice over by requests that are owed service."""
OWED_KV_PART = 4
"""One in this many tokens of its KV cache, too: predictions are of sequences at their end, so that part is
hardly ever taken, and where it is the engine sets back a sequence of a tenant that had more."""
MAX_SHARING = 256
"""Most waiting tenants of a lane counted for a part of the places."""


@dataclass(frozen=True, slots=True)
class Replica:
    replica_id: str
    max_sequences: int
    kv_tokens: int
    step_time: StepTime = PRIOR
    max_batched_tokens: int = 512
    pauses: bool = True
    """Its engine pauses a sequence to place a request that is owed service; foreign servers do not."""
    reports: bool = True
    """Its engine reports the service of each step; of others it is known by progress and end."""
    life: str = ""
    """Of its engine: another one after a restart."""
    offers: frozenset[str] = frozenset()
    """Needs of requests that it meets."""


@dataclass(slots=True)
class ReplicaLoad:
    """Dispatched and unfinished work by tier rank."""

    sequences: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    kv_tokens: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)
    """Predicted: prompt and predicted output of every sequence."""
    live: dict[str, list[int]] = field(default_factory=dict)
    """Sequences by tenant and rank, of tenants that have some."""

    def add(self, rank: int, sequences: int, kv_tokens: int, tenant_id: str | None = None) -> None:
        """Adds work (negative: it left), of a tenant where that matters."""
        self.sequences[rank] += sequences
        self.kv_tokens[rank] += kv_tokens
        if tenant_id is not None and sequences:
            live = self.live.setdefault(tenant_id, [0] * NUM_RANKS)
            live[rank] += sequences
            if not any(live):
                del self.live[tenant_id]

    def is_within_share(
        self,
        replica: Replica,
        rank: int,
        tenant_id: str,
        sequences: int,
        waiting: Iterable[str],
        weight_of: Callable[[str], float],
    ) -> bool:
        """Whether with `sequences` more of `rank` the tenant keeps within its part of the places."""
        if not replica.pauses:
            return False
        own = self.live.get(tenant_id)
        live = sequences + (own[rank] if own is not None else 0)
        most = replica.max_sequences * weight_of(tenant_id)
        weights = 0.0
        for name in {tenant_id, *waiting, *(name for name, ranks in self.live.items() if ranks[rank])}:
            weights += weight_of(name)
            if live * weights > most:
                return False
        return True

    def ahead_of(self, rank: int) -> tuple[int, int]:
        return sum(self.sequences[: rank + 1]), sum(self.kv_tokens[: rank + 1])


@dataclass(frozen=True, slots=True)
class KeptRoom:
    """Room kept on a replica for a request that found none; others of its tier and below get the rest."""

    rank: int
    sequences: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class WindowRule:
    """`lookahead_sequences` beyond the engine's places; `kv_window` as a share of the KV capacity;
    `batch_cap` as a share of the places, below 1 without any lookahead."""

    lookahead_sequences: int
    kv_window: float
    batch_cap: float = 1.0

    def places(self, max_sequences: int) -> int:
        if self.batch_cap < 1:
            return max(1, int(max_sequences * self.batch_cap))
        return max_sequences + self.lookahead_sequences

    def has_room(
        self,
        replica: Replica,
        load: ReplicaLoad,
        rank: int,
        sequences: int,
        kv_tokens: int,
        kept: KeptRoom | None = None,
        *,
        is_owed: bool = False,
    ) -> bool:
        """A request above the window's size goes if nothing of its tier or above is there, or never would."""
        sequences_ahead, kv_ahead = load.ahead_of(rank)
        if kept is not None and rank >= kept.rank:
            sequences_ahead += kept.sequences
            kv_ahead += kept.kv_tokens
        if sequences_ahead == 0:
            return True
        places, kv = self.places(replica.max_sequences), replica.kv_tokens * self.kv_window
        if is_owed and replica.pauses:
            places += replica.max_sequences // OWED_PART
            kv += replica.kv_tokens // OWED_KV_PART
        return sequences_ahead + sequences <= places and kv_ahead + kv_tokens <= kv

    def has_place(
        self, replica: Replica, load: ReplicaLoad, rank: int, sequences: int, kv_tokens: int
    ) -> bool:
        """Whether the engine can run it beside all of its tier and above, without looking ahead."""
        sequences_ahead, kv_ahead = load.ahead_of(rank)
        return (
            sequences_ahead + sequences <= replica.max_sequences
            and kv_ahead + kv_tokens <= replica.kv_tokens * self.kv_window
        )
