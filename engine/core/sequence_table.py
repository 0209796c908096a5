"""`SequenceTable`: the sequences of an engine, their states and their KV blocks.

The only code that moves a sequence between waiting, running and paused, and that allocates and frees blocks;
`engine.core.scheduler` goes through it. Integers only; time is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from engine.core.decision_log import DecisionLog
from engine.core.tenant_charges import TenantCharges, prompt_charge
from engine.entry import OUTPUT_TOKEN_COST
from engine.kv.blocks import blocks_for
from engine.kv.cache import KvCache
from engine.kv.host import Copies
from engine.kv.prefix import Match, PrefixCursor
from engine.messages import DecodeSlots, StepTime, Submit
from engine.scheduling.brakes import NO_BRAKES
from engine.scheduling.compose.auto_slots import AutoSlots, RowCost
from engine.scheduling.compose.token_fair import TokenFair
from engine.scheduling.compose.turns import held_tenants
from engine.scheduling.counters import ServiceCounters, scaled
from engine.scheduling.evict.base import KvCosts
from engine.scheduling.policy import Policy
from engine.scheduling.room import UNLIMITED, Room, yields_cost
from engine.scheduling.step_counters import TierTenant
from engine.scheduling.tiers import TieredQueue
from engine.sequence import Sequence, SequenceStatus, move
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import PRIOR, SETTLED_AFTER

MAX_PAUSED_PERMILLE = 500
"""Share of the pool that one tenant's paused sequences may hold."""
MAX_SEQUENCES_LEFT = 1024
"""Tenants of which it is kept when their last running sequence left."""

UNKNOWN_TOKEN = -1
"""Stands for an output token that a step in flight will choose."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Launch:
    """A launched step as it was then, by share."""

    positions: list[int]
    """Tokens computed before."""
    first_times: list[int]
    """Prompt tokens that it computes for the first time."""
    generations: list[int]
    """`Sequence.launches_dropped`: it comes to nothing where that has changed when it is over."""
    amounts: dict[str, int]
    """What tenants were charged in their step counters."""

    def still_counts(self, shares: Iterable[Sequence]) -> list[bool]:
        return [
            generation == sequence.launches_dropped
            for sequence, generation in zip(shares, self.generations, strict=True)
        ]


class SequenceTable:
    """Owns every sequence of an engine, its KV bookkeeping and the local service counters."""

    def __init__(
        self,
        policy: Policy,
        pool: KvCache,
        counters: ServiceCounters,
        *,
        max_batched_tokens: int,
        max_sequences: int,
        watermark_blocks: int = 0,
        context_tokens: int = 4096,
        swap_block_s: float = 0.0,
        swap_base_s: float = 0.0,
    ) -> None:
        """`context_tokens`: the longest sequence. `swap_block_s`, `swap_base_s`: as of `ModelRunner`."""
        self.policy = policy
        self.pool = pool
        self.counters = counters
        self.block_tokens = pool.block_tokens
        self.max_batched_tokens = max_batched_tokens
        self.max_sequences = max_sequences
        self.watermark_blocks = watermark_blocks
        self.max_paused_blocks = max(1, pool.num_blocks * MAX_PAUSED_PERMILLE // 1000)
        self.context_tokens = context_tokens
        self.swap_block_s = swap_block_s
        self.swap_base_s = swap_base_s
        self.brakes = NO_BRAKES
        """What tiers may hold; its owner replaces it."""
        self.step_time: StepTime = PRIOR
        """The forecast of a step's time; its owner replaces it."""
        self.mean_step_time: Callable[[], StepTime] = lambda: self.step_time
        """For throughput; its owner may replace it."""
        self.auto_slots = AutoSlots()
        self.sequences: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        """In order of admission; changed by `_run` and `_rest` alone."""
        self.running_by_tier: dict[int, int] = {}
        self._most_blocks = 0
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self.prefills: dict[Sequence, None] = {}
        """Running sequences with more than one token to compute, in the order in which they came to run."""
        self.paused: dict[str, Sequence] = {}
        """With their KV, the longest paused first."""
        self.waiting = TieredQueue(policy.order, counters)
        self.waiting_tenants: dict[str, int] = {}
        self.running_tenants: dict[TierTenant, int] = {}
        self._paces: dict[float, int] = {}
        """TPOT targets of running sequences, with their number."""
        self._left_step: dict[TierTenant, int] = {}
        """Step in which the last running sequence of a tenant left, for a step or two."""
        self.charges = TenantCharges(counters)
        self.standings = self.charges.standings
        """What tenants had: the counters of the steps."""
        self.decisions = DecisionLog()
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.swaps = 0
        self.wait_until_s: float | None = None
        """The policy waits on purpose: nothing runs before this time, unless something else happens."""

    # ------------------------------------------------------------ sequences that come and go

    def add(self, sequence: Sequence) -> None:
        """Adds a waiting sequence, or a preempted one that rests until its lease is topped up."""
        self.sequences[sequence.sequence_id] = sequence
        sequence.token_charge = scaled(OUTPUT_TOKEN_COST, sequence.submit.weight)
        sequence.cursor = PrefixCursor(sequence.salt)
        sequence.locality = self.pool.locality(sequence.token_ids, sequence.salt)
        sequence.found_tokens = self.pool.cached_tokens(sequence.token_ids, sequence.salt)
        sequence.yields_cost = yields_cost(
            sequence.predicted_tokens, self.pool.num_blocks * self.block_tokens
        )
        if sequence.state is SequenceStatus.WAITING:
            self._enqueue(sequence)
            self.policy.admit.arrived(sequence.submitted_s)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence in whatever state it is; its blocks are free when this returns."""
        self._leave(sequence)
        move(sequence, SequenceStatus.FINISHED)
        del self.sequences[sequence.sequence_id]

    def forget(self, sequence: Sequence) -> None:
        self.decisions.leaves(sequence)
        self._leave(sequence)
        del self.sequences[sequence.sequence_id]

    def top_up(self, sequence: Sequence, lease_tokens: int, lease_gpu_us: int | None = None) -> None:
        """Sets the lease; it never shrinks. A sequence that rested without KV goes back into its line."""
        sequence.lease_tokens = max(sequence.lease_tokens, lease_tokens)
        if lease_gpu_us is not None and sequence.lease_gpu_us is not None:
            sequence.lease_gpu_us = max(sequence.lease_gpu_us, lease_gpu_us)
        if not sequence.may_emit:
            return
        if sequence.state is SequenceStatus.PREEMPTED:
            move(sequence, SequenceStatus.WAITING)
            self._enqueue(sequence, front=True)
        elif sequence.state is SequenceStatus.SWAPPED and sequence.sequence_id not in self.waiting:
            self._enqueue(sequence, front=True)

    def release(self, sequence: Sequence) -> None:
        """Puts a sequence in line that rested from its arrival on, if its lease lets it."""
        if sequence.may_emit:
            move(sequence, SequenceStatus.WAITING)
            self._enqueue(sequence)
            self.policy.admit.arrived(sequence.submitted_s)

    def append(self, sequence: Sequence, token_ids: list[int], *, computes: bool) -> None:
        """Adds output tokens that no step chose; `computes`: the next steps compute them, as one chunk. What
        is in flight for the sequence comes to nothing."""
        self.drop_in_flight(sequence)
        sequence.token_ids += token_ids
        if not computes:
            return
        sequence.forced_tokens += len(token_ids)
        self.charges.forced(sequence, len(token_ids))
        sequence.start_row_anew()
        if sequence.state is SequenceStatus.RUNNING:
            self.prefills[sequence] = None

    def hear(self, submit: Submit) -> None:
        """Takes the counters that a sequence brings, once it waits: their owner lifts among all that wait."""
        if self.charges.hear(submit):
            self.waiting.unlift(submit.tenant_id)

    def set_policy(self, policy: Policy) -> None:
        self.waiting.set_order(policy.order)
        self.policy = policy

    @property
    def has_runnable(self) -> bool:
        """Whether the next step has tokens to compute (or the policy waits on purpose)."""
        return bool(
            self.running or len(self.waiting) or any(sequence.may_emit for sequence in self.paused.values())
        )

    def is_within_brake(self, sequence: Sequence) -> bool:
        """Whether its tier may hold a place and the memory for it, as predicted, beside what runs of it."""
        tier = sequence.tier
        if tier not in self.brakes.shares:
            return True
        held = [runner.predicted_tokens for runner in self.running if runner.submit.tier == tier]
        whole = (self.max_sequences, self.pool.num_blocks * self.block_tokens)
        return self.brakes.has_room(tier, (len(held), sum(held)), (1, sequence.predicted_tokens), whole)

    @property
    def most_promised_blocks(self) -> int:
        """Most blocks that the running sequences can still take, shared ones counted each. O(paused)."""
        paused_blocks = sum([len(sequence.block_table) for sequence in self.paused.values()])
        return self._most_blocks - self.pool.num_referenced + paused_blocks

    @property
    def kv_costs(self) -> KvCosts:
        return KvCosts(self.step_time, self.block_tokens, self.swap_block_s, self.swap_base_s)

    # ------------------------------------------------------------ one step

    def raise_predictions(self) -> None:
        """Raises the predicted length of sequences that outlived it: admission reserves by it."""
        for sequence in self.running:
            if sequence.emitted_tokens >= sequence.predicted_output_tokens:
                longer = sequence.emitted_tokens + max(1, sequence.emitted_tokens // 2)
                sequence.predicted_output_tokens = min(longer, sequence.submit.max_tokens)

    def room(self, now_s: float) -> Room:
        num_waiting = len(self.waiting)
        ahead = sum([prefill.total_tokens - prefill.computed_tokens for prefill in self.prefills])
        # One that waits may join the step where there is a place, or take one.
        return Room(
            now_s=now_s,
            tokens=self.max_batched_tokens,
            tier_tokens={
                tier: self.brakes.most(tier, self.max_batched_tokens) for tier in self.brakes.shares
            },
            counters=self.standings,
            step_time=self.step_time,
            context_tokens=self.context_tokens,
            num_waiting=num_waiting,
            step=self.decisions.step,
            auto_slots=self._auto_slots,
            tightest_tpot_s=min(self._paces, default=0.0),
            prompts_ahead=UNLIMITED if num_waiting else ahead,
            prefilling=self.prefills,
            waiting_tenants=self.waiting_tenants,
        )

    @property
    def _row_cost(self) -> RowCost:
        """What a decoding sequence of a step costs, with contexts as they are now."""
        context = sum([sequence.computed_tokens for sequence in self.running])
        return RowCost.of(self.mean_step_time(), context / max(1, len(self.running)))

    @property
    def most_decodes(self) -> int:
        compose, most = self.policy.compose, min(self.max_sequences, self.max_batched_tokens)
        return min(most, compose.most_decodes(self._auto_slots)) if isinstance(compose, TokenFair) else most

    def decode_slots(self) -> DecodeSlots | None:
        """The slots of token-fair composition and their worth; None: another one composes."""
        compose = self.policy.compose
        if not isinstance(compose, TokenFair):
            return None
        slots, places, rates = self.most_decodes, self.max_sequences, (0.0, 0.0)
        if self.step_time.samples >= SETTLED_AFTER:
            cost = self._row_cost
            rates = (cost.tokens_per_s(slots), cost.tokens_per_s(places))
        return DecodeSlots(slots, places, compose.is_auto, *rates)

    def renew_slots(self) -> None:
        self.auto_slots.renew(self._row_cost, len(self.running), self.max_sequences)

    def settle(self, room: Room) -> None:
        """Lifts, after a step's commit, those that had all they could take while others were held back."""
        held: dict[int, set[str]] = {}
        for contest in room.contests:
            held.setdefault(contest.tier, set()).update(held_tenants(contest, room))
        for tier, tenant_id in room.held_prompts:
            held.setdefault(tier, set()).add(tenant_id)
        for tier, held_back in held.items():
            if held_back:
                whole = {tenant for of, tenant in self.running_tenants if of == tier} - held_back
                self.standings.settle(tier, whole, held_back)

    def launched(self, shares: Mapping[Sequence, int]) -> Launch:
        """Notes that a step computes `shares`: the next one is planned as if it were over. Every token counts
        for its tenant from here on; the ids of output tokens come with `collected`."""
        positions = [sequence.computed_tokens for sequence in shares]
        first_times = [0] * len(positions)
        # By tenant: a new object for each of hundreds of sequences would trigger the garbage collector.
        amounts: dict[str, int] = {}
        prompts: dict[str, int] = {}
        beyond: dict[str, int] = {}
        """What the owner of the counters did not charge ahead."""
        num_sampled = 0
        # One loop, nearly without calls: it visits every running sequence in every step.
        for index, (sequence, tokens) in enumerate(shares.items()):
            before, token_ids, submit = positions[index], sequence.token_ids, sequence.submit
            after = sequence.computed_tokens = before + tokens
            sequence.in_flight_tokens += tokens
            known = len(token_ids)
            if before != known - DECODE_TOKENS or before < sequence.prompt_tokens:
                if first_time := sequence.first_time_prompt_tokens(before, tokens):
                    first_times[index] = first_time
                    sequence.in_flight_first_time += first_time
                    charge = prompt_charge(sequence, first_time)
                    prompts[submit.tenant_id] = prompts.get(submit.tenant_id, 0) + charge
                if after >= known - DECODE_TOKENS:
                    self.prefills.pop(sequence, None)
                if after < known:
                    continue
            token_ids.append(UNKNOWN_TOKEN)
            sequence.pending_tokens += 1
            num_sampled += 1
            tenant_id = submit.tenant_id
            amounts[tenant_id] = amounts.get(tenant_id, 0) + sequence.token_charge
            if known - sequence.prompt_tokens >= submit.predicted_output_tokens:
                beyond[tenant_id] = beyond.get(tenant_id, 0) + sequence.token_charge
        self.charges.emitted(amounts, num_sampled, beyond)
        if prompts:
            self.standings.serve_all(prompts)
            for tenant_id, amount in prompts.items():
                amounts[tenant_id] = amounts.get(tenant_id, 0) + amount
        self.standings.launched(amounts)
        generations = [sequence.launches_dropped for sequence in shares]
        return Launch(positions, first_times, generations, amounts)

    def collected(self, shares: Mapping[Sequence, int], launch: Launch, chosen: Iterable[int | None]) -> None:
        """Notes the results of a launched step: `chosen` are its output tokens (None: none). Blocks that are
        full of known tokens can be found by others from now on. What was dropped meanwhile is left out."""
        block_tokens, publish = self.block_tokens, self.pool.publish
        amounts = launch.amounts
        for (sequence, tokens), position, first_time, generation, token_id in zip(
            shares.items(), launch.positions, launch.first_times, launch.generations, chosen, strict=True
        ):
            if generation != sequence.launches_dropped:
                # What it was charged was taken back.
                if first_time or token_id is not None:
                    charged = prompt_charge(sequence, first_time)
                    amounts[sequence.tenant_id] -= charged + sequence.token_charge * (token_id is not None)
                continue
            sequence.in_flight_tokens -= tokens
            after = position + tokens
            ever = sequence.ever_computed_tokens
            if position < ever:
                again = min(ever, after) - position
                sequence.recomputed_tokens += again
                self.recomputed_tokens += again
            if after > ever:
                sequence.ever_computed_tokens = after
            if first_time:
                sequence.in_flight_first_time -= first_time
            if token_id is not None:
                sequence.token_ids[after] = token_id
                sequence.pending_tokens -= 1
            if after // block_tokens != sequence.cursor.blocks:
                publish(sequence.block_table, sequence.cursor, sequence.token_ids, after)
        self.standings.landed(amounts)

    def commit(self, shares: Mapping[Sequence, int], chosen: Iterable[int | None]) -> list[int]:
        """Notes an executed step: `launched` and `collected` at once. Returns by share the prompt tokens
        computed for the first time."""
        launch = self.launched(shares)
        self.collected(shares, launch, chosen)
        return launch.first_times

    def drop_in_flight(self, sequence: Sequence) -> None:
        """Takes back what steps in flight would give a sequence: their late tokens are neither emitted nor
        charged."""
        if not sequence.in_flight_tokens:
            return
        sequence.launches_dropped += 1
        sequence.computed_tokens -= sequence.in_flight_tokens
        emitted, pending = sequence.emitted_tokens, sequence.pending_tokens
        beyond = min(pending, max(0, emitted - sequence.submit.predicted_output_tokens))
        self.charges.take_back(sequence, sequence.in_flight_first_time, pending, beyond)
        if pending:
            del sequence.token_ids[-pending:]
        sequence.in_flight_tokens = sequence.in_flight_first_time = sequence.pending_tokens = 0

    # ------------------------------------------------------------ moves, for the scheduler and the core

    def pause(self, sequence: Sequence, now_s: float) -> None:
        """Takes a running sequence out of the steps; it keeps its KV."""
        move(sequence, SequenceStatus.PAUSED)
        self._rest(sequence)
        sequence.paused_since_s = now_s
        self.paused[sequence.sequence_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        del self.paused[sequence.sequence_id]
        sequence.is_suspended = False
        self._run(sequence)

    def find_prefix(self, sequence: Sequence) -> Match:
        """Prefix match of a waiting sequence; leaves at least one token to compute."""
        if sequence.swapped is not None:
            most = sequence.swapped.tokens
        else:
            most = 0 if sequence.host_kv_tokens else sequence.total_tokens - 1
        sequence.match = self.pool.match(sequence.token_ids, sequence.salt, most, sequence.match)
        return sequence.match

    def start(self, sequence: Sequence, blocks: int, match: Match) -> None:
        """Starts a waiting sequence: `blocks` blocks, those of `match` first, and swapped or imported KV."""
        # By id: a sequence just preempted for it may stand before it now.
        self._dequeue(sequence)
        self.pool.attach(sequence.block_table, sequence.cursor, match)
        if sequence.swapped is not None:
            sequence.computed_tokens = sequence.swapped.tokens
            self.pool.swap_in(sequence.swapped, sequence.block_table)
            sequence.swapped = None
        elif sequence.host_kv_tokens:
            sequence.computed_tokens = sequence.host_kv_tokens
        else:
            sequence.has_cached(match.tokens)
        sequence.match = None
        self._charge_prompt(sequence, sequence.prompt_tokens - sequence.cached_tokens)
        self.pool.extend(sequence.block_table, max(0, blocks - len(sequence.block_table)))
        self._lift_newcomer(sequence)
        self._run(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Attaches blocks of a running sequence's prompt that others published since the last step."""
        gained = self.pool.adopt(
            sequence.block_table,
            sequence.cursor,
            sequence.token_ids,
            sequence.computed_tokens,
            sequence.total_tokens - 1,
        )
        if gained:
            sequence.has_cached(sequence.computed_tokens + gained)
            self._charge_prompt(sequence, sequence.prompt_tokens - sequence.cached_tokens)
            if sequence.total_tokens - sequence.computed_tokens <= DECODE_TOKENS:
                self.prefills.pop(sequence, None)

    def preempt(self, sequence: Sequence) -> str:
        """Frees a sequence's blocks and requeues it first: `swap` (KV in host memory) or `preempt`."""
        swapped = None
        self.drop_in_flight(sequence)
        # Imported KV is not in its blocks yet.
        if not sequence.host_kv and self.kv_costs.swaps(sequence.computed_tokens):
            swapped = self.pool.swap_out(sequence.block_table, sequence.cursor, sequence.computed_tokens)
        self._drop(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        if swapped is None:
            move(sequence, SequenceStatus.PREEMPTED)
            if sequence.may_emit:
                move(sequence, SequenceStatus.WAITING)
        else:
            move(sequence, SequenceStatus.SWAPPED)
            sequence.swapped = swapped
            self.swaps += 1
        if sequence.may_emit:
            self._enqueue(sequence, front=True)
        return "preempt" if swapped is None else "swap"

    def lose_swapped(self, copies: Copies) -> None:
        """After failed copies: sequences with KV in host memory, or just copied back, are recomputed."""
        arriving = {block for _, block in copies.back}
        for sequence in self.sequences.values():
            if sequence.swapped is not None:
                self.pool.drop(sequence.swapped)
                sequence.swapped = None
            elif arriving.isdisjoint(sequence.block_table):
                continue
            else:
                self._drop(sequence)
            move(sequence, SequenceStatus.PREEMPTED)
            if sequence.may_emit:
                move(sequence, SequenceStatus.WAITING)
                if sequence.sequence_id not in self.waiting:
                    self._enqueue(sequence, front=True)

    def check(self) -> None:
        """Self-audit of blocks, states and containers, between steps. Raises AssertionError."""
        assert not self.pool.is_step_open, "announcements or copies of a step are left"
        live = self.sequences.values()
        self.pool.check(
            [(sequence.block_table, sequence.cursor) for sequence in live],
            [sequence.swapped for sequence in live if sequence.swapped is not None],
        )
        assert len(self.running) <= self.max_sequences, "too many sequences run"
        holders = {SequenceStatus.RUNNING: {*self.running}, SequenceStatus.PAUSED: {*self.paused.values()}}
        waiting = {entry.entry_id for entry in self.waiting.entries()}
        assert self.prefills.keys() == {
            sequence
            for sequence in self.running
            if sequence.total_tokens - sequence.computed_tokens > DECODE_TOKENS
        }
        rows = [*self._free_rows, *[sequence.row for sequence in self.running]]
        assert sorted(rows) == list(range(self.max_sequences)), "a row has two owners, or none"
        assert len(waiting) == len(self.waiting)
        assert self.running_by_tier == Counter(sequence.tier for sequence in self.running)
        assert self._most_blocks == sum(map(self._blocks_at_most, self.running))
        for sequence in live:
            slots = len(sequence.block_table) * self.block_tokens
            assert sequence.computed_tokens <= min(slots, sequence.total_tokens)
            assert sequence.token_ids.count(UNKNOWN_TOKEN) == sequence.pending_tokens
            assert sequence.pending_tokens <= sequence.in_flight_tokens <= sequence.computed_tokens
            known = sequence.computed_tokens - sequence.in_flight_tokens
            assert sequence.cursor.blocks * self.block_tokens <= known, "a block is published too early"
            assert sequence.emitted_tokens <= sequence.lease_tokens, "a lease is exceeded"
            assert (sequence.swapped is not None) == (sequence.state is SequenceStatus.SWAPPED)
            if sequence.state in holders:
                assert sequence in holders[sequence.state], "a sequence is not where its state says"
            else:
                assert not sequence.block_table, f"a {sequence.state} sequence holds blocks"
                expected = sequence.state is SequenceStatus.WAITING or (
                    sequence.state is SequenceStatus.SWAPPED and sequence.may_emit
                )
                assert (sequence.sequence_id in waiting) == expected
        for state, held in holders.items():
            assert all(sequence.state is state for sequence in held)

    @property
    def _auto_slots(self) -> int:
        """At least one for each running sequence that goes before the lowest tier, and one for that."""
        rows, tiers = self.auto_slots.rows, self.running_by_tier
        if not rows or len(tiers) < 2:
            return rows
        return max(rows, sum(tiers.values()) - tiers[max(tiers)] + 1)

    def _run(self, sequence: Sequence) -> None:
        move(sequence, SequenceStatus.RUNNING)
        self.running.append(sequence)
        sequence.row = self._free_rows.pop()
        sequence.start_row_anew()
        if sequence.total_tokens - sequence.computed_tokens > DECODE_TOKENS:
            self.prefills[sequence] = None
        tier = sequence.submit.tier
        self.running_by_tier[tier] = self.running_by_tier.get(tier, 0) + 1
        _add(self.running_tenants, (tier, sequence.tenant_id), 1)
        if sequence.submit.tpot_target_s:
            _add(self._paces, sequence.submit.tpot_target_s, 1)
        self._most_blocks += self._blocks_at_most(sequence)

    def _rest(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        self.prefills.pop(sequence, None)
        tier = sequence.submit.tier
        self.running_by_tier[tier] -= 1
        if not self.running_by_tier[tier]:
            del self.running_by_tier[tier]
        _add(self.running_tenants, (tier, sequence.tenant_id), -1)
        if (tier, sequence.tenant_id) not in self.running_tenants:
            self._left_step[tier, sequence.tenant_id] = self.decisions.step
        if sequence.submit.tpot_target_s:
            _add(self._paces, sequence.submit.tpot_target_s, -1)
        self._most_blocks -= self._blocks_at_most(sequence)

    def _blocks_at_most(self, sequence: Sequence) -> int:
        return blocks_for(sequence.prompt_tokens + sequence.submit.max_tokens, self.block_tokens)

    def _enqueue(self, sequence: Sequence, *, front: bool = False) -> None:
        self.waiting.add(sequence.entry(), front=front)
        _add(self.waiting_tenants, sequence.tenant_id, 1)

    def _dequeue(self, sequence: Sequence) -> None:
        if self.waiting.remove(sequence.sequence_id) is not None:
            _add(self.waiting_tenants, sequence.tenant_id, -1)

    def _lift_newcomer(self, sequence: Sequence) -> None:
        """A tenant with nothing running, unknown to the counters' owner, starts at the lowest that runs."""
        tier, tenant_id, step = sequence.tier, sequence.tenant_id, self.decisions.step
        if len(self._left_step) > MAX_SEQUENCES_LEFT:
            self._left_step = {key: left for key, left in self._left_step.items() if left >= step - 1}
        is_new = (tier, tenant_id) not in self.running_tenants and not sequence.preemptions
        if not is_new or self.standings.knows(tier, tenant_id):
            return
        if self._left_step.get((tier, tenant_id), -1) < step - 1:
            others = [key for key in self.running_tenants if key[0] == tier]
            self.standings.lift(tier, tenant_id, self.standings.lowest(others))

    def _charge_prompt(self, sequence: Sequence, tokens: int) -> None:
        """Charges (or refunds) the difference to `tokens` prompt tokens in total."""
        due = tokens - sequence.charged_prompt_tokens
        if due:
            self.charges.charge_prompt(sequence, due)
            sequence.charged_prompt_tokens = tokens

    def _leave(self, sequence: Sequence) -> None:
        self.drop_in_flight(sequence)
        # Refunds what was charged at the start and never computed.
        self._charge_prompt(sequence, sequence.computed_prompt_tokens)
        self._dequeue(sequence)
        self._drop(sequence)
        if sequence.swapped is not None:
            self.pool.drop(sequence.swapped)
            sequence.swapped = None

    def _drop(self, sequence: Sequence) -> None:
        self.drop_in_flight(sequence)
        if sequence.state is SequenceStatus.RUNNING:
            self._rest(sequence)
        self.paused.pop(sequence.sequence_id, None)
        sequence.is_suspended = False
        self.pool.free(sequence.block_table, sequence.cursor)
        sequence.computed_tokens = 0
        sequence.host_kv = []
        sequence.host_kv_tokens = 0


def _add(counts: dict[Key, int], key: Key, number: int) -> None:
    count = counts.get(key, 0) + number
    if count:
        counts[key] = count
    else:
        counts.pop(key, None)
