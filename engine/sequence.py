"""`Sequence`, its states and their transitions.

One rule covers prefill, chunked prefill, decode, recomputation and restored KV: a sequence knows `total`
tokens and has `computed` of them in the cache; every step hands out tokens so that computed catches up, and
when it has, the next token is sampled and total grows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.messages import Decision, DecodeShare, RunningSequence, SequenceOutcome, SequenceState, Submit
from engine.sizes import DECODE_TOKENS

if TYPE_CHECKING:
    from engine.grammar.constraint import Constraint
    from engine.kv.host import SwapOut
    from engine.kv.prefix import Match, PrefixCursor


class SequenceStatus(StrEnum):
    """State of a sequence."""

    WAITING = "waiting"
    """In the queue, holds no blocks."""
    RUNNING = "running"
    """Gets tokens every step."""
    PAUSED = "paused"
    """Keeps its KV and gets no tokens, until its lease is topped up and a place is free."""
    SWAPPED = "swapped"
    """Its KV lies in host memory."""
    PREEMPTED = "preempted"
    """Lost its KV; returns to the head of its queue, immediately or when its lease is topped up."""
    FINISHED = "finished"


MOVES: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset(
        {SequenceStatus.PAUSED, SequenceStatus.SWAPPED, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.PAUSED: frozenset(
        {SequenceStatus.RUNNING, SequenceStatus.SWAPPED, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.SWAPPED: frozenset(
        {SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}

MAX_CHUNKS = 16
"""Prefill steps that a sequence records one by one."""

FINISHES = frozenset({"stop", "length", "budget", "cancelled", "expired", "failed"})


class IllegalMove(Exception):
    """A bug: the state transition is not allowed."""


def stable_seed(submit: Submit) -> int:
    """The sampling seed, 63 bits, the same in any batch: from the request's seed and the choice's index, or
    from the sequence id where no seed was given."""
    if submit.sampling.seed is None:
        source = f"sequence {submit.sequence_id}"
    else:
        source = f"seed {submit.sampling.seed} choice {submit.index}"
    return int.from_bytes(blake2b(source.encode(), digest_size=8).digest(), "big") >> 1


KEPT_TENANTS = 8
"""Tenants that an account names as those that had the turns meanwhile: those with most."""


@dataclass(slots=True)
class TurnAccount:
    """How a sequence fared in steps that had no token for every decoding sequence."""

    turn_tokens: int = 0
    sat_out_own: int = 0
    sat_out_share: int = 0
    sat_out_tier: int = 0
    sat_out_for: dict[str, int] = field(default_factory=dict)
    last_turn: int = 0
    """When it last had a token in such a step, or the time before it first took part; 0: it did not."""
    missed: int = 0
    """Such steps that it sat out in a row, up to `missed_step`."""
    missed_step: int = 0

    def share(self, emitted_tokens: int) -> DecodeShare:
        most = sorted(self.sat_out_for.items(), key=lambda item: (-item[1], item[0]))[:KEPT_TENANTS]
        turn_tokens = min(self.turn_tokens, emitted_tokens)
        return DecodeShare(
            floor_tokens=emitted_tokens - turn_tokens,
            turn_tokens=turn_tokens,
            sat_out_own=self.sat_out_own,
            sat_out_share=self.sat_out_share,
            sat_out_tier=self.sat_out_tier,
            sat_out_for=dict(most),
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens inside an engine. Only the sequence table changes `state` and `block_table`."""

    submit: Submit
    gateway_id: str
    submitted_s: float
    """The engine's clock."""
    token_ids: list[int]
    """Prompt, then output."""
    prompt_tokens: int
    lease_tokens: int
    predicted_output_tokens: int
    seed: int
    predicted_high_tokens: int = 0
    state: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    """Tokens whose keys and values are in the cache now."""
    ever_computed_tokens: int = 0
    """Maximum of `computed_tokens` so far, without what is in flight; tokens below it are never charged
    again."""
    pending_tokens: int = 0
    """Output tokens at the end of `token_ids` that steps in flight will choose: their ids are not known."""
    in_flight_tokens: int = 0
    """Of `computed_tokens`, those of steps in flight."""
    in_flight_first_time: int = 0
    """Of those, prompt tokens computed for the first time."""
    launches_dropped: int = 0
    """How often what was in flight for it was dropped: what was launched before comes to nothing."""
    row: int = -1
    """Its place in the model runner while it runs."""
    has_begun: bool = False
    """The model runner knows that it has this row."""
    is_chained: bool = False
    """Its row has its last token already: the step before chose it there."""
    charged_prompt_tokens: int = 0
    """Prompt tokens charged: at the start all that are not cached; corrected at the end."""
    recomputed_tokens: int = 0
    preemptions: int = 0
    times_displaced: int = 0
    """Preemptions suffered while running: these are bounded, then the sequence is immune."""
    times_set_back: int = 0
    """Places lost to an owed tenant of its tier; bounded likewise (`engine/core/places.py`)."""
    set_back_at: int = 0
    """Its service (`attained_tokens`) when it last lost its place that way."""
    host_kv: list[bytes] = field(default_factory=list)
    """KV that came with an import, to be written into blocks when it is admitted."""
    host_kv_tokens: int = 0
    paused_since_s: float = 0.0
    is_suspended: bool = False
    """Paused so that others of its tier may form a batch without it."""
    cached_tokens: int = 0
    swapped: SwapOut | None = None
    match: Match | None = None
    """Its last prefix match, while it waits."""
    found_tokens: int = 0
    """Prompt tokens that were in the prefix cache when it arrived."""
    cursor: PrefixCursor = field(init=False, repr=False)
    """Position of its block table in the prefix cache; set by the sequence table."""
    locality: int = 0
    """Equal and non-zero for prompts with a common prefix."""
    yields_cost: int = 0
    """See `QueueEntry.yields_cost`; 0: small compared to the cache. Set by the sequence table."""
    token_charge: int = 0
    """Charge of an emitted token to its tenant's counter; set by the sequence table."""
    owner: tuple[str, str] = field(init=False, repr=False)
    turns: TurnAccount = field(default_factory=TurnAccount)
    decisions: list[Decision] = field(default_factory=list)
    chunks: list[tuple[float, int]] = field(default_factory=list)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    unread_s: float = 0.0
    lease_gpu_us: int | None = None
    """Device time covered so far; None: not limited."""
    constraint: Constraint | None = None
    """Of its grammar, once that is compiled."""
    awaits_grammar: bool = False
    """Its grammar is being compiled: it waits outside of the queue."""
    kept_tokens: int = 0
    """Of a lease that does not cover all: for the end of its answer."""
    forced_tokens: int = 0
    """Output tokens that its grammar left no choice of: no step sampled them."""
    is_closed: bool = False
    """It was cut, and its last tokens are an end by its grammar."""
    gpu_us: int = 0
    """Its share of the device time of its steps (`engine/core/gpu_time.py`), recomputation apart."""
    recomputed_gpu_us: int = 0

    def __post_init__(self) -> None:
        self.owner = (self.submit.tenant_id, self.gateway_id)

    @staticmethod
    def of(submit: Submit, gateway_id: str, now_s: float) -> Sequence:
        return Sequence(
            submit=submit,
            gateway_id=gateway_id,
            submitted_s=now_s,
            token_ids=list(submit.prompt_token_ids),
            prompt_tokens=len(submit.prompt_token_ids),
            lease_tokens=submit.lease_tokens,
            lease_gpu_us=submit.lease_gpu_us,
            predicted_output_tokens=min(max(1, submit.predicted_output_tokens), submit.max_tokens),
            predicted_high_tokens=submit.predicted_high_tokens,
            seed=stable_seed(submit),
        )

    @staticmethod
    def restored(exported: SequenceState, now_s: float) -> Sequence:
        """A sequence from another engine. Without a lease for its next token it rests until topped up."""
        sequence = Sequence.of(exported.submit, exported.gateway_id, now_s)
        sequence.token_ids.extend(exported.output_token_ids)
        sequence.ever_computed_tokens = exported.kv_tokens
        sequence.cached_tokens = exported.cached_tokens
        sequence.gpu_us = exported.gpu_us
        sequence.recomputed_gpu_us = exported.recomputed_gpu_us
        sequence.forced_tokens = exported.forced_tokens
        sequence.charged_prompt_tokens = sequence.computed_prompt_tokens
        if exported.kv:
            sequence.host_kv = exported.kv
            sequence.host_kv_tokens = exported.kv_tokens
        if not sequence.may_emit:
            sequence.state = SequenceStatus.PREEMPTED
        return sequence

    @property
    def sequence_id(self) -> str:
        return self.submit.sequence_id

    @property
    def tenant_id(self) -> str:
        return self.submit.tenant_id

    @property
    def tier(self) -> int:
        return self.submit.tier

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def emitted_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def known_tokens(self) -> int:
        """Emitted tokens whose ids are known."""
        return len(self.token_ids) - self.prompt_tokens - self.pending_tokens

    @property
    def is_ending(self) -> bool:
        """Its last token is in flight: it needs no further step, and gives way to none."""
        return self.emitted_tokens >= self.submit.max_tokens

    @property
    def predicted_tokens(self) -> int:
        """Tokens in the cache at its end, as predicted."""
        return self.prompt_tokens + self.predicted_output_tokens

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens in the cache: the last one emitted is never fed back."""
        return self.prompt_tokens + self.submit.max_tokens - 1

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens computed for it, each counted once."""
        return min(self.ever_computed_tokens, self.prompt_tokens) - self.cached_tokens

    @property
    def attained_tokens(self) -> int:
        return self.computed_prompt_tokens + self.emitted_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether its next tokens are those of a prompt, or are computed once more after a preemption."""
        computed = self.computed_tokens
        return computed < self.prompt_tokens or len(self.token_ids) - computed > DECODE_TOKENS

    @property
    def may_emit(self) -> bool:
        most = self.most_emitted
        return self.emitted_tokens < most and not self.is_out_of_time and not self.awaits_grammar

    @property
    def most_emitted(self) -> int:
        """Tokens that it may emit by its lease as it is."""
        most, lease = self.submit.max_tokens, self.lease_tokens
        return most if lease >= most else lease - self.kept_tokens

    @property
    def is_out_of_time(self) -> bool:
        return self.lease_gpu_us is not None and self.gpu_us >= self.lease_gpu_us

    def first_time_prompt_tokens(self, position: int, tokens: int) -> int:
        """Number of prompt tokens among the `tokens` from `position` that were never computed before."""
        before = max(position, self.ever_computed_tokens)
        return max(0, min(position + tokens, self.prompt_tokens) - before)

    def start_row_anew(self) -> None:
        """The model runner knows nothing of its row: it hears all of it with the next step."""
        self.has_begun = self.is_chained = False
        self.cursor.handed_over = 0

    def computed_chunk(self, now_s: float, tokens: int) -> None:
        if len(self.chunks) == MAX_CHUNKS:
            tokens += self.chunks.pop()[1]
        self.chunks.append((now_s, tokens))

    def has_cached(self, tokens: int) -> None:
        """Notes that its first `tokens` tokens come from the prefix cache."""
        self.computed_tokens = tokens
        self.cached_tokens += max(0, min(tokens, self.prompt_tokens) - self.ever_computed_tokens)
        self.ever_computed_tokens = max(self.ever_computed_tokens, tokens)

    def entry(self) -> QueueEntry:
        return QueueEntry(
            entry_id=self.submit.sequence_id,
            tenant_id=self.submit.tenant_id,
            arrived_s=self.submitted_s,
            input_tokens=self.prompt_tokens,
            predicted_output_tokens=self.predicted_output_tokens,
            tier=self.submit.tier,
            weight=self.submit.weight,
            predicted_high_tokens=self.predicted_high_tokens,
            deadline_s=self._instant_s(self.submit.deadline_in_s),
            own_deadline_s=self._instant_s(self.submit.own_deadline_in_s),
            emitted_tokens=self.emitted_tokens,
            computed_tokens=self.computed_tokens,
            attained_tokens=self.attained_tokens,
            cached_tokens=max(self.cached_tokens, self.found_tokens),
            locality=self.locality,
            yields_cost=self.yields_cost,
        )

    def _instant_s(self, within_s: float | None) -> float | None:
        return None if within_s is None else self.submitted_s + within_s

    @property
    def salt(self) -> str:
        shared = self.submit.prefix_salt
        return f"shared {shared}" if shared else f"tenant {self.submit.tenant_id}"

    def summary(self) -> RunningSequence:
        return RunningSequence(
            sequence_id=self.submit.sequence_id,
            request_id=self.submit.request_id,
            tenant_id=self.submit.tenant_id,
            tier=self.submit.tier,
            state=self.state.value,
            prompt_tokens=self.prompt_tokens,
            computed_tokens=self.computed_tokens,
            emitted_tokens=self.known_tokens,
            max_tokens=self.submit.max_tokens,
            predicted_output_tokens=self.predicted_output_tokens,
            lease_tokens=self.lease_tokens,
            gateway_id=self.gateway_id,
        )

    def outcome(self, finish: str, message: str, now_s: float, stop_string: str = "") -> SequenceOutcome:
        """Its outcome; times are relative to the submission."""
        return SequenceOutcome(
            sequence_id=self.submit.sequence_id,
            request_id=self.submit.request_id,
            tenant_id=self.submit.tenant_id,
            finish=finish,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_prompt_tokens,
            emitted_tokens=self.emitted_tokens,
            gpu_us=self.gpu_us,
            recomputed_gpu_us=self.recomputed_gpu_us,
            index=self.submit.index,
            tier=self.submit.tier,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            scheduled_s=None if self.scheduled_s is None else self.scheduled_s - self.submitted_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s - self.submitted_s,
            finished_s=now_s - self.submitted_s,
            message=message,
            stop_string=stop_string,
            forced_tokens=self.forced_tokens,
            closed=self.is_closed,
            trace_context=self.submit.trace_context,
            decisions=[
                replace(decision, at_s=decision.at_s - self.submitted_s) for decision in self.decisions
            ],
            chunks=[(at_s - self.submitted_s, tokens) for at_s, tokens in self.chunks],
            decode=self.turns.share(self.emitted_tokens),
            unread_s=self.unread_s,
        )


def move(sequence: Sequence, state: SequenceStatus) -> None:
    """Changes a sequence's state; the only place that does. Raises `IllegalMove`."""
    if state not in MOVES[sequence.state]:
        raise IllegalMove(f"sequence {sequence.sequence_id!r}: {sequence.state} cannot become {state}")
    sequence.state = state
