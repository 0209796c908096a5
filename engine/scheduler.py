"""Which tokens run in the next step, and who gives way when they do not fit?

The mechanism behind the four decisions of `engine.scheduling`; the only code that moves a sequence between
queues and the only one that allocates blocks. Integers only; time is passed in.

A step: paused sequences that may go on come back; running sequences get tokens (decode first); then,
unless somebody had to give way, waiting ones are admitted in order until the budget is spent or the next one
does not fit: it is never skipped, so that it cannot starve. Unfinished prompts of lower tiers come after the
admissions of a higher one.

Places. When all `max_sequences` are taken, a sequence of a higher tier takes the place of one of a lower
tier, which pauses with its KV kept and goes on when there is a place again.

Memory. A sequence gets the blocks of its known tokens when it is admitted and one more whenever a decode
crosses a block's edge. When there is none, paused sequences give way first (those of a lower tier, or paused
for long), then the policy's victim among the running ones of the same or a lower tier; it drops its KV and
returns to the head of its line. To *start*, a sequence takes memory from strictly lower tiers only. The last
runner never gives way: what could not run alone was refused at the door. Who was displaced
`max_displacements` times is immune: it is admitted again only with all the memory that it can ever need, so
it never asks for more, and preemptions per sequence are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv.blocks import BlockPool, blocks_for
from engine.scheduling.admit import blocks_promised, blocks_still_wanted
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.order import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.scheduling.policy import Policy
from engine.scheduling.tiers import TieredQueue
from engine.sequence import Sequence, State, move


@dataclass(slots=True)
class Plan:
    """One step's work: how many tokens for whom."""

    shares: dict[Sequence, int] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    """Lost their place to a higher tier; their KV is kept."""
    promised_blocks: int = 0
    """Set aside for the growth of those that run already."""

    @property
    def num_tokens(self) -> int:
        """Tokens handed out."""
        return sum(self.shares.values())


class Scheduler:
    """Owns every sequence of an engine, the block pool and the local service counters."""

    def __init__(
        self,
        policy: Policy,
        pool: BlockPool,
        counters: ServiceCounters,
        *,
        block_tokens: int,
        max_batched_tokens: int,
        max_sequences: int,
        watermark_blocks: int = 0,
        max_displacements: int = 3,
        paused_keep_s: float = 2.0,
    ) -> None:
        """`paused_keep_s`: how long a paused sequence's KV is safe from sequences that want to start."""
        if max_sequences > max_batched_tokens:
            raise ValueError(
                f"max_sequences ({max_sequences}) must not exceed max_batched_tokens ({max_batched_tokens}): "
                "every running sequence needs a token of each step"
            )
        self.policy = policy
        self.pool = pool
        self.counters = counters
        self.block_tokens = block_tokens
        self.max_batched_tokens = max_batched_tokens
        self.max_sequences = max_sequences
        self.watermark_blocks = watermark_blocks
        self.max_displacements = max_displacements
        self.paused_keep_s = paused_keep_s
        self.sequences: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        """In order of admission."""
        self.paused: dict[str, Sequence] = {}
        """Keep their KV; the one paused longest first."""
        self.waiting = TieredQueue(policy.order, counters)
        self.preemptions = 0

    # ------------------------------------------------------------ in and out

    def add(self, sequence: Sequence) -> None:
        """Takes a waiting sequence, or a preempted one that rests until its lease is topped up."""
        self.sequences[sequence.sequence_id] = sequence
        if sequence.state is State.WAITING:
            self.waiting.add(sequence.entry())

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in whatever state it is; its blocks are free when this returns."""
        self._leave(sequence)
        move(sequence, State.FINISHED)
        del self.sequences[sequence.sequence_id]

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that goes on elsewhere (export)."""
        self._leave(sequence)
        del self.sequences[sequence.sequence_id]

    def pause(self, sequence: Sequence, now_s: float) -> None:
        """Takes a running sequence out of the steps; it keeps its KV."""
        move(sequence, State.PAUSED)
        self.running.remove(sequence)
        sequence.paused_since_s = now_s
        self.paused[sequence.sequence_id] = sequence

    def top_up(self, sequence: Sequence, lease_tokens: int) -> None:
        """Sets the lease; it never shrinks. A sequence that rested without KV goes back into its line."""
        sequence.lease_tokens = max(sequence.lease_tokens, lease_tokens)
        if sequence.state is State.PREEMPTED and sequence.may_emit:
            move(sequence, State.WAITING)
            self.waiting.add(sequence.entry(), front=True)

    def set_counter(self, tenant_id: str, value: int) -> None:
        """What the owner of the service counters says replaces everything known here."""
        self.counters.set(tenant_id, value)
        self.waiting.unlift(tenant_id)

    def set_policy(self, policy: Policy) -> None:
        """Another policy from the next step on."""
        self.waiting.set_order(policy.order)
        self.policy = policy

    @property
    def has_runnable(self) -> bool:
        """Whether the next step has tokens to compute."""
        return bool(
            self.running or len(self.waiting) or any(sequence.may_emit for sequence in self.paused.values())
        )

    # ------------------------------------------------------------ one step

    def schedule(self, now_s: float) -> Plan:
        """Hands out the next step's tokens, charges them, and allocates their blocks."""
        plan = Plan()
        self._resume(plan, now_s)
        head = self.waiting.peek(now_s)
        # Prompts of a higher tier go before the unfinished ones of a lower tier, which may be long.
        late = [] if head is None else [each for each in self.running if _is_prefill_below(each, head.tier)]
        self._hand_out(
            plan, [each for each in self.running if each not in late] if late else self.running, now_s
        )
        if late:
            self._admit(plan, now_s, above=min(each.tier for each in late))
            self._hand_out(plan, [each for each in late if each.state is State.RUNNING], now_s)
        self._admit(plan, now_s)
        return plan

    def computed(self, sequence: Sequence, tokens: int) -> int:
        """A share was executed. Returns how many prompt tokens it computed for the first time."""
        first_time = sequence.first_time_prompt_tokens(tokens)
        before = sequence.computed_tokens
        sequence.computed_tokens = before + tokens
        sequence.recomputed_tokens += max(
            0, min(sequence.ever_computed_tokens, sequence.computed_tokens) - before
        )
        sequence.ever_computed_tokens = max(sequence.ever_computed_tokens, sequence.computed_tokens)
        return first_time

    def emitted(self, sequence: Sequence, token_id: int) -> None:
        """A token was sampled: it is known from now on, and charged."""
        sequence.token_ids.append(token_id)
        self.counters.charge(sequence.tenant_id, sequence.submit.weight, OUTPUT_TOKEN_COST)

    def not_computed(self, sequence: Sequence, tokens: int) -> None:
        """A share was not executed after all: what `schedule` charged for it is given back."""
        self._charge_prompt(sequence, -sequence.first_time_prompt_tokens(tokens))

    def check(self) -> None:
        """Self-audit of blocks, states and containers. Raises AssertionError."""
        self.pool.check(sequence.block_table for sequence in self.sequences.values())
        assert len(self.running) <= self.max_sequences, "too many sequences run"
        holders = {State.RUNNING: {*self.running}, State.PAUSED: {*self.paused.values()}}
        waiting = {entry.entry_id for entry in self.waiting.entries()}
        assert sum(len(held) for held in holders.values()) + len(waiting) == sum(
            1
            for sequence in self.sequences.values()
            if sequence.state in (State.RUNNING, State.PAUSED, State.WAITING)
        )
        for sequence in self.sequences.values():
            slots = len(sequence.block_table) * self.block_tokens
            assert sequence.computed_tokens <= min(slots, sequence.total_tokens)
            if sequence.state in holders:
                assert sequence in holders[sequence.state], "a sequence is not where its state says"
            else:
                assert not sequence.block_table, f"a {sequence.state} sequence holds blocks"
                assert (sequence.sequence_id in waiting) == (sequence.state is State.WAITING)

    # ------------------------------------------------------------ inside

    def _hand_out(self, plan: Plan, runners: list[Sequence], now_s: float) -> None:
        budget = self.max_batched_tokens - plan.num_tokens
        for sequence, tokens in self.policy.compose.shares(runners, budget):
            # One that gave way to an earlier one in this very loop is no longer running.
            if sequence.state is State.RUNNING and self._grow(plan, sequence, tokens, now_s):
                self._grant(plan, sequence, tokens)

    def _resume(self, plan: Plan, now_s: float) -> None:
        """Brings paused sequences back that may emit, while there is a place for them."""
        back = [sequence for sequence in self.paused.values() if sequence.may_emit]
        for sequence in sorted(back, key=lambda each: each.tier):
            if not self._take_place(plan, sequence, now_s):
                return
            del self.paused[sequence.sequence_id]
            move(sequence, State.RUNNING)
            self.running.append(sequence)

    def _take_place(self, plan: Plan, sequence: Sequence, now_s: float) -> bool:
        """A free place among the running ones, if need be that of a strictly lower tier."""
        if len(self.running) < self.max_sequences:
            return True
        below = self._runners_below(sequence)
        if not below:
            return False
        displaced = self.policy.evict.victim(below, self.counters)
        self._ungrant(plan, displaced)
        self.pause(displaced, now_s)
        plan.paused.append(displaced)
        return True

    def _runners_below(self, sequence: Sequence) -> list[Sequence]:
        return [runner for runner in self.running if runner.tier > sequence.tier]

    def _admit(self, plan: Plan, now_s: float, *, above: int | None = None) -> None:
        """Admits in order until the budget is spent or the next one does not fit; with `above`, only
        tiers above that one. Nobody, in a step in which a runner had to give way to another."""
        if not len(self.waiting) or plan.preempted:
            return
        plan.promised_blocks = blocks_promised(self.policy.admit, self.running, self.block_tokens)
        while (budget := self.max_batched_tokens - plan.num_tokens) > 0:
            entry = self.waiting.peek(now_s)
            if entry is None or (above is not None and entry.tier >= above):
                return
            sequence = self.sequences[entry.entry_id]
            if len(self.running) == self.max_sequences and not self._runners_below(sequence):
                return
            if not self._room_to_start(plan, sequence, now_s):
                return
            self._take_place(plan, sequence, now_s)
            # By name: one that just gave its memory may stand before it now.
            self.waiting.remove(entry.entry_id)
            move(sequence, State.RUNNING)
            self.running.append(sequence)
            sequence.block_table.extend(self.pool.allocate(self._blocks_at_start(sequence)))
            plan.promised_blocks += self._still_wanted(sequence)
            sequence.computed_tokens = sequence.host_kv_tokens
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
            left = sequence.total_tokens - sequence.computed_tokens
            self._grant(plan, sequence, self.policy.compose.first_chunk(left, budget))
            plan.admitted.append(sequence)

    def _grow(self, plan: Plan, sequence: Sequence, tokens: int, now_s: float) -> bool:
        """Blocks for `tokens` more; False when the sequence itself had to give way."""
        wanted = blocks_for(sequence.computed_tokens + tokens, self.block_tokens) - len(sequence.block_table)
        while wanted > self.pool.num_free:
            victim = self._victim(sequence, now_s)
            self._preempt(plan, victim)
            if victim is sequence:
                return False
        if wanted > 0:
            sequence.block_table.extend(self.pool.allocate(wanted))
        return True

    def _victim(self, sequence: Sequence, now_s: float) -> Sequence:
        """Who gives way to a running `sequence`: a paused one that may be taken, else the policy's choice."""
        for paused in self.paused.values():
            if len(self.running) == 1 or self._yields(paused, sequence, now_s):
                return paused
        assert len(self.running) > 1, "a sequence that can never fit was admitted"
        # `sequence` itself is always a candidate: an immune one has all its blocks and never asks.
        candidates = [
            runner
            for runner in self.running
            if runner.tier >= sequence.tier and runner.times_displaced < self.max_displacements
        ]
        victim = self.policy.evict.victim(candidates, self.counters)
        victim.times_displaced += 1
        return victim

    def _yields(self, paused: Sequence, sequence: Sequence, now_s: float) -> bool:
        return paused.tier > sequence.tier or now_s - paused.paused_since_s >= self.paused_keep_s

    def _room_to_start(self, plan: Plan, sequence: Sequence, now_s: float) -> bool:
        """Whether it fits beside what runs; takes memory from paused ones and from lower tiers for it,
        but only if that is enough."""
        start = self._blocks_at_start(sequence)
        if self.running:
            wanted = max(start, self._still_wanted(sequence)) + plan.promised_blocks + self.watermark_blocks
        else:
            # With nothing running, waiting for paused ones would be waiting for their tenants' budgets.
            wanted = start
        short = wanted - self.pool.num_free
        if short <= 0:
            return True
        victims: list[Sequence] = []
        for paused in self.paused.values():
            if short > 0 and (not self.running or self._yields(paused, sequence, now_s)):
                victims.append(paused)
                short -= len(paused.block_table)
        below = [
            runner
            for runner in self._runners_below(sequence)
            if runner.times_displaced < self.max_displacements
        ]
        while short > 0 and below:
            victim = self.policy.evict.victim(below, self.counters)
            below.remove(victim)
            victims.append(victim)
            short -= len(victim.block_table) + self._still_wanted(victim)
        if short > 0:
            return False
        for victim in victims:
            if victim.state is State.RUNNING:
                victim.times_displaced += 1
                plan.promised_blocks -= self._still_wanted(victim)
            self._preempt(plan, victim)
        return True

    def _still_wanted(self, sequence: Sequence) -> int:
        return blocks_still_wanted(self.policy.admit, sequence, self.block_tokens)

    def _blocks_at_start(self, sequence: Sequence) -> int:
        is_immune = sequence.times_displaced >= self.max_displacements
        tokens = sequence.most_tokens if is_immune else sequence.total_tokens
        return blocks_for(max(tokens, sequence.total_tokens), self.block_tokens)

    def _grant(self, plan: Plan, sequence: Sequence, tokens: int) -> None:
        # Charged before the next one is admitted: a prompt charged a step late lets a tenant in too often.
        self._charge_prompt(sequence, sequence.first_time_prompt_tokens(tokens))
        plan.shares[sequence] = tokens

    def _charge_prompt(self, sequence: Sequence, tokens: int) -> None:
        if tokens:
            self.counters.charge(sequence.tenant_id, sequence.submit.weight, tokens * INPUT_TOKEN_COST)

    def _ungrant(self, plan: Plan, sequence: Sequence) -> None:
        self.not_computed(sequence, plan.shares.pop(sequence, 0))

    def _preempt(self, plan: Plan, sequence: Sequence) -> None:
        """Takes the KV of a running or paused sequence; it returns to the head of its line."""
        self._ungrant(plan, sequence)
        plan.preempted.append(sequence)
        self._drop(sequence)
        move(sequence, State.PREEMPTED)
        sequence.preemptions += 1
        self.preemptions += 1
        if sequence.may_emit:
            move(sequence, State.WAITING)
            self.waiting.add(sequence.entry(), front=True)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence.sequence_id)
        self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        """Out of the steps, and its blocks back to the pool."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        self.paused.pop(sequence.sequence_id, None)
        self.pool.free(sequence.block_table)
        sequence.computed_tokens = 0
        sequence.host_kv = []
        sequence.host_kv_tokens = 0


def _is_prefill_below(sequence: Sequence, tier: int) -> bool:
    return sequence.tier > tier and sequence.total_tokens - sequence.computed_tokens > 1
