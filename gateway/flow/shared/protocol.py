"""One gateway's session with a shared pool: messages to send, answers to apply.

Pure: one message is in flight at a time, and is repeated under its number until an answer came, so that
losing an answer changes nothing. A gateway that does not belong to the pool (at the start, after Redis lost
its memory, after it was declared dead) joins: it sends everything that waits and runs here, under a new life;
turns that were given to an earlier life are void. Without an engine none of its requests wait in the pool,
because the head of the line would hold up the other gateways'.

Waits are sent as durations: the pool's clock is the Redis server's, and those of gateways may disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from msgspec import structs

from engine.entry import cost_of
from engine.messages import TenantShare
from engine.scheduling.brakes import Brakes
from engine.scheduling.order.recent import Recent
from gateway.flow.controller import Dispatch, InFlight, QueueFull, Ticket
from gateway.flow.shared import codec
from gateway.flow.shared.codec import GivenTurn, PoolRule
from gateway.flow.shared.mirror import Mirror
from gateway.flow.types import Reason
from gateway.flow.window import NUM_RANKS, Replica

BROKEN_AFTER = 3
"""Refusals in a row after which nothing of the pool is relied on any more."""
EVERY_EPOCH = "any"
MOST_MEMBERS = 256
"""Replicas that are remembered, those that have left included."""


@dataclass(frozen=True, slots=True)
class PoolMessage:
    """The message in flight, under the epoch, the gateway's life and its number."""

    epoch: str
    life: int
    number: int
    packed: bytes
    ends_epoch: str = ""
    """The pool's keys are deleted first if they are of this epoch."""

    def arguments(self, now_us: int, gateway_id: str) -> list[Any]:
        """Of the script; `now_us`: 0 for the server's clock."""
        return [now_us, self.epoch, gateway_id, self.life, self.number, self.packed, self.ends_epoch]


@dataclass(slots=True)
class PoolNews:
    held_s: float = 0.0
    """Ask again after this time: until then the pool dispatches nothing."""
    turns: list[Dispatch] = field(default_factory=list)
    refused: list[tuple[str, QueueFull]] = field(default_factory=list)


class PoolSession:
    """One gateway's part of the conversation. Not for several threads."""

    def __init__(self, mirror: Mirror, rule: PoolRule, life: int) -> None:
        """`life`: unique among processes of this gateway id."""
        self.mirror = mirror
        self.rule = rule
        self.queued = [0] * 6
        """Waiting requests of the whole pool, as of the last answer: tier by tier, ordinary and long."""
        self.refusals = 0
        """Consecutive messages that Redis rejected, or answered unreadably."""
        self._life = life
        self._epoch = ""
        self._number = 0
        self._belongs = False
        self._has_engine = False
        self._told: set[str] = set()
        self._sizes: Recent[Replica] = Recent(MOST_MEMBERS)
        self._kinds: dict[str, tuple[frozenset[str], str]] = {}
        self._out_of_rotation: Recent[bool] = Recent(MOST_MEMBERS)
        self._unsaid: Recent[bool] = Recent(MOST_MEMBERS)
        """Of these, what the pool does not know yet."""
        self._turns: dict[str, int] = {}
        """The number of the last turn of each request that runs, or waits again."""
        self._acts: list[list[Any]] = []
        """With the ticket in place of what is said about it."""
        self._progress: dict[str, tuple[int, int]] = {}
        self._foreseen: dict[str, int] = {}
        """Predicted output of running requests that the pool does not know yet."""
        self._confirmed: list[str] = []
        self._out: PoolMessage | None = None
        self._is_out = False
        self._is_urgent = False
        self._served: dict[str, int] = {}
        """Service (scaled) of tenants that the pool does not know yet."""
        self._serials: dict[str, dict[str, list[Any]]] = {}
        """Tenant id -> replica -> the engine's life and its last serial numbers of the tenant, by tier."""
        self._lifts: dict[tuple[str, int], int] = {}
        mirror.on_order = self._ordered
        mirror.on_brakes = self._braked
        mirror.on_heard = self._heard
        mirror.in_flight.on_served = self._had

    # ------------------------------------------------------------ what happens here

    @property
    def belongs(self) -> bool:
        """As of the last answer."""
        return self._belongs

    @property
    def is_out(self) -> bool:
        return self._is_out

    @property
    def has_news(self) -> bool:
        return (
            not self._belongs
            or self._out is not None
            or bool(self._acts or self._progress or self._foreseen or len(self._unsaid))
        )

    @property
    def is_urgent(self) -> bool:
        return self.has_news and (not self._belongs or self._is_urgent)

    def sees_others(self, replicas: Sequence[Replica]) -> bool:
        """These replicas, or what they can do, differ from those last sent."""
        return _kinds(replicas) != self._kinds

    def member(self, replica_id: str, *, is_out: bool) -> None:
        """A replica was drained or has left (`is_out`), or it was resumed or has joined; said once."""
        if self._out_of_rotation.get(replica_id) is not is_out:
            for memory in (self._out_of_rotation, self._unsaid):
                memory.note(replica_id, is_out)
            self._is_urgent = True

    def arrived(self, ticket: Ticket) -> None:
        self._acts.append(["arrive", ticket.entry.entry_id, ticket])
        self._is_urgent = True

    def left(self, entry_id: str) -> None:
        self._turns.pop(entry_id, None)
        self._acts.append(["cancel", entry_id])

    def moved(self, ticket: Ticket) -> None:
        entry = ticket.entry
        self._acts.append(["move", entry.entry_id, entry.tier, self.mirror.queue.lane_rule.lane(entry)])
        self._is_urgent = True

    def progressed(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        """Sent only if it changes the pool's charges."""
        ticket = self.mirror.ticket(entry_id)
        if ticket is None:
            return
        output_tokens -= ticket.had[1]
        flight = self.mirror.in_flight.get(entry_id)
        predicted = (ticket.entry if flight is None else flight).predicted_output_tokens
        if output_tokens > predicted or live_sequences < ticket.sequences:
            self._progress[entry_id] = (output_tokens, live_sequences)

    def foreseen(self, entry_id: str) -> None:
        flight = self.mirror.in_flight.get(entry_id)
        if flight is not None:
            self._foreseen[entry_id] = flight.predicted_output_tokens

    def finished(
        self, entry_id: str, input_tokens: int, output_tokens: int, rest: Ticket | None = None
    ) -> None:
        """What it had since its last turn. `rest` of it was put back."""
        self._progress.pop(entry_id, None)
        self._foreseen.pop(entry_id, None)
        cost = cost_of(input_tokens, output_tokens)
        if rest is None:
            self._turns.pop(entry_id, None)
            self._acts.append(["finish", entry_id, cost])
        else:
            self._acts.append(["put_back", entry_id, cost, rest])
            self._is_urgent = True

    def _had(self, tenant_id: str, amount: int) -> None:
        """A tenant had service: sent with the next message, not by itself."""
        self._served[tenant_id] = self._served.get(tenant_id, 0) + amount

    def _heard(self, replica_id: str, life: str, service: Mapping[str, TenantShare]) -> None:
        for tenant_id, share in service.items():
            known = self._serials_of(tenant_id, [(replica_id, life)])
            self._serials.setdefault(tenant_id, {}).update(known)
            for tier, amount in share.lifts.items():
                self._lifts[tenant_id, tier] = self._lifts.get((tenant_id, tier), 0) + amount

    def _serials_of(self, tenant_id: str, engines: Iterable[tuple[str, str]]) -> dict[str, list[Any]]:
        """By replica, the engine's life and the last serial numbers of a tenant's service there, by tier."""
        found: dict[str, list[Any]] = {}
        for replica_id, life in engines:
            serials = [self.mirror.serials.of(replica_id, life, tenant_id, rank) for rank in range(NUM_RANKS)]
            if any(serials):
                found[replica_id] = [life, *serials]
        return found

    def _ordered(self, name: str) -> None:
        self._acts.append(["order", name])
        self._is_urgent = True

    def _braked(self, brakes: Brakes) -> None:
        self._acts.append(["brakes", _shares(brakes)])
        self._is_urgent = True

    # ------------------------------------------------------------ the conversation

    def message(
        self, now_s: float, replicas: Sequence[Replica], *, leaves: bool = False
    ) -> PoolMessage | None:
        """The next message; None while another is in flight. `leaves`: the gateway ends."""
        if self._is_out:
            return None
        has_engine = bool(replicas)
        if has_engine != self._has_engine:
            self._belongs = False
        if self._out is None or not self._belongs or leaves:
            self._out = self._next(now_s, replicas, leaves)
        self._is_out = True
        return self._out

    def _next(self, now_s: float, replicas: Sequence[Replica], leaves: bool) -> PoolMessage:
        passage: codec.Joining | str | None = "leaves" if leaves else None
        acts: list[list[Any]] = []
        self._told = {replica.replica_id for replica in replicas}
        sees_others, self._kinds = self.sees_others(replicas), _kinds(replicas)
        if sees_others or not self._belongs:
            acts.append(["lives", {replica.replica_id: replica.life for replica in replicas}])
        for replica in replicas:
            known = self._sizes.get(replica.replica_id)
            if known is not None and known.life != replica.life:
                acts.append(["member", replica.replica_id, True, known.life])
            self._sizes.note(replica.replica_id, replica)
        if not self._belongs:
            self._life += 1
            self._number = 0
            self._has_engine = bool(replicas)
            brakes = _shares(self.mirror.knobs.brakes)
            returns = bool(self._epoch) or self.is_broken
            passage = codec.Joining(self.rule, self.mirror.order_name, brakes, returns)
            acts += [
                ["member", each, True] for each in self._out_of_rotation if self._out_of_rotation.get(each)
            ]
            acts += [
                ["run", flight.ticket.entry.entry_id, self._about_running(flight, now_s)]
                for flight in self.mirror.in_flight
            ]
            engines = [(replica.replica_id, replica.life) for replica in replicas]
            acts += [
                ["had", tenant_id, had, self._serials_of(tenant_id, engines)]
                for tenant_id, had in self.mirror.in_flight.ahead.served().items()
                if had
            ]
            waiting = self.mirror.queue.tickets() if replicas else ()
            # Of those that were put back the last one stands first.
            ranked = sorted(waiting, key=lambda each: (each.before is not None, each.entry.arrived_s))
            acts += [["arrive", each.entry.entry_id, self._about(each, now_s)] for each in ranked]
            self._confirmed, self._turns = [], {}
        else:
            # First, so that no turn is given by the members, or by what they could do, before.
            acts += [["member", each, self._unsaid.get(each)] for each in self._unsaid]
            acts += [
                ["unfit", ticket.entry.entry_id, self._unfit(ticket)]
                for ticket in (self.mirror.queue.tickets() if sees_others else ())
                if ticket.needs
            ]
            acts += [
                ["had", tenant_id, self._served.get(tenant_id, 0), self._serials.get(tenant_id, {})]
                for tenant_id in dict.fromkeys((*self._served, *self._serials))
            ]
            acts += [["lift", *lifted, amount] for lifted, amount in self._lifts.items()]
            acts += [["progress", entry_id, *said] for entry_id, said in self._progress.items()]
            acts += [["foresee", entry_id, tokens] for entry_id, tokens in self._foreseen.items()]
            acts += [said for act in self._acts if (said := self._said(act, now_s))]
        self._number += 1
        packed = codec.message(replicas, self._confirmed, acts, passage)
        self._acts, self._progress, self._foreseen, self._confirmed = [], {}, {}, []
        self._served, self._serials, self._lifts = {}, {}, {}
        self._unsaid = Recent(MOST_MEMBERS)
        self._is_urgent = False
        # Gateways that are refused at the same time delete once: who is late does not know the new epoch.
        # Where that was not enough, this gateway may have missed an epoch, and deletes whatever is there.
        ends = (self._epoch if self.refusals == BROKEN_AFTER else "") or EVERY_EPOCH
        ends_epoch = ends if self.is_broken else ""
        return PoolMessage(self._epoch, self._life, self._number, packed, ends_epoch)

    def failed(self) -> None:
        self._is_out = False

    def lost(self) -> None:
        """Redis was unavailable too long; others may have declared this gateway dead: rejoin."""
        self._belongs = False

    def refused(self) -> None:
        """Redis rejects the message in flight: all is sent anew; if it goes on, into a new epoch."""
        self.refusals += 1
        self.failed()
        self.lost()

    @property
    def is_broken(self) -> bool:
        return self.refusals >= BROKEN_AFTER

    def answered(self, packed: bytes, now_s: float) -> PoolNews:
        """Applies an answer. Raises `msgspec.DecodeError`, and `UnknownPolicy` for an unknown order."""
        answer = codec.answer(packed)
        self._out, self._is_out = None, False
        if answer.status != "ok":
            self._belongs = False
            return PoolNews()
        self._belongs, self._epoch, self.queued = True, answer.epoch, answer.queued
        if answer.order != self.mirror.order_name and not self._is_ordering():
            self.mirror.follow_order(answer.order)
        heard = PoolNews(answer.held_us / 1e6, self._hear(answer.turns, now_s))
        for tenant_id, counter in answer.counters:
            self.mirror.counters.set(tenant_id, counter + answer.falls * codec.FALL)
        for refusal in answer.refused:
            if self.mirror.cancel(refusal.entry_id, now_s):
                full = QueueFull(refusal.of_tenant, refusal.limit, refusal.retry_after_s)
                heard.refused.append((refusal.entry_id, full))
        self.refusals = 0
        return heard

    def looked(self, packed: bytes, now_s: float) -> None:
        """What waits in the whole pool, for forecasts. Raises `msgspec.DecodeError`."""
        found = codec.look(packed)
        raised = found.falls * codec.FALL
        waits = [structs.replace(wait, counter=wait.counter + raised) for wait in found.waits]
        self.mirror.see(waits, now_s)

    def published(self, packed: bytes, now_s: float) -> list[Dispatch]:
        """Turns that another gateway's words gave to this one. Raises `msgspec.DecodeError`."""
        return self._hear(codec.turns(packed), now_s)

    def _hear(self, turns: Iterable[GivenTurn], now_s: float) -> list[Dispatch]:
        """The new turns in order, each with its tenant's counter. Turns are repeated until confirmed."""
        heard: list[Dispatch] = []
        for turn in sorted(turns, key=attrgetter("number")):
            # One that was put back has had this turn; if it comes late, it is not the next one.
            if turn.life != self._life or turn.number <= self._turns.get(turn.entry_id, 0):
                continue
            if turn.entry_id not in self._confirmed:
                self._confirmed.append(turn.entry_id)
            replica = self._sizes.get(turn.replica_id)
            assert replica is not None, "a turn goes to a replica that was sent"
            # Not waiting: the request left, which the pool will learn.
            dispatch = self.mirror.admit(turn.entry_id, replica, turn.rank, now_s, reason=_reason(turn))
            if dispatch is not None:
                self._turns[turn.entry_id] = turn.number
                raised = turn.falls * codec.FALL
                views = {
                    "counter": turn.place_counter + raised,
                    "had": turn.had + raised,
                    "heard": turn.heard,
                    "engine_life": turn.engine_life,
                }
                heard.append(structs.replace(dispatch, **views))
        return heard

    def _is_ordering(self) -> bool:
        return any(act[0] == "order" for act in self._acts)

    def _said(self, act: list[Any], now_s: float) -> list[Any]:
        """Without an engine nothing waits in the pool, and what was put back has ended there."""
        *words, ticket = act
        if not isinstance(ticket, Ticket):
            return act
        if self._has_engine:
            return [*words, self._about(ticket, now_s)]
        return ["finish", *words[1:]] if words[0] == "put_back" else []

    def _unfit(self, ticket: Ticket) -> dict[str, bool]:
        """The replicas of this gateway that cannot do what a request needs."""
        return {
            replica_id: True for replica_id, (offers, _) in self._kinds.items() if not ticket.needs <= offers
        }

    def _about(self, ticket: Ticket, now_s: float) -> dict[str, Any]:
        entry = ticket.entry
        cached = self.mirror.cached_tokens(ticket, self._told, now_s)
        return {
            "tenant": entry.tenant_id,
            "tier": entry.tier,
            "lane": self.mirror.queue.lane_rule.lane(entry),
            "cost": entry.predicted_cost,
            "weight": entry.weight,
            "sequences": ticket.sequences,
            "kv": ticket.kv_tokens,
            "predicted": entry.predicted_output_tokens,
            "rate": ticket.reserved_cost_per_s,
            "reserved_tier": ticket.reserved_tier,
            "cached": cached,
            "unfit": self._unfit(ticket),
            "waited_us": max(0, round((now_s - entry.arrived_s) * 1e6)),
        } | ({} if ticket.before is None else {"front": True})

    def _about_running(self, flight: InFlight, now_s: float) -> dict[str, Any]:
        running = {
            "replica": flight.replica_id,
            "rank": flight.tier,
            "reserved": flight.by_reservation,
            "is_long": flight.is_long,
            "charged": flight.charged_cost,
            "output": flight.output_tokens,
            "foreseen": flight.predicted_output_tokens,
            "live": flight.live_sequences,
            "kv_now": flight.kv_tokens,
        }
        return self._about(flight.ticket, now_s) | {"running": running}


def _kinds(replicas: Sequence[Replica]) -> dict[str, tuple[frozenset[str], str]]:
    return {replica.replica_id: (replica.offers, replica.life) for replica in replicas}


def _shares(brakes: Brakes) -> list[float]:
    """By tier rank, 1 where it is not braked."""
    return [brakes.shares.get(rank, 1.0) for rank in range(NUM_RANKS)]


def _reason(turn: GivenTurn) -> Reason:
    if turn.by_reservation:
        return Reason.RESERVATION
    return Reason.OWED if turn.is_owed else Reason.ORDER
