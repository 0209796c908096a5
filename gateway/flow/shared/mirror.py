"""One gateway's part of a shared queue.

Its own requests, in an ordinary flow controller that decides nothing while the pool does: turns are passed
in. It serves status pages, is sent again when Redis has lost its data, and decides while Redis is away, if
allowed. Forecasts also see others' waiting requests (`see`), at each tenant's mean size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from engine.messages import TenantShare
from engine.scheduling.brakes import Brakes
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import UnknownPolicy
from engine.scheduling.tiers import TieredQueue
from gateway.flow.controller import Dispatch, FlowController, Ticket
from gateway.flow.routing import PrefixRouter
from gateway.flow.shared import codec
from gateway.flow.shared.codec import TenantWaiting
from gateway.flow.tenant_stats import TenantLine
from gateway.flow.types import Reason
from gateway.flow.window import Replica

MAX_OTHERS = 1024


class Mirror(FlowController):
    """Takes turns decided by the pool. `on_order` gets each new order, `on_brakes` all brakes on a change."""

    on_order: Callable[[str], None] = staticmethod(lambda name: None)
    on_brakes: Callable[[Brakes], None] = staticmethod(lambda brakes: None)
    on_heard: Callable[[str, str, Mapping[str, TenantShare]], None] = staticmethod(
        lambda replica_id, life, service: None
    )
    _others: Sequence[tuple[TenantWaiting, int]] = ()
    _seen_s = 0.0

    def set_order(self, order_name: str) -> None:
        """As `FlowController.set_order`, for the whole pool. Raises `UnknownPolicy`."""
        require_shared(order_name)
        super().set_order(order_name)
        self.on_order(order_name)

    def set_brakes(self, brakes: Brakes, now_s: float) -> None:
        super().set_brakes(brakes, now_s)
        self.on_brakes(brakes)

    def heard(self, replica_id: str, life: str, service: Mapping[str, TenantShare]) -> None:
        super().heard(replica_id, life, service)
        self.on_heard(replica_id, life, service)

    def follow_order(self, order_name: str) -> None:
        super().set_order(order_name)

    def see(self, waits: Sequence[TenantWaiting], now_s: float) -> None:
        """What waits in the pool, this gateway's own included; their counters on the same scale as ours."""
        own = Counter(
            (ticket.entry.tenant_id, *self.queue.place(ticket.entry.entry_id))
            for ticket in self.queue.tickets()
        )
        self._others = [
            (wait, count)
            for wait in waits
            if (count := wait.count - own[wait.tenant_id, wait.tier, wait.lane]) > 0
        ]
        self._seen_s = now_s

    def queue_clone(self, counters: ServiceCounters) -> TieredQueue:
        """As `FlowController.queue_clone`, with `MAX_OTHERS` at most of the next ones at other gateways."""
        copy = super().queue_clone(counters)
        mine = {ticket.entry.tenant_id for ticket in self.queue.tickets()}
        left = MAX_OTHERS
        for waiting, _ in self._others:
            if waiting.tenant_id not in mine:
                counters.set(waiting.tenant_id, waiting.counter)
        for waiting, count in self._others:
            for number in range(min(count, left)):
                entry = QueueEntry(
                    f"\0{waiting.place} {waiting.tenant_id} {number}",
                    waiting.tenant_id,
                    self._seen_s,
                    max(1, waiting.input_tokens // waiting.count),
                    max(1, waiting.output_tokens // waiting.count),
                    waiting.tier,
                    waiting.weight,
                )
                copy.add(entry, lane=waiting.lane)
            left -= min(count, left)
        return copy

    def _lines_ahead(self, entry_id: str, now_s: float) -> list[TenantLine]:
        """With what waits at other gateways, as of the last look."""
        band, _ = self.queue.place(entry_id)
        lines = super()._lines_ahead(entry_id, now_s)
        for waiting, count in self._others:
            if waiting.tier <= band:
                cost = waiting.input_tokens * INPUT_TOKEN_COST + waiting.output_tokens * OUTPUT_TOKEN_COST
                cost = cost * count // waiting.count
                lines.append(
                    TenantLine(waiting.tenant_id, waiting.tier, count, cost, waiting.counter, waiting.weight)
                )
        return lines

    def queued_up_to(self, rank: int) -> int:
        """Requests of the whole pool that wait in band `rank` and above, as far as is known."""
        others = sum(count for waiting, count in self._others if waiting.tier <= rank)
        return super().queued_up_to(rank) + others

    def admit(
        self, entry_id: str, replica: Replica, rank: int, now_s: float, *, reason: Reason
    ) -> Dispatch | None:
        """Applies a turn that the pool decided; None when the request does not wait (any more)."""
        ticket = self.queue.ticket(entry_id)
        if ticket is None:
            return None
        # Its tenant may have a reservation that this gateway does not know yet.
        if reason is Reason.RESERVATION and self._reservations.tag_s(ticket.entry.tenant_id) is None:
            reason = Reason.ORDER
        return self.grant(ticket, replica, rank, now_s, reason)

    def cached_tokens(self, ticket: Ticket, replica_ids: Iterable[str], now_s: float) -> dict[str, int]:
        """By replica, the input tokens probably cached there by this gateway's own requests; only above 0."""
        scorer = self.placement.scorer
        if not isinstance(scorer, PrefixRouter) or not ticket.prefix_hashes:
            return {}
        found = {replica_id: scorer.cached_tokens(ticket, replica_id, now_s) for replica_id in replica_ids}
        return {replica_id: tokens for replica_id, tokens in found.items() if tokens}


def require_shared(order_name: str) -> None:
    """Raises `UnknownPolicy` for an order that gateways cannot share."""
    if order_name not in codec.ORDERS:
        raise UnknownPolicy(
            f"gateways that share a queue know the orders {', '.join(codec.ORDERS)}, not {order_name}:"
            " choose a policy with one of these, or give each gateway a queue of its own (gateway_queue=own)"
        )
