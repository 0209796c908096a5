"""Finds a replica with room for a request, or names what is in the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum

from engine.scheduling.brakes import NO_BRAKES
from gateway.flow.knobs import QueueSettings
from gateway.flow.lanes import LONG
from gateway.flow.types import InFlight, Ticket
from gateway.flow.window import NUM_RANKS, KeptRoom, Replica, ReplicaLoad

Score = tuple[float, ...]
"""The smaller the better."""


def least_loaded(rank: int, replica: Replica, load: ReplicaLoad) -> Score:
    """Work that a request of tier `rank` would have to share with, then all work, per place."""
    ahead = load.ahead_of(rank)[0] / replica.max_sequences
    return (ahead, sum(load.sequences) / replica.max_sequences)


class Scorer:
    """Chooses among replicas with room, here the least loaded; notified of every dispatch and end."""

    wants_prefixes = False
    """Whether it uses `Ticket.prefix_hashes`."""
    prefix_weight = 1.0
    """How much a cached prefix counts: 1 for what it saves, 0 for nothing."""

    def scores(
        self, ticket: Ticket, rank: int, candidates: Sequence[tuple[Replica, ReplicaLoad]], now_s: float
    ) -> Sequence[Score]:
        """One score a candidate for a request of tier `rank` at the engine. Changes nothing."""
        return [least_loaded(rank, replica, load) for replica, load in candidates]

    def dispatched(self, flight: InFlight, replica: Replica, now_s: float) -> None: ...

    def first_token(self, entry_id: str) -> None:
        """Its prompt is computed. Idempotent."""

    def foreseen(self, entry_id: str, left_tokens: int) -> None:
        """Expected further tokens, all sequences together."""

    def ended(self, entry_id: str) -> None: ...

    def forget(self, replica_id: str) -> None: ...


class Blocked(Enum):
    """Why a request goes nowhere now."""

    LANE = "lane"
    """Its lane or its braked tier holds all that it may, everywhere that it could run."""
    WINDOW = "window"
    """Some replica would take it if less were in flight there; or none serves."""


class Placement:
    """The load of every replica. One writer: the flow controller."""

    def __init__(self, settings: QueueSettings, scorer: Scorer) -> None:
        self._promised = settings
        """The operator's, which knobs leave as they are: reserved service goes by them."""
        self.scorer = scorer
        self.window, self.lanes = settings.window, settings.lanes
        self.brakes = NO_BRAKES
        self._loads: defaultdict[str, ReplicaLoad] = defaultdict(ReplicaLoad)
        self._long_loads: defaultdict[str, ReplicaLoad] = defaultdict(ReplicaLoad)

    def load(self, replica_id: str) -> ReplicaLoad:
        return self._loads.get(replica_id) or ReplicaLoad()

    @property
    def kv_tokens(self) -> int:
        """Predicted, of everything in flight on all replicas."""
        return sum(sum(load.kv_tokens) for load in self._loads.values())

    def add(self, flight: InFlight, sequences: int, kv_tokens: int) -> None:
        """Counts a request's work at its replica (negative: it left)."""
        self._loads[flight.replica_id].add(flight.tier, sequences, kv_tokens, flight.ticket.entry.tenant_id)
        if flight.is_long:
            self._long_loads[flight.replica_id].add(flight.tier, sequences, kv_tokens)

    def has_place(self, ticket: Ticket, rank: int, replica: Replica) -> bool:
        """Whether its engine can run a request beside all of its tier and above."""
        load = self.load(replica.replica_id)
        return self.window.has_place(replica, load, rank, ticket.sequences, ticket.kv_tokens)

    def find(
        self,
        ticket: Ticket,
        rank: int,
        lane: int,
        replicas: Sequence[Replica],
        kept: dict[str, KeptRoom],
        now_s: float,
        *,
        is_owed: bool = False,
        is_owed_at: Callable[[Replica], bool] = lambda replica: False,
        is_promised: bool = False,
    ) -> Replica | Blocked:
        """The best of the replicas that can run it and have room; `kept` is what is kept there for others, by
        replica id; `is_owed`: it may take the place of a tenant that has had more; `is_owed_at`: on one
        replica; `is_promised`: by a reservation."""
        roomy: list[tuple[Replica, ReplicaLoad]] = []
        blocked = Blocked.LANE if replicas else Blocked.WINDOW
        for replica in replicas:
            if not ticket.needs <= replica.offers or not self._may_hold(
                ticket, rank, lane, replica, is_promised=is_promised
            ):
                continue
            load = self._loads[replica.replica_id]
            asked = (replica, load, rank, ticket.sequences, ticket.kv_tokens, kept.get(replica.replica_id))
            if (
                self.window.has_room(*asked, is_owed=is_owed)
                or (is_owed_at(replica) and self.window.has_room(*asked, is_owed=True))
                or (is_promised and self._promised.window.has_room(*asked))
            ):
                roomy.append((replica, load))
            else:
                blocked = Blocked.WINDOW
        if not roomy:
            return blocked
        if len(roomy) == 1:
            return roomy[0][0]
        scores = self.scorer.scores(ticket, rank, roomy, now_s)
        return min(
            ((score, replica.replica_id, replica) for score, (replica, _) in zip(scores, roomy, strict=True)),
            key=lambda scored: scored[:2],
        )[2]

    def keep_room(
        self,
        ticket: Ticket,
        rank: int,
        lane: int,
        replicas: Sequence[Replica],
        kept: dict[str, KeptRoom],
        *,
        is_promised: bool = False,
    ) -> None:
        """Keeps room on one replica for a request that found none: the least loaded, allowed and free."""
        free = [
            (least_loaded(rank, replica, self.load(replica.replica_id)), replica.replica_id)
            for replica in replicas
            if replica.replica_id not in kept
            and ticket.needs <= replica.offers
            and self._may_hold(ticket, rank, lane, replica, is_promised=is_promised)
        ]
        if free:
            kept[min(free)[1]] = KeptRoom(rank, ticket.sequences, ticket.kv_tokens)

    def check(self, flights: Sequence[InFlight]) -> None:
        """Raises `AssertionError` when the loads are not those of the requests in flight."""
        for loads, only_long in ((self._loads, False), (self._long_loads, True)):
            for replica_id, load in loads.items():
                for rank in range(NUM_RANKS):
                    mine = [
                        flight
                        for flight in flights
                        if flight.replica_id == replica_id
                        and flight.tier == rank
                        and (flight.is_long or not only_long)
                    ]
                    assert load.sequences[rank] == sum(flight.live_sequences for flight in mine), "sequences"
                    assert load.kv_tokens[rank] == sum(flight.kv_tokens for flight in mine), "KV tokens"

    def _may_hold(self, ticket: Ticket, rank: int, lane: int, replica: Replica, *, is_promised: bool) -> bool:
        """Whether the request's tier, by its brake, and its lane may hold this much more of a replica."""
        if rank in self.brakes.shares:
            held = self.load(replica.replica_id)
            if not self.brakes.has_room(
                rank,
                (held.sequences[rank], held.kv_tokens[rank]),
                (ticket.sequences, ticket.kv_tokens),
                (replica.max_sequences, replica.kv_tokens),
            ):
                return False
        if lane != LONG:
            return True
        load = self._long_loads.get(replica.replica_id)
        asked = (rank, ticket.sequences, ticket.kv_tokens)
        return (
            load is None
            or self.lanes.has_room(replica, load, *asked)
            or (is_promised and self._promised.lanes.has_room(replica, load, *asked))
        )
