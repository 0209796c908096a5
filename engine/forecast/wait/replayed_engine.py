"""One engine in a replay, event by event (a prompt done, an answer done), never token by token.

Between two events every step has the same shape, so the time of many such steps is a sum that can be written
down. A step here gives each decoding stream one token: as many of the engine's as that takes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from engine.messages import StepTime
from engine.scheduling.brakes import NO_BRAKES, Brakes
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import padded_shape, predict_decodes_s, predict_shape_s

OWED_PART = 2
OWED_KV_PART = 4
"""As in `gateway/flow/window.py`."""

Rank = Callable[[QueueEntry], int]
"""The engine's own order among what was dispatched to it: the smallest goes first."""


@dataclass(frozen=True, slots=True)
class Flight:
    """One sequence that is dispatched and not finished."""

    entry: QueueEntry
    prompt_left: int
    context_tokens: int
    emitted_tokens: int
    kv_tokens: int
    """What it counts in the dispatch window."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine: what it can do, and what it holds."""

    replica_id: str
    step_time: StepTime
    max_sequences: int
    max_batched_tokens: int
    window_sequences: int
    """Sequences of a tier and above that may be dispatched to it at once."""
    window_kv_tokens: int
    """Predicted KV tokens of a tier and above that may be dispatched to it at once."""
    flights: Sequence[Flight] = ()
    brakes: Brakes = NO_BRAKES
    pauses: bool = False
    """It pauses a sequence to place a request that is owed one."""
    decode_slots: int = 0
    """Sequences that decode in one step at most; 0: all."""

    def turns(self, decodes: int) -> float:
        """Steps that give each of `decodes` sequences one token: they take turns where slots are fewer."""
        # With slots for all places no stream sits out, also where a replay lets a higher tier in beside them.
        is_scarce = 0 < self.decode_slots < self.max_sequences
        return max(1.0, decodes / self.decode_slots) if is_scarce else 1.0

    def token_s(self, decodes: int, context_tokens: int) -> float:
        """Seconds that give each of `decodes` sequences one token."""
        steps_s = self.step_time.base_s * (self.turns(decodes) - 1)
        return predict_decodes_s(self.step_time, decodes, context_tokens) + steps_s


@dataclass(slots=True)
class Stream:
    """One sequence in the replay."""

    entry: QueueEntry
    prompt_left: int
    context_tokens: int
    output_left: int
    kv_tokens: int
    correction: int
    """Output tokens by which it will differ from what was charged at its dispatch."""


@dataclass(slots=True)
class LiveTenant:
    """A tenant's sequences in one tier."""

    weight: float
    sequences: int = 0


@dataclass(slots=True)
class ReplayedEngine:
    """One engine in the replay: its own time, and the streams in each phase."""

    load: EngineLoad
    now_s: float
    step: int = 0
    order: int = 0
    queued: dict[int, list[tuple[int, Stream]]] = field(default_factory=dict)
    """Dispatched, without a place yet, by tier."""
    prefills: list[tuple[int, int, Stream]] = field(default_factory=list)
    decodes: list[tuple[int, int, Stream]] = field(default_factory=list)
    """By the step that completes them."""
    decode_context: int = 0
    running: dict[int, int] = field(default_factory=dict)
    dispatched: dict[int, int] = field(default_factory=dict)
    dispatched_kv: dict[int, int] = field(default_factory=dict)
    live: dict[int, dict[str, LiveTenant]] = field(default_factory=dict)
    served_cost: int = 0
    """Cost tokens that it served in the replay."""

    @property
    def has_work(self) -> bool:
        return bool(self.queued or self.prefills or self.decodes)

    def take(self, stream: Stream, *, runs: bool = False) -> None:
        """Dispatches a stream to this engine; `runs`: it has a place already."""
        tier = stream.entry.tier
        self.dispatched[tier] = self.dispatched.get(tier, 0) + 1
        self.dispatched_kv[tier] = self.dispatched_kv.get(tier, 0) + stream.kv_tokens
        live = self.live.setdefault(tier, {})
        tenant = live.setdefault(stream.entry.tenant_id, LiveTenant(stream.entry.weight))
        tenant.sequences += 1
        self.order += 1
        if runs:
            self._place(stream, self.order)
        else:
            self.queued.setdefault(tier, []).append((self.order, stream))

    def ahead(self, tier: int) -> tuple[int, int]:
        """Sequences and KV tokens of `tier` and above in the window."""
        return (
            sum(count for rank, count in self.dispatched.items() if rank <= tier),
            sum(tokens for rank, tokens in self.dispatched_kv.items() if rank <= tier),
        )

    def has_room(self, tier: int, sequences: int, kv_tokens: int, *, is_owed: bool = False) -> bool:
        """The late-dispatch rule: a tier's window counts only work of that tier and above, and is wider for
        what is owed service (`gateway/flow/window.py`); a brake counts only the tier's own."""
        held = self.dispatched.get(tier, 0), self.dispatched_kv.get(tier, 0)
        whole = self.load.max_sequences, self.load.window_kv_tokens
        if not self.load.brakes.has_room(tier, held, (sequences, kv_tokens), whole):
            return False
        ahead, kv_ahead = self.ahead(tier)
        if ahead == 0:
            return True
        places, kv = self.load.window_sequences, self.load.window_kv_tokens
        if is_owed:
            places += self.load.max_sequences // OWED_PART
            kv += self.load.window_kv_tokens // OWED_KV_PART
        return ahead + sequences <= places and kv_ahead + kv_tokens <= kv

    def owes(
        self, entry: QueueEntry, sequences: int, kv_tokens: int, waiting: Mapping[str, LiveTenant]
    ) -> bool:
        """Whether a request that finds no free place is owed one: its tenant's sequences, its own included,
        are at most the tenant's part by weight of the places, among the tenants of its tier that run here or
        are `waiting`."""
        if not self.load.pauses or not self.has_room(entry.tier, sequences, kv_tokens, is_owed=True):
            return False
        live = self.live.get(entry.tier, {})
        own = live.get(entry.tenant_id)
        most = self.load.max_sequences * entry.weight / (sequences + (own.sequences if own else 0))
        weights = entry.weight
        for tenant_id, tenant in chain(live.items(), waiting.items()):
            if tenant_id != entry.tenant_id and (tenant is live.get(tenant_id) or tenant_id not in live):
                weights += tenant.weight
            if weights > most:
                break
        return weights <= most

    def steps_left(self, tier: int) -> list[int]:
        """Of each sequence of `tier` and above, steps until it has ended."""
        budget = self.load.max_batched_tokens
        waiting = [stream for queued in self.queued.values() for _, stream in queued]
        streams = [*waiting, *(stream for _, _, stream in self.prefills)]
        return [end - self.step for end, _, stream in self.decodes if stream.entry.tier <= tier] + [
            stream.prompt_left // budget + stream.output_left
            for stream in streams
            if stream.entry.tier <= tier
        ]

    def next_event_s(self, rank: Rank) -> float:
        """When the next prompt or answer is done; `rank` orders the streams that wait for a place."""
        steps, prefilled = self._next_steps(rank)
        return self.now_s + self._duration_s(steps, prefilled)

    def advance(self, rank: Rank) -> list[Stream]:
        """Runs to the next event. Returns the streams that got their first token of this replay, or (then
        `output_left` is 0) their last."""
        steps, prefilled = self._next_steps(rank)
        self._pass_time(steps, prefilled)
        return self._arrivals(prefilled)

    def catch_up(self, now_s: float, rank: Rank) -> None:
        """Runs the whole steps that end by `now_s`, short of the next event."""
        steps, prefilled = self._next_steps(rank)
        duration_s = max(self._duration_s(steps, prefilled), 1e-9)
        whole = int(steps * (now_s - self.now_s) / duration_s)
        if (done := min(whole, steps - 1)) > 0:
            self._pass_time(done, [(stream, tokens // steps * done) for stream, tokens in prefilled])

    def _next_steps(self, rank: Rank) -> tuple[int, list[tuple[Stream, int]]]:
        """Steps of one shape until the next event, and the prompt tokens computed in all of them."""
        self._give_places(rank)
        decoded = DECODE_TOKENS * len(self.decodes)
        budget = max(1, int(self.load.max_batched_tokens * self.load.turns(len(self.decodes))) - decoded)
        until_done = self.decodes[0][0] - self.step if self.decodes else None
        if not self.prefills:
            return until_done or 1, []
        head = self.prefills[0][2]
        full_steps = head.prompt_left // budget
        if full_steps >= 1:
            steps = full_steps if until_done is None else min(full_steps, until_done)
            return steps, [(head, steps * budget)]
        prefilled = []
        for _, _, stream in heapq.nsmallest(budget, self.prefills):
            if budget == 0:
                break
            tokens = min(budget, stream.prompt_left)
            prefilled.append((stream, tokens))
            budget -= tokens
        return 1, prefilled

    def _give_places(self, rank: Rank) -> None:
        while self.queued:
            tier = min(self.queued)
            # A higher tier takes a lower one's place: only streams of its tier and above stand in its way.
            if sum(count for rank, count in self.running.items() if rank <= tier) >= self.load.max_sequences:
                return
            line = self.queued[tier]
            chosen = min(line, key=lambda item: (rank(item[1].entry), item[0])) if len(line) > 1 else line[0]
            line.remove(chosen)
            if not line:
                del self.queued[tier]
            self._place(chosen[1], chosen[0])

    def _place(self, stream: Stream, order: int) -> None:
        tier = stream.entry.tier
        self.running[tier] = self.running.get(tier, 0) + 1
        if stream.prompt_left > 0:
            heapq.heappush(self.prefills, (tier, order, stream))
        else:
            self._decode(stream, order)

    def _decode(self, stream: Stream, order: int) -> None:
        heapq.heappush(self.decodes, (self.step + stream.output_left, order, stream))
        self.decode_context += stream.context_tokens

    def _duration_s(self, steps: int, prefilled: list[tuple[Stream, int]]) -> float:
        decodes = len(self.decodes)
        tokens = DECODE_TOKENS * decodes + sum(tokens for _, tokens in prefilled) // steps
        context = DECODE_TOKENS * (steps * self.decode_context + decodes * steps * (steps + 1) // 2)
        for stream, computed in prefilled:
            context += computed * stream.context_tokens + computed * (computed + 1) // 2
        one = self.load.step_time
        tokens, rows = padded_shape(one, tokens, decodes + len(prefilled))
        all_steps_s = predict_shape_s(one, tokens * steps, context, rows * steps)
        return all_steps_s + one.base_s * (steps * self.load.turns(decodes) - 1)

    def _pass_time(self, steps: int, prefilled: list[tuple[Stream, int]]) -> None:
        self.now_s += self._duration_s(steps, prefilled)
        self.step += steps
        self.decode_context += len(self.decodes) * steps
        self.served_cost += len(self.decodes) * steps * OUTPUT_TOKEN_COST
        self.served_cost += sum(computed for _, computed in prefilled) * INPUT_TOKEN_COST
        for stream, computed in prefilled:
            stream.context_tokens += computed
            stream.prompt_left -= computed

    def _arrivals(self, prefilled: list[tuple[Stream, int]]) -> list[Stream]:
        events: list[Stream] = []
        while self.decodes and self.decodes[0][0] <= self.step:
            stream = heapq.heappop(self.decodes)[2]
            # It grew by one token a step since it joined, as the sum did.
            self.decode_context -= stream.context_tokens + stream.output_left
            stream.output_left = 0
            self._leave(stream)
            events.append(stream)
        done = [stream for stream, _ in prefilled if stream.prompt_left == 0]
        if done:
            ids = {id(stream) for stream in done}
            kept = [item for item in self.prefills if id(item[2]) not in ids]
            orders = {id(item[2]): item[1] for item in self.prefills}
            heapq.heapify(kept)
            self.prefills = kept
            self.served_cost += len(done) * OUTPUT_TOKEN_COST
            for stream in done:
                events.append(stream)
                stream.output_left -= 1
                if stream.output_left <= 0:
                    self._leave(stream)
                else:
                    self._decode(stream, orders[id(stream)])
        return events

    def _leave(self, stream: Stream) -> None:
        tier = stream.entry.tier
        self.running[tier] -= 1
        self.dispatched[tier] -= 1
        self.dispatched_kv[tier] -= stream.kv_tokens
        live = self.live[tier]
        live[stream.entry.tenant_id].sequences -= 1
        if not live[stream.entry.tenant_id].sequences:
            del live[stream.entry.tenant_id]
