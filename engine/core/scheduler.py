"""`Scheduler`: puts one step together, one object a step: the mechanism behind the policy's four decisions.

A step: paused sequences that may go on return; running ones get tokens as the policy composes them; then,
unless one had to yield memory to a runner, waiting ones are admitted in order until the budget is spent or
the next one may not join or does not fit: it is never skipped. Unfinished prompts of lower tiers come after
the admissions of a higher one; with `Compose.prompts_last` all prompts come after all admissions.

Places. When all are taken, a sequence of a higher tier (or one that the policy's order puts before a running
one of its tier, or that is owed service: `places.py`) takes one: the displaced one pauses with its KV kept. A
place taken in a step is kept for that step.

Memory. A sequence gets the blocks of its known tokens when it is admitted and one more whenever a decode
crosses a block's edge. When none is free, paused sequences yield first (of a lower tier, or paused for long),
then the policy's victim among running ones of the same or a lower tier. To *start*, a sequence takes memory
from strictly lower tiers only. The last runner never yields: what could not run alone was refused on arrival.
A sequence displaced `max_displacements` times is immune: it is admitted again only with all the memory that
it can ever need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.core.places import replaceable, runners_below, set_back
from engine.core.plan import Plan
from engine.entry import QueueEntry
from engine.kv.blocks import blocks_for
from engine.kv.prefix import Match
from engine.scheduling.admit.base import Batch
from engine.scheduling.compose.auto_slots import RENEWED_EVERY
from engine.scheduling.compose.turns import contend, note_turns, split, take_turns
from engine.scheduling.evict.base import memory_free_in_s
from engine.sequence import Sequence, SequenceStatus
from engine.sizes import DECODE_TOKENS

if TYPE_CHECKING:
    from engine.core.sequence_table import SequenceTable


class Scheduler:
    def __init__(self, table: SequenceTable, now_s: float) -> None:
        self._table = table
        self._policy = table.policy
        self._order = table.waiting
        self._now_s = now_s
        self._placed: set[Sequence] = set()
        self._is_short = False
        """A sequence was preempted so that the running ones can go on."""
        self._sits_out: set[Sequence] = set()
        """Decoding sequences for which the brake on their tier leaves no token in this step."""
        self._braked = {
            tier
            for tier in table.brakes.shares
            if table.running_by_tier.get(tier, 0) >= table.brakes.most(tier, table.max_sequences)
        }
        """Tiers that get no further place in this step."""
        room = table.room(now_s)
        if table.decisions.step % RENEWED_EVERY == 0:
            table.renew_slots()
            room.auto_slots = 0
        self.plan = Plan(room)
        self.plan.room.placed = self._placed

    def run(self) -> Plan:
        self._policy.admit.stepped()
        table = self._table
        if table.paused:
            self._cap_paused()
            self._resume()
        for sequence in list(table.prefills):
            if not sequence.in_flight_tokens:
                table.adopt(sequence)
        self._brake_decodes()
        if self._policy.compose.prompts_last:
            self._hand_out_prompts_last()
        else:
            self._hand_out_all()
        if table.paused and self._order.order_interrupts:
            # Paused for a sequence that then could not start.
            self._hand_out_shares(self._resume(is_last=True))
        if self.plan.room.contests:
            note_turns(self.plan.room)
        return self.plan

    def _brake_decodes(self) -> None:
        """Where a brake leaves a tier fewer tokens than it has decoding sequences, tenants take turns."""
        room = self.plan.room
        for tier, tokens in room.tier_tokens.items():
            line = [runner for runner in split(self._table.running)[1] if runner.submit.tier == tier]
            if len(line) > tokens:
                contend(tier, line, room)
                standings = room.counters.of_tier(tier)
                self._sits_out |= set(line).difference(take_turns(line, tokens, room.step, standings, {}))

    def _hand_out_prompts_last(self) -> None:
        """Decodes, then admissions, then the prompts of those that ran and of those that came."""
        table, room = self._table, self.plan.room
        is_short = not table.prefills and self._hand_out_decodes(table.running)
        if not is_short:
            self._hand_out_shares(split(table.running)[1])
        self._admit()
        room.prompts_ahead = 0
        if len(room.given) < len(table.running):
            ran = self.plan.admitted if is_short else table.running
            self._hand_out_shares([runner for runner in ran if runner not in room.given])

    def _hand_out_all(self) -> None:
        table = self._table
        head = self._peek()
        # Prompts of a higher tier go before the unfinished ones of a lower tier, which may be long.
        late = {runner for runner in table.prefills if runner.tier > head.tier} if head is not None else set()
        if late:
            tier = min(runner.tier for runner in late)
            self._hand_out([runner for runner in table.running if runner not in late])
            self._admit(above=tier)
            self._hand_out([runner for runner in table.running if runner in late])
        else:
            self._hand_out(table.running)
        self._admit()

    # ------------------------------------------------------------ running sequences

    def _hand_out(self, runners: list[Sequence]) -> None:
        if runners and not self._hand_out_decodes(runners):
            self._hand_out_shares(runners)

    def _hand_out_shares(self, runners: list[Sequence]) -> None:
        if self._sits_out:
            runners = [runner for runner in runners if runner not in self._sits_out]
        if not runners:
            return
        table, plan, room = self._table, self.plan, self.plan.room
        block_tokens = table.block_tokens
        ones: list[Sequence] = []
        for sequence, tokens in self._policy.compose.shares(runners, room):
            computed = sequence.computed_tokens
            if room.tier_tokens:
                tokens = min(tokens, room.tokens_of(sequence.submit.tier))
                if tokens <= 0:
                    continue
            if (
                tokens == DECODE_TOKENS
                and not room.tier_tokens
                and computed >= sequence.prompt_tokens
                and computed < len(sequence.block_table) * block_tokens
                and sequence.state is SequenceStatus.RUNNING
            ):
                # The common case: a decode inside its last block. Nothing to charge, nothing to allocate.
                ones.append(sequence)
                continue
            if ones:
                room.take_decodes(ones)
                ones = []
            # Preempted in this loop for an earlier sequence.
            if sequence.state is not SequenceStatus.RUNNING:
                continue
            if computed < sequence.prompt_tokens and table.pool.defer(
                sequence.cursor, sequence.token_ids, computed
            ):
                continue
            if self._grow(sequence, tokens):
                self._grant(sequence, tokens)
        if ones:
            room.take_decodes(ones)
        assert room.tokens >= 0, f"{self._policy.compose.name} handed out more than there is: {plan.shares}"

    def _hand_out_decodes(self, runners: list[Sequence]) -> bool:
        """Fast path of `_hand_out_shares`: all decode, with tokens and blocks for all. False: unchanged."""
        table, room = self._table, self.plan.room
        if self._sits_out:
            runners = [runner for runner in runners if runner not in self._sits_out]
        if table.prefills or not runners or not self._policy.compose.floor_holds(runners, room):
            return False
        block_tokens = table.block_tokens
        special = [
            runner
            for runner in runners
            if runner.computed_tokens >= len(runner.block_table) * block_tokens
            or runner.computed_tokens < runner.prompt_tokens
        ]
        if len(special) > table.pool.num_free:
            return False
        for runner in special:
            if runner.computed_tokens < runner.prompt_tokens:
                return False
        if special:
            table.pool.extend_each([runner.block_table for runner in special])
        room.take_decodes(runners)
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Allocates blocks for `tokens` more; False when the sequence itself was preempted, or when the
        memory comes free with the steps in flight."""
        table = self._table
        wanted = blocks_for(sequence.computed_tokens + tokens, table.block_tokens) - len(sequence.block_table)
        while wanted > table.pool.num_free:
            if wanted <= table.pool.num_free + self._coming_blocks:
                return False
            self._is_short = True
            victim, rule = self._victim(sequence)
            if victim is sequence and self._waits_for_memory(sequence):
                return False
            victim.times_displaced += victim.state is SequenceStatus.RUNNING
            self._preempt(victim, rule, sequence)
            if victim is sequence:
                return False
        if wanted > 0:
            table.pool.extend(sequence.block_table, wanted)
        return True

    @property
    def _coming_blocks(self) -> int:
        """Blocks that steps in flight let go of: no sequence gives way for those."""
        paused = self._table.paused.values()
        return self._table.pool.num_fenced + sum([len(each.block_table) for each in paused if each.is_ending])

    def _victim(self, sequence: Sequence) -> tuple[Sequence, str]:
        """What to preempt for a running `sequence`: a paused one that yields, else the policy's choice."""
        table = self._table
        for paused in table.paused.values():
            if not paused.is_ending and (len(table.running) == 1 or self._yields(paused, sequence)):
                return paused, "paused"
        assert len(table.running) > 1, "a sequence that can never fit was admitted"
        # `sequence` itself is always a candidate: an immune one has all its blocks and never asks.
        most = self._policy.options.max_displacements
        candidates = [
            runner
            for runner in table.running
            if runner.tier >= sequence.tier and runner.times_displaced < most
        ]
        return self._policy_victim(candidates), f"evict {self._policy.evict.name}"

    def _policy_victim(self, candidates: list[Sequence]) -> Sequence:
        """The policy's choice, by what tenants had. It is one of the lowest tier."""
        tier = max([candidate.tier for candidate in candidates])
        return self._policy.evict.victim(candidates, self._table.standings.of_tier(tier))

    def _waits_for_memory(self, sequence: Sequence) -> bool:
        """Pauses a sequence that must give way, where memory comes free sooner than its KV could return."""
        table = self._table
        free_in_s = memory_free_in_s(
            [runner for runner in table.running if runner is not sequence], table.kv_costs
        )
        has_host_room = table.pool.num_host_free >= len(sequence.block_table)
        if not table.kv_costs.pauses(sequence.computed_tokens, free_in_s, has_host_room=has_host_room):
            return False
        self._ungrant(sequence)
        table.pause(sequence, self._now_s)
        self.plan.paused.append(sequence)
        table.decisions.note(self._now_s, "pause", sequence, "memory comes free soon", (), ())
        return True

    def _yields(self, paused: Sequence, sequence: Sequence) -> bool:
        """Whether `paused` yields; one without a lease does to any other tenant, as top-ups may be slow."""
        return (
            paused.tier > sequence.tier
            or (not paused.may_emit and paused.tenant_id != sequence.tenant_id)
            or self._now_s - paused.paused_since_s >= self._policy.options.paused_keep_s
        )

    # ------------------------------------------------------------ paused sequences

    def _cap_paused(self) -> None:
        """A tenant's paused sequences hold at most a share of the pool: the longest paused are preempted."""
        table = self._table
        held: dict[str, int] = {}
        for paused in [each for each in reversed(table.paused.values()) if not each.is_ending]:
            held[paused.tenant_id] = held.get(paused.tenant_id, 0) + len(paused.block_table)
        for paused in list(table.paused.values()):
            if not paused.is_ending and held[paused.tenant_id] > table.max_paused_blocks:
                held[paused.tenant_id] -= len(paused.block_table)
                self._preempt(paused, "cap on a tenant's paused KV")

    def _resume(self, *, is_last: bool = False) -> list[Sequence]:
        """Resumes paused sequences that may emit, while places are free."""
        table = self._table
        # One with a token in flight comes back when it is known: what it computes next begins with it.
        back = [
            sequence
            for sequence in table.paused.values()
            if sequence.may_emit and not sequence.in_flight_tokens
        ]
        if not back:
            return []
        head = self._peek() if self._order.order_interrupts and not is_last else None
        batch: Batch | None = None
        resumed: list[Sequence] = []
        for sequence in sorted(back, key=lambda candidate: candidate.tier):
            if sequence in self._placed or (is_last and sequence in self.plan.paused):
                continue
            if head is not None and self._order.outranks(head, sequence.entry(), self._now_s):
                continue
            if not table.is_within_brake(sequence):
                continue
            if sequence.is_suspended:
                batch = batch or self._batch()
                if self._policy.admit.joins(sequence, batch) is not None:
                    continue
            if is_last and len(table.running) >= table.max_sequences:
                break
            displaced = self._take_place(sequence)
            if displaced is None:
                continue
            table.resume(sequence)
            self._placed.add(sequence)
            resumed.append(sequence)
            batch = None
            table.decisions.note(self._now_s, "resume", sequence, "a place is free", (), displaced)
        return resumed

    # ------------------------------------------------------------ places

    def _take_place(self, sequence: Sequence) -> list[Sequence] | None:
        """Makes a place among the running ones; returns the displaced sequence, if any. None: no place."""
        table = self._table
        if len(table.running) < table.max_sequences:
            return []
        found = replaceable(table, sequence, self._placed, self._now_s)
        if not found:
            return None
        below, rule = found
        if rule != "order":
            displaced = self._policy_victim(below)
            if rule == "share":
                set_back(displaced)
        else:
            displaced = max(below, key=lambda candidate: self._order.rank(candidate.entry(), self._now_s))
            rule = f"order {self._order.order_name}"
        self._ungrant(displaced)
        table.pause(displaced, self._now_s)
        self.plan.paused.append(displaced)
        table.decisions.note(self._now_s, "pause", displaced, f"place lost by {rule}", (), [sequence])
        return [displaced]

    # ------------------------------------------------------------ admissions

    def _admit(self, *, above: int | None = None) -> None:
        """Admits in order until the budget is spent or the next one does not fit; with `above`, only
        tiers above that one. Admits none in a step in which a sequence was preempted for a runner."""
        table, plan, order = self._table, self.plan, self._order
        if not len(order) or self._is_short:
            return
        batch = self._batch()
        while plan.room.tokens > 0:
            entry = self._peek()
            if entry is None or (above is not None and entry.tier >= above):
                return
            sequence = table.sequences[entry.entry_id]
            if not table.is_within_brake(sequence):
                self._braked.add(entry.tier)
                continue
            rank = order.rank(entry, self._now_s)
            plan.hold = self._policy.admit.joins(sequence, batch)
            suspended: list[Sequence] = []
            if plan.hold is not None:
                suspended = self._policy.admit.suspends(sequence, batch)
                if not suspended:
                    return
                self._suspend(suspended, sequence)
                batch = self._batch()
                plan.hold = self._policy.admit.joins(sequence, batch)
                if plan.hold is not None:
                    return
            if len(table.running) == table.max_sequences and not replaceable(
                table, sequence, self._placed, self._now_s
            ):
                return
            match = table.find_prefix(sequence)
            # Another sequence computes the same prefix: this one takes its place, and adopts the blocks next
            # step.
            follows = (
                sequence.swapped is None
                and not sequence.host_kv_tokens
                and table.pool.defer(sequence.cursor, sequence.token_ids, match.tokens, match)
            )
            sequence.computed_tokens = self._tokens_at_start(sequence, match)
            tokens = self._policy.compose.first_chunk(sequence, plan.room)
            sequence.computed_tokens = 0
            if tokens == 0 and entry.tier in plan.room.tier_tokens:
                self._braked.add(entry.tier)
                continue
            if tokens == 0 or not self._room_to_start(batch, sequence, match):
                return
            displaced = self._take_place(sequence)
            assert displaced is not None
            if displaced:
                batch.memo.clear()
            # Charges the whole prompt before the next one is chosen: charged a step late, or chunk by chunk,
            # its tenant would be admitted too often.
            self._start(sequence, batch, match)
            if not follows and not self._policy.compose.prompts_last:
                self._grant(sequence, min(tokens, sequence.total_tokens - sequence.computed_tokens))
            plan.admitted.append(sequence)
            self._placed.add(sequence)
            table.decisions.note(
                self._now_s,
                "admit",
                sequence,
                f"order {order.order_name}, admit {self._policy.admit.name}",
                rank,
                displaced + suspended,
            )

    def _peek(self) -> QueueEntry | None:
        """The next that waits, of the tiers that may have another place."""
        if not self._braked:
            return self._order.peek(self._now_s)
        return self._order.peek(self._now_s, set(self._order.waiting_tiers()) - self._braked)

    def _suspend(self, suspended: Iterable[Sequence], sequence: Sequence) -> None:
        for runner in suspended:
            self._ungrant(runner)
            self._table.pause(runner, self._now_s)
            runner.is_suspended = True
            self.plan.paused.append(runner)
            rule = f"admit {self._policy.admit.name}"
            self._table.decisions.note(self._now_s, "suspend", runner, rule, (), [sequence])

    def _tokens_at_start(self, sequence: Sequence, match: Match) -> int:
        if sequence.swapped is not None:
            return sequence.swapped.tokens
        return sequence.host_kv_tokens or match.tokens

    def _start(self, sequence: Sequence, batch: Batch, match: Match) -> None:
        table = self._table
        if not match.is_current:
            match = table.find_prefix(sequence)
        table.start(sequence, self._blocks_at_start(sequence), match)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = self._now_s
        self._policy.admit.admitted(sequence, batch)
        batch.free_blocks = table.pool.num_free
        batch.most_promised_blocks = table.most_promised_blocks
        batch.num_waiting = len(self._order)
        batch.admitted_now += 1

    def _batch(self) -> Batch:
        table = self._table
        return Batch(
            now_s=self._now_s,
            running=table.running,
            num_waiting=len(self._order),
            max_sequences=table.max_sequences,
            block_tokens=table.block_tokens,
            num_blocks=table.pool.num_blocks,
            free_blocks=table.pool.num_free,
            kept_blocks=table.watermark_blocks,
            most_promised_blocks=table.most_promised_blocks,
            step_time=table.step_time,
            admitted_now=len(self.plan.admitted),
            waiting=self._order.entries,
        )

    def _room_to_start(self, batch: Batch, sequence: Sequence, match: Match) -> bool:
        """Whether `sequence` fits, with memory of paused ones and lower tiers only if that is enough."""
        table = self._table
        start = self._blocks_at_start(sequence)
        # Beyond its own blocks: what it and the running ones are still promised. With nothing running there
        # is no reserve: paused sequences may wait for their tenants' budgets.
        beyond = 0
        if table.running:
            wanted = self._policy.admit.blocks_wanted(sequence, batch)
            beyond = max(0, wanted - start) + table.watermark_blocks
        if table.pool.shortage(match, start) + beyond <= 0:
            return True
        beyond -= self._coming_blocks
        victims = self._victims_for(sequence, match, start, beyond)
        if victims is None:
            return False
        for victim in victims:
            if victim.state is SequenceStatus.RUNNING:
                victim.times_displaced += 1
            self._preempt(victim, "memory for a higher tier", sequence)
        batch.memo.clear()
        # Memory that steps in flight still use is free in the next step.
        return not table.pool.has_fence

    def _victims_for(
        self, sequence: Sequence, match: Match, start: int, beyond: int
    ) -> list[Sequence] | None:
        """Paused and lower sequences whose memory is enough for `sequence`; None: not enough."""
        table = self._table
        victims: list[Sequence] = []

        def short() -> int:
            yielded = [victim.block_table for victim in victims]
            return table.pool.shortage(match, start, yielded) + beyond

        if short() <= 0:
            return victims
        for paused in table.paused.values():
            if not paused.is_ending and (not table.running or self._yields(paused, sequence)):
                victims.append(paused)
                if short() <= 0:
                    return victims
        below = [
            runner
            for runner in runners_below(table, sequence)
            if runner.times_displaced < self._policy.options.max_displacements
        ]
        while below:
            victim = self._policy_victim(below)
            below.remove(victim)
            victims.append(victim)
            if short() <= 0:
                return victims
        return None

    def _blocks_at_start(self, sequence: Sequence) -> int:
        is_immune = sequence.times_displaced >= self._policy.options.max_displacements
        tokens = sequence.most_tokens if is_immune else sequence.total_tokens
        return blocks_for(max(tokens, sequence.total_tokens), self._table.block_tokens)

    # ------------------------------------------------------------ granting and taking

    def _grant(self, sequence: Sequence, tokens: int) -> None:
        self.plan.room.take(sequence, tokens)
        if sequence.computed_tokens < sequence.prompt_tokens:
            self._table.pool.announce(sequence.cursor, sequence.token_ids, sequence.computed_tokens, tokens)

    def _ungrant(self, sequence: Sequence) -> None:
        self.plan.room.give_back(sequence)
        self._table.pool.retract(sequence.cursor)

    def _preempt(self, sequence: Sequence, rule: str, by: Sequence | None = None) -> None:
        self._ungrant(sequence)
        self.plan.preempted.append(sequence)
        self._policy.admit.preempted()
        kind = self._table.preempt(sequence)
        others = [] if by is None or by is sequence else [by]
        self._table.decisions.note(self._now_s, kind, sequence, rule, (), others)


def schedule(table: SequenceTable, now_s: float) -> Plan:
    """Hands out the next step's tokens, charges them, and takes their blocks."""
    table.decisions.step += 1
    plan = Scheduler(table, now_s).run()
    plan.copies = table.pool.close_step()
    table.wait_until_s = plan.hold.until_s if plan.hold is not None and not plan.shares else None
    return plan
