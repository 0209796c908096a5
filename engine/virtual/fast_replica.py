"""Virtual replica for hours of traffic, simulated in seconds.

The scheduler, the policies and the KV bookkeeping of a real engine; of the rest of its core only what affects
decisions: no text, no deltas, no device-time accounts. Two ways to advance time:

- `step` is one iteration, as `EngineCore.step` (without the fence: nothing is written to blocks);
- a *run* takes several steps in which no sequence joins or leaves together: it advances counters, block
  tables and the clock by that many. `steps_alike` returns how many are certain, `begin_run` computes when
  each of them ends, and `end_run` applies them, or only the first ones, if something arrives meanwhile.

The plain loop is the twin of the runs: both give the same instants, orders and counters
(`tests/property/test_simulate_runs.py`), and both those of `EngineCore`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from engine.core.core import EngineConfig, EngineCore
from engine.core.plan import Plan
from engine.core.scheduler import schedule
from engine.messages import EngineKnobs, StepTime, Submit, TenantService
from engine.scheduling.admit.base import Defer
from engine.scheduling.admit.batch_gate import RUNS
from engine.scheduling.compose.auto_slots import RENEWED_EVERY
from engine.scheduling.step_counters import TierTenant
from engine.sequence import Sequence, SequenceStatus
from engine.sizes import DECODE_TOKENS, blocks_for
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualTexts
from engine.virtual.step_shapes import Shapes, StepShape, StepTiming

LONGEST_RUN = 4096
"""Steps; the computed rest of a run that is cut short is wasted."""
SHORTEST_RUN = 2

MEMORY_ADMITS = frozenset({"predicted-reserve", "prompt-only"})
"""Admit choices whose demand only grows while no sequence joins or leaves: what did not fit will not fit."""
FULL_ADMITS = MEMORY_ADMITS | {"peak"}
"""Admit choices without a condition of their own: they are not asked when there is no place."""
GATED_ADMITS = frozenset({"static", "dynamic", "table"})
"""Admit choices whose batch runs to completion."""


@dataclass(slots=True)
class StepsTaken:
    first: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    wait_until_s: float | None = None
    """End of a deliberate wait of the policy, unless something arrives; nothing was computed."""
    num_tokens: int = 0
    service: Mapping[str, TenantService] | None = None
    lifts: Mapping[TierTenant, int] = field(default_factory=dict)
    """See `TenantShare.lifts`."""


@dataclass(slots=True)
class Work:
    steps: int = 0
    runs: int = 0
    steps_in_runs: int = 0
    busy_s: float = 0.0
    computed_tokens: int = 0
    """Prompt and output tokens, recomputation included."""
    kv_block_seconds: float = 0.0
    """Blocks held by running and paused sequences, integrated over the time of the steps."""
    most_kv_blocks: int = 0


@dataclass(slots=True)
class _Run:
    """A run that was begun and not ended."""

    shape: StepShape
    ends_s: list[float]
    charges: dict[str, int]
    """What a step gives every tenant that runs, scaled and per weight."""


class SimulatedReplica:
    """One engine on its own clock. One owner, which advances the clock by its events."""

    def __init__(
        self,
        config: EngineConfig,
        timing: StepTiming,
        shapes: Shapes,
        *,
        num_blocks: int,
        block_tokens: int,
        context_tokens: int,
        step_time: StepTime,
    ) -> None:
        """`step_time`: durations as the scheduler predicts them; `timing`: the actual ones."""
        self.clock = VirtualClock()
        self.runner = VirtualRunner(
            self.clock,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            step_time=step_time,
        )
        self.core = EngineCore(self.runner, VirtualTexts(), config, self.clock)
        self.table = self.core.table
        self.table.step_time = step_time
        self.table.mean_step_time = lambda: step_time
        self.now_s = 0.0
        self.work = Work()
        self.shapes = shapes
        self._timing = timing
        self._ends: dict[Sequence, int] = {}
        """Tokens, prompt and output, at which each sequence is complete."""
        self._looks: dict[Sequence, int] = {}
        """Sequences whose leases end before their answers -> emitted tokens at which their owner looks."""
        self._run: _Run | None = None
        self._settled: Defer | bool = False
        """The last step had decodes only and changed nothing, and nothing arrived since: the waiting ones
        were not admitted, and the hold has the reason if an admit choice held them back."""

    # ------------------------------------------------------------ commands

    def submit(self, submit: Submit, output_tokens: int) -> None:
        """Takes a sequence that fits, with an answer of `output_tokens` tokens. No run may be in progress."""
        assert self._run is None, "a run is under way"
        sequence = Sequence.of(submit, "simulated", self.now_s)
        self.table.add(sequence)
        self.table.hear(submit)
        self._ends[sequence] = sequence.prompt_tokens + output_tokens
        if submit.lease_tokens < output_tokens:
            self._looks[sequence] = 1
        self._settled = False

    def top_up(self, sequence_id: str, lease_tokens: int, look_at_tokens: int) -> None:
        """Raises a sequence's lease; its owner looks again at `look_at_tokens` emitted tokens."""
        sequence = self.table.sequences[sequence_id]
        self.table.top_up(sequence, lease_tokens)
        if sequence.prompt_tokens + sequence.lease_tokens >= self._ends[sequence]:
            self._looks.pop(sequence, None)
        else:
            self._looks[sequence] = min(look_at_tokens, sequence.lease_tokens)
        self._settled = False

    def cut(self, sequence_id: str, output_tokens: int) -> Sequence | None:
        """The answer of a sequence ends with its lease of `output_tokens`. Returns it where that is now."""
        sequence = self.table.sequences[sequence_id]
        self._looks.pop(sequence, None)
        self._ends[sequence] = sequence.prompt_tokens + output_tokens
        if len(sequence.token_ids) < self._ends[sequence]:
            return None
        self.table.decisions.leaves(sequence)
        self.table.finish(sequence)
        del self._ends[sequence]
        self._settled = False
        return sequence

    def to_look_at(self) -> list[tuple[Sequence, int]]:
        """Sequences that have emitted as many tokens as their owner wanted to look at them at, with those."""
        due = []
        for sequence, look_at in self._looks.items():
            emitted = len(sequence.token_ids) - sequence.prompt_tokens
            if emitted >= look_at:
                due.append((sequence, emitted))
        return due

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """As `EngineCore.set_knobs`. No run may be in progress. Raises ValueError."""
        assert self._run is None, "a run is under way"
        self.core.set_knobs(knobs)
        # With other knobs what did not fit may fit.
        self._settled = False

    @property
    def has_work(self) -> bool:
        return self.table.has_runnable

    # ------------------------------------------------------------ single steps

    def step(self) -> StepsTaken:
        """One iteration; the clock moves to its end."""
        table, work = self.table, self.work
        for sequence in table.running:
            # As `EngineCore` does; `_raise_predictions` is the same for several steps.
            if len(sequence.token_ids) - sequence.prompt_tokens >= sequence.predicted_output_tokens:
                _raise_predictions(sequence, 1)
        plan = schedule(table, self.now_s)
        shares = plan.shares
        if not shares:
            self._settled = False
            return StepsTaken(wait_until_s=table.wait_until_s)
        shape = self.shapes.of(
            [
                (sequence.submit.sequence_id, sequence.computed_tokens, tokens)
                for sequence, tokens in shares.items()
            ]
        )
        self.shapes.note(shape, plan.num_tokens, 1)
        step_s = self._timing.step_s(shape)
        self.now_s += step_s
        happened = StepsTaken(num_tokens=plan.num_tokens)
        chosen: list[int | None] = []
        for sequence, tokens in shares.items():
            known = len(sequence.token_ids)
            if sequence.computed_tokens + tokens < known:
                chosen.append(None)
                continue
            chosen.append(1 << 31 | sequence.seed & 0x7FFF_FFFF)
            if known == sequence.prompt_tokens:
                sequence.first_token_s = self.now_s
                happened.first.append(sequence)
        table.commit(shares, chosen)
        table.settle(plan.room)
        happened.lifts = table.standings.take_raised()
        self._note_blocks(step_s)
        ends = self._ends
        for sequence in [member for member in shares if len(member.token_ids) == ends[member]]:
            table.decisions.leaves(sequence)
            table.finish(sequence)
            del ends[sequence]
            self._looks.pop(sequence, None)
            happened.finished.append(sequence)
        for sequence in [member for member in self._looks if member in shares and not member.may_emit]:
            table.pause(sequence, self.now_s)
        work.steps += 1
        work.busy_s += step_s
        work.computed_tokens += plan.num_tokens
        self._settled = self._is_settled(plan, happened)
        return happened

    def _is_settled(self, plan: Plan, happened: StepsTaken) -> Defer | bool:
        if (
            happened.finished
            or plan.admitted
            or plan.preempted
            or plan.paused
            or plan.room.prefills
            or plan.num_tokens != DECODE_TOKENS * len(self.table.running)
        ):
            return False
        return plan.hold or True

    # ------------------------------------------------------------ runs

    def steps_alike(self) -> int:
        """Next steps in which each running sequence decodes, and nothing else; 0: unknown, or too few."""
        table = self.table
        running, policy = table.running, table.policy
        if not running or table.prefills or table.paused or (len(table.waiting) and not self._waits_on()):
            return 0
        if table.brakes.shares:
            return 0
        ends = self._ends
        # The step in which a sequence ends is a single one.
        steps = min([ends[sequence] - len(sequence.token_ids) for sequence in running]) - 1
        for sequence, look_at in self._looks.items():
            if sequence.state is SequenceStatus.RUNNING:
                emitted = len(sequence.token_ids) - sequence.prompt_tokens
                # So is the one in which a lease ends.
                last = sequence.lease_tokens - 1
                steps = min(steps, (min(look_at, last) if look_at > emitted else last) - emitted)
        # So is the one that renews the slots.
        steps = min(steps, RENEWED_EVERY - 1 - table.decisions.step % RENEWED_EVERY)
        if steps < SHORTEST_RUN:
            return 0
        for sequence in running:
            if sequence.computed_tokens < sequence.prompt_tokens:
                return 0
        steps = self._with_blocks(min(steps, LONGEST_RUN))
        if steps and not policy.compose.floor_holds(running, table.room(self.now_s), steps):
            return 0
        return steps

    def begin_run(self, steps: int) -> list[float]:
        """Begins a run of the steps that `steps_alike` returned; returns their ends. `end_run` applies it."""
        shape = self.shapes.of(
            [(one.submit.sequence_id, one.computed_tokens, DECODE_TOKENS) for one in self.table.running]
        )
        durations_s = self._timing.decodes_s(shape, steps)
        ends_s = list(accumulate(durations_s, initial=self.now_s))[1:]
        charges: dict[str, int] = {}
        for sequence in self.table.running:
            tenant_id = sequence.submit.tenant_id
            charges[tenant_id] = charges.get(tenant_id, 0) + sequence.token_charge
        self._run = _Run(shape, ends_s, charges)
        return ends_s

    def steps_begun(self, now_s: float, *, at_now: bool) -> int:
        """Steps of the run that began before `now_s`, or with `at_now` exactly then; at least 1."""
        assert self._run is not None, "no run is under way"
        ends_s = self._run.ends_s
        # A step begins when the one before it ends.
        ended = bisect_right(ends_s, now_s) if at_now else bisect_left(ends_s, now_s)
        return min(len(ends_s), ended + 1)

    def steps_ended(self, now_s: float, *, at_now: bool) -> int:
        """Steps of the run that ended before `now_s`, or with `at_now` exactly then."""
        assert self._run is not None, "no run is under way"
        return bisect_right(self._run.ends_s, now_s) if at_now else bisect_left(self._run.ends_s, now_s)

    def service_of_run(self, steps: int) -> dict[str, int]:
        """What a number of steps of the run gives each tenant, scaled and per weight."""
        if self._run is None or not steps:
            return {}
        return {tenant_id: charge * steps for tenant_id, charge in self._run.charges.items()}

    @property
    def in_run(self) -> bool:
        return self._run is not None

    def end_run(self, steps: int | None = None) -> float:
        """Applies the first `steps` steps of the run (None: all), drops the rest. Returns when they end."""
        run = self._run
        assert run is not None, "no run is under way"
        self._run = None
        table, work, pool = self.table, self.work, self.table.pool
        count = len(run.ends_s) if steps is None else steps
        run_s = run.ends_s[count - 1] - self.now_s
        self.now_s = run.ends_s[count - 1]
        table.decisions.step += count
        for _ in range(count):
            table.policy.admit.stepped()
        blocks_before = pool.num_referenced
        block_tokens = table.block_tokens
        charges: dict[str, int] = {}
        beyond: dict[str, int] = {}
        for sequence in table.running:
            token_ids = sequence.token_ids
            if len(token_ids) - sequence.prompt_tokens + count > sequence.predicted_output_tokens:
                _raise_predictions(sequence, count)
            after = sequence.computed_tokens + count
            lacking = blocks_for(after, block_tokens) - len(sequence.block_table)
            if lacking > 0:
                pool.extend(sequence.block_table, lacking)
            sequence.computed_tokens = sequence.ever_computed_tokens = after
            token_ids += [_output_token(sequence)] * count
            if after // block_tokens != sequence.cursor.blocks:
                pool.publish(sequence.block_table, sequence.cursor, token_ids, after)
            tenant_id = sequence.submit.tenant_id
            charges[tenant_id] = charges.get(tenant_id, 0) + sequence.token_charge * count
            past = len(token_ids) - sequence.prompt_tokens - sequence.submit.predicted_output_tokens
            if past > 0:
                beyond[tenant_id] = beyond.get(tenant_id, 0) + sequence.token_charge * min(count, past)
        num_emitted = len(table.running) * count
        table.charges.emitted(charges, num_emitted, beyond)
        self.shapes.note(run.shape, DECODE_TOKENS * len(table.running), count)
        work.steps += count
        work.runs += 1
        work.steps_in_runs += count
        work.busy_s += run_s
        work.computed_tokens += DECODE_TOKENS * num_emitted
        work.kv_block_seconds += (blocks_before + pool.num_referenced) / 2 * run_s
        work.most_kv_blocks = max(work.most_kv_blocks, pool.num_referenced)
        return self.now_s

    def _waits_on(self) -> bool:
        """Whether the head of the queue stays waiting while no sequence joins or leaves."""
        table, settled = self.table, self._settled
        if settled is False or table.waiting.order_interrupts:
            return False
        head = table.waiting.peek(self.now_s)
        if head is None or max(table.running_by_tier) > head.tier:
            return False
        waiting = [table.sequences[entry.entry_id] for entry in table.waiting.entries()]
        if any(sequence.submit.is_owed for sequence in waiting):
            # It takes the place of a tenant that has had more, and counters change with every token.
            return False
        admit = table.policy.admit.name
        if len(table.running) == table.max_sequences and admit in FULL_ADMITS:
            # There is no place, whichever sequence is first.
            return True
        if len(table.waiting) > 1 and table.policy.order != "fcfs":
            # With other counters another sequence may come first, and may fit.
            return False
        return admit in GATED_ADMITS if settled is RUNS else admit in MEMORY_ADMITS

    def _with_blocks(self, steps: int) -> int:
        """Number of steps, up to `steps`, for which there are blocks."""
        block_tokens, free = self.table.block_tokens, self.table.pool.num_free
        room = [
            len(sequence.block_table) * block_tokens - sequence.computed_tokens
            for sequence in self.table.running
        ]

        def fits(count: int) -> bool:
            return sum([-((left - count) // block_tokens) for left in room if left < count]) <= free

        if fits(steps):
            return steps
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low if low >= SHORTEST_RUN else 0

    def _note_blocks(self, step_s: float) -> None:
        blocks = self.table.pool.num_referenced
        self.work.kv_block_seconds += blocks * step_s
        self.work.most_kv_blocks = max(self.work.most_kv_blocks, blocks)


def _raise_predictions(sequence: Sequence, steps: int) -> None:
    """Raises predictions as `EngineCore` does before each of the next `steps` steps, all of which emit."""
    emitted = len(sequence.token_ids) - sequence.prompt_tokens
    last = emitted + steps - 1
    most, predicted = sequence.submit.max_tokens, sequence.predicted_output_tokens
    while predicted <= last:
        reached = max(emitted, predicted)
        predicted = min(reached + max(1, reached // 2), most)
        if reached >= most:
            break
    sequence.predicted_output_tokens = predicted


def _output_token(sequence: Sequence) -> int:
    """The one token of a sequence's output, unique to it; upper half of 32 bits, prompts use the lower."""
    return 1 << 31 | sequence.seed & 0x7FFF_FFFF
