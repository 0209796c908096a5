"""`StepPlanner`: plans vLLM's steps with the engine's own scheduler.

Every request of vLLM has its `Sequence` here, in a `SequenceTable` of the engine: so order, admission,
composition, places, victims, leases and counters are decided by the same code as in our own engine
(`engine/core/scheduler.py`). Time is passed in. What is different:

- Blocks are vLLM's (`borrowed_blocks.py`), and a sequence that is preempted is always recomputed.
- vLLM puts steps together ahead of the device: the tokens of steps under way count as emitted here, so that a
  lease is never exceeded. What they are is not known; sequences are counted in tokens, not in their text.
- One that has all its tokens, the last of them under way, is finished here; vLLM ends it when they come.
- A paused sequence keeps its place in vLLM's batch. When more sequences hold KV than there are places, the
  longest paused are preempted.
- A tenant is owed a place (`Submit.is_owed`) while it has fewer sequences running than its weight's part of a
  step's slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from engine.core.plan import Plan
from engine.core.scheduler import schedule
from engine.core.sequence_table import SequenceTable
from engine.core.step_service import ServiceTotals
from engine.messages import Submit
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import make_policy
from engine.scheduling.room import attended_tokens
from engine.sequence import Sequence, SequenceStatus
from engine.sizes import DECODE_TOKENS, blocks_for
from engine.step_time.model import StepTimeModel
from engine.vllm_plugin.borrowed_blocks import BorrowedBlocks
from engine.vllm_plugin.seam import StepService

WATERMARK_PERMILLE = 10
"""Share of the blocks that an admission leaves free, as in our engine."""
FIRST_LENGTH_TOKENS = 64
"""Predicted length of the first answers without a forecast; later the mean of those that ended."""
LENGTH_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True)
class Sizes:
    num_blocks: int
    block_tokens: int
    max_batched_tokens: int
    places: int
    context_tokens: int
    watermark_blocks: int = 0
    """Blocks that vLLM itself leaves free when it admits a sequence."""


@dataclass(frozen=True, slots=True)
class Given:
    """What vLLM gave a sequence in a step."""

    tokens: int
    cached_tokens: int
    """Tokens whose KV it had before the step, those of vLLM's prefix cache included."""
    emits: bool
    """The slice reaches the last known token, so that the step emits one."""


@dataclass(slots=True)
class _UnderWay:
    at_s: float
    tokens: int
    context_tokens: int
    sequences: int


class StepPlanner:
    def __init__(self, sizes: Sizes, policy: str, options: PolicyOptions) -> None:
        """`options.slots`: decodes of a step; 0: all. Raises ValueError if the policy is unknown or unfit."""
        self.sizes = sizes
        self.options = options
        watermark = max(sizes.num_blocks * WATERMARK_PERMILLE // 1000, sizes.watermark_blocks)
        self.table = SequenceTable(
            make_policy(policy, self._checked(policy, options)),
            BorrowedBlocks(sizes.num_blocks, sizes.block_tokens),
            ServiceCounters(),
            max_batched_tokens=sizes.max_batched_tokens,
            max_sequences=sizes.places,
            watermark_blocks=watermark,
            context_tokens=sizes.context_tokens,
        )
        self.step_time = StepTimeModel()
        self.table.mean_step_time = self.step_time.mean
        self._service = ServiceTotals()
        self._under_way: list[_UnderWay] = []
        self._last_done_s = 0.0
        self._mean_length = float(FIRST_LENGTH_TOKENS)

    @property
    def blocks(self) -> BorrowedBlocks:
        pool = self.table.pool
        assert isinstance(pool, BorrowedBlocks)
        return pool

    @property
    def step(self) -> int:
        return self.table.decisions.step

    def sequence_of(
        self, submit: Submit, gateway_id: str, prompt_tokens: int, max_tokens: int, now_s: float
    ) -> Sequence:
        """A sequence that does not wait yet. Without a forecast its length is that of a mean answer."""
        predicted = submit.predicted_output_tokens or round(self._mean_length)
        submit = replace(
            submit,
            max_tokens=max(1, min(max_tokens, self.sizes.context_tokens - prompt_tokens)),
            predicted_output_tokens=max(1, predicted),
        )
        sequence = Sequence.of(submit, gateway_id, now_s)
        # Their number is all that is looked at.
        sequence.token_ids = [0] * prompt_tokens
        sequence.prompt_tokens = prompt_tokens
        return sequence

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence wait for its turn, or for a lease where it has none yet."""
        if not sequence.may_emit:
            sequence.state = SequenceStatus.PREEMPTED
        self.table.add(sequence)
        self.table.hear(sequence.submit)

    def evicted(self, sequence: Sequence) -> None:
        """vLLM took a sequence's KV on its own; it returns to the head of its line."""
        if sequence.state in (SequenceStatus.RUNNING, SequenceStatus.PAUSED):
            sequence.times_displaced += sequence.state is SequenceStatus.RUNNING
            self.table.preempt(sequence)

    def take_back(self, sequence: Sequence, total_tokens: int) -> None:
        """Of an evicted sequence: what was under way beyond `total_tokens` is lost, and is emitted again."""
        table = self.table
        if len(sequence.token_ids) <= total_tokens:
            return
        del sequence.token_ids[total_tokens:]
        if not self.has(sequence):
            # It had all its tokens, the last of them under way.
            sequence.state = SequenceStatus.PREEMPTED
            table.add(sequence)
        table.top_up(sequence, sequence.lease_tokens)

    def finish(self, sequence: Sequence, *, is_whole: bool) -> None:
        """Removes a sequence; `is_whole`: its answer came to its own end, and its length is learned from."""
        if is_whole:
            self._mean_length += LENGTH_SMOOTHING * (sequence.emitted_tokens - self._mean_length)
        if self.has(sequence):
            self.table.decisions.leaves(sequence)
            self.table.finish(sequence)

    def has(self, sequence: Sequence) -> bool:
        """Whether it is in the table: a missing one has all its tokens, or its grammar is not ready."""
        return self.table.sequences.get(sequence.sequence_id) is sequence

    def rest(self, sequence: Sequence, now_s: float) -> None:
        """Gives a sequence no further token: it is about to be ended."""
        sequence.lease_tokens = min(sequence.lease_tokens, sequence.emitted_tokens)
        if sequence.state is SequenceStatus.RUNNING:
            self.table.pause(sequence, now_s)
        elif sequence.state is SequenceStatus.WAITING:
            self.finish(sequence, is_whole=False)

    def set_policy(self, name: str, options: PolicyOptions | None = None) -> None:
        """Applies a policy from the next step on; `options` None: those in force. Raises ValueError."""
        options = self.options if options is None else options
        self.table.set_policy(make_policy(name, self._checked(name, options)))
        self.options = options

    def plan(self, free_blocks: int, now_s: float) -> Plan:
        """Puts the next step together; `free_blocks`: those that vLLM can hand out."""
        table = self.table
        table.raise_predictions()
        self._begin_step(free_blocks)
        self._look_whether_owed(now_s)
        plan = schedule(table, now_s)
        self._keep_to_places(plan, now_s)
        return plan

    def commit(self, plan: Plan, given: Mapping[Sequence, Given], now_s: float) -> StepService:
        """Notes what vLLM gave: every token counts for its tenant from here on."""
        table = self.table
        for sequence, got in given.items():
            cached = got.cached_tokens - sequence.computed_tokens
            if cached > 0:
                self.blocks.found(sequence.cursor, cached)
                table.adopt(sequence)
        tokens = {sequence: got.tokens for sequence, got in given.items()}
        context = sum(
            [attended_tokens(sequence.computed_tokens, count) for sequence, count in tokens.items()]
        )
        first_times = table.commit(tokens, [0 if got.emits else None for got in given.values()])
        table.settle(plan.room)
        served: dict[tuple[str, str], list[int]] = {}
        for (sequence, got), first_time in zip(given.items(), first_times, strict=True):
            service = served.get(sequence.owner)
            if service is None:
                service = served[sequence.owner] = [0, 0, 0, 0]
            service[0] += first_time
            service[1] += got.emits
            service[2] += got.tokens
            service[3] += got.tokens == DECODE_TOKENS and not first_time
            if got.emits and not sequence.may_emit:
                self._rest(sequence, now_s)
        if given:
            self._under_way.append(_UnderWay(now_s, sum(tokens.values()), context, len(given)))
        return StepService(
            step=self.step,
            shares=self._service.note(served, table.standings),
            num_sequences=len(given),
            num_tokens=sum(tokens.values()),
            num_evicted=len(plan.preempted),
        )

    def came_back(self, now_s: float) -> None:
        """The oldest step under way is done: its time is learned."""
        if not self._under_way:
            return
        step = self._under_way.pop(0)
        # The device began it when it was handed over, or when it was done with the one before.
        took_s = now_s - max(step.at_s, self._last_done_s)
        self.step_time.observe(step.tokens, step.context_tokens, step.sequences, took_s)
        self.table.step_time = self.step_time.to_message()
        self._last_done_s = now_s

    def _rest(self, sequence: Sequence, now_s: float) -> None:
        if sequence.emitted_tokens >= sequence.submit.max_tokens:
            self.finish(sequence, is_whole=False)
        else:
            self.table.pause(sequence, now_s)

    def _checked(self, policy: str, options: PolicyOptions) -> PolicyOptions:
        serves_all = make_policy(policy, options).compose.serves_all
        if serves_all and DECODE_TOKENS * self.sizes.places > self.sizes.max_batched_tokens:
            raise ValueError(
                f"the policy {policy} gives every running sequence a token of each step: --max-num-seqs"
                f" ({self.sizes.places}) must not exceed --max-num-batched-tokens"
                f" ({self.sizes.max_batched_tokens})"
            )
        return options

    def _begin_step(self, free_blocks: int) -> None:
        """Tables here are as long as the whole prompt needs; vLLM allocates chunk by chunk."""
        table, block_tokens = self.table, self.sizes.block_tokens
        holders = [*table.running, *table.paused.values()]
        promised = sum(
            [
                missing
                for holder in holders
                if (missing := len(holder.block_table) - blocks_for(holder.computed_tokens, block_tokens)) > 0
            ]
        )
        free_blocks -= promised
        if len(holders) == 1:
            # What runs alone fits: vLLM refuses a model length that does not.
            free_blocks = max(free_blocks, self.sizes.num_blocks - len(holders[0].block_table))
        self.blocks.begin_step(free_blocks)

    def _look_whether_owed(self, now_s: float) -> None:
        table = self.table
        if not len(table.waiting) or len(table.running) < table.max_sequences:
            return
        head = table.waiting.peek(now_s)
        if head is None:
            return
        sequence = table.sequences[head.entry_id]
        weights = {
            holder.tenant_id: holder.submit.weight
            for holder in table.running
            if holder.submit.tier == head.tier
        }
        weights[head.tenant_id] = head.weight
        seats = table.running_tenants.get((head.tier, head.tenant_id), 0)
        is_owed = seats * sum(weights.values()) < table.most_decodes * head.weight
        if sequence.submit.is_owed != is_owed:
            sequence.submit = replace(sequence.submit, is_owed=is_owed)

    def _keep_to_places(self, plan: Plan, now_s: float) -> None:
        table = self.table
        too_many = len(table.running) + len(table.paused) - self.sizes.places
        if too_many <= 0:
            return
        for sequence in list(table.paused.values())[:too_many]:
            table.preempt(sequence)
            table.decisions.note(now_s, "preempt", sequence, "no place left for paused KV", (), ())
            plan.preempted.append(sequence)
