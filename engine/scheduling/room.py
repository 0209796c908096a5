"""What the step under construction can still hold: filled by the scheduler, read by the compose choices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from engine.entry import OUTPUT_TOKEN_COST
from engine.messages import StepTime
from engine.scheduling.step_counters import StepCounters
from engine.sequence import Sequence
from engine.sizes import DECODE_TOKENS
from engine.step_time.model import predict_step_s

UNLIMITED = 1 << 40
"""Tokens of prompts that are still to come."""


@dataclass(slots=True)
class DecodeContest:
    """Decoding sequences of one tier that are more than the step has slots for."""

    tier: int
    sequences: list[Sequence]


@dataclass(slots=True)
class Room:
    """What one step may hold, and what it holds so far."""

    now_s: float
    tokens: int
    """Tokens that the step's budget still has."""
    counters: StepCounters
    step_time: StepTime
    tier_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens that the step still has for each braked tier."""
    context_tokens: int = 4096
    """The longest sequence that the model takes."""
    num_waiting: int = 0
    step: int = 0
    tightest_tpot_s: float = 0.0
    """The shortest pace that a running sequence has as its target; 0: none has one."""
    prompts_ahead: int = 0
    """Prompt tokens that are to be handed out later in this step; `UNLIMITED` where some wait."""
    prefilling: Collection[Sequence] = ()
    """Running sequences with an unfinished prompt, as they are now."""
    waiting_tenants: Mapping[str, int] = field(default_factory=dict)
    """Waiting sequences by tenant, as they are now."""
    placed: Collection[Sequence] = ()
    auto_slots: int = 0
    """Decoding sequences at most, where the policy leaves the number to the step-time model; 0: no limit."""
    slots: int | None = None
    """Decoding sequences that it has room for; None: as many as its tokens suffice for."""
    contests: list[DecodeContest] = field(default_factory=list)
    """Of the decoding sequences, by tier; none where each of them is in the step."""
    held_prompts: set[tuple[int, str]] = field(default_factory=set)
    """Tiers and tenants whose prompts got less than they could take."""
    used_tokens: int = 0
    used_context: int = 0
    used_sequences: int = 0
    prefills: int = 0
    given: dict[Sequence, int] = field(default_factory=dict)
    unfinished: dict[Sequence, int] = field(default_factory=dict)
    """Prompts that got more than a decode and stay unfinished after this step -> tokens left before it."""

    def draft(self) -> Room:
        """A copy to try a composition on: the same numbers, nothing given yet."""
        return Room(
            now_s=self.now_s,
            tokens=self.tokens,
            counters=self.counters,
            step_time=self.step_time,
            tier_tokens=dict(self.tier_tokens),
            context_tokens=self.context_tokens,
            num_waiting=self.num_waiting,
            step=self.step,
            auto_slots=self.auto_slots,
            used_tokens=self.used_tokens,
            used_context=self.used_context,
            used_sequences=self.used_sequences,
            prefills=self.prefills,
            unfinished=dict(self.unfinished),
        )

    def tokens_of(self, tier: int) -> int:
        return min(self.tokens, self.tier_tokens.get(tier, self.tokens))

    @property
    def decodes_left(self) -> int:
        """Decoding sequences that the tokens left suffice for."""
        return self.tokens // DECODE_TOKENS

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Notes a grant of `tokens` to `sequence`, which has none yet in this step."""
        self.given[sequence] = tokens
        left = sequence.total_tokens - sequence.computed_tokens
        if left > tokens > DECODE_TOKENS:
            self.unfinished[sequence] = left
        self._add(sequence, tokens, 1)

    def take_decodes(self, sequences: list[Sequence]) -> None:
        """Notes the tokens of many decoding sequences; the same as `take`, in one go."""
        given = dict.fromkeys(sequences, DECODE_TOKENS)
        if self.given:
            self.given.update(given)
        else:
            self.given = given
        count = len(sequences)
        self.tokens -= DECODE_TOKENS * count
        self.used_tokens += DECODE_TOKENS * count
        self.used_sequences += count
        self.used_context += decode_context(count, sum([sequence.computed_tokens for sequence in sequences]))
        for sequence in sequences if self.tier_tokens else ():
            self._take_of_tier(sequence, DECODE_TOKENS)

    def give_back(self, sequence: Sequence) -> None:
        tokens = self.given.pop(sequence, 0)
        if tokens:
            self.unfinished.pop(sequence, None)
            self._add(sequence, tokens, -1)

    def predicted_s(self, sequence: Sequence | None = None, tokens: int = 0) -> float:
        """The step's predicted time, with `tokens` more for `sequence`."""
        if sequence is None:
            return self.predicted_with_s(0, 0, 0)
        return self.predicted_with_s(tokens, attended_tokens(sequence.computed_tokens, tokens), 1)

    def predicted_with_s(self, tokens: int, context: int, sequences: int) -> float:
        return predict_step_s(
            self.step_time,
            self.used_tokens + tokens,
            self.used_context + context,
            max(1, self.used_sequences + sequences),
        )

    def predicted_decodes_s(self, decodes: int, computed: int) -> float:
        return self.predicted_with_s(DECODE_TOKENS * decodes, decode_context(decodes, computed), decodes)

    def tokens_within(self, sequence: Sequence, most: int, step_s: float) -> int:
        """The most tokens, up to `most`, that `sequence` may get before the step takes `step_s`."""
        if self.predicted_s(sequence, most) <= step_s:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if self.predicted_s(sequence, middle) <= step_s:
                low = middle
            else:
                high = middle
        return low

    def _add(self, sequence: Sequence, tokens: int, sign: int) -> None:
        self.tokens -= sign * tokens
        self.used_tokens += sign * tokens
        self.used_context += sign * attended_tokens(sequence.computed_tokens, tokens)
        self.used_sequences += sign
        self.prefills += sign * (sequence.total_tokens - sequence.computed_tokens > DECODE_TOKENS)
        self._take_of_tier(sequence, sign * tokens)

    def _take_of_tier(self, sequence: Sequence, tokens: int) -> None:
        tier = sequence.submit.tier
        if tier in self.tier_tokens:
            self.tier_tokens[tier] -= tokens


def attended_tokens(position: int, num_tokens: int) -> int:
    """Context that a slice's tokens attend to, each to all tokens up to itself."""
    return num_tokens * position + num_tokens * (num_tokens + 1) // 2


def decode_context(decodes: int, computed_tokens: int) -> int:
    """Context that a step's decodes attend to, all together; `computed_tokens`: their sum."""
    return DECODE_TOKENS * computed_tokens + decodes * attended_tokens(0, DECODE_TOKENS)


# Large and small requests, beside the cache. Where memory is short the first in line holds up all others: a
# large request waits until much is free, while small ones, let past, hardly delay it. So both wait in lanes
# of their own (`engine/scheduling/order/hybrid.py`), and small ones may take a little of the memory promised
# to large ones (`engine/scheduling/admit/reserve.py`). Only an engine knows the cache: in a gateway no entry
# is large.

SMALL_PERMILLE = 25
"""Of the cache. Small is what at least forty of fit in."""
YIELDS_PERMILLE = 400
"""Of U, the cost of all tokens that the cache holds: VTC's bound on the difference of tenants is 2U."""


def yields_cost(total_tokens: int, cache_tokens: int) -> int:
    """How many cost tokens the tenant of a request may fall behind those of small ones; 0: it is small.
    `total_tokens`: its prompt and predicted output; `cache_tokens`: what the KV cache holds."""
    if total_tokens * 1000 <= cache_tokens * SMALL_PERMILLE:
        return 0
    return OUTPUT_TOKEN_COST * cache_tokens * YIELDS_PERMILLE // 1000
