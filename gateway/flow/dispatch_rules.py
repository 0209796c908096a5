"""Rules of dispatch: which request goes next, and to which replica.

Until nothing more may go, at one instant:

1. **Due reservations** (`mclock.py`), across tiers: the tenant whose tag is the oldest sends its own
   first request, of the tier that it reserved for. It counts and runs as one of the highest tier, so that no
   flood there can keep it waiting.
2. **Bands**, strict: by the effective tier, which a long wait raises (`ageing.py`).
3. **Lanes** of a band (`lanes.py`): the head whose tenant's counter is lower goes first, then the one that
   arrived first. A full long lane holds back only itself.
4. **Tenants** and their requests by the policy's order (`vtc`: weighted fair by service counter). A tenant
   that was idle in a lane is lifted there when it returns, and never gets credit for the idle time; one that
   stayed below its share and was hardly ever without a request keeps its lag, within bounds (`in_flight.py`).
5. **The window** (`window.py`), wider for requests that are owed service, by the counters or by places:
   where the first of the ordinary lane finds no room, none behind it goes, whatever the size. For a long or a
   reserved request that finds none, the room is kept on one replica, and others go on beside it.
6. **The replica** by the scorer's choice among those with room (`placement.py`, `routing.py`).

Reserved service goes by the operator's window and lanes, where a knob of the control loop leaves less room:
what was promised is not shrunk.

A tier under an operator's brake (`engine/scheduling/brakes.py`) that holds all it may holds back only itself:
lower tiers go on. Reserved service stands outside: it runs as one of the highest tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from gateway.flow.lanes import LONG
from gateway.flow.mclock import MclockReservations
from gateway.flow.placement import Blocked, Placement
from gateway.flow.queue import RequestQueue
from gateway.flow.tenant_stats import TenantFlows
from gateway.flow.types import Dispatch, Reason, Ticket
from gateway.flow.window import NUM_RANKS, KeptRoom, Replica

RESERVED_RANK = 0
"""Of reserved service at the engine and in the window."""

Grant = Callable[[Ticket, Replica, int, float, Reason], Dispatch]
"""(ticket, replica, rank at the engine, now_s, why): removes it from the queue and charges it."""


class DispatchRules:
    """State changes only through `grant`."""

    def __init__(
        self,
        queue: RequestQueue,
        placement: Placement,
        reservations: MclockReservations,
        tenants: TenantFlows,
    ) -> None:
        self._queue = queue
        self._tenants = tenants
        self._placement = placement
        self._reservations = reservations

    def turns(self, now_s: float, replicas: Sequence[Replica], grant: Grant) -> list[Dispatch]:
        kept: dict[str, KeptRoom] = {}
        turns: list[Dispatch] = []
        self._by_reservation(now_s, replicas, kept, turns, grant)
        self._by_order(now_s, replicas, kept, turns, grant)
        return turns

    def _by_reservation(
        self,
        now_s: float,
        replicas: Sequence[Replica],
        kept: dict[str, KeptRoom],
        turns: list[Dispatch],
        grant: Grant,
    ) -> None:
        passed_over: set[str] = set()
        while (tenant_id := self._reservations.first_due(now_s, passed_over)) is not None:
            tier = self._reservations.tier(tenant_id)
            for lane, ticket in self._queue.firsts_of(tenant_id, now_s, tier):
                found = self._placement.find(
                    ticket, RESERVED_RANK, lane, replicas, kept, now_s, is_promised=True
                )
                if found is Blocked.LANE:
                    continue
                if found is Blocked.WINDOW:
                    self._placement.keep_room(ticket, RESERVED_RANK, lane, replicas, kept, is_promised=True)
                    passed_over.add(tenant_id)
                else:
                    turns.append(grant(ticket, found, RESERVED_RANK, now_s, Reason.RESERVATION))
                break
            else:
                passed_over.add(tenant_id)

    def _by_order(
        self,
        now_s: float,
        replicas: Sequence[Replica],
        kept: dict[str, KeptRoom],
        turns: list[Dispatch],
        grant: Grant,
    ) -> None:
        for tier in range(NUM_RANKS):
            held_back: set[int] = set()
            # For the most part a turn is that of the only one who waits.
            while len(self._queue):
                heads = [head for head in self._queue.heads(tier, now_s) if head[0] not in held_back]
                if not heads:
                    break
                lane, ticket = heads[0]
                is_owed = lane != LONG and self._queue.is_owed(ticket.entry, tier)
                is_owed_at = partial(self._is_owed_at, ticket, tier, lane)
                found = self._placement.find(
                    ticket, tier, lane, replicas, kept, now_s, is_owed=is_owed, is_owed_at=is_owed_at
                )
                if isinstance(found, Replica):
                    is_owed = is_owed or is_owed_at(found)
                    reason = Reason.OWED if is_owed else Reason.ORDER
                    turns.append(grant(ticket, found, tier, now_s, reason))
                elif found is Blocked.WINDOW and lane != LONG:
                    return
                else:
                    held_back.add(lane)
                    if found is Blocked.WINDOW:
                        self._placement.keep_room(ticket, tier, lane, replicas, kept)

    def _is_owed_at(self, ticket: Ticket, tier: int, lane: int, replica: Replica) -> bool:
        """Whether a request without a free place at a replica is owed one, by its tenant's part."""
        if lane == LONG or not self._queue.tiers.is_by_tenant:
            return False
        if self._placement.has_place(ticket, tier, replica):
            return False
        return self._placement.load(replica.replica_id).is_within_share(
            replica,
            tier,
            ticket.entry.tenant_id,
            ticket.sequences,
            self._queue.waiting_in(tier),
            self._tenants.weight,
        )
