"""Usage of a request, and what is charged for it.

Input tokens computed or found in the prefix cache plus output tokens emitted, end-of-sequence included, over
all sequences. A prompt is charged once, however many choices it has, as OpenAI bills it; never recomputation
after a preemption, nor more than was held. The request itself (meter `requests`) counts once an engine has
taken it up. The engine's outcome decides; without it, what reached the gateway.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from engine.messages import Delta, SequenceOutcome
from tenants.types import Amounts


@dataclass(slots=True)
class SequenceUse:
    prompt_tokens: int
    input_tokens: int = 0
    """Computed or found in the cache."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    """Of the output: service like input."""
    gpu_us: int = 0
    foreseen_tokens: tuple[int, int] | None = None
    """Median and 90th percentile of its whole output, as the engine foresees it."""
    outcome: SequenceOutcome | None = None
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    """Those that arrived: with the characters of text that did, what another engine needs to go on."""
    characters: int = 0

    def received(self, delta: Delta) -> None:
        """The first token proves that the prompt was computed."""
        self.gpu_us = max(self.gpu_us, delta.gpu_us)
        self.forced_tokens = max(self.forced_tokens, delta.forced_tokens)
        self.foreseen_tokens = delta.foreseen_tokens or self.foreseen_tokens
        self.characters += len(delta.text)
        if delta.token_ids:
            self.token_ids.extend(delta.token_ids)
            self.output_tokens += len(delta.token_ids)
            self.input_tokens = self.prompt_tokens
            self.cached_tokens = delta.cached_tokens
            self.computed_tokens = self.prompt_tokens - delta.cached_tokens

    def ended(self, outcome: SequenceOutcome) -> None:
        self.outcome = outcome
        self.input_tokens = min(self.prompt_tokens, outcome.computed_tokens + outcome.cached_tokens)
        self.computed_tokens = outcome.computed_tokens
        self.cached_tokens = outcome.cached_tokens
        self.output_tokens = outcome.emitted_tokens
        self.forced_tokens = outcome.forced_tokens
        self.gpu_us = outcome.gpu_us


class Use(msgspec.Struct, frozen=True):
    """What a whole request used, before pricing."""

    input_tokens: int
    """To charge: each prompt once."""
    computed_tokens: int
    """Service: what the engine really computed, for every sequence."""
    cached_tokens: int
    output_tokens: int
    dispatched: bool
    gpu_us: int = 0
    forced_tokens: int = 0

    @property
    def served(self) -> tuple[int, int]:
        """Input and output tokens, as they count in the service."""
        return self.computed_tokens + self.forced_tokens, self.output_tokens - self.forced_tokens

    @property
    def gpu_ms(self) -> int:
        """Rounded up, once for the whole request."""
        return -(-self.gpu_us // 1000)


def use_of(sequences: Sequence[SequenceUse], choices: int, *, dispatched: bool) -> Use:
    """Sequence i belongs to prompt `i // choices`."""
    input_tokens = computed_tokens = cached_tokens = output_tokens = gpu_us = 0
    for sequence in sequences:
        computed_tokens += sequence.computed_tokens
        output_tokens += sequence.output_tokens
        gpu_us += sequence.gpu_us
    for start in range(0, len(sequences), choices):
        of_prompt = sequences[start : start + choices]
        input_tokens += max([sequence.input_tokens for sequence in of_prompt])
        # Later choices may find what the first computed: only what none of them computed was cached.
        begun = [sequence.cached_tokens for sequence in of_prompt if sequence.input_tokens]
        if begun:
            cached_tokens += min(begun)
    cached_tokens = min(cached_tokens, input_tokens)
    forced_tokens = sum([sequence.forced_tokens for sequence in sequences])
    return Use(input_tokens, computed_tokens, cached_tokens, output_tokens, dispatched, gpu_us, forced_tokens)


def longest_outcomes(outcomes: Sequence[SequenceOutcome]) -> list[SequenceOutcome]:
    """One for each sequence. Of several, as it moved or was tried again, the longest includes the others."""
    ascending = sorted(outcomes, key=lambda outcome: (outcome.emitted_tokens, outcome.gpu_us))
    return list({outcome.index: outcome for outcome in ascending}.values())


def use_of_outcomes(outcomes: Sequence[SequenceOutcome], prompt_tokens: Sequence[int], choices: int) -> Use:
    """`use_of` from the outcomes that engines kept for a dead gateway, and the reserve row. A sequence
    without an outcome is not charged."""
    sequences = [SequenceUse(tokens) for tokens in prompt_tokens for _ in range(choices)]
    for outcome in longest_outcomes(outcomes):
        if 0 <= outcome.index < len(sequences):
            sequences[outcome.index].ended(outcome)
    return use_of(sequences, choices, dispatched=bool(outcomes))


def charge(use: Use, cost_nanousd: int, held: Amounts) -> Amounts:
    """The amounts to settle: each within what was held, except device time, known only after a step."""
    return Amounts(
        input_tokens=min(use.input_tokens, held.input_tokens),
        output_tokens=min(use.output_tokens, held.output_tokens),
        cost_nanousd=min(cost_nanousd, held.cost_nanousd),
        requests=held.requests if use.dispatched else 0,
        gpu_ms=use.gpu_ms if use.dispatched else 0,
    )
