"""One replay of the queue with probes of any tenant, tier and size.

For each line asked about there is a probe of each of a few sizes, and for each tier those of a tenant that
was idle. A probe has its turn and finds room as a request of its size would, but takes nothing. What it sees
at its turn is a point of the surface (`surface.py`). Outstanding quotes are in the replay as requests that
arrived already: the same slot is not sold twice.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from engine.entry import OUTPUT_TOKEN_COST, QueueEntry
from engine.forecast.wait.arrivals import ARRIVAL
from engine.forecast.wait.places import EnginePlaces
from engine.forecast.wait.replay import QueueReplay
from engine.forecast.wait.replayed_engine import ReplayedEngine
from engine.forecast.wait.surface import Line, Point, Surface
from engine.messages import TIER_RANKS

KNOTS = (64, 2048)
"""Sizes of a line's probes, in tokens of the order's `SizeKey`, until sizes have been seen."""
MAX_LINES = 48
HORIZON_S = 1.0
"""The replay goes on so long after its last turn, so that the pace of what follows is seen."""
MAX_EVENTS = 400
"""Of the engines, until what still waits is extrapolated."""
MIN_STEPS = 16
"""Fewer do not show the pace."""


@dataclass(slots=True)
class Probing(QueueReplay):
    """A replay with probes."""

    most_events: int = MAX_EVENTS
    probes: dict[str, tuple[Line, Point]] = field(default_factory=dict)
    roomless: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Probes that had their turn and found no room, by tier and KV tokens."""
    turns: dict[int, int] = field(default_factory=dict)
    """By tier: turns of it and of the tiers above after the start."""
    waited: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By tier, at the last turn of one that waited at the start: the turns until then, and when that was."""
    free: dict[int, int] = field(default_factory=dict)
    places: dict[int, EnginePlaces] = field(default_factory=dict)
    boarded: dict[tuple[str, int], int] = field(default_factory=dict)
    """The part of `had` that ran at the start."""
    began: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The engine's step and time at each probe's turn."""

    def add_probe(self, line: Line, size: int) -> None:
        prompt, output = self._tokens_of(size)
        entry = QueueEntry(
            entry_id=f"\0probe {len(self.probes)}",
            tenant_id=line.tenant_id,
            arrived_s=self.start_s,
            input_tokens=prompt,
            predicted_output_tokens=output,
            tier=line.tier,
            weight=line.weight,
        )
        self.probes[entry.entry_id] = (line, Point(size))
        self.queue.add(entry, lane=self.lane_of(entry))

    def takes_at_once(self, size: int) -> bool:
        """Whether every engine has room for such a probe of any line: with an empty queue, smaller
        sizes then see what it sees."""
        kv_tokens = sum(self._tokens_of(size))
        return all(engine.has_room(max(TIER_RANKS.values()), 1, kv_tokens) for engine in self.engines)

    def run(self) -> None:
        """From `begin` until every probe had its turn, and `HORIZON_S` beyond."""
        self.boarded = dict(self.had)
        left = len(self.probes)
        until_s = float("inf")
        for _ in range(self.most_events):
            self._let_arrive()
            left -= self._probe_turns()
            if not self.free:
                self._count_places()
            if left == 0 and until_s == float("inf"):
                until_s = self.now_s + HORIZON_S
            busy = [engine for engine in self.engines if engine.has_work]
            if not busy or self.now_s >= until_s:
                return
            engine = (
                min(busy, key=lambda candidate: candidate.next_event_s(self._rank))
                if len(busy) > 1
                else busy[0]
            )
            events = engine.advance(self._rank)
            self.now_s = max(self.now_s, engine.now_s)
            for stream in events:
                self._note(stream)
        if left > 0 and self.engines:
            self._extrapolate_probes()

    def _count_places(self) -> None:
        """Once all that goes immediately is dispatched: by tier the room for more, and the places. Sequences
        of lower tiers are paused for a higher one."""
        for tier in {line.tier for line, _ in self.probes.values()}:
            free, count, dispatched, steps_left = 0, 0, 0, []
            for engine in self.engines:
                load = engine.load
                there = engine.ahead(tier)[0]
                dispatched += there
                free += max(0, load.window_sequences - there)
                most = min(load.max_sequences, load.window_sequences)
                count += most
                steps_left += sorted(engine.steps_left(tier))[:most]
            self.free[tier] = free
            if self.engines:
                self.places[tier] = EnginePlaces(
                    count, len(self.engines), dispatched, sorted(steps_left), self.engines[0].load
                )

    def _probe_turns(self) -> int:
        """Everything that may go now; returns how many probes had theirs."""
        served = self._serve_roomless()
        held: set[int] = set()
        while (head := self.queue.peek(self.now_s, self._tiers_without(held))) is not None:
            engine = self._choose(head)
            if head.entry_id in self.probes:
                self.queue.pop(self.now_s, self._tiers_without(held))
                if engine is None:
                    key = (head.tier, self._kv_tokens(head))
                    self.roomless.setdefault(key, []).append(head.entry_id)
                else:
                    self._see(head.entry_id, engine)
                    served += 1
                continue
            if engine is None:
                if not self._is_held(head, held):
                    break
                continue
            self.queue.pop(self.now_s, self._tiers_without(held))
            self._send(head, engine)
            if self.now_s > self.start_s:
                self._count_turn(head)
        return served

    def _count_turn(self, entry: QueueEntry) -> None:
        for tier in self.free:
            if entry.tier <= tier:
                self.turns[tier] = self.turns.get(tier, 0) + 1
        if not entry.entry_id.startswith(ARRIVAL):
            self.waited[entry.tier] = self.turns.get(entry.tier, 0), self.now_s

    def _serve_roomless(self) -> int:
        served = 0
        for tier, kv_tokens in list(self.roomless):
            roomy = [engine for engine in self.engines if engine.has_room(tier, 1, kv_tokens)]
            if roomy:
                for entry_id in self.roomless.pop((tier, kv_tokens)):
                    self._see(entry_id, roomy[0])
                    served += 1
        return served

    def _see(self, entry_id: str, engine: ReplayedEngine) -> None:
        line, point = self.probes[entry_id]
        point.wait_s = self.now_s - self.start_s
        point.completed = self.completed
        point.engine = self.engines.index(engine)
        point.is_reached = True
        point.must_serve = max(0, sum(one.served_cost for one in self.engines) - self.arrived_cost)
        point.decodes = len(engine.decodes)
        point.context_tokens = engine.decode_context
        waiting = [
            stream for tier, queued in engine.queued.items() if tier <= line.tier for _, stream in queued
        ]
        prefills = [stream for tier, _, stream in engine.prefills if tier <= line.tier]
        point.prompt_tokens_ahead = sum(stream.prompt_left for stream in (*waiting, *prefills))
        point.undecoded = len(waiting) + len(prefills)
        taken = sum(count for tier, count in engine.running.items() if tier <= line.tier) + len(waiting)
        over = taken + 1 - engine.load.max_sequences
        # One that is owed a place gets it at the next step: a sequence is paused.
        if over > 0 and engine.has_room(line.tier, 1, sum(self._tokens_of(point.size))):
            ends = heapq.nsmallest(over, engine.steps_left(line.tier))
            steps = ends[-1] if ends else 0
            point.place_s = steps * engine.load.token_s(len(engine.decodes), engine.decode_context)
        self.began[entry_id] = (engine.step, engine.now_s)
        for (tenant_id, tier), cost in self.had.items():
            if tier > line.tier:
                # Sequences of lower tiers are preempted.
                cost -= self.boarded.get((tenant_id, tier), 0)
            if tenant_id == line.tenant_id:
                point.ahead_own += cost
            elif tier < line.tier:
                point.ahead_higher += cost
            else:
                point.ahead_others += cost

    def _tokens_of(self, size: int) -> tuple[int, int]:
        """A probe's prompt and output tokens: half of its cost is its prompt."""
        cost = 2 * size if self.queue.size_key == "prompt" else size
        output = max(1, cost // (2 * OUTPUT_TOKEN_COST))
        return max(1, cost - output * OUTPUT_TOKEN_COST), output

    def _extrapolate_probes(self) -> int:
        """Beyond the limits what still waits is a fluid, served at the rate seen so far: bands strictly, in a
        band by fair shares, and where there are none by arrival."""
        self.is_extrapolated = True
        bands, by_tenant, weights = self._left()
        passed_s = self.last_dispatch_s - self.start_s
        s_per_cost = passed_s / self.later_cost if self.later_cost > 0 else 0.0
        more_s = max(0.0, self.future.lasts_s - passed_s)
        served = 0
        for entry_id, (line, point) in self.probes.items():
            if point.is_reached:
                continue
            above = sum(cost for tier, cost in bands.items() if tier < line.tier)
            key = (line.tenant_id, line.tier)
            own, band = by_tenant.get(key, 0), bands.get(line.tier, 0)
            others = band - own
            if self.queue.order_name != "fcfs":
                sharing = sum(weight for (_, tier), weight in weights.items() if tier == line.tier)
                others = min(others, round(own * max(0.0, sharing / line.weight - 1.0)))
            self._see(entry_id, self.engines[max(0, point.engine)])
            # What comes meanwhile for the tiers above goes first, as long as it comes. Where that is all
            # that is served, the line has its turn when the load ends, whenever that is (`saturated`).
            busy = s_per_cost * sum(cost for tier, cost in self.future.cost_per_s.items() if tier < line.tier)
            left_s = (above + own + others) * s_per_cost
            for_ever_s = left_s / (1 - busy) if busy < 1 else float("inf")
            point.wait_s = passed_s + min(for_ever_s, left_s + busy * more_s)
            point.is_reached = self.later_cost > 0 and busy < 1
            point.must_serve += above + own + others
            point.ahead_own += own
            point.ahead_others += others
            point.ahead_higher += above
            served += 1
        return served

    def _left(self) -> tuple[dict[int, int], dict[tuple[str, int], int], dict[tuple[str, int], float]]:
        bands: dict[int, int] = {}
        by_tenant: dict[tuple[str, int], int] = {}
        weights: dict[tuple[str, int], float] = {}
        for entry in self.queue.entries():
            if entry.entry_id in self.probes:
                continue
            key = (entry.tenant_id, entry.tier)
            bands[entry.tier] = bands.get(entry.tier, 0) + entry.predicted_cost
            by_tenant[key] = by_tenant.get(key, 0) + entry.predicted_cost
            weights[key] = entry.weight
        return bands, by_tenant, weights

    def conclude(self) -> Surface:
        """The surface; probes that had no turn are left as unreached, with the time that passed."""
        points: dict[tuple[str, int], list[Point]] = {}
        for entry_id, (line, point) in self.probes.items():
            if not point.is_reached:
                point.wait_s = max(point.wait_s, self.now_s - self.start_s)
            point.tpot_s = self._tpot_s(point, self.began.get(entry_id))
            points.setdefault((line.tenant_id, line.tier), []).append(point)
        step_times = [engine.load.step_time for engine in self.engines]
        return Surface(
            at_s=self.start_s,
            points=points,
            loads=[engine.load for engine in self.engines],
            error=min(1.0, max((fit.relative_error for fit in step_times), default=1.0)),
            samples=min((fit.samples for fit in step_times), default=0),
            is_extrapolated=self.is_extrapolated,
            dispatch_gap_s={
                tier: (last_s - self.start_s) / turns
                for tier, (turns, last_s) in self.waited.items()
                if turns
            },
            free_places=self.free,
            size_key=self.queue.size_key,
            places=self.places,
        )

    def _tpot_s(self, point: Point, began: tuple[int, float] | None) -> float:
        """The mean step from its turn to the replay's end, with one more sequence in it."""
        if not self.engines:
            return 0.0
        engine = self.engines[max(0, point.engine)]
        if began is not None and engine.step - began[0] >= MIN_STEPS:
            step_time = engine.load.step_time
            own_s = step_time.per_token_s + step_time.per_sequence_s
            return (engine.now_s - began[1]) / (engine.step - began[0]) + own_s
        beside = max(point.decodes, min(point.decodes + point.undecoded, engine.load.max_sequences - 1))
        return engine.load.token_s(beside + 1, point.context_tokens)
