"""`EngineCore`: turns submitted sequences into tokens, step by step.

No sockets, threads or tensors. Commands are plain methods, called between steps; `step` predicts, schedules,
prepares and launches a step, then collects the oldest one in flight, commits it and learns. With
`steps_ahead` 0 that is the same step; with 1 the device computes a step while the one before is sent to its
readers and the next is planned. What is planned counts the tokens in flight; ends that a token's id decides
are seen one step late, and cost a row of that step. Tenants' counters: `tenant_charges.py`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from engine.core.gpu_time import share_step
from engine.core.model_runner import DeviceLost, ModelRunner, OutOfDeviceMemory, Sampled
from engine.core.plan import Plan, prepare
from engine.core.scheduler import schedule
from engine.core.sequence_table import Launch, SequenceTable
from engine.core.step_budget import StepBudget
from engine.core.step_log import StepLog
from engine.core.step_service import ServiceShare, ServiceTotals
from engine.core.validation import refuse_state, refuse_submit
from engine.forecast.length.probe_gate import ProbeGate
from engine.forecast.length.samples import LengthSamples
from engine.grammar.compiler import Grammars
from engine.grammar.constraint import Constraint
from engine.kv.cache import KvCache
from engine.messages import (
    Delta,
    EngineKnobs,
    Explained,
    Refused,
    RunningSequence,
    SamplingParams,
    SequenceState,
    Snapshot,
    Submit,
    TenantService,
    TokenLogprob,
)
from engine.scheduling.brakes import Brakes
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.knobs import turned
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import DEFAULT_POLICY, make_policy
from engine.scheduling.room import attended_tokens
from engine.sequence import FINISHES, Sequence, SequenceStatus
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import StepTimeModel

logger = logging.getLogger(__name__)


class Text(Protocol):
    """Text of one answer, built token by token."""

    @property
    def stopped(self) -> str:
        """The stop string that was completed, and `push` has returned all text before it; empty: none."""
        ...

    def push(self, token_id: int) -> str:
        """Text that is safe to show now: never half a character, never the start of a stop string."""
        ...

    def flush(self) -> str:
        """Ends the answer; returns the text that was held back."""
        ...

    def logprob_text(self, token_id: int) -> str:
        """A single token's text, for a logprobs entry."""
        ...


class TextFactory(Protocol):
    """Opens the text of a new answer."""

    def open(self, prompt_token_ids: list[int], sampling: SamplingParams) -> Text: ...


class AnswerReader(Protocol):
    """Splits one answer into its parts: delta objects of OpenAI's chats, plain text as `content`."""

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]: ...


class AnswerReaders(Protocol):
    """Opens the reader of a new answer (`engine/answers/parser.py`)."""

    def open(self, submit: Submit) -> AnswerReader | None:
        """None: the answer is text alone."""
        ...

    def text(self, submit: Submit) -> Text:
        """The text that is read: as a `TextFactory` opens it, with the marks of parts."""
        ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and choices of an engine. Raises ValueError naming the field that makes no sense."""

    policy: str = DEFAULT_POLICY
    policy_options: PolicyOptions = field(default_factory=PolicyOptions)
    max_batched_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 4096
    watermark_permille: int = 10
    """Share of the block pool that an admission leaves free."""
    prefix_caching: bool = True
    max_tokens_per_s: float = 0.0
    """Most tokens computed a second, prompts included: steps are stretched to keep it; 0: no limit."""
    steps_ahead: int | None = None
    """Steps launched before the results of the one before are known; None: what suits the device."""

    def __post_init__(self) -> None:
        serves_all = make_policy(self.policy, self.policy_options).compose.serves_all
        for name in ("max_batched_tokens", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if serves_all and self.max_sequences > self.max_batched_tokens:
            raise ValueError(
                f"max_sequences ({self.max_sequences}) must not exceed max_batched_tokens "
                f"({self.max_batched_tokens}): every running sequence needs a token of each step"
            )
        if not 0 <= self.watermark_permille <= 500:
            raise ValueError(f"watermark_permille must be between 0 and 500, not {self.watermark_permille}")
        if self.steps_ahead not in (None, 0, 1):
            raise ValueError(f"steps_ahead must be 0 or 1, not {self.steps_ahead}")


@dataclass(slots=True)
class StepResult:
    step: int
    duration_s: float = 0.0
    deltas: dict[str, list[Delta]] = field(default_factory=dict)
    """By gateway id; a sequence has at most one delta a step."""
    service: dict[str, TenantService] = field(default_factory=dict)
    shares: dict[str, ServiceShare] = field(default_factory=dict)
    """By tenant id: what is reported to gateways."""
    num_tokens: int = 0
    num_sequences: int = 0
    num_preempted: int = 0
    wait_until_s: float | None = None
    """End of a deliberate wait of the policy (engine's clock), unless something arrives before."""


@dataclass(slots=True)
class _Flight:
    """A launched step whose results are not collected yet."""

    step: int
    plan: Plan
    launch: Launch
    ticket: Any
    started_s: float
    num_tokens: int
    context: int
    masked: dict[Sequence, int]
    """Rows of those that choose a token by a grammar; empty as soon as they have chosen."""


@dataclass(slots=True)
class _Stream:
    """A sequence's text, and the content of its next delta."""

    text: Text
    reader: AnswerReader | None = None
    sent_characters: int = 0
    first_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    pending: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    foreseen_tokens: tuple[int, int] | None = None


class EngineCore:
    """Holds sequences from `submit` to the delta that carries their outcome."""

    def __init__(
        self,
        runner: ModelRunner,
        texts: TextFactory,
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        step_time: StepTimeModel | None = None,
        sleep: Callable[[float], None] = time.sleep,
        grammars: Grammars | None = None,
        readers: AnswerReaders | None = None,
    ) -> None:
        """`clock`: monotonic seconds; `step_time`: an earlier engine's; `sleep` keeps `max_tokens_per_s`;
        without `grammars` sequences that have one are refused; without `readers` answers are text alone."""
        self.config = config
        self.knobs = EngineKnobs()
        self.counters = ServiceCounters()
        self.step_time = step_time or StepTimeModel()
        self.step_time.pad_to(runner)
        self.lengths = ProbeGate()
        """Output lengths predicted from the model's state."""
        self.samples = LengthSamples()
        """States and the lengths that followed, where the runner reports them."""
        self.table = SequenceTable(
            make_policy(config.policy, config.policy_options),
            KvCache(
                runner.num_blocks,
                runner.block_tokens,
                num_host_blocks=runner.num_host_blocks,
                prefix_caching=config.prefix_caching,
            ),
            self.counters,
            max_batched_tokens=config.max_batched_tokens,
            max_sequences=config.max_sequences,
            watermark_blocks=runner.num_blocks * config.watermark_permille // 1000,
            context_tokens=runner.info.context_tokens,
            swap_block_s=runner.swap_block_s,
            swap_base_s=runner.swap_base_s,
        )
        self.table.mean_step_time = lambda: self.step_time.mean()
        self.step_log = StepLog()
        self.device_lost: DeviceLost | None = None
        """Set when the device was lost in a step: this core computes nothing more."""
        self._budget = StepBudget(config.max_batched_tokens)
        self._runner = runner
        if config.max_sequences > runner.num_rows:
            raise ValueError(f"the runner has {runner.num_rows} rows, for {config.max_sequences} sequences")
        self._steps_ahead = runner.steps_ahead if config.steps_ahead is None else config.steps_ahead
        self._in_flight: deque[_Flight] = deque()
        self._texts = texts
        self._clock = clock
        self._sleep = sleep
        self._eos = frozenset(runner.info.eos_token_ids)
        self._streams: dict[str, _Stream] = {}
        self._grammars = grammars
        self._readers = readers
        self._forced: dict[tuple[str, str], int] = {}
        """By tenant and gateway: output tokens of the step that count as computed input."""
        self._compiling: dict[str, Sequence] = {}
        """Sequences that wait for their grammars."""
        self._ended: dict[str, list[Delta]] = {}
        """Last deltas of sequences that ended between steps, by gateway."""
        self._step = 0
        self._steps_with_mixed_batch = 0
        self._step_us = 0
        self._batch_sum = 0
        self._service = ServiceTotals()
        self._busy_since_s: float | None = None
        """End of the last step, if work was left: the time until the next one counts as step time."""

    # ------------------------------------------------------------ commands, between steps

    @property
    def policy(self) -> str:
        return self.table.policy.name

    def submit(self, submit: Submit, gateway_id: str, unread_s: float = 0.0) -> Refused | None:
        """Takes a sequence, or returns why it can never run. `unread_s`: how long it lay unread at most."""
        refused = self._refuse(submit)
        if refused is None:
            sequence = Sequence.of(submit, gateway_id, self._clock())
            sequence.unread_s = unread_s
            self._open(sequence)
            self.table.hear(submit)
            self._end_failed(sequence)
        return refused

    def cancel(self, sequence_id: str, cause: str = "cancelled", message: str = "") -> bool:
        """Ends a sequence in any state; its outcome comes with the next step. False: not here."""
        sequence = self.table.sequences.get(sequence_id)
        if sequence is None:
            return False
        self._end_between_steps(sequence, cause if cause in FINISHES else "cancelled", message)
        return True

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None = None) -> bool:
        """Raises a lease; a sequence that had exhausted it goes on. False: not here."""
        sequence = self.table.sequences.get(sequence_id)
        if sequence is None:
            return False
        self.table.top_up(sequence, lease_tokens, lease_gpu_us)
        return True

    def explain(self, steps: int = 0) -> Explained:
        """The policy in force, the last decisions, and the tokens of the last `steps` steps."""
        policy = self.table.policy
        described = policy.describe()
        choices = {decision: described[decision] for decision in ("order", "admit", "compose", "evict")}
        decisions, options = self.table.decisions.last(), policy.options.changed()
        last, slots = self.step_log.last(steps), self.table.decode_slots()
        return Explained(policy.name, choices, decisions, options, last, slots)

    def set_policy(self, name: str, options: PolicyOptions | None = None) -> None:
        """Applies a policy from the next step on; `options` None: those in force. Raises ValueError."""
        kept = self.config.policy_options if options is None else options
        self.config = dataclasses.replace(self.config, policy=name, policy_options=kept)
        self.table.set_policy(turned(make_policy(name, kept), self.knobs, self.config.max_sequences))

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """Sets all knobs from the next step on, a step having at least `max_sequences` tokens; nothing is
        reset. Raises ValueError, before anything has changed, for a knob beyond its bounds."""
        table, config = self.table, self.config
        self.knobs, table.policy = knobs, turned(table.policy, knobs, config.max_sequences)
        most, least = config.max_batched_tokens, config.max_sequences
        self._budget.wanted = min(most, max(least, round(knobs.token_share * most)))
        table.max_batched_tokens = self._budget.tokens

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        """Bounds what tiers, by rank, may hold. Raises ValueError for a share outside (0, 1]."""
        self.table.brakes = Brakes(dict(shares))

    def export(self, sequence_id: str, *, with_kv: bool = True) -> SequenceState | None:
        """Removes a sequence and returns what another engine needs to go on with it. None: not here."""
        sequence = self.table.sequences.get(sequence_id)
        if sequence is None:
            return None
        # Its late token, if one is in flight, is chosen again where it goes on: the same one.
        self.table.drop_in_flight(sequence)
        state = SequenceState(
            submit=replace(
                sequence.submit,
                lease_tokens=sequence.lease_tokens,
                lease_gpu_us=sequence.lease_gpu_us,
                predicted_output_tokens=sequence.predicted_output_tokens,
            ),
            output_token_ids=sequence.token_ids[sequence.prompt_tokens :],
            text_sent=self._streams.pop(sequence_id).sent_characters,
            kv=self._kv_of(sequence) if with_kv else [],
            kv_tokens=sequence.ever_computed_tokens,
            cached_tokens=sequence.cached_tokens,
            gateway_id=sequence.gateway_id,
            gpu_us=sequence.gpu_us,
            recomputed_gpu_us=sequence.recomputed_gpu_us,
            forced_tokens=sequence.forced_tokens,
        )
        self.table.forget(sequence)
        self._compiling.pop(sequence_id, None)
        self.lengths.ended(sequence_id, sequence.tenant_id, None)
        self.samples.ended(sequence_id, None)
        return state

    def _kv_of(self, sequence: Sequence) -> list[bytes]:
        # In the middle of a recomputation the KV covers less than was computed and charged: left out.
        ever = sequence.ever_computed_tokens
        if sequence.host_kv:
            return sequence.host_kv
        if sequence.swapped is not None:
            is_whole = sequence.swapped.tokens == ever
            return self._runner.read_host_kv(sequence.swapped.blocks, ever) if is_whole else []
        return (
            self._runner.read_kv(sequence.block_table, ever) if sequence.computed_tokens == ever > 0 else []
        )

    def import_(self, state: SequenceState) -> Refused | None:
        """Takes an exported sequence, or what a gateway received of one; without KV it is recomputed,
        uncharged. `counter` is ignored as old."""
        refused = self._refuse(state.submit) or refuse_state(state, self._runner.info)
        if refused is not None:
            return refused
        sequence = Sequence.restored(state, self._clock())
        stream = self._open(sequence)
        texts = [stream.text.push(token_id) for token_id in state.output_token_ids]
        if stream.reader is None:
            stream.sent_characters = state.text_sent
            stream.pending = "".join(texts)[state.text_sent :]
        else:
            # Tokens and the parts that they complete are sent together.
            for text in texts:
                stream.reader.feed(text)
        stream.first_index = len(state.output_token_ids)
        self._end_failed(sequence)
        return None

    # ------------------------------------------------------------ the step

    def has_work(self) -> bool:
        """Whether `step` has tokens to compute or deltas to hand out."""
        return bool(self._ended or self._in_flight or self._compiling) or self.table.has_runnable

    def take_ended(self) -> list[Delta]:
        """The last deltas of sequences that ended since the last step; the next one has them no more."""
        ended, self._ended = self._ended, {}
        return [delta for deltas in ended.values() for delta in deltas]

    @property
    def steps_in_flight(self) -> int:
        """Steps that were launched and are not committed yet."""
        return len(self._in_flight)

    @property
    def wait_until_s(self) -> float | None:
        """End of a deliberate wait with work pending, by the engine's clock; None: no such wait."""
        return self.table.wait_until_s

    def step(self) -> StepResult:
        """Runs one iteration: launches a step, where there is work, and commits the oldest one in flight,
        unless it is to stay there. Without work the result is empty."""
        result = StepResult(step=self._step, deltas=self._ended)
        self._ended = {}
        if self._compiling:
            self._constrain_compiled(result)
        is_launched = self._launch(result)
        if is_launched and len(self._in_flight) == 1:
            self._choose(result)
        if self._in_flight and (not is_launched or len(self._in_flight) > self._steps_ahead):
            self._collect(result)
        elif not is_launched:
            self._busy_since_s = None
        if is_launched and self._in_flight:
            # The masks of a step need the tokens of the one before, and are made while it computes.
            self._choose(result)
        return result

    def _launch(self, result: StepResult) -> bool:
        """Plans a step and launches it. False: there was nothing to compute, or it failed."""
        started_s = self._clock()
        self.table.raise_predictions()
        plan = schedule(self.table, started_s)
        result.num_preempted = len(plan.preempted)
        result.wait_until_s = self.table.wait_until_s
        if not plan.shares:
            self._copy(plan, result)
            return False
        self._step += 1
        result.step = self._step
        if not self._copy(plan, result):
            self._fail(plan.shares, result)
            return False
        for sequence in [sequence for sequence in plan.shares if sequence.host_kv]:
            self._restore(sequence, plan, result)
        if not plan.shares:
            return False
        work = prepare(plan.shares)
        masked = {
            sequence: sequence.row
            for sequence, samples in zip(plan.shares, work.samples, strict=True)
            if samples and sequence.constraint is not None
        }
        work.awaits_masks = bool(masked)
        try:
            ticket = self._runner.launch(work)
        except Exception as error:
            # What is in flight is not concerned.
            self._drain(result)
            if isinstance(error, OutOfDeviceMemory) and self._shrink(plan, error):
                return False
            # The other sequences must go on; the details are for the log, not for a client.
            logger.exception("step %d failed with %d sequences", self._step, len(work))
            self._note_lost(error)
            self._fail(plan.shares, result)
            return False
        self._budget.computed()
        self.table.max_batched_tokens = self._budget.tokens
        self.table.pool.fence(self._step)
        context = sum(map(attended_tokens, work.positions, work.num_tokens))
        launch = self.table.launched(plan.shares)
        self.table.settle(plan.room)
        for sequence, samples in zip(plan.shares, work.samples, strict=True):
            sequence.is_chained = samples
            if samples and not sequence.may_emit:
                # Its lease is used up, or its last token is in flight.
                self.table.pause(sequence, started_s)
        self._in_flight.append(
            _Flight(self._step, plan, launch, ticket, started_s, sum(work.num_tokens), context, masked)
        )
        return True

    def _choose(self, result: StepResult) -> None:
        """Chooses the tokens of the step launched last, if its sequences have grammars: all masks at once."""
        flight = self._in_flight[-1]
        if not flight.masked or self._grammars is None:
            return
        rows, flight.masked = flight.masked, {}
        shares = flight.plan.shares
        counts = dict(zip(shares, flight.launch.still_counts(shares), strict=True))
        states = {
            row: sequence.constraint.state
            for sequence, row in rows.items()
            if counts[sequence] and sequence.constraint is not None
        }
        try:
            self._runner.choose(flight.ticket, self._grammars.masks(states))
        except Exception as error:
            logger.exception("step %d failed while its tokens were chosen", flight.step)
            self._note_lost(error)
            self._in_flight.pop()
            self._fail([sequence for sequence, still in counts.items() if still], result)
            self.table.pool.lift_fence(flight.step)

    def _drain(self, result: StepResult) -> None:
        """Commits what is in flight before a step that failed: one step at most."""
        if self._in_flight:
            self._collect(result)

    def _collect(self, result: StepResult) -> None:
        """Waits for the oldest step in flight and commits it."""
        flight = self._in_flight.popleft()
        launch, shares = flight.launch, flight.plan.shares
        num_sequences = len(shares)
        result.step = flight.step
        since_s = flight.started_s if self._busy_since_s is None else self._busy_since_s
        try:
            output = self._runner.collect(flight.ticket)
        except Exception as error:
            self._note_lost(error)
            logger.exception("step %d failed with %d sequences", flight.step, num_sequences)
            output = None
        counts = launch.still_counts(shares)
        late = {sequence for sequence, does_count in zip(shares, counts, strict=True) if not does_count}
        try:
            if output is None:
                self._fail([sequence for sequence in shares if sequence not in late], result)
            else:
                passed_s = self._clock() - max(flight.started_s, since_s)
                device_s = passed_s if output.device_s is None else output.device_s
                self._keep_ceiling(flight, since_s)
                parts = list(zip(shares, launch.positions, shares.values(), strict=True))
                share_step(parts, device_s, self.table.step_time, late)
                self._commit(flight, counts, output.sampled, result)
        finally:
            self.table.pool.lift_fence(flight.step)
        ended_s = self._clock()
        result.duration_s = ended_s - max(flight.started_s, since_s)
        self._step_us += round(result.duration_s * 1e6)
        self._batch_sum += num_sequences
        if output is not None:
            self.step_time.observe(flight.num_tokens, flight.context, num_sequences, ended_s - since_s)
            self.table.step_time = self.step_time.to_message()
        self._busy_since_s = ended_s if self._in_flight or self.table.has_runnable else None

    def _keep_ceiling(self, flight: _Flight, since_s: float) -> None:
        """Sleeps for as long as the step was faster than `max_tokens_per_s` allows."""
        ceiling = self.config.max_tokens_per_s
        if not ceiling:
            return
        due_s = since_s + flight.num_tokens / ceiling
        if (rest_s := due_s - self._clock()) > 0:
            self._sleep(rest_s)

    def _copy(self, plan: Plan, result: StepResult) -> bool:
        """Copies KV to host memory and back, before anything is computed; outbound copies first."""
        try:
            if plan.copies.out:
                self._runner.copy_out(plan.copies.out)
            if plan.copies.back:
                self._runner.copy_in(plan.copies.back)
        except Exception as error:
            logger.exception("step %d failed while KV was copied", self._step)
            self._note_lost(error)
            self._drain(result)
            self.table.lose_swapped(plan.copies)
            return False
        return True

    def _restore(self, sequence: Sequence, plan: Plan, result: StepResult) -> None:
        """Writes imported KV into the blocks just allocated; a sequence whose KV does not fit fails alone."""
        try:
            self._runner.write_kv(sequence.block_table, sequence.host_kv_tokens, sequence.host_kv)
        except Exception:
            logger.exception("the imported KV of sequence %s does not fit this model", sequence.sequence_id)
            del plan.shares[sequence]
            message = "the sequence's exported state does not fit this engine"
            self._end(sequence, "failed", message, result.deltas, self._clock())
            return
        sequence.host_kv = []
        sequence.host_kv_tokens = 0

    def _shrink(self, plan: Plan, error: OutOfDeviceMemory) -> bool:
        """Lowers the tokens of a step, which was not computed. False: fewer would leave a running sequence
        without its token."""
        least = len(self.table.running) if self.table.policy.compose.serves_all else 1
        if not self._budget.shrink(plan.num_tokens, least):
            return False
        self.table.max_batched_tokens = self._budget.tokens
        logger.warning(
            "step %d of %d tokens does not fit the device's memory (%s): a step has at most %d tokens now",
            self._step, plan.num_tokens, error, self._budget.tokens,
        )  # fmt: skip
        for sequence in plan.shares:
            # The runner may have a part of the step.
            sequence.start_row_anew()
        return True

    def _note_lost(self, error: Exception) -> None:
        if isinstance(error, DeviceLost):
            self.device_lost = error

    def _commit(
        self, flight: _Flight, counts: list[bool], sampled: list[Sampled | None], result: StepResult
    ) -> None:
        now_s = self._clock()
        plan, launch = flight.plan, flight.launch
        decodes = 0
        served: dict[tuple[str, str], list[int]] = {}
        self.table.collected(
            plan.shares, launch, [None if choice is None else choice.token_id for choice in sampled]
        )
        for (sequence, tokens), choice, first_time, does_count in zip(
            plan.shares.items(), sampled, launch.first_times, counts, strict=True
        ):
            result.num_tokens += tokens
            is_decode = tokens == DECODE_TOKENS
            decodes += is_decode
            if not does_count:
                continue
            service = served.get(sequence.owner)
            if service is None:
                service = served[sequence.owner] = [0, 0, 0, 0]
            service[0] += first_time
            service[2] += tokens
            service[3] += is_decode and not first_time
            if first_time:
                sequence.computed_chunk(now_s, first_time)
            if choice is not None:
                service[1] += 1
                self._emit(sequence, choice, result, now_s)
            elif sequence.is_out_of_time:
                self._rest(sequence, now_s)
                delta = _take_delta(sequence, self._streams[sequence.sequence_id])
                result.deltas.setdefault(sequence.gateway_id, []).append(delta)
        for owner, forced in self._forced.items():
            served[owner][0] += forced
        self._forced = {}
        result.shares = self._service.note(served, self.table.standings)
        result.service = {
            tenant_id: share.total for tenant_id, share in result.shares.items() if share.tokens
        }
        self.step_log.note(flight.step, now_s, plan, result.shares, self.table)
        result.num_sequences = len(plan.shares)
        self._steps_with_mixed_batch += 0 < decodes < len(plan.shares)

    def _rest(self, sequence: Sequence, now_s: float) -> None:
        if sequence.state is SequenceStatus.RUNNING:
            self.table.pause(sequence, now_s)

    def _emit(self, sequence: Sequence, choice: Sampled, result: StepResult, now_s: float) -> None:
        stream, constraint = self._streams[sequence.sequence_id], sequence.constraint
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        if constraint is not None:
            end = constraint.take(choice.token_id, sequence.known_tokens, sequence.submit.max_tokens)
            if end is not None:
                # After it there would be no room to close: the first token of the end takes its place.
                sequence.is_closed = True
                self.table.append(sequence, end[1:], computes=False)
                sequence.token_ids[-len(end)] = end[0]
                self._write(sequence, stream, end)
                self._end(sequence, "length", "", result.deltas, now_s)
                return
        stream.token_ids.append(choice.token_id)
        if sequence.submit.sampling.logprobs is not None:
            stream.logprobs.append(_logprob(stream.text, choice))
        if choice.state or choice.remaining_logits is not None:
            self._update_prediction(sequence, choice)
        is_over = self._push(sequence, stream, choice.token_id)
        if sequence.constraint is not None and not is_over:
            is_over = self._follow(sequence, stream)
        if message := _failure(sequence):
            self._end(sequence, "failed", message, result.deltas, now_s)
        elif is_over:
            self._end(sequence, "stop", "", result.deltas, now_s)
        elif sequence.known_tokens >= sequence.submit.max_tokens:
            sequence.is_closed = sequence.constraint is not None and sequence.constraint.close(0) == []
            self._end(sequence, "length", "", result.deltas, now_s)
        else:
            if not sequence.may_emit:
                self._rest(sequence, now_s)
            result.deltas.setdefault(sequence.gateway_id, []).append(_take_delta(sequence, stream))

    def _push(self, sequence: Sequence, stream: _Stream, token_id: int) -> bool:
        """Adds an emitted token to the text; whether the answer ends with it."""
        if token_id in self._eos and not (
            sequence.submit.sampling.ignore_eos and sequence.constraint is None
        ):
            return True
        stream.pending += stream.text.push(token_id)
        return bool(stream.text.stopped)

    def _write(self, sequence: Sequence, stream: _Stream, token_ids: list[int]) -> bool:
        """Emits tokens that no step chose; whether the answer ends with them."""
        stream.token_ids += token_ids
        if sequence.submit.sampling.logprobs is not None:
            # There was no choice: their probability is 1.
            stream.logprobs += [_logprob(stream.text, Sampled(token_id, 0.0)) for token_id in token_ids]
        is_over = False
        for token_id in token_ids:
            is_over = self._push(sequence, stream, token_id) or is_over
        return is_over

    def _follow(self, sequence: Sequence, stream: _Stream) -> bool:
        """Emits what must follow by the grammar, as far as the lease goes; whether the answer ends there."""
        assert sequence.constraint is not None
        most = sequence.submit.max_tokens
        token_ids = sequence.constraint.follow(sequence.known_tokens, sequence.most_emitted, most)
        if not token_ids:
            return False
        self.table.append(sequence, token_ids, computes=True)
        self._forced[sequence.owner] = self._forced.get(sequence.owner, 0) + len(token_ids)
        return self._write(sequence, stream, token_ids)

    def _update_prediction(self, sequence: Sequence, choice: Sampled) -> None:
        submit = sequence.submit
        if submit.sampling.ignore_eos:
            return
        generated = sequence.known_tokens - 1
        if choice.state:
            self.samples.note(sequence.sequence_id, generated, choice.state)
        if choice.remaining_logits is None:
            return
        predicted = self.lengths.read(
            sequence.sequence_id,
            submit.tenant_id,
            forecast=(submit.predicted_output_tokens, submit.predicted_high_tokens),
            generated=generated,
            max_tokens=submit.max_tokens,
            logits=choice.remaining_logits,
        )
        if predicted is not None:
            sequence.predicted_output_tokens = predicted.median_tokens
            sequence.predicted_high_tokens = predicted.high_tokens
            stream = self._streams[sequence.sequence_id]
            stream.foreseen_tokens = (predicted.median_tokens, predicted.high_tokens)

    def _fail(self, sequences: Iterable[Sequence], result: StepResult) -> None:
        now_s, message = self._clock(), "the engine failed while computing a step"
        # One that got a token of the step before has its delta: its outcome comes with the next step.
        sent = {delta.sequence_id for deltas in result.deltas.values() for delta in deltas}
        for sequence in [each for each in sequences if each.sequence_id in self._streams]:
            deltas = self._ended if sequence.sequence_id in sent else result.deltas
            self._end(sequence, "failed", message, deltas, now_s)

    # ------------------------------------------------------------ reports

    def running(self) -> list[RunningSequence]:
        """Every live sequence: running, paused and waiting."""
        return [sequence.summary() for sequence in self.table.sequences.values()]

    def snapshot(self, engine_id: str) -> Snapshot:
        pool = self.table.pool
        live = self.table.sequences.values()
        holds_kv = (SequenceStatus.RUNNING, SequenceStatus.PAUSED)
        return Snapshot(
            engine_id=engine_id,
            step=self._step,
            at_s=self._clock(),
            running=[sequence.summary() for sequence in live if sequence.state in holds_kv],
            waiting=[sequence.summary() for sequence in live if sequence.state not in holds_kv],
            free_blocks=pool.num_blank,
            cached_blocks=pool.num_cached,
            referenced_blocks=pool.num_referenced,
            num_blocks=pool.num_blocks,
            step_time=self.step_time.to_message(),
            service=dict(self._service.totals),
            preemptions=self.table.preemptions,
            steps_with_mixed_batch=self._steps_with_mixed_batch,
            step_us=self._step_us,
            batch_sum=self._batch_sum,
            recomputed_tokens=self.table.recomputed_tokens,
            mean_step_time=self.step_time.mean(),
            length_probe=self.lengths.describe(),
            decode_slots=self.table.most_decodes,
        )

    def check(self) -> None:
        """Self-audit of blocks, states and streams. Raises AssertionError."""
        self.table.check()
        assert self._streams.keys() == self.table.sequences.keys()

    def _refuse(self, submit: Submit) -> Refused | None:
        if submit.sequence_id in self.table.sequences:
            message = f"sequence {submit.sequence_id!r} exists already"
            return Refused(sequence_id=submit.sequence_id, code="duplicate_sequence", message=message)
        if len(self.table.waiting) >= self.config.max_waiting:
            message = f"{self.config.max_waiting} sequences wait already; try again later"
            return Refused(sequence_id=submit.sequence_id, code="engine_full", message=message)
        if submit.grammar is not None and self._grammars is None:
            message = "this engine has no tokenizer for grammars: leave the grammar out"
            return Refused(sequence_id=submit.sequence_id, code="no_grammars", message=message)
        return refuse_submit(submit, self._runner.info, self._runner.num_blocks * self._runner.block_tokens)

    def _open(self, sequence: Sequence) -> _Stream:
        submit = sequence.submit
        reader = None if self._readers is None else self._readers.open(submit)
        if reader is None or self._readers is None:
            stream = _Stream(self._texts.open(submit.prompt_token_ids, submit.sampling))
        else:
            stream = _Stream(self._readers.text(submit), reader)
        self._streams[sequence.sequence_id] = stream
        if submit.grammar is not None:
            if not self._constrain(sequence):
                sequence.awaits_grammar = True
                self._compiling[sequence.sequence_id] = sequence
            if not sequence.may_emit:
                # It rests until its grammar is compiled, and its lease covers a token beside the end.
                sequence.state = SequenceStatus.PREEMPTED
        self.table.add(sequence)
        return stream

    def _constrain(self, sequence: Sequence) -> bool:
        """Gives a sequence its grammar's state; False: it is not compiled yet."""
        submit = sequence.submit
        assert submit.grammar is not None
        assert self._grammars is not None
        state = self._grammars.open(submit.tenant_id, submit.grammar)
        if state is None:
            return False
        emitted = sequence.token_ids[sequence.prompt_tokens :]
        sequence.constraint = Constraint.of(submit, state, emitted, min(self._eos, default=0))
        sequence.kept_tokens = submit.grammar.kept_tokens if sequence.constraint.closes else 0
        sequence.awaits_grammar = False
        return True

    def _constrain_compiled(self, result: StepResult) -> None:
        """Lets sequences in whose grammars are compiled by now."""
        for sequence in list(self._compiling.values()):
            if self._constrain(sequence):
                del self._compiling[sequence.sequence_id]
                if message := _failure(sequence):
                    self._end(sequence, "failed", message, result.deltas, self._clock())
                else:
                    self.table.release(sequence)

    def _end(
        self,
        sequence: Sequence,
        finish: str,
        message: str,
        deltas: dict[str, list[Delta]],
        now_s: float,
    ) -> None:
        stream = self._streams.pop(sequence.sequence_id)
        self._compiling.pop(sequence.sequence_id, None)
        self.table.drop_in_flight(sequence)
        if finish in ("stop", "length", "budget") and not stream.text.stopped:
            stream.pending += stream.text.flush()
        self.table.decisions.leaves(sequence)
        whole = sequence.emitted_tokens if finish in ("stop", "length") else None
        self.lengths.ended(sequence.sequence_id, sequence.tenant_id, whole)
        self.samples.ended(sequence.sequence_id, whole)
        outcome = sequence.outcome(finish, message, now_s, stream.text.stopped)
        self.table.finish(sequence)
        delta = replace(_take_delta(sequence, stream, is_last=True), outcome=outcome)
        deltas.setdefault(sequence.gateway_id, []).append(delta)

    def _end_failed(self, sequence: Sequence) -> None:
        if message := _failure(sequence):
            self._end_between_steps(sequence, "failed", message)

    def _end_between_steps(self, sequence: Sequence, finish: str, message: str) -> None:
        if finish == "budget" and sequence.constraint is not None and sequence.known_tokens:
            most = min(sequence.lease_tokens, sequence.submit.max_tokens) - sequence.known_tokens
            end = sequence.constraint.close(most)
            if end is not None:
                sequence.is_closed = True
                self.table.append(sequence, end, computes=False)
                self._write(sequence, self._streams[sequence.sequence_id], end)
        self._end(sequence, finish, message, self._ended, self._clock())


def _failure(sequence: Sequence) -> str:
    """Why its grammar lets no token follow; empty: it does."""
    return "" if sequence.constraint is None else sequence.constraint.state.failed


def _logprob(text: Text, choice: Sampled) -> TokenLogprob:
    return TokenLogprob(
        token_id=choice.token_id,
        text=text.logprob_text(choice.token_id),
        logprob=choice.logprob if choice.logprob is not None else 0.0,
        top=[(token_id, text.logprob_text(token_id), logprob) for token_id, logprob in choice.top],
    )


def _take_delta(sequence: Sequence, stream: _Stream, *, is_last: bool = False) -> Delta:
    text, parts = stream.pending, []
    if stream.reader is not None:
        parts = stream.reader.feed(text) + (stream.reader.finish() if is_last else [])
        # Text before another part stays a part: they keep their order.
        text = parts.pop()["content"] if parts and "content" in parts[-1] else ""
    delta = Delta(
        sequence_id=sequence.sequence_id,
        first_index=stream.first_index,
        token_ids=stream.token_ids,
        text=text,
        parts=tuple(parts),
        logprobs=stream.logprobs,
        cached_tokens=sequence.cached_tokens,
        gpu_us=sequence.gpu_us,
        forced_tokens=sequence.forced_tokens,
        foreseen_tokens=stream.foreseen_tokens,
    )
    stream.first_index += len(stream.token_ids)
    stream.sent_characters += len(stream.pending)
    stream.token_ids = []
    stream.pending = ""
    stream.logprobs = []
    stream.foreseen_tokens = None
    return delta
