"""Replay of the waiting queue on virtual time.

The same order, late-dispatch windows and charges as in the gateway, in front of replayed engines. A window's
next free place is the *shortest* of many answers, so the answers ahead are spread evenly over their
distribution: the first gets its median, the next its quartiles, and so on (van der Corput),
deterministically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from engine.forecast.length.probe import length_quantile
from engine.forecast.wait.arrivals import ARRIVAL, Future
from engine.forecast.wait.replayed_engine import LiveTenant, ReplayedEngine, Stream
from engine.scheduling.order.base import ServiceCountersLike
from engine.scheduling.tiers import TieredQueue

DrawLength = Callable[[QueueEntry, int, float], int]
"""(entry, generated, u) -> total output tokens of one of its sequences at quantile u, given that
`generated` are out and more will come."""
LaneOf = Callable[[QueueEntry], int]


@dataclass(slots=True)
class QueueReplay:
    """Queue, counters and engines on virtual time."""

    queue: TieredQueue
    counters: ServiceCountersLike
    engines: list[ReplayedEngine]
    start_s: float
    draw_length: DrawLength
    sequences: Mapping[str, int]
    kv_tokens: Mapping[str, int]
    future: Future
    lane_of: LaneOf
    random: Random | None = None
    """Draws the lengths of answers; None: they fill their distributions evenly."""
    coming: QueueEntry | None = None
    """The next to arrive."""
    now_s: float = 0.0
    waiting: dict[int, dict[str, LiveTenant]] = field(default_factory=dict)
    """Tenants of the requests that wait, by tier; `sequences` are requests."""
    drawn: int = 0
    completed: int = 0
    later_cost: int = 0
    """Cost tokens dispatched after the start: what the engines really made room for."""
    arrived_cost: int = 0
    """Cost tokens sent of requests that arrived after the start."""
    last_dispatch_s: float = 0.0
    is_extrapolated: bool = False
    had: dict[tuple[str, int], int] = field(default_factory=dict)
    """Cost tokens sent so far or running at the start, by tenant and tier."""

    def begin(self) -> None:
        """Engines take what they hold already, and arrivals are expected."""
        self.now_s = self.last_dispatch_s = self.start_s
        for entry in self.queue.entries():
            self._waits(entry)
        for engine in self.engines:
            self._board(engine)
        self.coming = next(self.future.entries, None)

    def _board(self, engine: ReplayedEngine) -> None:
        """What the engine holds already; the streams that emitted most go first, as they are likely to."""
        for flight in sorted(engine.load.flights, key=lambda flight: -flight.emitted_tokens):
            length = self._draw(flight.entry, flight.emitted_tokens)
            share = max(1, self.sequences.get(flight.entry.entry_id, 1))
            stream = Stream(
                entry=flight.entry,
                prompt_left=flight.prompt_left,
                context_tokens=flight.context_tokens,
                output_left=max(1, length - flight.emitted_tokens),
                kv_tokens=flight.kv_tokens,
                correction=length - flight.entry.predicted_output_tokens // share,
            )
            self._count_ahead(flight.entry, stream.prompt_left, stream.output_left)
            engine.take(stream, runs=flight.context_tokens > 0)

    def _let_arrive(self) -> None:
        while self.coming is not None and self.coming.arrived_s <= self.now_s:
            entry, self.coming = self.coming, next(self.future.entries, None)
            self.queue.add(entry, lane=self.lane_of(entry))
            self._waits(entry)

    def _tiers_without(self, held: set[int]) -> set[int] | None:
        """The tiers to look at; None: all."""
        return set(self.queue.waiting_tiers()) - held if held else None

    def _is_held(self, head: QueueEntry, held: set[int]) -> bool:
        """Whether a request without room is of a braked tier, which holds up only itself: it is `held`."""
        if all(head.tier not in engine.load.brakes.shares for engine in self.engines):
            return False
        held.add(head.tier)
        return True

    def _choose(self, entry: QueueEntry) -> ReplayedEngine | None:
        sequences = self.sequences.get(entry.entry_id, 1)
        kv_tokens = self._kv_tokens(entry)
        roomy = [engine for engine in self.engines if engine.has_room(entry.tier, sequences, kv_tokens)]
        if not roomy and self.queue.is_by_tenant and not self.lane_of(entry):
            waiting = self.waiting.get(entry.tier, {})
            roomy = [
                candidate
                for candidate in self.engines
                if candidate.owes(entry, sequences, kv_tokens, waiting)
            ]
        return min(
            roomy, key=lambda engine: engine.ahead(entry.tier)[0] / engine.load.max_sequences, default=None
        )

    def _waits(self, entry: QueueEntry) -> None:
        tenants = self.waiting.setdefault(entry.tier, {})
        tenants.setdefault(entry.tenant_id, LiveTenant(entry.weight)).sequences += 1

    def _waits_no_more(self, entry: QueueEntry) -> None:
        tenants = self.waiting.get(entry.tier, {})
        tenant = tenants.get(entry.tenant_id)
        if tenant is not None:
            tenant.sequences -= 1
            if tenant.sequences <= 0:
                del tenants[entry.tenant_id]

    def _send(self, entry: QueueEntry, engine: ReplayedEngine) -> None:
        self._waits_no_more(entry)
        if self.now_s > self.start_s:
            self.later_cost += entry.predicted_cost
        self.last_dispatch_s = self.now_s
        self.counters.charge(entry.tenant_id, entry.weight, entry.predicted_cost)
        if not engine.has_work:
            engine.now_s = max(engine.now_s, self.now_s)
        elif engine.now_s < self.now_s:
            engine.catch_up(self.now_s, self._rank)
        count = self.sequences.get(entry.entry_id, 1)
        for _ in range(count):
            length = self._draw(entry, 0)
            prompt = max(1, entry.input_tokens // count)
            self._count_ahead(entry, prompt, length)
            engine.take(
                Stream(
                    entry=entry,
                    prompt_left=prompt,
                    context_tokens=0,
                    output_left=length,
                    kv_tokens=self._kv_tokens(entry) // count,
                    correction=length - entry.predicted_output_tokens // count,
                )
            )

    def _note(self, stream: Stream) -> None:
        """It had its first token, or its last."""
        if stream.output_left > 0:
            return
        self.counters.charge(
            stream.entry.tenant_id, stream.entry.weight, stream.correction * OUTPUT_TOKEN_COST
        )
        self.completed += 1

    def _count_ahead(self, entry: QueueEntry, prompt: int, output: int) -> None:
        cost = prompt * INPUT_TOKEN_COST + output * OUTPUT_TOKEN_COST
        key = (entry.tenant_id, entry.tier)
        self.had[key] = self.had.get(key, 0) + cost
        if entry.entry_id.startswith(ARRIVAL):
            self.arrived_cost += cost

    def _rank(self, entry: QueueEntry) -> int:
        if self.queue.order_name == "fcfs":
            return 0
        return self.queue.counter(entry.tenant_id, entry.tier, self.lane_of(entry))

    def _kv_tokens(self, entry: QueueEntry) -> int:
        return self.kv_tokens.get(entry.entry_id, entry.input_tokens + entry.predicted_output_tokens)

    def _draw(self, entry: QueueEntry, generated: int) -> int:
        self.drawn += 1
        u = self.random.random() if self.random else van_der_corput(self.drawn)
        if entry.entry_id.startswith(ARRIVAL):
            return length_quantile(entry.predicted_output_tokens, entry.predicted_high_tokens, generated, u)
        return max(generated + 1, self.draw_length(entry, generated, u))


def van_der_corput(index: int) -> float:
    """The index-th point of a sequence that fills (0, 1) evenly: 1/2, 1/4, 3/4, 1/8, 5/8, ..."""
    point, place = 0.0, 0.5
    while index:
        point += place * (index & 1)
        index >>= 1
        place /= 2
    return point
